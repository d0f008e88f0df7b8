"""The task of the conformance cases: the reference's two layers, in each kind of model."""

import keras
import numpy as np
import reference
import tensorflow as tf
import tf_keras

from loopwright import metrics
from loopwright import task as tasks

KERAS = {"keras": keras, "tf_keras": tf_keras}
LAYOUTS = {
  "hidden/kernel": (None, "model"),
  "hidden/bias": ("model",),
  "output/kernel": ("model", None),
}
"""Each half of the hidden units on devices of its own."""
UNTOUCHED = [1.0, -2.0, 3.0]


@tf.custom_gradient
def multiply_gradient(value, factor):
  """Returns `value`; its gradient is multiplied by `factor`, as an overflow in a layer would."""
  return tf.identity(value), lambda upstream: (upstream * factor, None)


class Mlp(tasks.Task):
  """Squared error of an MLP of either Keras generation."""

  def __init__(self, *, library="keras", l2=0.0):
    self.keras, self.l2 = KERAS[library], l2

  def build_model(self):
    model = self.keras.Sequential(list(self.layers().values()))
    model.build((None, reference.INPUTS))
    model.set_weights(reference.initial_weights())
    return model

  def layers(self):
    dense = self.keras.layers.Dense
    penalty = self.keras.regularizers.L2(self.l2) if self.l2 else None
    hidden = dense(reference.HIDDEN, activation="tanh", kernel_regularizer=penalty, name="hidden")
    return {"hidden": hidden, "output": dense(1, name="output")}

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)

  def loss(self, outputs, batch):
    error = multiply_gradient(outputs[:, 0], batch["overflow"]) - batch["y"]
    return metrics.Loss.from_examples(tf.square(error), batch["weight"])

  def metrics(self, outputs, batch):
    error = tf.abs(outputs[:, 0] - batch["y"])
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    overflows = tf.reduce_sum(tf.cast(tf.math.is_inf(batch["overflow"]), tf.float32))
    return {
      "mae": metrics.weighted_sum(error, batch["weight"]),
      "overflow_replica": (overflows * tf.cast(replica, tf.float32), overflows),
    }


class TwoOptimizers(Mlp):
  """One optimizer a layer, one after the other: the second sees the first one's update."""

  def build_model(self):
    layers, weights = self.layers(), reference.initial_weights()
    layers["hidden"].build((None, reference.INPUTS))
    layers["output"].build((None, reference.HIDDEN))
    layers["hidden"].set_weights(weights[:2])
    layers["output"].set_weights(weights[2:])
    return layers

  def forward(self, batch, training):
    return self.model["output"](self.model["hidden"](batch["x"]))

  def train_step(self, step, batch):
    for optimizer in ("hidden", "output"):
      step.update(lambda part: self.training_loss(step, part), batch, optimizer)


class Module(tf.Module):
  """The same two layers without any Keras, and a variable that the loss does not touch."""

  def __init__(self):
    super().__init__()
    named = zip(reference.NAMES, reference.initial_weights(), strict=True)
    self.layers = [tf.Variable(value, name=name) for name, value in named]
    self.untouched = tf.Variable(UNTOUCHED)

  def __call__(self, x):
    hidden_kernel, hidden_bias, output_kernel, output_bias = self.layers
    return tf.tanh(x @ hidden_kernel + hidden_bias) @ output_kernel + output_bias


class ModuleMlp(Mlp):
  """The MLP as a tf.Module, which writes its penalty itself."""

  def __init__(self, *, l2=0.0):
    super().__init__(l2=l2)

  def build_model(self):
    return Module()

  def forward(self, batch, training):
    return self.model(batch["x"])

  def regularization(self):
    return self.l2 * tf.reduce_sum(tf.square(self.model.layers[0]))


def make(*, model, l2=0.0, two_optimizers=False):
  """Returns the task of a case."""
  if model.startswith("module"):
    return ModuleMlp(l2=l2)
  return (TwoOptimizers if two_optimizers else Mlp)(library=model, l2=l2)


def copies(strategy, variables):
  """Returns, for each variable, its value on every device, stacked."""
  raw = [v.value if isinstance(v, keras.Variable) else v for v in variables]
  return [np.stack([c.numpy() for c in strategy.experimental_local_results(v)]) for v in raw]
