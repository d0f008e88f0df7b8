"""The update rule of Keras's ScheduleFreeAdamW, as its authors mean it.

Defazio et al., "The Road Less Scheduled" (2024), algorithm 1. Keras 3.15 on TensorFlow reads the
slot z after its update where the rule needs the value before, so the average x falls behind.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from loopwright.graphs.aliases import TensorLike, Variable
from loopwright.models import models


def update(
  optimizer: Any, index: int, gradient: tf.Tensor, variable: Variable, learning_rate: TensorLike
) -> None:
  """Updates z and its squares in slots, and y = (1 - beta_1) z + beta_1 x in the variable."""
  y = models.raw(variable)
  z, square = (models.raw(s[index]) for s in (optimizer._momentums, optimizer._velocities))
  rate, beta_1, beta_2, number = (
    tf.cast(value, y.dtype)
    for value in (learning_rate, optimizer.beta_1, optimizer.beta_2, optimizer.iterations + 1)
  )
  gradient = tf.cast(gradient, y.dtype)
  if optimizer.warmup_steps:
    rate *= tf.minimum(number / tf.cast(optimizer.warmup_steps, y.dtype), 1.0)
  squares = square.read_value()
  squares += (tf.square(gradient) - squares) * (1 - beta_2)
  size = tf.sqrt(squares / (1 - tf.pow(beta_2, number))) + optimizer.epsilon
  before = z.read_value()
  after = before - rate * gradient / size
  x = (y.read_value() - (1 - beta_1) * before) / beta_1
  x += (after - x) / number
  square.assign(squares)
  z.assign(after)
  y.assign((1 - beta_1) * after + beta_1 * x)
