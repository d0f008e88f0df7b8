"""Losses and metrics of tasks, as (total, weight) sums, and their running sums.

The device sums them; the host reads them once per loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from framework.backend.autograph import as_written
from framework.errors import ConfigError, kind

Weighted = tuple[tf.Tensor, tf.Tensor]
"""(total, weight): a sum over this replica's examples and the sum of their weights."""
REPORTED_BY_UPDATES = ("loss", "gradient_norm", "learning_rate")
"""Metrics of each optimizer, with its prefix if a task has several."""
REPORTED = (
  *REPORTED_BY_UPDATES,
  *("loss_scale", "skipped", "skipped_steps"),
  *("nonfinite_step", "input_wait", "input_wait_s", "examples_per_second", "steps_per_second"),
  *("staleness", "communication", "communication_s", "start_s"),
  *("step", "split", "wall_time"),
)
"""Metrics that the framework reports: `Task.metrics` must not use these names."""


@as_written
def weighted_sum(per_example: tf.Tensor, weight: tf.Tensor | None = None) -> Weighted:
  """Sums one value per example into a (total, weight) pair.

  An example of weight 0 adds exactly 0, even if its value is not finite.

  Args:
    per_example: [n], any numeric or bool dtype; this replica's examples.
    weight: float [n]; None means 1 each.

  Returns:
    Two float32 scalars (float64 for float64 values): weighted sum and sum of weights.

  Raises:
    ConfigError: `per_example` is not a vector, or `weight` is not a vector of the same length.
  """
  values = tf.convert_to_tensor(per_example)
  values = tf.cast(values, tf.float64 if values.dtype == tf.float64 else tf.float32)
  _require_vector("per-example values", values)
  if weight is None:
    weight = tf.ones_like(values)
  weight = tf.cast(weight, values.dtype)
  _require_vector("weight", weight)
  if not values.shape.is_compatible_with(weight.shape):
    raise ConfigError(
      f"per-example values have shape {values.shape} but weight has shape {weight.shape}; "
      "give one value and one weight for each example."
    )
  return tf.reduce_sum(tf.math.multiply_no_nan(values, weight)), tf.reduce_sum(weight)


def _float(value: Any) -> tf.Tensor:
  tensor = tf.convert_to_tensor(value)
  return tensor if tensor.dtype.is_floating else tf.cast(tensor, tf.float32)


def _require_vector(what: str, value: tf.Tensor) -> None:
  if value.shape.rank != 1:
    raise ConfigError(
      f"{what} must be a vector [n], one number per example, got shape {value.shape}; "
      "reduce every axis but the first (for example tf.reduce_mean(x, axis=[1, 2]))."
    )


class Loss(NamedTuple):
  """This replica's part of a loss: sums, not means, so that they add up over replicas.

  Attributes:
    total: float scalar, the weighted sum of this replica's per-example losses.
    weight: float scalar, the sum of this replica's example weights; the global loss is sum of
      totals / sum of weights over all replicas.
  """

  total: tf.Tensor
  weight: tf.Tensor

  @classmethod
  @as_written
  def from_examples(cls, per_example: tf.Tensor, weight: tf.Tensor | None = None) -> Loss:
    """Returns the sums of losses [n] and weights [n]; see `weighted_sum`."""
    return cls(*weighted_sum(per_example, weight))

  @classmethod
  def checked(cls, loss: Any) -> Loss:
    """Returns `loss` as two float tensors if it is a `Loss` of two scalars, such as Python's.

    Raises:
      ConfigError: it is something else, such as a mean.
    """
    if not isinstance(loss, Loss):
      raise ConfigError(
        f"the loss is {kind(loss)}; it must be a Loss, this replica's sums: "
        "return Loss.from_examples(per_example_losses, batch['weight'])."
      )
    total, weight = _float(loss.total), _float(loss.weight)
    for name, value in (("total", total), ("weight", weight)):
      if value.shape.rank != 0:
        raise ConfigError(
          f"Loss.{name} has shape {value.shape}; it must be a scalar, this replica's sum: "
          "use Loss.from_examples(per_example_losses, batch['weight'])."
        )
    return cls(total, weight)

  @as_written
  def plus_regularization(self, penalty: tf.Tensor | float) -> Loss:
    """Adds `penalty` (a float scalar, equal on all replicas) to the *mean* loss, once.

    Each replica adds penalty x its own weight. The division by the global weight leaves exactly
    one penalty, for any number of replicas and micro-batches.
    """
    if isinstance(penalty, float) and penalty == 0.0:
      return self
    return Loss(self.total + tf.cast(penalty, self.total.dtype) * self.weight, self.weight)


CAPACITY = 64
"""The maximum number of metrics; one variable holds them all."""


class MetricSums:
  """Running sums of (total, weight) pairs over replicas, steps and micro-batches.

  One float64 variable [CAPACITY, 2], local to each replica, holds all metrics: a step costs one
  addition and no communication, for any number of metrics.
  """

  def __init__(self) -> None:
    """Makes the variable; call it in `strategy.scope()`."""
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
    """Adds this replica's pairs; the trace fixes the names (replica context).

    Raises:
      ConfigError: a value is not a pair of scalars, or there are more than CAPACITY names.
    """
    sums = self._packed(metrics)
    if sums is not None:
      self._sums.assign_add(sums)

  def _packed(self, metrics: Mapping[str, tuple[Any, Any]]) -> tf.Tensor | None:
    """Returns the pairs as float64 [CAPACITY, 2], one row per metric; None if there are none."""
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
    """Returns name -> total / weight over all replicas, and resets the sums to zero (host).

    A metric whose weights sum to 0 is NaN.
    """
    # Compiled, the sum over replicas takes a fraction of the eager time.
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
    """Resets the sums to zero, for example after a failed loop (host)."""
    self._sums.assign(np.zeros([CAPACITY, 2]), read_value=False)  # reading sums over replicas

  @property
  def weightless(self) -> frozenset[str]:
    """The metrics whose weights sum to 0 in the last `result`."""
    return self._weightless

  def _row(self, name: str) -> int:
    row = self._rows.setdefault(name, len(self._rows))
    if row >= CAPACITY:
      raise ConfigError(f"metric {name!r} is one too many; a task may log {CAPACITY} metrics.")
    return row


def _is_distributed(variable: tf.Variable) -> bool:
  return isinstance(variable, tf.distribute.DistributedValues)


def checked(metrics: Mapping[str, tuple[Any, Any]]) -> Mapping[str, tuple[Any, Any]]:
  """Returns `metrics` if they are name -> (total, weight), both scalars.

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
