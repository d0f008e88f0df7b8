"""Undoes a training step that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from framework.backend import models
from framework.backend.autograph import as_written
from framework.backend.replica_state import assign
from framework.optimizers.adapters import Optimizer
from framework.optimizers.ema import Ema


class Watch:
  """Undoes the step of a loop that is not finite; the loop then ends.

  `Step.apply` asks `Watch` and skips the update of a bad step. Other state is read before a step
  changes it: the model's non-trainable variables (such as statistics of batch normalisation), the
  loss scale, and everything that an update changes, if it is not the last update of the step. A
  read shares the variable's buffer. Only a variable that is then updated in place is copied, which
  happens for those earlier updates.

  Not undone: trainable variables that a task's own `train_step` assigns directly.
  """

  def __init__(
    self,
    *,
    strategy: tf.distribute.Strategy,
    model: Any,
    loss_scale: Any,
    ema: Ema | None,
    on_stop: Callable[[], None] = lambda: None,
  ) -> None:
    """Reads nothing yet.

    Args:
      strategy: the current one.
      model: its non-trainable variables are restored.
      loss_scale: the run's `LossScale`.
      ema: the run's moving average, if any.
      on_stop: called by `Trainer.train` (host) after the loop has stopped at a bad step.
    """
    trainable = {id(models.raw(v)) for v in models.trainable_variables(model)}
    others = [models.raw(v) for v in models.all_variables(model)]
    self._volatile = [v for v in others if id(v) not in trainable] + list(loss_scale.variables)
    self._strategy, self._ema, self.on_stop = strategy, ema, on_stop
    self.counts_gradients = not loss_scale.expects_overflow
    self._kept: dict[int, tuple[list[tf.Variable], Any]] = {}
    self._last: dict[int, tuple[list[tf.Variable], Any]] = {}

  @as_written
  def begin(self) -> None:
    """Reads what any step may change; call before each step (cross-replica)."""
    self._kept, self._last = {0: (self._volatile, read(self._strategy, self._volatile))}, {}

  @as_written
  def before_update(self, optimizer: Optimizer) -> None:
    """Reads what an update changes; call before the update (cross-replica)."""
    if id(optimizer) not in self._kept:
      variables = _changed_by(optimizer, self._ema)
      self._last = {id(optimizer): (variables, read(self._strategy, variables))}

  def before_check(self) -> None:
    """Keeps the values of an update that precedes another check, to undo it too (any context)."""
    self._kept, self._last = {**self._kept, **self._last}, {}

  @as_written
  def stands(self, finite: tf.Tensor, loss_finite: tf.Tensor) -> tf.Tensor:
    """Returns whether a step is good, a bool scalar; if not, undoes it (cross-replica).

    Args:
      finite: bool scalar, whether all reduced gradients are finite.
      loss_finite: bool scalar, whether all losses are finite.
    """
    good = loss_finite & finite if self.counts_gradients else loss_finite
    kept = [(v, value) for pair in self._kept.values() for v, value in zip(*pair, strict=True)]
    if kept:
      tf.cond(good, lambda: None, lambda: write(self._strategy, *zip(*kept, strict=True)))
    return good


def _changed_by(optimizer: Optimizer, ema: Ema | None) -> list[tf.Variable]:
  changed = [*optimizer.variables, *optimizer.optimizer.variables]
  averages = ema.averages_of(optimizer.variables) if ema else []
  distinct = {id(models.raw(v)): models.raw(v) for v in [*changed, *averages]}
  return list(distinct.values())


def read(strategy: tf.distribute.Strategy, variables: Sequence[tf.Variable]) -> list[Any]:
  """Returns the values of variables, per replica (cross-replica)."""
  if not variables:
    return []
  return strategy.extended.call_for_each_replica(
    as_written(lambda: [v.read_value() for v in variables])
  )


def write(
  strategy: tf.distribute.Strategy, variables: Sequence[tf.Variable], values: Sequence[Any]
) -> None:
  """Assigns the values that `read` returned, per replica (cross-replica)."""

  for variable, value in zip(variables, values, strict=True):
    assign(strategy, variable, value)
