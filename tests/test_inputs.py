"""Order, batches, padding, restore and errors of `framework.inputs`, against NumPy."""

import gzip
import hashlib
import io
import itertools
import logging
import resource
import struct
import textwrap
import time

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from framework import inputs
from framework.errors import ConfigError
from framework.inputs import (
  ArraySource,
  ImageFolderSource,
  Source,
  StreamSource,
  eval_dataset,
  load_arrays,
  padded_batch_size,
  read_idx,
  train_dataset,
)


def numbered(n, **features):
  """A source whose feature "x" is its example's index."""
  return ArraySource(features={"x": np.arange(n, dtype=np.int64), **features})


def stream(n, **kwargs):
  dataset = tf.data.Dataset.range(n).map(lambda i: {"x": i})
  return StreamSource(dataset=dataset, **kwargs)


def arrays(dataset, count=None):
  return list((dataset if count is None else dataset.take(count)).as_numpy_iterator())


def train_ids(source, steps, **kwargs):
  """The ids of the real rows of the first batches, in order."""
  batches = arrays(train_dataset(source, **kwargs), steps)
  ids = np.concatenate([batch["example_id"] for batch in batches])
  return ids[ids >= 0]


# ---- Order ----

M64 = 2**64 - 1


def reference_hash(value, seed, purpose):
  """SplitMix64 in Python integers."""
  key = hashlib.blake2b(f"{purpose} {seed}".encode(), digest_size=8).digest()
  mixed = (value * 0x9E3779B97F4A7C15 + int.from_bytes(key, "little")) & M64
  mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & M64
  mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & M64
  return mixed ^ mixed >> 31


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
def test_each_epoch_is_a_permutation_and_epochs_differ(n):
  epochs = 3 if n > 100 else 40
  order = train_ids(numbered(n), epochs, global_batch_size=n, seed=3).reshape(epochs, n)
  np.testing.assert_array_equal(np.sort(order), np.broadcast_to(np.arange(n), order.shape))
  if n > 100:
    assert len({tuple(epoch) for epoch in order}) == epochs
  elif n > 1:
    assert len({tuple(epoch) for epoch in order}) > 1


def test_a_million_far_positions_of_a_huge_source_are_distinct():
  positions = tf.range(10**15, 10**15 + 10**6, dtype=tf.int64)
  order = inputs._order(positions, 10**12, seed=0).numpy()
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
  first = inputs._order(tf.range(1000, dtype=tf.int64), 60_000, 0).numpy()
  later = inputs._order(tf.range(1000, dtype=tf.int64) + 256 * 60_000, 60_000, 0).numpy()
  assert (first == later).mean() < 0.01


@pytest.mark.parametrize("n", [1797, 60_000])
def test_classes_mix_in_batches_as_in_a_random_order(n):
  """The variance of class counts is the hypergeometric one, for examples sorted by class."""
  batch, classes, epochs = 128, 10, 20
  steps = n // batch
  order = inputs._order(tf.range(n * epochs, dtype=tf.int64), n, 0).numpy().reshape(epochs, n)
  labels = (order * classes // n)[:, : steps * batch].reshape(epochs, steps, batch)
  counts = np.stack([(labels == label).sum(-1) for label in range(classes)])
  share = 1 / classes
  expected = batch * share * (1 - share) * (n - batch) / (n - 1)
  assert counts.var(axis=2).mean() == pytest.approx(expected, rel=0.05)


def test_consecutive_epochs_are_not_correlated():
  order = inputs._order(tf.range(120_000, dtype=tf.int64), 60_000, 0).numpy().reshape(2, -1)
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


def test_unshuffled_order_is_that_of_the_source():
  ids = train_ids(numbered(5), 3, global_batch_size=4, shuffle=False, position=3)
  assert ids.tolist() == [3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


# ---- Training batches ----


@pytest.mark.parametrize("batch", [1, 7, 32, 5000])
@pytest.mark.parametrize("multiple", [1, 4, 3])
def test_the_stream_of_ids_does_not_depend_on_the_batching(batch, multiple):
  n = 100
  steps = -(-3 * n // batch)
  ids = train_ids(numbered(n), steps, global_batch_size=batch, pad_multiple=multiple, seed=5)
  expected = train_ids(numbered(n), 3, global_batch_size=n, seed=5)
  np.testing.assert_array_equal(ids[: 3 * n], expected)


def test_every_feature_is_the_row_of_its_id():
  rng = np.random.default_rng(0)
  features = {
    "image": rng.integers(0, 256, (50, 3, 2), np.uint8),
    "value": rng.normal(size=50),
    "name": np.array([f"é{i}" for i in range(50)]),
    "big_endian": np.arange(50, dtype=">i4"),
    "flag": np.arange(50) % 3 == 0,
  }
  dataset = train_dataset(ArraySource(features=features), global_batch_size=20)
  assert dataset.element_spec == {
    "image": tf.TensorSpec([20, 3, 2], tf.uint8),
    "value": tf.TensorSpec([20], tf.float64),
    "name": tf.TensorSpec([20], tf.string),
    "big_endian": tf.TensorSpec([20], tf.int32),
    "flag": tf.TensorSpec([20], tf.bool),
    "weight": tf.TensorSpec([20], tf.float32),
    "example_id": tf.TensorSpec([20], tf.int64),
  }
  for batch in arrays(dataset, 3):
    for name, array in features.items():
      expected = array[batch["example_id"]]
      expected = [text.encode() for text in expected] if name == "name" else expected
      np.testing.assert_array_equal(batch[name], expected)


@pytest.mark.parametrize("make_source", [lambda: numbered(10), lambda: stream(10)])
def test_padding_repeats_the_first_row_with_weight_zero(make_source):
  for batch in arrays(train_dataset(make_source(), global_batch_size=4, pad_multiple=3), 5):
    assert batch["weight"].tolist() == [1, 1, 1, 1, 0, 0]
    assert (batch["example_id"][:4] >= 0).all()
    assert batch["example_id"][4:].tolist() == [-1, -1]
    assert batch["x"].tolist() == [*batch["example_id"][:4], batch["x"][0], batch["x"][0]]


def test_weights_of_the_source_are_kept_for_real_rows():
  weight = np.linspace(0, 3, 10, dtype=np.float32)
  dataset = train_dataset(numbered(10, weight=weight), global_batch_size=4, pad_multiple=3)
  for batch in arrays(dataset, 5):
    np.testing.assert_array_equal(batch["weight"][:4], weight[batch["example_id"][:4]])
    assert batch["weight"][4:].tolist() == [0, 0]


def test_padded_batch_size():
  assert [padded_batch_size(b, m) for b, m in [(1, 1), (7, 4), (8, 4), (9, 4), (3, 8)]] == [
    1, 8, 8, 12, 8,
  ]  # fmt: skip


@pytest.mark.parametrize("n", [10, 5000])
@pytest.mark.parametrize("position", [1, 8, 123_456_789])
def test_restore_goes_on_where_the_stream_was(n, position):
  def read(position, size):
    return train_ids(numbered(n), 1, global_batch_size=size, seed=2, position=position)

  np.testing.assert_array_equal(read(position, 60)[20:], read(position + 20, 40))


def test_restore_costs_nothing():
  source = numbered(60_000)

  def seconds(position):
    dataset = train_dataset(source, global_batch_size=128, position=position)
    began = time.perf_counter()
    next(iter(dataset))
    return time.perf_counter() - began

  fresh, restored = (min(seconds(position) for _ in range(3)) for position in (0, 10**9))
  assert restored < 2 * fresh + 0.2
  seconds(10**15)  # would never end if it were linear


def test_preprocess_sees_the_training_seed_and_the_dataset_does_not():
  seen = []

  def preprocess(batch, training):
    seen.append((sorted(batch), training, batch["seed"].dtype if training else None))
    return {**batch, "copy": batch["seed"] if training else batch["weight"]}

  train = train_dataset(numbered(10), global_batch_size=4, preprocess=preprocess)
  assert "seed" not in train.element_spec
  assert train.element_spec["copy"] == tf.TensorSpec([4, 2], tf.int32)
  eval_dataset(numbered(10), global_batch_size=4, preprocess=preprocess)
  assert seen == [
    (["example_id", "seed", "weight", "x"], True, tf.int32),
    (["example_id", "weight", "x"], False, None),
  ]


def seeds_by_position(source, size, steps, **kwargs):
  dataset = train_dataset(
    source, global_batch_size=size, preprocess=lambda b, t: {**b, "copy": b["seed"]}, **kwargs
  )
  return np.concatenate([batch["copy"][:size] for batch in arrays(dataset, steps)])


@pytest.mark.parametrize("make_source", [lambda: numbered(10), lambda: stream(10)])
def test_seeds_are_a_function_of_seed_and_position(make_source):
  expected = [reference_hash(position, 4, "seeds") for position in range(24)]
  expected = [list(struct.unpack("<ii", struct.pack("<Q", value))) for value in expected]
  assert seeds_by_position(make_source(), 6, 4, seed=4).tolist() == expected
  assert seeds_by_position(make_source(), 8, 3, seed=4, pad_multiple=3).tolist() == expected
  assert seeds_by_position(make_source(), 4, 1, seed=4, position=9).tolist() == expected[9:13]
  assert len({tuple(seed) for seed in expected}) == 24


def test_preprocess_runs_with_autograph_on_whole_padded_batches():
  def preprocess(batch, training):
    if tf.reduce_sum(batch["weight"]) > 3:
      value = tf.cast(batch["x"], tf.float32) / 2
    else:
      value = tf.zeros([6])
    return {**batch, "half": value}

  batches = arrays(
    train_dataset(numbered(10), global_batch_size=4, pad_multiple=6, preprocess=preprocess), 2
  )
  for batch in batches:
    np.testing.assert_array_equal(batch["half"], batch["x"] / 2)


def test_padding_stays_weightless_whatever_preprocess_makes_of_weights_and_rows():
  def preprocess(batch, training):
    batch = {name: tf.reverse(value, [0]) for name, value in batch.items()}
    return {**batch, "weight": tf.fill([6], 2.0)}

  dataset = train_dataset(numbered(10), global_batch_size=4, pad_multiple=6, preprocess=preprocess)
  for batch in arrays(dataset, 2):
    assert batch["weight"].tolist() == [0, 0, 2, 2, 2, 2]
    assert batch["x"][2:].tolist() == batch["example_id"][2:].tolist()


def test_reads_inside_a_tf_function():
  dataset = train_dataset(numbered(10), global_batch_size=4, pad_multiple=3).take(5)

  @tf.function
  def total(dataset):
    result = tf.constant(0, tf.int64)
    for batch in dataset:
      result += tf.reduce_sum(batch["x"] * tf.cast(batch["weight"], tf.int64))
    return result

  assert int(total(dataset)) == 2 * sum(range(10))


def test_a_source_of_ones_own():
  class Squares(Source):
    num_examples = 20

    def fetch(self, indices):
      return {"square": indices**2}

  for batch in arrays(train_dataset(Squares(), global_batch_size=8), 5):
    np.testing.assert_array_equal(batch["square"], batch["example_id"] ** 2)


def test_in_memory_arrays_are_captured_not_copied_into_the_graph():
  source = ArraySource(features={"x": np.zeros([1000, 1000], np.uint8)})
  traced = tf.function(source.fetch).get_concrete_function(tf.TensorSpec([4], tf.int64))
  assert traced.graph.as_graph_def().ByteSize() < 10_000
  assert [tuple(outside.shape) for outside, _ in traced.graph.captures] == [(1000, 1000)]


# ---- Evaluation ----


@pytest.mark.parametrize(("n", "batch", "multiple"), [(10, 4, 3), (8, 4, 1), (3, 8, 1), (7, 7, 4)])
@pytest.mark.parametrize("make_source", [numbered, stream])
def test_eval_has_every_example_exactly_once_in_order(n, batch, multiple, make_source):
  dataset = eval_dataset(make_source(n), global_batch_size=batch, pad_multiple=multiple)
  rows = padded_batch_size(batch, multiple)
  assert {spec.shape[0] for spec in dataset.element_spec.values()} == {rows}
  batches = arrays(dataset)
  assert len(batches) == -(-n // batch)
  ids, weights, xs = (
    np.concatenate([batch[name] for batch in batches]) for name in ("example_id", "weight", "x")
  )
  real = weights > 0
  assert ids[real].tolist() == list(range(n))
  assert xs[real].tolist() == list(range(n))
  assert weights.sum() == n
  assert (ids[~real] == -1).all()
  for batch in batches:
    assert (batch["x"][batch["weight"] == 0] == batch["x"][0]).all()


def test_eval_keeps_the_weights_of_the_source():
  weight = np.arange(5, dtype=np.float32)
  batches = arrays(eval_dataset(numbered(5, weight=weight), global_batch_size=4))
  assert np.concatenate([batch["weight"] for batch in batches]).tolist() == [
    0, 1, 2, 3, 4, 0, 0, 0,
  ]  # fmt: skip


# ---- Replicas ----


def on_replicas(strategy, dataset, count):
  """The rows of each feature, in the order of replicas, for the first `count` batches."""
  iterator = iter(strategy.experimental_distribute_dataset(dataset))
  return [
    {
      name: [local.numpy() for local in strategy.experimental_local_results(value)]
      for name, value in next(iterator).items()
    }
    for _ in range(count)
  ]


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("batch", [7, 32])
def test_replicas_split_the_same_batches_contiguously(mirrored, replicas, batch):
  n = 96

  def make():
    return train_dataset(numbered(n), global_batch_size=batch, pad_multiple=replicas, seed=6)

  steps = -(-n // batch)
  distributed, plain = on_replicas(mirrored(replicas), make(), steps), arrays(make(), steps)
  for parts, whole in zip(distributed, plain, strict=True):
    for name, value in whole.items():
      assert {len(part) for part in parts[name]} == {len(value) // replicas}
      np.testing.assert_array_equal(np.concatenate(parts[name]), value)
  ids = np.concatenate([part for parts in distributed for part in parts["example_id"]])
  assert sorted(ids[ids >= 0][:n]) == list(range(n))


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("make_source", [numbered, stream])
def test_replicas_evaluate_every_example_exactly_once(mirrored, replicas, make_source):
  dataset = eval_dataset(make_source(10), global_batch_size=4, pad_multiple=replicas)
  ids, weights = [], []
  for parts in on_replicas(mirrored(replicas), dataset, 3):
    ids += np.concatenate(parts["example_id"]).tolist()
    weights += np.concatenate(parts["weight"]).tolist()
  assert [i for i, weight in zip(ids, weights, strict=True) if weight > 0] == list(range(10))


@pytest.mark.parametrize("make_source", [numbered, stream])
def test_shapes_are_static_on_two_replicas(mirrored, make_source):
  dataset = train_dataset(
    make_source(10), global_batch_size=7, pad_multiple=2, preprocess=lambda batch, training: batch
  )
  distributed = mirrored(2).experimental_distribute_dataset(dataset)
  for spec in distributed.element_spec.values():
    assert [local.shape for local in spec._value_specs] == [[4], [4]]


def test_workers_read_disjoint_rows_that_make_up_the_batch():
  """What MultiWorkerMirroredStrategy does to the dataset on each of 2 workers with 1 replica."""
  from tensorflow.python.data.experimental.ops import distribute
  from tensorflow.python.data.ops import rebatch_op

  def make():
    return train_dataset(numbered(30), global_batch_size=7, pad_multiple=2, seed=6)

  def of_worker(worker):
    sizes = distribute.batch_sizes_for_worker(8, 2, 1, worker)
    rebatched = rebatch_op._RebatchDataset(make(), sizes)
    return arrays(distribute._AutoShardDataset(rebatched, 2, worker, 2), 5)

  for first, second, whole in zip(of_worker(0), of_worker(1), arrays(make(), 5), strict=True):
    np.testing.assert_array_equal(np.concatenate([first["x"], second["x"]]), whole["x"])


# ---- Memory-mapped arrays ----


def test_memory_mapped_arrays_read_like_arrays_in_memory(tmp_path):
  rng = np.random.default_rng(1)
  features = {
    "image": rng.integers(0, 256, (40, 4, 3), np.uint8),
    "value": rng.normal(size=40).astype(">f4"),
    "text": np.array([f"t{i}" for i in range(40)], "S4"),
  }
  for name, array in features.items():
    np.save(tmp_path / f"{name}.npy", array)
  loaded = load_arrays(str(tmp_path))
  assert {name: type(array) for name, array in loaded.items()} == dict.fromkeys(features, np.memmap)
  for make in (train_dataset, eval_dataset):
    kwargs = {"global_batch_size": 16, "pad_multiple": 3}
    mapped = make(ArraySource(features={**loaded, "id": np.arange(40)}), **kwargs)
    in_memory = make(ArraySource(features={**features, "id": np.arange(40)}), **kwargs)
    assert mapped.element_spec == in_memory.element_spec
    for got, expected in zip(arrays(mapped, 3), arrays(in_memory, 3), strict=True):
      for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value)


def test_memory_mapped_slices_and_views_stay_mapped(tmp_path):
  np.save(tmp_path / "x.npy", np.arange(100))
  view = np.asarray(np.load(tmp_path / "x.npy", mmap_mode="r")[20:])
  source = ArraySource(features={"x": view})
  assert source._in_memory() == {}
  for batch in arrays(train_dataset(source, global_batch_size=16), 3):
    np.testing.assert_array_equal(batch["x"], batch["example_id"] + 20)


def test_a_file_larger_than_memory_is_never_loaded_whole(tmp_path):
  rows = 2**20  # 64 GiB, of which the file system stores nothing
  mapped = np.memmap(tmp_path / "x", np.uint8, "w+", shape=(rows, 2**16))
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  dataset = train_dataset(ArraySource(features={"x": mapped}), global_batch_size=8)
  assert sum(batch["x"].sum() for batch in arrays(dataset, 3)) == 0
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB
  (tmp_path / "x").unlink()


# ---- Image folders ----


def save_image(path, pixels):
  path.parent.mkdir(parents=True, exist_ok=True)
  Image.fromarray(pixels).save(path)
  return pixels


@pytest.fixture
def folder(tmp_path):
  """Two classes of 4x6 PNGs and an empty one; maps each file to its pixels."""
  rng = np.random.default_rng(2)
  pixels = {
    name: save_image(tmp_path / name, rng.integers(0, 256, (4, 6, 3), np.uint8))
    for name in ("cat/1.png", "cat/2.PNG", "dog/it's.png")
  }
  (tmp_path / "bird").mkdir()
  (tmp_path / "cat" / ".hidden").write_text("")
  (tmp_path / "notes.txt").write_text("left out")
  return tmp_path, pixels


def one_batch(source, **kwargs):
  return arrays(eval_dataset(source, global_batch_size=source.num_examples, **kwargs))[0]


def test_image_folder_delivers_pixels_and_labels_of_sorted_classes(folder):
  directory, pixels = folder
  source = ImageFolderSource(directory=str(directory), image_size=(4, 6), resize=False)
  assert source.class_names == ["bird", "cat", "dog"]
  assert source.num_examples == 3
  batch = one_batch(source)
  np.testing.assert_array_equal(batch["image"], np.stack(list(pixels.values())))
  assert batch["image"].dtype == np.uint8
  assert batch["label"].tolist() == [1, 1, 2]
  assert batch["label"].dtype == np.int32


def test_image_folder_trains(folder):
  directory, pixels = folder
  source = ImageFolderSource(directory=str(directory), image_size=(4, 6))
  dataset = train_dataset(source, global_batch_size=5, pad_multiple=2)
  assert dataset.element_spec["image"] == tf.TensorSpec([6, 4, 6, 3], tf.uint8)
  for batch in arrays(dataset, 3):
    expected = np.stack(list(pixels.values()))[batch["example_id"][:5]]
    np.testing.assert_array_equal(batch["image"][:5], expected)


def test_image_folder_shrinks_by_the_mean_over_areas(folder):
  directory, pixels = folder
  source = ImageFolderSource(directory=str(directory), image_size=(1, 2))
  means = np.stack(list(pixels.values())).reshape(3, 1, 4, 2, 3, 3).mean(axis=(2, 4))
  np.testing.assert_array_equal(one_batch(source)["image"], np.rint(means))


def test_image_folder_enlarges_bilinearly(tmp_path):
  save_image(tmp_path / "a" / "x.png", np.array([[0, 100]], np.uint8))
  source = ImageFolderSource(directory=str(tmp_path), image_size=(2, 4), channels=1)
  assert one_batch(source)["image"][0, :, :, 0].tolist() == [[0, 25, 75, 100]] * 2


def test_image_folder_converts_channels_and_formats(tmp_path):
  pixels = np.full((8, 8, 3), 200, np.uint8)
  for name in ("1.bmp", "2.gif", "3.jpeg", "4.jpg", "5.png"):
    save_image(tmp_path / "a" / name, pixels)
  save_image(tmp_path / "a" / "6.png", np.full((8, 8), 200, np.uint8))
  save_image(tmp_path / "a" / "7.png", np.full((8, 8, 4), 200, np.uint8))
  source = ImageFolderSource(directory=str(tmp_path), image_size=(8, 8), resize=False)
  np.testing.assert_allclose(one_batch(source)["image"].astype(int), 200, atol=1)


def runtime_error(dataset):
  """The user's line of what iterating over the dataset raises."""
  with pytest.raises(tf.errors.InvalidArgumentError) as raised:
    arrays(dataset)
  line = inputs.user_error(raised.value)
  assert line is not None
  assert "\n" not in line
  return line


def test_an_image_of_another_size_is_an_error_that_names_it(folder):
  directory, _ = folder
  path = directory / "dog" / "it's.png"
  save_image(path, np.zeros((5, 7, 3), np.uint8))
  source = ImageFolderSource(directory=str(directory), image_size=(4, 6), resize=False)
  line = runtime_error(eval_dataset(source, global_batch_size=2))
  assert line == f"{path} is 5x7 (height x width), not 4x6; set resize=True or correct image_size."


@pytest.mark.parametrize("bad", [[0], [1], [2], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("damage", [lambda data: b"GIF is not", lambda data: data[:60]])
def test_a_file_that_cannot_be_decoded_is_named(folder, bad, damage):
  directory, pixels = folder
  paths = [directory / list(pixels)[index] for index in bad]
  for path in paths:
    path.write_bytes(damage(path.read_bytes()))
  source = ImageFolderSource(directory=str(directory), image_size=(4, 6))
  line = runtime_error(eval_dataset(source, global_batch_size=3))
  assert line.startswith(f"{paths[0]} cannot be read as an image of 3 channels;")


def test_the_users_line_is_found_in_what_a_compiled_loop_raises(folder, mirrored):
  directory, pixels = folder
  for name in pixels:
    (directory / name).write_bytes(b"not an image")
  source = ImageFolderSource(directory=str(directory), image_size=(4, 6))
  strategy = mirrored(2)
  dataset = train_dataset(source, global_batch_size=2)
  iterator = iter(strategy.experimental_distribute_dataset(dataset))

  @tf.function
  def loop(iterator):
    for _ in tf.range(3):
      strategy.run(lambda batch: batch["image"], args=(next(iterator),))

  with pytest.raises(tf.errors.InvalidArgumentError) as raised:
    loop(iterator)
  assert "cannot be read as an image of 3 channels;" in inputs.user_error(raised.value)


def test_other_errors_have_no_user_error():
  assert inputs.user_error(ValueError("user error without a pipeline")) is None


def test_user_error_survives_quotes_and_letters():
  text = 'it\'s "ü" a\\b [x]'
  dataset = tf.data.Dataset.range(1).map(
    lambda i: inputs._require(i > 0, i, ["in ", text])  # AutoGraph leaves it alone
  )
  assert runtime_error(dataset) == f"in {text}"


# ---- Streams ----


def test_a_stream_comes_in_its_own_order_and_repeats():
  dataset = train_dataset(stream(5), global_batch_size=4, seed=1)
  batches = arrays(dataset, 3)
  assert [batch["x"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1]]
  assert [batch["example_id"].tolist() for batch in batches] == [
    batch["x"].tolist() for batch in batches
  ]


def test_a_stream_is_restored_by_skipping_and_the_log_says_so(caplog):
  dataset = train_dataset(stream(5), global_batch_size=4, position=6)
  with caplog.at_level(logging.INFO, logger="absl"):
    assert [batch["x"].tolist() for batch in arrays(dataset, 3)] == [
      [1, 2, 3, 4], [0, 1, 2, 3], [4, 0, 1, 2],
    ]  # fmt: skip
  lines = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
  assert len(lines) == 1
  assert lines[0].startswith("skipped 6 examples of the stream in 0.")


def test_the_log_of_a_skip_measures_it(caplog):
  def slow(i):
    return tf.numpy_function(lambda i: time.sleep(0.02) or i, [i], tf.int64)

  dataset = tf.data.Dataset.range(100).map(lambda i: {"x": tf.ensure_shape(slow(i), [])})
  with caplog.at_level(logging.INFO, logger="absl"):
    began = time.perf_counter()
    arrays(train_dataset(StreamSource(dataset=dataset), global_batch_size=1, position=20), 1)
    elapsed = time.perf_counter() - began
  (line,) = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
  assert 0.02 < float(line.split()[-2]) <= elapsed


def test_a_stream_with_a_seeded_shuffle_is_restored_exactly():
  def make(position):
    dataset = tf.data.Dataset.range(10).shuffle(10, seed=1).map(lambda i: {"x": i})
    source = StreamSource(dataset=dataset)
    return train_dataset(source, global_batch_size=5, position=position)

  whole = [batch["x"].tolist() for batch in arrays(make(0), 6)]
  assert whole[0] + whole[1] != whole[2] + whole[3]
  assert [batch["x"].tolist() for batch in arrays(make(15), 3)] == whole[3:]


def test_num_examples_ends_a_pass():
  assert stream(5).num_examples == 5
  source = stream(100, num_examples=3)
  assert source.num_examples == 3
  batches = arrays(train_dataset(source, global_batch_size=4), 2)
  assert [batch["x"].tolist() for batch in batches] == [[0, 1, 2, 0], [1, 2, 0, 1]]
  endless = tf.data.Dataset.range(5).repeat().map(lambda i: {"x": i})
  assert StreamSource(dataset=endless).num_examples is None
  batches = arrays(eval_dataset(StreamSource(dataset=endless, num_examples=7), global_batch_size=4))
  assert [batch["x"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 0, 1, 4]]
  assert batches[1]["weight"].tolist() == [1, 1, 1, 0]


def test_a_stream_may_deliver_weights():
  dataset = tf.data.Dataset.range(5).map(lambda i: {"x": i, "weight": tf.cast(i, tf.float32)})
  batches = arrays(eval_dataset(StreamSource(dataset=dataset), global_batch_size=4))
  assert [batch["weight"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 0, 0, 0]]


def test_a_stream_that_turns_out_empty_is_a_user_error():
  dataset = tf.data.Dataset.range(5).filter(lambda i: i > 9).map(lambda i: {"x": i, "s": "text"})
  line = runtime_error(train_dataset(StreamSource(dataset=dataset), global_batch_size=4))
  assert line == "the stream has no examples; it must yield at least one in each pass."


# ---- Files ----


def idx_bytes(array, code):
  head = struct.pack(">HBB", 0, code, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
  return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.mark.parametrize(
  ("dtype", "code"),
  [("u1", 0x08), ("i1", 0x09), ("i2", 0x0B), ("i4", 0x0C), ("f4", 0x0D), ("f8", 0x0E)],
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_read_idx(tmp_path, dtype, code, pack):
  array = np.arange(24).reshape(2, 3, 4).astype(dtype)
  path = tmp_path / "file"
  path.write_bytes(pack(idx_bytes(array, code)))
  read = read_idx(str(path))
  np.testing.assert_array_equal(read, array)
  assert read.dtype == np.dtype(dtype)
  assert read.flags.writeable


GOOD_IDX = idx_bytes(np.zeros((2, 3), np.uint8), 0x08)


@pytest.mark.parametrize(
  ("data", "message"),
  [
    (None, "'.*/file' does not exist; give the path of an idx file."),
    (b"", "is not an idx file: it begins with nothing"),
    (b"\x89PNG....", "is not an idx file: it begins with 89 50 4e 47"),
    (b"\0\0\x07\x01\0\0\0\0", "is not an idx file: it begins with 00 00 07 01"),
    (GOOD_IDX[:-1], "holds 17 bytes, but an idx file with its head has 18; it was cut short"),
    (GOOD_IDX + b"x", "holds 19 bytes, but an idx file with its head has 18"),
    (GOOD_IDX[:7], "holds 7 bytes, but"),
    (gzip.compress(GOOD_IDX)[:-9], "cannot be read .*; fetch it again."),
    (gzip.compress(GOOD_IDX)[:12] + b"xxxx", "cannot be read .*; fetch it again."),
  ],
)
def test_read_idx_errors(tmp_path, data, message):
  path = tmp_path / "file"
  if data is not None:
    path.write_bytes(data)
  with one_line_error(message):
    read_idx(str(path))


def test_load_arrays_of_an_npz(tmp_path):
  np.savez(tmp_path / "data.npz", x=np.arange(3), y=np.ones((3, 2)))
  loaded = load_arrays(str(tmp_path / "data.npz"))
  assert sorted(loaded) == ["x", "y"]
  np.testing.assert_array_equal(loaded["y"], np.ones((3, 2)))
  assert ArraySource(features=loaded).num_examples == 3


def npz_of_objects():
  file = io.BytesIO()
  np.savez(file, x=np.array([None, "a"], object))
  return file.getvalue()


def npy_of_zeros():
  file = io.BytesIO()
  np.save(file, np.zeros(3))
  return file.getvalue()


@pytest.mark.parametrize(
  ("name", "data", "message"),
  [
    ("missing.npz", None, "missing.npz' does not exist; give the path of an .npz file."),
    ("missing", None, "missing' is not there as an .npz file or a folder of .npy files."),
    ("bad.npz", b"PK\x03\x04 not a zip file", "bad.npz' cannot be read"),
    ("text.npz", b"text", "text.npz' cannot be read"),
    ("array.npz", npy_of_zeros(), "array.npz' cannot be read"),
    ("empty.npz", b"", "empty.npz' cannot be read"),
    ("objects.npz", npz_of_objects(), "objects.npz' cannot be read .*pickle"),
  ],
)
def test_load_arrays_errors(tmp_path, name, data, message):
  if data is not None:
    (tmp_path / name).write_bytes(data)
  with one_line_error(message):
    load_arrays(str(tmp_path / name))


def test_load_arrays_of_a_folder_errors(tmp_path):
  with one_line_error("has no arrays; it must be an .npz file or a folder of .npy files."):
    load_arrays(str(tmp_path))
  (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x01")
  with one_line_error("x.npy' cannot be read"):
    load_arrays(str(tmp_path))


# ---- The user's mistakes ----


def one_line_error(message):
  return pytest.raises(ConfigError, match=rf"\A[^\n]*{message}[^\n]*\Z")


def batch_of(**kwargs):
  return train_dataset(numbered(10), **{"global_batch_size": 4, **kwargs})


@pytest.mark.parametrize(
  ("features", "message"),
  [
    ({}, "features is a dict; it must be a dict of name -> array"),
    ([1, 2], "features is a list"),
    ({1: np.zeros(3)}, "features has the name 1; names must be strings"),
    ({"x": np.zeros(0)}, "have no rows; give at least one example"),
    ({"x": np.zeros(3), "y": np.zeros(4)}, "different lengths .'x' 3, 'y' 4."),
    ({"x": np.float32(1)}, "'x' is a single value"),
    ({"x": np.array([[1], [1, 2]], object)}, "'x' has dtype object"),
    ({"x": np.zeros(3, "M8[s]")}, r"'x' has dtype datetime64\[s\]"),
    ({"x": np.zeros(3), "seed": np.zeros(3)}, "features has a feature named 'seed'"),
    ({"x": np.zeros(3), "example_id": np.zeros(3)}, "features has a feature named 'example_id'"),
    ({"weight": np.ones(3)}, r"'weight' is float64 of shape \[3\]; it must be float32"),
    ({"weight": np.ones((3, 1), np.float32)}, r"of shape \[3, 1\]; .* of shape \[3\]"),
    ({"weight": np.array([1, -2], np.float32)}, "'weight' is -2.0 at example 1"),
    ({"weight": np.array([np.nan], np.float32)}, "'weight' is nan at example 0"),
  ],
)
def test_array_source_errors(features, message):
  with one_line_error(message):
    ArraySource(features=features)


def of_elements(**elements):
  return tf.data.Dataset.from_tensors(elements)


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: [1, 2], "dataset is a list; it must be a tf.data.Dataset."),
    (lambda: tf.data.Dataset.range(3), "not dicts; name the features first"),
    (
      lambda: tf.data.Dataset.zip((tf.data.Dataset.range(3),) * 2),
      r"are a tuple, not dicts; .* dataset.map\(lambda x, y: {'x': x, 'y': y}\)",
    ),
    (lambda: of_elements(x=1).batch(2), r"'x' of the stream is .*\(None,\).*static shape"),
    (lambda: of_elements(x=tf.ragged.constant([[1], []])), "'x' of the stream is RaggedTensorSpec"),
    (lambda: of_elements(x={"y": 1}), "'x' of the stream is .*it must be a dense tensor"),
    (lambda: of_elements(x=1, seed=1), "the stream has a feature named 'seed'"),
    (lambda: of_elements(x=1, example_id=1), "the stream has a feature named 'example_id'"),
    (lambda: of_elements(x=1, weight=1), "'weight' of the stream is .*float32 scalar"),
    (lambda: of_elements(weight=[1.0]), "'weight' of the stream is .*float32 scalar"),
    (lambda: of_elements(x=1).take(0), "the stream's dataset is empty"),
  ],
)
def test_stream_source_errors(make, message):
  with one_line_error(message):
    StreamSource(dataset=make())


def test_stream_source_errors_of_num_examples():
  with one_line_error("num_examples is 0; it must be an integer, at least 1"):
    stream(3, num_examples=0)
  with one_line_error("num_examples is 4, but the stream's dataset has 3 examples"):
    stream(3, num_examples=4)
  endless = StreamSource(dataset=of_elements(x=1).repeat())
  with one_line_error("the stream to evaluate is endless; set StreamSource's num_examples"):
    eval_dataset(endless, global_batch_size=4)


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    ({"global_batch_size": 0}, "global_batch_size is 0; it must be an integer, at least 1"),
    ({"global_batch_size": -4}, "global_batch_size is -4"),
    ({"global_batch_size": 4.0}, "global_batch_size is 4.0"),
    ({"pad_multiple": 0}, "pad_multiple is 0"),
    ({"position": -1}, "position is -1; it must be an integer, at least 0"),
    ({"seed": -1}, "seed is -1; it must be an integer from 0 to 4294967295"),
    ({"seed": 2**32}, "seed is 4294967296"),
    ({"seed": True}, "seed is True"),
  ],
)
def test_argument_errors(kwargs, message):
  with one_line_error(message):
    batch_of(**kwargs)


@pytest.mark.parametrize("make", [train_dataset, eval_dataset])
@pytest.mark.parametrize(
  ("make_source", "message"),
  [
    (lambda: {"x": np.zeros(3)}, "the source is a dict; .* wrap it in ArraySource"),
    (lambda: None, "the source is None; .* wrap it in ArraySource"),
    (lambda: of_elements(x=1), r"the source is a .*Dataset; .* StreamSource\(dataset=...\)"),
  ],
)
def test_sources_of_the_wrong_type(make, make_source, message):
  with one_line_error(message):
    make(make_source(), global_batch_size=4)


@pytest.mark.parametrize("make", [train_dataset, eval_dataset])
@pytest.mark.parametrize(
  ("num_examples", "fetched", "message"),
  [
    (0, {}, "Mine.num_examples is 0; it must be an integer, at least 1"),
    (9, None, "Mine.fetch returned None; it must return a dict"),
    (9, {}, "Mine.fetch returned a dict; it must return a dict of name -> tensor"),
    (9, {"x": tf.zeros([3])}, r"'x' of shape \(3,\) for a batch of 4 rows"),
    (9, {"seed": tf.zeros([4])}, "Mine.fetch has a feature named 'seed'"),
    (9, {"weight": tf.zeros([4, 1])}, r"'weight' as float32 of shape \(4, 1\)"),
  ],
)
def test_errors_of_a_source_of_ones_own(make, num_examples, fetched, message):
  class Mine(Source):
    def fetch(self, indices):
      return fetched

  source = Mine()
  source.num_examples = num_examples
  with one_line_error(message):
    make(source, global_batch_size=4)


def unknown_shape(batch, training):
  image = tf.numpy_function(lambda x: x, [batch["x"]], tf.int64)
  return {**batch, "image": image}


@pytest.mark.parametrize("make", [train_dataset, eval_dataset])
@pytest.mark.parametrize("make_source", [numbered, stream])
@pytest.mark.parametrize(
  ("preprocess", "message"),
  [
    (lambda b, t: None, "returned None; it must return a dict of name -> tensor"),
    (lambda b, t: b["x"], "returned a SymbolicTensor; it must return a dict"),
    (lambda b, t: {k: v[:3] for k, v in b.items()}, r"for a batch of 4 rows; .* must be 4"),
    (lambda b, t: {**b, "m": tf.reduce_mean(b["weight"])}, r"returned 'm' of shape \(\)"),
    (lambda b, t: {"x": b["x"], "weight": b["weight"]}, "dropped 'example_id'; return it"),
    (lambda b, t: {"x": b["x"], "example_id": b["example_id"]}, "dropped 'weight'; return it"),
    (lambda b, t: {**b, "weight": b["x"]}, r"'weight' as int64 of shape \(4,\); .* float32"),
    (lambda b, t: {**b, "example_id": b["weight"]}, "'example_id' as float32 .*; leave it"),
    (lambda b, t: {**b, "r": tf.RaggedTensor.from_tensor(b["x"][:, None])}, "'r' as a Ragged"),
    (unknown_shape, "unknown_shape returned 'image' of shape <unknown>.* tf.ensure_shape"),
  ],
)
def test_errors_of_preprocess(make, make_source, preprocess, message):
  with one_line_error(message):
    make(make_source(10), global_batch_size=4, preprocess=preprocess)


def test_a_config_error_of_preprocess_comes_through_as_it_is():
  def preprocess(batch, training):
    raise ConfigError("the vocabulary is missing; make it first.")

  with one_line_error(r"\Athe vocabulary is missing; make it first.\Z"):
    batch_of(preprocess=preprocess)


@pytest.mark.parametrize(
  ("files", "kwargs", "message"),
  [
    (["a/x.png"], {"directory": "missing"}, "missing' is not a folder"),
    (["x.png"], {}, "has no folders in it; it must hold one for each class"),
    (["a/.keep", "b/.keep"], {}, "the 2 class folders of .* have no images"),
    (["a/x.png", "a/notes.txt"], {}, "a/notes.txt' is not an image"),
    (["a/x.png", "a/deep/y.png"], {}, "a/deep' is not an image"),
    (["a/x.png"], {"image_size": (0, 4)}, r"image_size is \(0, 4\); it must be \(height, width\)"),
    (["a/x.png"], {"image_size": 4}, "image_size is 4"),
    (["a/x.png"], {"image_size": (4, 4, 3)}, r"image_size is \(4, 4, 3\)"),
    (["a/x.png"], {"channels": 2}, "channels is 2; it must be 1"),
  ],
)
def test_image_folder_errors(tmp_path, files, kwargs, message):
  for name in files:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
  directory = str(tmp_path / kwargs.pop("directory", ""))
  with one_line_error(message):
    ImageFolderSource(**{"directory": directory, "image_size": (4, 4), **kwargs})


def test_sources_are_made_without_touching_tensorflow(tmp_path):
  save_image(tmp_path / "a" / "x.png", np.zeros((4, 4, 3), np.uint8))
  images = ImageFolderSource(directory=str(tmp_path), image_size=(4, 4))
  assert images._files._tensors is None
  assert numbered(3)._tensors is None


def test_the_synopsis_runs():
  synopsis = inputs.__doc__.split("\n\n")[1]
  exec(textwrap.dedent(synopsis), {**vars(inputs)})
