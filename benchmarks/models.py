"""What the contenders train: three models, the same in both Kerases, and one data set.

Every contender starts from the same weights and reads the same batches in the same order, so the
losses after the same number of steps must agree.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

BATCH_SIZE = 128
IMAGE_SHAPE = (28, 28, 1)
CLASSES = 10
_BATCHES = 16  # distinct ones, all in memory, read over and over

DESCRIPTIONS = {
  "mlp": "MLP 784-128-10, 4 variables, 102k parameters",
  "cnn": "CNN, 3x3 convolutions to 16 and 32 channels, 6 variables, 13k parameters",
  "many": "49 dense layers of 16 units and a head, 100 variables, 26k parameters",
}


def build(name: str, keras: ModuleType) -> Any:
  """Returns a new model with the same weights each time; call it in `strategy.scope()`.

  Args:
    name: a key of `DESCRIPTIONS`.
    keras: the module `keras` or `tf_keras`.
  """
  inputs = keras.Input(IMAGE_SHAPE)
  model = keras.Model(inputs, _LAYERS[name](keras.layers, inputs))
  rng = np.random.default_rng(0)
  model.set_weights([_initial(rng, w.shape) for w in model.get_weights()])
  return model


def loss_fn(keras: ModuleType) -> Any:
  return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def pairs(rows: range | None = None) -> tf.data.Dataset:
  """Returns an endless dataset of (images [128, 28, 28, 1], labels [128]).

  Args:
    rows: which of the 128 rows, for one of several workers; None for all.
  """
  return _endless(_examples(), rows)


def dicts(rows: range | None = None) -> tf.data.Dataset:
  """Returns the same batches as dicts with a "weight" of 1, as `Trainer` reads them."""
  images, labels = _examples()
  weight = np.ones(len(labels), np.float32)
  return _endless({"image": images, "label": labels, "weight": weight}, rows)


def _endless(examples: Any, rows: range | None) -> tf.data.Dataset:
  rows = rows or range(BATCH_SIZE)
  share = tf.nest.map_structure(lambda array: _rows_of_batches(array, rows), examples)
  dataset = tf.data.Dataset.from_tensor_slices(share)
  return dataset.batch(len(rows), drop_remainder=True).cache().repeat().prefetch(4)


def _rows_of_batches(array: np.ndarray, rows: range) -> np.ndarray:
  batches = array.reshape(_BATCHES, BATCH_SIZE, *array.shape[1:])
  return batches[:, rows.start : rows.stop].reshape(-1, *array.shape[1:])


def _examples() -> tuple[np.ndarray, np.ndarray]:
  """Returns noise, and labels that a random linear map computes from it, so they can be learned."""
  rng = np.random.default_rng(1)
  images = rng.random((_BATCHES * BATCH_SIZE, *IMAGE_SHAPE), dtype=np.float32)
  flat = images.reshape(len(images), -1)
  labels = np.argmax((flat - 0.5) @ rng.normal(size=(flat.shape[1], CLASSES)), axis=1)
  return images, labels.astype(np.int32)


def _initial(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
  """Glorot-uniform kernels, a tenth of that in (square) residual layers, zero biases."""
  if len(shape) == 1:
    return np.zeros(shape, np.float32)
  area = int(np.prod(shape[:-2]))
  limit = np.sqrt(6.0 / (area * (shape[-2] + shape[-1])))
  if shape[-2] == shape[-1]:
    limit *= 0.1
  return rng.uniform(-limit, limit, shape).astype(np.float32)


def _mlp(layers: Any, x: Any) -> Any:
  x = layers.Dense(128, activation="relu")(layers.Flatten()(x))
  return layers.Dense(CLASSES)(x)


def _cnn(layers: Any, x: Any) -> Any:
  for channels in (16, 32):
    x = layers.MaxPooling2D()(layers.Conv2D(channels, 3, activation="relu")(x))
  return layers.Dense(CLASSES)(layers.Flatten()(x))


def _many(layers: Any, x: Any) -> Any:
  x = layers.Dense(16, activation="relu")(layers.Flatten()(x))
  for _ in range(48):  # residual, so that all of it learns
    x = layers.Add()([x, layers.Dense(16, activation="relu")(x)])
  return layers.Dense(CLASSES)(x)


_LAYERS = {"mlp": _mlp, "cnn": _cnn, "many": _many}
