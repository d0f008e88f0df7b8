"""Tasks that are right on one device and wrong on a mesh, where "batch" splits the rows."""

import keras
import tensorflow as tf

from defects.small import Small, Written
from loopwright.metrics import Loss, weighted_sum
from loopwright.models import models


def shares():
  """Into how many parts the rows are split, as code asks that knows of the mesh."""
  return getattr(tf.distribute.get_strategy(), "row_shares", 1)


class Network(Small):
  """Right: two layers of 4, to split."""

  def build_model(self):
    layers = [keras.layers.Dense(4, "tanh", name="up"), keras.layers.Dense(1, name="down")]
    return keras.Sequential([keras.Input([3]), *layers])


class DividedByShares(Network):
  def loss(self, outputs, batch):
    return Loss.from_examples(self.errors(outputs, batch) / shares(), batch["weight"])


class GradientsOfAllDevices(Written, Network):
  def reduced(self, step, gradients, local):
    return super().reduced(step, [shares() * g for g in gradients], local)


class LostUpdate(Written, Network):
  """As TensorFlow can lose it, of one variable."""

  def reduced(self, step, gradients, local):
    gradients, loss = super().reduced(step, gradients, local)
    if shares() > 1:
      gradients = [tf.zeros_like(gradients[0]), *gradients[1:]]
    return gradients, loss


class FirstPart(Network):
  def loss(self, outputs, batch):
    rows = batch["weight"].shape[0] // shares()
    return Loss.from_examples(self.errors(outputs, batch)[:rows], batch["weight"][:rows])


class MeanOfParts(Network):
  def loss(self, outputs, batch):
    errors, weight = (
      tf.reshape(x, [shares(), -1])
      for x in (self.errors(outputs, batch) * batch["weight"], batch["weight"])
    )
    means = tf.math.divide_no_nan(tf.reduce_sum(errors, 1), tf.reduce_sum(weight, 1))
    return Loss(tf.reduce_mean(means), tf.constant(1.0))


class StatisticsOfParts(Network):
  def forward(self, batch, training):
    x = tf.reshape(batch["x"], [shares(), -1, 3])
    x = tf.reshape(x - tf.reduce_mean(x, axis=1, keepdims=True), tf.shape(batch["x"]))
    return self.model(x, training=training)[:, 0]


class PenaltyOfDevices(Network):
  def loss(self, outputs, batch):
    loss = super().loss(outputs, batch)
    penalty = tf.add_n([tf.nn.l2_loss(v) for v in models.trainable_variables(self.model)])
    return loss.plus_regularization(0.1 * penalty * shares())


class NoiseOfParts(Network):
  def train_step(self, step, batch):
    x, seed = batch["x"], step.seed()
    noise = tf.random.stateless_normal([x.shape[0] // shares(), 3], seed)
    super().train_step(step, {**batch, "x": x + tf.tile(noise, [shares(), 1])})


class MeanOfOnePart(Network):
  def build_model(self):
    mean = tf.Variable(tf.zeros([3]), trainable=False, name="mean")
    return {"network": super().build_model(), "mean": mean}

  def forward(self, batch, training):
    return self.model["network"](batch["x"], training=training)[:, 0]

  def train_step(self, step, batch):
    super().train_step(step, batch)
    rows = batch["weight"].shape[0] // shares()
    step.assign(self.model["mean"], tf.reduce_mean(batch["x"][:rows], axis=0))


class MetricOfOnePart(Network):
  def metrics(self, outputs, batch):
    rows = outputs.shape[0] // shares()
    return {"mae": weighted_sum(tf.abs(outputs - batch["y"])[:rows], batch["weight"][:rows])}


class NewAxis(Network):
  def forward(self, batch, training):
    x = tf.expand_dims(batch["x"], 1)
    x = tf.expand_dims(x, 1)[:, None]
    return super().forward({**batch, "x": tf.reshape(x, [-1, 3])}, training)


class ScalarCondition(Network):
  def forward(self, batch, training):
    outputs = super().forward(batch, training)
    return tf.where(tf.reduce_sum(batch["x"]) > 1e9, tf.zeros_like(outputs), outputs)


class Rolled(Network):
  def forward(self, batch, training):
    x = tf.roll(batch["x"], 1, axis=1)
    return super().forward({**batch, "x": x}, training)
