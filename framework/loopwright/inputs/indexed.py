"""Random access over anything with `__len__` and `__getitem__`, and over TFRecord files.

    source = IndexedSource(data=datasets.load_from_disk("..."))            # Hugging Face
    source = IndexedSource(data=tfds.data_source("mnist", split="train"))  # TFDS
    source = IndexedSource(data=ArrayRecordDataSource(paths), decode=parse)
    source = TFRecordSource(files="train-*.tfrecord", features={"x": tf.io.FixedLenFeature(...)})

Python reads the examples, on the host; parameter servers refuse both.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import glob
import io
import mmap
import os
import re
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.lib.io.tf_record import tf_record_random_reader

from loopwright.errors import ConfigError, first_line, kind, require_integer
from loopwright.graphs.aliases import Batch, TensorLike
from loopwright.host import bounded
from loopwright.host import files as file_tools
from loopwright.host.failures import failure
from loopwright.inputs.checks import check_array, check_text, check_weights, refuse_reserved
from loopwright.inputs.sources import Source, as_bytes, wrapping

Decode = Callable[[Any], Mapping[str, Any]]


class IndexedSource(Source):
  """Examples of anything with `__len__` and `__getitem__`: Hugging Face, TFDS, ArrayRecord, Grain.

  Where the object has `__getitems__`, a batch is one call. An example is a dict of name -> number,
  text, array or list. Python's floats become float32, its integers int64. All examples must have
  the names, dtypes and shapes of the first.
  """

  def __init__(self, *, data: Any, decode: Decode | None = None, threads: int = 1) -> None:
    """Reads the first example (host).

    Args:
      data: `data[i]` must be the same example each time, for i in [0, len(data)).
      decode: makes the dict of an example from `data[i]`; None: `data[i]` is the dict.
      threads: read so many examples at the same time; 1 if `data` is not safe for threads.

    Raises:
      ConfigError: no examples, the first is no valid one, or `data` cannot be indexed.
    """
    for method in ("__len__", "__getitem__"):
      if not hasattr(data, method):
        raise ConfigError(
          f"data is {kind(data)}, which has no {method}; use {wrapping(data)}, or a class with it."
        )
    if hasattr(data, "columns") or isinstance(data, Mapping | str):
      raise ConfigError(f"data is {kind(data)}, not examples by number; use {wrapping(data)}.")
    self.num_examples = len(data)
    if not self.num_examples:
      raise ConfigError(f"data, {kind(data)}, has no examples; it must have at least one.")
    self._data, self._decode = data, decode
    self._batched = hasattr(data, "__getitems__")
    self._threads = require_integer("threads", threads, at_least=1)
    self._lock = threading.Lock() if threads == 1 else contextlib.nullcontext()
    self._pool: concurrent.futures.Executor | None = None
    self._first: dict[str, np.ndarray] = {}
    self._first = self._example(0, self._items([0])[0])
    refuse_reserved("data", self._first)
    # A ClassLabel of Hugging Face has the names of its numbers.
    features = getattr(data, "features", None) if decode is None else None
    given = features.items() if isinstance(features, Mapping) else ()
    self.numbered = {name: each.names for name, each in given if hasattr(each, "names")}

  def fetch(self, indices: tf.Tensor) -> Batch:
    """See `Source.fetch`."""
    dtypes = [tf.as_dtype(array.dtype) for array in self._first.values()]
    values = tf.nest.flatten(tf.numpy_function(self._read, [indices], dtypes, stateful=False))
    for value, array in zip(values, self._first.values(), strict=True):
      value.set_shape(indices.shape[:1] + array.shape)
    return dict(zip(self._first, values, strict=True))

  def _read(self, indices: np.ndarray) -> list[np.ndarray]:
    wanted = indices.tolist()
    examples = [self._example(i, item) for i, item in zip(wanted, self._items(wanted), strict=True)]
    return [np.stack([example[name] for example in examples]) for name in self._first]

  def _items(self, indices: list[int]) -> Sequence[Any]:
    if self._batched:
      items = self._call(self._data.__getitems__, indices)
      if len(items) != len(indices):
        raise ConfigError(
          f"{self._name}.__getitems__ returned {len(items)} items for {len(indices)} indices; it "
          "must return a list with one for each."
        )
      return items
    if self._threads == 1:
      return [self._call(self._data.__getitem__, i) for i in indices]
    if self._pool is None:
      self._pool = concurrent.futures.ThreadPoolExecutor(self._threads)
    return list(self._pool.map(functools.partial(self._call, self._data.__getitem__), indices))

  def _call(self, read: Callable[[Any], Any], what: Any) -> Any:
    try:
      with self._lock:
        return read(what)
    except Exception as error:
      shown = what if isinstance(what, int) else _some(what)
      raise ConfigError(f"{self._name} cannot read example {shown}: {failure(error)}") from error

  def _example(self, index: int, item: Any) -> dict[str, np.ndarray]:
    if self._decode is not None:
      try:
        item = self._decode(item)
      except Exception as error:
        raise ConfigError(f"decode fails at example {index}: {failure(error)}") from error
    if not isinstance(item, Mapping) or not item:
      raise ConfigError(
        f"example {index} of {self._name} is {kind(item)}; it must be a dict of name -> value: "
        "give IndexedSource a decode= that makes one."
      )
    if self._first and item.keys() != self._first.keys():
      raise ConfigError(
        f"example {index} of {self._name} has the features {sorted(item)}, but example 0 has "
        f"{sorted(self._first)}; all must have the same."
      )
    # In the order of the first example, whatever the order here.
    return {name: self._value(index, name, item[name]) for name in self._first or item}

  def _value(self, index: int, name: str, value: TensorLike) -> np.ndarray:
    first = self._first.get(name)
    array = _array(value, None if first is None else first.dtype)
    if name == "weight":
      check_weights(np.reshape(array, [-1]), 1)
    if first is None:
      check_array(name, array)
    elif (array.dtype, array.shape) != (first.dtype, first.shape):
      raise ConfigError(
        f"feature {name!r} of example {index} is {_type(array)}, but that of example 0 is "
        f"{_type(first)}; all must be alike: pad or convert it in decode=."
      )
    return array

  @property
  def _name(self) -> str:
    return type(self._data).__name__


def _array(value: TensorLike, dtype: np.dtype | None) -> np.ndarray:
  """Returns a value as an array; texts as objects of bytes, as TensorFlow takes them."""
  array = np.asarray(value)
  if array.dtype.kind in "US":
    check_text("text", array)
    return as_bytes(value)
  if not hasattr(value, "dtype"):  # of Python
    if array.dtype == np.float64:
      array = array.astype(np.float32)
    if dtype is not None and array.dtype.kind == "i" and dtype.kind == "f":
      array = array.astype(dtype)  # a float that happens to be whole
  return array.astype(array.dtype.newbyteorder("="), copy=False)


def _type(array: np.ndarray) -> str:
  return f"{'text' if array.dtype == object else array.dtype} {list(array.shape)}"


def _some(indices: Sequence[int]) -> str:
  return ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")


# ---- TFRecord ----


class TFRecordSource(Source):
  """Records of local TFRecord files, by index: the places of all records are found once.

  Finding them reads each record's header, 12 bytes, and verifies its checksum; that of the content
  is verified when the record is read. The files must not be compressed.
  """

  def __init__(
    self,
    *,
    files: str | Sequence[str],
    features: Mapping[str, Any] | None = None,
    decode: Callable[[Any], Batch] | None = None,
    index: str | None = None,
  ) -> None:
    """Finds the records, or reads the index file (host).

    Args:
      files: paths or globs; the files of a glob are sorted.
      features: name -> `tf.io.FixedLenFeature`, as `tf.io.parse_example` takes them.
      decode: maps a batch, in TensorFlow operations: the parsed features, or without `features`
        the records, string [n], to name -> tensor [n, ...].
      index: a file that keeps the places of the records, written if it is missing or of other
        files; None finds them at each start.

    Raises:
      ConfigError: no such files, no records, a file that is damaged or compressed, or neither
        `features` nor `decode`.
    """
    if features is None and decode is None:
      raise ConfigError("TFRecordSource has neither features nor decode; give one, or both.")
    self._features, self._decode = features, decode
    self.files = _matching(files)
    self._index = index
    places = _kept_places(self.files, index) if index else [_places(path) for path in self.files]
    self._lasts = np.cumsum([len(each) for each in places])
    self._places = np.concatenate(places)
    self.num_examples = len(self._places)
    if not self.num_examples:
      more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
      raise ConfigError(f"{self.files[0]!r}{more} has no records; it must have at least one.")
    if features is not None:
      self._require_features()

  def _require_features(self) -> None:
    """Raises ConfigError if the first record does not have the features."""
    [record], [name] = self._read(np.array([0]))
    try:
      with tf.device("CPU:0"):
        tf.io.parse_example([record], self._features, example_names=[name])
    except tf.errors.OpError as error:
      reason = re.sub(r"^\{\{.*?\}\} *|\[Op:.*", "", first_line(error)).strip()
      raise ConfigError(
        f"the first record of {self.files[0]!r} does not have TFRecordSource.features ({reason}); "
        "correct their names, types or lengths."
      ) from error

  def fetch(self, indices: tf.Tensor) -> Batch:
    """See `Source.fetch`."""
    types = [tf.string, tf.string]
    records, names = tf.numpy_function(self._read, [indices], types, stateful=False)
    for value in (records, names):
      value.set_shape(indices.shape)
    if self._features is None:
      return dict(self._decode(records))  # type: ignore[misc]
    parsed = tf.io.parse_example(records, self._features, example_names=names)
    return dict(self._decode(parsed) if self._decode else parsed)

  def _read(self, indices: np.ndarray) -> list[np.ndarray]:
    paths = [self.files[i] for i in np.searchsorted(self._lasts, indices, side="right")]
    names = [f"{path}, example {index}" for index, path in zip(indices, paths, strict=True)]
    contents = []
    for index, path in zip(indices.tolist(), paths, strict=True):
      begin, end = self._places[index].tolist()
      file = _opened(path)  # a reference, so that the cache does not close it
      content = os.pread(file.fileno(), end - begin, begin)
      if (
        len(content) < end - begin or int.from_bytes(content[:8], "little") != end - begin - _AROUND
      ):
        stale = f", or the index {self._index!r} is wrong: delete it" if self._index else ""
        raise ConfigError(f"{path!r} has changed since its records were found{stale}.")
      contents.append(content)
    return [_verified(contents, names), np.array(names, object)]


def _verified(contents: Sequence[bytes], names: Sequence[str]) -> np.ndarray:
  """Returns the records, an array of bytes; TensorFlow compares their checksums as it reads them.

  Its own random access reads 8 MB for each jump, so it gets a file in memory, in order.
  """
  records, place = np.empty(len(contents), object), 0
  with open(os.memfd_create("records"), "wb") as file:
    file.writelines(contents)
    file.flush()
    reader = tf_record_random_reader(f"/proc/self/fd/{file.fileno()}")
    for row, name in enumerate(names):
      try:
        records[row], place = reader.read(place)
      except tf.errors.DataLossError:
        raise ConfigError(f"{name!r} is damaged: its checksum is wrong; write it again.") from None
  return records


@functools.lru_cache(maxsize=256)
def _opened(path: str) -> io.BufferedReader:
  return open(path, "rb")


def _matching(given: str | Sequence[str]) -> list[str]:
  found: list[str] = []
  for pattern in [given] if isinstance(given, str) else given:
    some = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
    if not some:
      raise ConfigError(f"files has {pattern!r}, which no file matches; correct the path.")
    found += some
  if not found:
    raise ConfigError("files is empty; give the path or the glob of at least one TFRecord file.")
  if len(set(found)) < len(found):
    twice = next(path for path in found if found.count(path) > 1)
    raise ConfigError(f"files has {twice!r} twice; each example must be read once an epoch.")
  return found


_HEADER = np.dtype([("length", "<u8"), ("checksum", "<u4")])
_AROUND = 16
"""Bytes of a record besides its content: length and its checksum, the content's checksum."""


def _places(path: str) -> np.ndarray:
  """Returns where the records of a file begin and end, int64 [records, 2]; verifies the headers."""
  size = bounded.require_file(path, "a TFRecord file")
  if not size:
    return np.zeros([0, 2], np.int64)
  bounds = [0]
  with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
    while (place := bounds[-1]) <= size - _AROUND:
      bounds.append(place + _AROUND + int.from_bytes(content[place : place + 8], "little"))
    headers = b"".join(content[place : place + 12] for place in bounds[:-1])
  read = np.frombuffer(headers, _HEADER)
  wrong = np.flatnonzero(_masked_crc(read["length"]) != read["checksum"])
  if wrong.size or bounds[-1] != size:
    at = int(wrong[0]) if wrong.size else len(read) - (bounds[-1] > size)
    if wrong.size and at == 0:
      what = "no TFRecord file, or a compressed one; write it without compression"
    else:
      what = f"damaged or cut off at record {at}, byte {bounds[at]}; write it again"
    raise ConfigError(f"{path!r} is {what}.")
  return np.stack([bounds[:-1], bounds[1:]], axis=1).astype(np.int64)


def _masked_crc(lengths: np.ndarray) -> np.ndarray:
  """Returns TFRecord's checksum of each length: CRC-32C of its 8 bytes, masked; uint32 [n]."""
  crc = np.full(len(lengths), 0xFFFFFFFF, np.uint32)
  for column in np.ascontiguousarray(lengths, "<u8").view(np.uint8).reshape([-1, 8]).T:
    crc ^= column
    for _ in range(8):
      crc = (crc >> 1) ^ (crc & 1) * np.uint32(0x82F63B78)
  crc = ~crc
  return ((crc >> 15) | (crc << 17)) + np.uint32(0xA282EAD8)


def _fills(places: np.ndarray, size: int) -> bool:
  """Returns whether records at these places follow one another through a file of this size."""
  begins, ends = places.T
  follow = np.array_equal(np.append(begins, size), np.append(0, ends))
  return follow and bool((ends - begins >= _AROUND).all())


def _kept_places(paths: Sequence[str], index: str) -> list[np.ndarray]:
  """Returns the places in each file, from the index if it is of these files; else writes it."""
  sizes = [bounded.require_file(path, "a TFRecord file") for path in paths]
  key = [f"{os.path.basename(path)} {size}" for path, size in zip(paths, sizes, strict=True)]
  if os.path.exists(index):
    with bounded.reading(index, "delete it"):
      kept = np.load(io.BytesIO(file_tools.read(index)), allow_pickle=False)
      places = np.split(kept["places"].astype(np.int64), np.cumsum(kept["counts"])[:-1])
      known = kept["files"].tolist() == key
      if known and [*map(_fills, places, sizes)] == [True] * len(sizes):
        return places
  places = [_places(path) for path in paths]
  content = io.BytesIO()
  counts = [len(each) for each in places]
  np.savez(content, files=np.array(key), counts=counts, places=np.concatenate(places))
  own = f"{index}.{uuid.uuid4().hex}"  # several workers may write it at the same time
  try:
    with open(own, "xb") as file:
      file.write(content.getvalue())
    os.replace(own, index)
  except OSError as error:
    raise ConfigError(f"index {index!r} cannot be written ({error.strerror}).") from error
  return places
