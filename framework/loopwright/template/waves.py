import keras
import numpy as np
import tensorflow as tf

import loopwright as lw


@lw.register
class Waves(lw.Task):
  def __init__(self, *, width: int = 64):
    self.width = width

  def build_model(self):
    hidden = keras.layers.Dense(self.width, activation="tanh")
    return keras.Sequential([keras.Input([1]), hidden, keras.layers.Dense(1)])

  def source(self, split):
    x = np.random.default_rng(len(split)).uniform(-3, 3, [1000, 1]).astype("float32")
    return lw.ArraySource(features={"x": x, "y": np.sin(x[:, 0])})

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)[:, 0]

  def loss(self, outputs, batch):
    return lw.Loss.from_examples(tf.square(outputs - batch["y"]), batch["weight"])

  def metrics(self, outputs, batch):
    return {"error": lw.weighted_sum(tf.abs(outputs - batch["y"]), batch["weight"])}
