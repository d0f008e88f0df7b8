"""Running sums of metrics over replicas, steps and micro-batches, on the device."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.graphs.aliases import TensorLike
from loopwright.metrics.checks import checked
from loopwright.metrics.values import Sum, Summed


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
      parts += [*_stacked(pairs), _flat(metrics.get(name), place.size)]
      pairs = []
    parts += _stacked(pairs)
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)

  def unpack(self, vector: np.ndarray, totals: Totals) -> None:
    """Adds the metrics of a vector [size or more] to `totals` (host)."""
    for name, (start, shape) in self.places.items():
      if shape is not None:
        values = vector[start : start + math.prod(shape)].reshape(shape)
        totals.sums[name] = values.copy() if shape else float(values)
        continue
      total, weight = vector[start : start + 2]
      totals.means[name] = float(total / weight) if weight else math.nan
      if not weight:
        totals.weightless.add(name)


@dataclasses.dataclass
class Totals:
  """Sums over replicas and steps.

  Attributes:
    means: total / weight of each pair; NaN where the weights sum to 0.
    sums: each Sum: a float64 array, or a float for a scalar.
    weightless: the pairs whose weights sum to 0.
  """

  means: dict[str, float] = dataclasses.field(default_factory=dict)
  sums: dict[str, float | np.ndarray] = dataclasses.field(default_factory=dict)
  weightless: set[str] = dataclasses.field(default_factory=set)


class MetricSums:
  """Running sums over replicas, steps and micro-batches: (total, weight) pairs, and Sums.

  One float64 variable, local to each replica, holds all metrics of a step: a step costs one
  addition and no communication, for any number of metrics. The first trace of the step makes it;
  a later trace with further names makes another variable for those.
  """

  def __init__(self) -> None:
    """Makes no variable yet; call it in `strategy.scope()`."""
    self._blocks: list[_Block] = []
    self._totals = Totals()
    self.only_evaluated: set[str] = set()
    """PerExample metrics of the training step, which collects none."""

  @property
  def variables(self) -> list[tf.Variable]:
    """What adds up; it begins anew with each loop."""
    return [block.sums for block in self._blocks]

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
    known = {name for block in self._blocks for name in block.layout.places}
    new = {name: value for name, value in metrics.items() if name not in known}
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
    self._totals = Totals()
    for block in self._blocks:
      block.layout.unpack(block.read(), self._totals)
    self.reset()
    return dict(self._totals.means)

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
  def weightless(self) -> Set[str]:
    """The metrics whose weights sum to 0 in the last `result`."""
    return self._totals.weightless

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
    self._sums = sums
    self.vectors: dict[int, tf.Tensor] = {}

  def add(self, metrics: Mapping[str, Summed]) -> None:
    """Keeps this replica's metrics; see `MetricSums.add`."""
    self.vectors |= self._sums.packed(metrics)


class _Block:
  """Metrics that one trace added, and the variable that sums them."""

  def __init__(self, layout: Layout) -> None:
    self.layout = layout
    self.sums = tf.Variable(
      np.zeros([layout.size]),
      trainable=False,
      dtype=tf.float64,
      synchronization=tf.VariableSynchronization.ON_READ,
      aggregation=tf.VariableAggregation.SUM,
      name="metric_sums",
    )
    self._compiled_total = tf.function(self.sums.read_value, autograph=False)

  def add(self, vector: tf.Tensor) -> None:
    self.sums.assign_add(vector)

  def read(self) -> np.ndarray:
    if isinstance(self.sums, tf.distribute.DistributedValues):
      # Compiled, the sum over replicas takes a fraction of the eager time.
      return self._compiled_total().numpy()
    return self.sums.numpy()

  def reset(self) -> None:
    zeros = np.zeros([self.layout.size])
    self.sums.assign(zeros, read_value=False)  # reading sums over replicas


def _described(shape: tuple[int, ...] | None) -> str:
  return "a pair (total, weight)" if shape is None else f"a Sum of shape {shape}"


def _stacked(scalars: Sequence[TensorLike]) -> list[tf.Tensor]:
  """Returns one float64 vector of the scalars, or nothing."""
  if not scalars:
    return []
  return [tf.cast(tf.stack([tf.cast(part, tf.float32) for part in scalars]), tf.float64)]


def _flat(value: Summed | None, size: int) -> tf.Tensor:
  """Returns a Sum as a float64 vector [size], of zeros if it is missing."""
  if not isinstance(value, Sum):
    return tf.zeros([size], tf.float64)
  return tf.reshape(tf.cast(value.tensor, tf.float64), [-1])
