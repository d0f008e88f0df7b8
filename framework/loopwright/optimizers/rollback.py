"""Undoes the first step of a loop that is not finite, so that it can be examined and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from loopwright.graphs.aliases import Model, PerReplica
from loopwright.models import models
from loopwright.models.replica_state import assign
from loopwright.models.task_state import TaskState
from loopwright.observers import AllReduce, Observer, StepObserver, Tensors
from loopwright.optimizers.adapters import Optimizer
from loopwright.optimizers.ema import Ema
from loopwright.optimizers.loss_scale import LossScale

Saved = tuple[Sequence[tf.Variable], Sequence[PerReplica]]
"""Variables, and what `read` returned for them."""


class Rollback(Observer):
  """Ends a loop at the first step that is not finite, and undoes what that step changed.

  A step is bad if one of its losses or a reduced gradient is not finite. If the loss scale reacts
  to overflows, gradients do not count.

  Updates of a bad step are not applied. Everything else that a step changes is read first: the
  model's non-trainable variables (such as statistics of batch normalization), the state of the task
  that its trace has shown, the loss scale, the counters, and what an update changes if it is not
  the step's last. A read shares the variable's buffer; only a variable that is then updated in
  place is copied.

  Not undone: trainable variables that a task's own `train_step` assigns directly.
  """

  def __init__(
    self,
    *,
    strategy: tf.distribute.Strategy,
    model: Model,
    loss_scale: LossScale,
    counters: Sequence[tf.Variable] = (),
    ema: Ema | None = None,
    on_stop: Callable[[], None] = lambda: None,
  ) -> None:
    """Reads nothing yet.

    Args:
      counters: the variables in which the trainer counts steps.
      on_stop: called (host) after a loop that ended at a bad step.
    """
    trainable = {id(models.raw(v)) for v in models.trainable_variables(model)}
    others = [models.raw(v) for v in models.all_variables(model)]
    self._always = [*(v for v in others if id(v) not in trainable), *counters]
    self._strategy, self._ema, self._on_stop = strategy, ema, on_stop
    self._volatile = [*self._always, *loss_scale.variables]
    self.counts_gradients = not loss_scale.expects_overflow
    self._saved: dict[int, Saved] = {}
    self._of_last_update: dict[int, Saved] = {}
    self._after_step = 0

  def learns(self, loss_scale: LossScale, state: TaskState) -> bool:
    """See `Observer`."""
    before = len(self._volatile)
    self._volatile = [*self._always, *loss_scale.variables, *state.changed]
    self.counts_gradients &= not loss_scale.expects_overflow
    return len(self._volatile) > before

  def of_replica(self) -> StepObserver:
    """See `Observer`."""
    return _ReplicaRollback(self)

  def loop_begins(self, *, after_step: int, steps: int) -> None:
    """See `Observer`."""
    del steps
    self._after_step = after_step

  def step_begins(self) -> None:
    """Reads what any step may change (cross-replica)."""
    self._saved = {0: (self._volatile, read(self._strategy, self._volatile))}
    self._of_last_update = {}

  def before_update(self, optimizer: Optimizer) -> None:
    """Reads what an update changes; called before the update (cross-replica)."""
    if id(optimizer) not in self._saved:
      variables = changed_by(optimizer, self._ema)
      self._of_last_update = {id(optimizer): (variables, read(self._strategy, variables))}

  def update_may_be_undone(self) -> None:
    """Keeps the values read before the last update, as another all-reduce follows (any context)."""
    self._saved |= self._of_last_update
    self._of_last_update = {}

  def step_ends(self, finite: tf.Tensor, loss_finite: tf.Tensor) -> tf.Tensor:
    """Returns whether the step is good, a bool scalar; if not, undoes it (cross-replica).

    Args:
      finite: bool scalar, whether all reduced gradients are finite.
      loss_finite: bool scalar, whether all losses are finite.
    """
    good = loss_finite & finite if self.counts_gradients else loss_finite
    saved = [(v, value) for pair in self._saved.values() for v, value in zip(*pair, strict=True)]
    if saved:
      tf.cond(good, lambda: None, lambda: write(self._strategy, *zip(*saved, strict=True)))
    return good

  def loop_ends(self, results: dict[str, float], *, done: int, ran: int) -> None:
    """Adds "nonfinite_step", the number of the bad step counted from 1, if there was one (host)."""
    if ran > done:
      self._on_stop()
      results["nonfinite_step"] = float(self._after_step + ran)


class _ReplicaRollback(StepObserver):
  """Rejects updates after a loss, or a gradient of an earlier update, that is not finite."""

  def __init__(self, rollback: Rollback) -> None:
    self._rollback = rollback
    self._required: list[tf.Tensor] = []
    self._checked: list[tf.Tensor] = []

  def all_reduce(
    self, reduce: AllReduce, gradients: Tensors, scalars: Tensors
  ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    sums, scalar_sums = reduce(gradients, scalars)
    self._rollback.update_may_be_undone()
    self._required.append(tf.math.is_finite(scalar_sums[0]))
    return sums, scalar_sums

  def checked(self, finite: tf.Tensor, norm: tf.Tensor) -> None:
    del norm
    self._checked.append(finite)

  def allowed(self, finite: tf.Tensor) -> tf.Tensor:
    for required in self._required:
      finite &= required
    self._required += self._checked if self._rollback.counts_gradients else []
    self._checked = []
    return finite

  def before_update(self, optimizer: Optimizer) -> None:
    self._rollback.before_update(optimizer)


def changed_by(optimizer: Optimizer, ema: Ema | None) -> list[tf.Variable]:
  """Returns the variables that an update changes: weights, optimizer state, averages of weights."""
  changed = [*optimizer.variables, *optimizer.optimizer.variables]
  if (product := getattr(optimizer.optimizer, "_u_product", None)) is not None:
    changed.append(product)  # Nadam's `variables` leave it out
  averages = ema.averages_of(optimizer.variables) if ema else []
  distinct = {id(models.raw(v)): models.raw(v) for v in [*changed, *averages]}
  return list(distinct.values())


def read(strategy: tf.distribute.Strategy, variables: Sequence[tf.Variable]) -> list[PerReplica]:
  """Returns the values of variables, per replica (cross-replica)."""
  if not variables:
    return []
  return strategy.extended.call_for_each_replica(lambda: [v.read_value() for v in variables])


def write(
  strategy: tf.distribute.Strategy, variables: Sequence[tf.Variable], values: Sequence[PerReplica]
) -> None:
  """Assigns the values that `read` returned, per replica (cross-replica)."""

  for variable, value in zip(variables, values, strict=True):
    assign(strategy, variable, value)
