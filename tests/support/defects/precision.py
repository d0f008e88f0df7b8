"""Steps that half precision makes another of."""

import keras
import sound
import tensorflow as tf
from toys import network

from loopwright import Loss


class Network(sound.Regression):
  """A network of one output; `forward` gives it in the dtype of the policy."""

  units = 1

  def build_model(self):
    layers = self.library.layers
    hidden = layers.Dense(16, activation="tanh")
    return network([6], hidden, layers.Dense(self.units), library=self.library)


class Mixed(Network):
  """Half-precision outputs and float32 labels, without a cast."""

  def loss(self, outputs, batch):
    return Loss.from_examples(tf.square(outputs - batch["y"]), batch["weight"])


class Tiny(Network):
  """A loss in units that make it small."""

  def loss(self, outputs, batch):
    error = outputs - tf.cast(batch["y"], outputs.dtype)
    return Loss.from_examples(1e-7 * tf.cast(error, tf.float32) ** 2, batch["weight"])


class Squares(Network):
  """Squares of features that nobody scaled."""

  def preprocess(self, batch, training):
    return {**batch, "x": 300.0 * batch["x"]}

  def forward(self, batch, training):
    x = tf.cast(batch["x"], self.model.compute_dtype)
    x = tf.square(x)
    return self.model(x / 90000.0, training=training)[:, 0]


class Wide(Network):
  """A mean over more elements than float16 can count."""

  units = 70000

  def forward(self, batch, training):
    outputs = self.model(batch["x"], training=training)
    return tf.reduce_mean(outputs, axis=1)


class Total(Wide):
  """A sum that float16 does not reach."""

  def forward(self, batch, training):
    outputs = self.model(batch["x"], training=training)
    return tf.reduce_sum(tf.square(outputs + 1.0), axis=1)


class Logarithm(Network):
  """The logarithm of a probability that float16 makes zero, with an epsilon that it makes zero."""

  units = 3

  def forward(self, batch, training):
    logits = self.model(batch["x"], training=training)
    return tf.nn.softmax(logits * 100.0)

  def loss(self, outputs, batch):
    losses = -tf.math.log(outputs[:, 0] + 1e-8)
    return Loss.from_examples(losses, batch["weight"])

  def metrics(self, outputs, batch):
    return {}


class Running(Network):
  """A running total along 4096 positions, in bfloat16."""

  units = 4096

  def forward(self, batch, training):
    outputs = self.model(batch["x"], training=training)
    totals = tf.cumsum(outputs + 1.0, axis=1)
    return tf.sin(tf.cast(totals[:, -1], tf.float32) / 64.0)


class InFloat32(Network):
  """Layers with a dtype of their own, whatever the policy."""

  def build_model(self):
    layers = [keras.layers.Dense(8, dtype="float32"), keras.layers.Dense(1, dtype="float32")]
    return keras.Sequential([keras.Input([6], dtype="float32"), *layers])
