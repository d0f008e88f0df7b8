"""The task of kept_run_0_1/, a run folder of version 0.1."""

import keras
import numpy as np
import tensorflow as tf

import loopwright
from loopwright import ArraySource, Loss, Task, weighted_sum


@loopwright.register
class Sine(Task):
  """Regression with dropout and batch normalization."""

  def build_model(self):
    layers = [
      keras.Input([1]),
      keras.layers.Dense(8, activation="tanh"),
      keras.layers.BatchNormalization(),
      keras.layers.Dropout(0.1),
      keras.layers.Dense(1),
    ]
    return keras.Sequential(layers)

  def source(self, split):
    x = np.random.default_rng(len(split)).uniform(-3, 3, [50, 1]).astype("float32")
    return ArraySource(features={"x": x, "y": np.sin(x[:, 0])})

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)[:, 0]

  def loss(self, outputs, batch):
    return Loss.from_examples(tf.square(outputs - batch["y"]), batch["weight"])

  def metrics(self, outputs, batch):
    return {"error": weighted_sum(tf.abs(outputs - batch["y"]), batch["weight"])}
