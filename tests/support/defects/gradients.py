"""Gradients that are missing, zero, not finite or wrong."""

import keras
import numpy as np
import tensorflow as tf
from toys import network

from defects import kinds
from defects.small import FEATURES, Small, Written, every_variable, planted
from loopwright.inputs.sources import ArraySource
from loopwright.metrics import Loss

DEFECTS, defect = planted()
"""Of a task: the check that fails, its cause, the method whose line is named."""
EACH, DIFFERENCES = "every variable has a gradient", "finite differences"


@defect(EACH, "variable without gradient", "build_model")
class UnusedLayer(Small):
  def build_model(self):
    inputs = keras.Input([FEATURES])
    hidden = keras.layers.Dense(4, activation="tanh", name="used")(inputs)
    unused = keras.layers.Dense(4, name="unused")(inputs)
    return keras.Model(inputs, [keras.layers.Dense(1)(hidden), unused])

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)[0][:, 0]


@defect(EACH, "variable without gradient", "forward")
class RoundedOutputs(Small):
  """What comes before round() learns nothing."""

  def build_model(self):
    model = super().build_model()
    self.scale = keras.layers.Dense(1, name="after")
    self.scale.build([None, 1])
    return {"default": model, "after": self.scale}

  def variables_of(self, optimizer):
    return [*self.model["default"].trainable_variables, *self.scale.trainable_variables]

  def forward(self, batch, training):
    rounded = tf.round(self.model["default"](batch["x"], training=training))
    return self.scale(rounded)[:, 0]


@defect(EACH, "variable without gradient", "chosen")
class HardCodes(Small):
  """The nearest of some codes; what comes before learns nothing from it."""

  def chosen(self, outputs):
    codes = tf.linspace(-2.0, 2.0, 7)
    return tf.gather(codes, tf.argmin(tf.abs(outputs[:, None] - codes), axis=1))

  def build_model(self):
    last = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    return {"first": super().build_model(), "last": last}

  variables_of = every_variable

  def forward(self, batch, training):
    outputs = self.model["first"](batch["x"], training=training)[:, 0]
    self.commitment = tf.square(tf.stop_gradient(outputs) - self.chosen(outputs))
    return self.model["last"](self.chosen(outputs)[:, None])[:, 0]

  def errors(self, outputs, batch):
    return super().errors(outputs, batch) + self.commitment


@defect("no gradient is zero", "zero gradient", "build_model")
class DeadReLU(Small):
  def build_model(self):
    off = keras.initializers.Constant(-99.0)
    hidden = keras.layers.Dense(4, activation="relu", bias_initializer=off)
    return keras.Sequential([keras.Input([FEATURES]), hidden, keras.layers.Dense(1)])


@defect("gradients are finite", "non-finite gradient", "errors")
class SquareRootAtZero(Small):
  def errors(self, outputs, batch):
    x = tf.zeros_like(outputs) * outputs
    return tf.square(outputs - batch["y"]) + tf.sqrt(x)


@defect(DIFFERENCES, "wrong gradient", "forward")
class WrongCustomGradient(Small):
  def forward(self, batch, training):
    @tf.custom_gradient
    def softened(x):
      return tf.tanh(x / 4.0), lambda upstream: -0.5 * upstream

    return softened(super().forward(batch, training))


@defect(DIFFERENCES, "wrong gradient", "forward")
class SlightlyWrongGradient(Small):
  """By 2 %: less than what float32 can tell."""

  def forward(self, batch, training):
    @tf.custom_gradient
    def slightly(x):
      return 2.0 * x, lambda upstream: 2.04 * upstream

    return slightly(super().forward(batch, training))


@defect("custom gradients run", "gradient that never runs", "forward")
class ThrownAway(Small):
  def forward(self, batch, training):
    @tf.custom_gradient
    def balanced(x):
      return tf.identity(x), lambda upstream: upstream + 0.1 * x

    outputs = super().forward(batch, training)
    balanced(outputs)
    return outputs


@defect("penalties count once", "penalty counted twice", "loss")
class DecaysTwice(kinds.Regularised):
  def loss(self, outputs, batch):
    total, weight = super().loss(outputs, batch)
    return Loss(total + weight * tf.add_n(self.model.losses), weight)


class OfFloat32(Small):
  """Right: a layer keeps a dtype of its own."""

  def hidden(self):
    return [keras.layers.Dense(4, activation="tanh", dtype="float32")]


class CastByHand(Small):
  """Right: made for half precision, it casts its outputs and labels."""

  def forward(self, batch, training):
    return tf.cast(super().forward(batch, training), tf.float32)

  def errors(self, outputs, batch):
    return tf.square(outputs - tf.cast(batch["y"] > 0, tf.float32))


class DecaysOnce(DecaysTwice):
  """Right: the penalty is only shown."""

  def loss(self, outputs, batch):
    return Small.loss(self, outputs, batch)

  def metrics(self, outputs, batch):
    return {"penalty": (tf.add_n(self.model.losses), 1.0)}


class Swish(Small):
  """Right: `tf.nn.silu` casts a float32 constant of its own."""

  def forward(self, batch, training):
    return tf.nn.silu(super().forward(batch, training))


class Embedded(Small):
  """Right: a sparse gradient is made dense."""

  def build_model(self):
    layers = keras.layers
    return network([2], layers.Embedding(50, 4), layers.Flatten(), layers.Dense(1))

  def source(self, split):
    x = np.random.default_rng(2).integers(0, 50, [40, 2]).astype(np.int32)
    return ArraySource(features={"x": x, "y": x.sum(axis=1).astype(np.float32) / 50})


class StopsOnPurpose(Small):
  """Right: a target that is no part of the loss, as in self-distillation."""

  def loss(self, outputs, batch):
    target = tf.stop_gradient(0.5 * outputs + 0.5 * batch["y"])
    return Loss.from_examples(tf.square(outputs - target), batch["weight"])


class Differences(Small):
  """Right: the last bias cancels in each difference of two scores (Bradley-Terry)."""

  def errors(self, outputs, batch):
    first, second = outputs[0::2], outputs[1::2]
    better = tf.sign(batch["y"][0::2] - batch["y"][1::2])
    return tf.repeat(tf.nn.softplus(-better * (first - second)), 2)


class Critic(Small):
  """Right: the mean of one set's scores less that of another's (Wasserstein), by two calls."""

  def loss(self, outputs, batch):
    others = self.model(-batch["x"], training=True)[:, 0]
    return Loss.from_examples(outputs - others, batch["weight"])


class Frozen(Written):
  """The first layer gets no gradient: right, unless the optimizer moves it all the same."""

  def after(self, step, gradients, norm):
    return [tf.zeros_like(gradient) for gradient in gradients[:2]] + list(gradients[2:])


class FrozenAtFirst(Written):
  """Right: as above, but only in the first steps."""

  def after(self, step, gradients, norm):
    begun = tf.cast(step.number >= 99, tf.float32)
    return [begun * gradient for gradient in gradients[:2]] + list(gradients[2:])
