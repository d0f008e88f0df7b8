"""Experience that a run collects itself: a replay buffer in variables, sampled in the step.

In `Task.build_model`, `source` and `train_step`:

    replay = ReplayBuffer(capacity=10_000, features={"observation": tf.TensorSpec([3])})
    return {"policy": policy, "replay": replay}

    return Draws()

    batch = {**batch, **self.model["replay"].rows(batch["draw"])}

and between two loops, on the host: `replay.add({"observation": observations})`.

The buffer is part of the model, so checkpoints have it, and each replica has a copy. A row's sample
depends only on its draw, so N replicas train on the same rows as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError, require_integer
from loopwright.graphs.aliases import Batch, TensorLike
from loopwright.graphs.randomness import hashed
from loopwright.inputs.plan import Plan
from loopwright.inputs.sources import Source
from loopwright.models import replica_state


class Draws(Source):
  """A source without data: each row has "draw", a random int64 >= 0."""

  num_examples = 2**40

  def fetch(self, indices: tf.Tensor) -> Batch:
    """See `Source.fetch`; a draw depends only on its index."""
    words = hashed(indices, 0, "draws")
    return {"draw": tf.bitcast(tf.bitwise.right_shift(words, tf.constant(1, tf.uint64)), tf.int64)}

  def one_pass(self, plan: Plan, most: int) -> Any:
    """See `Source.one_pass`."""
    if most < 0:
      raise ConfigError(
        "source('eval') is a Draws, which has no end; return a source with the examples to "
        "evaluate, or set run.eval_steps."
      )
    return super().one_pass(plan, most)


class ReplayBuffer(tf.Module):
  """The newest `capacity` rows of what a run has collected (Lin, 1992)."""

  collects_examples = True

  def __init__(self, *, capacity: int, features: Mapping[str, tf.TensorSpec]) -> None:
    """Makes an empty buffer; call it in `Task.build_model`.

    Args:
      capacity: rows kept; a checkpoint has them all.
      features: name -> shape and dtype of one row.

    Raises:
      ConfigError: no features, a shape that is not static, or a capacity below 1.
    """
    super().__init__(name="replay")
    self.capacity = require_integer("ReplayBuffer.capacity", capacity, at_least=1)
    if not features:
      raise ConfigError("ReplayBuffer.features is empty; give name -> tf.TensorSpec of a row.")
    self._strategy = tf.distribute.get_strategy()
    self._rows = {name: self._empty(name, spec) for name, spec in features.items()}
    self.added = self._variable(tf.zeros([], tf.int64), "added")
    """The number of rows added so far, int64 scalar."""

  @property
  def size(self) -> int:
    """The number of rows in the buffer (host)."""
    return min(int(self.added.numpy()), self.capacity)

  def add(self, rows: Mapping[str, TensorLike]) -> None:
    """Adds rows in order; the oldest ones make place (host).

    With several workers each must add the same rows.

    Args:
      rows: name -> [n, ...] for every feature, n >= 1.

    Raises:
      ConfigError: other names, shapes or dtypes than the buffer's.
    """
    arrays = self._checked(rows)
    first, count = int(self.added.numpy()), len(next(iter(arrays.values())))
    kept = slice(max(0, count - self.capacity), count)
    places = (first + np.arange(count)[kept]) % self.capacity
    for name, array in arrays.items():
      args = tf.constant(places), tf.constant(array[kept])
      self._strategy.extended.update(self._rows[name], _scatter, args=args)
    replica_state.assign(self._strategy, self.added, first + count)

  def rows(self, draws: tf.Tensor) -> Batch:
    """Returns a row for each draw, uniformly, with replacement (replica context).

    Args:
      draws: int64 [n], the "draw" of `Draws`, or places in the buffer.

    Returns:
      name -> [n, ...]

    Raises:
      ConfigError: the buffer is empty while the step is traced, so the step would learn from zeros.
    """
    with tf.init_scope():
      is_empty = self.size == 0
    if is_empty:
      raise ConfigError(
        "ReplayBuffer.rows() found no row: the step would learn from zeros. Add the first rows in "
        "build_model(), such as random ones, or in the begin() of an action; verify and tune call "
        "no action."
      )
    size = tf.minimum(tf.convert_to_tensor(self.added), self.capacity)
    places = draws % tf.maximum(size, 1)
    return {name: tf.gather(value, places) for name, value in self._rows.items()}

  def _empty(self, name: str, spec: tf.TensorSpec) -> tf.Variable:
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.is_fully_defined():
      raise ConfigError(
        f"ReplayBuffer.features[{name!r}] is {spec!r}; it must be a tf.TensorSpec of one row, with "
        "a static shape, such as tf.TensorSpec([3], tf.float32)."
      )
    return self._variable(tf.zeros([self.capacity, *spec.shape], spec.dtype), name)

  def _variable(self, value: tf.Tensor, name: str) -> tf.Variable:
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA  # the copies are equal by design
    return tf.Variable(value, trainable=False, aggregation=first, name=name)

  def _checked(self, rows: Mapping[str, TensorLike]) -> dict[str, np.ndarray]:
    if rows.keys() != self._rows.keys():
      raise ConfigError(f"ReplayBuffer.add() got {sorted(rows)}; it must get {sorted(self._rows)}.")
    arrays = {name: np.asarray(value) for name, value in rows.items()}
    count = {len(array) if array.ndim else 0 for array in arrays.values()}
    for name, array in arrays.items():
      kept = self._rows[name]
      if array.shape[1:] != tuple(kept.shape[1:]) or array.dtype != kept.dtype.as_numpy_dtype:
        raise ConfigError(
          f"ReplayBuffer.add() got {name!r} as {array.dtype} of shape {array.shape}; it must be "
          f"{kept.dtype.name} [{', '.join(['n', *map(str, kept.shape[1:])])}]."
        )
    if len(count) != 1 or 0 in count:
      raise ConfigError("ReplayBuffer.add() needs the same number of rows, at least 1, of each.")
    return arrays


def _scatter(variable: tf.Variable, places: tf.Tensor, values: tf.Tensor) -> None:
  """Writes rows in place (on each copy's device)."""
  tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=places, updates=values)
