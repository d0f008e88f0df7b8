"""Steps that a compiled loop does not run as they are written, or not by itself."""

import os
import tempfile
import time

import numpy as np
import sound
import tensorflow as tf

from loopwright import Loss


class Alternating(sound.Regression):
  """Another loss in every second step, by a counter in Python."""

  steps = 0

  def loss(self, outputs, batch):
    self.steps += 1
    error = outputs - batch["y"]
    return Loss.from_examples(tf.abs(error) if self.steps % 2 else error**2, batch["weight"])


class Counted(sound.Regression):
  """A tf.function that gets a Python number of calls."""

  calls = 0

  def scaled(self, x, calls):
    return x / (calls + 1)

  def forward(self, batch, training):
    self.calls += 1
    return self.model(tf.function(self.scaled)(batch["x"], self.calls), training=training)[:, 0]


class Drawn(sound.Regression):
  """Noise from NumPy, which is drawn when the step is traced."""

  def forward(self, batch, training):
    noise = np.random.normal(size=[6]).astype(np.float32)
    return self.model(batch["x"] + noise, training=training)[:, 0]


class Clocked(sound.Regression):
  """A warm-up by the clock."""

  def forward(self, batch, training):
    return super().forward(batch, training) * np.float32(time.perf_counter() % 1)


class Averaged(sound.Regression):
  """A moving average of the loss in a Python attribute."""

  average = 0.0

  def loss(self, outputs, batch):
    loss = super().loss(outputs, batch)
    self.average = 0.9 * self.average + 0.1 * tf.stop_gradient(loss.total)
    return loss._replace(total=loss.total - self.average * loss.weight)


class InNumpy(sound.Regression):
  """A score that NumPy computes."""

  def ranks(self, outputs):
    return np.argsort(outputs).astype(np.float32)

  def loss(self, outputs, batch):
    ranks = tf.ensure_shape(tf.numpy_function(self.ranks, [outputs], tf.float32), [None])
    return Loss.from_examples((outputs - batch["y"]) ** 2 + 0.0 * ranks, batch["weight"])


class Printing(sound.Regression):
  """A look at large losses, inside of a branch."""

  def loss(self, outputs, batch):
    loss = super().loss(outputs, batch)
    if loss.total > 1e6:
      tf.print("loss", loss.total)
    return loss


class Summaries(sound.Regression):
  """TensorBoard from within the step."""

  def build_model(self):
    self.writer = tf.summary.create_file_writer(tempfile.mkdtemp())
    return super().build_model()

  def metrics(self, outputs, batch):
    with self.writer.as_default(step=0):
      tf.summary.scalar("mean", tf.reduce_mean(outputs))
    return {}


class Files(sound.Regression):
  """A file that is read in every step."""

  def __init__(self):
    self.path = os.path.join(tempfile.mkdtemp(), "scale.txt")
    with open(self.path, "w") as file:
      file.write("2.0")

  def forward(self, batch, training):
    scale = tf.strings.to_number(tf.io.read_file(self.path))
    return super().forward(batch, training) * scale


class Strings(sound.Regression):
  """A hash of strings that are made in the step."""

  def forward(self, batch, training):
    names = tf.strings.as_string(tf.cast(batch["example_id"], tf.int32))
    buckets = tf.strings.to_hash_bucket_fast(names, 6)
    return super().forward(batch, training) + tf.cast(buckets, tf.float32)


class Selecting(sound.Regression):
  """The loss of selected rows alone: shapes that depend on values."""

  def loss(self, outputs, batch):
    error = tf.boolean_mask(outputs - batch["y"], outputs < 10.0)
    return Loss(tf.reduce_sum(error**2), tf.reduce_sum(batch["weight"]))


class Negative(sound.Regression):
  """A negative seed, of which XLA makes other numbers than TensorFlow."""

  def forward(self, batch, training):
    noise = tf.random.stateless_uniform([12], [-3, -5], 0, 100, tf.int32)
    return super().forward(batch, training) + tf.cast(noise, tf.float32)


class Unseeded(sound.Regression):
  """Random numbers with a state: nothing to compare."""

  def forward(self, batch, training):
    return super().forward(batch, training) + tf.random.normal([12])
