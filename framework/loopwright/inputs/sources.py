"""What can be read: the interface of a source, and arrays. Each other kind has a file of its own.

`inputs.datasets` orders and batches a source. Where a kind of source differs, it registers what it
does with the function concerned, here or in `datasets`. So no kind is loaded before it is used.
"""

from __future__ import annotations

import abc
import functools
import mmap
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError, kind, require_integer
from loopwright.graphs.aliases import AnySource, Batch
from loopwright.inputs.checks import (
  check_array,
  check_text,
  check_weights,
  common_length,
  refuse_reserved,
)
from loopwright.options.declaration import asked, may_change

READS = asked("reads that from there on; the position in the data stays")


class Source(abc.ABC):
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
        f"features is {kind(features)}; it must be a dict of name -> array, such as {{'x': x}}; of "
        "a DataFrame dict(frame)."
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


@functools.singledispatch
def check_source(source: Any) -> None:
  """Raises a ConfigError unless `source` is a `Source` with examples, or a `StreamSource`."""
  remedy = "StreamSource(dataset=...)" if isinstance(source, tf.data.Dataset) else "ArraySource"
  raise ConfigError(f"the source is {kind(source)}; it must be a Source: wrap it in {remedy}.")


@check_source.register
def _(source: Source) -> None:
  count = getattr(source, "num_examples", None)
  require_integer(f"{type(source).__name__}.num_examples", count, at_least=1)


@functools.singledispatch
def main_source(source: Any) -> Any:
  """Returns the source whose examples have plain names: of `Sources` the main one, of `Buckets` the
  longest bucket.
  """
  return source


@functools.singledispatch
def of_one_shape(source: Any) -> Any:
  """Returns the longest of several buckets, or the source itself."""
  return source


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
