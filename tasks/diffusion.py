"""A diffusion model of Fashion-MNIST: noise is taken from images step by step.

A network learns to tell image and noise apart in a mixture of both. The mixture and its noise level
are drawn in `preprocess` from each example's seed, so N replicas train like one. Evaluation and
samples use the moving average of the weights (`Trainer.ema_decay`).

    python -m loopwright.tasks.samples runs/fashion_mnist_diffusion --output=samples.png

Ho et al., "Denoising Diffusion Probabilistic Models" (2020), with the cosine schedule of Nichol and
Dhariwal (2021), the prediction of the velocity of Salimans and Ho (2022), the sampler DDIM of Song
et al. (2021) and the variational bound of Kingma et al. (2021), "VDM" below.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

import loopwright
from loopwright import Batch, ConfigError, EvalStep, Loss, Source, Task
from loopwright.graphs.randomness import draw_each, example_seeds
from loopwright.metrics import weighted_sum
from loopwright.tasks.image_classification import ImageData

CLEAREST, NOISIEST = -13.3, 5.0
"""The range of levels, log(variance of the noise / variance of the image), as in VDM."""
SHAPE = (28, 28, 1)


@loopwright.register
class Diffusion(Task):
  """Learns to generate 28x28 grey images from noise."""

  noise_shape = SHAPE

  def __init__(self, *, data: ImageData, width: int = 32, sampling_steps: int = 50) -> None:
    """Keeps its arguments.

    Args:
      data: images of shape (28, 28, 1); their labels are not used.
      width: channels of the network at 14x14 places, a multiple of 8; twice as many at 7x7.
      sampling_steps: calls of the network to draw an image.

    Raises:
      ConfigError: images of another shape, or a width that is not a multiple of 8.
    """
    if data.image_shape != SHAPE:
      raise ConfigError(
        f"Diffusion.data has images of shape {data.image_shape}; they must be of shape {SHAPE}."
      )
    if width < 8 or width % 8:
      raise ConfigError(f"Diffusion.width is {width}; it must be a multiple of 8.")
    self._data, self._width, self._sampling_steps = data, width, sampling_steps

  def build_model(self) -> keras.Model:
    """Returns the network: mixture [n, 28, 28, 1], level [n] -> velocity [n, 28, 28, 1]."""
    return unet(width=self._width)

  def source(self, split: str) -> Source:
    """Returns the images of a split."""
    return self._data.sources[split]

  def preprocess(self, batch: Batch, training: bool) -> Batch:
    """Scales images to [-1, 1]; adds "noise", like the image, and "place" in [0, 1), float32 [n].

    In evaluation the places are evenly spread, and the same each time.
    """
    seeds = example_seeds(batch, training)
    golden = tf.cast(batch["example_id"], tf.float64) * (math.sqrt(5.0) - 1.0) / 2.0
    place = draw_each(tf.random.stateless_uniform, seeds + 1)
    return {
      **batch,
      "image": tf.cast(batch["image"], tf.float32) / 127.5 - 1.0,
      "noise": draw_each(tf.random.stateless_normal, seeds, SHAPE),
      "place": place if training else tf.cast(tf.math.floormod(golden, 1.0), tf.float32),
    }

  def forward(self, batch: Batch, training: bool) -> tf.Tensor:
    """Returns the velocity [n, 28, 28, 1] of mixtures at `training_level`."""
    return self._velocity(batch, training_level(batch["place"]), training=training)

  def loss(self, outputs: tf.Tensor, batch: Batch) -> Loss:
    """The squared error of the velocity, mean over pixels."""
    image, noise = parts(training_level(batch["place"]))
    error = outputs - (image * batch["noise"] - noise * batch["image"])
    return Loss.from_examples(tf.reduce_mean(tf.square(error), axis=[1, 2, 3]), batch["weight"])

  def eval_step(self, step: EvalStep, batch: Batch) -> None:
    """Logs the loss and the variational bound in bits per pixel."""
    super().eval_step(step, batch)
    step.log({"bits_per_dimension": weighted_sum(self._bits(batch), batch["weight"])})

  def export_signature(self) -> Any:
    """Serves noise [n, 28, 28, 1] -> images [n, 28, 28, 1] in [0, 1]."""

    @tf.function(input_signature=[tf.TensorSpec((None, *SHAPE), tf.float32, "noise")])
    def serve(noise: tf.Tensor) -> dict[str, tf.Tensor]:
      return {"image": (self._drawn(noise) + 1.0) / 2.0}

    return serve

  def _velocity(self, batch: Batch, level: tf.Tensor, *, training: bool) -> tf.Tensor:
    image, noise = parts(level)
    mixture = image * batch["image"] + noise * batch["noise"]
    return self.model([mixture, level], training=training)

  def _bits(self, batch: Batch) -> tf.Tensor:
    """Returns an unbiased estimate of the bound, bits per pixel of 256 values, float32 [n].

    The level is uniform here. VDM, equations 11 to 15; pixels follow a rounded normal distribution.
    """
    level = uniform_level(batch["place"])
    image, noise = parts(level)
    mixture = image * batch["image"] + noise * batch["noise"]
    predicted = noise * mixture + image * self._velocity(batch, level, training=False)
    diffusion = 0.5 * (NOISIEST - CLEAREST) * tf.square(batch["noise"] - predicted)

    image, noise = parts(tf.constant([NOISIEST]))
    left = tf.square(image * batch["image"])
    prior = 0.5 * (left + tf.square(noise) - 1.0 - 2.0 * tf.math.log(noise))

    half_step = 1.0 / 255.0 / math.exp(CLEAREST / 2.0)  # in standard deviations
    below, above = -batch["noise"] - half_step, -batch["noise"] + half_step
    first, last = batch["image"] < -0.999, batch["image"] > 0.999
    likely = tf.where(last, 1.0, _normal(above)) - tf.where(first, 0.0, _normal(below))
    reconstruction = -tf.math.log(tf.maximum(likely, 1e-12))

    nats = tf.reduce_mean(diffusion + prior + reconstruction, axis=[1, 2, 3])
    return nats / math.log(2.0)

  def _drawn(self, mixture: tf.Tensor) -> tf.Tensor:
    """Returns images in [-1, 1] by DDIM, without further noise."""
    levels = cosine_level(tf.linspace(1.0, 0.0, self._sampling_steps + 1))
    for number in tf.range(self._sampling_steps):
      level = tf.fill(tf.shape(mixture)[:1], levels[number])
      image, noise = parts(level)
      guess = image * mixture - noise * self.model([mixture, level], training=False)
      guess = tf.clip_by_value(guess, -1.0, 1.0)
      left = (mixture - image * guess) / noise
      image, noise = parts(levels[number + 1 : number + 2])
      mixture = image * guess + noise * left
    return mixture


def cosine_level(place: tf.Tensor) -> tf.Tensor:
  """Maps places from 0, clear, to 1, noise, to levels, float32 of the same shape."""
  angle = tf.clip_by_value(place, 1e-4, 1.0 - 1e-4) * (math.pi / 2.0)
  return tf.clip_by_value(2.0 * tf.math.log(tf.tan(angle)), CLEAREST, NOISIEST)


def uniform_level(place: tf.Tensor) -> tf.Tensor:
  """Maps places from 0 to 1 to levels from `CLEAREST` to `NOISIEST`, in a straight line."""
  return CLEAREST + (NOISIEST - CLEAREST) * place


def training_level(place: tf.Tensor) -> tf.Tensor:
  """Maps a quarter of the places to uniform levels, the others to those of the cosine schedule.

  The bound counts all levels alike, also those of a noise that nobody sees; the cosine schedule has
  few of these.
  """
  return tf.where(place < 0.25, uniform_level(4.0 * place), cosine_level((place - 0.25) / 0.75))


def parts(level: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns the factors of image and noise at levels [n], [n, 1, 1, 1]; their squares sum to 1."""
  level = level[:, tf.newaxis, tf.newaxis, tf.newaxis]
  return tf.sqrt(tf.sigmoid(-level)), tf.sqrt(tf.sigmoid(level))


def unet(*, width: int) -> keras.Model:
  """Mixture [n, 28, 28, 1] and level [n] -> velocity [n, 28, 28, 1]."""
  layers = keras.layers
  mixture, level = keras.Input(SHAPE), keras.Input(())
  angles = keras.ops.expand_dims(level, 1) * keras.ops.array([2.0**k / 8.0 for k in range(6)])
  waves = keras.ops.concatenate([keras.ops.sin(angles), keras.ops.cos(angles)], axis=1)
  condition = layers.Dense(4 * width, activation="silu")(waves)

  wide = layers.Conv2D(width, 2, strides=2)(mixture)
  wide = _block(wide, condition, width)
  deep = layers.Conv2D(2 * width, 2, strides=2)(wide)
  deep = _block(deep, condition, 2 * width)
  deep = _attention(deep)
  deep = _block(deep, condition, 2 * width)
  up = layers.Conv2DTranspose(width, 2, strides=2)(deep)
  both = layers.Concatenate()([wide, up])
  ends = _block(both, condition, width)
  ends = layers.Activation("silu")(layers.GroupNormalization(8)(ends))
  last = layers.Conv2DTranspose(1, 2, strides=2, kernel_initializer="zeros", dtype="float32")
  return keras.Model([mixture, level], last(ends), name="unet")


def _block(features: Any, condition: Any, width: int) -> Any:
  """Two convolutions beside a shortcut; the condition shifts the features between them."""
  layers = keras.layers
  inner = layers.Activation("silu")(layers.GroupNormalization(8)(features))
  inner = layers.Conv2D(width, 3, padding="same")(inner)
  inner = inner + layers.Reshape((1, 1, width))(layers.Dense(width)(condition))
  inner = layers.Activation("silu")(layers.GroupNormalization(8)(inner))
  inner = layers.Conv2D(width, 3, padding="same", kernel_initializer="zeros")(inner)
  if features.shape[-1] != width:
    features = layers.Conv2D(width, 1)(features)
  return features + inner


def _attention(features: Any) -> Any:
  """Self-attention over all places."""
  layers = keras.layers
  _, height, breadth, width = features.shape
  places = layers.Reshape((height * breadth, width))(layers.GroupNormalization(8)(features))
  attended = layers.MultiHeadAttention(num_heads=4, key_dim=width // 4)(places, places)
  return features + layers.Reshape((height, breadth, width))(attended)


def _normal(value: tf.Tensor) -> tf.Tensor:
  """Returns the cumulative distribution of the standard normal."""
  return 0.5 * tf.math.erfc(-value / math.sqrt(2.0))
