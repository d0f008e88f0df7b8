"""A mixture of two packed corpora whose shares change at step 4, and an attention over them."""

import keras
import numpy as np
import tensorflow as tf

import loopwright
from loopwright import ArraySource, Loss, Mixture, Packed, Task, attention_mask

KINDS, LENGTH, BATCH, STEPS, RATE = 11, 12, 5, 12, 0.3
WEIGHTS = {0: {"few": 1, "many": 1}, 4: {"few": 3, "many": 1}}
"""By step."""


def corpus(name):
  """The documents of a part, each an array of 2 to 9 tokens above 0."""
  random = np.random.default_rng(len(name))
  count = {"few": 9, "many": 40}[name]
  return [random.integers(1, KINDS, size) for size in random.integers(2, 10, count)]


def network():
  """One layer of Keras's attention over tokens and learned positions."""
  keras.utils.set_random_seed(4)
  token, position = (keras.Input([None], dtype="int32") for _ in range(2))
  mask = keras.Input([None, None], dtype="bool")
  x = keras.layers.Embedding(KINDS, 8)(token) + keras.layers.Embedding(LENGTH, 8)(position)
  x = x + keras.layers.MultiHeadAttention(2, 4, use_bias=False)(x, x, attention_mask=mask)
  return keras.Model([token, position, mask], keras.layers.Dense(KINDS)(x))


class NextToken(Task):
  """The mean over tokens of the cross-entropy of the next one in its document."""

  def forward(self, batch, training):
    mask = attention_mask(batch["segment"])
    return self.model([batch["token"], batch["position"], mask], training=training)

  def loss(self, outputs, batch):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["target"], outputs)
    real = tf.cast(batch["segment"] > 0, tf.float32) * batch["weight"][:, tf.newaxis]
    return Loss(tf.reduce_sum(losses * real), tf.reduce_sum(real))


@loopwright.register
class PackedTexts(NextToken):
  """Of the mixture."""

  def build_model(self):
    return network()

  def source(self, split):
    return Mixture(
      parts={name: self.part(name) for name in ("few", "many")},
      weights=WEIGHTS, examples_per_step=BATCH,
    )  # fmt: skip

  def part(self, name):
    documents = corpus(name)
    features = {
      "token": np.concatenate([each[:-1] for each in documents]).astype(np.int32),
      "target": np.concatenate([each[1:] for each in documents]).astype(np.int32),
    }
    lengths = [len(each) - 1 for each in documents]
    return Packed(
      ArraySource(features=features), lengths=lengths, length=LENGTH, packing="in_order"
    )
