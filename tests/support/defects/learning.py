"""Tasks that cannot learn, or not from where they start."""

import keras
import tensorflow as tf

from defects.small import Small
from loopwright.metrics import Loss


class WrongSign(Small):
  chance_loss = 2.0

  def loss(self, outputs, batch):
    return Loss.from_examples(-self.errors(outputs, batch), batch["weight"])


class ReLUOutputs(Small):
  """A ReLU where the output has to be negative for some."""

  def build_model(self):
    model = super().build_model()
    off = keras.initializers.Constant(-50.0)
    model.add(keras.layers.Dense(1, activation="relu", bias_initializer=off))
    return model


class FarFromChance(Small):
  chance_loss = 2.0

  def errors(self, outputs, batch):
    return tf.square(100.0 * outputs - batch["y"])


class LabelAmongInputs(Small):
  chance_loss = 2.0

  def errors(self, outputs, batch):
    return tf.square(0.01 * outputs)
