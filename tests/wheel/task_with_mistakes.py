# ruff: noqa
"""A user's task with mistakes that a type checker finds: each line says by which rule."""

import keras
import numpy as np
import tensorflow as tf

import loopwright as lw


@lw.register
class Lines(lw.Task):
  def build_model(self):
    return keras.Sequential([keras.layers.Dense(1)])

  def source(self, split: int):  # reportIncompatibleMethodOverride
    return lw.ArraySource(x=3)  # reportCallIssue

  def forward(self, batch, train):  # reportIncompatibleMethodOverride
    return self.model(batch["x"])

  def loss(self, outputs, batch):  # reportIncompatibleMethodOverride
    return tf.reduce_mean(outputs)

  def train_step(self, step, batch):
    step.updaet(self.loss, batch)  # reportAttributeAccessIssue
    step.gradients(batch, batch, step.variables())  # reportArgumentType


class Right(lw.Task):
  """Without a mistake."""

  def source(self, split):
    return lw.ArraySource(features={"x": np.ones([2, 1])})

  def loss(self, outputs, batch):
    return lw.Loss.from_examples(tf.square(outputs - batch["x"]), batch["weight"])
