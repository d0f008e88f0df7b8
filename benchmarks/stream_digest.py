"""A task whose checkpoints show which examples it was trained on, and in which order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import loopwright
from loopwright import Batch
from loopwright.step import Step
from loopwright.tasks.image_classification import ImageClassification

FACTOR = 6364136223846793005  # odd, and so a bijection modulo 2**64; Knuth, MMIX
_WORD = 2**64


class StreamDigest(tf.Module):
  """A number that depends on every example id trained on so far, in order: digest of 0, 1, 2 ...

  For each id: digest -> FACTOR * digest + id + 1, modulo 2**64.
  """

  def __init__(self, *, global_batch_size: int):
    """Makes the variable; call it in `strategy.scope()`."""
    super().__init__()
    self._batch_size = global_batch_size
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    self.value = tf.Variable(0, dtype=tf.int64, trainable=False, aggregation=first)

  def update(self, ids: tf.Tensor) -> None:
    """Adds a global batch (replica context); `ids`, int64 [n], are this replica's, -1 = padding."""
    context = tf.distribute.get_replica_context()
    rows = context.replica_id_in_sync_group * len(ids) + tf.range(len(ids))
    factors = tf.gather(self._factors(len(ids) * context.num_replicas_in_sync), rows)
    part = tf.reduce_sum((ids + 1) * factors)
    if context.num_replicas_in_sync > 1:
      part = context.all_reduce(tf.distribute.ReduceOp.SUM, part)
    self.value.assign(self.value * _signed(pow(FACTOR, self._batch_size, _WORD)) + part)

  def _factors(self, padded_rows: int) -> np.ndarray:
    powers = [pow(FACTOR, self._batch_size - 1 - row, _WORD) for row in range(self._batch_size)]
    return np.array([_signed(p) for p in powers] + [0] * (padded_rows - self._batch_size), np.int64)


def digest(ids: Iterable[int], start: int = 0) -> int:
  """Returns what `StreamDigest` must hold after `ids`, computed one by one in Python."""
  value = start
  for number in ids:
    value = (value * FACTOR + int(number) + 1) % _WORD
  return _signed(value)


def _signed(word: int) -> int:
  return word - _WORD if word >= _WORD // 2 else word


@tf.custom_gradient
def _overflowing(value: tf.Tensor, where: tf.Tensor) -> tuple[tf.Tensor, Any]:
  """Returns `value`; its gradient is infinite where `where`."""
  return tf.identity(value), lambda upstream: (tf.where(where, np.inf, upstream), None)


@loopwright.register
class DigestedImages(ImageClassification):
  """Image classification that also computes the digest of its stream of example ids."""

  def __init__(self, *, global_batch_size: int, overflow_every: int, **options: Any) -> None:
    """Stores its arguments.

    Args:
      global_batch_size: the same as run.global_batch_size.
      overflow_every: each example whose id this divides has an infinite gradient.
      **options: those of `ImageClassification`.
    """
    super().__init__(**options)
    self._global_batch_size, self._overflow_every = global_batch_size, overflow_every

  def build_model(self) -> dict[str, Any]:
    """Returns the network, with the digest."""
    stream = StreamDigest(global_batch_size=self._global_batch_size)
    return {"network": super().build_model(), "stream": stream}

  def forward(self, batch: Batch, training: bool) -> tf.Tensor:
    """The network's logits."""
    network: keras.Model = self.model["network"]
    overflows = training & (batch["example_id"] % self._overflow_every == 0)
    return _overflowing(network(batch["image"], training=training), overflows[:, tf.newaxis])

  def train_step(self, step: Step, batch: Batch) -> None:
    """The usual step, then the digest."""
    super().train_step(step, batch)
    self.model["stream"].update(batch["example_id"])
