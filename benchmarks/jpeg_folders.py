"""Images a second from folders of JPEG files, augmented: Loopwright beside Keras and tf.data.

  python -m benchmarks.jpeg_folders                  # about 3 minutes

Makes files of 256x256 to 500x375 pixels with texture in a temporary folder. Each contender reads
them in random order, decodes, resizes to 160x160, flips half of them, moves them by at most 8
pixels, and gives batches in float32 of [0, 1]. Loopwright shrinks by area averaging; Keras's
default is bilinear, which reads fewer pixels and aliases; by hand there are both. They take turns;
before each turn it makes a new iterator and reads some batches, untimed. A ratio is the median
[quartiles] over the rounds of Loopwright's images a second over those of the other.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from benchmarks import turns
from loopwright.inputs.datasets import train_dataset
from loopwright.inputs.image_folder import ImageFolderSource
from loopwright.tasks.image_classification import ImageClassification, ImageData

SIDE, SHIFT, CLASSES = 160, 8, 10
LOOPWRIGHT = "**Loopwright**"
Maker = Callable[[Path, int], tf.data.Dataset]


def make_files(folder: Path, count: int) -> None:
  """Writes JPEG files <class>/<number>.jpg of some 20 to 60 kB."""
  rng = np.random.default_rng(0)
  textures = [_texture(rng) for _ in range(16)]
  for number in range(count):
    height, width = rng.integers([256, 256], [376, 501])
    top, left = rng.integers([0, 0], [600 - height, 600 - width])
    image = textures[number % len(textures)][top : top + height, left : left + width]
    path = folder / str(number % CLASSES) / f"{number:05}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tf.io.encode_jpeg(image, quality=90).numpy())


def _texture(rng: np.random.Generator) -> np.ndarray:
  """Returns uint8 [600, 600, 3]: noise of several scales, the fine ones weaker, as in photos."""
  image = np.full([600, 600, 3], 128.0)
  for scale in (1, 2, 5, 20, 100):
    coarse = rng.normal(size=[600 // scale, 600 // scale, 3])
    image += 6 * scale**0.5 * coarse.repeat(scale, axis=0).repeat(scale, axis=1)
  return np.clip(image, 0, 255).astype(np.uint8)


def _loopwright(folder: Path, batch_size: int) -> tf.data.Dataset:
  source = ImageFolderSource(directory=str(folder), image_size=(SIDE, SIDE))
  shape = (SIDE, SIDE, 3)
  data = ImageData(sources={"train": source}, image_shape=shape, labels=CLASSES)
  task = ImageClassification(data=data, input_shape=shape, flip=True, shift=SHIFT)
  return train_dataset(source, global_batch_size=batch_size, preprocess=task.preprocess)


def _keras(folder: Path, batch_size: int) -> tf.data.Dataset:
  """As Keras's guides do it."""
  part = SHIFT / SIDE
  layers = keras.Sequential([
    keras.layers.RandomFlip("horizontal"),
    keras.layers.RandomTranslation(part, part, fill_mode="constant"),
    keras.layers.Rescaling(1 / 255),
  ])  # fmt: skip
  images = _from_directory(folder, batch_size)
  mapped = images.map(
    lambda image, label: (layers(image, training=True), label), num_parallel_calls=tf.data.AUTOTUNE
  )
  return mapped.repeat().prefetch(tf.data.AUTOTUNE)


def _keras_with_tf_image(folder: Path, batch_size: int) -> tf.data.Dataset:
  def augmented(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return _moved_and_flipped(image / 255.0), label

  images = _from_directory(folder, batch_size).unbatch()
  mapped = images.map(augmented, num_parallel_calls=tf.data.AUTOTUNE)
  return mapped.repeat().batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def _from_directory(folder: Path, batch_size: int) -> tf.data.Dataset:
  return keras.utils.image_dataset_from_directory(
    str(folder), image_size=(SIDE, SIDE), batch_size=batch_size, verbose=False
  )


def _by_hand(decode: Callable[[tf.Tensor], tf.Tensor]) -> Maker:
  """A pipeline of single images, as tf.data's performance guide has it."""

  def make(folder: Path, batch_size: int) -> tf.data.Dataset:
    files = sorted(folder.glob("*/*.jpg"))
    labels = [int(path.parent.name) for path in files]
    listed = tf.data.Dataset.from_tensor_slices(([*map(str, files)], labels))
    mapped = listed.shuffle(len(files)).repeat().map(
      lambda path, label: (decode(tf.io.read_file(path)), label),
      num_parallel_calls=tf.data.AUTOTUNE, deterministic=False,
    )  # fmt: skip
    return mapped.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

  return make


def _resized(method: str) -> Callable[[tf.Tensor], tf.Tensor]:
  def decoded(content: tf.Tensor) -> tf.Tensor:
    image = tf.image.resize(tf.io.decode_jpeg(content, channels=3), [SIDE, SIDE], method)
    return _moved_and_flipped(image / 255.0)

  return decoded


def _cropped(content: tf.Tensor) -> tf.Tensor:
  """Moves by decoding a random window of 9/10 of each side, the rest of which is never decoded."""
  sides = tf.io.extract_jpeg_shape(content)[:2]
  window = sides * 9 // 10
  begin = [tf.random.uniform([], 0, sides[i] - window[i] + 1, tf.int32) for i in range(2)]
  image = tf.io.decode_and_crop_jpeg(content, tf.concat([begin, window], 0), channels=3)
  return tf.image.random_flip_left_right(tf.image.resize(image, [SIDE, SIDE]) / 255.0)


def _moved_and_flipped(image: tf.Tensor) -> tf.Tensor:
  padded = tf.image.pad_to_bounding_box(image, SHIFT, SHIFT, SIDE + 2 * SHIFT, SIDE + 2 * SHIFT)
  return tf.image.random_flip_left_right(tf.image.random_crop(padded, [SIDE, SIDE, 3]))


MAKERS: dict[str, Maker] = {
  LOOPWRIGHT: _loopwright,
  "`image_dataset_from_directory`, Keras layers": _keras,
  "`image_dataset_from_directory`, `tf.image`": _keras_with_tf_image,
  "tf.data by hand, `area`": _by_hand(_resized("area")),
  "tf.data by hand, `bilinear`": _by_hand(_resized("bilinear")),
  "tf.data by hand, `decode_and_crop_jpeg`": _by_hand(_cropped),
}


def reader(dataset: tf.data.Dataset) -> Callable[[Iterator[Any], int], float]:
  """Returns a function that reads batches inside TensorFlow and uses a value of each."""

  def read(iterator: Any, number: tf.Tensor) -> tf.Tensor:
    total = tf.constant(0.0)
    for _ in tf.range(number):
      total += tf.nest.flatten(next(iterator))[_place_of_image(dataset)][0, 0, 0, 0]
    return total

  compiled = tf.function(read)
  return lambda iterator, number: float(compiled(iterator, tf.constant(number)))


def _place_of_image(dataset: tf.data.Dataset) -> int:
  ranks = [spec.shape.rank for spec in tf.nest.flatten(dataset.element_spec)]
  return ranks.index(4)


def measure(folder: Path, batch_size: int, rounds: int, batches: int) -> turns.Times:
  """Returns the seconds of `batches` batches of each contender in each round."""
  datasets = {name: make(folder, batch_size) for name, make in MAKERS.items()}
  readers = {name: reader(dataset) for name, dataset in datasets.items()}
  iterators: dict[str, Iterator[Any]] = {}

  def begin(name: str) -> None:
    iterators.clear()  # ends the last one's threads
    iterators[name] = iter(datasets[name])
    readers[name](iterators[name], batches // 2)

  def block(name: str) -> Callable[[], object]:
    return lambda: readers[name](iterators[name], batches)

  return turns.seconds({name: block(name) for name in datasets}, rounds, before=begin)


def report(times: turns.Times, images: int) -> str:
  """Returns a table, of rounds of so many images."""
  lines = ["|  | images/s | Loopwright's rate over it |", "| --- | --- | --- |"]
  for name in times:
    rate = images / np.median(times[name])
    lines.append(f"| {name} | {rate:.0f} | {turns.ratio(times, LOOPWRIGHT, name)} |")
  return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
  """Makes the files, measures, prints the table."""
  parser = argparse.ArgumentParser(prog="python -m benchmarks.jpeg_folders", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("--files", type=int, default=2000)
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--batch_size", type=int, default=64)
  parser.add_argument("--images", type=int, default=1280, help="timed in each turn")
  options = parser.parse_args(arguments)
  size, batches = options.batch_size, options.images // options.batch_size
  with tempfile.TemporaryDirectory() as name:
    make_files(Path(name), options.files)
    bytes_in_all = sum(path.stat().st_size for path in Path(name).rglob("*.jpg"))
    times = measure(Path(name), size, options.rounds, batches)
  each = bytes_in_all / options.files / 1000
  print(
    f"{options.files} files of {each:.0f} kB on average, batch {size}, {os.cpu_count()} cores\n"
  )
  print(report(times, batches * size))
  return 0


if __name__ == "__main__":
  sys.exit(main())
