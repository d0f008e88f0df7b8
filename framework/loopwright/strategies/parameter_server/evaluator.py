"""Asynchronous evaluation: shards of the data as closures on workers, each with its own sums."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.evaluator import Batches, EvalSet, Evaluator
from loopwright.graphs.autograph import as_written
from loopwright.metrics import PerExample
from loopwright.metrics.rows import CollectedRows
from loopwright.strategies.parameter_server.dispatch import (
  PIECES_PER_WORKER,
  Dispatcher,
  ReturnedSums,
  until_it_fits,
)


class ParameterServerEvaluator(Evaluator):
  """The evaluator under `tf.distribute.ParameterServerStrategy`."""

  _metrics: ReturnedSums

  def _prepare(self, given: Mapping[str, Batches]) -> None:
    self._dispatcher = Dispatcher(self.strategy)
    self._shards = self._dispatcher.workers * PIECES_PER_WORKER
    self._sets = []
    for name, dataset in given.items():
      if not callable(dataset):
        raise ConfigError(
          "Evaluator got a dataset, but under parameter_server each worker makes its own; pass a "
          "function: functools.partial(inputs.eval_dataset, source, global_batch_size=...)."
        )
      batches = self._dispatcher.datasets(functools.partial(self._of_shards, dataset)).build()
      step = tf.function(self.shard_sums)
      self._sets.append(EvalSet(name, [batches], [-1], ReturnedSums(), step))

  def metric_names(self) -> None:
    """See `Evaluator.metric_names`."""
    return

  def _of_shards(
    self, dataset: Callable[..., tf.data.Dataset], worker: tf.Tensor
  ) -> tf.data.Dataset:
    del worker
    numbers = tf.data.Dataset.range(self._shards)
    return numbers.map(as_written(lambda number: dataset(shard=(self._shards, number))))

  def shard_sums(
    self, shards: tf.data.Dataset, number: tf.Tensor, most: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor, dict[str, PerExample]]:
    """Evaluates one shard (worker).

    Args:
      shards: dataset of shards, each a dataset of batches.
      number: index of the shard, int64 scalar.
      most: the maximum number of batches, int64 scalar; -1 for all.

    Returns:
      Sums, float64 [room]; the number of batches, int64; PerExample metrics, [batches, ...] each.
    """
    sums, batches = as_written(self._metrics.empty)(), tf.constant(0, tf.int64)
    arrays = as_written(self._row_arrays)()
    for batch in iter(shards.skip(number).take(1).get_single_element().take(most)):
      rows = as_written(self.eval_step)(batch)
      arrays = as_written(self._written)(arrays, tf.cast(batches, tf.int32), rows)
      sums += as_written(self._metrics.taken)()
      batches += 1
    return sums, batches, as_written(self._stacked)(arrays)

  def _row_arrays(self) -> list[tf.TensorArray]:
    specs = tf.nest.flatten(self._metrics.rows)
    return [tf.TensorArray(s.dtype, 0, dynamic_size=True, element_shape=s.shape) for s in specs]

  def _written(
    self, arrays: Sequence[tf.TensorArray], index: tf.Tensor, rows: Mapping[str, PerExample]
  ) -> list[tf.TensorArray]:
    self._metrics.require_rows(rows)
    values = tf.nest.flatten(rows)
    return [array.write(index, value) for array, value in zip(arrays, values, strict=True)]

  def _stacked(self, arrays: Sequence[tf.TensorArray]) -> dict[str, PerExample]:
    return tf.nest.pack_sequence_as(self._metrics.rows, [array.stack() for array in arrays])

  def _run_batches(self, one: EvalSet, limit: int) -> tuple[int, CollectedRows]:
    """Runs every shard until it returns its sums; reruns the shards of failed workers."""
    found: dict[int, Mapping[str, PerExample]] = {}
    missing = list(range(self._shards))
    meanwhile = functools.partial(self.between_batches, one.name, 0, None)
    while missing:
      pieces = [(*one.shapes, *self._piece(number, limit)) for number in missing]
      run = functools.partial(self._dispatcher.run, one.step, pieces, meanwhile=meanwhile)
      results = until_it_fits(self._metrics, run)
      for number, result in zip(missing, results, strict=True):
        if result is not None:
          sums, count, rows = result
          self._metrics.collect(sums)
          found |= {number + self._shards * i: _row(rows, i) for i in range(int(count))}
      missing = [n for n, result in zip(missing, results, strict=True) if result is None]
    collected = CollectedRows()
    for number in sorted(found):  # batch `number` of the source
      collected.add(found[number])
    return len(found), collected

  def _piece(self, number: int, limit: int) -> tuple[Any, ...]:
    most = -1 if limit < 0 else max(0, -(-(limit - number) // self._shards))
    return tf.constant(number, tf.int64), tf.constant(most, tf.int64)


def _row(rows: Mapping[str, PerExample], index: int) -> dict[str, PerExample]:
  """Returns batch `index` of the stacked batches of a shard (host)."""
  return {n: PerExample(values[index], weight[index]) for n, (values, weight) in rows.items()}
