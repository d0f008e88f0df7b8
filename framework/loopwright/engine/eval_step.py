"""A step that only logs: evaluation, and what training steps have in common with it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import tensorflow as tf

from loopwright.distribution.reduction import Reduction
from loopwright.engine.step_record import StepRecord
from loopwright.errors import ConfigError
from loopwright.graphs.aliases import Batch, StepNumber
from loopwright.graphs.autograph import methods_as_written
from loopwright.metrics import Metric
from loopwright.metrics.checks import checked


@methods_as_written
class EvalStep:
  """One evaluation step on one replica: collects the task's metrics (replica context).

  Attributes:
    record: what the step leaves to the evaluator.
  """

  def __init__(
    self, reduction: Reduction | None = None, *, number: tf.Tensor | int | None = None
  ) -> None:
    """Starts with nothing logged.

    Args:
      reduction: what `all_gather` uses; None uses the default.
      number: see `number`; None is 0.
    """
    self._reduction = reduction or Reduction()
    self.record = StepRecord(self._reduction.all_gather)
    self._number = tf.cast(0 if number is None else number, tf.int64)

  @property
  def number(self) -> StepNumber:
    """The number of training steps before this one, an int64 scalar: 0 in the first step.

    In evaluation, the number of all training steps so far. Equal on all replicas; under parameter
    servers, the number when this worker began the step.
    """
    return self._number

  def surroundings(self, batch: Batch) -> contextlib.AbstractContextManager[None]:
    """Returns what the task's step runs inside of (replica context)."""
    del batch
    return contextlib.nullcontext()

  def log(self, metrics: Mapping[str, Metric]) -> None:
    """Adds this replica's metrics: name -> (total, weight), float scalars, `Sum` or `PerExample`.

    Pairs and Sums logged under the same name add up; rows of PerExample follow one another.

    Raises:
      ConfigError: not a dict of such metrics.
    """
    self.record.add(checked(metrics))

  def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
    """Concatenates the rows of all replicas, in replica order; differentiable (replica context).

    Use it for a loss over the examples of all replicas. The gradient with respect to this replica's
    rows is summed over the losses of all replicas. Row i of this replica is row
    `replica_id() * n + i` of the result. Padded rows are included: gather the weights too. With
    accumulation, gathers one micro-batch. Under parameter servers each worker takes whole batches,
    and its rows are all there are.

    Args:
      tensor: any numeric dtype [n, ...], the same static shape on every replica.

    Returns:
      [replicas x n, ...], the same on every replica.

    Raises:
      ConfigError: the shape is not static; or with `Trainer.jit_compile` on several replicas.
    """
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.rank in (None, 0) or not tensor.shape.is_fully_defined():
      raise ConfigError(
        f"step.all_gather() got a tensor of shape {tensor.shape}; it must be [n, ...] with static "
        "sizes, the same on every replica, such as a batch feature."
      )
    return self._reduction.all_gather(tensor)
