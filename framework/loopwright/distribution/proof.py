"""The proof that an all-reduce sums right, before training on several replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from loopwright.distribution import placement
from loopwright.errors import ConfigError
from loopwright.graphs.autograph import as_written

if TYPE_CHECKING:
  from loopwright.distribution.reduction import Reduction

_PATTERN = np.arange(1, 7)
_GROUP = 8
"""Replicas whose contributions to `prove` add up, to 36 x 6 at most; bfloat16 is exact to 256."""


def prove(
  reduction: Reduction, strategy: tf.distribute.Strategy, dtypes: Sequence[tf.DType]
) -> None:
  """Runs an all-reduce with a known sum (host).

  Every replica contributes small integers of its own, through the same code path as the gradients.
  Each `_GROUP` replicas fill one row, so every partial sum is exact in every wire dtype. This
  catches, for example, HierarchicalCopyAllReduce, which ignores the last replica of an odd number.

  Raises:
    ConfigError: a replica received a wrong sum, or the replicas cannot send the dtype.
  """
  replicas = strategy.num_replicas_in_sync
  dtypes = sorted(set(dtypes), key=lambda d: d.name)
  sent = {reduction.wire_dtype or dtype for dtype in dtypes}
  if tf.bfloat16 in sent and not placement.of(strategy).sends_bfloat16:
    raise ConfigError(
      "gradients would be summed in bfloat16 (Reduction.wire_dtype, or the weights' own dtype), "
      "which TensorFlow's collectives do not have between GPUs; set Reduction.wire_dtype to "
      "'float16' or 'float32', or on one machine mirrored.cross_device_ops to 'hierarchical_copy'."
    )
  groups = -(-replicas // _GROUP)

  @as_written
  def contribute() -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    group, value = tf.cast(replica, tf.int32) // _GROUP, tf.cast(replica, tf.int32) % _GROUP + 1
    rows = tf.one_hot(group, groups, value, 0)[:, tf.newaxis] * _PATTERN
    gradients = [tf.cast(rows, dtype) for dtype in dtypes]
    return reduction.all_reduce(gradients, [tf.cast(value, tf.float32)])

  sums = tf.function(lambda: strategy.run(contribute), autograph=False)()
  totals = np.zeros([groups, 1])
  for replica in range(replicas):
    totals[replica // _GROUP] += replica % _GROUP + 1
  for dtype, got in zip([*dtypes, tf.float32], tf.nest.flatten(sums), strict=True):
    for local in strategy.experimental_local_results(got):
      _check(local, totals, dtype, replicas)


def _check(got: tf.Tensor, totals: np.ndarray, dtype: tf.DType, replicas: int) -> None:
  expected = np.asarray(totals * _PATTERN if got.shape.rank else totals.sum())
  received = np.asarray(tf.cast(got, tf.float64))
  wrong = (received != expected) | (got.dtype != dtype)
  if wrong.any():
    raise ConfigError(
      f"the all-reduce of {dtype.name} over {replicas} replicas is wrong: expected "
      f"{expected[wrong][:6].tolist()}, got {received[wrong][:6].tolist()}; choose another op "
      "(for example mirrored.cross_device_ops = 'reduction_to_one_device')."
    )
