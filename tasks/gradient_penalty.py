"""A GAN with a gradient penalty (WGAN-GP): the loss contains a gradient and is differentiated.

The discriminator becomes a critic without a sigmoid. A penalty keeps its slope near 1 at images
between real and generated ones.

Gulrajani et al., "Improved Training of Wasserstein GANs" (2017), algorithm 1.
"""

from __future__ import annotations

import keras
import tensorflow as tf

import loopwright
from loopwright import Batch, ConfigError, EvalStep, Loss
from loopwright.graphs.randomness import draw_each, example_seeds
from loopwright.metrics import weighted_sum
from loopwright.tasks.gan import Gan, discriminator, generator
from loopwright.tasks.image_classification import ImageData


@loopwright.register
class WassersteinGan(Gan):
  """Learns to generate 28x28 grey images; needs optimizers "generator" and "discriminator"."""

  def __init__(
    self,
    *,
    data: ImageData,
    discriminator_steps: int = 5,
    noise_size: int = 64,
    width: int = 32,
    penalty: float = 10.0,
  ) -> None:
    """Keeps its arguments; those not described here are as for `Gan`.

    Args:
      discriminator_steps: as for `Gan`; n_critic in the paper.
      penalty: weight of the gradient penalty, lambda in the paper.

    Raises:
      ConfigError: a value is out of its range.
    """
    if not penalty >= 0:
      raise ConfigError(f"WassersteinGan.penalty is {penalty}; it must be 0 or more, such as 10.")
    super().__init__(
      data=data, discriminator_steps=discriminator_steps, noise_size=noise_size, width=width,
      dropout=0.0,
    )  # fmt: skip
    self._penalty = penalty

  def build_model(self) -> dict[str, keras.Model]:
    """Returns the two networks; a last bias of the critic would cancel, so it has none."""
    return {
      "generator": generator(noise_size=self.noise_shape[0], width=self._width),
      "discriminator": discriminator(width=self._width, dropout=0.0, bias=False),
    }

  def preprocess(self, batch: Batch, training: bool) -> Batch:
    """Adds "mix", float32 [n]: where to penalise, from generated (0) to real (1)."""
    mix = draw_each(tf.random.stateless_uniform, example_seeds(batch, training) + 2)
    return {**super().preprocess(batch, training), "mix": mix}

  def discriminator_loss(self, batch: Batch) -> Loss:
    """D(generated) - D(real) + penalty, per example."""
    drawn = tf.stop_gradient(self.model["generator"](batch["noise"], training=True))
    fake, real = (self._critic(image) for image in (drawn, batch["image"]))
    penalty = self.gradient_penalty(batch["image"], drawn, batch["mix"])
    return Loss.from_examples(fake - real + self._penalty * penalty, batch["weight"])

  def generator_loss(self, batch: Batch) -> Loss:
    """-D(generated)."""
    drawn = self.model["generator"](batch["other_noise"], training=True)
    return Loss.from_examples(-self._critic(drawn), batch["weight"])

  def gradient_penalty(self, real: tf.Tensor, drawn: tf.Tensor, mix: tf.Tensor) -> tf.Tensor:
    """(|gradient of D| - 1)^2 at mix x real + (1 - mix) x drawn; images [n, h, w, c] -> [n].

    The tape of `step.gradients` differentiates it again.
    """
    share = mix[:, tf.newaxis, tf.newaxis, tf.newaxis]
    between = share * real + (1.0 - share) * drawn
    with tf.GradientTape() as tape:
      tape.watch(between)
      # D treats each image separately, so the gradient of the sum is each image's own gradient.
      total = tf.reduce_sum(self._critic(between))
    square = tf.reduce_sum(tf.square(tape.gradient(total, between)), axis=[1, 2, 3])
    return tf.square(tf.sqrt(square + 1e-12) - 1.0)  # sqrt has no finite slope at 0

  def eval_step(self, step: EvalStep, batch: Batch) -> None:
    """Logs D(real) - D(generated), the estimate of the Wasserstein distance, and the penalty."""
    drawn = self.model["generator"](batch["noise"], training=False)
    real, fake = (self._critic(image) for image in (batch["image"], drawn))
    penalty = self.gradient_penalty(batch["image"], drawn, batch["mix"])
    weight = batch["weight"]
    step.log(
      {
        "loss": weighted_sum(fake - real + self._penalty * penalty, weight),
        "distance": weighted_sum(real - fake, weight),
        "penalty": weighted_sum(penalty, weight),
      }
    )

  def _critic(self, image: tf.Tensor) -> tf.Tensor:
    return tf.cast(self.model["discriminator"](image, training=True)[:, 0], tf.float32)
