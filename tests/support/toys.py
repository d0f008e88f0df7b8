"""Toy tasks: regression by a small model, of which a test says no more than what is its own."""

import keras
import numpy as np
import tensorflow as tf
import tf_keras

from loopwright import ArraySource, Loss, Task

KERAS = {"keras": keras, "tf_keras": tf_keras}


class Regression(Task):
  """The squared error of a model's first output for "x"; `features` are the arrays of each split.

  With `model`, a function that makes it. What differs is overridden: `losses` gives one per row.
  """

  features = None

  def __init__(self, model=None, features=None):
    self.make = model
    if features is not None:
      self.features = features

  def build_model(self):
    return self.make()

  def source(self, split):
    return ArraySource(features=self.features)

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)[:, 0]

  def losses(self, outputs, batch):
    return tf.square(outputs - batch["y"])

  def loss(self, outputs, batch):
    return Loss.from_examples(self.losses(outputs, batch), batch["weight"])


def network(inputs, *layers, library=keras):
  """Returns a model of layers one after the other; `inputs` is the shape of one example."""
  return library.Sequential([library.Input(inputs), *layers])


def linear(kernel, library=keras, **options):
  """Returns a dense layer with one output, no bias and the weights `kernel`, [inputs]."""
  kernel = np.reshape(np.asarray(kernel, np.float32), [-1, 1])
  dense = library.layers.Dense(1, use_bias=False, kernel_initializer="zeros", **options)
  model = network([len(kernel)], dense, library=library)
  model.set_weights([kernel])
  return model
