"""The seam for what watches training from outside: ledger, time budget, rollback. A run has none.

An `Observer` hears of a trainer's loops and steps, a `StepObserver` of one replica's verbs:

loop_begins            host           before a loop
  loop_starts          cross-replica  the loop's first operation
    step_begins        cross-replica  before the step takes its batch
    batch_taken        cross-replica
      all_reduce       replica        around the all-reduce
      checked          replica        the reduced gradients were checked
      allowed          replica        may this update be applied?
        before_update  cross-replica  just before it
      metrics          replica        what the step reports for the observer
    step_ends          cross-replica  does this step stand?
loop_ends              host           after a loop

Everything between `loop_begins` and `loop_ends` is traced into the compiled loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import tensorflow as tf

if TYPE_CHECKING:
  from framework.optimizers.adapters import Optimizer

Tensors: TypeAlias = Sequence[tf.Tensor]
AllReduce: TypeAlias = Callable[[Tensors, Tensors], tuple[list[tf.Tensor], list[tf.Tensor]]]
"""(gradients, scalars) of this replica -> their sums over all replicas."""


class StepObserver:
  """Observes one replica's step (replica context); this base class changes nothing."""

  def all_reduce(
    self, reduce: AllReduce, gradients: Tensors, scalars: Tensors
  ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns `reduce(gradients, scalars)`.

    `scalars` are loss total and weight; all values are this replica's, gradients scaled.
    """
    return reduce(gradients, scalars)

  def checked(self, finite: tf.Tensor) -> None:
    """Hears whether reduced gradients are finite, a bool scalar."""

  def allowed(self, finite: tf.Tensor) -> tf.Tensor:
    """Returns whether to apply an update, a bool scalar, equal on every replica, as `finite` is."""
    return finite

  def before_update(self, optimizer: Optimizer) -> None:
    """Runs just before an optimizer updates its variables (cross-replica)."""

  def metrics(self) -> Mapping[str, tuple[Any, Any]]:
    """Returns name -> (total, weight), this replica's sums, at the end of the step."""
    return {}


class Observer:
  """Observes the loops and steps of a `Trainer`; this base class changes nothing."""

  def of_replica(self) -> StepObserver:
    """Returns a new observer for one replica's step; called each time a step is traced."""
    return StepObserver()

  def loop_begins(self, *, after_step: int, steps: int) -> None:
    """Runs before a loop of `steps` steps (host)."""

  def loop_starts(self) -> None:
    """Adds the first operation of the compiled loop (cross-replica)."""

  def step_begins(self) -> None:
    """Runs before the step takes its batch (cross-replica)."""

  def batch_taken(self, batch: Any, step: tf.Tensor) -> None:
    """Hears which batch, name -> per-replica values, the step after `step` took (cross-replica)."""

  def step_ends(self, finite: tf.Tensor, loss_finite: tf.Tensor) -> tf.Tensor:
    """Returns whether the step stands, a bool scalar (cross-replica).

    The loop ends after a step that does not stand. Whoever says so has undone the step: weights,
    counters and the optimizer's state are what they were before it.

    Args:
      finite: bool scalar, whether all reduced gradients of the step are finite.
      loss_finite: bool scalar, whether all losses are.
    """
    del finite, loss_finite
    return tf.constant(True)

  def loop_ends(self, results: dict[str, float], *, done: int, ran: int) -> None:
    """Runs after a loop (host); may add to its results or change them.

    Args:
      results: name -> mean over the steps that ran.
      done: how many steps stand.
      ran: how many steps ran: one more than `done` if the last one does not stand.
    """
