"""Pictures, distributions and texts of a run, for TensorBoard and as files."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError, kind, shown
from loopwright.graphs.aliases import TensorLike
from loopwright.host import files
from loopwright.run_folder import layout

MOST_PIXELS = 2**26
"""Of one picture, after its images are put side by side."""
_IMAGE_SIDE, _GRID_SIDE = 128, 1024
"""Pixels up to which a small image is enlarged."""
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*")


class Board:
  """Shows pictures, distributions and texts of the current step (host).

  TensorBoard gets each under its name; <model_dir>/media gets the file <name>-<step>.png, .npz or
  .txt, written whole or not at all. A step that is repeated, as after a restart, replaces it.
  Every worker of a cluster may call it; only the chief writes.

  Attributes:
    metrics: those of the evaluation or training loop after which `Show` acts: name -> number, or
      an array as nested lists; the same on all workers.
    pictures: (name, step, path) of the PNG files that this process has written.
  """

  def __init__(
    self,
    model_dir: str | None = None,
    *,
    step: Callable[[], int] = lambda: 0,
    writer: Callable[[], tf.summary.SummaryWriter] | None = None,
    message: Callable[[str], None] = print,
  ) -> None:
    """Writes nothing yet.

    Args:
      model_dir: the run folder; None checks what it gets and writes nothing.
      step: returns the number of completed training steps.
      writer: returns where TensorBoard's part goes; None for nowhere.
      message: prints a warning for the user.
    """
    self._model_dir, self._step, self._message = model_dir, step, message
    self._writer = writer or tf.summary.create_noop_writer
    self._warned: set[str] = set()
    self.metrics: Mapping[str, object] = {}
    self.pictures: list[tuple[str, int, str]] = []

  def image(self, name: str, image: TensorLike) -> None:
    """Shows one image, or several in a grid that is about as wide as high, in row order.

    Small ones are enlarged by a whole factor, to at most 128 pixels a side and 1024 of the grid.

    Args:
      name: letters, digits, "_", "-", "." and "/".
      image: [h, w, c] or [n, h, w, c], c = 1, 3 or 4. Floats are from 0 to 1, integers from 0 to
        255. Values out of range are clipped, and those that are not finite become 0, with a line.

    Raises:
      ConfigError: another shape or dtype, a wrong name, or more than 2**26 pixels.
    """
    pixels = self._pixels(name, _array(image))
    text = tf.io.encode_png(pixels).numpy()
    if path := self._write(name, "png", text):
      self.pictures.append((name, self._step(), path))
    with self._writer().as_default(step=np.int64(self._step())):
      tf.summary.image(name, pixels[np.newaxis])

  def histogram(self, name: str, values: TensorLike, *, bins: int = 30) -> None:
    """Shows how values are distributed.

    The file has counts [bins], edges [bins + 1], mean, deviation, min, max, and how many values
    were not finite, which are left out: `np.load(file)["counts"]`.

    Args:
      name: see `image`.
      values: numbers or bools, of any shape; not empty.
      bins: intervals of equal width from the smallest to the largest value.

    Raises:
      ConfigError: no numbers, or a wrong name.
    """
    array = self._numbers(name, "histogram", _array(values)).astype(np.float64).ravel()
    finite = array[np.isfinite(array)]
    bad = array.size - finite.size
    if bad:
      self._warn(name, f"has {bad:,} of {array.size:,} values that are not finite; left out")
    if not finite.size:
      return
    counts, edges = np.histogram(finite, bins=bins)
    content = io.BytesIO()
    np.savez(
      content, counts=counts, edges=edges, mean=finite.mean(), deviation=finite.std(),
      min=finite.min(), max=finite.max(), not_finite=bad,
    )  # fmt: skip
    self._write(name, "npz", content.getvalue())
    with self._writer().as_default(step=np.int64(self._step())):
      tf.summary.histogram(name, finite, buckets=bins)

  def text(self, name: str, text: str) -> None:
    """Shows a text; TensorBoard reads it as Markdown.

    Args:
      name: see `image`.
      text: what to show.

    Raises:
      ConfigError: not a text, or a wrong name.
    """
    _check_name(name)
    if not isinstance(text, str):
      raise ConfigError(f"text {name!r} is {kind(text)}; it must be a str.")
    self._write(name, "txt", text.encode())
    with self._writer().as_default(step=np.int64(self._step())):
      tf.summary.text(name, np.array(text))

  def _write(self, name: str, suffix: str, content: bytes) -> str:
    """Writes a file, on the chief; returns its path, or ""."""
    if self._model_dir is None:
      return ""
    path = os.path.join(self._model_dir, layout.MEDIA, f"{name}-{self._step()}.{suffix}")
    tf.io.gfile.makedirs(os.path.dirname(path))
    files.atomic_write(path, content)
    return path

  def _pixels(self, name: str, image: np.ndarray) -> np.ndarray:
    """Returns uint8 [h, w, c]."""
    self._numbers(name, "image", image)
    if image.ndim not in (3, 4) or image.shape[-1] not in (1, 3, 4):
      raise ConfigError(
        f"image {name!r} has shape {image.shape}; it must be [h, w, c] or [n, h, w, c] with c = 1, "
        "3 or 4: give gray images their last axis by [..., np.newaxis]."
      )
    images = image if image.ndim == 4 else image[np.newaxis]
    columns = math.ceil(math.sqrt(len(images)))
    rows = -(-len(images) // columns)
    if rows * columns * images[0].size > MOST_PIXELS * images.shape[-1]:
      raise ConfigError(
        f"image {name!r} has shape {image.shape}, which is more than {MOST_PIXELS:,} pixels; show "
        "fewer or smaller ones."
      )
    images = self._bytes(name, images)
    missing = np.zeros([rows * columns - len(images), *images.shape[1:]], np.uint8)
    grid = np.concatenate([images, missing]).reshape([rows, columns, *images.shape[1:]])
    height, width, channels = images.shape[1:]
    grid = grid.transpose(0, 2, 1, 3, 4).reshape([rows * height, columns * width, channels])
    scale = min(_IMAGE_SIDE // max(height, width), _GRID_SIDE // max(grid.shape[:2]))
    return grid.repeat(max(1, scale), axis=0).repeat(max(1, scale), axis=1)

  def _bytes(self, name: str, images: np.ndarray) -> np.ndarray:
    """Returns uint8 of the same shape."""
    if images.dtype == bool:
      return images.astype(np.uint8) * 255
    whole = images.dtype.kind in "iu"
    most = 255 if whole else 1
    bad = images.size - np.count_nonzero(np.isfinite(images))
    if bad:
      self._warn(name, f"has {bad:,} of {images.size:,} values that are not finite; drawn as 0")
      images = np.where(np.isfinite(images), images, 0)
    low, high = images.min(), images.max()
    if low < -1e-3 * most or high > 1.001 * most:
      self._warn(name, f"has values from {low:.4g} to {high:.4g}; clipped to 0 to {most}")
    clipped = np.clip(images, 0, most)
    return clipped.astype(np.uint8) if whole else np.rint(clipped * 255.0).astype(np.uint8)

  def _numbers(self, name: str, what: str, array: np.ndarray) -> np.ndarray:
    _check_name(name)
    if array.dtype.kind not in "biuf" or not array.size:
      raise ConfigError(
        f"{what} {name!r} is of type {array.dtype} and shape {array.shape}; it must be an array of "
        "numbers, not empty."
      )
    return array

  def _warn(self, name: str, fault: str) -> None:
    """Prints a line about a name once."""
    if self._model_dir is not None and name not in self._warned:
      self._warned.add(name)
      self._message(f"warning: {name!r} at step {self._step()} {fault}")


def _array(values: TensorLike) -> np.ndarray:
  """Returns a NumPy array; bfloat16, which NumPy does not compute with, as float32."""
  array = np.asarray(values.numpy() if hasattr(values, "numpy") else values)
  return array.astype(np.float32) if array.dtype.kind == "V" else array


def _check_name(name: object) -> None:
  if not isinstance(name, str) or not _NAME.fullmatch(name):
    raise ConfigError(
      f"{shown(name)} is not a name for the board; use letters, digits, '_', '-', '.' and '/', "
      "such as 'samples/first'."
    )
