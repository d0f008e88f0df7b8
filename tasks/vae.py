"""A variational autoencoder of Fashion-MNIST whose divergence is annealed by step.

In the first `annealing_steps` the weight of the divergence rises from 0 to 1: `batch["step"]` is
the number of the step. The noise of an example depends on its place in the data stream, so N
replicas train like one.

    python -m loopwright.tasks.samples runs/fashion_mnist_vae --output=samples.png

Kingma and Welling, "Auto-Encoding Variational Bayes" (2014); the annealing is that of Bowman et al.
(2016), section 3.1.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

import loopwright
from loopwright import Batch, ConfigError, Loss, Source, Task
from loopwright.graphs.randomness import draw_each, example_seeds
from loopwright.metrics import Weighted, weighted_sum
from loopwright.tasks.image_classification import ImageData

SHAPE = (28, 28, 1)


@loopwright.register
class Vae(Task):
  """Learns a code of normally distributed numbers for 28x28 grey images, and to draw from it."""

  def __init__(
    self, *, data: ImageData, code_size: int = 16, width: int = 32, annealing_steps: int = 1000
  ) -> None:
    """Keeps its arguments.

    Args:
      data: images of shape (28, 28, 1); their labels are not used.
      code_size: numbers in the code of an image.
      width: channels of the narrowest hidden layer of both networks.
      annealing_steps: steps until the divergence has its full weight; 0 begins with it.

    Raises:
      ConfigError: images of another shape, or negative `annealing_steps`.
    """
    if data.image_shape != SHAPE:
      raise ConfigError(
        f"Vae.data has images of shape {data.image_shape}; they must be of shape {SHAPE}."
      )
    if annealing_steps < 0:
      raise ConfigError(f"Vae.annealing_steps is {annealing_steps}; it must be 0 or more.")
    self._data, self._width, self._annealing_steps = data, width, annealing_steps
    self.noise_shape = (code_size,)

  def build_model(self) -> dict[str, keras.Model]:
    """Returns both networks."""
    (size,) = self.noise_shape
    return {
      "encoder": encoder(code_size=size, width=self._width),
      "decoder": decoder(code_size=size, width=self._width),
    }

  def source(self, split: str) -> Source:
    """Returns the images of a split."""
    return self._data.sources[split]

  def preprocess(self, batch: Batch, training: bool) -> Batch:
    """Scales images to [-1, 1]; adds "noise", float32 [n, code_size]."""
    seeds = example_seeds(batch, training)
    return {
      **batch,
      "image": tf.cast(batch["image"], tf.float32) / 127.5 - 1.0,
      "noise": draw_each(tf.random.stateless_normal, seeds, self.noise_shape),
    }

  def forward(self, batch: Batch, training: bool) -> dict[str, tf.Tensor]:
    """Returns "divergence" from the prior and "distortion", both in nats, float32 [n]."""
    mean, log_deviation = tf.split(self.model["encoder"](batch["image"], training=training), 2, -1)
    code = mean + tf.exp(log_deviation) * batch["noise"]
    drawn = self.model["decoder"](code, training=training)
    each = tf.square(mean) + tf.exp(2.0 * log_deviation) - 1.0 - 2.0 * log_deviation
    pixels = negative_log_likelihood(batch["image"], *tf.split(drawn, 2, -1))
    return {
      "divergence": 0.5 * tf.reduce_sum(each, axis=1),
      "distortion": tf.reduce_sum(pixels, axis=[1, 2, 3]),
    }

  def loss(self, outputs: dict[str, tf.Tensor], batch: Batch) -> Loss:
    """The negative evidence lower bound (ELBO) in nats, its divergence annealed."""
    steps = tf.cast(batch["step"], tf.float32)
    annealed = tf.minimum(1.0, steps / max(self._annealing_steps, 1))
    if self._annealing_steps == 0:
      annealed = tf.ones_like(steps)
    losses = outputs["distortion"] + annealed * outputs["divergence"]
    return Loss.from_examples(losses, batch["weight"])

  def metrics(self, outputs: dict[str, tf.Tensor], batch: Batch) -> dict[str, Weighted]:
    """The bound, never annealed, in nats and in bits per pixel; the divergence in it."""
    bound = -outputs["distortion"] - outputs["divergence"]
    bits = -bound / (math.prod(SHAPE) * math.log(2.0))
    return {
      "elbo": weighted_sum(bound, batch["weight"]),
      "bits_per_dimension": weighted_sum(bits, batch["weight"]),
      "divergence": weighted_sum(outputs["divergence"], batch["weight"]),
    }

  def export_signature(self) -> Any:
    """Serves noise [n, code_size] -> images [n, 28, 28, 1] in [0, 1]."""

    @tf.function(input_signature=[tf.TensorSpec((None, *self.noise_shape), tf.float32, "noise")])
    def serve(noise: tf.Tensor) -> dict[str, tf.Tensor]:
      mean, _ = tf.split(self.model["decoder"](noise, training=False), 2, -1)
      return {"image": tf.clip_by_value((mean + 1.0) / 2.0, 0.0, 1.0)}

    return serve


def negative_log_likelihood(image: tf.Tensor, mean: tf.Tensor, log_scale: tf.Tensor) -> tf.Tensor:
  """Returns nats per pixel of a logistic distribution in 256 bins, of the shape of `image`.

  Salimans et al. (2017), "PixelCNN++", section 2.1; black and white have the tails.

  Args:
    image: float32 in [-1, 1], multiples of 2/255 from -1.
    mean: of the distribution.
    log_scale: logarithm of its scale; at least -7 is used.
  """
  scale = tf.exp(-tf.maximum(log_scale, -7.0))
  above, below = scale * (image - mean + 1.0 / 255.0), scale * (image - mean - 1.0 / 255.0)
  inside = tf.math.log(tf.maximum(tf.sigmoid(above) - tf.sigmoid(below), 1e-12))
  white = tf.where(image > 0.999, -tf.nn.softplus(below), inside)
  return -tf.where(image < -0.999, -tf.nn.softplus(-above), white)


def encoder(*, code_size: int, width: int) -> keras.Model:
  """Images [n, 28, 28, 1] -> means and log deviations of the code [n, 2 code_size]."""
  layers = keras.layers
  return keras.Sequential(
    [
      keras.Input(SHAPE),
      layers.Conv2D(width, 4, strides=2, padding="same", activation="silu"),
      layers.Conv2D(2 * width, 4, strides=2, padding="same", activation="silu"),
      layers.Flatten(),
      layers.Dense(8 * width, activation="silu"),
      layers.Dense(2 * code_size, dtype="float32"),
    ],
    name="encoder",
  )


def decoder(*, code_size: int, width: int) -> keras.Model:
  """Codes [n, code_size] -> means and log scales of the pixels [n, 28, 28, 2]."""
  layers = keras.layers
  return keras.Sequential(
    [
      keras.Input((code_size,)),
      layers.Dense(8 * width, activation="silu"),
      layers.Dense(7 * 7 * 2 * width, activation="silu"),
      layers.Reshape((7, 7, 2 * width)),
      layers.Conv2DTranspose(width, 4, strides=2, padding="same", activation="silu"),
      layers.Conv2DTranspose(2, 4, strides=2, padding="same", dtype="float32"),
    ],
    name="decoder",
  )
