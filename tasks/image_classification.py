"""Image classification by an MLP or a CNN: scikit-learn's digits, Fashion-MNIST, image folders.

import loopwright.tasks.image_classification
run.task = @ImageClassification()
ImageClassification.data = @digits()
ImageClassification.network = @cnn
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import loopwright
from loopwright import ArraySource, Batch, ConfigError, Loss, Source, Task
from loopwright.metrics import Weighted, weighted_sum

_LARGE = 2**14
"""Numbers in an image from which one by one is faster: a gather copies pixel by pixel."""
DEBIAN_FASHION_MNIST = "/usr/share/datasets/fashion-mnist"
_IDX = {
  "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
  "eval": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageData:
  """Labelled images: sources of "image" uint8 [n, height, width, channels] and "label" int32 [n].

  Attributes:
    sources: "train" and "eval" -> source.
    image_shape: (height, width, channels).
    labels: the labels are 0 .. labels - 1.
  """

  sources: Mapping[str, Source]
  image_shape: tuple[int, ...]
  labels: int

  def source(
    self, split: str, *, task: str, input_shape: tuple[int, ...], classes: int | None = None
  ) -> Source:
    """Returns the source of a split, after checking it against the task's options.

    Args:
      split: "train" or "eval".
      task: its name in configs.
      input_shape: the required shape of an image.
      classes: labels must be below it; None allows any.

    Raises:
      ConfigError: shape or labels do not fit.
    """
    if self.image_shape != input_shape:
      raise ConfigError(
        f"the images have shape {self.image_shape} but {task}.input_shape is {input_shape}; make "
        "them equal."
      )
    if classes is not None and self.labels > classes:
      raise ConfigError(
        f"the data has label {self.labels - 1}, but {task}.classes is {classes}; set it to at "
        f"least {self.labels}, or correct the labels."
      )
    return self.sources[split]


@loopwright.register
def digits(
  *, eval_fraction: float = 0.2, seed: int = 0, train_examples: int | None = None
) -> ImageData:
  """The 1,797 8x8 digits inside scikit-learn, split at random into train and eval.

  Args:
    eval_fraction: share of the eval split.
    seed: of the split.
    train_examples: number of training examples to use; more only adds to those of a smaller number.
      None uses all.

  Raises:
    ConfigError: a number is out of its range.
  """
  if not 0 < eval_fraction < 1:
    raise ConfigError(f"digits.eval_fraction is {eval_fraction}; it must be between 0 and 1.")
  pixels, labels = _digits()
  images = np.rint(pixels * (255 / 16)).astype(np.uint8)[..., np.newaxis]
  order = np.random.default_rng(seed).permutation(len(images))
  first = round(len(images) * eval_fraction)
  there = len(order) - first
  if train_examples is not None and not 0 < train_examples <= there:
    raise ConfigError(
      f"digits.train_examples is {train_examples}; it must be from 1 to {there}, or None for all."
    )
  parts = {"eval": order[:first], "train": order[first:][:train_examples]}
  return _in_memory({split: (images[rows], labels[rows]) for split, rows in parts.items()})


def _digits() -> tuple[np.ndarray, np.ndarray]:
  """Returns pixels [n, 8, 8] from 0 to 16, and labels; importing scikit-learn takes a second."""
  package = importlib.metadata.distribution("scikit-learn")
  file = package.locate_file("sklearn/datasets/data/digits.csv.gz")
  table = np.loadtxt(str(file), dtype=np.int64, delimiter=",")
  return table[:, :-1].reshape(-1, 8, 8), table[:, -1]


@loopwright.register
def fashion_mnist(*, directory: str | None = None) -> ImageData:
  """The 60,000 + 10,000 28x28 images of Fashion-MNIST.

  Args:
    directory: folder of its four idx files, plain or .gz. None uses Debian's package
      dataset-fashion-mnist if it is installed, otherwise Keras's download.
  """
  if directory is None and not os.path.isdir(DEBIAN_FASHION_MNIST):
    return _downloaded_fashion_mnist()
  folder = directory or DEBIAN_FASHION_MNIST
  arrays = {
    split: (_read(folder, images), _read(folder, labels))
    for split, (images, labels) in _IDX.items()
  }
  return _in_memory(
    {split: (images[..., None], labels) for split, (images, labels) in arrays.items()}
  )


@loopwright.register
def image_folder(
  *,
  train: str,
  eval: str,
  image_size: Sequence[int],
  class_names: Sequence[str] | None = None,
  channels: int = 3,
  resize: bool = True,
) -> ImageData:
  """Two folders of <class>/<image> files; see `ImageFolderSource`.

  The classes are those of `train` unless they are given; `eval` may lack some of them.
  """
  made: dict[str, loopwright.ImageFolderSource] = {}
  for split, directory in (("train", train), ("eval", eval)):
    made[split] = loopwright.ImageFolderSource(
      directory=directory,
      image_size=tuple(image_size),
      class_names=class_names,
      channels=channels,
      resize=resize,
    )
    class_names = made[split].class_names
  return ImageData(
    sources=made, image_shape=(*image_size, channels), labels=len(made["train"].class_names)
  )


@loopwright.register
def mlp(
  *, input_shape: Sequence[int], classes: int, units: Sequence[int] = (128,), dropout: float = 0.0
) -> keras.Model:
  """Dense layers with ReLU, then logits."""
  layers: list[Any] = [keras.Input(tuple(input_shape)), keras.layers.Flatten()]
  for width in units:
    layers += [keras.layers.Dense(width, activation="relu"), keras.layers.Dropout(dropout)]
  return keras.Sequential([*layers, _logits(classes)], name="mlp")


@loopwright.register
def cnn(
  *,
  input_shape: Sequence[int],
  classes: int,
  filters: Sequence[int] = (32, 64),
  units: int = 128,
  activation: str = "relu",
  dropout: float = 0.0,
) -> keras.Model:
  """Blocks of 3x3 convolution, activation and 2x2 max pooling; then a dense layer and logits."""
  layers: list[Any] = [keras.Input(tuple(input_shape))]
  for width in filters:
    layers.append(keras.layers.Conv2D(width, 3, padding="same", activation=activation))
    layers.append(keras.layers.MaxPooling2D())
  layers += [keras.layers.Flatten(), keras.layers.Dense(units, activation=activation)]
  return keras.Sequential([*layers, keras.layers.Dropout(dropout), _logits(classes)], name="cnn")


@loopwright.register
class ImageClassification(Task):
  """Softmax classification of images scaled to [0, 1]."""

  def __init__(
    self,
    *,
    data: ImageData,
    network: Callable[..., keras.Model] = cnn,
    input_shape: Sequence[int] = (28, 28, 1),
    classes: int = 10,
    flip: bool = False,
    shift: int = 0,
  ) -> None:
    """Keeps its arguments.

    Args:
      data: "train" and "eval" sources.
      network: makes the model from `input_shape` and `classes`; returns logits.
      input_shape: height, width, channels.
      classes: labels are 0 .. classes - 1.
      flip: mirror half of the training images, left to right.
      shift: move training images by at most this many pixels in x and in y.
    """
    self._data, self._network = data, network
    self._shape, self._classes = tuple(input_shape), classes
    self._flip, self._shift = flip, shift
    self.chance_loss = math.log(classes)

  def build_model(self) -> keras.Model:
    """Returns the network, with logits [n, classes]."""
    return self._network(input_shape=self._shape, classes=self._classes)

  def source(self, split: str) -> Source:
    """Returns the images and labels of a split.

    Raises:
      ConfigError: they do not fit `input_shape` or `classes`.
    """
    return self._data.source(
      split, task=type(self).__name__, input_shape=self._shape, classes=self._classes
    )

  def preprocess(self, batch: Batch, training: bool) -> Batch:
    """Scales to [0, 1]; augments when training."""
    image = batch["image"]
    if training and (self._flip or self._shift):
      image = moved(image, batch["seed"], flip=self._flip, shift=self._shift)
    return {**batch, "image": tf.cast(image, tf.float32) / 255.0}

  def forward(self, batch: Batch, training: bool) -> tf.Tensor:
    """Returns float32 logits [n, classes]."""
    return tf.cast(self.model(batch["image"], training=training), tf.float32)

  def loss(self, outputs: tf.Tensor, batch: Batch) -> Loss:
    """Cross-entropy."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=batch["label"], logits=outputs)
    return Loss.from_examples(losses, batch["weight"])

  def metrics(self, outputs: tf.Tensor, batch: Batch) -> dict[str, Weighted]:
    """Accuracy."""
    # The host compares int32, also where the outputs are on a GPU.
    hits = tf.equal(tf.argmax(outputs, axis=-1), tf.cast(batch["label"], tf.int64))
    return {"accuracy": weighted_sum(hits, batch["weight"])}

  def export_signature(self) -> Any:
    """Serves raw images, uint8 -> class probabilities."""

    @tf.function(input_signature=[tf.TensorSpec((None, *self._shape), tf.uint8, "image")])
    def serve(image: tf.Tensor) -> dict[str, tf.Tensor]:
      batch = self.preprocess({"image": image}, training=False)
      return {"probabilities": tf.nn.softmax(self.forward(batch, training=False))}

    return serve


def _in_memory(splits: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> ImageData:
  """Makes sources of images [n, h, w, c] and integer labels [n]."""
  sources = {
    split: ArraySource(features={"image": images, "label": labels.astype(np.int32)})
    for split, (images, labels) in splits.items()
  }
  labels = np.concatenate([labels for _, labels in splits.values()])
  if labels.min() < 0:
    raise ConfigError(f"the labels contain {labels.min()}; they must be 0 or more.")
  shape = splits["train"][0].shape[1:]
  return ImageData(sources=sources, image_shape=shape, labels=int(labels.max()) + 1)


def _read(folder: str, name: str) -> np.ndarray:
  plain = os.path.join(folder, name)
  return loopwright.read_idx(plain if os.path.exists(plain) else f"{plain}.gz")


def _downloaded_fashion_mnist() -> ImageData:
  try:
    train, test = keras.datasets.fashion_mnist.load_data()
  except Exception as error:
    raise ConfigError(
      f"Fashion-MNIST is not in {DEBIAN_FASHION_MNIST} and cannot be downloaded "
      f"({type(error).__name__}); install Debian's dataset-fashion-mnist, or set "
      "fashion_mnist.directory to the folder of its four idx files."
    ) from error
  arrays = {"train": train, "eval": test}
  return _in_memory(
    {split: (images[..., None], labels) for split, (images, labels) in arrays.items()}
  )


def _logits(classes: int) -> keras.layers.Layer:
  return keras.layers.Dense(classes, dtype="float32", name="logits")


def moved(image: tf.Tensor, seed: tf.Tensor, *, flip: bool, shift: int = 0) -> tf.Tensor:
  """Moves and mirrors each image by its own seed (any context).

  It takes a third of the time in uint8, so convert afterwards.

  Args:
    image: [n, height, width, channels], any dtype.
    seed: int32 [n, 2].
    flip: mirror with probability 1/2, left to right, after moving.
    shift: move by at most so many pixels in x and in y; fills with zeros.
  """
  span = 2 * shift + 1
  top, left = tf.math.floormod(seed[:, 1], span), tf.math.floormod(seed[:, 1] // span, span)
  mirror = (seed[:, 0] & 1 == 1) & flip
  padded = tf.pad(image, [[0, 0], [shift, shift], [shift, shift], [0, 0]])
  height, width, channels = image.shape[1:]
  if height * width * channels >= _LARGE:

    def one(at: tuple[tf.Tensor, ...]) -> tf.Tensor:
      row, top, left, mirror = at
      part = tf.slice(padded, [row, top, left, 0], [1, height, width, channels])[0]
      return tf.cond(mirror, lambda: tf.reverse(part, [1]), lambda: part)

    rows = tf.range(tf.shape(seed)[0])
    moved_one = tf.TensorSpec(image.shape[1:], image.dtype)
    return tf.map_fn(one, (rows, top, left, mirror), fn_output_signature=moved_one)
  columns = tf.range(width)[tf.newaxis]
  columns = left[:, tf.newaxis] + tf.where(mirror[:, tf.newaxis], columns[:, ::-1], columns)
  of_rows = tf.gather(padded, top[:, tf.newaxis] + tf.range(height), batch_dims=1)
  return tf.gather(of_rows, columns, axis=2, batch_dims=1)
