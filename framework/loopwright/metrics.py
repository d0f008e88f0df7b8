"""Losses and metrics of tasks, and their running sums.

The device sums (total, weight) pairs and Sums; the host reads them once per loop. PerExample values
go to the host batch by batch, in evaluations only.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError, kind
from loopwright.graphs.autograph import as_written
from loopwright.types import TensorLike

Weighted = tuple[tf.Tensor, tf.Tensor]
"""(total, weight): a sum over this replica's examples and the sum of their weights."""
REPORTED_BY_UPDATES = ("loss", "gradient_norm", "learning_rate")
"""Metrics of each optimizer, with its prefix if a task has several."""
REPORTED = (
  *REPORTED_BY_UPDATES,
  *("loss_scale", "skipped", "skipped_steps"),
  *("nonfinite_step", "input_wait", "input_wait_s", "examples_per_second", "steps_per_second"),
  *("staleness", "communication", "communication_s", "start_s", "gpu_memory_mib", "noise_scale"),
  *("model_flops_per_s", "mfu"),
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


def _float(value: TensorLike) -> tf.Tensor:
  tensor = tf.convert_to_tensor(value)
  return tensor if tensor.dtype.is_floating else tf.cast(tensor, tf.float32)


def _require_vector(what: str, value: tf.Tensor) -> None:
  if value.shape.rank != 1:
    raise ConfigError(
      f"{what} must be a vector [n], one number per example, got shape {value.shape}; "
      "reduce every axis but the first (for example tf.reduce_mean(x, axis=[1, 2]))."
    )


class Sum(NamedTuple):
  """Plain sums over this replica's examples, for a metric that is not a mean (replica context).

  For a confusion matrix, counts of bins, true positives of each class. `Task.derived` gets the sum
  over all replicas, batches and steps. Give rows of weight 0 no part in it: they are padding.

  Attributes:
    tensor: numeric or bool, of any static shape; added up in float64.
  """

  tensor: tf.Tensor


class PerExample(NamedTuple):
  """Values of single examples, for a metric that needs all at once (replica context).

  For an exact AUC, a rank correlation, a calibration error. An evaluation collects the rows of all
  replicas in the memory of each process and gives them to `Task.derived`. Training ignores them.

  Attributes:
    values: numeric or bool [n, ...], of static shape, one row for each example.
    weight: [n]; rows of weight 0 are dropped. The weight itself is not kept.
  """

  values: tf.Tensor
  weight: tf.Tensor

  @property
  def wide(self) -> PerExample:
    """With dtypes that every collective and NumPy have: float32 and int32 or wider."""
    return PerExample(_wide(self.values), _wide(self.weight))


def _wide(tensor: tf.Tensor) -> tf.Tensor:
  if tensor.dtype.is_floating:
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor
  return tensor if tensor.dtype in (tf.int32, tf.int64) else tf.cast(tensor, _integer(tensor.dtype))


def _integer(dtype: tf.DType) -> tf.DType:
  return tf.int32 if dtype.size < 4 else tf.int64


Summed: TypeAlias = Weighted | Sum
Metric: TypeAlias = Weighted | Sum | PerExample
"""What `Task.metrics` and `step.log` take for a name."""


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
  def checked(cls, loss: object) -> Loss:
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


class Place(NamedTuple):
  """Where a packed vector holds a metric: from `start` on, a pair, or a Sum of this shape."""

  start: int
  shape: tuple[int, ...] | None

  @property
  def size(self) -> int:
    """How many numbers it takes."""
    return 2 if self.shape is None else math.prod(self.shape)


class Layout:
  """The order of metrics in a packed float64 vector."""

  def __init__(self, metrics: Mapping[str, Summed] = types.MappingProxyType({})) -> None:
    """Gives each metric a place."""
    self.places: dict[str, Place] = {}
    self.size = 0
    self.extend(metrics)

  def extend(self, metrics: Mapping[str, Summed]) -> None:
    """Gives new metrics the next places.

    Raises:
      ConfigError: a known metric has another shape than before.
    """
    for name, value in metrics.items():
      shape = tuple(value.tensor.shape) if isinstance(value, Sum) else None
      place = self.places.setdefault(name, Place(self.size, shape))
      if place.shape != shape:
        raise ConfigError(
          f"metric {name!r} is {_described(shape)}, but it was {_described(place.shape)} before; "
          "give it another name."
        )
      self.size = max(self.size, place.start + place.size)

  def packed(self, metrics: Mapping[str, Summed]) -> tf.Tensor:
    """Returns a float64 vector [size]; metrics that are missing are 0."""
    parts: list[tf.Tensor] = []
    pairs: list[TensorLike] = []
    for name, place in self.places.items():
      if place.shape is None:
        pairs += metrics.get(name, (0.0, 0.0))
        continue
      parts += [*_stacked(pairs), _flat(metrics[name]) if name in metrics else _zeros(place.size)]
      pairs = []
    parts += _stacked(pairs)
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)

  def unpacked(self, vector: np.ndarray) -> Totals:
    """Returns the metrics of a vector [size or more] (host)."""
    totals = Totals({}, {}, frozenset())
    for name, (start, shape) in self.places.items():
      if shape is not None:
        values = vector[start : start + math.prod(shape)].reshape(shape)
        totals.sums[name] = values.copy() if shape else float(values)
        continue
      total, weight = vector[start : start + 2]
      totals.means[name] = float(total / weight) if weight else math.nan
      if not weight:
        totals = totals._replace(weightless=totals.weightless | {name})
    return totals


class Totals(NamedTuple):
  """Sums over replicas and steps.

  Attributes:
    means: total / weight of each pair; NaN where the weights sum to 0.
    sums: each Sum: a float64 array, or a float for a scalar.
    weightless: the pairs whose weights sum to 0.
  """

  means: dict[str, float]
  sums: dict[str, float | np.ndarray]
  weightless: frozenset[str]

  def plus(self, other: Totals) -> Totals:
    """Returns the metrics of both, which have different names."""
    means, sums = {**self.means, **other.means}, {**self.sums, **other.sums}
    return Totals(means, sums, self.weightless | other.weightless)


NOTHING = Totals({}, {}, frozenset())


class MetricSums:
  """Running sums over replicas, steps and micro-batches: (total, weight) pairs, and Sums.

  One float64 variable, local to each replica, holds all metrics of a step: a step costs one
  addition and no communication, for any number of metrics. The first trace of the step makes it;
  a later trace with further names makes another variable for those.
  """

  def __init__(self) -> None:
    """Makes no variable yet; call it in `strategy.scope()`."""
    self._blocks: list[_Block] = []
    self._totals = NOTHING
    self.only_evaluated: set[str] = set()
    """PerExample metrics of the training step, which collects none."""

  def add(self, metrics: Mapping[str, Summed]) -> None:
    """Adds this replica's metrics; the trace fixes the names (replica context).

    Raises:
      ConfigError: a value is neither a pair of scalars nor a Sum, or has another shape than before.
    """
    self.add_packed(self.packed(metrics))

  def packed(self, metrics: Mapping[str, Summed]) -> dict[int, tf.Tensor]:
    """Returns this replica's metrics for `add_packed`; see `add` (replica context).

    Returns:
      Number of a vector -> float64 [its size]. The sum of what several steps return is theirs.
    """
    metrics = checked(metrics)
    new = {name: value for name, value in metrics.items() if name not in self._known()}
    if new:
      # Every replica comes here before one of them changes what is known.
      tf.distribute.get_replica_context().merge_call(lambda strategy: self._extend(strategy, new))
    vectors = {}
    for index, block in enumerate(self._blocks):
      if of_block := {name: metrics[name] for name in block.layout.places if name in metrics}:
        block.layout.extend(of_block)
        vectors[index] = block.layout.packed(of_block)
    return vectors

  def add_packed(self, vectors: Mapping[int, tf.Tensor]) -> None:
    """Adds what `packed` returned (replica context)."""
    for index, vector in vectors.items():
      self._blocks[index].add(vector)

  def result(self) -> dict[str, float]:
    """Returns name -> total / weight over all replicas, and resets the sums to zero (host).

    A metric whose weights sum to 0 is NaN. `sums` has the Sums.
    """
    totals = NOTHING
    for block in self._blocks:
      totals = totals.plus(block.layout.unpacked(block.read()))
    self._totals = totals
    self.reset()
    return dict(totals.means)

  def reset(self) -> None:
    """Resets the sums to zero, for example after a failed loop (host)."""
    for block in self._blocks:
      block.reset()

  @property
  def sums(self) -> Mapping[str, float | np.ndarray]:
    """Name -> float64 array, or float for a scalar: the Sums of the last `result`."""
    return self._totals.sums

  @property
  def names(self) -> set[str]:
    """The pairs of all traces so far."""
    places = {name: place for block in self._blocks for name, place in block.layout.places.items()}
    return {name for name, place in places.items() if place.shape is None}

  @property
  def weightless(self) -> frozenset[str]:
    """The metrics whose weights sum to 0 in the last `result`."""
    return self._totals.weightless

  def _known(self) -> set[str]:
    return {name for block in self._blocks for name in block.layout.places}

  def _extend(self, strategy: tf.distribute.Strategy, new: Mapping[str, Summed]) -> None:
    layout = Layout(new)

    def make() -> _Block:
      with strategy.scope():
        return _Block(layout)

    # In a thread of its own: a tf.function in whose trace a variable is made is traced twice.
    with ThreadPoolExecutor(1) as thread:
      self._blocks.append(thread.submit(make).result())


class PackedSums:
  """Stands for a `MetricSums` to which a step adds later (replica context).

  Attributes:
    vectors: what `MetricSums.add_packed` takes.
  """

  def __init__(self, sums: MetricSums) -> None:
    """Starts with nothing."""
    self._sums = sums
    self.vectors: dict[int, tf.Tensor] = {}

  def add(self, metrics: Mapping[str, Summed]) -> None:
    """Keeps this replica's metrics; see `MetricSums.add`."""
    self.vectors |= self._sums.packed(metrics)


class _Block:
  """Metrics that one trace added, and the variable that sums them."""

  def __init__(self, layout: Layout) -> None:
    self.layout = layout
    self._sums = tf.Variable(
      np.zeros([layout.size]),
      trainable=False,
      dtype=tf.float64,
      synchronization=tf.VariableSynchronization.ON_READ,
      aggregation=tf.VariableAggregation.SUM,
      name="metric_sums",
    )
    self._compiled_total = tf.function(self._sums.read_value, autograph=False)

  def add(self, vector: tf.Tensor) -> None:
    self._sums.assign_add(vector)

  def read(self) -> np.ndarray:
    # Compiled, the sum over replicas takes a fraction of the eager time.
    sums = self._compiled_total() if _is_distributed(self._sums) else self._sums
    return sums.numpy()

  def reset(self) -> None:
    zeros = np.zeros([self.layout.size])
    self._sums.assign(zeros, read_value=False)  # reading sums over replicas


class CollectedRows:
  """The PerExample metrics of an evaluation (host)."""

  _LAG = 16
  """Batches whose values may still be on the device."""

  def __init__(self) -> None:
    """Starts with none."""
    self._waiting: list[tuple[int, Mapping[str, PerExample]]] = []
    self._rows: dict[str, list[np.ndarray]] = {}

  def add(self, metrics: Mapping[str, PerExample], batches: int = 1) -> None:
    """Adds a batch, or several as [batches, n, ...]: tensors or arrays, of all replicas."""
    if metrics:
      self._waiting.append((batches, metrics))
    while sum(number for number, _ in self._waiting[1:]) >= self._LAG:
      self._take(self._waiting.pop(0)[1])

  def result(self) -> dict[str, np.ndarray]:
    """Returns name -> [m, ...], the rows whose weight is not 0, in the order of the batches.

    Raises:
      ConfigError: rows of one name have several shapes.
    """
    for _, metrics in self._waiting:
      self._take(metrics)
    self._waiting = []
    for name, rows in self._rows.items():
      shapes = sorted({part.shape[1:] for part in rows})
      if len(shapes) > 1:
        raise ConfigError(
          f"PerExample metric {name!r} has rows of shape {shapes[0]} in one batch and {shapes[1]} "
          "in another; give all rows one shape, such as one number for each example."
        )
    return {name: np.concatenate(rows) for name, rows in self._rows.items()}

  def _take(self, metrics: Mapping[str, PerExample]) -> None:
    for name, (values, weight) in metrics.items():
      self._rows.setdefault(name, []).append(np.asarray(values)[np.asarray(weight) != 0])


def numbers(values: Mapping[str, TensorLike]) -> dict[str, float]:
  """Returns floats as they are, and for an array its elements as "name[i, j]" (host).

  Of more than 16 elements, which nobody would read, only the sum and the sum of squares.
  """
  found: dict[str, float] = {}
  for name, value in values.items():
    array = np.asarray(value, np.float64)
    if not array.shape:
      found[name] = value
    elif array.size > 16:
      found |= {f"sum of {name}": array.sum(), f"sum of squares of {name}": np.square(array).sum()}
    else:
      found |= {f"{name}{[*index]}": float(each) for index, each in np.ndenumerate(array)}
  return found


def _described(shape: tuple[int, ...] | None) -> str:
  return "a pair (total, weight)" if shape is None else f"a Sum of shape {shape}"


def _stacked(scalars: Sequence[TensorLike]) -> list[tf.Tensor]:
  """Returns one float64 vector of the scalars, or nothing."""
  if not scalars:
    return []
  return [tf.cast(tf.stack([tf.cast(part, tf.float32) for part in scalars]), tf.float64)]


def _flat(value: Any) -> tf.Tensor:
  return tf.reshape(tf.cast(value.tensor, tf.float64), [-1])


def _zeros(size: int) -> tf.Tensor:
  return tf.zeros([size], tf.float64)


def _is_distributed(variable: tf.Variable) -> bool:
  return isinstance(variable, tf.distribute.DistributedValues)


def checked(metrics: object) -> dict[str, Metric]:
  """Returns `metrics` if they are name -> (total, weight), Sum or PerExample, with tensors inside.

  Raises:
    ConfigError: they are something else, such as means.
  """
  if not isinstance(metrics, Mapping):
    raise ConfigError(
      f"the metrics are {kind(metrics)}; they must be a dict of name -> (total, weight), "
      "for example {'accuracy': weighted_sum(hits, batch['weight'])}."
    )
  return {name: _checked(name, value) for name, value in metrics.items()}


def _checked(name: str, value: object) -> Metric:
  if isinstance(value, Sum):
    return Sum(_numeric(name, "Sum", value.tensor))
  if isinstance(value, PerExample):
    return _checked_rows(name, value)
  if not isinstance(value, (tuple, list)) or len(value) != 2:
    raise ConfigError(
      f"metric {name!r} is {kind(value)}; it must be a pair (total, weight) of this "
      "replica's sums, for example weighted_sum(per_example, batch['weight']), or a loopwright.Sum "
      "or PerExample."
    )
  for part in value:
    shape = tf.convert_to_tensor(part).shape
    if shape.rank != 0:
      raise ConfigError(
        f"metric {name!r} has shape {shape}; total and weight must be scalars, this replica's "
        "sums over its examples. For sums of another shape return loopwright.Sum(tensor)."
      )
  total, weight = value
  return total, weight


def _checked_rows(name: str, value: PerExample) -> PerExample:
  values = _numeric(name, "PerExample.values", value.values)
  weight = _numeric(name, "PerExample.weight", value.weight)
  if not values.shape.rank or weight.shape.rank != 1 or values.shape[0] != weight.shape[0]:
    raise ConfigError(
      f"metric {name!r} is a PerExample of values {values.shape} and weight {weight.shape}; they "
      "must be [n, ...] and [n], such as PerExample(scores, batch['weight'])."
    )
  return PerExample(values, weight)


def _numeric(name: str, what: str, value: TensorLike) -> tf.Tensor:
  """Returns a tensor of static shape and a real dtype."""
  tensor = tf.convert_to_tensor(value)
  if not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool):
    raise ConfigError(f"metric {name!r} is a {what} of {tensor.dtype.name}; it must hold numbers.")
  if not tensor.shape.is_fully_defined():
    raise ConfigError(
      f"metric {name!r} is a {what} of shape {tensor.shape}; it must be static: keep all rows, and "
      "leave rows out by a weight of 0 instead of tf.boolean_mask."
    )
  return tensor
