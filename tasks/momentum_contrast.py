"""Momentum contrast (MoCo): negatives from a queue of earlier keys, keys from a slow encoder.

Both are state that the step keeps: `step.assign` sets them at its end, the same on all replicas, so
a small batch has many negatives, and a checkpoint has the queue.

He et al., "Momentum Contrast for Unsupervised Visual Representation Learning" (2020), algorithm 1,
with the head of version 2.
"""

from __future__ import annotations

import types
from typing import Any

import keras
import tensorflow as tf

import loopwright
from loopwright import Batch, ConfigError, Loss, Step
from loopwright.tasks.contrastive import Contrastive

SLOW = {"slow_encoder": "encoder", "slow_head": "head"}
"""The slow networks -> those that they follow."""


@loopwright.register
class MomentumContrast(Contrastive):
  """Learns which key, of the batch and a queue, is of the same image; labels only evaluate."""

  accepted = types.MappingProxyType(
    {"cannot learn one batch": "the queue has earlier keys of the same images, as negatives"}
  )

  def __init__(
    self,
    *,
    queue_size: int = 1024,
    momentum: float = 0.99,
    temperature: float = 0.2,
    **options: Any,
  ) -> None:
    """Keeps its arguments.

    Args:
      queue_size: keys of earlier steps that are negatives.
      momentum: slow = momentum * slow + (1 - momentum) * new, after each step.
      temperature: divides the cosine similarities.
      **options: see `Contrastive`.

    Raises:
      ConfigError: a value is out of its range.
    """
    super().__init__(temperature=temperature, **options)
    if queue_size < 1:
      raise ConfigError(f"MomentumContrast.queue_size is {queue_size}; it must be 1 or more.")
    if not 0 <= momentum < 1:
      raise ConfigError(f"MomentumContrast.momentum is {momentum}; it must be from 0 to below 1.")
    self._queue_size, self._momentum = queue_size, momentum

  def build_model(self) -> dict[str, Any]:
    """Returns encoder and head, their slow copies, and a queue of random keys.

    The queue has one row more, which does not count: padding ends there.
    """
    fast, slow = super().build_model(), super().build_model()
    for name, followed in SLOW.items():
      slow[followed].set_weights(fast[followed].get_weights())
      slow[followed].trainable = False
      fast[name] = slow[followed]
    keys = tf.math.l2_normalize(keras.random.normal([self._queue_size + 1, self._projection]), 1)
    queue = tf.Variable(keys, trainable=False, name="queue")
    end = tf.Variable(0, dtype=tf.int64, trainable=False, name="end")
    return {**fast, "queue": queue, "end": end}

  def train_step(self, step: Step, batch: Batch) -> None:
    """Updates the encoder, puts the keys of all replicas into the queue, moves the slow copies."""
    key = self._slow_embedding(batch["second"])
    batch = {**batch, "key": key}
    step.update(lambda part: self.momentum_loss(step, part), batch)
    self._enqueue(step, step.all_gather(key), step.all_gather(batch["weight"]))
    for name, followed in SLOW.items():
      pairs = zip(self.model[name].variables, self.model[followed].variables, strict=True)
      for slow, new in pairs:
        step.assign(slow, self._momentum * slow + (1.0 - self._momentum) * new)

  def momentum_loss(self, step: Step, batch: Batch) -> Loss:
    """InfoNCE of the first views: the own key against the keys in the queue (equation 1)."""
    query, key = self.embedding(batch["first"], training=True), batch["key"]
    positive = tf.reduce_sum(query * key, axis=1, keepdims=True)
    negative = tf.matmul(query, self.model["queue"][:-1], transpose_b=True)
    logits = tf.concat([positive, negative], axis=1) / self._temperature
    losses = tf.reduce_logsumexp(logits, axis=1) - positive[:, 0] / self._temperature
    return Loss.from_examples(losses, batch["weight"])

  def _slow_embedding(self, image: tf.Tensor) -> tf.Tensor:
    embedded = self.model["slow_head"](self.model["slow_encoder"](image, training=False))
    return tf.math.l2_normalize(tf.cast(embedded, tf.float32), axis=1)

  def _enqueue(self, step: Step, keys: tf.Tensor, weight: tf.Tensor) -> None:
    """Overwrites the oldest rows by the keys of real examples, in their order."""
    real = weight > 0
    rank = tf.cumsum(tf.cast(real, tf.int64)) - 1
    end = tf.convert_to_tensor(self.model["end"])
    place = tf.where(real, (end + rank) % self._queue_size, self._queue_size)[:, tf.newaxis]
    queue = tf.convert_to_tensor(self.model["queue"])
    step.assign(self.model["queue"], tf.tensor_scatter_nd_update(queue, place, keys))
    step.assign(self.model["end"], (end + rank[-1] + 1) % self._queue_size)
