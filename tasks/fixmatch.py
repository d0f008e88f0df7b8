"""FixMatch: a few labelled images and many without labels, read side by side.

A confident answer for a slightly changed image is the label for a strongly changed one.

Sohn et al., "FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence", 2020.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import framework
from framework import Batch, ConfigError, Loss, Part, Source, Sources, part, with_part
from framework.backend.randomness import uniform_each
from framework.metrics import Weighted, weighted_sum
from tasks.contrastive import turned
from tasks.image_classification import ImageClassification


class Answers(NamedTuple):
  """Logits in training.

  Attributes:
    labelled: float32 [n, classes].
    weak: float32 [n x ratio, classes], of slightly changed unlabelled images; no gradient.
    strong: the same for strongly changed ones.
  """

  labelled: tf.Tensor
  weak: tf.Tensor
  strong: tf.Tensor


@framework.register
class FixMatch(ImageClassification):
  """Classifies images, most of which have no label in training."""

  def __init__(
    self,
    *,
    labels: int = 400,
    ratio: int = 7,
    threshold: float = 0.95,
    unlabelled_weight: float = 1.0,
    rotation: float = 0.5,
    zoom: float = 1.4,
    move: float = 3.0,
    contrast: float = 0.5,
    cutout: int = 12,
    seed: int = 0,
    **options: Any,
  ) -> None:
    """Keeps its arguments.

    Args:
      labels: labelled training images, equally many of each class.
      ratio: unlabelled images with each labelled one.
      threshold: an answer for an unlabelled image counts if its probability is at least this.
      unlabelled_weight: of the second term of the loss; 0 learns from the labelled images alone.
      rotation: strongest rotation, in radians.
      zoom: strong scaling is by a factor in [1 / zoom, zoom].
      move: strongest move in x and in y, in pixels.
      contrast: strong scaling of the values is by a factor in [1 - contrast, 1 + contrast].
      cutout: side of the square that is blackened in a strongly changed image, in pixels.
      seed: chooses the labelled images.
      **options: see `ImageClassification`; `flip` and `shift` are the slight changes.

    Raises:
      ConfigError: `labels` is not a multiple of the number of classes.
    """
    super().__init__(**options)
    if labels < 1 or labels % self._classes:
      raise ConfigError(
        f"FixMatch.labels is {labels}; it must be a multiple of the {self._classes} classes."
      )
    self._labels, self._ratio, self._seed = labels, ratio, seed
    self._threshold, self._second = threshold, unlabelled_weight
    self._rotation, self._zoom, self._move = rotation, zoom, move
    self._contrast, self._cutout = contrast, cutout

  def source(self, split: str) -> Any:
    """Returns labelled and unlabelled training images; or the labelled evaluation images."""
    whole = super().source(split)
    if split == "eval":
      return whole
    labelled = Subset(whole, chosen(whole, self._labels // self._classes, self._seed))
    return Sources(labelled, unlabelled=Part(source=whole, ratio=self._ratio))

  def preprocess(self, batch: Batch, training: bool) -> Batch:
    """Scales to [0, 1]; in training makes slightly and strongly changed images."""
    batch = super().preprocess(batch, training)
    if not training:
      return batch
    more = super().preprocess(part(batch, "unlabelled"), training)
    strong = self._changed(more["image"], more["seed"])
    return with_part(batch, "unlabelled", {"image": more["image"], "strong": strong})

  def forward(self, batch: Batch, training: bool) -> Any:
    """Returns logits [n, classes]; in training `Answers`."""
    if not training:
      return super().forward(batch, training)
    more = part(batch, "unlabelled")
    weak = tf.stop_gradient(super().forward({"image": more["image"]}, training))
    images = tf.concat([batch["image"], more["strong"]], axis=0)
    found = super().forward({"image": images}, training)
    rows = batch["image"].shape[0]
    return Answers(found[:rows], weak, found[rows:])

  def loss(self, outputs: Any, batch: Batch) -> Loss:
    """Cross-entropy of the labelled image, and of its unlabelled ones where confident."""
    if not isinstance(outputs, Answers):
      return super().loss(outputs, batch)
    labelled = cross_entropy(batch["label"], outputs.labelled)
    confident, label = self._guessed(outputs)
    losses = confident * cross_entropy(label, outputs.strong)
    second = tf.reduce_mean(tf.reshape(losses, [-1, self._ratio]), axis=1)
    return Loss.from_examples(labelled + self._second * second, batch["weight"])

  def metrics(self, outputs: Any, batch: Batch) -> dict[str, Weighted]:
    """Accuracy; in training also how many guesses count, and how many of these are right."""
    if not isinstance(outputs, Answers):
      return super().metrics(outputs, batch)
    more, (confident, label) = part(batch, "unlabelled"), self._guessed(outputs)
    counted = confident * more["weight"]
    return super().metrics(outputs.labelled, batch) | {
      "confident": weighted_sum(confident, more["weight"]),
      "confident_accuracy": weighted_sum(label == more["label"], counted),
    }

  def _guessed(self, outputs: Answers) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns 1.0 where the guess counts, float32, and the guess, int32."""
    probability = tf.reduce_max(tf.nn.softmax(outputs.weak), axis=1)
    guess = tf.argmax(outputs.weak, axis=1, output_type=tf.int32)
    return tf.cast(probability >= self._threshold, tf.float32), guess

  def _changed(self, image: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    numbers = uniform_each(seeds, [7])
    signed = 2.0 * numbers - 1.0
    moved = turned(
      image, angle=self._rotation * signed[:, 0], scale=tf.pow(self._zoom, signed[:, 1]),
      shift=self._move * signed[:, 2:4],
    )  # fmt: skip
    factor = 1.0 + self._contrast * signed[:, 4]
    return without_square(moved, self._cutout, numbers[:, 5:]) * factor[:, None, None, None]


class Subset(Source):
  """Some examples of a source."""

  def __init__(self, source: Source, indices: np.ndarray) -> None:
    """Keeps a source and the indices of its examples, int64 [n]."""
    self.num_examples, self._source, self._chosen = len(indices), source, indices

  def fetch(self, indices: tf.Tensor) -> Batch:
    """See `Source.fetch`."""
    return self._source.fetch(tf.gather(self._chosen, indices))


def chosen(source: Source, per_class: int, seed: int) -> np.ndarray:
  """Returns the indices of `per_class` random examples of each class, int64 (host)."""
  with tf.device("CPU:0"):
    label = source.fetch(tf.range(source.num_examples, dtype=tf.int64))["label"].numpy()
  order = np.random.default_rng(seed).permutation(len(label))
  found = [order[label[order] == each][:per_class] for each in np.unique(label)]
  if short := [
    each for each, rows in zip(np.unique(label), found, strict=True) if len(rows) < per_class
  ]:
    raise ConfigError(
      f"FixMatch.labels asks for {per_class} images of each class, but class {short[0]} has fewer; "
      "lower it."
    )
  return np.sort(np.concatenate(found))


def cross_entropy(label: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
  """Returns the cross-entropy of each row, float32 [n]."""
  return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=logits)


def without_square(image: tf.Tensor, side: int, centre: tf.Tensor) -> tf.Tensor:
  """Sets a square of each image to 0 (DeVries and Taylor 2017).

  Args:
    image: [n, h, w, c].
    side: of the square, in pixels.
    centre: float32 [n, 2] in [0, 1), as parts of height and width.
  """
  inside = []
  for axis in (1, 2):
    length = image.shape[axis]
    away = tf.range(length, dtype=tf.float32) - tf.floor(centre[:, axis - 1, tf.newaxis] * length)
    inside.append(tf.abs(away) < side / 2)
  square = inside[0][:, :, tf.newaxis] & inside[1][:, tf.newaxis, :]
  return tf.where(square[..., tf.newaxis], 0.0, image)
