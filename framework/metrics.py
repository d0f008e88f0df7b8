"""Metrics as (total, weight) pairs, summed on the device and read by the host once a loop."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from framework.errors import ConfigError, kind

CAPACITY = 64
"""How many metrics a task may log; all of them live in one variable, added to once a step."""


class MetricSums:
  """Running sums of (total, weight) pairs over replicas, steps and micro-batches.

  One float64 variable [CAPACITY, 2], local to each replica, holds every metric, so that a step
  costs one addition and no communication, however many metrics a task logs.
  """

  def __init__(self) -> None:
    """Makes the variable, so call it in `strategy.scope()`."""
    self._rows: dict[str, int] = {}
    self._weightless: frozenset[str] = frozenset()
    self._sums = tf.Variable(
      np.zeros([CAPACITY, 2]),
      trainable=False,
      dtype=tf.float64,
      synchronization=tf.VariableSynchronization.ON_READ,
      aggregation=tf.VariableAggregation.SUM,
      name="metric_sums",
    )
    self._compiled_total = tf.function(self._sums.read_value, autograph=False)

  def add(self, metrics: Mapping[str, tuple[Any, Any]]) -> None:
    """Adds this replica's pairs (replica context); names are fixed when the step is traced.

    Raises:
      ConfigError: a value is not a pair of scalars, or there are more than CAPACITY names.
    """
    sums = self._packed(metrics)
    if sums is not None:
      self._sums.assign_add(sums)

  def _packed(self, metrics: Mapping[str, tuple[Any, Any]]) -> tf.Tensor | None:
    """The pairs as float64 [CAPACITY, 2], each metric in its row; None without any metric."""
    metrics = checked(metrics)
    if not metrics:
      return None
    rows: list[tuple[Any, Any]] = [(0.0, 0.0)] * CAPACITY
    for name, value in metrics.items():
      rows[self._row(name)] = value
    used = len(self._rows)
    flat = tf.stack([tf.cast(part, tf.float32) for row in rows[:used] for part in row])
    unused = tf.zeros([2 * (CAPACITY - used)], tf.float64)
    return tf.reshape(tf.concat([tf.cast(flat, tf.float64), unused], axis=0), [CAPACITY, 2])

  def result(self) -> dict[str, float]:
    """Returns name -> total / weight over all replicas, and starts again from zero (host).

    A metric whose weights sum to zero is nan.
    """
    # Compiled, the sum over all replicas takes a fraction of what it takes operation by operation.
    sums = self._compiled_total() if _is_distributed(self._sums) else self._sums
    sums = sums.numpy()
    self.reset()
    return self._means(sums)

  def _means(self, sums: np.ndarray) -> dict[str, float]:
    self._weightless = frozenset(name for name, row in self._rows.items() if not sums[row, 1])
    return {
      name: float(sums[row, 0] / sums[row, 1]) if sums[row, 1] else float("nan")
      for name, row in self._rows.items()
    }

  def reset(self) -> None:
    """Starts again from zero, as after a loop that failed half way (host)."""
    self._sums.assign(np.zeros([CAPACITY, 2]), read_value=False)  # else it sums over replicas

  @property
  def weightless(self) -> frozenset[str]:
    """The metrics whose weights summed to zero in the last `result`."""
    return self._weightless

  def _row(self, name: str) -> int:
    row = self._rows.setdefault(name, len(self._rows))
    if row >= CAPACITY:
      raise ConfigError(f"metric {name!r} is one too many; a task may log {CAPACITY} metrics.")
    return row


def _is_distributed(variable: tf.Variable) -> bool:
  return isinstance(variable, tf.distribute.DistributedValues)


def checked(metrics: Mapping[str, tuple[Any, Any]]) -> Mapping[str, tuple[Any, Any]]:
  """Returns the metrics a task gave, if they are name -> (total, weight), both scalars.

  Raises:
    ConfigError: they are something else, such as means.
  """
  if not isinstance(metrics, Mapping):
    raise ConfigError(
      f"the metrics are {kind(metrics)}; they must be a dict of name -> (total, weight), "
      "for example {'accuracy': weighted_sum(hits, batch['weight'])}."
    )
  for name, value in metrics.items():
    _check_pair(name, value)
  return metrics


def _check_pair(name: str, value: Any) -> None:
  if not isinstance(value, (tuple, list)) or len(value) != 2:
    raise ConfigError(
      f"metric {name!r} is {kind(value)}; it must be a pair (total, weight) of this "
      "replica's sums, for example weighted_sum(per_example, batch['weight'])."
    )
  for part in value:
    shape = tf.convert_to_tensor(part).shape
    if shape.rank != 0:
      raise ConfigError(
        f"metric {name!r} has shape {shape}; total and weight must be scalars, this replica's "
        "sums over its examples."
      )
