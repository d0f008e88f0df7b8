"""Sources over `__getitem__` and over TFRecord files, against NumPy and TensorFlow's own reader."""

import io
import re
import struct
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from input_cases import arrays, one_line_error

from loopwright.errors import ConfigError
from loopwright.host.failures import mistake
from loopwright.inputs.datasets import eval_dataset, train_dataset
from loopwright.inputs.indexed import IndexedSource, TFRecordSource

N = 10


class Listed:
  """The least that a data set has."""

  def __init__(self, items):
    self.items, self.reads = items, []

  def __len__(self):
    return len(self.items)

  def __getitem__(self, index):
    assert type(index) is int
    self.reads.append(index)
    return self.items[index]


class Batched(Listed):
  def __getitems__(self, indices):
    self.reads.append(list(indices))
    return [self.items[i] for i in indices]


def example(i, **more):
  return {"x": np.full([2], i, np.float32), "y": i, "z": [i / 2, 1.0], "text": f"é{i}", **more}


def check(batch, ids):
  np.testing.assert_array_equal(batch["x"], np.repeat(ids, 2).reshape([-1, 2]))
  np.testing.assert_array_equal(batch["y"], ids)
  np.testing.assert_array_equal(batch["z"], [[i / 2, 1.0] for i in ids])
  assert [text.decode() for text in batch["text"]] == [f"é{i}" for i in ids]
  kinds = {name: batch[name].dtype.name for name in "xyz"}
  assert kinds == {"x": "float32", "y": "int64", "z": "float32"}


@pytest.mark.parametrize("kind", [Listed, Batched])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_global_shuffle_over_getitem_that_starts_anywhere(kind, threads):
  data = kind([example(i) for i in range(N)])
  source = IndexedSource(data=data, threads=threads)
  batches = arrays(train_dataset(source, global_batch_size=5, seed=1), 4)
  ids = [batch["example_id"] for batch in batches]
  assert sorted(np.concatenate(ids[:2])) == sorted(np.concatenate(ids[2:])) == list(range(N))
  for batch in batches:
    check(batch, batch["example_id"])
  reads = len(data.reads)
  [later] = arrays(train_dataset(source, global_batch_size=5, seed=1, position=10**9 + 10), 1)
  check(later, later["example_id"])
  # The batch ahead is read too.
  read_now = [i for read in data.reads[reads:] for i in (read if kind is Batched else [read])]
  assert len(read_now) <= 5 * 8
  assert source.fingerprint().startswith("10 examples, ")


def test_batches_are_one_call_where_there_is_getitems():
  data = Batched([example(i) for i in range(N)])
  arrays(eval_dataset(IndexedSource(data=data), global_batch_size=4))
  assert sorted(data.reads) == [[0], [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 8, 8]]


@pytest.mark.parametrize(("threads", "at_once"), [(1, 1), (4, 4)])
def test_only_threads_read_at_the_same_time(threads, at_once):
  now, most, lock = [0], [0], threading.Lock()

  class Slow(Listed):
    def __getitem__(self, index):
      with lock:
        now[0] += 1
        most[0] = max(most[0], now[0])
      time.sleep(0.01)
      with lock:
        now[0] -= 1
      return self.items[index]

  source = IndexedSource(data=Slow([{"x": i} for i in range(12)]), threads=threads)
  batches = arrays(eval_dataset(source, global_batch_size=4))
  assert np.concatenate([batch["x"] for batch in batches]).tolist() == list(range(12))
  assert most[0] == at_once


def test_decode_makes_the_examples():
  data = Listed([(float(i), bytes([i, 0])) for i in range(N)])
  source = IndexedSource(data=data, decode=lambda pair: {"x": pair[0], "bytes": pair[1]})
  batch = source.fetch(tf.constant([3, 9], tf.int64))
  assert batch["x"].numpy().tolist() == [3.0, 9.0]
  assert batch["bytes"].numpy().tolist() == [b"\x03\x00", b"\x09\x00"]


def test_whole_numbers_among_floats_are_floats():
  source = IndexedSource(data=Listed([{"x": 0.5}, {"x": 2}]))
  assert source.fetch(tf.constant([1, 0], tf.int64))["x"].numpy().tolist() == [2.0, 0.5]


@pytest.mark.parametrize(
  ("items", "message"),
  [
    ([], "data, a Listed, has no examples"),
    ([(1, 2)], r"example 0 of Listed is a tuple; it must be a dict of name -> value"),
    ([{"x": None}], "feature 'x' has dtype object"),
    ([{"example_id": 1}], "data has a feature named 'example_id'"),
    ([{"x": 1, "weight": -1.0}], r"feature 'weight' is -1\.0"),
    ([{"x": 1, "weight": 2}], "feature 'weight' is int64"),
  ],
)
def test_mistakes_of_the_first_example(items, message):
  with one_line_error(message):
    IndexedSource(data=Listed(items))


def test_mistakes_of_what_is_given():
  with one_line_error("data is a dict_keys, which has no __getitem__"):
    IndexedSource(data={}.keys())
  for data in ({"x": [1]}, "data.parquet"):
    with one_line_error(r"data is a .*, not examples by number; use ArraySource\(features=...\)"):
      IndexedSource(data=data)
  with one_line_error("threads is 0; it must be a whole number of at least 1"):
    IndexedSource(data=Listed([{"x": 1}]), threads=0)


class Broken(Listed):
  def __getitem__(self, index):
    if index == 7:
      raise OSError("the disk")
    return super().__getitem__(index)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"x": np.zeros([3], np.float32)}, r"'x' of example 7 is float32 \[3\], but that of example 0"),
    ({"x": np.zeros([2])}, r"'x' of example 7 is float64 \[2\], but that of example 0 is float32"),
    ({"y": 0.5}, r"'y' of example 7 is float32 \[\], but that of example 0 is int64 \[\]"),
    ({"text": 3}, r"'text' of example 7 is int64 \[\], but that of example 0 is text \[\]"),
    ({"more": 3}, r"example 7 of Listed has the features \['more', 'text', 'x', 'y', 'z'\], but"),
    (None, "Broken cannot read example 7: OSError: the disk"),
  ],
)
def test_a_mistake_names_the_example(change, message):
  items = [example(i) for i in range(N)]
  items[7] |= change or {}
  data = Listed(items) if change else Broken(items)
  batches = eval_dataset(IndexedSource(data=data), global_batch_size=5)
  with pytest.raises(tf.errors.OpError) as raised:
    arrays(batches)
  assert re.search(message, mistake(raised.value))


# ---- TFRecord ----

FEATURES = {
  "x": tf.io.FixedLenFeature([2], tf.float32), "y": tf.io.FixedLenFeature([], tf.int64)
}  # fmt: skip


def record(i):
  lists = {
    "x": tf.train.Feature(float_list=tf.train.FloatList(value=[i, -i])),
    "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[i])),
  }
  return tf.train.Example(features=tf.train.Features(feature=lists)).SerializeToString()


@pytest.fixture
def folder(tmp_path):
  """Three files of 4, 0 and 6 records."""
  first = 0
  for number, count in enumerate((4, 0, 6)):
    with tf.io.TFRecordWriter(str(tmp_path / f"part-{number}.tfrecord")) as writer:
      for i in range(first, first + count):
        writer.write(record(i))
    first += count
  return tmp_path


def check_records(batch, ids):
  np.testing.assert_array_equal(batch["y"], ids)
  np.testing.assert_array_equal(batch["x"], np.stack([ids, np.negative(ids)], axis=1))


@pytest.mark.parametrize("index", [None, "places.npz"])
def test_records_are_read_by_index(index, folder):
  index = index and str(folder / index)
  for _ in range(2):
    pattern = str(folder / "part-*.tfrecord")
    source = TFRecordSource(files=pattern, features=FEATURES, index=index)
    assert source.num_examples == N
    batches = arrays(train_dataset(source, global_batch_size=5, seed=3), 2)
    for batch in batches:
      check_records(batch, batch["example_id"])
    assert sorted(np.concatenate([batch["y"] for batch in batches])) == list(range(N))


def test_the_places_of_the_records_come_from_the_index_file(folder, monkeypatch):
  paths = [str(folder / f"part-{i}.tfrecord") for i in (2, 0)]
  kept = str(folder / "places.npz")
  before = TFRecordSource(files=paths, features=FEATURES, index=kept)
  monkeypatch.setattr("loopwright.inputs.indexed._places", None)  # nobody looks for them
  again = TFRecordSource(files=paths, features=FEATURES, index=kept)
  np.testing.assert_array_equal(again._places, before._places)
  check_records(again.fetch(tf.constant([0, 6], tf.int64)), np.array([4, 0]))
  monkeypatch.undo()
  other = TFRecordSource(files=paths[:1], features=FEATURES, index=kept)
  assert other.num_examples == 6
  with one_line_error("index '.*missing/places.npz' cannot be written"):
    TFRecordSource(files=paths, features=FEATURES, index=str(folder / "missing" / "places.npz"))
  assert sorted(path.suffix for path in folder.iterdir()) == [".npz"] + [".tfrecord"] * 3


def test_decode_gets_the_records_or_what_was_parsed(folder):
  path = str(folder / "part-0.tfrecord")
  raw = TFRecordSource(files=path, decode=lambda records: {"bytes": tf.strings.length(records)})
  assert raw.fetch(tf.constant([1], tf.int64))["bytes"].numpy() == [len(record(1))]
  parsed = TFRecordSource(
    files=path, features=FEATURES, decode=lambda batch: {"twice": 2 * batch["y"]}
  )
  assert parsed.fetch(tf.constant([3, 1], tf.int64))["twice"].numpy().tolist() == [6, 2]


def damaged(folder, change):
  path = folder / "part-0.tfrecord"
  content = bytearray(path.read_bytes())
  path.write_bytes(change(content))
  return str(path)


SIZE = 16 + len(record(0))


def with_length(content, record_number, length):
  content[record_number * SIZE : record_number * SIZE + 8] = struct.pack("<Q", length)
  return content


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda content: content[:-1], f"is damaged or cut off at record 3, byte {3 * SIZE}"),
    (
      lambda content: content[: 2 * SIZE + 5],
      f"is damaged or cut off at record 2, byte {2 * SIZE}",
    ),
    (lambda content: content[:-1][: SIZE - 3], "is damaged or cut off at record 0, byte 0"),
    (lambda content: content + b"\0" * 20, f"is damaged or cut off at record 4, byte {4 * SIZE}"),
    (lambda content: with_length(content, 1, 7), f"is damaged or cut off at record 1, byte {SIZE}"),
    (lambda content: with_length(content, 1, 2**63), "is damaged or cut off at record 1"),
    (lambda content: b"\x1f\x8b" + content, "is no TFRecord file, or a compressed one"),
  ],
)
def test_damaged_files_are_refused_with_the_place(change, message, folder):
  with one_line_error(message):
    TFRecordSource(files=damaged(folder, change), features=FEATURES)


def test_mistakes_of_files(folder):
  path = str(folder / "part-0.tfrecord")
  for files, message in [
    (str(folder / "none-*"), "none-\\*', which no file matches"),
    (str(folder / "none"), "none"),
    ([path, path], "part-0.tfrecord' twice"),
    ([], "files is empty"),
    (str(folder / "part-1.tfrecord"), "part-1.tfrecord' has no records"),
  ]:
    with one_line_error(message):
      TFRecordSource(files=files, features=FEATURES)
  with one_line_error("TFRecordSource has neither features nor decode"):
    TFRecordSource(files=path)


def test_a_file_that_changes_later_is_noticed(folder):
  path = str(folder / "part-0.tfrecord")
  source = TFRecordSource(files=path, features=FEATURES)
  damaged(folder, lambda content: content[:SIZE])
  with one_line_error("part-0.tfrecord' has changed since its records were found"):
    source.fetch(tf.constant([2], tf.int64))


@pytest.mark.parametrize("at", [12, SIZE // 2, SIZE - 5, SIZE - 1])  # content, then its checksum
def test_damaged_content_is_refused_with_its_place(at, folder):
  path = damaged(folder, lambda content: with_byte(content, 2 * SIZE + at, 0x41))
  source = TFRecordSource(files=path, features=FEATURES)
  check_records(source.fetch(tf.constant([3, 0, 1], tf.int64)), np.array([3, 0, 1]))
  with one_line_error("part-0.tfrecord, example 2' is damaged: its checksum is wrong"):
    source.fetch(tf.constant([1, 2], tf.int64))


def with_byte(content, place, change):
  content[place] ^= change
  return content


@pytest.mark.parametrize("change", [lambda p: p - 100, lambda p: p[::-1], lambda p: p[:-1]])
def test_an_index_whose_places_are_no_records_is_written_again(change, folder):
  path, index = str(folder / "part-2.tfrecord"), folder / "places.npz"
  TFRecordSource(files=path, features=FEATURES, index=str(index))
  before = index.read_bytes()
  kept = dict(np.load(index))
  np.savez(index, **{**kept, "places": change(kept["places"])})
  source = TFRecordSource(files=path, features=FEATURES, index=str(index))
  check_records(source.fetch(tf.constant([5, 0], tf.int64)), np.array([9, 4]))
  np.testing.assert_equal(dict(np.load(index)), dict(np.load(io.BytesIO(before))))


def test_a_feature_of_any_length_is_refused_before_training(folder):
  features = {**FEATURES, "z": tf.io.VarLenFeature(tf.int64)}
  source = TFRecordSource(files=str(folder / "part-0.tfrecord"), features=features)
  with one_line_error("TFRecordSource.fetch returned 'z' as a SparseTensor; convert it to a"):
    source.fingerprint()


def test_a_record_that_lacks_a_feature_is_named(tmp_path):
  path = str(tmp_path / "part-0.tfrecord")
  with tf.io.TFRecordWriter(path) as writer:
    for number in range(3):
      value = tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))
      named = tf.train.Features(feature={"other" if number == 2 else "more": value})
      writer.write(tf.train.Example(features=named).SerializeToString())
  source = TFRecordSource(files=path, features={"more": tf.io.FixedLenFeature([], tf.int64)})
  with pytest.raises(tf.errors.InvalidArgumentError, match=r"part-0.tfrecord, example 2, .*more"):
    source.fetch(tf.constant([2], tf.int64))


@pytest.mark.parametrize(
  ("feature", "reason"),
  [
    ({"x": tf.io.FixedLenFeature([3], tf.float32)}, "Values size: 2 but output shape: .3."),
    ({"y": tf.io.FixedLenFeature([2], tf.float32)}, "y .*could not be found"),
    ({"x": tf.io.FixedLenFeature([2], tf.int64)}, "Data type: float but expected type: int64"),
  ],
)
def test_features_that_the_records_do_not_have_are_refused_at_once(feature, reason, tmp_path):
  values = tf.train.FloatList(value=[1.0, 2.0])
  features = tf.train.Features(feature={"x": tf.train.Feature(float_list=values)})
  path = str(tmp_path / "x.tfrecord")
  with tf.io.TFRecordWriter(path) as writer:
    writer.write(tf.train.Example(features=features).SerializeToString())
  with pytest.raises(ConfigError, match=f"the first record of '{path}' does not .*{reason}"):
    TFRecordSource(files=path, features=feature)
