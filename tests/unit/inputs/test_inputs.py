"""Batches, padding, restore, shares of workers and errors of inputs/datasets.py, against NumPy."""

import functools
import logging
import os
import re
import struct
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import tensorflow as tf
from input_cases import (
  arrays,
  numbered,
  of_elements,
  one_line_error,
  reference_hash,
  runtime_error,
  stream,
  train_ids,
)
from PIL import Image

from loopwright.distribution import placement
from loopwright.errors import ConfigError
from loopwright.inputs import datasets, sources
from loopwright.inputs.array_files import load_arrays
from loopwright.inputs.datasets import eval_dataset, train_dataset
from loopwright.inputs.image_folder import ImageFolderSource
from loopwright.inputs.plan import padded_batch_size
from loopwright.inputs.sources import ArraySource, Source
from loopwright.inputs.streams import StreamSource

# ---- Training batches ----


@pytest.mark.parametrize("batch", [1, 7, 32, 5000])
@pytest.mark.parametrize("multiple", [1, 4, 3])
@pytest.mark.fast(batch=[7, 5000], multiple=[3])
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
@pytest.mark.fast(position=[1, 123456789], n=[10])
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
    (["example_id", "seed", "step", "weight", "x"], True, tf.int32),
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


def test_rows_that_preprocess_makes_are_counted_when_they_are_read():
  def preprocess(batch, training):
    kept = tf.boolean_mask(batch["x"], batch["x"] < 8)  # [None], as of a tokenizer
    return {**batch, "x": kept}

  make = functools.partial(train_dataset, global_batch_size=4, preprocess=preprocess)
  dataset = make(numbered(8), shuffle=False)
  assert dataset.element_spec["x"].shape == [4]
  assert [batch["x"].tolist() for batch in arrays(dataset, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
  line = runtime_error(make(numbered(9), shuffle=False))
  assert line.endswith("'x' with 3 rows for a batch of 4; to leave out a row, set its weight to 0.")


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


@pytest.mark.parametrize(("make_source", "rewritten"), [(numbered, False), (stream, None)])
def test_batches_come_in_order_and_whole_and_no_thread_tunes(make_source, rewritten):
  for make in (train_dataset, eval_dataset):
    options = make(make_source(8), global_batch_size=4).options()
    assert options.deterministic is True
    assert options.autotune.enabled is False
    policy = options.experimental_distribute.auto_shard_policy
    assert policy == tf.data.experimental.AutoShardPolicy.DATA
    assert options.experimental_optimization.apply_default_optimizations is rewritten


# ---- Replicas ----


def on_replicas(strategy, dataset, count):
  """The rows of each feature, in the order of replicas, for the first `count` batches."""
  iterator = datasets.iterate(strategy.experimental_distribute_dataset(dataset))
  return [
    {
      name: [local.numpy() for local in strategy.experimental_local_results(value)]
      for name, value in next(iterator).items()
    }
    for _ in range(count)
  ]


@pytest.mark.whole
def test_an_iterator_of_two_replicas_can_end_at_any_time():
  """In a process of its own: TensorFlow's iterators, for comparison, may crash it when they end."""
  done = subprocess.run(
    [sys.executable, "-c", ITERATORS],
    env=os.environ | {"MALLOC_PERTURB_": "165", "PYTHONPATH": os.pathsep.join(sys.path)},
    stdout=subprocess.PIPE,
    text=True,
    check=False,
  )
  # Freed memory is overwritten there, so that to read a dataset after its end is no matter of luck.
  assert done.returncode == 0
  ours, tensorflows, after = map(int, done.stdout.split())
  # Of the threads that tune, each would sleep for up to a minute, and now and then miss the stop.
  assert tensorflows - ours == 2
  assert after == tensorflows  # iterators that others make stay as they were


ITERATORS = """
import os
import tensorflow as tf
from loopwright.inputs import datasets, sources

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(
  ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
)

def product(x):
  matrix = tf.ones([700, 700]) * tf.cast(x, tf.float32)
  return x + 0 * tf.cast(tf.reduce_sum(matrix @ matrix), tf.int64)

options = tf.data.Options()
options.autotune.enabled = False
options.experimental_optimization.apply_default_optimizations = False
slow = tf.data.Dataset.range(1000).map(product).batch(2, drop_remainder=True).with_options(options)

for _ in range(10):
  iterator = datasets.iterate(strategy.experimental_distribute_dataset(slow))
  next(iterator)
  del iterator

def threads_of(iterate):
  before = len(os.listdir("/proc/self/task"))
  kept.append(iterate(data))
  next(kept[-1])
  return len(os.listdir("/proc/self/task")) - before

source = sources.ArraySource(features={"x": tf.range(8.0).numpy()})
data = datasets.train_dataset(source, global_batch_size=4)
data, kept = strategy.experimental_distribute_dataset(data), []
threads_of(datasets.iterate)
print(*[threads_of(iterate) for iterate in (datasets.iterate, iter, iter)], flush=True)
os._exit(0)
"""


@tf.function(autograph=False)
def sum_of(iterator, key, count):
  """Reads `count` batches in a compiled loop; returns a feature's sum, weighted by position."""
  return tf.while_loop(
    lambda i, total: i < count,
    lambda i, total: (i + 1, total + (i + 1) * tf.reduce_sum(placement.here().read(iterator)[key])),
    (tf.constant(0, tf.int64), tf.constant(0, tf.int64)),
  )[1]


def test_a_compiled_loop_reads_in_its_own_thread_what_python_reads():
  dataset = train_dataset(numbered(10), global_batch_size=4, seed=3)
  expected = sum((i + 1) * batch["x"].sum() for i, batch in enumerate(arrays(dataset, 9)))
  iterator = datasets.iterate(dataset)
  assert sum_of(iterator, "x", 9) == expected
  reads = {
    op.type
    for name, f in sum_of.get_concrete_function(iterator, "x", 9).graph._functions.items()
    for op in f.graph.get_operations()
    if "GetNext" in op.type
  }
  assert reads == {"IteratorGetNextSync"}
  ended = iter(tf.data.Dataset.range(3).map(lambda x: {"x": x}))
  with pytest.raises(tf.errors.OutOfRangeError):
    sum_of(ended, "x", 4)
  ragged = tf.data.Dataset.range(3).map(
    lambda x: {"x": tf.RaggedTensor.from_row_splits([x], [0, 1])}
  )
  assert sum_of(iter(ragged), "x", 3) == 0 + 2 * 1 + 3 * 2


@pytest.mark.whole
def test_reading_blocks_no_thread_that_the_dataset_needs():
  """One thread runs the step's operations, and waits for batches that take 20 ms each."""
  done = subprocess.run(
    [sys.executable, "-c", ONE_THREAD],
    env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    stdout=subprocess.PIPE,
    text=True,
    check=False,
    timeout=60,
  )
  assert (done.returncode, done.stdout.split()) == (0, ["45"])


ONE_THREAD = """
import os
import time
import tensorflow as tf
from loopwright.inputs import datasets
from loopwright.distribution import placement

tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)

def slow(x):
  rest = tf.numpy_function(lambda x: (time.sleep(0.02), x)[1], [x], tf.int64)
  return {"x": tf.ensure_shape(rest, [])}

data = tf.data.Dataset.range(10).map(slow, num_parallel_calls=2).prefetch(1)
iterator = datasets.iterate(data)

@tf.function(autograph=False)
def total():
  add = lambda i, total: (i + 1, total + placement.here().read(iterator)["x"])
  zero = tf.constant(0, tf.int64)
  return tf.while_loop(lambda i, total: i < 10, add, (zero, zero))[1]

print(int(total()), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("batch", [7, 32])
@pytest.mark.fast(replicas=[3])
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
@pytest.mark.fast(replicas=[2])
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


# ---- Shares of workers ----


def mapped_source(folder):
  np.save(folder / "x.npy", np.arange(23, dtype=np.int64))
  np.save(folder / "text.npy", np.array([f"t{i}" for i in range(23)], "S3"))
  weight = np.linspace(0, 2, 23, dtype=np.float32)
  return ArraySource(features={**load_arrays(str(folder)), "weight": weight})


def image_source(folder):
  rng = np.random.default_rng(3)
  for index in range(23):
    path = folder / f"class{index % 3}" / f"{index}.png"
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(rng.integers(0, 256, (5, 4, 3), np.uint8)).save(path)
  return ImageFolderSource(directory=str(folder), image_size=(3, 2))


SOURCES = {
  "arrays": lambda folder: numbered(23, weight=np.linspace(0, 2, 23, dtype=np.float32)),
  "many arrays": lambda folder: numbered(4100),
  "mapped": mapped_source,
  "images": image_source,
  "stream": lambda folder: stream(23),
  "stream of unknown length": lambda folder: StreamSource(
    dataset=tf.data.Dataset.range(30).filter(lambda i: i < 23).map(lambda i: {"x": i})
  ),
}


def shares(padded_rows, workers):
  size = padded_rows // workers
  return [range(start, start + size) for start in range(0, padded_rows, size)]


def noisy(batch, training):
  """Treats rows independently, and draws for each of them in training."""
  if not training:
    return {**batch, "double": batch["weight"] * 2}
  noise = tf.map_fn(
    lambda seed: tf.random.stateless_uniform([3], seed),
    batch["seed"],
    fn_output_signature=tf.float32,
  )
  return {**batch, "noise": noise, "copy": batch["seed"]}


def whole_of_shares(read, workers):
  """Returns the whole batches, after comparing them with the shares of all workers."""
  whole, parts = read(rows=None), [read(rows=rows) for rows in shares(12, workers)]
  assert [len(part) for part in parts] == [len(whole)] * workers
  for batch, *pieces in zip(whole, *parts, strict=True):
    assert [set(piece) for piece in pieces] == [set(batch)] * workers
    for name, value in batch.items():
      assert [len(piece[name]) for piece in pieces] == [12 // workers] * workers
      joined = np.concatenate([piece[name] for piece in pieces])
      np.testing.assert_array_equal(joined, value, strict=True)
  return whole


@pytest.mark.parametrize(("workers", "preprocess"), [(2, None), (3, noisy), (12, None)])
@pytest.mark.parametrize("make_source", SOURCES.values(), ids=SOURCES)
@pytest.mark.fast(workers=[2])
@pytest.mark.fast(workers=[3], make_source=[mapped_source])
def test_shares_of_training_make_up_the_batch(tmp_path, make_source, workers, preprocess):
  """From 6 examples before the end of an epoch, so that the first batch runs across it."""
  source = make_source(tmp_path)
  kwargs = {"global_batch_size": 10, "pad_multiple": 4, "seed": 3, "preprocess": preprocess}
  kwargs["position"] = (source.num_examples or 23) - 6
  whole = whole_of_shares(
    lambda rows: arrays(train_dataset(source, rows=rows, **kwargs), 3), workers
  )
  for batch in whole:
    assert ((batch["example_id"] < 0) == [False] * 10 + [True] * 2).all()
  if preprocess:
    assert len(np.unique(np.concatenate([batch["noise"][:10] for batch in whole]))) == 90


@pytest.mark.parametrize(("workers", "preprocess"), [(2, None), (3, noisy), (12, None)])
@pytest.mark.parametrize("make_source", SOURCES.values(), ids=SOURCES)
@pytest.mark.fast(workers=[2])
@pytest.mark.fast(workers=[3], make_source=[mapped_source])
def test_shares_of_an_evaluation_make_up_the_batches(tmp_path, make_source, workers, preprocess):
  """Of 23 examples the third batch of 10 has 3: of 2 or 3 workers only the first gets any."""
  source = make_source(tmp_path)
  kwargs = {"global_batch_size": 10, "pad_multiple": 4, "preprocess": preprocess}
  whole = whole_of_shares(lambda rows: arrays(eval_dataset(source, rows=rows, **kwargs)), workers)
  ids = np.concatenate([batch["example_id"] for batch in whole])
  assert ids[ids >= 0].tolist() == list(range(source.num_examples or 23))


@pytest.mark.parametrize("make_source", [numbered, stream])
def test_a_share_is_what_one_counts_by_hand(make_source):
  """Positions 4 5 6, 7 8 9 of epochs of 7; the fourth row is padding and shows the first."""
  kwargs = {"global_batch_size": 3, "pad_multiple": 2, "rows": range(2, 4)}
  first, second = arrays(train_dataset(make_source(7), shuffle=False, position=4, **kwargs), 2)
  assert first["x"].tolist() == [6, 4]
  assert second["x"].tolist() == [2, 0]
  assert [batch["example_id"].tolist() for batch in (first, second)] == [[6, -1], [2, -1]]
  assert [batch["weight"].tolist() for batch in (first, second)] == [[1, 0], [1, 0]]
  batches = arrays(eval_dataset(make_source(7), **kwargs))
  assert [batch["x"].tolist() for batch in batches] == [[2, 0], [5, 3], [6, 6]]
  assert [batch["example_id"].tolist() for batch in batches] == [[2, -1], [5, -1], [-1, -1]]


class Counting(Source):
  """Remembers what it was asked for."""

  num_examples = 23

  def __init__(self):
    self.shapes, self.asked = [], []

  def fetch(self, indices):
    self.shapes.append(indices.shape)

    def remember(indices):
      self.asked.append(indices.tolist())
      return indices

    return {"x": tf.ensure_shape(tf.numpy_function(remember, [indices], tf.int64), indices.shape)}


@pytest.mark.parametrize("workers", [2, 3])
def test_only_the_share_is_fetched(workers):
  for rows in shares(12, workers):
    source = Counting()
    arrays(eval_dataset(source, global_batch_size=10, pad_multiple=4, rows=rows))
    expected = [
      [start + row if row < 10 and start + row < 23 else start for row in rows]
      for start in (0, 10, 20)
    ]
    assert sorted(source.asked) == expected
    assert source.shapes == [[12 // workers]]

    source = Counting()
    dataset = train_dataset(
      source, global_batch_size=10, pad_multiple=4, shuffle=False, position=17, rows=rows
    )
    arrays(dataset, 1)
    assert [(17 + row if row < 10 else 17) % 23 for row in rows] in source.asked
    assert {len(asked) for asked in source.asked} == {12 // workers}


@pytest.mark.parametrize("make", [train_dataset, eval_dataset])
@pytest.mark.parametrize("make_source", [numbered, stream])
def test_preprocess_gets_the_share_with_static_shapes(make, make_source):
  seen = []

  def preprocess(batch, training):
    added = ("seed", "step")
    seen.append({name: value.shape for name, value in batch.items() if name not in added})
    return batch

  dataset = make(
    make_source(10), global_batch_size=5, pad_multiple=3, rows=range(1, 5), preprocess=preprocess
  )
  assert seen == [{"x": [4], "weight": [4], "example_id": [4]}]
  assert {name: spec.shape for name, spec in dataset.element_spec.items()} == seen[0]


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
  assert re.match(r"skipped 6 examples of the stream in \d+\.\d", lines[0])


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


# ---- The user's mistakes ----


def batch_of(**kwargs):
  return train_dataset(numbered(10), **{"global_batch_size": 4, **kwargs})


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    ({"global_batch_size": 0}, "global_batch_size is 0; it must be a whole number from 1 to "),
    ({"global_batch_size": -4}, "global_batch_size is -4"),
    ({"global_batch_size": 4.0}, "global_batch_size is 4.0"),
    ({"pad_multiple": 0}, "pad_multiple is 0"),
    ({"position": -1}, "position is -1; it must be a whole number of at least 0"),
    ({"seed": -1}, "seed is -1; it must be a whole number from 0 to 4294967295"),
    ({"seed": 2**32}, "seed is 4294967296"),
    ({"seed": True}, "seed is True"),
  ],
)
def test_argument_errors(kwargs, message):
  with one_line_error(message):
    batch_of(**kwargs)


@pytest.mark.parametrize("make", [train_dataset, eval_dataset])
@pytest.mark.parametrize("make_source", [numbered, stream])
@pytest.mark.parametrize(
  "rows",
  [
    range(0),
    range(2, 2),
    range(7),
    range(-1, 2),
    range(0, 6, 2),
    range(3, 0, -1),
    [0, 1],
    (0, 6),
    6,
  ],
)
def test_rows_that_are_no_share_of_the_batch(make, make_source, rows):
  message = (
    f"rows is {re.escape(repr(rows))}; it must be a range of step 1 with at least one of the "
  )
  with one_line_error(message + "6 rows of a padded batch, such as range.6.."):
    make(make_source(10), global_batch_size=5, pad_multiple=3, rows=rows)


@pytest.mark.parametrize("make", [train_dataset, eval_dataset])
@pytest.mark.parametrize(
  ("make_source", "message"),
  [
    (lambda: {"x": np.zeros(3)}, "the source is a dict; .* wrap it in ArraySource"),
    (lambda: None, "the source is None; .* wrap it in ArraySource"),
    (lambda: of_elements(x=1), r"the source is a .*Dataset; .* StreamSource\(dataset=...\)"),
    (lambda: [{"x": 1}], r"the source is a list; .* wrap it in IndexedSource\(data=...\)"),
    (lambda: StreamSource(dataset=of_elements(x=1).batch(2)), r"or dataset.unbatch\(\) if it has"),
  ],
)
def test_sources_of_the_wrong_type(make, make_source, message):
  with one_line_error(message):
    make(make_source(), global_batch_size=4)


@pytest.mark.parametrize("make", [train_dataset, eval_dataset])
@pytest.mark.parametrize(
  ("num_examples", "fetched", "message"),
  [
    (0, {}, "Mine.num_examples is 0; it must be a whole number of at least 1"),
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
    (lambda b, t: b["x"], "returned a tensor of shape .*; it must return a dict"),
    (lambda b, t: {k: v[:3] for k, v in b.items()}, r"for a batch of 4 rows; .* must be 4"),
    (lambda b, t: {**b, "m": tf.reduce_mean(b["weight"])}, r"returned 'm' of shape \(\)"),
    (lambda b, t: {"x": b["x"], "weight": b["weight"]}, "dropped 'example_id'; return it"),
    (lambda b, t: {"x": b["x"], "example_id": b["example_id"]}, "dropped 'weight'; return it"),
    (lambda b, t: {**b, "weight": b["x"]}, r"'weight' as int64 of shape \(4,\); .* float32"),
    (lambda b, t: {**b, "example_id": b["weight"]}, "'example_id' as float32 .*; return it"),
    (lambda b, t: {**b, "r": tf.RaggedTensor.from_tensor(b["x"][:, None])}, "'r' as a Ragged"),
    (unknown_shape, "unknown_shape returned 'image' of shape <unknown>.* tf.ensure_shape"),
  ],
)
@pytest.mark.fast(make_source=[numbered])
def test_errors_of_preprocess(make, make_source, preprocess, message):
  with one_line_error(message):
    make(make_source(10), global_batch_size=4, preprocess=preprocess)


def test_a_config_error_of_preprocess_comes_through_as_it_is():
  def preprocess(batch, training):
    raise ConfigError("the vocabulary is missing; make it first.")

  with one_line_error(r"\Athe vocabulary is missing; make it first.\Z"):
    batch_of(preprocess=preprocess)


def test_the_synopsis_runs():
  synopsis = datasets.__doc__.split("\n\n")[1]
  exec(textwrap.dedent(synopsis), {**vars(sources), **vars(datasets)})
