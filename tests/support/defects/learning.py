"""Tasks that cannot learn, or not from where they start."""

import keras
import numpy as np
import tensorflow as tf
from toys import network

from defects.small import Small, every_variable, planted
from loopwright.metrics import Loss

DEFECTS, defect = planted()
"""Of a task: the check that fails, its cause, the method whose line is named."""
START, FAR = "loss at the start", "far from chance at the start"
HEART, CANNOT = "learns one batch by heart", "cannot learn one batch"


@defect(START, FAR, "loss")
class WrongSign(Small):
  chance_loss = 2.0

  def loss(self, outputs, batch):
    return Loss.from_examples(-self.errors(outputs, batch), batch["weight"])


@defect(HEART, CANNOT, "")
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


class Classes(Small):
  """Four classes that the features tell, by logits; with smoothed labels the loss has a floor."""

  smoothing = 0.3

  def build_model(self):
    return network([3], keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(4))

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)

  def labels(self, batch):
    classes = 2 * tf.cast(batch["x"][:, 0] > 0, tf.int32) + tf.cast(batch["x"][:, 1] > 0, tf.int32)
    return (1 - self.smoothing) * tf.one_hot(classes, 4) + self.smoothing / 4

  def errors(self, outputs, batch):
    return tf.nn.softmax_cross_entropy_with_logits(self.labels(batch), outputs)

  def metrics(self, outputs, batch):
    return {}


class Clipped(Small):
  """Right: a surrogate whose gain is clipped, so that it falls by a fifth and no further."""

  def errors(self, outputs, batch):
    ratio, gain = tf.exp(0.1 * outputs), 1.0 + tf.abs(batch["y"])
    return -tf.minimum(ratio * gain, tf.clip_by_value(ratio, 0.8, 1.2) * gain)


class TwiceSoftmax(Classes):
  """Probabilities in place of logits: what remains of the loss is no floor of the task's."""

  smoothing = 0.0

  def errors(self, outputs, batch):
    return super().errors(tf.nn.softmax(outputs), batch)


class Blind(Classes):
  """The outputs are the same for all examples: their gradients vanish only in the sum."""

  smoothing = 0.0

  def forward(self, batch, training):
    return self.model(tf.ones_like(batch["x"]), training=training)


class SameInputs(Classes):
  """Right: equal examples have different labels, so the loss has the floor of their entropy."""

  smoothing = 0.0

  def labels(self, batch):
    return tf.one_hot(tf.cast(batch["y"] > 0, tf.int32) + 2 * tf.cast(batch["y"] > 1, tf.int32), 4)

  def forward(self, batch, training):
    return super().forward({"x": tf.sign(batch["x"][:, 2:]) * [[1.0, 0.0, 0.0]]}, training)


class Bound(Small):
  """Right: a bound on the evidence (a variational autoencoder), with noise of the step."""

  def build_model(self):
    layers = keras.layers
    encoder = network([3], layers.Dense(8, activation="tanh"), layers.Dense(2))
    return {"default": encoder, "decoder": network([1], layers.Dense(3))}

  variables_of = every_variable

  def training_loss(self, step, batch):
    mean, log = tf.split(self.model["default"](batch["x"]), 2, axis=1)
    noise = tf.random.stateless_normal(tf.shape(mean), step.seed())
    again = self.model["decoder"](mean + tf.exp(0.5 * log) * noise)
    apart = tf.reduce_sum(tf.square(again - batch["x"]) + np.log(2 * np.pi), axis=1) / 2
    apart += 0.5 * tf.reduce_sum(tf.square(mean) + tf.exp(log) - log - 1.0, axis=1)
    return Loss.from_examples(apart, batch["weight"])
