"""Batches of a `StreamSource`, which is read from its beginning up to a position."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from loopwright.aliases import Batch
from loopwright.errors import ConfigError
from loopwright.graphs.autograph import as_written
from loopwright.inputs.checks import require
from loopwright.inputs.ordering import seeds_at
from loopwright.inputs.plan import Element, Plan
from loopwright.inputs.sources import StreamSource

# ---- Streams ----


def reading(
  source: StreamSource, plan: Plan, seed: int, position: int, first_step: int
) -> tuple[tf.data.Dataset, Callable[..., Element]]:
  """Returns what to read for each batch of training, and the function that reads it."""
  examples = source.dataset.enumerate().repeat()
  examples = examples.concatenate(_failing(examples.element_spec)).skip(position)
  batches = examples.batch(plan.global_batch_size, drop_remainder=True)

  def clock(start: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return start, _now_once(start == position) if position else tf.constant(0.0, tf.float64)

  def read(clocked: tuple[tf.Tensor, tf.Tensor], batch: tuple[tf.Tensor, Batch]) -> Element:
    start, began_s = clocked
    if position:
      _log_once(start == position, position, began_s)
    seeds = seeds_at(start + plan.example_rows(), seed=seed)
    step = plan.step(start, position, first_step)
    return *_padded(*batch, plan), seeds, step

  if position:
    logging.info("skipping %d examples of a stream, to continue where training stopped", position)
  # zip reads its parts in order, so the clock is read before the first batch, which skips.
  clocked = tf.data.Dataset.counter(position, plan.global_batch_size).map(as_written(clock))
  return tf.data.Dataset.zip((clocked, batches)), read


def evaluation(
  source: StreamSource, plan: Plan, most: int
) -> tuple[tf.data.Dataset, Callable[..., Batch]]:
  """Returns what to read for each batch of one pass, and the function that makes the batch."""
  if most < 0 and source.endless:
    raise ConfigError(
      "the stream to evaluate is endless; set num_examples of its StreamSource to the length of "
      "one pass, or run.eval_steps to the number of batches."
    )

  def make(ids: tf.Tensor, features: Batch) -> Batch:
    return plan.completed(*_padded(ids, features, plan))

  return source.dataset.enumerate().batch(plan.global_batch_size).take(most), make


def _padded(ids: tf.Tensor, features: Batch, plan: Plan) -> tuple[Batch, tf.Tensor]:
  if ids.shape[0] is not None and plan.rows == range(ids.shape[0]):
    return features, ids
  rows = plan.row_numbers()
  real = rows < tf.size(ids, tf.int64)
  taken = tf.where(real, rows, 0)
  features = {name: tf.gather(value, taken) for name, value in features.items()}
  return features, tf.where(real, tf.gather(ids, taken), -1)


def _failing(element_spec: Any) -> tf.data.Dataset:
  """Returns one element that raises: `repeat` of an empty dataset ends, and this follows it."""

  def fail(unused: tf.Tensor) -> Any:
    element = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), element_spec)
    message = ["the stream has no examples; it must yield at least one in each pass."]
    return require(tf.constant(False), element, message)

  return tf.data.Dataset.range(1).map(as_written(fail))


def _now_once(now: tf.Tensor) -> tf.Tensor:
  """Returns Python's monotonic clock, in seconds, if `now`; else 0."""
  read = functools.partial(tf.numpy_function, time.monotonic, [], tf.float64)
  return tf.ensure_shape(tf.cond(now, read, lambda: tf.constant(0.0, tf.float64)), [])


def _log_once(now: tf.Tensor, count: int, began_s: tf.Tensor) -> None:
  def log(began_s: np.ndarray) -> np.bool_:
    seconds = time.monotonic() - float(began_s)
    logging.info("skipped %d examples of the stream in %.3f s", count, seconds)
    return np.bool_(True)

  tf.cond(now, lambda: tf.numpy_function(log, [began_s], tf.bool), lambda: False)
