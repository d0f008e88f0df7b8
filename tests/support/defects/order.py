"""Steps whose verbs are out of order; the first four are defects of replicas too."""

import functools
from typing import ClassVar

import tensorflow as tf

from defects.replicas import (
  OWN_CHECK,
  WRITTEN,
  AppliedByKeras,
  LooksAtOwnGradients,
  NeverReduced,
  ReducedTwice,
)
from defects.small import Small, Written, planted
from loopwright.optimizers.loss_scale import dynamic

DEFECTS, defect = planted()
"""Of a task: the check that fails, its cause, the method whose line is named."""
PIPELINE = "pipeline of the step"
defect(PIPELINE, "never reduced", WRITTEN)(NeverReduced)
defect(PIPELINE, "reduced twice", "reduced")(ReducedTwice)
defect(PIPELINE, "reduced twice", "train_step")(AppliedByKeras)
defect(PIPELINE, OWN_CHECK, "reduced")(LooksAtOwnGradients)


@defect(PIPELINE, "never unscaled", WRITTEN)
class NeverUnscaled(Written):
  options: ClassVar = {"loss_scale": dynamic}

  def reduced(self, step, gradients, local):
    gradients, loss = step.all_reduce(gradients, local)
    return [g / loss.weight for g in gradients], loss


@defect(PIPELINE, "clipped while scaled", "reduced")
class ClipsScaled(Written):
  """The sums over all examples are clipped while they have the loss scale in them."""

  options: ClassVar = {"loss_scale": dynamic}

  def reduced(self, step, gradients, local):
    gradients, loss = step.all_reduce(gradients, local)
    gradients, _ = tf.clip_by_global_norm(list(gradients), 1.0)
    return step.unscale(gradients, loss), loss


class DividesItself(NeverUnscaled):
  """Right: the update of one replica, and no loss scale to divide by."""

  options: ClassVar = {}


class ClipsSums(ClipsScaled):
  """Right: there is no loss scale, and two replicas make the update of one."""

  options: ClassVar = {}


@defect(PIPELINE, "perturbed by the gradients of one replica", "train_step")
class LocalSharpness(Small):
  """Sharpness-aware: the weights are moved along the gradients of one replica's rows."""

  def train_step(self, step, batch):
    loss = functools.partial(self.training_loss, step)
    gradients, _ = step.gradients(loss, batch, step.variables())
    with step.perturbed(step.variables(), [0.05 * gradient for gradient in gradients]):
      step.update(loss, batch)


class Surgery(Written):
  """Right: projects one loss's gradients off those of another where they point apart."""

  def train_step(self, step, batch):
    self.batch = batch
    super().train_step(step, batch)

  def reduced(self, step, gradients, local):
    def smaller(part):
      return self.loss(0.5 * self.forward(part, training=True), part)

    others, _ = step.gradients(smaller, self.batch, step.variables())
    made = []
    for one, other in zip(gradients, others, strict=True):
      along = tf.minimum(tf.reduce_sum(one * other), 0.0)
      made.append(one + other - along / (tf.reduce_sum(other * other) + 1e-12) * other)
    return super().reduced(step, made, local)


class Projected(Written):
  """Right so far as the order goes: no gradient is limited, only the sign of a product."""

  def reduced(self, step, gradients, local):
    first = gradients[0]
    along = tf.minimum(tf.reduce_sum(first), 0.0) / tf.maximum(tf.norm(first), 1e-12)
    return super().reduced(step, [first - along, *gradients[1:]], local)
