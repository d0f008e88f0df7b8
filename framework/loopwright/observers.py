"""How the ledger, the times of workers and rollback observe training.

An ordinary run has no observer; that of several workers has one, which times their all-reduce.

A trainer calls an `Observer` in its loops and steps, and a `StepObserver` in one replica's verbs:

loop_begins            host           before a loop
  loop_starts          cross-replica  the loop's first operation
    step_begins        cross-replica  before the step takes its batch
    batch_taken        cross-replica
      forward          replica        around a forward pass
      all_reduce       replica        around the all-reduce
      checked          replica        after the check of the reduced gradients
      allowed          replica        decides whether to apply the update
      applies          replica        the gradients that an optimizer gets
        before_update  cross-replica  just before the update
      metrics          replica        the observer's metrics of the step
    step_ends          cross-replica  tells whether it has undone the step
loop_ends              host           after a loop

All calls between `loop_begins` and `loop_ends` are traced into the compiled loop. They are
heard before the first `loop_begins`, as the loop is traced and examined before it runs; in eager
mode and on a mesh, after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import tensorflow as tf

from loopwright.graphs.aliases import AnySource, Batch, PerReplica

if TYPE_CHECKING:
  from loopwright.metrics import Loss
  from loopwright.models.task_state import TaskState
  from loopwright.optimizers.adapters import Optimizer
  from loopwright.optimizers.fusion import Gradients
  from loopwright.optimizers.loss_scale import LossScale

Tensors: TypeAlias = Sequence[tf.Tensor]
AllReduce: TypeAlias = Callable[[Tensors, Tensors], tuple[list[tf.Tensor], list[tf.Tensor]]]
"""(gradients, scalars) of this replica -> their sums over all replicas."""
Forward: TypeAlias = "Callable[[Batch], Loss]"
"""Micro-batch -> this replica's sums."""
Metrics: TypeAlias = Mapping[str, tuple[tf.Tensor, tf.Tensor]]
"""Name -> (total, weight)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
  """What a trainer reads; for the other attributes, see `inputs.datasets.train_dataset`.

  Attributes:
    source: the task's training source.
    padded_batch_size: rows of a global batch, padding included.
  """

  source: AnySource
  position: int
  seed: int
  shuffle: bool
  global_batch_size: int
  padded_batch_size: int
  rows: range | None
  pad_multiple: int = 1


class StepObserver:
  """Observes one replica's step (replica context); the base class changes nothing."""

  def forward(self, loss_fn: Forward, log: Callable[[Metrics], None]) -> Forward:
    """Returns the forward pass of a micro-batch: `loss_fn`, or what calls it.

    Args:
      loss_fn: the pass.
      log: takes metrics of the pass, like `metrics`; they are zeros where it is not run.
    """
    del log
    return loss_fn

  def all_reduce(
    self, reduce: AllReduce, gradients: Tensors, scalars: Tensors
  ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Wraps the all-reduce: returns `reduce(gradients, scalars)`.

    Args:
      reduce: the all-reduce.
      gradients: this replica's scaled gradients.
      scalars: this replica's loss total and weight.
    """
    return reduce(gradients, scalars)

  def checked(self, finite: tf.Tensor, norm: tf.Tensor) -> None:
    """Receives what `Step.check` returns of the reduced gradients, a bool and a float32 scalar."""

  def allowed(self, finite: tf.Tensor) -> tf.Tensor:
    """Returns whether to apply an update, a bool scalar equal on every replica.

    Args:
      finite: bool scalar, the decision so far.
    """
    return finite

  def applies(self, optimizer: Optimizer, gradients: Gradients) -> None:
    """Receives the gradients that an optimizer gets if the update is applied.

    Args:
      optimizer: the optimizer.
      gradients: reduced, unscaled and clipped, equal on every replica.
    """

  def before_update(self, optimizer: Optimizer) -> None:
    """Runs before an optimizer updates its variables, or skips this (cross-replica)."""

  def metrics(self) -> Metrics:
    """Returns name -> (total, weight), this replica's sums in the step."""
    return {}


class Observer:
  """Observes the loops and steps of a `Trainer`; the base class changes nothing."""

  def of_replica(self) -> StepObserver:
    """Returns a new observer of one replica's step; called once per trace (replica context)."""
    return StepObserver()

  def learns(self, loss_scale: LossScale, state: TaskState) -> bool:
    """Receives what was found in the traced loop; whether it must be traced again for it (host)."""
    del loss_scale, state
    return False

  def reads(self, what: Reading) -> None:
    """Receives what the trainer reads from now on, each time that its input is made (host)."""

  def loop_begins(self, *, after_step: int, steps: int) -> None:
    """Runs before a loop (host).

    Args:
      after_step: the number of completed steps.
      steps: the planned number of steps of the loop.
    """

  def loop_starts(self) -> None:
    """Runs at the start of the compiled loop (cross-replica)."""

  def step_begins(self) -> None:
    """Runs before the step takes its batch (cross-replica)."""

  def batch_taken(self, batch: Mapping[str, PerReplica], step: tf.Tensor) -> None:
    """Receives the batch of the step (cross-replica).

    Args:
      batch: name -> per-replica values.
      step: int64 scalar, the number of steps before this one.
    """

  def step_ends(self, finite: tf.Tensor, loss_finite: tf.Tensor) -> tf.Tensor:
    """Returns a bool scalar, False if this observer has undone the step (cross-replica).

    Undoing restores weights, counters and optimizer state from before the step; the loop then ends.

    Args:
      finite: bool scalar, whether all reduced gradients of the step are finite.
      loss_finite: bool scalar, whether all losses are finite.
    """
    del finite, loss_finite
    return tf.constant(True)

  def loop_ends(self, results: dict[str, float], *, done: int, ran: int) -> None:
    """Runs after a loop; may change `results` (host).

    Args:
      results: name -> mean over the steps that ran.
      done: the number of steps, without an undone one.
      ran: the number of steps that ran: `done` + 1 if the last one was undone.
    """


def may_undo(observers: Sequence[Observer]) -> bool:
  """Whether one of them can undo a step: it has a `step_ends` of its own."""
  return any(type(each).step_ends is not Observer.step_ends for each in observers)
