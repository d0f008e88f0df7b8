"""FixMatch: a few labelled images and many without labels, read side by side.

A confident answer for a slightly changed image is the label for a strongly changed one. How often
each class was answered is state of the step: it corrects answers that favour some classes.

Sohn et al., "FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence", 2020,
with the distribution alignment of its section 2.5 (Berthelot et al., "ReMixMatch", 2020).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import loopwright
from loopwright import Batch, ConfigError, Loss, Part, Source, Sources, Step, part, with_part
from loopwright.graphs.randomness import uniform_each
from loopwright.metrics import Weighted, weighted_sum
from loopwright.tasks.contrastive import turned
from loopwright.tasks.image_classification import ImageClassification


class StronglyChanged(ImageClassification):
  """A task on images that are strongly changed in training."""

  def __init__(
    self,
    *,
    rotation: float = 0.2,
    zoom: float = 1.2,
    move: float = 3.0,
    contrast: float = 0.5,
    cutout: int = 10,
    **options: Any,
  ) -> None:
    """Keeps its arguments.

    Args:
      rotation: strongest rotation, in radians.
      zoom: strong scaling is by a factor in [1 / zoom, zoom].
      move: strongest move in x and in y, in pixels.
      contrast: strong scaling of the values is by a factor in [1 - contrast, 1 + contrast].
      cutout: side of the square that is blackened in a strongly changed image, in pixels.
      **options: see `ImageClassification`.
    """
    super().__init__(**options)
    self._rotation, self._zoom, self._move = rotation, zoom, move
    self._contrast, self._cutout = contrast, cutout

  def changed(self, image: tf.Tensor, seeds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Changes each image by its own seed (any context).

    Args:
      image: float32 [n, h, w, c].
      seeds: int32 [n, 2].

    Returns:
      The images rotated, scaled and moved; and these with other contrast and a black square.
    """
    numbers = uniform_each(seeds, [7])
    signed = 2.0 * numbers - 1.0
    moved = turned(
      image, angle=self._rotation * signed[:, 0], scale=tf.pow(self._zoom, signed[:, 1]),
      shift=self._move * signed[:, 2:4],
    )  # fmt: skip
    factor = 1.0 + self._contrast * signed[:, 4]
    return moved, without_square(moved, self._cutout, numbers[:, 5:]) * factor[:, None, None, None]


@loopwright.register
class FixMatch(StronglyChanged):
  """Classifies images, most of which have no label in training."""

  def __init__(
    self,
    *,
    labels: int = 400,
    ratio: int = 7,
    threshold: float = 0.9,
    unlabelled_weight: float = 1.0,
    memory: float = 0.99,
    seed: int = 0,
    **options: Any,
  ) -> None:
    """Keeps its arguments.

    Args:
      labels: labelled training images, equally many of each class.
      ratio: unlabelled images with each labelled one.
      threshold: an answer for an unlabelled image counts if its probability is at least this.
      unlabelled_weight: of the second term of the loss; 0 learns from the labelled images alone.
      memory: mean of the answers = memory * mean + (1 - memory) * those of a step.
      seed: chooses the labelled images.
      **options: see `StronglyChanged`; `flip` and `shift` are the slight changes.

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
    self._memory = memory

  def build_model(self) -> dict[str, Any]:
    """Returns the network, and the mean of its answers so far, float32 [classes]."""
    even = tf.fill([self._classes], 1.0 / self._classes)
    answers = tf.Variable(even, trainable=False, name="answers")
    return {"network": super().build_model(), "answers": answers}

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
    _, strong = self.changed(more["image"], more["seed"])
    return with_part(batch, "unlabelled", {"image": more["image"], "strong": strong})

  def train_step(self, step: Step, batch: Batch) -> None:
    """Guesses the missing labels, makes the update, moves the mean of the answers."""
    more, answers = part(batch, "unlabelled"), tf.convert_to_tensor(self.model["answers"])
    found = tf.nn.softmax(self.logits(more["image"], training=False))
    aligned = found / answers
    aligned /= tf.reduce_sum(aligned, axis=1, keepdims=True)
    guessed = {
      "guess": tf.argmax(aligned, axis=1, output_type=tf.int32),
      "confident": tf.cast(tf.reduce_max(aligned, axis=1) >= self._threshold, tf.float32),
    }
    batch = with_part(batch, "unlabelled", guessed)
    step.update(lambda rows: self.training_loss(step, rows), batch)
    weighted = tf.concat([found, tf.ones_like(found[:, :1])], 1) * more["weight"][:, tf.newaxis]
    sums = tf.reduce_sum(step.all_gather(tf.reduce_sum(weighted, axis=0, keepdims=True)), axis=0)
    mean = tf.math.divide_no_nan(sums[:-1], sums[-1])
    step.assign(self.model["answers"], self._memory * answers + (1.0 - self._memory) * mean)

  def forward(self, batch: Batch, training: bool) -> tf.Tensor:
    """Returns logits of the labelled images and, in training, of the strongly changed ones."""
    if not training:
      return self.logits(batch["image"], training)
    strong = part(batch, "unlabelled")["strong"]
    return self.logits(tf.concat([batch["image"], strong], axis=0), training)

  def loss(self, outputs: tf.Tensor, batch: Batch) -> Loss:
    """Cross-entropy of the labelled image; in training also of its confident unlabelled ones."""
    rows = batch["label"].shape[0]
    losses = cross_entropy(batch["label"], outputs[:rows])
    if outputs.shape[0] > rows:
      more = part(batch, "unlabelled")
      second = more["confident"] * cross_entropy(more["guess"], outputs[rows:])
      losses += self._second * tf.reduce_mean(tf.reshape(second, [-1, self._ratio]), axis=1)
    return Loss.from_examples(losses, batch["weight"])

  def metrics(self, outputs: tf.Tensor, batch: Batch) -> dict[str, Weighted]:
    """Accuracy; in training also how many guesses count, and how many of these are right."""
    rows = batch["label"].shape[0]
    found = super().metrics(outputs[:rows], batch)
    if outputs.shape[0] == rows:
      return found
    more = part(batch, "unlabelled")
    counted = more["confident"] * more["weight"]
    right = weighted_sum(more["guess"] == more["label"], counted)
    confident = weighted_sum(more["confident"], more["weight"])
    return {**found, "confident": confident, "confident_accuracy": right}

  def logits(self, image: tf.Tensor, training: bool) -> tf.Tensor:
    """Returns float32 [n, classes]."""
    return tf.cast(self.model["network"](image, training=training), tf.float32)


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
