"""Mistakes that make N replicas learn something else than one."""

import keras
import tensorflow as tf

from defects.small import Small
from loopwright.metrics import Loss, Sum


class MeanOfMeans(Small):
  def loss(self, outputs, batch):
    total = tf.reduce_sum(self.errors(outputs, batch) * batch["weight"])
    return Loss(tf.math.divide_no_nan(total, tf.reduce_sum(batch["weight"])), tf.constant(1.0))


class WithoutWeights(Small):
  def loss(self, outputs, batch):
    return Loss.from_examples(self.errors(outputs, batch))


class MeanOverRows(Small):
  def loss(self, outputs, batch):
    mean = tf.reduce_mean(self.errors(outputs, batch) * batch["weight"])
    return Loss(mean, tf.constant(1.0))


class DividedByRows(Small):
  """The loss divided by the local batch, the sum over replicas by nothing."""

  def train_step(self, step, batch):
    def loss(part):
      errors = self.errors(self.forward(part, training=True), part) * part["weight"]
      return Loss(
        tf.math.divide_no_nan(tf.reduce_sum(errors), tf.reduce_sum(part["weight"])),
        tf.constant(1.0),
      )

    gradients, local = step.gradients(loss, batch, step.variables())
    gradients, total = step.all_reduce(gradients, local)
    finite, norm = step.check(gradients)
    step.apply(gradients, finite)
    step.log_update(total, finite, norm)


class PenaltyOnEveryReplica(Small):
  def loss(self, outputs, batch):
    total, weight = super().loss(outputs, batch)
    penalty = 0.1 * tf.add_n([tf.nn.l2_loss(v) for v in self.model.trainable_variables])
    return Loss(total + penalty, weight)


class NeverReduced(Small):
  def train_step(self, step, batch):
    gradients, loss = step.gradients(lambda b: self.training_loss(step, b), batch, step.variables())
    gradients = step.unscale(gradients, loss)
    finite, norm = step.check(gradients)
    step.apply(gradients, finite & (loss.weight > 0))
    step.log_update(loss, finite, norm)


class ReducedTwice(Small):
  def train_step(self, step, batch):
    gradients, local = step.gradients(
      lambda b: self.training_loss(step, b), batch, step.variables()
    )
    gradients, loss = step.all_reduce(gradients, local)
    gradients = step.unscale(gradients, loss)
    gradients, _ = step.all_reduce(gradients, local)
    finite, norm = step.check(gradients)
    step.apply(gradients, finite)
    step.log_update(loss, finite, norm)


class AppliedByKeras(Small):
  """Keras 3's own apply() sums over replicas once more."""

  def build_model(self):
    model = super().build_model()
    self.optimizer = keras.optimizers.SGD(0.1)
    self.optimizer.build(model.trainable_variables)
    return model

  def train_step(self, step, batch):
    gradients, local = step.gradients(
      lambda b: self.training_loss(step, b), batch, step.variables()
    )
    gradients, loss = step.all_reduce(gradients, local)
    gradients = step.unscale(gradients, loss)
    finite, norm = step.check(gradients)
    self.optimizer.apply(list(gradients), self.model.trainable_variables)
    step.log_update(loss, finite, norm)


class ClippedFirst(Small):
  def train_step(self, step, batch):
    gradients, local = step.gradients(
      lambda b: self.training_loss(step, b), batch, step.variables()
    )
    gradients = step.clip(gradients, step.check(gradients)[1])
    gradients, loss = step.all_reduce(gradients, local)
    gradients = step.unscale(gradients, loss)
    finite, norm = step.check(gradients)
    step.apply(gradients, finite & (loss.weight > 0))
    step.log_update(loss, finite, norm)


class LocalBatchNorm(Small):
  def hidden(self):
    return [keras.layers.Dense(4), keras.layers.BatchNormalization()]


class LocalNegatives(Small):
  """Compares each example with those of its own replica alone."""

  def errors(self, outputs, batch):
    apart = tf.square(outputs[:, None] - batch["y"][None, :])
    apart += 1e9 * (1.0 - batch["weight"][None, :])
    rows = tf.range(tf.shape(outputs)[0])
    return tf.nn.sparse_softmax_cross_entropy_with_logits(rows, -apart)

  def loss(self, outputs, batch):
    return Loss.from_examples(self.errors(outputs, batch), batch["weight"])


class MetricOfMeans(Small):
  def metrics(self, outputs, batch):
    far = tf.reduce_sum(tf.abs(outputs - batch["y"]) * batch["weight"])
    return {"mae": (tf.math.divide_no_nan(far, tf.reduce_sum(batch["weight"])), 1.0)}


class MetricWithoutWeights(Small):
  def metrics(self, outputs, batch):
    return {"mae": (tf.reduce_sum(tf.abs(outputs - batch["y"])), 1.0 * len(batch["y"]))}


class SumWithoutWeights(Small):
  def metrics(self, outputs, batch):
    return {
      "signs": Sum(tf.stack([tf.reduce_sum(tf.cast(outputs > 0, tf.int32)), len(batch["y"])]))
    }


class LooksAtOwnGradients(Small):
  """Skips where its own gradients overflow, which the others do not know."""

  def train_step(self, step, batch):
    gradients, local = step.gradients(
      lambda b: self.training_loss(step, b), batch, step.variables()
    )
    fine, _ = step.check(gradients)
    gradients = [tf.where(fine, g, tf.zeros_like(g)) for g in gradients]
    local = Loss(tf.where(fine, local.total, 0.0), tf.where(fine, local.weight, 0.0))
    gradients, loss = step.all_reduce(gradients, local)
    gradients = step.unscale(gradients, loss)
    finite, norm = step.check(gradients)
    step.apply(gradients, finite & (loss.weight > 0))
    step.log_update(loss, finite, norm)


class LooksAtOwnShare(LooksAtOwnGradients):
  """The same in each of two updates, of which the other has nothing to skip."""

  def train_step(self, step, batch):
    for first in range(2):
      super().train_step(step, {name: value[first::2] for name, value in batch.items()})


class NoiseWithState(Small):
  def forward(self, batch, training):
    x = batch["x"] + (0.5 * tf.random.normal(tf.shape(batch["x"])) if training else 0.0)
    return self.model(x, training=training)[:, 0]


class MeanOverMicroBatches(Small):
  """Averages the micro-batches' means, which weighs a micro-batch of padding like a full one."""

  def train_step(self, step, batch):
    halves = [{n: tf.split(v, 2)[i] for n, v in batch.items()} for i in range(2)]
    both = []
    for half in halves:
      gradients, local = step.gradients(
        lambda b: self.training_loss(step, b), half, step.variables()
      )
      gradients, loss = step.all_reduce(gradients, local)
      both.append(step.unscale(gradients, loss))
    gradients = [(a + b) / 2.0 for a, b in zip(*both, strict=True)]
    finite, norm = step.check(gradients)
    step.apply(gradients, finite)
    step.log_update(loss, finite, norm)
