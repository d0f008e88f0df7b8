"""A small GAN on Fashion-MNIST: two optimizers, k discriminator updates per generator update.

The alternating updates are a few lines of `train_step`. The noise of an example depends on its
place in the data stream, so N replicas train like one.

    python -m loopwright.tasks.samples runs/fashion_mnist_gan --output=samples.png

draws a sheet of samples from the newest checkpoint of a run.

Goodfellow et al., "Generative Adversarial Nets" (2014), algorithm 1, with the non-saturating loss
of its section 3; the convolutional networks follow Radford et al., "DCGAN" (2016).
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

import loopwright
from loopwright import Batch, ConfigError, EvalStep, Loss, Source, Step, Task
from loopwright.graphs.randomness import draw_each, example_seeds
from loopwright.metrics import weighted_sum
from loopwright.tasks.image_classification import ImageData


@loopwright.register
class Gan(Task):
  """Learns to generate 28x28 grey images; needs optimizers "generator" and "discriminator"."""

  def __init__(
    self,
    *,
    data: ImageData,
    discriminator_steps: int = 1,
    noise_size: int = 64,
    width: int = 32,
    dropout: float = 0.3,
  ) -> None:
    """Keeps its arguments.

    Args:
      data: images of shape (28, 28, 1); their labels are not used.
      discriminator_steps: discriminator updates before each generator update, k in the paper; each
        uses 1 / k of the batch, so k must divide a replica's rows.
      noise_size: size of the generator's input.
      width: channels of the narrowest hidden layer of both networks.
      dropout: dropout rate of the discriminator.
    """
    if discriminator_steps < 1:
      raise ConfigError(f"Gan.discriminator_steps is {discriminator_steps}; it must be 1 or more.")
    if data.image_shape != (28, 28, 1):
      raise ConfigError(
        f"Gan.data has images of shape {data.image_shape}; they must be of shape (28, 28, 1)."
      )
    self._data, self._k = data, discriminator_steps
    self.noise_shape, self._width, self._dropout = (noise_size,), width, dropout

  def build_model(self) -> dict[str, keras.Model]:
    """Returns the two networks; each optimizer updates the network of its name."""
    return {
      "generator": generator(noise_size=self.noise_shape[0], width=self._width),
      "discriminator": discriminator(width=self._width, dropout=self._dropout),
    }

  def source(self, split: str) -> Source:
    """Returns the images of a split."""
    return self._data.sources[split]

  def preprocess(self, batch: Batch, training: bool) -> Batch:
    """Scales images to [-1, 1]; adds "noise" and "other_noise", float32 [n, noise_size]."""
    seeds = example_seeds(batch, training)
    return {
      **batch,
      "image": tf.cast(batch["image"], tf.float32) / 127.5 - 1.0,
      "noise": draw_each(tf.random.stateless_normal, seeds, self.noise_shape),
      "other_noise": draw_each(tf.random.stateless_normal, seeds + 1, self.noise_shape),
    }

  def train_step(self, step: Step, batch: Batch) -> None:
    """Updates the discriminator on each of k shares of the batch, then the generator on all."""
    rows = batch["weight"].shape[0]
    if rows % self._k:
      raise ConfigError(
        f"Gan.discriminator_steps is {self._k}, but a replica has {rows} rows of the "
        "batch; it must divide them: change it or run.global_batch_size."
      )
    for first in range(self._k):
      # Every k-th row: so a share has the same examples on any number of replicas.
      share = {name: value[first :: self._k] for name, value in batch.items()}
      step.update(self.discriminator_loss, share, optimizer="discriminator")
    step.update(self.generator_loss, batch, optimizer="generator")

  def discriminator_loss(self, batch: Batch) -> Loss:
    """Cross-entropy for real images (1) and generated ones (0)."""
    real = self.model["discriminator"](batch["image"], training=True)
    drawn = self.model["generator"](batch["noise"], training=True)
    fake = self.model["discriminator"](tf.stop_gradient(drawn), training=True)
    losses = tf.nn.softplus(-real) + tf.nn.softplus(fake)
    return Loss.from_examples(losses[:, 0], batch["weight"])

  def generator_loss(self, batch: Batch) -> Loss:
    """The non-saturating loss: -log D(G(noise))."""
    drawn = self.model["generator"](batch["other_noise"], training=True)
    fake = self.model["discriminator"](drawn, training=True)
    return Loss.from_examples(tf.nn.softplus(-fake)[:, 0], batch["weight"])

  def eval_step(self, step: EvalStep, batch: Batch) -> None:
    """Logs the discriminator's accuracy on real and on generated images."""
    real = self.model["discriminator"](batch["image"], training=False)[:, 0]
    drawn = self.model["generator"](batch["noise"], training=False)
    fake = self.model["discriminator"](drawn, training=False)[:, 0]
    weight = batch["weight"]
    step.log(
      {
        "loss": weighted_sum(tf.nn.softplus(-real) + tf.nn.softplus(fake), weight),
        "real_accuracy": weighted_sum(real > 0, weight),
        "fake_accuracy": weighted_sum(fake < 0, weight),
      }
    )

  def export_signature(self) -> Any:
    """Serves noise [n, noise_size] -> images [n, 28, 28, 1] in [0, 1]."""

    @tf.function(input_signature=[tf.TensorSpec((None, *self.noise_shape), tf.float32, "noise")])
    def serve(noise: tf.Tensor) -> dict[str, tf.Tensor]:
      return {"image": (self.model["generator"](noise, training=False) + 1.0) / 2.0}

    return serve


def generator(*, noise_size: int, width: int) -> keras.Model:
  """Noise [n, noise_size] -> images [n, 28, 28, 1] in [-1, 1]."""
  layers = keras.layers
  return keras.Sequential(
    [
      keras.Input((noise_size,)),
      layers.Dense(7 * 7 * 2 * width),
      layers.LeakyReLU(0.2),
      layers.Reshape((7, 7, 2 * width)),
      layers.Conv2DTranspose(width, 4, strides=2, padding="same"),
      layers.LeakyReLU(0.2),
      layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="tanh", dtype="float32"),
    ],
    name="generator",
  )


def discriminator(*, width: int, dropout: float, bias: bool = True) -> keras.Model:
  """Images [n, 28, 28, 1] -> one logit each [n, 1], plus a `bias`; positive means real."""
  layers = keras.layers
  return keras.Sequential(
    [
      keras.Input((28, 28, 1)),
      layers.Conv2D(width, 4, strides=2, padding="same"),
      layers.LeakyReLU(0.2),
      layers.Conv2D(2 * width, 4, strides=2, padding="same"),
      layers.LeakyReLU(0.2),
      layers.Flatten(),
      layers.Dropout(dropout),
      layers.Dense(1, use_bias=bias, dtype="float32"),
    ],
    name="discriminator",
  )
