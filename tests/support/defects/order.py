"""Steps whose verbs are out of order."""

from defects.replicas import (
  AppliedByKeras,
  ClippedFirst,
  LooksAtOwnGradients,
  NeverReduced,
  ReducedTwice,
)
from defects.small import Small

__all__ = ["AppliedByKeras", "ClippedFirst", "LooksAtOwnGradients", "NeverReduced", "ReducedTwice"]


class NeverUnscaled(Small):
  def train_step(self, step, batch):
    gradients, local = step.gradients(
      lambda b: self.training_loss(step, b), batch, step.variables()
    )
    gradients, loss = step.all_reduce(gradients, local)
    gradients = [g / loss.weight for g in gradients]
    finite, norm = step.check(gradients)
    step.apply(gradients, finite)
    step.log_update(loss, finite, norm)
