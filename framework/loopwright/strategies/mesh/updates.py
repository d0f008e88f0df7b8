"""Updates that compute new values first and then assign them.

For variables that are split over a mesh: an update in place of such a variable can have no effect
in TensorFlow 2.20. The rules are those of Keras, written again for optimizers whose rule is known.
A checkpoint has the slots in the layout of other runs: joined, as fused ones are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.trackable import base
from tensorflow.python.training.saving.saveable_object import SaveSpec

from loopwright.errors import ConfigError
from loopwright.graphs.aliases import TensorLike, Variable
from loopwright.host import lazy_keras
from loopwright.host.lazy_keras import KerasOptimizer
from loopwright.models import models
from loopwright.optimizers import rule
from loopwright.optimizers.adapters import Optimizer, OptimizerFactory
from loopwright.optimizers.fusion import Fusion
from loopwright.optimizers.saved_layout import SavedOptimizer
from loopwright.strategies.mesh.variables import assigning_if, made_like

_KINDS = ("SGD", "Adam", "AdamW")
_VALUE = "VARIABLE_VALUE"
_CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


def made(
  optimizer: KerasOptimizer,
  variables: Sequence[Variable],
  *,
  factory: OptimizerFactory,
  fused: bool,
) -> Optimizer:
  """Returns a built optimizer; see `adapters.made`.

  Its slots are split as their variables are, and saved as those of another run.

  Args:
    fused: whether another run would fuse small variables.

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
  if rule.groups_of(optimizer):
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
  one = rule.built(optimizer, variables)
  one.update = update
  joined = joined_variables(optimizer, slots, variables, fused=fused)
  saved = SavedOptimizer(optimizer, one.learning_rate, joined)
  fusion = Fusion(variables, enabled=False)
  return Optimizer(rule=one, fusion=fusion, saved=saved, factory=factory)


def update(
  optimizer: KerasOptimizer, index: int, gradient: tf.Tensor, variable: Variable, rate: TensorLike
) -> None:
  """An `Update` of optimizers of these kinds, weight decay included."""
  targets = [models.raw(each) for each in (variable, *_slots(optimizer, index))]
  values = [target.read_value() for target in targets]
  updates = models.raw(optimizer.iterations).read_value()
  rate = tf.cast(rate, targets[0].dtype)
  new = _moved(optimizer, gradient, values, rate, _decay(optimizer, variable), updates)
  for target, value in zip(targets, new, strict=True):
    target.assign(value, read_value=False)


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
    with assigning_if(tf.math.is_finite(total)):  # as a step does; DTensor fails if it is constant
      for index, gradient in enumerate(tape.gradient(total, raw)):
        update(optimizer, index, gradient, variables[index], tf.constant(_RATE))

  for slot in slots:
    if slot.dtype.is_floating and slot.shape.rank:
      slot.assign(np.zeros(slot.shape, slot.dtype.as_numpy_dtype))
  step()
  moved = [variable.numpy() for variable in raw]
  for variable, value in zip([*raw, *slots], [*before, *kept], strict=True):
    variable.assign(value)
  count, nothing = tf.constant(models.raw(optimizer.iterations).numpy()), tf.zeros([], tf.float64)
  for index, (given, was, now) in enumerate(zip(variables, before, moved, strict=True)):
    values = [tf.constant(was, tf.float64), *(nothing for _ in _slots(optimizer, index))]
    decay = _decay(optimizer, given)
    wanted = _moved(optimizer, tf.constant(0.5), values, tf.constant(_RATE), decay, count)[
      0
    ].numpy()
    tolerance = 64 * _EPSILON.get(models.raw(given).dtype.name, 2.0**-23)
    if not np.allclose(now.astype(np.float64), wanted, rtol=tolerance, atol=tolerance):
      raise ConfigError(
        f"a trial update by optimizer {name!r} gave wrong values of variable "
        f"{models.name(given)!r}, off by {np.abs(now - wanted).max():.3g}; give it another layout."
      )


_RATE = 0.125
_EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def _slots(optimizer: KerasOptimizer, index: int) -> list[Variable]:
  if hasattr(optimizer, "beta_1"):
    return [optimizer._momentums[index], optimizer._velocities[index]]
  return [optimizer.momentums[index]] if optimizer.momentum else []


def _decay(optimizer: KerasOptimizer, variable: Variable) -> float | None:
  return optimizer.weight_decay if optimizer._use_weight_decay(variable) else None


def _moved(
  optimizer: KerasOptimizer,
  gradient: tf.Tensor,
  values: Sequence[tf.Tensor],
  rate: tf.Tensor,
  decay: float | None,
  updates: tf.Tensor,
) -> list[tf.Tensor]:
  """Returns the values of a variable and its slots after an update, in the variable's dtype.

  Sutskever et al., "On the importance of initialization and momentum" (2013), section 2. Kingma &
  Ba, "Adam" (2015), the form that ends section 2: epsilon outside the correction.
  """
  value, *slots = values
  dtype = value.dtype
  rate, gradient = tf.cast(rate, dtype), tf.cast(gradient, dtype)
  if decay is not None:
    value -= value * tf.cast(decay, dtype) * rate
  if not hasattr(optimizer, "beta_1"):
    move = -rate * gradient
    if not slots:
      return [value + move]
    momentum = tf.cast(optimizer.momentum, dtype)
    speed = momentum * slots[0] + move
    return [value + (momentum * speed + move if optimizer.nesterov else speed), speed]
  mean, square = slots
  step = tf.cast(updates + 1, dtype)
  beta_1, beta_2 = tf.cast(optimizer.beta_1, dtype), tf.cast(optimizer.beta_2, dtype)
  mean += (gradient - mean) * (1 - beta_1)
  square += (tf.square(gradient) - square) * (1 - beta_2)
  corrected = rate * tf.sqrt(1 - tf.pow(beta_2, step)) / (1 - tf.pow(beta_1, step))
  value -= corrected * mean / (tf.sqrt(square) + tf.cast(optimizer.epsilon, dtype))
  return [value, mean, square]


# ---- Checkpoints ----


class JoinedSlots(base.Trackable):
  """Slots of several variables, which a checkpoint has as one flat tensor.

  Attributes:
    name, dtype, saved_shape: those of the flat tensor.
  """

  def __init__(self, slots: Sequence[Variable]) -> None:
    self._slots = [models.raw(slot) for slot in slots]
    self._sizes = [slot.shape.num_elements() for slot in self._slots]
    self.name, self.dtype = self._slots[0].name, self._slots[0].dtype
    self.saved_shape = tf.TensorShape([sum(self._sizes)])

  def _serialize_to_tensors(self) -> dict[str, SaveSpec]:
    return {_VALUE: SaveSpec(self._joined, "", _VALUE, dtype=self.dtype, device=_CPU)}

  def _joined(self) -> tf.Tensor:
    return tf.concat([tf.reshape(slot.numpy(), [-1]) for slot in self._slots], axis=0)

  def _restore_from_tensors(self, tensors: Mapping[str, tf.Tensor]) -> None:
    parts = tf.split(tf.ensure_shape(tensors[_VALUE], self.saved_shape), self._sizes)
    for slot, part in zip(self._slots, parts, strict=True):
      slot.assign(tf.reshape(part, slot.shape), read_value=False)


def joined_variables(
  optimizer: KerasOptimizer,
  slots: Mapping[int, Sequence[Variable]],
  variables: Sequence[Variable],
  *,
  fused: bool,
) -> list[Any]:
  """Returns the variables of an optimizer whose slots are not fused, as if they were.

  Args:
    optimizer: a built optimizer of either Keras.
    slots: index of a variable -> its slots, in the order in which they were made.
    variables: those of the optimizer, in its order.
    fused: whether another run would fuse small variables.
  """
  layout = Fusion(variables, enabled=fused, make=False)
  own = {id(models.raw(slot)) for group in slots.values() for slot in group}
  others = [v for v in optimizer._variables if id(models.raw(v)) not in own]
  groups = [*layout.groups, *([index] for index in layout.singles)]
  return [*others, *_arranged(slots, groups)]


def _arranged(
  slots: Mapping[int, Sequence[Variable]], groups: Sequence[Sequence[int]]
) -> Iterator[Any]:
  for group in groups:
    for kind in zip(*(slots.get(index, ()) for index in group), strict=True):
      yield kind[0] if len(kind) == 1 else JoinedSlots(kind)
