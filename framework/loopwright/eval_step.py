"""A step that only logs: evaluation, and what training steps have in common with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import tensorflow as tf

from loopwright.aliases import Batch
from loopwright.errors import ConfigError
from loopwright.graphs.autograph import converted, methods_as_written
from loopwright.metrics import Metric, PerExample, Sum, Weighted
from loopwright.metrics.checks import checked
from loopwright.metrics.sums import MetricSums
from loopwright.models import recomputation
from loopwright.strategies.reduction import Reduction


@methods_as_written
class EvalStep:
  """One evaluation step on one replica: collects the task's metrics (replica context)."""

  def __init__(
    self, reduction: Reduction | None = None, *, number: tf.Tensor | int | None = None
  ) -> None:
    """Starts with nothing logged.

    Args:
      reduction: what `all_gather` uses; None uses the default.
      number: see `number`; None is 0.
    """
    self._logged: dict[str, Metric] = {}
    self._reduction = reduction or Reduction()
    self._number = tf.cast(0 if number is None else number, tf.int64)

  @property
  def number(self) -> tf.Tensor:
    """The number of training steps before this one, an int64 scalar: 0 in the first step.

    In evaluation, the number of all training steps so far. Equal on all replicas; under parameter
    servers, the number when this worker began the step.
    """
    return self._number

  def run(self, task_step: Callable[..., None], batch: Batch) -> None:
    """Calls `Task.train_step` or `Task.eval_step` with the batch and its "step", int64 [n]."""
    rows = tf.shape(batch["weight"])[:1] if "weight" in batch else [1]
    converted(task_step)(self, {**batch, "step": tf.fill(rows, self.number)})

  def log(self, metrics: Mapping[str, Metric]) -> None:
    """Adds this replica's metrics: name -> (total, weight), float scalars, `Sum` or `PerExample`.

    Pairs and Sums logged under the same name add up; rows of PerExample follow one another.

    Raises:
      ConfigError: not a dict of such metrics.
    """
    self._add(checked(metrics))

  @contextlib.contextmanager
  def collected(self) -> Iterator[dict[str, Metric]]:
    """Yields what is logged inside `with`; it does not count, unless it is logged again."""
    outside, self._logged = self._logged, {}
    try:
      yield self._logged
    finally:
      self._logged = outside

  def _add(self, metrics: Mapping[str, Metric]) -> None:
    if recomputation.is_repeating():
      return
    for name, value in metrics.items():
      known = self._logged.get(name)
      self._logged[name] = value if known is None else _both(name, known, value)

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

  def close(
    self, sums: MetricSums, own: Mapping[str, Weighted] | None = None
  ) -> dict[str, PerExample]:
    """Adds the logged metrics, and the framework's `own`, to `sums`; the framework calls it.

    Returns:
      The PerExample metrics of all replicas, in replica order, equal on each.
    """
    self._add(own or {})
    rows = {name: value for name, value in self._logged.items() if isinstance(value, PerExample)}
    sums.add({name: value for name, value in self._logged.items() if name not in rows})
    gather = self._reduction.all_gather
    return {name: PerExample(*map(gather, value.wide)) for name, value in rows.items()}


def _both(name: str, one: Metric, other: Metric) -> Metric:
  """Returns one metric of two that a step logs under one name."""
  kinds = (PerExample, Sum, tuple)
  both = {next(kind for kind in kinds if isinstance(value, kind)) for value in (one, other)}
  if both == {PerExample}:
    return PerExample(*(tf.concat(parts, axis=0) for parts in zip(one, other, strict=True)))
  if both == {Sum} and one[0].shape == other[0].shape:
    return Sum(one[0] + other[0])
  if both == {tuple} and len(one) == len(other) == 2:
    return one[0] + other[0], one[1] + other[1]
  raise ConfigError(
    f"the step logs {name!r} twice, as {_what(one)} and as {_what(other)}; give them two names."
  )


def _what(metric: Metric) -> str:
  """Returns what an error calls a metric."""
  if isinstance(metric, (Sum, PerExample)):
    return f"a {type(metric).__name__} of shape {metric[0].shape}"
  return "a pair (total, weight)"
