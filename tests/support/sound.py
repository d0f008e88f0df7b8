"""Small tasks without a mistake, of many kinds: verification must have nothing against them."""

import functools

import keras
import numpy as np
import reviews
import tensorflow as tf
from toys import KERAS, network

from loopwright import ArraySource, Loss, Task, weighted_sum
from loopwright.optimizers import schedules
from loopwright.tasks import image_classification, text_classification
from loopwright.tasks.gan import Gan
from loopwright.tools.verify.bench.bench import Subject

RNG = np.random.default_rng(0)
X = RNG.normal(size=[30, 6]).astype(np.float32)
WORDS = RNG.integers(0, 11, size=[30, 5]).astype(np.int32)
IMAGES = RNG.integers(0, 256, size=[30, 28, 28, 1], dtype=np.uint8)


class Regression(Task):
  """The sine of a sum, by a small network of either Keras generation, with dropout."""

  library = keras

  def build_model(self):
    return network([6], *self.hidden(self.library.layers), library=self.library)

  def hidden(self, layers):
    dense = layers.Dense(16, activation="tanh", kernel_regularizer="l2")
    return [dense, layers.Dropout(0.25), layers.Dense(1, dtype="float32")]

  def source(self, split):
    return ArraySource(features={"x": X, "y": np.sin(X.sum(1))})

  def preprocess(self, batch, training):
    if not training:
      return batch
    noise = tf.cast(batch["seed"][:, :1] % 1000, tf.float32) / 1000
    return {**batch, "x": batch["x"] + 0.1 * noise}

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)[:, 0]

  def loss(self, outputs, batch):
    error = tf.cast(outputs, tf.float32) - batch["y"]
    return Loss.from_examples(tf.square(error), batch["weight"])

  def metrics(self, outputs, batch):
    error = tf.cast(outputs, tf.float32) - batch["y"]
    return {"mae": weighted_sum(tf.abs(error), batch["weight"])}


class Normalised(Regression):
  """With batch normalisation."""

  def hidden(self, layers):
    normalised = [layers.Dense(16), layers.BatchNormalization(), layers.ReLU()]
    return [*normalised, layers.Dense(1, dtype="float32")]


class Words(Regression):
  """An embedding and a GRU over sequences of words."""

  def build_model(self):
    layers = keras.layers
    return network([5], layers.Embedding(11, 8), layers.GRU(8), layers.Dense(1, dtype="float32"))

  def source(self, split):
    return ArraySource(features={"x": WORDS, "y": np.sin(WORDS.sum(1)).astype(np.float32)})

  def preprocess(self, batch, training):
    return batch


class Module(Regression):
  """A tf.Module with a counter; a Python attribute that counts traces, which changes nothing."""

  traced = 0

  def build_model(self):
    made, first = tf.Module(), tf.VariableAggregation.ONLY_FIRST_REPLICA
    made.kernel = tf.Variable(np.linspace(-1, 1, 6, dtype=np.float32)[:, None], name="kernel")
    made.bias = tf.Variable([0.0], name="bias")
    made.seen = tf.Variable(0, trainable=False, aggregation=first, name="seen")
    return made

  def forward(self, batch, training):
    self.traced += 1
    self.model.seen.assign_add(1)
    return (batch["x"] @ self.model.kernel + self.model.bias)[:, 0]


class Residual(keras.Model):
  """A subclassed model, with a block that tf.function has by itself."""

  def __init__(self):
    super().__init__()
    self.inner, self.outer = keras.layers.Dense(6, activation="relu"), keras.layers.Dense(1)
    self.outer(self.inner(keras.KerasTensor([None, 6])))

  def call(self, x, training=False):
    return self.outer(self.block(x) + x)

  @tf.function
  def block(self, x):
    return self.inner(x)


class Subclassed(Regression):
  """Two updates of one model by verbs of its own, and a branch on a tensor."""

  def build_model(self):
    model = Residual()
    model(X[:1])
    return model

  def loss(self, outputs, batch):
    error = tf.abs(tf.cast(outputs, tf.float32) - batch["y"])
    if tf.reduce_mean(error) > 100.0:
      error = tf.sqrt(error)
    return Loss.from_examples(error, batch["weight"])

  def train_step(self, step, batch):
    for _ in range(2):
      step.update(lambda part: self.training_loss(step, part), batch)


def gan():
  """The example task with two optimizers, small."""
  images = ArraySource(features={"image": IMAGES, "label": np.zeros([30], np.int32)})
  data = image_classification.ImageData(
    sources={"train": images, "eval": images}, image_shape=(28, 28, 1), labels=1
  )
  return Gan(data=data, noise_size=8, width=4, discriminator_steps=2)


def subject(task, *, library="keras", optimizer=None, **options):
  """Returns the subject of a task, given by a factory."""
  optimizer = optimizer or KERAS[library].optimizers.Adam
  return Subject(task=task, optimizer=optimizer, **{"global_batch_size": 12, **options})


def old(task):
  """The subject of a task with tf_keras."""
  return subject(type("Old", (task,), {"library": KERAS["tf_keras"]}), library="tf_keras")


def digits_cnn():
  """What configs/digits_cnn.gin says."""
  cnn = functools.partial(image_classification.cnn, dropout=0.3)
  rate = schedules.cosine_decay(initial=0.002, decay_steps=1500)
  return subject(
    lambda: image_classification.ImageClassification(
      data=image_classification.digits(), input_shape=(8, 8, 1), network=cnn, shift=1
    ),
    optimizer=lambda: keras.optimizers.Adam(learning_rate=rate),
    global_batch_size=64,
  )


def reviewed():
  """Texts with a vocabulary to learn."""
  (texts, labels), (others, other_labels) = reviews.sentences(60), reviews.sentences(30, seed=1)
  splits = {
    "train": (tuple(text.encode() for text in texts), tuple(labels)),
    "eval": (tuple(text.encode() for text in others), tuple(other_labels)),
  }
  data = text_classification.TextData(splits=splits)
  bag = functools.partial(text_classification.bag_of_ngrams, bigram_buckets=20)
  return subject(
    lambda: text_classification.TextClassification(
      data=data, network=bag, vocabulary_size=40, length=12
    )
  )


SUBJECTS = {
  "vocabulary": reviewed,
  "digits_cnn": digits_cnn,
  "regression": lambda: subject(Regression),
  "regression, tf_keras": lambda: old(Regression),
  "batch norm": lambda: subject(Normalised),
  "batch norm, tf_keras": lambda: old(Normalised),
  "embedding and RNN": lambda: subject(Words),
  "tf.Module": lambda: subject(Module, optimizer=lambda: keras.optimizers.SGD(0.01, momentum=0.9)),
  "subclassed model": lambda: subject(Subclassed, optimizer=keras.optimizers.RMSprop),
  "two optimizers": lambda: subject(
    gan, optimizer={"generator": keras.optimizers.Adam, "discriminator": keras.optimizers.SGD}
  ),
}
