"""Optimizers beyond Keras's, as plain Keras optimizers: AdEMAMix and ADOPT.

import loopwright.tasks.optimizers
run.optimizer = @AdEMAMix
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

import loopwright


class _Adaptive(keras.optimizers.Optimizer):
  """What both share: a decayed weight, and slots by name."""

  _slot_names: tuple[str, ...] = ()

  def __init__(self, learning_rate: Any, weight_decay: float | None, **numbers: float) -> None:
    super().__init__(learning_rate=learning_rate, weight_decay=weight_decay)
    self._numbers = list(numbers)
    for name, value in numbers.items():
      setattr(self, name, value)

  def build(self, variables: Sequence[Any]) -> None:
    """Makes the slots."""
    if self.built:
      return
    super().build(variables)
    self._slots = list(
      zip(*self.add_optimizer_variables(variables, list(self._slot_names)), strict=True)
    )

  def get_config(self) -> dict[str, Any]:
    """See Keras."""
    own = {name: getattr(self, name) for name in self._numbers}
    config = super().get_config()
    return {name: config[name] for name in ("learning_rate", "weight_decay")} | own


@loopwright.register
class AdEMAMix(_Adaptive):
  """Adam with a second, slow average of gradients in its direction.

  Pagliardini et al., "The AdEMAMix Optimizer: Better, Faster, Older" (2024), algorithm 1, with a
  constant alpha and beta_3.
  """

  _slot_names = ("momentum", "slow", "velocity")

  def __init__(
    self,
    learning_rate: Any = 1e-3,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    beta_3: float = 0.9999,
    alpha: float = 5.0,
    epsilon: float = 1e-8,
    weight_decay: float | None = None,
  ) -> None:
    """Keeps the options.

    Args:
      learning_rate: a number or a schedule.
      beta_1, beta_2, beta_3: of the average of gradients, of their squares, and of the slow one.
      alpha: the weight of the slow average.
      epsilon: added to the root of the squares.
      weight_decay: multiplied with the rate; None for none.
    """
    super().__init__(
      learning_rate, weight_decay,
      beta_1=beta_1, beta_2=beta_2, beta_3=beta_3, alpha=alpha, epsilon=epsilon,
    )  # fmt: skip

  def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
    """See Keras."""
    mean, slow, square = self._slots[self._get_variable_index(variable)]
    rate, step = (ops.cast(x, variable.dtype) for x in (learning_rate, self.iterations + 1))
    gradient = ops.cast(gradient, variable.dtype)
    self.assign_add(mean, (gradient - mean) * (1 - self.beta_1))
    self.assign_add(slow, (gradient - slow) * (1 - self.beta_3))
    self.assign_add(square, (ops.square(gradient) - square) * (1 - self.beta_2))
    size = ops.sqrt(square / (1 - ops.power(self.beta_2, step))) + self.epsilon
    direction = mean / (1 - ops.power(self.beta_1, step)) + self.alpha * slow
    self.assign_sub(variable, rate * direction / size)


@loopwright.register
class ADOPT(_Adaptive):
  """Adam that divides a gradient by the squares before it, so it converges with any beta_2.

  Taniguchi et al., "ADOPT: Modified Adam Can Converge with Any beta_2 with the Optimal Rate"
  (2024), with the clipping of its section 5.
  """

  _slot_names = ("momentum", "velocity")

  def __init__(
    self,
    learning_rate: Any = 1e-3,
    beta_1: float = 0.9,
    beta_2: float = 0.9999,
    epsilon: float = 1e-6,
    weight_decay: float | None = None,
  ) -> None:
    """Keeps the options.

    Args:
      learning_rate: a number or a schedule.
      beta_1, beta_2: of the average of gradients, and of their squares.
      epsilon: the least root of the squares.
      weight_decay: multiplied with the rate; None for none.
    """
    super().__init__(learning_rate, weight_decay, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon)

  def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
    """See Keras."""
    mean, square = self._slots[self._get_variable_index(variable)]
    rate, step = (ops.cast(x, variable.dtype) for x in (learning_rate, self.iterations))
    gradient, later = ops.cast(gradient, variable.dtype), ops.cast(step > 0, variable.dtype)
    limit = ops.power(step, 0.25)  # 0 in the first update, which only fills the squares
    scaled = ops.clip(gradient / ops.maximum(ops.sqrt(square), self.epsilon), -limit, limit)
    self.assign_add(mean, (scaled - mean) * (1 - self.beta_1) * later)
    self.assign_add(square, (ops.square(gradient) - square) * (1 - self.beta_2 * later))
    self.assign_sub(variable, rate * mean)
