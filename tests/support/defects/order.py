"""Steps whose verbs are out of order; the first four are defects of replicas too."""

from defects.replicas import (
  OWN_CHECK,
  WRITTEN,
  AppliedByKeras,
  LooksAtOwnGradients,
  NeverReduced,
  ReducedTwice,
)
from defects.small import Written, planted

DEFECTS, defect = planted()
"""Of a task: the check that fails, its cause, the method whose line is named."""
PIPELINE = "pipeline of the step"
defect(PIPELINE, "never reduced", WRITTEN)(NeverReduced)
defect(PIPELINE, "reduced twice", "reduced")(ReducedTwice)
defect(PIPELINE, "reduced twice", "train_step")(AppliedByKeras)
defect(PIPELINE, OWN_CHECK, "reduced")(LooksAtOwnGradients)


@defect(PIPELINE, "never unscaled", WRITTEN)
class NeverUnscaled(Written):
  def reduced(self, step, gradients, local):
    gradients, loss = step.all_reduce(gradients, local)
    return [g / loss.weight for g in gradients], loss
