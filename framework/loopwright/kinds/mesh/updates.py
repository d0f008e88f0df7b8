"""Updates that compute new values first and then assign them.

For variables that are split over a mesh: an update in place of such a variable can have no effect
in TensorFlow 2.20. The rules are those of Keras, written again for optimizers whose rule is known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.aliases import TensorLike, Variable
from loopwright.errors import ConfigError
from loopwright.host import lazy_keras
from loopwright.host.lazy_keras import KerasOptimizer
from loopwright.kinds.mesh.saved import joined_variables as joined_variables
from loopwright.kinds.mesh.variables import made_like
from loopwright.models import models
from loopwright.optimizers.rule import groups_of

_KINDS = ("SGD", "Adam", "AdamW")


def prepare(optimizer: KerasOptimizer, variables: Sequence[Variable]) -> dict[int, list[Variable]]:
  """Makes the slots of `optimizer`, which is not built yet, be split as their variables are.

  Returns:
    Index of a variable -> its slots; filled when the optimizer is built.

  Raises:
    ConfigError: an optimizer whose rule is not written here, or one with amsgrad.
  """
  packages = lazy_keras.kerases()
  known = [getattr(package.optimizers, kind) for kind in _KINDS for package in packages]
  if type(optimizer) not in known or getattr(optimizer, "amsgrad", False):
    raise ConfigError(
      f"the optimizer is a {type(optimizer).__name__}, but model_parallel can update only with "
      f"{', '.join(_KINDS)} of keras or tf_keras, without amsgrad."
    )
  if groups_of(optimizer):
    raise ConfigError("model_parallel has one update for all variables; use no grouped optimizer.")
  usual = optimizer.add_variable_from_reference
  slots: dict[int, list[Variable]] = {}
  places = {id(models.raw(variable)): index for index, variable in enumerate(variables)}

  @functools.wraps(usual)
  def like_its_reference(*args: Any, **kwargs: Any) -> Any:
    given = args[0] if args else kwargs.get("reference_variable", kwargs.get("model_variable"))
    reference = models.raw(given)
    with made_like(reference):
      slot = usual(*args, **kwargs)
    slots.setdefault(places[id(reference)], []).append(slot)
    return slot

  optimizer.add_variable_from_reference = like_its_reference
  return slots


def update(
  optimizer: KerasOptimizer, index: int, gradient: tf.Tensor, variable: Variable, rate: TensorLike
) -> None:
  """An `Update` of optimizers of these kinds, weight decay included."""
  raw = models.raw(variable)
  rate = tf.cast(rate, raw.dtype)
  gradient, value = tf.cast(gradient, raw.dtype), raw.read_value()
  if optimizer.weight_decay is not None and optimizer._use_weight_decay(variable):
    value -= value * tf.cast(optimizer.weight_decay, raw.dtype) * rate
  rule: Callable[..., list[tuple[Variable, tf.Tensor]]] = (
    _adam if hasattr(optimizer, "beta_1") else _gradient_descent
  )
  for target, new in rule(optimizer, index, gradient, raw, value, rate):
    target.assign(new, read_value=False)


def prove(name: str, optimizer: KerasOptimizer, variables: Sequence[Variable]) -> None:
  """Makes an update whose result is known, in a trace that differentiates, and undoes it (host).

  Raises:
    ConfigError: a variable does not move as the rule says.
  """
  slots = [models.raw(slot) for slot in optimizer.variables]
  raw = [models.raw(variable) for variable in variables]
  before = [variable.numpy() for variable in raw]
  kept = [slot.numpy() for slot in slots]

  @tf.function(autograph=False)
  def step() -> None:
    with tf.GradientTape() as tape:
      total = tf.add_n([0.5 * tf.reduce_sum(tf.cast(v, tf.float32)) for v in raw])
    for index, gradient in enumerate(tape.gradient(total, raw)):
      update(optimizer, index, gradient, variables[index], tf.constant(_RATE))

  for slot in slots:
    if slot.dtype.is_floating and slot.shape.rank:
      slot.assign(np.zeros(slot.shape, slot.dtype.as_numpy_dtype))
  step()
  moved = [variable.numpy() for variable in raw]
  for variable, value in zip([*raw, *slots], [*before, *kept], strict=True):
    variable.assign(value)
  count = float(models.raw(optimizer.iterations).numpy()) + 1
  for given, was, now in zip(variables, before, moved, strict=True):
    wanted = _known_move(optimizer, given, was.astype(np.float64), count)
    tolerance = 64 * _EPSILON.get(models.raw(given).dtype.name, 2.0**-23)
    if not np.allclose(now.astype(np.float64), wanted, rtol=tolerance, atol=tolerance):
      raise ConfigError(
        f"a trial update by optimizer {name!r} gave wrong values of variable "
        f"{models.name(given)!r}, off by {np.abs(now - wanted).max():.3g}; give it another layout."
      )


_RATE = 0.125
_EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def _known_move(
  optimizer: KerasOptimizer, variable: Variable, value: np.ndarray, count: float
) -> np.ndarray:
  """Returns the first update from empty slots, for a gradient of 0.5."""
  if optimizer.weight_decay is not None and optimizer._use_weight_decay(variable):
    value = value * (1 - optimizer.weight_decay * _RATE)
  if not hasattr(optimizer, "beta_1"):
    return value - _RATE * 0.5 * (1 + optimizer.momentum * bool(optimizer.nesterov))
  mean, square = 0.5 * (1 - optimizer.beta_1), 0.25 * (1 - optimizer.beta_2)
  corrected = _RATE * np.sqrt(1 - optimizer.beta_2**count) / (1 - optimizer.beta_1**count)
  return value - corrected * mean / (np.sqrt(square) + optimizer.epsilon)


def _gradient_descent(
  optimizer: KerasOptimizer,
  index: int,
  gradient: tf.Tensor,
  raw: Variable,
  value: tf.Tensor,
  rate: tf.Tensor,
) -> list[tuple[Variable, tf.Tensor]]:
  """Sutskever et al., "On the importance of initialization and momentum" (2013), section 2."""
  move = -rate * gradient
  if not optimizer.momentum:
    return [(raw, value + move)]
  slot, momentum = models.raw(optimizer.momentums[index]), tf.cast(optimizer.momentum, raw.dtype)
  speed = momentum * slot.read_value() + move
  return [(slot, speed), (raw, value + (momentum * speed + move if optimizer.nesterov else speed))]


def _adam(
  optimizer: KerasOptimizer,
  index: int,
  gradient: tf.Tensor,
  raw: Variable,
  value: tf.Tensor,
  rate: tf.Tensor,
) -> list[tuple[Variable, tf.Tensor]]:
  """Kingma & Ba, "Adam" (2015), the form that ends section 2: epsilon outside the correction."""
  dtype = raw.dtype
  step = tf.cast(models.raw(optimizer.iterations).read_value() + 1, dtype)
  beta_1, beta_2 = tf.cast(optimizer.beta_1, dtype), tf.cast(optimizer.beta_2, dtype)
  first, second = (
    models.raw(slots[index]) for slots in (optimizer._momentums, optimizer._velocities)
  )
  mean, square = first.read_value(), second.read_value()
  mean += (gradient - mean) * (1 - beta_1)
  square += (tf.square(gradient) - square) * (1 - beta_2)
  corrected = rate * tf.sqrt(1 - tf.pow(beta_2, step)) / (1 - tf.pow(beta_1, step))
  moved = value - corrected * mean / (tf.sqrt(square) + tf.cast(optimizer.epsilon, dtype))
  return [(first, mean), (second, square), (raw, moved)]
