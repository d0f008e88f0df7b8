"""Data sources: arrays, image folders, streams, your own formats; and file readers.

    source = ArraySource(features={"x": np.arange(10, dtype=np.float32)})
    batch = source.fetch(tf.constant([3, 0, 3], tf.int64))
    assert batch["x"].numpy().tolist() == [3.0, 0.0, 3.0]

`inputs.datasets` orders and batches a source.
"""

from __future__ import annotations

import abc
import math
import mmap
import os
import zipfile
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from loopwright.aliases import AnySource, Batch
from loopwright.declaration import asked, may_change
from loopwright.errors import ConfigError, is_integer, kind, require_integer
from loopwright.graphs.autograph import as_written
from loopwright.host import bounded
from loopwright.inputs import image_headers
from loopwright.inputs.checks import (
  check_array,
  check_elements,
  check_text,
  check_weights,
  common_length,
  refuse_reserved,
  require,
)

MAX_IMAGE_BYTES = 2**28
"""Default of `max_bytes` for one image: 89 million pixels of three channels."""
IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png")

_AGAIN, _SAVE = "download it again", "save it again with numpy"
_NUMPY_COMPRESSION = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_IDX_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}

READS = asked("reads that from there on; the position in the data stays")


class Source(abc.ABC):
  """Examples that can be read by index. Subclass it for your own indexed format.

  Attributes:
    num_examples: the number of examples, at least 1.
  """

  num_examples: int

  @abc.abstractmethod
  def fetch(self, indices: tf.Tensor) -> Batch:
    """Returns the examples at `indices`, int64 [rows] in [0, num_examples).

    Called inside `tf.data.Dataset.map`, on the host. Every feature must have a static shape [rows,
    ...]; an index may occur more than once. Make a large array an eager tensor before this call
    (see `ArraySource`): an array used here directly would be copied into the graph.
    """


@may_change(READS)
class ArraySource(Source):
  """Arrays with one row per example; memory-mapped arrays are read row by row."""

  def __init__(self, *, features: Mapping[str, np.ndarray]) -> None:
    """Checks the arrays; does not use TensorFlow's devices before the first dataset is made.

    Args:
      features: name -> [num_examples, ...], of any dtype that TensorFlow has.

    Raises:
      ConfigError: no features or no examples, different lengths, a dtype that TensorFlow does not
        have, a reserved name, or a "weight" that is not float32 [num_examples] of finite values >=
        0.
    """
    if not isinstance(features, Mapping) or not features:
      raise ConfigError(f"features is {kind(features)}; it must be a dict of name -> array.")
    arrays = {name: _native(name, np.asanyarray(array)) for name, array in features.items()}
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


@may_change(READS)
class ImageFolderSource(Source):
  """Image files in one folder per class: <directory>/<class>/<file>.

  Yields "image", uint8 [rows, height, width, channels], and "label", int32 [rows], the index of the
  class in the sorted `class_names`. Ignores hidden files and files next to the class folders. Files
  are decoded when read; a `user_error` names a file that cannot be decoded.
  """

  def __init__(
    self,
    *,
    directory: str,
    image_size: Sequence[int],
    channels: int = 3,
    resize: bool = True,
    max_bytes: int = MAX_IMAGE_BYTES,
  ) -> None:
    """Lists the files without reading them.

    Args:
      directory: holds one folder per class. A class folder may be empty.
      image_size: (height, width) of the images that it yields, in pixels.
      channels: 1, 3 or 4; images are converted.
      resize: True resizes every image to `image_size`, without keeping its aspect ratio: by area
        averaging if both sides shrink (no aliasing), else bilinear. False makes another size an
        error.
      max_bytes: the most memory that one image may take when it is decoded, and the largest file.

    Raises:
      ConfigError: no such folder, no class folders, no images, a file whose suffix is not that of a
        JPEG, PNG, GIF or BMP, a file above `max_bytes`, or a wrong argument.
    """
    sides = tuple(image_size) if isinstance(image_size, Sequence) else (image_size,)
    if len(sides) != 2 or not all(is_integer(side, at_least=1) for side in sides):
      raise ConfigError(f"image_size is {image_size!r}; it must be (height, width) in pixels.")
    if channels not in (1, 3, 4):
      raise ConfigError(f"channels is {channels!r}; it must be 1 (grey), 3 (RGB) or 4 (RGBA).")
    require_integer("max_bytes", max_bytes, at_least=1)
    self.image_size, self.channels, self.resize = sides, channels, resize
    self.max_bytes = max_bytes
    self.class_names = _class_folders(directory)
    paths, labels = _labelled_files(directory, self.class_names, max_bytes)
    self.num_examples = len(paths)
    self.files = ArraySource(
      features={"path": np.array(paths, np.bytes_), "label": np.array(labels, np.int32)}
    )

  def fetch(self, indices: tf.Tensor) -> Batch:
    """See `Source.fetch`."""
    batch = self.files.fetch(indices)
    images = self.images(batch.pop("path"))
    shape = [*indices.shape, *self.image_size, self.channels]
    return {"image": tf.ensure_shape(images, shape), **batch}

  def images(self, paths: tf.Tensor) -> tf.Tensor:
    """Reads and decodes the files of some paths, string [n]."""
    # A nested pipeline, as only `ignore_errors` lets TensorFlow continue after a file that cannot
    # be decoded. Its row is then missing, which identifies the file. TensorFlow prepares the mapped
    # function anew for each batch, so it is small: it makes no messages.
    count = tf.size(paths, tf.int64)
    read = (
      tf.data.Dataset.from_tensor_slices(paths)
      .enumerate()
      .map(as_written(lambda row, path: (row, *self._read(path))), tf.data.AUTOTUNE)
      .ignore_errors()
    )
    nothing = tf.zeros([2], tf.int64)
    end = tf.data.Dataset.from_tensors((count, self._blank(), nothing, nothing))
    rows, images, sides, sizes = read.concatenate(end).batch(count).take(1).get_single_element()
    images = self._none_missing(images, rows, paths)
    images = self._none_large(images, sides, paths)
    return images if self.resize else self._all_fit(images, sizes, paths)

  def _blank(self) -> tf.Tensor:
    return tf.zeros([*self.image_size, self.channels], tf.uint8)

  def _read(self, path: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns an image of `image_size`, its sides as its header has them, and as decoded.

    The image is blank if it is too large, as tf.io.decode_image trusts the header: 50 bytes can
    make it take 12 GB. It is also blank if it must be resized, but `resize` is False.
    """
    content, sides = image_headers.first_image(tf.io.read_file(path))

    def decoded() -> tuple[tf.Tensor, tf.Tensor]:
      image = tf.io.decode_image(content, self.channels, expand_animations=False)
      size = tf.shape(image, tf.int64)[:2]
      if self.resize:
        return _resized(image, self.image_size), size
      return tf.cond(tf.reduce_all(size == self.image_size), lambda: image, self._blank), size

    small = self._bytes(sides) <= self.max_bytes
    image, size = tf.cond(small, decoded, lambda: (self._blank(), sides))
    return image, sides, size

  def _bytes(self, sides: tf.Tensor) -> tf.Tensor:
    return tf.reduce_prod(sides, axis=-1) * self.channels

  def _none_missing(self, images: tf.Tensor, rows: tf.Tensor, paths: tf.Tensor) -> tf.Tensor:
    there = rows == tf.range(tf.size(rows, tf.int64))
    message = [_first(paths, ~there), f" cannot be read as an image of {self.channels} channels; "]
    message.append("remove it, or replace it by a complete JPEG, PNG, GIF or BMP file.")
    return require(tf.reduce_all(there), images, message)

  def _none_large(self, images: tf.Tensor, sides: tf.Tensor, paths: tf.Tensor) -> tf.Tensor:
    large = self._bytes(sides) > self.max_bytes
    needed = tf.strings.as_string(_first(self._bytes(sides), large))
    message = [_first(paths, large), " is ", _shown(_first(sides, large))]
    message += [" (height x width) and would take ", needed, " bytes, but max_bytes is "]
    message.append(
      f"{self.max_bytes:,}; raise it if you trust the file, or make the image smaller."
    )
    return require(~tf.reduce_any(large), images, message)

  def _all_fit(self, images: tf.Tensor, sizes: tf.Tensor, paths: tf.Tensor) -> tf.Tensor:
    other = tf.reduce_any(sizes != self.image_size, axis=1)
    message = [
      _first(paths, other),
      " is ",
      _shown(_first(sizes, other)),
      " (height x width), not ",
    ]
    message += ["x".join(map(str, self.image_size)), "; set resize=True or correct image_size."]
    return require(~tf.reduce_any(other), images, message)


@may_change(READS)
class StreamSource:
  """Your own `tf.data.Dataset`, read in its own order.

  It must yield the same examples in each iteration: seed its shuffle. Training repeats it. It
  cannot be indexed, so a resumed run skips the examples already read, which takes as long as
  reading them; the log gives the time. "example_id" counts within one pass.

  Attributes:
    num_examples: the length of a pass; None if it is not known.
    endless: whether a pass is known to have no end. That of a generator is not known.
  """

  def __init__(self, *, dataset: tf.data.Dataset, num_examples: int | None = None) -> None:
    """Checks the types of the elements without reading them.

    Args:
      dataset: yields one example at a time: a flat dict of dense tensors of static shapes.
      num_examples: the length of a pass; None for the whole dataset. Evaluation of an endless
        dataset needs it.

    Raises:
      ConfigError: not a dataset of such dicts, a reserved name, a "weight" that is not a float32
        scalar, an empty dataset, or one known to have fewer than `num_examples`.
    """
    if not isinstance(dataset, tf.data.Dataset):
      raise ConfigError(f"dataset is {kind(dataset)}; it must be a tf.data.Dataset.")
    check_elements(dataset.element_spec)
    if num_examples is not None:
      require_integer("num_examples", num_examples, at_least=1)
    known = int(dataset.cardinality())
    if known == 0:
      raise ConfigError("the stream's dataset is empty; it must yield at least one example.")
    if num_examples is not None and 0 < known < num_examples:
      raise ConfigError(
        f"num_examples is {num_examples}, but the stream's dataset has {known} examples; "
        "remove num_examples, or lower it."
      )
    self.endless = num_examples is None and _is_endless(dataset)
    self.dataset = dataset if num_examples is None else dataset.take(num_examples)
    self.num_examples = num_examples or (known if known > 0 else None)


def check_source(source: object) -> None:
  """Raises a ConfigError unless `source` is a `Source` with examples, or a `StreamSource`."""
  if not isinstance(source, Source | StreamSource):
    remedy = "StreamSource(dataset=...)" if isinstance(source, tf.data.Dataset) else "ArraySource"
    raise ConfigError(f"the source is {kind(source)}; it must be a Source: wrap it in {remedy}.")
  if isinstance(source, Source):
    count = getattr(source, "num_examples", None)
    require_integer(f"{type(source).__name__}.num_examples", count, at_least=1)


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


def _is_endless(dataset: tf.data.Dataset) -> bool:
  """Whether a data set is known to be endless, also behind steps that hide it, such as a filter."""
  known = int(dataset.cardinality())
  if known != tf.data.UNKNOWN_CARDINALITY:
    return known == tf.data.INFINITE_CARDINALITY
  kind_of_step, parts = type(dataset).__name__, dataset._inputs()  # noqa: SLF001
  if "Take" in kind_of_step or not parts:
    return False
  ends_early = "Zip" in kind_of_step or "DirectedInterleave" in kind_of_step
  return (all if ends_early else any)(map(_is_endless, parts))


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


# ---- Files ----


def read_idx(path: str, *, max_bytes: int = bounded.MAX_BYTES) -> np.ndarray:
  """Reads a file in MNIST's idx format, plain or gzipped; returns it in native byte order (host).

  The format: http://yann.lecun.com/exdb/mnist.

  Args:
    path: of the file.
    max_bytes: the most memory that the array may take.

  Raises:
    ConfigError: no such file, not a complete idx file, or an array above `max_bytes`.
  """
  with bounded.Reader(path, "an idx file", _AGAIN, unpack=True) as file:
    return _idx(file, max_bytes)


@may_change(READS)
def load_arrays(path: str, *, max_bytes: int = bounded.MAX_BYTES) -> dict[str, np.ndarray]:
  """Loads an .npz file, or a folder of .npy files, as name -> array, for `ArraySource` (host).

  An .npz is read into memory. The .npy files of a folder are memory-mapped, so they may be larger
  than memory.

  Args:
    path: of the file or folder.
    max_bytes: the most memory that the arrays of an .npz may take.

  Raises:
    ConfigError: no such file or folder, no arrays, damaged files, arrays of Python objects, or an
      .npz above `max_bytes`.
  """
  if os.path.isdir(path):
    names = sorted(name for name in os.listdir(path) if name.endswith(".npy"))
    arrays = {name.removesuffix(".npy"): _mapped(os.path.join(path, name)) for name in names}
  elif path.endswith(".npz"):
    arrays = _unzipped(path, max_bytes)
  else:
    raise ConfigError(f"{path!r} is neither an .npz file nor a folder of .npy files; correct it.")
  if not arrays:
    raise ConfigError(f"{path!r} has no arrays; it must be an .npz file or a folder of .npy files.")
  return arrays


def _idx(file: bounded.Reader, max_bytes: int) -> np.ndarray:
  head = file.read(4)
  if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_DTYPES:
    raise ConfigError(
      f"{file.path!r} is not an idx file: it begins with {head.hex(' ') or 'nothing'}, not with "
      "00 00, a type and a number of axes; download it again."
    )
  dtype, axes = np.dtype(_IDX_DTYPES[head[2]]), head[3]
  sides = file.read(4 * axes)
  begins = 4 + 4 * axes
  if len(sides) < 4 * axes:
    raise _not_as_implied(file.path, 4 + len(sides), f"at least {begins}")
  shape = tuple(map(int, np.frombuffer(sides, ">u4")))
  implied = begins + math.prod(shape) * dtype.itemsize
  if file.size not in (None, implied):
    raise _not_as_implied(file.path, f"{file.size}", implied)
  bounded.require_bytes(file.path, implied, max_bytes)
  with bounded.reading(file.path, _AGAIN):
    array = np.empty(shape, dtype)
  there = begins + file.read_into(array.reshape(-1).view(np.uint8).data)
  if there != implied or file.read(1):
    raise _not_as_implied(file.path, there if there != implied else f"more than {there}", implied)
  return array.astype(dtype.newbyteorder("="), copy=False)


def _not_as_implied(path: str, size: int | str, implied: int | str) -> ConfigError:
  return ConfigError(
    f"{path!r} has {size} bytes, but its header implies {implied}; it is truncated or damaged: "
    "download it again."
  )


def _mapped(path: str) -> np.ndarray:
  bounded.require_file(path, "an .npy file")
  with bounded.reading(path, _SAVE):
    array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
  if not isinstance(array, np.memmap):
    raise ConfigError(f"{path!r} is not an .npy file; save it again with numpy.")
  return array


def _unzipped(path: str, max_bytes: int) -> dict[str, np.ndarray]:
  bounded.require_file(path, "an .npz file")
  members = bounded.require_archive(path, max_bytes, _SAVE)
  if any(each.compress_type not in _NUMPY_COMPRESSION for each in members):
    raise ConfigError(f"{path!r} is compressed in a way that numpy does not use; {_SAVE}.")
  with bounded.reading(path, _SAVE), np.load(path, allow_pickle=False) as archive:
    arrays: dict[str, np.ndarray] = {name: np.asarray(archive[name]) for name in archive.files}
  needed = sum(array.size * (array.itemsize + _overhead(array)) for array in arrays.values())
  bounded.require_bytes(path, needed, max_bytes)
  return arrays


def _overhead(array: np.ndarray) -> int:
  """Returns the bytes that TensorFlow adds to each element."""
  return 24 if array.dtype.kind in "SU" else 0


def _class_folders(directory: str) -> list[str]:
  if not os.path.isdir(directory):
    raise ConfigError(
      f"{directory!r} is not a folder; give a folder that holds one folder per class."
    )
  entries = [entry for entry in os.scandir(directory) if entry.is_dir()]
  names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
  if not names:
    raise ConfigError(f"{directory!r} has no folders in it; it must hold one folder per class.")
  return names


def _labelled_files(
  directory: str, class_names: Sequence[str], max_bytes: int
) -> tuple[list[bytes], list[int]]:
  paths, labels = [], []
  for label, name in enumerate(class_names):
    files = _image_files(os.path.join(directory, name), max_bytes)
    if not files:
      logging.warning("the class folder %r has no images", os.path.join(directory, name))
    paths += files
    labels += [label] * len(files)
  if not paths:
    raise ConfigError(
      f"the {len(class_names)} class folders of {directory!r} have no images; add files that end "
      f"in {', '.join(IMAGE_SUFFIXES)}."
    )
  return paths, labels


def _image_files(folder: str, max_bytes: int) -> list[bytes]:
  entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
  for entry in sorted(entries, key=lambda entry: entry.name):
    if not entry.name.lower().endswith(IMAGE_SUFFIXES):
      raise ConfigError(
        f"{entry.path!r} is not an image; a class folder may only hold files that end in "
        f"{', '.join(IMAGE_SUFFIXES)}: move it away."
      )
    bounded.require_bytes(entry.path, bounded.require_file(entry.path, "an image"), max_bytes)
  return sorted(os.fsencode(entry.path) for entry in entries)


def _first(values: tf.Tensor, where: tf.Tensor) -> tf.Tensor:
  """Returns the first of the values [n, ...] for which `where`, bool [n], holds."""
  return values[tf.argmax(where)]


def _shown(sides: tf.Tensor) -> tf.Tensor:
  return tf.strings.reduce_join(tf.strings.as_string(sides), separator="x")


def _resized(image: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
  """Returns uint8 [*size, channels]; the operations of tf.image.resize without its preparations."""
  images, sides = image[tf.newaxis], tf.constant(size, tf.int32)
  resized = tf.cond(
    tf.reduce_all(tf.shape(image)[:2] >= sides),
    lambda: tf.raw_ops.ResizeArea(images=images, size=sides),
    lambda: tf.raw_ops.ResizeBilinear(images=images, size=sides, half_pixel_centers=True),
  )
  return tf.saturate_cast(tf.round(resized[0]), tf.uint8)
