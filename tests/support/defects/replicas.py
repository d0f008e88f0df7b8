"""Mistakes that make N replicas learn something else than one."""

import keras
import tensorflow as tf

from defects.small import Small, Written, planted
from loopwright.metrics import Loss

DEFECTS, defect = planted()
"""Of a task: the check that fails, the only cause, the method whose line is named."""
ON_TWO, ON_THREE = "same update on 2 replicas", "same update on 3 replicas"
PADDING, OVERFLOW = "padding changes nothing", "overflow on one replica"
OWN_CHECK = "finite check before the reduction"
WRITTEN = "Written.train_step"


@defect(ON_TWO, "mean of means", "loss")
class MeanOfMeans(Small):
  def loss(self, outputs, batch):
    total = tf.reduce_sum(self.errors(outputs, batch) * batch["weight"])
    return Loss(tf.math.divide_no_nan(total, tf.reduce_sum(batch["weight"])), tf.constant(1.0))


@defect(PADDING, "padding counts", "loss")
class WithoutWeights(Small):
  def loss(self, outputs, batch):
    return Loss.from_examples(self.errors(outputs, batch))


@defect(ON_THREE, "loss divided by the local batch", "training_loss")
class DividedByRows(Written):
  """The loss divided by the local batch, the sum over replicas by nothing."""

  def training_loss(self, step, batch):
    total, weight = super().training_loss(step, batch)
    return Loss(tf.math.divide_no_nan(total, weight), tf.constant(1.0))

  def reduced(self, step, gradients, local):
    return step.all_reduce(gradients, local)


@defect(ON_TWO, "regularisation counted N times", "loss")
class PenaltyOnEveryReplica(Small):
  def loss(self, outputs, batch):
    total, weight = super().loss(outputs, batch)
    penalty = 0.1 * tf.add_n([tf.nn.l2_loss(v) for v in self.model.trainable_variables])
    return Loss(total + penalty, weight)


@defect(ON_TWO, "never reduced", WRITTEN)
class NeverReduced(Written):
  def reduced(self, step, gradients, local):
    return step.unscale(gradients, local), local


@defect(ON_THREE, "reduced twice", "reduced")
class ReducedTwice(Written):
  def reduced(self, step, gradients, local):
    gradients, loss = super().reduced(step, gradients, local)
    return step.all_reduce(gradients, local)[0], loss


@defect(ON_TWO, "reduced twice", "train_step")
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


@defect("same weights after 4 steps", "clipped before the reduction", "reduced")
class ClippedFirst(Written):
  def reduced(self, step, gradients, local):
    gradients = step.clip(gradients, step.check(gradients)[1])
    return super().reduced(step, gradients, local)


@defect(ON_TWO, "batch-norm statistics", "Small.build_model")
class LocalBatchNorm(Small):
  def hidden(self):
    return [keras.layers.Dense(4), keras.layers.BatchNormalization()]


@defect("same metrics on 2 replicas", "metric read in replica context", "metrics")
class MetricOfMeans(Small):
  def metrics(self, outputs, batch):
    far = tf.reduce_sum(tf.abs(outputs - batch["y"]) * batch["weight"])
    return {"mae": (tf.math.divide_no_nan(far, tf.reduce_sum(batch["weight"])), 1.0)}


@defect(PADDING, "padding counts", "metrics")
class MetricWithoutWeights(Small):
  def metrics(self, outputs, batch):
    return {"mae": (tf.reduce_sum(tf.abs(outputs - batch["y"])), 1.0 * len(batch["y"]))}


@defect(OVERFLOW, OWN_CHECK, "reduced")
class LooksAtOwnGradients(Written):
  """Skips where its own gradients overflow, which the others do not know."""

  def reduced(self, step, gradients, local):
    fine, _ = step.check(gradients)
    gradients = [tf.where(fine, g, tf.zeros_like(g)) for g in gradients]
    local = Loss(tf.where(fine, local.total, 0.0), tf.where(fine, local.weight, 0.0))
    return super().reduced(step, gradients, local)


@defect(OVERFLOW, OWN_CHECK, "LooksAtOwnGradients.reduced")
class LooksAtOwnShare(LooksAtOwnGradients):
  """The same in each of two updates, of which the other has nothing to skip."""

  def train_step(self, step, batch):
    for first in range(2):
      super().train_step(step, {name: value[first::2] for name, value in batch.items()})


@defect("same step twice", "stateful random op", "forward")
class NoiseWithState(Small):
  def forward(self, batch, training):
    x = batch["x"] + (0.5 * tf.random.normal(tf.shape(batch["x"])) if training else 0.0)
    return self.model(x, training=training)[:, 0]


@defect(PADDING, "padding counts", "train_step")
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
