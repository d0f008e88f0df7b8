"""The evaluator: structured like the trainer, without gradients; counts every example once."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

import orbit
import tensorflow as tf

from framework.backend.autograph import compiled
from framework.backend.timing import timed
from framework.errors import ConfigError
from framework.inputs import datasets
from framework.inputs.datasets import Batch
from framework.inputs.sources import Source, StreamSource
from framework.metrics import CollectedRows, MetricSums, PerExample
from framework.optimizers.ema import Ema
from framework.step import EvalStep
from framework.strategies import traits
from framework.task import Task, derived_metrics

Batches: TypeAlias = tf.data.Dataset | Callable[..., tf.data.Dataset]
"""The padded global batches of one evaluation set, or a function that returns them."""


@dataclasses.dataclass
class EvalSet:
  """One evaluation set; `name` is "" if there is only one.

  Attributes:
    batches: distributed.
    total: the number of batches, if it is known.
    sums: of the metrics.
    step: runs one batch, or under parameter servers one shard.
  """

  name: str
  batches: Any
  total: int | None
  sums: MetricSums
  step: Callable[..., Any]

  @property
  def where(self) -> str:
    """What an error calls it."""
    return f"source('eval')[{self.name!r}]" if self.name else "source('eval')"


class Evaluator(orbit.AbstractEvaluator):
  """Evaluates a task on finite data sets; `orbit.Controller` or your own loop calls `evaluate`.

  For parameter servers, use `framework.parameter_server.ParameterServerEvaluator`.

  Attributes:
    sources: name -> source of each set, if a `Recipe` made this evaluator.
    between_batches: called after each batch with the set's name, its batches so far and its batches
      in all, None if unknown (host); it may raise, to end the evaluation. On every worker of a
      cluster, it is called equally often. Parameter servers call it several times a second, with 0
      batches.
  """

  def __init__(
    self,
    *,
    task: Task,
    strategy: tf.distribute.Strategy,
    dataset: Batches | Mapping[str, Batches],
    ema: Ema | None = None,
    global_step: tf.Variable | None = None,
    eager: bool = False,
  ) -> None:
    """Prepares dataset and metrics (host); raises ConfigError for an asynchronous strategy.

    Args:
      task: the task to evaluate; `task.model` must be built.
      strategy: the strategy of the model.
      dataset: finite, of padded global batches (in a cluster: this worker's rows); see
        `datasets.eval_dataset`. Or a function that returns it; parameter servers require one and
        call it with `shard=`. Or name -> one of these, for several sets.
      ema: evaluate with these averages instead of the variables.
      global_step: int64 scalar, what `EvalStep.number` reads; None is 0.
      eager: use no tf.function.
    """
    super().__init__()
    self.task, self.strategy, self.eager, self._ema = task, strategy, eager, ema
    self._global_step = global_step
    self.sources: Mapping[str, Source | StreamSource] = {}
    self.between_batches: Callable[[str, int, int | None], None] = lambda *_: None
    self._prepare(dataset if isinstance(dataset, Mapping) else {"": dataset})

  @timed("evaluation")
  def evaluate(self, num_steps: tf.Tensor | int = -1) -> dict[str, float]:
    """Evaluates the first `num_steps` batches of each set, or all for -1 (host).

    Returns:
      name -> total / weight summed over all examples, and the metrics that the task derives. Of
      several sets, the names are "<set>/<metric>".

    Raises:
      ConfigError: a set has no examples, or all have weight 0.
    """
    results: dict[str, float] = {}
    with self._ema.in_place() if self._ema else contextlib.nullcontext():
      for one in self._sets:
        prefix = f"{one.name}/" if one.name else ""
        found = self._evaluate(one, int(num_steps))
        results |= {f"{prefix}{name}": value for name, value in found.items()}
    return results

  def metric_names(self) -> set[str] | None:
    """Returns the names of the logged means, from the trace that `evaluate` uses (host).

    Executes nothing. What the task derives is not among them. None in eager mode, under parameter
    servers and for batches of several shapes, which trace later, otherwise or never.
    """
    specs = [one.batches.element_spec for one in self._sets]
    parts = tf.nest.flatten(specs, expand_composites=True)
    if self.eager or not all(part.shape.is_fully_defined() for part in parts):
      return None
    names: set[str] = set()
    for one, spec in zip(self._sets, specs, strict=True):
      self._metrics, step = one.sums, cast(Any, one.step)
      step.get_concrete_function(spec)
      names |= {f"{one.name}/{name}" if one.name else name for name in one.sums.names}
    return names

  def _evaluate(self, one: EvalSet, limit: int) -> dict[str, float]:
    self._metrics = one.sums
    self._metrics.reset()  # an earlier evaluation may have failed midway
    batches, rows = self._run_batches(one, limit)
    results = self._metrics.result()
    if limit:
      self._require_examples(one, results, batches)
    arrays = {**self._metrics.sums, **rows.result()}
    return results | derived_metrics(self.task, results, arrays)

  def _prepare(self, given: Mapping[str, Batches]) -> None:
    if traits.is_asynchronous(self.strategy):
      raise ConfigError(
        f"{type(self).__name__} needs a synchronous strategy, but parameter_server is "
        "asynchronous; use framework.parameter_server.ParameterServerEvaluator."
      )
    # Sets of the same features share a trace, and so the names of the metrics.
    shared: dict[str, tuple[MetricSums, Callable[..., Any]]] = {}
    self._sets: list[EvalSet] = []
    for name, dataset in given.items():
      whole = dataset() if callable(dataset) else dataset
      features = repr(whole.element_spec)
      if features not in shared:
        with self.strategy.scope():
          sums = MetricSums()
        shared[features] = (sums, self.eval_step if self.eager else compiled(self.eval_step))
      batches = traits.cluster_of(self.strategy).distribute(whole)
      self._sets.append(EvalSet(name, batches, _length(whole), *shared[features]))

  def _run_batches(self, one: EvalSet, limit: int) -> tuple[int, CollectedRows]:
    """Evaluates the first `limit` batches, or all if negative; returns how many, and their rows."""
    done, rows = 0, CollectedRows()
    total = one.total if limit < 0 else min(limit, one.total or limit)
    for batch in itertools.islice(datasets.iterate(one.batches), limit if limit >= 0 else None):
      rows.add(one.step(batch))
      done += 1
      self.between_batches(one.name, done, total)
    return done, rows

  def eval_step(self, batch: Any) -> dict[str, PerExample]:
    """Evaluates one global batch; returns its PerExample metrics (cross-replica)."""
    rows = self.strategy.run(self.replica_step, args=(batch,))
    first = self.strategy.experimental_local_results
    return {name: PerExample(*(first(part)[0] for part in rows[name])) for name in rows}

  def replica_step(self, batch: Batch) -> dict[str, PerExample]:
    """Runs the task's step and sums its metrics; see `EvalStep.close` (replica context)."""
    number = None if self._global_step is None else self._global_step.read_value()
    step = EvalStep(number=number)
    step.run(self.task.eval_step, batch)
    return step.close(self._metrics)

  def _require_examples(self, one: EvalSet, results: Mapping[str, float], batches: int) -> None:
    if batches == 0:
      raise ConfigError(
        f"{type(self.task).__name__}.{one.where} has no examples; it must have at least one."
      )
    if results and self._metrics.weightless >= set(results):
      raise ConfigError(
        f"all examples of {batches} evaluation batches have weight 0; batch['weight'], from "
        f"{one.where} or preprocess(), must be above 0 for some."
      )


def _length(batches: tf.data.Dataset) -> int | None:
  length = int(batches.cardinality())
  return length if length >= 0 else None
