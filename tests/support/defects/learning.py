"""Tasks that cannot learn, or not from where they start."""

import keras
import tensorflow as tf

from defects.small import Small, planted
from loopwright.metrics import Loss

DEFECTS, defect = planted()
"""Of a task: the check that fails, its cause, the method whose line is named."""
START, FAR = "loss at the start", "far from chance at the start"


@defect(START, FAR, "loss")
class WrongSign(Small):
  chance_loss = 2.0

  def loss(self, outputs, batch):
    return Loss.from_examples(-self.errors(outputs, batch), batch["weight"])


@defect("learns one batch by heart", "cannot learn one batch", "build_model")
class ReLUOutputs(Small):
  """A ReLU where the output has to be negative for some."""

  def build_model(self):
    model = super().build_model()
    off = keras.initializers.Constant(-50.0)
    model.add(keras.layers.Dense(1, activation="relu", bias_initializer=off))
    return model


@defect(START, FAR, "")
class FarFromChance(Small):
  chance_loss = 2.0

  def errors(self, outputs, batch):
    return tf.square(100.0 * outputs - batch["y"])


@defect(START, FAR, "")
class LabelAmongInputs(Small):
  chance_loss = 2.0

  def errors(self, outputs, batch):
    return tf.square(0.01 * outputs)
