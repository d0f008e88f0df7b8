"""The evaluator: structured like the trainer, without gradients; counts every example once."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any

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


class Evaluator(orbit.AbstractEvaluator):
  """Evaluates a task on a finite dataset; `orbit.Controller` or your own loop calls `evaluate`.

  For parameter servers, use `framework.parameter_server.ParameterServerEvaluator`.
  """

  def __init__(
    self,
    *,
    task: Task,
    strategy: tf.distribute.Strategy,
    dataset: tf.data.Dataset | Callable[..., tf.data.Dataset],
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
        call it with `shard=`.
      ema: evaluate with these averages instead of the variables.
      global_step: int64 scalar, what `EvalStep.number` reads; None is 0.
      eager: use no tf.function.
    """
    super().__init__()
    self.task, self.strategy, self.eager, self._ema = task, strategy, eager, ema
    self._global_step = global_step
    self.source: Source | StreamSource | None = None
    self._prepare(dataset)

  @timed("evaluation")
  def evaluate(self, num_steps: tf.Tensor | int = -1) -> dict[str, float]:
    """Evaluates the first `num_steps` batches, or all for -1 (host).

    Returns:
      name -> total / weight summed over all examples, and the metrics that the task derives.

    Raises:
      ConfigError: there are no examples, or all have weight 0.
    """
    limit = int(num_steps)
    self._metrics.reset()  # an earlier evaluation may have failed midway
    with self._ema.in_place() if self._ema else contextlib.nullcontext():
      batches, rows = self._run_batches(limit)
      results = self._metrics.result()
    if limit:
      self._require_examples(results, batches)
    return results | derived_metrics(self.task, results, {**self._metrics.sums, **rows.result()})

  def _prepare(self, dataset: tf.data.Dataset | Callable[..., tf.data.Dataset]) -> None:
    if traits.is_asynchronous(self.strategy):
      raise ConfigError(
        f"{type(self).__name__} needs a synchronous strategy, but parameter_server is "
        "asynchronous; use framework.parameter_server.ParameterServerEvaluator."
      )
    whole = dataset() if callable(dataset) else dataset
    self._dataset = traits.cluster_of(self.strategy).distribute(whole)
    with self.strategy.scope():
      self._metrics = MetricSums()
    self._compiled_step = self.eval_step if self.eager else compiled(self.eval_step)

  def _run_batches(self, limit: int) -> tuple[int, CollectedRows]:
    """Evaluates the first `limit` batches, or all if negative; returns how many, and their rows."""
    batches, rows = 0, CollectedRows()
    for batch in itertools.islice(datasets.iterate(self._dataset), limit if limit >= 0 else None):
      rows.add(self._compiled_step(batch))
      batches += 1
    return batches, rows

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

  def _require_examples(self, results: Mapping[str, float], batches: int) -> None:
    if batches == 0:
      raise ConfigError(
        f"{type(self.task).__name__}.source('eval') has no examples; it must have at least one."
      )
    if results and self._metrics.weightless >= set(results):
      raise ConfigError(
        f"all examples of {batches} evaluation batches have weight 0; batch['weight'], from the "
        "source or preprocess(), must be above 0 for some."
      )
