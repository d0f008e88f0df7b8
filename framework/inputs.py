"""What a step reads: sources, their order, batches of one static shape, and O(1) restore.

    source = ArraySource(features={"x": np.arange(10, dtype=np.float32)})
    dataset = train_dataset(source, global_batch_size=4, seed=1)
    batches = list(dataset.take(5).as_numpy_iterator())       # two epochs: 5 x 4 = 2 x 10
    resumed = train_dataset(source, global_batch_size=4, seed=1, position=8)
    assert np.array_equal(next(resumed.as_numpy_iterator())["x"], batches[2]["x"])

Training reads an endless stream of positions 0, 1, 2, ... Of a source with n examples, position p
reads example `permutation(seed, epoch)[p % n]` of epoch `p // n`. So batches run across the ends
of epochs, every example comes once an epoch, the order knows nothing of batch sizes, replicas and
workers, and a run resumes at any position at once.

A batch is a dict of tensors that share their first axis, the rows. Three names are reserved:

    "weight"      float32 [rows]: 0 for padding. A source may deliver one of its own (>= 0).
    "example_id"  int64 [rows]: the index in the source; -1 for padding.
    "seed"        int32 [rows, 2]: a function of (seed, position). Only `preprocess` sees it, and
                  only in training: for tf.random.stateless_*, so that augmentation repeats too.

Padding makes the rows divide by the number of replicas. A padded row repeats a real one of the same
batch, so its values are finite wherever those are, and has weight 0.
"""

from __future__ import annotations

import abc
import dataclasses
import gzip
import hashlib
import math
import mmap
import os
import re
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.python.framework import config as tf_config

from framework.errors import ConfigError

Batch = dict[str, tf.Tensor]
Preprocess = Callable[[Batch, bool], Batch]

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png")
USER_ERROR = "user error: "
"""Begins what the pipeline raises, inside a tf.errors.OpError, for a mistake in the user's data."""

_IDX_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def user_error(error: BaseException) -> str | None:
  """Returns the line meant for the user in what a running pipeline raised; None if there is none.

  TensorFlow wraps the line in an account of ops and iterators, which does not help its reader.
  """
  found = re.search(rf"\[{USER_ERROR}(.*?)\](?:\n|$)", str(error))
  return re.sub(r"\\(['\"\\])", r"\1", found[1]) if found else None


# ---- Sources ----


class Source(abc.ABC):
  """Examples that can be read in any order. Subclass it for an indexed format of your own.

  Attributes:
    num_examples: how many there are, at least 1.
  """

  num_examples: int

  @abc.abstractmethod
  def fetch(self, indices: tf.Tensor) -> Batch:
    """Returns the examples at `indices`, int64 [rows] in [0, num_examples).

    Called inside `tf.data.Dataset.map`, on the host. Every feature must have the static shape
    [rows, ...], all known; an index may come more than once. A large array belongs in an eager
    tensor made outside (see `ArraySource`): one made here would be copied into the graph.
    """


class ArraySource(Source):
  """Arrays with one row for each example; a memory-mapped one is read row by row, never whole."""

  def __init__(self, *, features: Mapping[str, np.ndarray]) -> None:
    """Checks the arrays; TensorFlow is not touched before the first dataset is made.

    Args:
      features: name -> [num_examples, ...], of any dtype that TensorFlow has.

    Raises:
      ConfigError: no features or no examples, different lengths, a dtype that TensorFlow lacks, a
        reserved name, or a "weight" that is not float32 [num_examples] of finite values >= 0.
    """
    if not isinstance(features, Mapping) or not features:
      raise ConfigError(f"features is {_brief(features)}; it must be a dict of name -> array.")
    arrays = {name: _native(name, np.asanyarray(array)) for name, array in features.items()}
    self.num_examples = _common_length(arrays)
    _refuse_reserved("features", arrays)
    if "weight" in arrays:
      _check_weights(arrays["weight"], self.num_examples)
    self._mapped = {name: np.asarray(array) for name, array in arrays.items() if _is_mapped(array)}
    self._arrays = {name: array for name, array in arrays.items() if name not in self._mapped}
    self._tensors: Batch | None = None

  def fetch(self, indices: tf.Tensor) -> Batch:
    """See `Source.fetch`."""
    batch = {name: tf.gather(tensor, indices) for name, tensor in self._in_memory().items()}
    return batch | self._read_mapped(indices)

  def _in_memory(self) -> Batch:
    # Eager tensors, so that the pipeline captures them instead of copying them into its graph, and
    # on the host even where eager tensors go to a GPU by default.
    if self._tensors is None:
      with tf.init_scope(), tf.device("CPU:0"):
        self._tensors = {name: tf.constant(array) for name, array in self._arrays.items()}
      self._arrays = {}
    return self._tensors

  def _read_mapped(self, indices: tf.Tensor) -> Batch:
    if not self._mapped:
      return {}

    def read(rows: np.ndarray) -> list[np.ndarray]:
      return [_swapped(np.take(array, rows, axis=0)) for array in self._mapped.values()]

    dtypes = [tf.as_dtype(array.dtype) for array in self._mapped.values()]
    values = tf.numpy_function(read, [indices], dtypes, stateful=False)
    for value, array in zip(values, self._mapped.values(), strict=True):
      value.set_shape(indices.shape[:1] + array.shape[1:])
    return dict(zip(self._mapped, values, strict=True))


class ImageFolderSource(Source):
  """Image files in one folder for each class: <directory>/<class>/<file>.

  Delivers "image", uint8 [rows, height, width, channels], and "label", int32 [rows], the class's
  place in the sorted `class_names`. Hidden files and files beside the class folders are left out.
  Files are decoded when they are read; one that cannot be is named in a `user_error`.
  """

  def __init__(
    self, *, directory: str, image_size: Sequence[int], channels: int = 3, resize: bool = True
  ) -> None:
    """Lists the files; reads none.

    Args:
      directory: holds one folder for each class. A class folder may be empty.
      image_size: (height, width) of what is delivered.
      channels: 1, 3 or 4; images are converted.
      resize: bring every image to `image_size`, without keeping its aspect ratio: by area
        averaging where both sides shrink (no aliasing), else bilinear. False: another size is an
        error.

    Raises:
      ConfigError: no such folder, no class folders, no images, a file that is no JPEG, PNG, GIF or
        BMP by its suffix, or a bad image_size or channels.
    """
    sides = tuple(image_size) if isinstance(image_size, Sequence) else (image_size,)
    if len(sides) != 2 or not all(_is_positive_integer(side) for side in sides):
      raise ConfigError(f"image_size is {image_size!r}; it must be (height, width) in pixels.")
    if channels not in (1, 3, 4):
      raise ConfigError(f"channels is {channels!r}; it must be 1 (grey), 3 (RGB) or 4 (RGBA).")
    self.image_size, self.channels, self.resize = sides, channels, resize
    self.class_names = _class_folders(directory)
    paths, labels = _labelled_files(directory, self.class_names)
    self.num_examples = len(paths)
    self._files = ArraySource(
      features={"path": np.array(paths, np.bytes_), "label": np.array(labels, np.int32)}
    )

  def fetch(self, indices: tf.Tensor) -> Batch:
    """See `Source.fetch`."""
    batch = self._files.fetch(indices)
    images = self._images(batch.pop("path"))
    shape = [*indices.shape, *self.image_size, self.channels]
    return {"image": tf.ensure_shape(images, shape), **batch}

  def _images(self, paths: tf.Tensor) -> tf.Tensor:
    # A pipeline in the pipeline: `ignore_errors` is TensorFlow's only way to live on after a file
    # that cannot be decoded, and so to say which it was: its row is missing at the end.
    count = tf.size(paths, tf.int64)
    decoded = (
      tf.data.Dataset.from_tensor_slices(paths)
      .enumerate()
      .map(_unconverted(lambda row, path: (row, path, self._decode(path))), tf.data.AUTOTUNE)
    )
    sized = decoded.ignore_errors().map(
      _unconverted(lambda row, path, image: (row, self._sized(image, path))), tf.data.AUTOTUNE
    )
    end = tf.data.Dataset.from_tensors((count, self._blank()))
    rows, images = sized.concatenate(end).batch(count).take(1).get_single_element()
    first_missing = tf.reduce_sum(tf.cast(rows == tf.range(tf.size(rows, tf.int64)), tf.int64))
    path = tf.gather(paths, tf.minimum(first_missing, count - 1))
    message = [path, f" cannot be read as an image of {self.channels} channels; remove it, or"]
    message.append(" put a whole JPEG, PNG, GIF or BMP file in its place.")
    return _require(rows[-1] < count, images, message)

  def _blank(self) -> tf.Tensor:
    return tf.zeros([*self.image_size, self.channels], tf.uint8)

  def _decode(self, path: tf.Tensor) -> tf.Tensor:
    return tf.io.decode_image(tf.io.read_file(path), self.channels, expand_animations=False)

  def _sized(self, image: tf.Tensor, path: tf.Tensor) -> tf.Tensor:
    if self.resize:
      return _resized(image, self.image_size)
    size = tf.shape(image)[:2]
    side = tf.strings.as_string(size)
    message = [path, " is ", side[0], "x", side[1], " (height x width), not "]
    message += ["x".join(map(str, self.image_size)), "; set resize=True or correct image_size."]
    return _require(tf.reduce_all(size == self.image_size), image, message)


class StreamSource:
  """A `tf.data.Dataset` of your own, read in the order in which it comes.

  It must yield the same examples each time it is iterated: seed a shuffle. Training repeats it.
  There is no index to go by, so a resumed run skips over what was read before, which takes as long
  as reading it did; the log says how long. "example_id" counts within one pass.
  """

  def __init__(self, *, dataset: tf.data.Dataset, num_examples: int | None = None) -> None:
    """Checks the elements' types; reads none.

    Args:
      dataset: yields one example at a time: a flat dict of dense tensors of static shapes.
      num_examples: end each pass after so many; None for as many as there are. Evaluation of an
        endless dataset needs it.

    Raises:
      ConfigError: not a dataset of such dicts, a reserved name, a "weight" that is not a float32
        scalar, an empty dataset, or one known to have fewer than `num_examples`.
    """
    if not isinstance(dataset, tf.data.Dataset):
      raise ConfigError(f"dataset is {_brief(dataset)}; it must be a tf.data.Dataset.")
    _check_elements(dataset.element_spec)
    if num_examples is not None:
      _require_positive("num_examples", num_examples)
    known = int(dataset.cardinality())
    if known == 0:
      raise ConfigError("the stream's dataset is empty; it must yield at least one example.")
    if num_examples is not None and 0 < known < num_examples:
      raise ConfigError(
        f"num_examples is {num_examples}, but the stream's dataset has {known} examples; "
        "leave num_examples out."
      )
    self.dataset = dataset if num_examples is None else dataset.take(num_examples)
    self.num_examples = num_examples or (known if known > 0 else None)


# ---- Datasets ----


def timestamp() -> tf.Tensor:
  """Returns the seconds since the epoch, a float64 scalar (any context)."""
  if tf_config.is_op_determinism_enabled():  # which forbids tf.timestamp
    return tf.ensure_shape(tf.numpy_function(time.time, [], tf.float64), [])
  return tf.timestamp()


def padded_batch_size(global_batch_size: int, multiple: int) -> int:
  """Returns the smallest multiple of `multiple` that is at least `global_batch_size`."""
  return -(-global_batch_size // multiple) * multiple


def train_dataset(
  source: Source | StreamSource,
  *,
  global_batch_size: int,
  pad_multiple: int = 1,
  seed: int = 0,
  position: int = 0,
  preprocess: Preprocess | None = None,
  shuffle: bool = True,
) -> tf.data.Dataset:
  """Returns endless batches: element k holds positions position + k * global_batch_size and on.

  To be made on the host; pass it to `strategy.experimental_distribute_dataset`, which splits the
  rows of a batch contiguously over replicas.

  Args:
    source: what to read.
    global_batch_size: examples in a batch, over all replicas.
    pad_multiple: rows are padded to the next multiple of this.
    seed: an integer from 0 to 2**32 - 1, which with the position decides order and seeds.
    position: examples consumed so far. Starting there costs nothing but for a `StreamSource`.
    preprocess: called as `preprocess(batch, True)` on each whole batch, on the host, in graph mode
      with AutoGraph. It must keep the rows, "weight" and "example_id"; all shapes stay static.
    shuffle: False reads every epoch in the order of the source. A `StreamSource` always comes in
      its own order.

  Returns:
    Dicts of the features, "weight" and "example_id", all of static shape [padded rows, ...].

  Raises:
    ConfigError: a bad argument, or a source or preprocess that breaks its contract.
  """
  plan = _Plan.checked(source, global_batch_size, pad_multiple, preprocess, training=True)
  _require_integer("position", position, at_least=0)
  _require_integer("seed", seed, at_least=0, at_most=2**32 - 1)
  if isinstance(source, StreamSource):
    return _train_stream(source, plan, seed, position)

  def make(indices: tf.Tensor, seeds: tf.Tensor) -> Batch:
    batch = plan.checked_features(source.fetch(indices), f"{type(source).__name__}.fetch")
    return plan.completed(batch, tf.where(plan.real_rows(), indices, -1), seeds)

  rows = _ordered_rows(source.num_examples, plan, seed, position, shuffle)
  return _batches(rows, make, rewrite=False)


def eval_dataset(
  source: Source | StreamSource,
  *,
  global_batch_size: int,
  pad_multiple: int = 1,
  preprocess: Preprocess | None = None,
) -> tf.data.Dataset:
  """Returns every example exactly once, in the order of the source, in batches of one static shape.

  The last batch is padded like the others. See `train_dataset` for the arguments, what comes back
  and the errors; `preprocess(batch, False)` gets no "seed". An endless stream needs `num_examples`.
  """
  plan = _Plan.checked(source, global_batch_size, pad_multiple, preprocess, training=False)
  if isinstance(source, StreamSource):
    return _eval_stream(source, plan)
  end = source.num_examples

  def make(start: tf.Tensor) -> Batch:
    indices = start + tf.range(plan.padded_rows, dtype=tf.int64)
    real = plan.real_rows() & (indices < end)
    batch = source.fetch(tf.where(real, indices, start))
    batch = plan.checked_features(batch, f"{type(source).__name__}.fetch")
    return plan.completed(batch, tf.where(real, indices, -1))

  return _batches(tf.data.Dataset.range(0, end, global_batch_size), make, rewrite=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
  """What all batches of a dataset have in common."""

  rows: int
  padded_rows: int
  preprocess: Preprocess | None
  name_of_preprocess: str
  training: bool

  @classmethod
  def checked(
    cls,
    source: object,
    global_batch_size: int,
    pad_multiple: int,
    preprocess: Preprocess | None,
    training: bool,
  ) -> _Plan:
    _check_source(source)
    _require_positive("global_batch_size", global_batch_size)
    _require_positive("pad_multiple", pad_multiple)
    return cls(
      rows=global_batch_size,
      padded_rows=padded_batch_size(global_batch_size, pad_multiple),
      preprocess=_autograph(preprocess) if preprocess else None,
      name_of_preprocess=getattr(preprocess, "__qualname__", "preprocess"),
      training=training,
    )

  def real_rows(self) -> tf.Tensor:
    """Returns bool [padded rows]: which rows of a full batch hold an example."""
    return tf.constant(np.arange(self.padded_rows) < self.rows)

  def checked_features(self, batch: object, who: str) -> Batch:
    checked = _checked_batch(batch, self.padded_rows, who)
    _refuse_reserved(who, checked)
    return checked

  def completed(self, features: Batch, ids: tf.Tensor, seeds: tf.Tensor | None = None) -> Batch:
    """Adds the reserved features and applies `preprocess`; `ids` is -1 where a row is padding."""
    batch = {**features, "example_id": ids}
    batch["weight"] = _masked(features.get("weight", tf.ones([self.padded_rows])), ids)
    if self.preprocess is None:
      return batch
    if seeds is not None:
      batch["seed"] = seeds
    batch = self.preprocess(batch, self.training)
    batch = _checked_batch(batch, self.padded_rows, self.name_of_preprocess)
    _require_kept(batch, self.name_of_preprocess)
    batch.pop("seed", None)
    # Again, for a preprocess that makes weights of its own, and by the ids it returns, for one that
    # reorders rows.
    batch["weight"] = _masked(batch["weight"], batch["example_id"])
    return batch


def _masked(weight: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
  return tf.where(ids >= 0, weight, 0.0)


def _batches(
  dataset: tf.data.Dataset, make: Callable[..., Batch], *, rewrite: bool
) -> tf.data.Dataset:
  """Maps in order, ahead of the step; `rewrite` lets TensorFlow optimize what came before.

  Private thread pools and fixed numbers of calls made no measurable difference on 2 cores.
  """
  options = tf.data.Options()
  options.deterministic = True
  # Its thread sleeps for up to a minute and now and then misses the call to stop, so that the end
  # of an iterator took seconds; without it as many batches are mapped at a time as there are cores.
  options.autotune.enabled = False
  # By data: every worker makes the global batch and keeps its own rows of it.
  options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
  if not rewrite:  # It keeps a second copy of the arrays, and finds nothing here to improve.
    options.experimental_optimization.apply_default_optimizations = False
  batches = dataset.map(_unconverted(make), num_parallel_calls=tf.data.AUTOTUNE)
  return batches.prefetch(tf.data.AUTOTUNE).with_options(options)


def _unconverted(function: Callable[..., Any]) -> Callable[..., Any]:
  # AutoGraph would turn a ConfigError into a StagingError of many lines.
  return tf.autograph.experimental.do_not_convert(function)


def _autograph(preprocess: Preprocess) -> Preprocess:
  """Converts `preprocess` as Dataset.map would, but lets its exceptions through as they are."""

  def convert(batch: Batch, training: bool) -> Batch:
    return preprocess(batch, training)

  return tf.autograph.to_graph(convert)


# ---- Streams ----


def _train_stream(source: StreamSource, plan: _Plan, seed: int, position: int) -> tf.data.Dataset:
  examples = source.dataset.enumerate().repeat()
  examples = examples.concatenate(_failing(examples.element_spec)).skip(position)
  batches = examples.batch(plan.rows, drop_remainder=True)

  def clock(start: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return start, timestamp() if position else tf.constant(0.0, tf.float64)

  def make(clocked: tuple[tf.Tensor, tf.Tensor], batch: tuple[tf.Tensor, Batch]) -> Batch:
    start, began_s = clocked
    if position:
      _log_once(start == position, position, timestamp() - began_s)
    seeds = _seeds(tf.where(plan.real_rows(), start + _arange(plan.padded_rows), start), seed)
    return plan.completed(*_padded(*batch, plan), seeds)

  if position:
    logging.info("skipping %d examples of a stream, to go on where training stopped", position)
  # zip asks its parts in turn, so that the clock is read before the first batch is skipped to.
  clocked = tf.data.Dataset.counter(position, plan.rows).map(_unconverted(clock))
  return _batches(tf.data.Dataset.zip((clocked, batches)), make, rewrite=True)


def _eval_stream(source: StreamSource, plan: _Plan) -> tf.data.Dataset:
  if source.num_examples is None and source.dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
    raise ConfigError(
      "the stream to evaluate is endless; set StreamSource's num_examples to what one pass takes."
    )

  def make(ids: tf.Tensor, features: Batch) -> Batch:
    return plan.completed(*_padded(ids, features, plan))

  return _batches(source.dataset.enumerate().batch(plan.rows), make, rewrite=True)


def _padded(ids: tf.Tensor, features: Batch, plan: _Plan) -> tuple[Batch, tf.Tensor]:
  """Pads a batch of a stream, of at most `plan.rows` rows; returns its features and its ids."""
  if ids.shape[0] == plan.padded_rows:
    return features, ids
  rows = tf.range(plan.padded_rows)
  real = rows < tf.size(ids)
  taken = tf.where(real, rows, 0)
  features = {name: tf.gather(value, taken) for name, value in features.items()}
  return features, tf.where(real, tf.gather(ids, taken), -1)


def _failing(element_spec: Any) -> tf.data.Dataset:
  """Returns one element that raises: `repeat` of an empty dataset ends instead of going on."""

  def fail(unused: tf.Tensor) -> Any:
    element = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), element_spec)
    message = ["the stream has no examples; it must yield at least one in each pass."]
    return _require(tf.constant(False), element, message)

  return tf.data.Dataset.range(1).map(_unconverted(fail))


def _log_once(now: tf.Tensor, count: int, seconds: tf.Tensor) -> None:
  def log(seconds: np.ndarray) -> np.bool_:
    logging.info("skipped %d examples of the stream in %.3f s", count, seconds)
    return np.bool_(True)

  tf.cond(now, lambda: tf.numpy_function(log, [seconds], tf.bool), lambda: False)


# ---- Order ----

_POSITIONS_AT_ONCE = 4096
"""Indices are made this many at a time: one batch of 128 by itself would cost 170 us of CPU time
instead of 110, most of it for starting some forty small ops."""

_SORT_UP_TO = 4096
"""Below, TensorFlow's index shuffle walks a 16-bit cycle: 0.2 us an index at 4096, 126 us at 2."""

_ROUNDS = 12
"""TensorFlow's 4 mix poorly: of 60,000 examples sorted by class, the variance of the class counts
in a batch of 128 is 0.74 of a random order's. From 8 on it is right; 12 cost 1 us a batch more."""


def _ordered_rows(
  num_examples: int, plan: _Plan, seed: int, position: int, shuffle: bool
) -> tf.data.Dataset:
  """Yields (indices int64 [padded rows], seeds int32 [padded rows, 2]) for each batch."""
  batches = max(1, _POSITIONS_AT_ONCE // plan.rows)
  size = batches * plan.rows
  source_row = np.where(np.arange(plan.padded_rows) < plan.rows, np.arange(plan.padded_rows), 0)

  def make(start: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    positions = start + _arange(size)
    indices = _order(positions, num_examples, seed) if shuffle else positions % num_examples
    padded = tf.gather(
      tf.reshape(tf.stack([indices, positions]), [2, batches, -1]), source_row, axis=2
    )
    seeds = _seeds(tf.reshape(padded[1], [-1]), seed)
    return padded[0], tf.reshape(seeds, [batches, plan.padded_rows, 2])

  return tf.data.Dataset.counter(position, size).map(_unconverted(make)).unbatch()


def _order(positions: tf.Tensor, num_examples: int, seed: int) -> tf.Tensor:
  """Returns which example each position reads; `positions` are int64 [m] and consecutive."""
  if num_examples <= _SORT_UP_TO:
    return _sorted_order(positions, num_examples, seed)
  return _ciphered_order(positions, num_examples, seed)


def _sorted_order(positions: tf.Tensor, num_examples: int, seed: int) -> tf.Tensor:
  """Orders every epoch that `positions` touch by the hashes of its positions, largest first."""
  first = positions[0] - positions[0] % num_examples
  epochs = (positions.shape[0] + num_examples - 2) // num_examples + 1
  hashes = tf.bitcast(_hashed(first + _arange(epochs * num_examples), seed, "order"), tf.int64)
  order = tf.math.top_k(tf.reshape(hashes, [epochs, num_examples]), k=num_examples).indices
  return tf.cast(tf.gather(tf.reshape(order, [-1]), positions - first), tf.int64)


def _ciphered_order(positions: tf.Tensor, num_examples: int, seed: int) -> tf.Tensor:
  """Orders by the block cipher of RandomIndexShuffle, whose key is a hash of the epoch.

  Three traps of the op. It keeps only as many bits of the three key words as it needs, 8 each for
  60,000 examples, so that plain counters repeat every 256 epochs and differ little in between. It
  is no permutation of 4**k + 1 numbers for k >= 8: it takes one bit too few. And its public face,
  tf.random.experimental.index_shuffle, pads a batch of seeds along the wrong axis.
  """
  epochs = positions // num_examples
  words = tf.bitcast(_hashed(tf.stack([2 * epochs, 2 * epochs + 1], 1), seed, "order"), tf.int32)
  keys = tf.reshape(words, [-1, 4])[:, :3]

  def permute(indices: tf.Tensor, size: int) -> tf.Tensor:
    last = tf.constant(size - 1, tf.int64)
    return tf.raw_ops.RandomIndexShuffle(index=indices, seed=keys, max_index=last, rounds=_ROUNDS)

  within = positions % num_examples
  if not _is_power_of_four(num_examples - 1):
    return permute(within, num_examples)
  # One number more, and around again for the one that lands on it.
  indices = permute(within, num_examples + 1)
  return tf.where(indices < num_examples, indices, permute(indices, num_examples + 1))


def _seeds(positions: tf.Tensor, seed: int) -> tf.Tensor:
  """Returns int32 [m, 2], different for all positions."""
  return tf.bitcast(_hashed(positions, seed, "seeds"), tf.int32)


def _hashed(values: tf.Tensor, seed: int, purpose: str) -> tf.Tensor:
  """Hashes int64 to uint64, one to one: a step of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
  key = hashlib.blake2b(f"{purpose} {seed}".encode(), digest_size=8).digest()
  mixed = tf.cast(values, tf.uint64) * _uint64(0x9E3779B97F4A7C15)
  mixed += _uint64(int.from_bytes(key, "little"))
  for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
    mixed = (mixed ^ tf.bitwise.right_shift(mixed, _uint64(shift))) * _uint64(factor)
  return mixed ^ tf.bitwise.right_shift(mixed, _uint64(31))


def _uint64(value: int) -> tf.Tensor:
  return tf.constant(value, tf.uint64)


def _arange(size: int) -> tf.Tensor:
  return tf.range(size, dtype=tf.int64)


def _is_power_of_four(number: int) -> bool:
  return number & (number - 1) == 0 and number.bit_length() % 2 == 1


# ---- Files ----


def read_idx(path: str) -> np.ndarray:
  """Reads a file in the idx format of MNIST, plain or gzipped; returns it in native byte order.

  The format: http://yann.lecun.com/exdb/mnist.

  Raises:
    ConfigError: no such file, or not a whole idx file.
  """
  data = _file_bytes(path)
  if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _IDX_DTYPES:
    raise ConfigError(
      f"{path!r} is not an idx file: it begins with {data[:4].hex(' ') or 'nothing'}, not with "
      "00 00, a type and a number of axes; give it again."
    )
  dtype, axes = np.dtype(_IDX_DTYPES[data[2]]), data[3]
  shape = np.frombuffer(data[4 : 4 + 4 * axes], ">u4") if len(data) >= 4 + 4 * axes else ()
  wanted = 4 + 4 * axes + math.prod(map(int, shape)) * dtype.itemsize
  if len(data) != wanted or len(shape) != axes:
    raise ConfigError(
      f"{path!r} holds {len(data)} bytes, but an idx file with its head has {wanted}; it was cut "
      "short or damaged: fetch it again."
    )
  array = np.frombuffer(data, dtype, offset=4 + 4 * axes).reshape(shape)
  return array.astype(dtype.newbyteorder("="))


def load_arrays(path: str) -> dict[str, np.ndarray]:
  """Loads an .npz file, or a folder of .npy files, as name -> array; ready for `ArraySource`.

  An .npz is read into memory; the .npy files of a folder are memory-mapped, so they may be larger
  than memory.

  Raises:
    ConfigError: nothing there, no arrays in it, damaged files, or arrays of Python objects.
  """
  if os.path.isdir(path):
    names = sorted(name for name in os.listdir(path) if name.endswith(".npy"))
    arrays = {name.removesuffix(".npy"): _load(os.path.join(path, name)) for name in names}
  elif path.endswith(".npz"):
    arrays = _load(path)
  else:
    raise ConfigError(f"{path!r} is not there as an .npz file or a folder of .npy files.")
  if not arrays:
    raise ConfigError(f"{path!r} has no arrays; it must be an .npz file or a folder of .npy files.")
  return arrays


def _load(path: str) -> Any:
  try:
    loaded = np.load(path, mmap_mode="r", allow_pickle=False)
    return dict(loaded) if path.endswith(".npz") else loaded
  except FileNotFoundError:
    raise ConfigError(f"{path!r} does not exist; give the path of an .npz file.") from None
  except (OSError, EOFError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    raise ConfigError(f"{path!r} cannot be read ({reason}); save it again with numpy.") from None


def _file_bytes(path: str) -> bytes:
  try:
    with open(path, "rb") as file:
      data = file.read()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
  except FileNotFoundError:
    raise ConfigError(f"{path!r} does not exist; give the path of an idx file.") from None
  except (OSError, EOFError, zlib.error) as error:
    raise ConfigError(f"{path!r} cannot be read ({error}); fetch it again.") from None


def _class_folders(directory: str) -> list[str]:
  if not os.path.isdir(directory):
    raise ConfigError(
      f"{directory!r} is not a folder; give one that holds a folder for each class."
    )
  entries = [entry for entry in os.scandir(directory) if entry.is_dir()]
  names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
  if not names:
    raise ConfigError(f"{directory!r} has no folders in it; it must hold one for each class.")
  return names


def _labelled_files(directory: str, class_names: Sequence[str]) -> tuple[list[bytes], list[int]]:
  paths, labels = [], []
  for label, name in enumerate(class_names):
    files = _image_files(os.path.join(directory, name))
    if not files:
      logging.warning("the class folder %r has no images", os.path.join(directory, name))
    paths += files
    labels += [label] * len(files)
  if not paths:
    raise ConfigError(
      f"the {len(class_names)} class folders of {directory!r} have no images; put files in them "
      f"that end in {', '.join(IMAGE_SUFFIXES)}."
    )
  return paths, labels


def _image_files(folder: str) -> list[bytes]:
  names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
  for name in names:
    if not name.lower().endswith(IMAGE_SUFFIXES):
      raise ConfigError(
        f"{os.path.join(folder, name)!r} is not an image; a class folder may only hold files that "
        f"end in {', '.join(IMAGE_SUFFIXES)}: move it away."
      )
  return [os.fsencode(os.path.join(folder, name)) for name in names]


def _resized(image: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
  shrinks = tf.reduce_all(tf.shape(image)[:2] >= size)
  resized = tf.cond(
    shrinks,
    lambda: tf.image.resize(image, size, "area"),
    lambda: tf.image.resize(image, size, "bilinear"),
  )
  return tf.saturate_cast(tf.round(resized), tf.uint8)


# ---- Checks ----


def _require(condition: tf.Tensor, value: Any, message: Sequence[tf.Tensor | str]) -> Any:
  """Returns `value` if `condition` holds when the pipeline runs; else raises a `user_error`."""
  line = tf.strings.join([USER_ERROR, *message])
  with tf.control_dependencies([tf.debugging.Assert(condition, [line])]):
    return tf.nest.map_structure(tf.identity, value)


def _check_source(source: object) -> None:
  if not isinstance(source, Source | StreamSource):
    remedy = "StreamSource(dataset=...)" if isinstance(source, tf.data.Dataset) else "ArraySource"
    raise ConfigError(f"the source is {_brief(source)}; it must be a Source: wrap it in {remedy}.")
  if isinstance(source, Source) and not _is_positive_integer(getattr(source, "num_examples", None)):
    raise ConfigError(
      f"{type(source).__name__}.num_examples is {getattr(source, 'num_examples', None)!r}; it must "
      "be an integer, at least 1."
    )


def _is_positive_integer(value: object) -> bool:
  return _is_integer(value) and int(value) > 0  # type: ignore[call-overload]


def _is_integer(value: object) -> bool:
  return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _require_positive(what: str, value: int) -> None:
  _require_integer(what, value, at_least=1)


def _require_integer(what: str, value: int, *, at_least: int, at_most: int | None = None) -> None:
  if not _is_integer(value) or value < at_least or (at_most is not None and value > at_most):
    bound = f", at least {at_least}" if at_most is None else f" from {at_least} to {at_most}"
    raise ConfigError(f"{what} is {value!r}; it must be an integer{bound}.")


def _refuse_reserved(who: str, names: Mapping[str, Any]) -> None:
  for name in ("example_id", "seed"):
    if name in names:
      raise ConfigError(
        f"{who} has a feature named {name!r}, which the framework adds itself; rename yours."
      )


def _native(name: object, array: np.ndarray) -> np.ndarray:
  if not isinstance(name, str):
    raise ConfigError(f"features has the name {name!r}; names must be strings.")
  try:
    if array.dtype.hasobject:
      raise TypeError
    tf.as_dtype(array.dtype)
  except TypeError:
    raise ConfigError(
      f"feature {name!r} has dtype {array.dtype}, which TensorFlow lacks; convert it "
      "(array.astype), or pad rows of different lengths to one."
    ) from None
  return array if _is_mapped(array) else _swapped(array)


def _swapped(array: np.ndarray) -> np.ndarray:
  return array.astype(array.dtype.newbyteorder("="), copy=False)


def _is_mapped(array: object) -> bool:
  while isinstance(array, np.ndarray):
    array = array.base
  return isinstance(array, mmap.mmap)


def _common_length(arrays: Mapping[str, np.ndarray]) -> int:
  for name, array in arrays.items():
    if array.ndim == 0:
      raise ConfigError(f"feature {name!r} is a single value; it must have a row for each example.")
  lengths = {name: len(array) for name, array in arrays.items()}
  if len(set(lengths.values())) > 1:
    listed = ", ".join(f"{name!r} {length}" for name, length in lengths.items())
    raise ConfigError(
      f"features have different lengths ({listed}); they must have a row for each example."
    )
  length = next(iter(lengths.values()))
  if length == 0:
    raise ConfigError(f"features ({', '.join(arrays)}) have no rows; give at least one example.")
  return length


def _check_weights(weight: np.ndarray, num_examples: int) -> None:
  if weight.dtype != np.float32 or weight.shape != (num_examples,):
    raise ConfigError(
      f"feature 'weight' is {weight.dtype} of shape {list(weight.shape)}; it must be float32 of "
      f"shape [{num_examples}], one weight for each example."
    )
  bad = np.flatnonzero(~(np.isfinite(weight) & (weight >= 0)))
  if bad.size:
    raise ConfigError(
      f"feature 'weight' is {weight[bad[0]]} at example {bad[0]}; weights must be finite and not "
      "negative."
    )


def _check_elements(element_spec: object) -> None:
  if not isinstance(element_spec, dict) or not element_spec:
    raise ConfigError(
      f"the stream's elements are {_brief(element_spec)}, not dicts; name the features first, for "
      "example dataset.map(lambda x, y: {'x': x, 'y': y})."
    )
  for name, spec in element_spec.items():
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.is_fully_defined():
      raise ConfigError(
        f"feature {name!r} of the stream is {spec}; it must be a dense tensor of a static shape: "
        "use tf.ensure_shape, or pad it."
      )
  _refuse_reserved("the stream", element_spec)
  weight = element_spec.get("weight", tf.TensorSpec([], tf.float32))
  if weight.dtype != tf.float32 or weight.shape.rank != 0:
    raise ConfigError(f"feature 'weight' of the stream is {weight}; it must be a float32 scalar.")


def _checked_batch(batch: object, rows: int, who: str) -> Batch:
  if not isinstance(batch, Mapping) or not batch:
    raise ConfigError(f"{who} returned {_brief(batch)}; it must return a dict of name -> tensor.")
  checked = {}
  for name, value in batch.items():
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
      raise ConfigError(f"{who} returned {name!r} as a {type(value).__name__}; make it dense.")
    checked[name] = tf.convert_to_tensor(value)
    _check_shape(checked[name].shape, rows, f"{who} returned {name!r}")
  weight = checked.get("weight", tf.ones([rows]))
  if weight.dtype != tf.float32 or weight.shape != [rows]:
    raise ConfigError(
      f"{who} returned 'weight' as {weight.dtype.name} of shape {weight.shape}; it must be float32 "
      f"of shape [{rows}], one weight for each row."
    )
  return checked


def _check_shape(shape: tf.TensorShape, rows: int, what: str) -> None:
  if shape.rank is None or None in shape.as_list():
    raise ConfigError(
      f"{what} of shape {shape}, not all known before it runs; state it with tf.ensure_shape."
    )
  if shape.rank == 0 or shape[0] != rows:
    raise ConfigError(
      f"{what} of shape {shape} for a batch of {rows} rows; its first axis must be {rows}: give a "
      "row the weight 0 to leave it out."
    )


def _require_kept(batch: Batch, who: str) -> None:
  for name in ("weight", "example_id"):
    if name not in batch:
      raise ConfigError(f"{who} dropped {name!r}; return it with the rest: {{**batch, ...}}.")
  ids = batch["example_id"]
  if ids.dtype != tf.int64 or ids.shape.rank != 1:
    raise ConfigError(
      f"{who} returned 'example_id' as {ids.dtype.name} of shape {ids.shape}; leave it as it came."
    )


def _brief(value: object) -> str:
  return f"a {type(value).__name__}" if value is not None else "None"
