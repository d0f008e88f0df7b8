"""Shards the optimizer's state over replicas: each keeps and updates 1/N of it.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020),
stage 1. Each variable, or group of fused ones, is cut into N parts of equal size. An update copies
a replica's part of the weights, applies the rule to it with the same part of the gradient, and
gathers the parts of all replicas. The rule must be elementwise.

A checkpoint holds whole slots, in the layout of an unsharded optimizer, so that it fits any number
of replicas, sharded or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.training.saving.saveable_object import SaveSpec

from loopwright.distribution import placement
from loopwright.errors import ConfigError
from loopwright.graphs.aliases import Gradient, Variable
from loopwright.graphs.autograph import as_written
from loopwright.host.lazy_keras import KerasOptimizer
from loopwright.models import models
from loopwright.models.replica_state import assign
from loopwright.optimizers.fusion import Fusion

_VALUE = "VARIABLE_VALUE"


class ShardedFusion(Fusion):
  """A `Fusion` whose `variables` are this replica's parts: [ceil(size / replicas)], or a few more.

  Each copy of such a variable has a value of its own. Sizes are distinct, because the size of a
  slot tells which variable it belongs to.
  """

  def __init__(
    self, variables: Sequence[Variable], *, enabled: bool, strategy: tf.distribute.Strategy
  ) -> None:
    """Makes the parts; call it in `strategy.scope()`.

    Raises:
      ConfigError: a variable has a constraint, which needs the whole variable.
    """
    for variable in variables:
      if getattr(variable, "constraint", None) is not None:
        raise ConfigError(
          "received Trainer.shard_optimizer_state=True, but variable "
          f"{models.name(variable)!r} has a constraint, which needs all of it; remove one of them."
        )
    self._strategy = strategy
    super().__init__(variables, enabled=enabled)
    _prove(strategy)

  def load(self, strategy: tf.distribute.Strategy) -> None:
    """Copies each replica's part of the originals to `variables` (cross-replica)."""
    parts = strategy.extended.call_for_each_replica(self._loaded)
    for variable, part in zip(self.variables, parts, strict=True):
      assign(strategy, variable, part)

  def own(self, pieces: Sequence[tf.Tensor | None]) -> list[tf.Tensor | None]:
    """Returns this replica's part of each tensor of `pack`'s layout (replica context)."""
    replica = _replica()
    return [
      None if piece is None else _part(piece, variable.shape[0], replica)
      for piece, variable in zip(pieces, self.variables, strict=True)
    ]

  def store(self, strategy: tf.distribute.Strategy, missing: Sequence[bool]) -> None:
    """Gathers the parts and copies them to the originals, unless `missing` (cross-replica)."""
    values = strategy.extended.call_for_each_replica(self._gathered)
    for raw, value, absent in zip(self._raw, values, missing, strict=True):
      if not absent:
        assign(strategy, raw, value)

  def save_whole(self, optimizer: KerasOptimizer) -> None:
    """Makes checkpoints hold the whole slots of `optimizer`, once it is built (host)."""
    layout = {
      (v.shape[0], v.dtype): shape
      for v, (shape, _) in zip(self.variables, self.pieces, strict=True)
    }
    for variable in map(models.raw, optimizer.variables):
      if variable.shape.rank == 1 and (variable.shape[0], variable.dtype) in layout:
        shape = layout[variable.shape[0], variable.dtype]
        _SavedWhole(variable, shape, self._strategy).attach()

  def _make_variables(self) -> None:
    replicas, taken = self._strategy.num_replicas_in_sync, set()
    for number, (shape, dtype) in enumerate(self.pieces):
      size = -(-shape.num_elements() // replicas)
      while (size, dtype) in taken:
        size += 1
      taken.add((size, dtype))
      self.variables.append(
        tf.Variable(
          tf.zeros([size], dtype), trainable=False, name=f"shard_{number}",
          aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
      )  # fmt: skip
    self.flats = self.variables[: len(self.groups)]

  def _loaded(self) -> list[tf.Tensor]:
    return self.own(self.pack([raw.read_value() for raw in self._raw]))

  def _gathered(self) -> list[tf.Tensor]:
    """Returns the new values of the originals, with one communication for each dtype."""
    whole: list[Gradient] = [None] * len(self.variables)
    for dtype in sorted({v.dtype for v in self.variables}, key=lambda each: each.name):
      group = [i for i, v in enumerate(self.variables) if v.dtype == dtype]
      joined = tf.concat([self.variables[i].read_value() for i in group], axis=0)
      by_replica = tf.reshape(_all_gather(joined), [-1, joined.shape[0]])
      parts = tf.split(by_replica, [self.variables[i].shape[0] for i in group], axis=1)
      for index, part in zip(group, parts, strict=True):
        whole[index] = _joined(part, self.pieces[index].shape)
    return self.unpack(whole)


class _SavedWhole(NamedTuple):
  """Saves and restores a variable of which each replica has a part."""

  variable: Variable
  shape: tf.TensorShape
  strategy: tf.distribute.Strategy

  def attach(self) -> None:
    """Takes the place of what the variable itself does for TensorFlow's checkpoints."""
    self.variable.saved_shape = self.shape
    self.variable._serialize_to_tensors = self._serialize
    self.variable._restore_from_tensors = self._restore

  def _serialize(self) -> dict[str, SaveSpec]:
    dtype, device = self.variable.dtype, self.variable.values[0].device
    return {_VALUE: SaveSpec(self._whole, "", _VALUE, dtype=dtype, device=device)}

  def _whole(self) -> tf.Tensor:
    with tf.device("CPU:0"):
      if not placement.of(self.strategy).reads_all_copies:
        parts = self.strategy.run(lambda: _all_gather(self.variable.read_value()))
        parts = self.strategy.experimental_local_results(parts)[0]
      else:
        parts = tf.concat([copy.read_value() for copy in self.variable.values], axis=0)
      return _joined(parts, self.shape)

  def _restore(self, tensors: dict[str, tf.Tensor]) -> None:
    value = tf.ensure_shape(tensors[_VALUE], self.shape)
    size = self.variable.shape[0]

    @as_written
    def own() -> tf.Tensor:
      return _part(value, size, _replica())

    assign(self.strategy, self.variable, self.strategy.run(own))


def _part(whole: tf.Tensor, size: int, replica: int) -> tf.Tensor:
  """Returns a replica's part [size] of a tensor, padded with zeros at the end."""
  flat = tf.reshape(whole, [-1])[replica * size : (replica + 1) * size]
  return tf.pad(flat, [[0, size - flat.shape[0]]]) if flat.shape[0] < size else flat


def _joined(parts: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
  """Returns the whole tensor of the parts of all replicas, in their order."""
  return tf.reshape(tf.reshape(parts, [-1])[: shape.num_elements()], shape)


def _replica() -> int:
  """Returns this replica's index, which a trace knows (replica context)."""
  return int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))


def _all_gather(own: tf.Tensor) -> tf.Tensor:
  """Returns [replicas x n] of each replica's [n], in replica order (replica context)."""
  return tf.distribute.get_replica_context().all_gather(own, axis=0)


def _prove(strategy: tf.distribute.Strategy) -> None:
  """Gathers known numbers, as training does (host).

  Raises:
    ConfigError: a replica received something else.
  """
  replicas = strategy.num_replicas_in_sync
  expected = np.arange(3 * replicas, dtype=np.float32)

  def gather() -> tf.Tensor:
    return _all_gather(tf.range(3, dtype=tf.float32) + 3.0 * _replica())

  for local in strategy.experimental_local_results(
    tf.function(lambda: strategy.run(gather), autograph=False)()
  ):
    if not np.array_equal(local, expected):
      raise ConfigError(
        f"gathering over {replicas} replicas is wrong: expected {expected.tolist()}, got "
        f"{local.numpy().tolist()}; set Trainer.shard_optimizer_state = False."
      )
