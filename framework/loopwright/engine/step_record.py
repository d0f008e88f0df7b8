"""What one replica's step leaves to its trainer or evaluator: metrics, decisions, assignments."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.graphs import operations, randomness
from loopwright.graphs.aliases import Batch, Variable
from loopwright.graphs.autograph import as_written, converted, methods_as_written
from loopwright.metrics import Checked, PerExample, Sum, Summed, Weighted
from loopwright.models import models, replica_state
from loopwright.optimizers.updates import Assignments

if TYPE_CHECKING:
  from loopwright.engine.eval_step import EvalStep


class Sums(Protocol):
  """What adds up the metrics of steps, such as `MetricSums`."""

  def add(self, metrics: Mapping[str, Summed]) -> None:
    """Adds this replica's metrics (replica context)."""


@methods_as_written
class StepRecord:
  """Kept by the verbs of one replica's step, read when it is over (replica context).

  Attributes:
    batch: what the task's step got.
    assignments: what `Step.assign` sets.
    is_conditional: whether an update has a `when`.
    updates: (finite, loss is finite) of each update, bool scalars.
    gradient_dtypes: in which the traced backward passes compute.
    is_penalised: whether the loss has the penalties of layers.
    only_evaluated: the PerExample metrics that a training step leaves out.
    closing: return further metrics when the step is over.
  """

  def __init__(self, gather: Callable[[tf.Tensor], tf.Tensor]) -> None:
    """Starts with nothing; `gather` concatenates the rows of all replicas."""
    self._gather = gather
    self.batch: Batch = {}
    self.assignments = Assignments()
    self.is_conditional = False
    self.updates: list[tuple[tf.Tensor, tf.Tensor]] = []
    self.gradient_dtypes: set[str] = set()
    self.is_penalised = False
    self.only_evaluated: set[str] = set()
    self.closing: list[Callable[[], Mapping[str, Checked]]] = []
    self._logged: dict[str, Checked] = {}
    self._reached: dict[int, str] = {}

  @contextlib.contextmanager
  def differentiates(self) -> Iterator[None]:
    """Inside, a backward pass is made, whose dtypes are kept."""
    graph = randomness.current_graph()
    first = len(graph.get_operations()) if graph else 0
    yield
    self.gradient_dtypes |= operations.dtypes(graph, first) if graph else set()

  def gets(
    self, variables: Sequence[Variable], missing: Sequence[bool], frozen: Collection[int]
  ) -> None:
    """An optimizer gets gradients of these variables, but where they are missing or frozen."""
    for variable, absent in zip(variables, missing, strict=True):
      key, name = id(models.raw(variable)), models.name(variable)
      expected = absent and key not in frozen
      self._reached[key] = self._reached.get(key, name) and (name if expected else "")

  @property
  def unreached(self) -> list[str]:
    """The names of variables for which no optimizer has got a gradient, though for others."""
    return list(filter(None, self._reached.values()))

  def add(self, metrics: Mapping[str, Checked]) -> None:
    """Adds metrics to those of the same names; nothing where activations are computed again.

    Raises:
      ConfigError: a name has two kinds of metrics, or Sums of two shapes.
    """
    if randomness.is_repeating():
      return
    for name, value in metrics.items():
      known = self._logged.get(name)
      self._logged[name] = value if known is None else _both(name, known, value)

  @contextlib.contextmanager
  def collected(self) -> Iterator[dict[str, Checked]]:
    """Yields what is logged inside `with`; it does not count, unless it is logged again."""
    outside, self._logged = self._logged, {}
    try:
      yield self._logged
    finally:
      self._logged = outside

  def outcome(self) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (gradients finite, losses finite), bool scalars over all updates of the step.

    Raises:
      ConfigError: the task logged no update.
    """
    if not self.updates:
      raise ConfigError(
        "train_step() made no update; call step.update(), or step.log_update() after step.apply()."
      )
    finite, loss_finite = (
      functools.reduce(tf.logical_and, flags) for flags in zip(*self.updates, strict=True)
    )
    return finite, loss_finite

  def close(self, sums: Sums, own: Mapping[str, Weighted] | None = None) -> dict[str, PerExample]:
    """Adds the logged metrics, and the framework's `own`, to `sums`.

    Returns:
      The PerExample metrics of all replicas, in replica order, equal on each.
    """
    for metrics in self.closing:
      self.add(metrics())
    self.add(own or {})
    rows = {name: value for name, value in self._logged.items() if isinstance(value, PerExample)}
    sums.add({name: value for name, value in self._logged.items() if name not in rows})
    return {name: PerExample(*map(self._gather, value.wide)) for name, value in rows.items()}


@as_written
def run(step: EvalStep, task_step: Callable[..., None], batch: Batch) -> None:
  """Calls `Task.train_step` or `Task.eval_step` with the batch and its "step", int64 [n]."""
  rows = tf.shape(batch["weight"])[:1] if "weight" in batch else [1]
  step.record.batch = {**batch, "step": tf.fill(rows, step.number)}
  first_values = tf.variable_creator_scope(replica_state.made_at_once)
  with step.surroundings(step.record.batch), first_values:
    converted(task_step)(step, step.record.batch)


def _both(name: str, one: Checked, other: Checked) -> Checked:
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


def _what(metric: Checked) -> str:
  """Returns what an error calls a metric."""
  if isinstance(metric, (Sum, PerExample)):
    return f"a {type(metric).__name__} of shape {metric[0].shape}"
  return "a pair (total, weight)"
