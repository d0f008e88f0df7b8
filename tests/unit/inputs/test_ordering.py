"""The order and the seeds of `loopwright.inputs.ordering`, against Python and NumPy."""

import itertools
import textwrap

import numpy as np
import pytest
import tensorflow as tf
from input_cases import numbered, reference_hash, train_ids

from loopwright.inputs import ordering


def signed(value):
  return value - 2**64 if value >= 2**63 else value


def reference_sorted_epoch(n, seed, epoch):
  hashes = [signed(reference_hash(epoch * n + i, seed, "order")) for i in range(n)]
  return sorted(range(n), key=hashes.__getitem__, reverse=True)


def reference_ciphered_epoch(n, seed, epoch, rounds=12, word=8):
  """The Simon cipher of eprint.iacr.org/2013/404 in words of 8 bits, walked until it is below n."""
  low = 2**word - 1

  def rotl(x, by):
    return (x << by | x >> (word - by)) & low

  def f(x):
    return (rotl(x, 1) & rotl(x, 8)) ^ rotl(x, 2)

  halves = [reference_hash(2 * epoch + i, seed, "order") for i in (0, 1)]
  keys = [part & low for half in halves for part in (half & 0xFFFFFFFF, half >> 32)][:3]
  z = 0x7369F885192C0EF5
  for i in range(3, rounds):
    last = keys[-1]
    keys.append(
      0xFC ^ (z >> (i - 3) & 1) ^ keys[i - 3] ^ rotl(last, word - 3) ^ rotl(last, word - 4)
    )

  def encrypt(value):
    left, right = value >> word, value & low
    for first, second in zip(keys[::2], keys[1::2], strict=True):
      left = left ^ f(right) ^ first
      right = right ^ f(left) ^ second
    return left << word | right

  values = np.arange(2 ** (2 * word), dtype=np.int64)
  table = encrypt(values)
  order = table[:n]
  while (order >= n).any():
    order = np.where(order >= n, table[order], order)
  return order.tolist()


@pytest.mark.parametrize("n", [1, 2, 3, 5, 1000, 4096])
def test_small_order_is_the_sort_of_hashes(n):
  expected = list(itertools.chain(*(reference_sorted_epoch(n, 7, epoch) for epoch in range(3))))
  assert train_ids(numbered(n), 3, global_batch_size=n, seed=7).tolist() == expected


@pytest.mark.parametrize("n", [4097, 60_000])
def test_large_order_is_the_cipher_with_a_hashed_key(n):
  expected = reference_ciphered_epoch(n, 7, 0) + reference_ciphered_epoch(n, 7, 1)
  assert train_ids(numbered(n), 2, global_batch_size=n, seed=7).tolist() == expected


@pytest.mark.parametrize("n", [1, 2, 3, 5, 10, 1000, 4096, 4097, 65_536, 65_537, 262_145])
@pytest.mark.fast(n=[1, 2, 3, 5, 10, 1000, 4096, 4097])
def test_each_epoch_is_a_permutation_and_epochs_differ(n):
  epochs = 3 if n > 100 else 40
  order = train_ids(numbered(n), epochs, global_batch_size=n, seed=3).reshape(epochs, n)
  np.testing.assert_array_equal(np.sort(order), np.broadcast_to(np.arange(n), order.shape))
  if n > 100:
    assert len({tuple(epoch) for epoch in order}) == epochs
  elif n > 1:
    assert len({tuple(epoch) for epoch in order}) > 1


@pytest.mark.whole
def test_a_million_far_positions_of_a_huge_source_are_distinct():
  positions = tf.range(10**15, 10**15 + 10**6, dtype=tf.int64)
  order = ordering.examples_at(positions, num_examples=10**12, seed=0).numpy()
  assert np.unique(order).size == 10**6
  assert order.min() >= 0
  assert order.max() < 10**12


def test_seeds_give_different_orders_also_where_their_low_bits_agree():
  orders = {
    tuple(train_ids(numbered(60_000), 1, global_batch_size=100, seed=seed))
    for seed in (0, 1, 256, 65_536, 2**31, 2**32 - 1)
  }
  assert len(orders) == 6


def test_epochs_do_not_repeat_after_256():
  first = ordering.examples_at(tf.range(1000, dtype=tf.int64), num_examples=60_000, seed=0).numpy()
  later = ordering.examples_at(
    tf.range(1000, dtype=tf.int64) + 256 * 60_000, num_examples=60_000, seed=0
  ).numpy()
  assert (first == later).mean() < 0.01


@pytest.mark.parametrize("n", [1797, 60_000])
def test_classes_mix_in_batches_as_in_a_random_order(n):
  """The variance of class counts is the hypergeometric one, for examples sorted by class."""
  batch, classes, epochs = 128, 10, 20
  steps = n // batch
  order = (
    ordering.examples_at(tf.range(n * epochs, dtype=tf.int64), num_examples=n, seed=0)
    .numpy()
    .reshape(epochs, n)
  )
  labels = (order * classes // n)[:, : steps * batch].reshape(epochs, steps, batch)
  counts = np.stack([(labels == label).sum(-1) for label in range(classes)])
  share = 1 / classes
  expected = batch * share * (1 - share) * (n - batch) / (n - 1)
  assert counts.var(axis=2).mean() == pytest.approx(expected, rel=0.05)


def test_consecutive_epochs_are_not_correlated():
  order = (
    ordering.examples_at(tf.range(120_000, dtype=tf.int64), num_examples=60_000, seed=0)
    .numpy()
    .reshape(2, -1)
  )
  _, counts = np.unique(order[0] ^ order[1], return_counts=True)
  assert counts.max() < 20


def test_trap_public_index_shuffle_pads_a_batch_of_seeds_along_the_wrong_axis():
  index = tf.range(5, dtype=tf.int64)
  last = tf.constant(99, tf.int64)
  with pytest.raises(tf.errors.InvalidArgumentError, match=r"matrix of size \[5, 3\].*\[6,2\]"):
    tf.random.experimental.index_shuffle(index, tf.zeros([5, 2], tf.int32), last)
  raw = tf.raw_ops.RandomIndexShuffle(
    index=index, seed=tf.tile([[498247692, 0, 0]], [5, 1]), max_index=last, rounds=4
  )
  one_seed = tf.random.experimental.index_shuffle(index, tf.zeros([2], tf.int32), last)
  np.testing.assert_array_equal(raw, one_seed)


def test_trap_raw_index_shuffle_of_four_to_the_k_plus_one_is_no_permutation():
  """If TensorFlow mends this, the order of such sources may be made simpler in a new version."""
  n = 4**8 + 1
  raw = tf.raw_ops.RandomIndexShuffle(
    index=tf.range(n, dtype=tf.int64), seed=[1, 2, 3], max_index=tf.constant(n - 1, tf.int64)
  )
  assert np.unique(raw).size < n


def test_trap_raw_index_shuffle_truncates_its_seed():
  index, last = tf.range(100, dtype=tf.int64), tf.constant(59_999, tf.int64)
  orders = [
    tf.raw_ops.RandomIndexShuffle(index=index, seed=[9, 9, epoch], max_index=last)
    for epoch in (0, 256)
  ]
  np.testing.assert_array_equal(*orders)


def test_the_synopsis_runs():
  synopsis = ordering.__doc__.split("\n\n")[1]
  exec(textwrap.dedent(synopsis), vars(ordering).copy())
