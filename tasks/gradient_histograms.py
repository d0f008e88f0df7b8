"""Pretraining without labels: a network finds the gradients of images that are changed and masked.

A cell's histogram says how much the brightness rises in which direction: an outline, a collar, a
seam. What was learned is a start for tasks with few labels, by `run.warm_start`.

Wei et al., "Masked Feature Prediction for Self-Supervised Visual Pre-Training", 2022; the
histograms are those of Dalal and Triggs, "Histograms of Oriented Gradients for Human Detection",
2005.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

import loopwright
from loopwright import Batch, Loss
from loopwright.graphs.randomness import example_seeds
from loopwright.metrics import Weighted
from loopwright.tasks.fixmatch import StronglyChanged

CELLS = (4, 7)
"""Sides of the cells, in pixels."""
DIRECTIONS = 8


@loopwright.register
class GradientHistograms(StronglyChanged):
  """Predicts the histograms of an image from a strongly changed copy; reads no label."""

  def __init__(self, **options: Any) -> None:
    """Keeps its arguments; see `StronglyChanged`."""
    super().__init__(**options)
    self.chance_loss = None

  def build_model(self) -> dict[str, Any]:
    """Returns the network; its logits are the histograms."""
    height, width, _ = self._shape
    cells = sum((height // side) * (width // side) for side in CELLS)
    classes = 2 * DIRECTIONS * cells
    return {"network": self._network(input_shape=self._shape, classes=classes)}

  def preprocess(self, batch: Batch, training: bool) -> Batch:
    """Returns strongly changed images and "histograms", those of the images before the square."""
    image = super().preprocess(batch, training)["image"]
    moved, changed = self.changed(image, example_seeds(batch, training))
    return {**batch, "image": changed, "histograms": histograms(moved)}

  def forward(self, batch: Batch, training: bool) -> tf.Tensor:
    """Returns float32 histograms [n, size]."""
    return tf.cast(self.model["network"](batch["image"], training=training), tf.float32)

  def loss(self, outputs: tf.Tensor, batch: Batch) -> Loss:
    """Mean squared error."""
    losses = tf.reduce_mean(tf.square(outputs - batch["histograms"]), axis=1)
    return Loss.from_examples(losses, batch["weight"])

  def metrics(self, outputs: tf.Tensor, batch: Batch) -> dict[str, Weighted]:
    """Nothing but the loss."""
    return {}

  def export_signature(self) -> Any:
    """Serves raw images, uint8 -> histograms."""

    @tf.function(input_signature=[tf.TensorSpec((None, *self._shape), tf.uint8, "image")])
    def serve(image: tf.Tensor) -> dict[str, tf.Tensor]:
      scaled = tf.cast(image, tf.float32) / 255.0
      return {"histograms": self.forward({"image": scaled}, training=False)}

    return serve


def histograms(image: tf.Tensor) -> tf.Tensor:
  """Returns the histograms of each image twice: beside those of all its cells, and cell by cell.

  Args:
    image: float32 [n, h, w, c] in [0, 1]; its channels are averaged.

  Returns:
    float32 [n, size], from 0 to 10 and from 0 to 2.
  """
  found = []
  for side in CELLS:
    cells = gradients_in_cells(tf.reduce_mean(image, axis=3), side)
    among = cells / (tf.math.reduce_euclidean_norm(cells, axis=[1, 2, 3], keepdims=True) + 0.5)
    alone = cells / (tf.math.reduce_euclidean_norm(cells, axis=3, keepdims=True) + 0.5)
    rows = (tf.shape(image)[0], math.prod(cells.shape[1:]))
    found += [10.0 * tf.reshape(among, rows), 2.0 * tf.reshape(alone, rows)]
  return tf.concat(found, axis=1)


def gradients_in_cells(image: tf.Tensor, side: int) -> tf.Tensor:
  """Sums the lengths of gradients by direction; one between two directions is shared out to both.

  Args:
    image: float32 [n, h, w] in [0, 1]; square roots are taken, so dark parts count more.
    side: of a cell, in pixels; what is left of the image at the right and below does not count.

  Returns:
    float32 [n, h // side, w // side, DIRECTIONS]; direction d is pi * d / DIRECTIONS, and a rise
    counts like a fall.
  """
  root = tf.sqrt(tf.maximum(image, 0.0))
  right = tf.pad(root[:, :, 2:] - root[:, :, :-2], [[0, 0], [0, 0], [1, 1]])
  down = tf.pad(root[:, 2:] - root[:, :-2], [[0, 0], [1, 1], [0, 0]])
  place = tf.math.floormod(tf.atan2(down, right), math.pi) * (DIRECTIONS / math.pi)
  away = tf.abs(place[..., tf.newaxis] - tf.range(DIRECTIONS, dtype=tf.float32))
  share = tf.maximum(1.0 - tf.minimum(away, DIRECTIONS - away), 0.0)
  length = tf.sqrt(tf.square(right) + tf.square(down))[..., tf.newaxis]
  return tf.nn.avg_pool2d(length * share, side, side, "VALID") * side**2
