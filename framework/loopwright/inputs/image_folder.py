"""Image files, one folder per class."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from loopwright.errors import ConfigError, is_integer
from loopwright.graphs.aliases import Batch
from loopwright.graphs.autograph import as_written
from loopwright.host import bounded
from loopwright.inputs.checks import require
from loopwright.inputs.sources import READS, ArraySource, Source
from loopwright.options.declaration import may_change

_KINDS = {1: "JPEG or PNG", 3: "JPEG, PNG, GIF or BMP", 4: "PNG or BMP"}
"""What TensorFlow decodes to so many channels."""
IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png")


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
    class_names: Sequence[str] | None = None,
    channels: int = 3,
    resize: bool = True,
  ) -> None:
    """Lists the files without reading them.

    Args:
      directory: holds one folder per class. A class folder may be empty.
      image_size: (height, width) of the images that it yields, in pixels.
      class_names: the classes in the order of their labels, also those without a folder here; None
        for the folders, sorted. Give it where a split may lack a class.
      channels: 1 (JPEG and PNG only), 3 or 4 (PNG and BMP only); images are converted.
      resize: True resizes every image to `image_size`, without keeping its aspect ratio: by area
        averaging if both sides shrink (no aliasing), else bilinear. False makes another size an
        error.

    Raises:
      ConfigError: no such folder, no class folders, no images, a file whose suffix is not that of a
        JPEG, PNG, GIF or BMP, or a wrong argument.
    """
    sides = tuple(image_size) if isinstance(image_size, Sequence) else (image_size,)
    if len(sides) != 2 or not all(is_integer(side, at_least=1) for side in sides):
      raise ConfigError(f"image_size is {image_size!r}; it must be (height, width) in pixels.")
    if channels not in _KINDS:
      raise ConfigError(f"channels is {channels!r}; it must be 1 (grey), 3 (RGB) or 4 (RGBA).")
    self.image_size, self.channels, self.resize = sides, channels, resize
    folders = _class_folders(directory)
    self.class_names = folders if class_names is None else [*class_names]
    if others := sorted({*folders} - {*self.class_names}):
      raise ConfigError(
        f"{directory!r} has the folder {others[0]!r}, which is none of class_names; add it there, "
        "or move it away."
      )
    self.numbered = {"label": self.class_names}
    paths, labels = _labelled_files(directory, self.class_names)
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
    end = tf.data.Dataset.from_tensors((count, self._blank(), tf.zeros([2], tf.int64)))
    rows, images, sizes = read.concatenate(end).batch(count).take(1).get_single_element()
    images = self._none_missing(images, rows, paths)
    return images if self.resize else self._all_fit(images, sizes, paths)

  def _blank(self) -> tf.Tensor:
    return tf.zeros([*self.image_size, self.channels], tf.uint8)

  def _read(self, path: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns an image of `image_size`, blank if it must not be resized to it, and its own size."""
    image = tf.io.decode_image(tf.io.read_file(path), self.channels, expand_animations=False)
    size = tf.shape(image, tf.int64)[:2]
    if self.resize:
      return _resized(image, self.image_size), size
    return tf.cond(tf.reduce_all(size == self.image_size), lambda: image, self._blank), size

  def _none_missing(self, images: tf.Tensor, rows: tf.Tensor, paths: tf.Tensor) -> tf.Tensor:
    there = rows == tf.range(tf.size(rows, tf.int64))
    message = [_first(paths, ~there), f" cannot be read as an image of {self.channels} channels; "]
    message.append(f"remove it, or replace it by a complete {_KINDS[self.channels]} file.")
    return require(tf.reduce_all(there), images, message)

  def _all_fit(self, images: tf.Tensor, sizes: tf.Tensor, paths: tf.Tensor) -> tf.Tensor:
    other = tf.reduce_any(sizes != self.image_size, axis=1)
    message = [_first(paths, other), " is ", _shown(_first(sizes, other))]
    wanted = "x".join(map(str, self.image_size))
    message.append(f" (height x width), not {wanted}; set resize=True or correct image_size.")
    return require(~tf.reduce_any(other), images, message)


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


def _labelled_files(directory: str, class_names: Sequence[str]) -> tuple[list[bytes], list[int]]:
  paths, labels = [], []
  for label, name in enumerate(class_names):
    folder = os.path.join(directory, name)
    files = _image_files(folder) if os.path.isdir(folder) else []
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


def _image_files(folder: str) -> list[bytes]:
  entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
  for entry in sorted(entries, key=lambda entry: entry.name):
    if not entry.name.lower().endswith(IMAGE_SUFFIXES):
      raise ConfigError(
        f"{entry.path!r} is not an image; a class folder may only hold files that end in "
        f"{', '.join(IMAGE_SUFFIXES)}: move it away."
      )
    bounded.require_file(entry.path, "an image")
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
