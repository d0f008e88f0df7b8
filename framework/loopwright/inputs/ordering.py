"""The order of examples and their seeds, as functions of (seed, position) only.

    positions = tf.range(10, dtype=tf.int64)                  # two epochs of 5 examples
    order = examples_at(positions, num_examples=5, seed=1).numpy()
    assert sorted(order[:5]) == sorted(order[5:]) == [0, 1, 2, 3, 4]

There is no state, so any worker can compute any position at any time.
"""

import hashlib

import tensorflow as tf

from loopwright.graphs.randomness import hashed

_SORT_UP_TO = 4096
"""Up to here positions are sorted by hash. TensorFlow's index shuffle steps through a 16-bit cycle
for small sizes: 0.2 us per index for 4096 examples, but 126 us for 2."""

_ROUNDS = 12
"""TensorFlow's default of 4 mixes poorly: for 60,000 examples sorted by class, the variance of the
class counts in a batch of 128 is 0.74 of a random order's. From 8 on it is right; 12 cost 1 us per
batch more."""


def examples_at(positions: tf.Tensor, *, num_examples: int, seed: int) -> tf.Tensor:
  """Returns the example of each position, int64 [m] in [0, num_examples) (any context).

  Args:
    positions: int64 [m], consecutive; m is static.
    num_examples: the length of an epoch, in which each position reads another example.
    seed: an integer; another seed gives another order.
  """
  if num_examples <= _SORT_UP_TO:
    return _sorted_order(positions, num_examples, seed)
  return _ciphered_order(positions, num_examples, seed)


def _sorted_order(positions: tf.Tensor, num_examples: int, seed: int) -> tf.Tensor:
  """Sorts the positions of each epoch by their hashes, largest first."""
  first = positions[0] - positions[0] % num_examples
  epochs = (positions.shape[0] + num_examples - 2) // num_examples + 1
  within = tf.range(epochs * num_examples, dtype=tf.int64)
  hashes = tf.bitcast(hashed(first + within, seed, "order"), tf.int64)
  order = tf.math.top_k(tf.reshape(hashes, [epochs, num_examples]), k=num_examples).indices
  return tf.cast(tf.gather(tf.reshape(order, [-1]), positions - first), tf.int64)


def _ciphered_order(positions: tf.Tensor, num_examples: int, seed: int) -> tf.Tensor:
  """Orders by the block cipher of RandomIndexShuffle, keyed by a hash of the epoch.

  This works around three defects of the op:

  - It uses only some bits of the key words, 8 each for 60,000 examples. Plain counters as keys
    would repeat every 256 epochs.
  - It is not a permutation of 4**k + 1 numbers for k >= 8, as it uses one bit too few.
  - The public tf.random.experimental.index_shuffle pads a batch of seeds along the wrong axis.
  """
  epochs = positions // num_examples
  words = tf.bitcast(hashed(tf.stack([2 * epochs, 2 * epochs + 1], 1), seed, "order"), tf.int32)
  keys = tf.reshape(words, [-1, 4])[:, :3]

  def permute(indices: tf.Tensor, size: int) -> tf.Tensor:
    last = tf.constant(size - 1, tf.int64)
    return tf.raw_ops.RandomIndexShuffle(index=indices, seed=keys, max_index=last, rounds=_ROUNDS)

  within = positions % num_examples
  if not _is_power_of_four(num_examples - 1):
    return permute(within, num_examples)
  # Permute one number more, and permute again the index that maps to it.
  indices = permute(within, num_examples + 1)
  return tf.where(indices < num_examples, indices, permute(indices, num_examples + 1))


def seeds_at(positions: tf.Tensor, *, seed: int) -> tf.Tensor:
  """Returns a different seed, int32 [m, 2], for each of `positions`, int64 [m] (any context)."""
  return tf.bitcast(hashed(positions, seed, "seeds"), tf.int32)


def seed_of_part(seed: int, name: str) -> int:
  """Returns the seed of a further training source, 32 bits: parts have orders of their own."""
  return int.from_bytes(
    hashlib.blake2b(f"part {name} {seed}".encode(), digest_size=4).digest(), "little"
  )


def _is_power_of_four(number: int) -> bool:
  return number & (number - 1) == 0 and number.bit_length() % 2 == 1
