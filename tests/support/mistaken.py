"""A right task whose every part a config can replace by a mistaken one; see test_mistakes.py."""

import keras
import numpy as np
import tensorflow as tf

import loopwright
from loopwright import ArraySource, Loss, StreamSource, Task

X = np.random.default_rng(0).normal(size=[10, 3]).astype(np.float32)
Y = X.sum(axis=1)


@loopwright.register
class Toy(Task):
  """Linear regression on ten points."""

  def __init__(
    self, *, model=None, source=None, preprocess=None, outputs=None, loss=None, metrics=None,
    optimizer="default",
  ):  # fmt: skip
    self._model, self._source, self._preprocess = model, source, preprocess
    self._outputs, self._loss, self._metrics = outputs, loss, metrics
    self._optimizer = optimizer

  def build_model(self):
    return (self._model or linear)()

  def source(self, split):
    return (self._source or points)()

  def preprocess(self, batch, training):
    return self._preprocess(batch) if self._preprocess else batch

  def forward(self, batch, training):
    outputs = self.model(batch["x"], training=training)
    return self._outputs(outputs) if self._outputs else outputs

  def loss(self, outputs, batch):
    return (self._loss or squares)(outputs, batch)

  def metrics(self, outputs, batch):
    return self._metrics(outputs, batch) if self._metrics else {}

  def train_step(self, step, batch):
    step.update(lambda part: self.training_loss(step, part), batch, self._optimizer)


@loopwright.register
class WithoutForward(Task):
  def build_model(self):
    return linear()

  def source(self, split):
    return points()


# Models.


def linear():
  return keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])


@loopwright.register
def no_model():
  keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])


@loopwright.register
def no_instance():
  return keras.Sequential


# Sources.


def points():
  return ArraySource(features={"x": X, "y": Y})


@loopwright.register
def unequal_features():
  return ArraySource(features={"x": X, "y": Y[:7]})


@loopwright.register
def bare_dataset():
  return tf.data.Dataset.from_tensor_slices({"x": X, "y": Y})


@loopwright.register
def stream_of_full_batches():
  return StreamSource(dataset=bare_dataset().batch(5, drop_remainder=True))


@loopwright.register
def empty_stream():
  return StreamSource(dataset=bare_dataset().filter(lambda example: False))


@loopwright.register
def weightless():
  return ArraySource(features={"x": X, "y": Y, "weight": np.zeros(10, np.float32)})


@loopwright.register
def negative_weights():
  return ArraySource(features={"x": X, "y": Y, "weight": -np.ones(10, np.float32)})


@loopwright.register
def narrow_points():
  return ArraySource(features={"x": X[:, :2], "y": Y})


# Preprocessing.


@loopwright.register
def dropping_rows(batch):
  return {name: value[:2] for name, value in batch.items()}


# Outputs.


@loopwright.register
def crashing(outputs):
  return outputs["logits"]


@loopwright.register
def printing(outputs):
  print(outputs.numpy())
  return outputs


# Losses.


def squares(outputs, batch):
  return Loss.from_examples(tf.square(outputs[:, 0] - batch["y"]), batch["weight"])


@loopwright.register
def mean_of_squares(outputs, batch):
  return tf.reduce_mean(tf.square(outputs[:, 0] - batch["y"]))


@loopwright.register
def column_of_squares(outputs, batch):
  return Loss.from_examples(tf.square(outputs - batch["y"][:, None]), batch["weight"])


@loopwright.register
def short_weight(outputs, batch):
  return Loss.from_examples(tf.square(outputs[:, 0] - batch["y"]), batch["weight"][:1])


@loopwright.register
def untouching(outputs, batch):
  return Loss.from_examples(tf.square(batch["y"]), batch["weight"])


@loopwright.register
def roots(outputs, batch):
  return Loss.from_examples(tf.sqrt(outputs[:, 0] * 0.0 - 1.0), batch["weight"])


@loopwright.register
def class_losses(outputs, batch):
  labels = tf.fill([tf.shape(outputs)[0]], 5)
  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=outputs)
  return Loss.from_examples(losses, batch["weight"])


@loopwright.register
def mismatched(outputs, batch):
  return Loss.from_examples(tf.reduce_sum(outputs @ tf.ones([3, 1]), axis=1), batch["weight"])


@loopwright.register
def misspelt(outputs, batch):
  return Loss.from_examples(outputs[:, 0], batch["wieght"])


# Metrics.


@loopwright.register
def mean_error(outputs, batch):
  return {"error": tf.reduce_mean(tf.abs(outputs[:, 0] - batch["y"]))}
