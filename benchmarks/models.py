"""What the contenders train: models, the same in both Kerases, each with its data and its loss.

Every contender starts from the same weights and reads the same batches in the same order, so the
losses after the same number of steps must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

BATCH_SIZE = 128
IMAGE_SHAPE = (28, 28, 1)
CLASSES = 10
WORDS, LENGTH, DIMENSIONS = 20_000, 100, 200
"""Of the models that read texts: vocabulary, words a text, size of a word's vector."""
CONTEXT = 256
"""Bytes in a sequence of the language model."""
BRANCHES, DEPTH = 6, 83
"""Of `wide`: with its first layer and its head, 500 layers."""
BATCHES = 16
"""Distinct ones, all in memory, read over and over."""

Examples = tuple[dict[str, np.ndarray], np.ndarray]
"""Features and labels."""


class Model(NamedTuple):
  """A model and its data.

  Attributes:
    description: for people.
    network: (the module `keras` or `tf_keras`) -> a Keras model; its weights are replaced.
    examples: (number) -> features and labels, arrays of as many rows.
    features: names of those that the network reads: one as it is, several as a dict.
    binary: labels float32 [n, 1] of one logit; otherwise int32, one for each vector of logits.
    learning_rate: of Adam. With 52 layers of batch normalisation at the start of training, rounding
      grows about tenfold a step at 1e-3, so that losses that should agree do not.
    xla: worth compiling by XLA on a CPU: not a minute to compile, or seconds a step.
    keras_3: the network exists in Keras 3 alone.
    batch_size: examples in a batch.
  """

  description: str
  network: Callable[[Any], Any]
  examples: Callable[[int], Examples]
  features: tuple[str, ...] = ("image",)
  binary: bool = False
  learning_rate: float = 1e-3
  xla: bool = False
  keras_3: bool = False
  batch_size: int = BATCH_SIZE


def build(name: str, keras: ModuleType) -> Any:
  """Returns a new model with the same weights each time; call it in `strategy.scope()`.

  Args:
    name: a key of `MODELS`.
    keras: the module `keras` or `tf_keras`.
  """
  model = MODELS[name].network(keras)
  rng = np.random.default_rng(0)
  model.set_weights([_initial(rng, value) for value in model.get_weights()])
  return model


def keras_loss(name: str, keras: ModuleType) -> Any:
  if MODELS[name].binary:
    return keras.losses.BinaryCrossentropy(from_logits=True)
  return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def adam(name: str, keras: ModuleType) -> Any:
  return keras.optimizers.Adam(MODELS[name].learning_rate)


def per_example_loss(name: str, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
  """Returns the cross entropy of each example, float32 [n]: a mean over its logit vectors."""
  if MODELS[name].binary:
    return tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)[:, 0]
  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
  return tf.reduce_mean(losses, axis=1) if losses.shape.rank == 2 else losses


def pairs(name: str, rows: range | None = None) -> tf.data.Dataset:
  """Returns an endless dataset of (features, labels), each [batch_size, ...].

  Args:
    name: a key of `MODELS`.
    rows: which rows of a batch, for one of several workers; None for all.
  """
  features, labels = examples(name)
  return _endless((read(name, features), labels), rows or range(MODELS[name].batch_size))


def dicts(name: str = "mlp", rows: range | None = None) -> tf.data.Dataset:
  """Returns the same batches as dicts with a "weight" of 1, as `Trainer` reads them."""
  features, labels = examples(name)
  batches = {**features, "label": labels, "weight": np.ones(len(labels), np.float32)}
  return _endless(batches, rows or range(MODELS[name].batch_size))


def examples(name: str) -> Examples:
  """Returns the features and labels of all batches, one after the other."""
  return MODELS[name].examples(MODELS[name].batch_size * BATCHES)


def read(name: str, batch: Mapping[str, Any]) -> Any:
  """Returns what the network reads of features or of a batch of `dicts`."""
  features = {feature: batch[feature] for feature in MODELS[name].features}
  return features if len(features) > 1 else next(iter(features.values()))


def _endless(examples: Any, rows: range) -> tf.data.Dataset:
  share = tf.nest.map_structure(lambda array: _rows_of_batches(array, rows), examples)
  dataset = tf.data.Dataset.from_tensor_slices(share)
  return dataset.batch(len(rows), drop_remainder=True).cache().repeat().prefetch(4)


def _rows_of_batches(array: np.ndarray, rows: range) -> np.ndarray:
  batches = array.reshape(BATCHES, -1, *array.shape[1:])
  return batches[:, rows.start : rows.stop].reshape(-1, *array.shape[1:])


def _initial(rng: np.random.Generator, value: np.ndarray) -> np.ndarray:
  """Glorot-uniform kernels, a tenth of that in (square) residual layers; vectors stay."""
  if value.ndim == 1:
    return value
  shape = value.shape
  area = int(np.prod(shape[:-2]))
  limit = np.sqrt(6.0 / (area * (shape[-2] + shape[-1])))
  if shape[-2] == shape[-1]:
    limit *= 0.1
  return rng.uniform(-limit, limit, shape).astype(np.float32)


# --- data: noise, and labels that a random linear map computes from it, so they can be learned ---


def _images(count: int) -> Examples:
  rng = np.random.default_rng(1)
  images = rng.random((count, *IMAGE_SHAPE), dtype=np.float32)
  flat = images.reshape(count, -1)
  labels = np.argmax((flat - 0.5) @ rng.normal(size=(flat.shape[1], CLASSES)), axis=1)
  return {"image": images}, labels.astype(np.int32)


def _pictures(count: int) -> Examples:
  """Images [count, 32, 32, 3] of 4 x 4 areas: of noise alone, later layers see almost the same."""
  rng = np.random.default_rng(1)
  areas = rng.uniform(-1.0, 1.0, (count, 4, 4, 3)).astype(np.float32)
  scores = areas.reshape(count, -1) @ rng.normal(size=(48, CLASSES))
  images = areas.repeat(8, axis=1).repeat(8, axis=2)
  return {"image": images}, np.argmax(scores, axis=1).astype(np.int32)


def _texts(count: int, classes: int = CLASSES) -> Examples:
  """No word twice in a batch: Keras 3's Adam squares the gradient of each occurrence by itself."""
  rng = np.random.default_rng(1)
  rows = count // BATCHES
  drawn = [rng.permutation(np.arange(1, WORDS))[: rows * LENGTH] for _ in range(BATCHES)]
  words = np.concatenate(drawn).reshape(count, LENGTH).astype(np.int32)
  scores = rng.normal(size=(WORDS, classes))[words].sum(axis=1)
  return {"words": words}, np.argmax(scores, axis=1).astype(np.int32)


def _opinions(count: int) -> Examples:
  words, labels = _texts(count, classes=2)
  return words, labels.astype(np.float32)[:, np.newaxis]


def _bytes(count: int) -> Examples:
  """Each byte follows from the one before it, three times out of four."""
  rng = np.random.default_rng(1)
  text = rng.integers(0, 256, (count, CONTEXT + 1), np.int32)
  follows = rng.permutation(256).astype(np.int32)
  for place in range(CONTEXT):
    kept = rng.random(count) < 0.75
    text[:, place + 1] = np.where(kept, follows[text[:, place]], text[:, place + 1])
  position = np.broadcast_to(np.arange(CONTEXT, dtype=np.int32), (count, CONTEXT)).copy()
  return {"token": text[:, :-1], "position": position}, text[:, 1:]


# --- networks -----------------------------------------------------------------------------------


def _of_images(layers_of: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
  def network(keras: Any) -> Any:
    inputs = keras.Input(IMAGE_SHAPE)
    return keras.Model(inputs, layers_of(keras.layers, inputs))

  return network


def _mlp(layers: Any, x: Any) -> Any:
  x = layers.Dense(128, activation="relu")(layers.Flatten()(x))
  return layers.Dense(CLASSES)(x)


def _cnn(layers: Any, x: Any) -> Any:
  for channels in (16, 32):
    x = layers.MaxPooling2D()(layers.Conv2D(channels, 3, activation="relu")(x))
  return layers.Dense(CLASSES)(layers.Flatten()(x))


def _residual(layers: Any, x: Any, depth: int) -> Any:
  """Dense layers of the width of x; residual, so that all of it learns."""
  for _ in range(depth):
    x = layers.Add()([x, layers.Dense(x.shape[-1], activation="relu")(x)])
  return x


def _many(layers: Any, x: Any) -> Any:
  x = layers.Dense(16, activation="relu")(layers.Flatten()(x))
  return layers.Dense(CLASSES)(_residual(layers, x, 48))


def _wide(layers: Any, x: Any) -> Any:
  x = layers.Dense(8, activation="relu")(layers.Flatten()(x))
  branches = [_residual(layers, x, DEPTH) for _ in range(BRANCHES)]
  return layers.Dense(CLASSES)(layers.Average()(branches))


def _embedding(keras: Any) -> Any:
  inputs = keras.Input((LENGTH,), dtype="int32")
  x = keras.layers.Embedding(WORDS, DIMENSIONS)(inputs)
  x = keras.layers.GlobalAveragePooling1D()(x)
  return keras.Model(inputs, keras.layers.Dense(CLASSES)(x))


def _mobilenet(keras: Any) -> Any:
  network = keras.applications.MobileNetV2
  return network((32, 32, 3), weights=None, classes=CLASSES, classifier_activation=None)


def _language_model(keras: Any) -> Any:
  from loopwright.tasks import language_model

  return language_model.transformer()


def _cnn_lstm(keras: Any) -> Any:
  from loopwright.tasks import text_classification

  # Without dropout, so that the losses of all contenders agree.
  return text_classification.cnn_lstm(vocabulary_size=WORDS, length=LENGTH, recurrent_dropout=0.0)


MODELS = {
  "mlp": Model("MLP 784-128-10, 4 variables, 102k parameters", _of_images(_mlp), _images, xla=True),
  "cnn": Model(
    "CNN, 3x3 convolutions to 16 and 32 channels, 6 variables, 13k parameters",
    _of_images(_cnn), _images, xla=True,
  ),
  "many": Model(
    "49 dense layers of 16 units and a head, 100 variables, 26k parameters",
    _of_images(_many), _images, xla=True,
  ),
  "wide": Model(
    "499 dense layers of 8 units, most in 6 branches, and a head, 1,000 variables, 42k parameters",
    _of_images(_wide), _images,
  ),
  "embedding": Model(
    "mean of 100 rows of a table 20,000 x 200, and a head: 3 variables, 4.0M parameters",
    _embedding, _texts, features=("words",),
  ),
  "mobilenet": Model(
    "MobileNetV2 for 32x32 images, with batch normalisation, 2.2M parameters, batch 32",
    _mobilenet, _pictures, learning_rate=1e-6, batch_size=32,
  ),
  "language_model": Model(
    "the byte transformer of tasks/, 4 layers of width 128, 256 bytes, 0.8M parameters, batch 8",
    _language_model, _bytes, features=("token", "position"), keras_3=True, batch_size=8,
  ),
  "cnn_lstm": Model(
    "the CNN-LSTM of tasks/ for 100 words, without dropout, 4.1M parameters, batch 32",
    _cnn_lstm, _opinions, features=("words",), binary=True, keras_3=True, batch_size=32,
  ),
}  # fmt: skip
