"""Sharpness-aware minimisation (SAM): each update takes the gradient at a worse point nearby.

`SharpnessAware` is a mixin for any task with a `forward` and a `loss`. It makes two backward
passes, the second at weights + rho x gradient / |gradient|.

Foret et al., "Sharpness-Aware Minimization for Efficiently Improving Generalization" (2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

import loopwright
from loopwright import Batch, ConfigError, Loss, Step, Task
from loopwright.tasks.image_classification import ImageClassification, ImageData, cnn


class SharpnessAware(Task):
  """Algorithm 1 of the paper as `train_step`; list it before the task's class.

  The second point follows the gradient of the *global* batch, so it is the same on all replicas.
  The paper's m-sharpness (section 3) has one per accelerator, so it depends on their number.
  """

  rho: float = 0.05
  """Distance of the point of the second gradient, in L2 norm."""

  def train_step(self, step: Step, batch: Batch) -> None:
    """Takes the gradient at the nearby point and applies it to the weights."""
    variables = step.variables()
    gradients, local_loss = step.gradients(lambda b: self.training_loss(step, b), batch, variables)
    gradients, loss = step.all_reduce(gradients, local_loss)
    gradients = step.unscale(gradients, loss)
    finite, norm = step.check(gradients)
    climb = tf.math.divide_no_nan(self.rho, norm)
    offsets = [None if g is None else tf.cast(climb, g.dtype) * g for g in gradients]

    with step.perturbed(variables, offsets):
      gradients, local_loss = step.gradients(self.silent_loss, batch, variables)
    gradients, nearby_loss = step.all_reduce(gradients, local_loss)
    gradients = step.unscale(gradients, nearby_loss)
    finite_nearby, norm = step.check(gradients)

    finite = finite & finite_nearby
    step.apply(step.clip(gradients, norm), finite & (loss.weight > 0))
    step.log_update(loss, finite, norm)
    shown = tf.cast(finite, tf.float32)
    rise = tf.math.multiply_no_nan(nearby_loss.total - loss.total, shown)
    step.log({"sharpness": (rise, loss.weight * shown)})

  def silent_loss(self, batch: Batch) -> Loss:
    """The training loss without logging metrics; those belong to the weights of the first pass."""
    loss = self.loss(self.forward(batch, training=True), batch)
    return loss.plus_regularization(self.regularization())


@loopwright.register
class SharpClassification(SharpnessAware, ImageClassification):
  """Image classification with sharpness-aware minimisation."""

  def __init__(
    self,
    *,
    data: ImageData,
    rho: float = 0.05,
    network: Callable[..., keras.Model] = cnn,
    input_shape: Sequence[int] = (28, 28, 1),
    classes: int = 10,
    flip: bool = False,
    shift: int = 0,
  ) -> None:
    """Keeps its arguments; those not described here are as for `ImageClassification`.

    Args:
      rho: distance of the second gradient's point; 0 is plain training, at twice the cost.

    Raises:
      ConfigError: `rho` is negative.
    """
    if not rho >= 0:
      raise ConfigError(f"SharpClassification.rho is {rho}; it must be 0 or more, such as 0.05.")
    super().__init__(
      data=data, network=network, input_shape=input_shape, classes=classes, flip=flip, shift=shift
    )
    self.rho = rho
