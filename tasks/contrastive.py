"""Contrastive learning without labels (SimCLR): all other images of the batch are negatives.

The loss of an example needs the embeddings of all replicas. `step.all_gather` collects them, with
their gradient, so N replicas of n rows train like one replica of N x n.

Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations" (2020).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import loopwright
from loopwright import Batch, ConfigError, EvalStep, Loss, Source, Step, Task
from loopwright.graphs.randomness import draw_each, example_seeds
from loopwright.metrics import weighted_sum
from loopwright.step import replica_id
from loopwright.tasks.image_classification import ImageData

VIEWS = ("first", "second")
_NONE = -1e9
"""Logit of columns that do not count; its exponential is 0."""


@loopwright.register
class Contrastive(Task):
  """Learns which views in the batch show the same image; uses labels only to evaluate."""

  def __init__(
    self,
    *,
    data: ImageData,
    input_shape: Sequence[int] = (28, 28, 1),
    filters: Sequence[int] = (32, 64),
    units: int = 128,
    projection: int = 64,
    temperature: float = 0.5,
    rotation: float = 0.35,
    zoom: float = 1.25,
    shift: float = 1.0,
    contrast: float = 0.4,
  ) -> None:
    """Keeps its arguments.

    Args:
      data: images and labels; only evaluation uses the labels.
      input_shape: height, width, channels.
      filters: of the encoder's convolutions, each followed by 2x2 max pooling.
      units: size of a representation, the encoder's output.
      projection: size of an embedding, which the loss compares; section 4.2 of the paper.
      temperature: divides the cosine similarities.
      rotation: largest rotation of a view, in radians.
      zoom: a view is scaled by a factor in [1 / zoom, zoom].
      shift: largest move of a view in x and in y, in pixels.
      contrast: a view's values are scaled by a factor in [1 - contrast, 1 + contrast].

    Raises:
      ConfigError: a value is out of its range.
    """
    if not temperature > 0:
      raise ConfigError(f"Contrastive.temperature is {temperature}; it must be above 0.")
    if not zoom >= 1:
      raise ConfigError(f"Contrastive.zoom is {zoom}; it must be 1 (none) or more.")
    if not 0 <= contrast < 1:
      raise ConfigError(f"Contrastive.contrast is {contrast}; it must be from 0 to below 1.")
    self._data, self._shape = data, tuple(input_shape)
    self._filters, self._units, self._projection = tuple(filters), units, projection
    self._temperature = temperature
    self._rotation, self._zoom, self._shift, self._contrast = rotation, zoom, shift, contrast

  def build_model(self) -> dict[str, keras.Model]:
    """Returns the encoder, image -> representation, and the head, representation -> embedding."""
    return {
      "encoder": encoder(input_shape=self._shape, filters=self._filters, units=self._units),
      "head": head(units=self._units, projection=self._projection),
    }

  def source(self, split: str) -> Source:
    """Returns the images and labels of a split.

    Raises:
      ConfigError: they do not fit `input_shape`.
    """
    return self._data.source(split, task=type(self).__name__, input_shape=self._shape)

  def preprocess(self, batch: Batch, training: bool) -> Batch:
    """Scales images to [0, 1] and adds "first" and "second", two random views of each.

    A view depends on the example's seed (in evaluation on its id), not on the replica.
    """
    image = tf.cast(batch["image"], tf.float32) / 255.0
    seeds = example_seeds(batch, training)
    views = {name: self._view(image, seeds + number) for number, name in enumerate(VIEWS)}
    return {**batch, "image": image, **views}

  def train_step(self, step: Step, batch: Batch) -> None:
    """Runs one update; its loss communicates (replica context)."""
    step.update(lambda part: self.contrastive_loss(step, part, training=True), batch)

  def contrastive_loss(self, step: EvalStep, batch: Batch, training: bool) -> Loss:
    """NT-Xent of this replica's views against those of all replicas; see `nt_xent`."""
    first, second = (self.embedding(batch[name], training) for name in VIEWS)
    losses = nt_xent(step, first, second, batch["weight"], temperature=self._temperature)
    return Loss.from_examples(losses, batch["weight"])

  def embedding(self, image: tf.Tensor, training: bool) -> tf.Tensor:
    """Returns float32 [n, projection], each row of length 1."""
    found = self.model["encoder"](image, training=training)
    embedded = self.model["head"](found, training=training)
    return tf.math.l2_normalize(tf.cast(embedded, tf.float32), axis=1)

  def eval_step(self, step: EvalStep, batch: Batch) -> None:
    """Logs the loss and how often the nearest other image, for a view, has the same label.

    Nearest by representation ("nearest_accuracy") and, to compare, by pixels ("nearest_by_pixels").
    """
    loss = self.contrastive_loss(step, batch, training=False)
    metrics = {"loss": (loss.total, loss.weight)}
    encode = self.model["encoder"]
    for name, found in (
      ("nearest_accuracy", [encode(batch[key], training=False) for key in ("first", "image")]),
      ("nearest_by_pixels", [batch["first"], batch["image"]]),
    ):
      view, image = (tf.reshape(tf.cast(x, tf.float32), [x.shape[0], -1]) for x in found)
      hits = nearest_agrees(step, view, image, batch["label"], batch["weight"])
      metrics[name] = weighted_sum(hits, batch["weight"])
    step.log(metrics)

  def export_signature(self) -> Any:
    """Serves raw images, uint8 -> representations [n, units]."""

    @tf.function(input_signature=[tf.TensorSpec((None, *self._shape), tf.uint8, "image")])
    def serve(image: tf.Tensor) -> dict[str, tf.Tensor]:
      scaled = tf.cast(image, tf.float32) / 255.0
      return {"representation": self.model["encoder"](scaled, training=False)}

    return serve

  def _view(self, image: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    draw = functools.partial(tf.random.stateless_uniform, minval=-1.0, maxval=1.0)
    numbers = draw_each(draw, seeds, [5])
    moved = turned(
      image,
      angle=self._rotation * numbers[:, 0],
      scale=tf.pow(self._zoom, numbers[:, 1]),
      shift=self._shift * numbers[:, 2:4],
    )
    return moved * (1.0 + self._contrast * numbers[:, 4, tf.newaxis, tf.newaxis, tf.newaxis])


def nt_xent(
  step: EvalStep, first: tf.Tensor, second: tf.Tensor, weight: tf.Tensor, *, temperature: float
) -> tf.Tensor:
  """Normalised temperature-scaled cross-entropy, equation 1 of the paper (replica context).

  The negatives of a view are all views of other examples, on all replicas, whose weight is above 0;
  padding does not count. With accumulation, only examples of the same micro-batch are negatives.

  Args:
    step: gathers.
    first: float32 [n, d], embeddings of one view of this replica's examples, each of length 1.
    second: the same for the other view.
    weight: float32 [n].
    temperature: divides the similarities.

  Returns:
    float32 [n], the mean over the two views of each example; any finite number for weight 0.
  """
  rows, size = first.shape
  columns = tf.reshape(step.all_gather(tf.stack([first, second], axis=1)), [-1, size])
  counts = tf.repeat(step.all_gather(weight) > 0, 2)
  own = 2 * (replica_id() * rows + tf.range(rows))  # the column of its first view
  positive = tf.reduce_sum(first * second, axis=1) / temperature
  losses = []
  for view, anchor in enumerate((first, second)):
    itself = (own + view)[:, tf.newaxis] == tf.range(columns.shape[0])
    logits = tf.matmul(anchor, columns, transpose_b=True) / temperature
    others = tf.where(counts & ~itself, logits, _NONE)
    losses.append(tf.reduce_logsumexp(others, axis=1) - positive)
  return tf.add_n(losses) / 2.0


def nearest_agrees(
  step: EvalStep, query: tf.Tensor, found: tf.Tensor, label: tf.Tensor, weight: tf.Tensor
) -> tf.Tensor:
  """Whether the nearest other example, by cosine, has the same label (replica context).

  Args:
    step: gathers.
    query: float32 [n, d], what to search for.
    found: float32 [n, d], what it is compared with, on all replicas.
    label: int32 [n].
    weight: float32 [n]; examples of weight 0 are never the nearest.

  Returns:
    bool [n].
  """
  rows = query.shape[0]
  everyone, labels = step.all_gather(tf.math.l2_normalize(found, axis=1)), step.all_gather(label)
  counts = step.all_gather(weight) > 0
  itself = (replica_id() * rows + tf.range(rows))[:, tf.newaxis] == tf.range(labels.shape[0])
  similarity = tf.matmul(query, everyone, transpose_b=True)
  nearest = tf.argmax(tf.where(counts & ~itself, similarity, _NONE), axis=1)
  return tf.gather(labels, nearest) == label


def encoder(*, input_shape: Sequence[int], filters: Sequence[int], units: int) -> keras.Model:
  """Images [n, h, w, c] -> representations [n, units]; SiLU is smooth, so rounding stays small."""
  layers: list[Any] = [keras.Input(tuple(input_shape))]
  for width in filters:
    layers.append(keras.layers.Conv2D(width, 3, padding="same", activation="silu"))
    layers.append(keras.layers.MaxPooling2D())
  layers += [keras.layers.Flatten(), keras.layers.Dense(units, activation="silu")]
  return keras.Sequential(layers, name="encoder")


def head(*, units: int, projection: int) -> keras.Model:
  """Representations [n, units] -> embeddings [n, projection]; not used after training."""
  layers = keras.layers
  return keras.Sequential(
    [keras.Input((units,)), layers.Dense(units, activation="silu"), layers.Dense(projection)],
    name="head",
  )


def turned(image: tf.Tensor, *, angle: tf.Tensor, scale: tf.Tensor, shift: tf.Tensor) -> tf.Tensor:
  """Rotates, scales and moves each image about its centre, bilinearly; fills with zeros.

  Args:
    image: float32 [n, h, w, c].
    angle: float32 [n], radians, clockwise with the first row on top.
    scale: float32 [n], above 1 enlarges.
    shift: float32 [n, 2], pixels to the right and down.
  """
  height, width = image.shape[1], image.shape[2]
  x, y = (width - 1) / 2, (height - 1) / 2
  cos, sin, zero = tf.cos(angle) / scale, tf.sin(angle) / scale, tf.zeros_like(angle)
  right, down = x + shift[:, 0], y + shift[:, 1]
  # The transform maps output pixels to input pixels: the inverse of what happens to the image.
  rows = [cos, sin, x - cos * right - sin * down, -sin, cos, y + sin * right - cos * down]
  return tf.raw_ops.ImageProjectiveTransformV3(
    images=image, transforms=tf.stack([*rows, zero, zero], axis=1), output_shape=[height, width],
    fill_value=0.0, interpolation="BILINEAR", fill_mode="CONSTANT",
  )  # fmt: skip
