"""All communication between replicas: one explicit all-reduce of everything that an update needs.

The strategy chooses the algorithm (NCCL, hierarchical copy, collectives; see local.py). This
module chooses how tensors are sent: one flat buffer or one by one, in which dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf

from loopwright.errors import unknown
from loopwright.options.declaration import asked

Packing = Literal["flat", "per_tensor"]
WIRE_DTYPES = ("float32", "bfloat16", "float16")


class Reduction:
  """All-reduces (SUM) gradients and scalars over the replicas of the current strategy."""

  may_change = asked("sums with it from there on")

  def __init__(
    self,
    *,
    packing: Packing = "flat",
    wire_dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    bytes_per_pack: int = 0,
    timeout_s: float | None = None,
  ) -> None:
    """Stores the options; uses no device.

    Args:
      packing: "flat" concatenates all tensors of a dtype into one buffer; "per_tensor" reduces each
        tensor by itself and leaves packing to the cross-device op (`num_packs`).
      wire_dtype: the dtype that gradients are cast to for the sum; None keeps their own. A narrower
        dtype rounds each replica's gradient and each partial sum, with a relative error per
        rounding of about 2**-8 (bfloat16) or 2**-11 (float16). float16 overflows above 65504, which
        the finite check detects. Loss and weight keep their dtype, so the division stays exact.
      bytes_per_pack: for collective ops, the size at which they split a batch of tensors; 0 leaves
        the choice to TensorFlow.
      timeout_s: for collective ops, seconds after which a missing replica is an error.

    Raises:
      ConfigError: an unknown packing or dtype.
    """
    if packing not in ("flat", "per_tensor"):
      raise unknown("Reduction.packing", packing, ("flat", "per_tensor"))
    if wire_dtype is not None and wire_dtype not in WIRE_DTYPES:
      raise unknown("Reduction.wire_dtype", wire_dtype, WIRE_DTYPES)
    self.packing = packing
    self.wire_dtype = tf.as_dtype(wire_dtype) if wire_dtype else None
    self._options = tf.distribute.experimental.CommunicationOptions(
      bytes_per_pack=bytes_per_pack, timeout_seconds=timeout_s
    )

  def all_reduce(
    self, gradients: Sequence[tf.Tensor], scalars: Sequence[tf.Tensor]
  ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Sums over replicas, in one call (replica context).

    Args:
      gradients: dense tensors of any float dtype and static shape.
      scalars: float scalars, summed in their own dtype.

    Returns:
      The sums of the gradients and of the scalars, equal on every replica, in the given dtypes.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
      wire = [self._to_wire(g) for g in gradients]
      return [tf.cast(w, g.dtype) for w, g in zip(wire, gradients, strict=True)], list(scalars)
    tensors = [self._to_wire(g) for g in gradients] + list(scalars)
    sums = self._reduce(context, tensors)
    summed = [tf.cast(s, g.dtype) for s, g in zip(sums, gradients, strict=False)]
    return summed, sums[len(gradients) :]

  def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
    """Concatenates the rows of all replicas, in replica order (replica context).

    The result is differentiable: each replica receives the gradients with respect to its rows,
    summed over replicas. Forward and backward pass communicate once each. Each replica contributes
    its rows and zeros elsewhere to an `all_reduce`, so the check at the start of a run covers this
    too. The result is exact, except that denormal numbers become 0.

    Args:
      tensor: [n, ...], of a numeric dtype, with the same static shape on every replica.

    Returns:
      [replicas x n, ...], equal on every replica; `tensor` itself on a single replica.
    """
    context = tf.distribute.get_replica_context()
    replicas, index = context.num_replicas_in_sync, context.replica_id_in_sync_group
    if replicas == 1:
      return tensor
    by_replica = [replicas, *tensor.shape]
    own = tf.reshape(tf.range(replicas) == index, [replicas] + [1] * tensor.shape.rank)

    @tf.custom_gradient
    def gather(rows: tf.Tensor) -> tuple[tf.Tensor, Any]:
      _, [gathered] = self.all_reduce([], [tf.where(own, rows, tf.zeros_like(rows))])

      def gradient(slope: tf.Tensor) -> tf.Tensor:
        _, [total] = self.all_reduce([], [slope])
        return tf.gather(tf.reshape(total, by_replica), index)

      return tf.reshape(gathered, [replicas * tensor.shape[0], *tensor.shape[1:]]), gradient

    return gather(tensor)

  def _to_wire(self, gradient: tf.Tensor) -> tf.Tensor:
    return tf.cast(gradient, self.wire_dtype) if self.wire_dtype else gradient

  def _reduce(
    self, context: tf.distribute.ReplicaContext, tensors: Sequence[tf.Tensor]
  ) -> list[tf.Tensor]:
    """Sums one dtype at a time: collectives concatenate all tensors of a call."""
    reduce = self._reduce_flat if self.packing == "flat" else self._reduce_each
    sums = list(tensors)
    for dtype in sorted({t.dtype for t in tensors}, key=lambda d: d.name):
      group = [i for i, t in enumerate(tensors) if t.dtype == dtype]
      for i, summed in zip(group, reduce(context, [tensors[i] for i in group]), strict=True):
        sums[i] = summed
    return sums

  def _reduce_each(
    self, context: tf.distribute.ReplicaContext, tensors: Sequence[tf.Tensor]
  ) -> list[tf.Tensor]:
    return list(context.all_reduce(tf.distribute.ReduceOp.SUM, list(tensors), self._options))

  def _reduce_flat(
    self, context: tf.distribute.ReplicaContext, tensors: Sequence[tf.Tensor]
  ) -> list[tf.Tensor]:
    buffer = tf.concat([tf.reshape(t, [-1]) for t in tensors], axis=0)
    [summed] = self._reduce_each(context, [buffer])
    pieces = tf.split(summed, [t.shape.num_elements() for t in tensors])
    return [tf.reshape(p, t.shape) for p, t in zip(pieces, tensors, strict=True)]

  def describe(self) -> str:
    """Returns packing and wire dtype, such as "flat, own dtype"."""
    return f"{self.packing}, {self.wire_dtype.name if self.wire_dtype else 'own'} dtype"

  def prove(self, strategy: tf.distribute.Strategy, dtypes: Sequence[tf.DType]) -> None:
    """Runs an all-reduce with a known sum over several replicas, before training (host).

    Raises:
      ConfigError: a replica received a wrong sum, or the replicas cannot send the dtype.
    """
    if strategy.num_replicas_in_sync > 1:
      from loopwright.distribution import proof

      proof.prove(self, strategy, dtypes)
