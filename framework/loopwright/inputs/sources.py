"""What can be read: the interface of a source, and arrays. Each other kind has a file of its own.

`inputs.datasets` makes the batches of a source, by its methods. Where a kind of source differs, it
overrides the method concerned.
"""

from __future__ import annotations

import abc
import mmap
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError, kind, require_integer
from loopwright.graphs.aliases import AnySource, Batch
from loopwright.graphs.autograph import as_written
from loopwright.inputs.checks import (
  check_array,
  check_text,
  check_weights,
  common_length,
  refuse_reserved,
)
from loopwright.inputs.ordering import examples_at, seeds_at
from loopwright.inputs.plan import Element, Elements, Plan, Shard, Start, batches
from loopwright.options.declaration import asked, may_change

_POSITIONS_AT_ONCE = 4096
"""Indices are computed this many at a time. A batch of 128 at a time would cost 170 us of CPU time
per batch instead of 110, mostly to start about forty small ops."""
READS = asked("reads that from there on; the position in the data stays")


class Readable:
  """What `Task.source` may return: how it is read, described and compared.

  Each kind overrides the methods in which it differs from an indexed source.
  """

  rewrites = False
  """Whether TensorFlow may optimize the stages before a batch is made."""

  def require_examples(self) -> None:
    """Raises a ConfigError unless there are examples."""

  def main_source(self) -> Any:
    """Returns the source whose examples have plain names: of `Sources` the main one, of `Buckets`
    the longest bucket.
    """
    return self

  def of_one_shape(self) -> Any:
    """Returns the longest of several buckets, or the source itself."""
    return self

  def training_batches(self, plan: Plan, start: Start, shard: Shard | None) -> Any:
    """Returns what `datasets.train_dataset` returns."""
    elements, read = self.training_elements(plan, start)
    return batches(elements, plan.completing(read), rewrite=self.rewrites, shard=shard)

  def training_elements(self, plan: Plan, start: Start) -> Elements:
    """Returns what to read for each batch of training, and the function that reads it."""
    raise NotImplementedError

  def evaluation_batches(self, plan: Plan, most: int, shard: Shard | None) -> Any:
    """Returns what `datasets.eval_dataset` returns; `most` is -1 for all batches."""
    elements, make = self.one_pass(plan, most)
    return batches(elements, make, rewrite=self.rewrites, shard=shard)

  def one_pass(self, plan: Plan, most: int) -> tuple[tf.data.Dataset, Callable[..., Batch]]:
    """Returns what to read for each batch of one pass, and the function that makes the batch.

    Args:
      plan: the rows of a batch.
      most: the most batches; -1 for all.
    """
    raise NotImplementedError

  def fingerprint(self) -> str:
    """Returns number and digest of the examples, such as "1437 examples, 3f2a90c1d4e5" (host)."""
    raise NotImplementedError

  def feature_kinds(self) -> dict[str, str]:
    """Returns name -> kind of dtype and shape of an example's features, such as "f(3,)" (host)."""
    raise NotImplementedError

  def described(self, global_batch_size: int) -> dict[str, str]:
    """Returns name -> text of all that a run records of what it trains on (host)."""
    from loopwright.inputs import fingerprint

    del global_batch_size
    weights = {name: mixture.shares.described() for name, (mixture, _) in self.mixtures().items()}
    return {fingerprint.TRAINING: self.fingerprint(), **weights}

  def mixtures(self) -> dict[str, tuple[Any, int]]:
    """Returns name -> `Mixture` and ratio of each source of training that is one."""
    return {}


class Source(Readable, abc.ABC):
  """Examples that can be read by index. Subclass it for your own indexed format.

  Attributes:
    num_examples: the number of examples, at least 1.
    numbered: feature -> what its numbers 0, 1, ... mean, as far as a source numbers by itself; it
      must be the same in all splits.
  """

  num_examples: int
  numbered: Mapping[str, Sequence[str]] = types.MappingProxyType({})

  @abc.abstractmethod
  def fetch(self, indices: tf.Tensor) -> Batch:
    """Returns the examples at `indices`, int64 [rows] in [0, num_examples).

    Called inside `tf.data.Dataset.map`, on the host. Every feature must have a static shape [rows,
    ...]; an index may occur more than once. Make a large array an eager tensor before this call
    (see `ArraySource`): an array used here directly would be copied into the graph.
    """

  def require_examples(self) -> None:
    """See `Readable.require_examples`."""
    count = getattr(self, "num_examples", None)
    require_integer(f"{type(self).__name__}.num_examples", count, at_least=1)

  def training_elements(self, plan: Plan, start: Start) -> Elements:
    """See `Readable.training_elements`."""

    def read(indices: tf.Tensor, seeds: tf.Tensor, step: tf.Tensor) -> Element:
      features = plan.checked_features(self.fetch(indices), f"{type(self).__name__}.fetch")
      return features, tf.where(plan.real_rows(), self.ids_of(indices), -1), seeds, step

    return self._ordered(plan, start), read

  def _ordered(self, plan: Plan, start: Start) -> tf.data.Dataset:
    """Yields (indices int64 [rows], seeds int32 [rows, 2], step int64) for each batch."""
    count = max(1, _POSITIONS_AT_ONCE // plan.global_batch_size)
    size = count * plan.global_batch_size

    def make(first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
      positions = first + tf.range(size, dtype=tf.int64)
      indices = self.examples_of(positions, start)
      of_batches = tf.reshape(tf.stack([indices, positions]), [2, count, -1])
      indices, positions = tf.unstack(tf.gather(of_batches, plan.example_rows(), axis=2))
      seeds = seeds_at(tf.reshape(positions, [-1]), seed=start.seed)
      steps = plan.step(first, start) + tf.range(count, dtype=tf.int64)
      return indices, tf.reshape(seeds, [count, -1, 2]), steps

    return tf.data.Dataset.counter(start.position, size).map(as_written(make)).unbatch()

  def one_pass(self, plan: Plan, most: int) -> tuple[tf.data.Dataset, Callable[..., Batch]]:
    """See `Readable.one_pass`."""
    end = self.num_examples

    def make(start: tf.Tensor) -> Batch:
      indices = start + plan.row_numbers()
      real = plan.real_rows() & (indices < end)
      batch = self.fetch(tf.where(real, indices, start))
      batch = plan.checked_features(batch, f"{type(self).__name__}.fetch")
      return plan.completed(batch, tf.where(real, self.ids_of(indices), -1))

    return tf.data.Dataset.range(0, end, plan.global_batch_size).take(most), make

  def examples_of(self, positions: tf.Tensor, start: Start) -> tf.Tensor:
    """Returns the example of each position, int64 [m]."""
    if not start.shuffle:
      return positions % self.num_examples
    return examples_at(positions, num_examples=self.num_examples, seed=start.seed)

  def ids_of(self, indices: tf.Tensor) -> tf.Tensor:
    """Returns the ids of the examples at some indices, int64 [m]."""
    return indices

  def fingerprint(self) -> str:
    """See `Readable.fingerprint`.

    The digest is SHA-256 of names, dtypes, shapes and evenly spread rows: at most 4096 of arrays,
    64 of another indexed source, and 64 MB. Of a stream it has only the types, because reading it
    takes as long as training does.
    """
    from loopwright.inputs import fingerprint

    return fingerprint.of_rows(self, most=fingerprint.ROWS)

  def feature_kinds(self) -> dict[str, str]:
    """See `Readable.feature_kinds`."""
    from loopwright.inputs import fingerprint

    first = fingerprint.first_row(self)
    return {name: f"{value.dtype.kind}{value.shape[1:]}" for name, value in first.items()}


@may_change(READS)
class ArraySource(Source):
  """Arrays with one row per example; memory-mapped arrays are read row by row.

  >>> source = lw.ArraySource({"x": np.arange(10.0)})
  >>> source.num_examples, source.fetch(tf.constant([3, 0, 3]))["x"].numpy().tolist()
  (10, [3.0, 0.0, 3.0])
  """

  def __init__(self, features: Mapping[str, np.ndarray]) -> None:
    """Checks the arrays; does not use TensorFlow's devices before the first dataset is made.

    Args:
      features: name -> [num_examples, ...], of any dtype that TensorFlow has; a column of objects
        if all are texts, or lists of one length.

    Raises:
      ConfigError: no features or no examples, different lengths, a dtype that TensorFlow does not
        have, a reserved name, or a "weight" that is not float32 [num_examples] of finite values >=
        0.
    """
    if not isinstance(features, Mapping) or not features:
      raise ConfigError(
        f"features is {kind(features)}; it must be a dict of name -> array: use "
        f"{wrapping(features)}."
      )
    arrays = {name: _native(name, _column(array)) for name, array in features.items()}
    self.num_examples = common_length(arrays)
    refuse_reserved("features", arrays)
    if "weight" in arrays:
      check_weights(arrays["weight"], self.num_examples)
    self._mapped = {name: np.asarray(array) for name, array in arrays.items() if _is_mapped(array)}
    self._arrays = {name: array for name, array in arrays.items() if name not in self._mapped}
    self._tensors: Batch | None = None

  def fetch(self, indices: tf.Tensor) -> Batch:
    """See `Source.fetch`."""
    batch = {name: tf.gather(tensor, indices) for name, tensor in self._in_memory().items()}
    return batch | self._read_mapped(indices)

  def fingerprint(self) -> str:
    """See `Source.fingerprint`."""
    from loopwright.inputs import fingerprint

    return fingerprint.of_rows(self, most=fingerprint.ROWS_OF_ARRAYS)

  def _in_memory(self) -> Batch:
    # Eager tensors, because the pipeline captures them instead of copying them into its graph. On
    # the host, because eager tensors go to a GPU by default.
    if self._tensors is None:
      with tf.init_scope(), tf.device("CPU:0"):
        self._tensors = {name: tf.constant(array) for name, array in self._arrays.items()}
      self._arrays = {}
    return self._tensors

  def _read_mapped(self, indices: tf.Tensor) -> Batch:
    if not self._mapped:
      return {}

    def read(rows: np.ndarray) -> list[np.ndarray]:
      taken = {name: np.take(array, rows, axis=0) for name, array in self._mapped.items()}
      for name, array in taken.items():
        check_text(name, array)
      return [_swapped(array) for array in taken.values()]

    dtypes = [tf.as_dtype(array.dtype) for array in self._mapped.values()]
    # Eagerly, TensorFlow returns a single result without a list.
    values = tf.nest.flatten(tf.numpy_function(read, [indices], dtypes, stateful=False))
    for value, array in zip(values, self._mapped.values(), strict=True):
      value.set_shape(indices.shape[:1] + array.shape[1:])
    return dict(zip(self._mapped, values, strict=True))


# ---- What may be asked of any source ----


def check_source(source: Any) -> None:
  """Raises a ConfigError unless `source` is a `Source` with examples, or a `StreamSource`."""
  if not isinstance(source, Readable):
    told = f"the source is {kind(source)}; it must be a Source: wrap it in {wrapping(source)}."
    raise ConfigError(told)
  source.require_examples()


def wrapping(data: Any) -> str:
  """Returns what makes a source of data of another library; see `foreign.wrapping`."""
  from loopwright.inputs import foreign

  return foreign.wrapping(data)


def main_source(source: Any) -> Any:
  """Returns `Readable.main_source` of a source; anything else as it is."""
  return source.main_source() if isinstance(source, Readable) else source


def of_one_shape(source: Any) -> Any:
  """Returns `Readable.of_one_shape` of a source; anything else as it is."""
  return source.of_one_shape() if isinstance(source, Readable) else source


def eval_sets(given: AnySource) -> dict[str, AnySource]:
  """Returns name -> source of what `Task.source("eval")` returned; a single source is named "".

  Raises:
    ConfigError: no sets, or a name that is not a text without "/".
  """
  if not isinstance(given, Mapping):
    return {"": given}
  if not given:
    raise ConfigError("source('eval') is an empty dict; it must have at least one name -> source.")
  for name in given:
    if not isinstance(name, str) or not name or "/" in name:
      raise ConfigError(
        f"source('eval') has a set named {name!r}; a name must be a text without '/': its metrics "
        "are logged as '<name>/<metric>'."
      )
  return dict(given)


def _column(values: Any) -> np.ndarray:
  """Returns an array; of a table's column of objects, texts as bytes and lists as rows."""
  array = np.asanyarray(values)
  if array.dtype != object or not array.size:
    return array
  if all(isinstance(each, list | np.ndarray) for each in array.flat):
    rows = [np.asarray(each) for each in array.flat]
    return _column(np.stack(rows)) if len({row.shape for row in rows}) == 1 else array
  return as_bytes(array) if all(isinstance(each, str | bytes) for each in array.flat) else array


def as_bytes(texts: Any) -> np.ndarray:
  """Returns texts as objects of bytes, as TensorFlow takes them: NumPy cuts zeros at their end."""
  made = np.array(texts, object)
  flat = made.reshape(-1)  # not a copy
  flat[:] = [text.encode() if isinstance(text, str) else bytes(text) for text in flat]
  return made


def _native(name: str, array: np.ndarray) -> np.ndarray:
  check_array(name, array)
  if _is_mapped(array):
    return array
  check_text(name, array)
  return _swapped(array)


def _swapped(array: np.ndarray) -> np.ndarray:
  return array.astype(array.dtype.newbyteorder("="), copy=False)


def _is_mapped(array: object) -> bool:
  while isinstance(array, np.ndarray):
    array = array.base
  return isinstance(array, mmap.mmap)
