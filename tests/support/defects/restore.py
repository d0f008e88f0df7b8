"""State that no checkpoint holds, and models and data that are others after a restart."""

import keras
import numpy as np
import sound
import tensorflow as tf
from toys import network

from loopwright import ArraySource


class Counter(sound.Regression):
  """A curriculum that counts steps in Python, through numpy_function."""

  def __init__(self):
    self.progress = {"steps": 0}

  def difficulty(self):
    self.progress["steps"] += 1
    return np.float32(self.progress["steps"])

  def forward(self, batch, training):
    level = tf.ensure_shape(tf.numpy_function(self.difficulty, [], tf.float32), [])
    return super().forward(batch, training) * level


class History(sound.Regression):
  """A list of losses, for a plot."""

  def __init__(self):
    self.history = []

  def remember(self, loss):
    self.history.append(float(loss))
    return loss

  def loss(self, outputs, batch):
    loss = super().loss(outputs, batch)
    with tf.control_dependencies([tf.numpy_function(self.remember, [loss.total], tf.float32)]):
      return loss._replace(total=tf.identity(loss.total))


class Generator(sound.Regression):
  """Noise from a tf.random.Generator."""

  def build_model(self):
    self.noise = tf.random.Generator.from_seed(3)
    return super().build_model()

  def forward(self, batch, training):
    x = batch["x"] + self.noise.normal(tf.shape(batch["x"]))
    return self.model(x, training=training)[:, 0]


class Stateful(sound.Regression):
  """Noise from an op that counts its own calls."""

  def forward(self, batch, training):
    x = batch["x"] + tf.random.normal(tf.shape(batch["x"]))
    return self.model(x, training=training)[:, 0]


class NumpyNoise(sound.Regression):
  """Noise from NumPy's global generator."""

  def forward(self, batch, training):
    noise = tf.numpy_function(lambda: np.float32(np.random.normal()), [], tf.float32)
    return super().forward(batch, training) + tf.ensure_shape(noise, [])


class Metric(sound.Regression):
  """A metric of Keras, updated in the step."""

  def build_model(self):
    self.mean_error = self.library.metrics.Mean(name="mean_error")
    return super().build_model()

  def metrics(self, outputs, batch):
    self.mean_error.update_state(tf.abs(outputs - batch["y"]))
    return {}


class Late(sound.Regression):
  """A head that is built by its first call, in the first step."""

  def build_model(self):
    body = keras.Sequential([keras.Input([6]), keras.layers.Dense(8)])
    return {"body": body, "head": keras.layers.Dense(1, name="head")}

  def forward(self, batch, training):
    return self.model["head"](self.model["body"](batch["x"]))[:, 0]


class Vocabulary(sound.Words):
  """A vocabulary that each start adds to."""

  words = list(range(11))

  def build_model(self):
    self.words.append(len(self.words))
    layers = keras.layers
    return network([5], layers.Embedding(len(self.words), 4), layers.GRU(4), layers.Dense(1))


class Augmented(sound.Regression):
  """Augmentation that does not draw from batch["seed"]."""

  def preprocess(self, batch, training):
    noise = tf.random.uniform(tf.shape(batch["x"]), -0.1, 0.1)
    return {**batch, "x": batch["x"] + noise}


class Shuffled(sound.Regression):
  """Examples permuted anew, without a seed, by each process."""

  def __init__(self):
    self.order = np.random.default_rng().permutation(len(sound.X))

  def source(self, split):
    x = sound.X[self.order]
    return ArraySource(features={"x": x, "y": np.sin(x.sum(1))})


class Projected(sound.Regression):
  """A random projection that is drawn without a seed."""

  def __init__(self):
    self.projection = np.random.default_rng().normal(size=[6, 6]).astype(np.float32)

  def forward(self, batch, training):
    return self.model(batch["x"] @ self.projection, training=training)[:, 0]


class Counting(tf.Module):
  """Whole numbers that each replica counts for itself."""

  def __init__(self):
    super().__init__()
    self.updates = tf.Variable(
      0, trainable=False, dtype=tf.int64, name="updates",
      synchronization=tf.VariableSynchronization.ON_READ,
      aggregation=tf.VariableAggregation.SUM,
    )  # fmt: skip


class PerReplica(sound.Regression):
  """A count of updates that is local to each replica."""

  def build_model(self):
    return {"network": super().build_model(), "seen": Counting()}

  def forward(self, batch, training):
    self.model["seen"].updates.assign_add(1)
    return self.model["network"](batch["x"], training=training)[:, 0]
