"""Replaces the update rules of Keras optimizers by TensorFlow's fused kernels.

Keras writes an update as a dozen elementwise operations, each a pass over memory. TensorFlow has
the same formulas as single kernels. Slots and hyperparameters stay Keras's. Results differ only by
rounding: Keras rounds 1 - beta_2 before its bias correction, the kernel after it.

On a CPU, TensorFlow splits its Adam kernel over several threads from about 400 elements on. Up to
some ten thousand elements, waiting for these threads takes longer than Keras's operations, up to
three times as long if other processes use the cores (docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import keras
import tensorflow as tf

from loopwright.graphs.aliases import TensorLike
from loopwright.host.lazy_keras import tf_keras_classes
from loopwright.models import models
from loopwright.optimizers.rule import Update

if TYPE_CHECKING:
  from loopwright.optimizers.fusion import Fusion, Gradients

MASKED = 2**17
"""Up to this many elements an optimizer updates without a branch, see `masks`."""
MASKED_EACH = 2**10
"""So it does with more, up to this many for each of the model's variables on average."""
Kernel: TypeAlias = "Callable[[Any, int, tf.Tensor, Any, tf.Tensor], bool]"
"""(optimizer, index of the variable's slots, gradient, variable, learning rate) -> whether it has
updated the variable on its device; False if it does not support the options, or Keras is faster."""
FORKED = range(2**9, 2**15)
"""Sizes in elements for which, on a CPU, Adam's kernel is slower than Keras's operations."""


def register(kind: type) -> Callable[[Kernel], Kernel]:
  """Uses a kernel for the updates of Keras 3 optimizers of exactly this class (a decorator)."""

  def keep(kernel: Kernel) -> Kernel:
    _KERNELS[kind] = kernel
    return kernel

  return keep


def update_of(optimizer: Any, usual: Update) -> Update | None:
  """Returns the update of `optimizer` by a kernel of the same formula, if there is one.

  For Adam and AdamW (without amsgrad) and SGD of both Keras generations, and for what is
  registered, but not for subclasses.

  `usual` is Keras's update, for what the kernel does not support.
  """
  kind = type(optimizer)
  known = kind in tf_keras_classes("optimizers.Adam", "optimizers.AdamW", "optimizers.SGD")
  kernel = _apply if known else _KERNELS.get(kind)
  if kernel is None:
    return None

  def update(
    optimizer: Any, index: int, gradient: tf.Tensor, variable: Any, rate: TensorLike
  ) -> None:
    if not kernel(optimizer, index, gradient, variable, rate):
      usual(optimizer, index, gradient, variable, rate)

  return update


def masks(
  optimizer: Any, variables: Sequence[Any], *, originals: int, on_gpus: bool = False
) -> bool:
  """Whether `apply_masked` can update these variables, and is faster than a branch.

  Operations in a branch wait until it is known which one is taken: 40 to 90 us of a step of 0.5 to
  1 ms, and each variable used in it is handed in by an operation of its own. Without a branch, all
  that needs no gradient runs beside the backward pass. The price is one more pass over the
  gradients, so on CPUs it is for small models and small variables only. On GPUs the host waits at a
  branch until the backward pass has ended, so models of every size do without one, also with
  momentum and weight decay.

  Args:
    variables: those with which it is built: small ones are fused.
    originals: how many variables of the model these are.
    on_gpus: whether they are on GPUs.
  """
  sgd, adam = keras.optimizers.SGD, keras.optimizers.Adam
  adams = (adam, keras.optimizers.AdamW) if on_gpus else (adam,)
  plain = (type(optimizer) is sgd and (on_gpus or not optimizer.momentum)) or (
    type(optimizer) in adams and not optimizer.amsgrad
  )
  options = [
    *("clipnorm", "clipvalue", "global_clipnorm", "use_ema"),
    *("gradient_accumulation_steps", "loss_scale_factor"),
  ]
  options += [] if on_gpus else ["weight_decay"]
  raw = [models.raw(v) for v in variables]
  return (
    plain
    and not any(getattr(optimizer, option) for option in options)
    and all(getattr(v, "constraint", None) is None for v in variables)
    and all(v.dtype == tf.float32 for v in raw)
    and (
      on_gpus or sum(v.shape.num_elements() for v in raw) <= max(MASKED, MASKED_EACH * originals)
    )
  )


def apply_masked(optimizer: Any, gradients: Gradients, finite: tf.Tensor) -> None:
  """Updates like `optimizer.apply`; if `finite` is False, every value stays (replica context).

  Rates are multiplied by 0 and gradients become 0, which leaves weights and slots as they are, to
  the bit. Slots of fused variables are flat; the weights are updated where they are. Only for what
  `masks` accepts.

  Args:
    optimizer: of Keras 3, built with the variables of the gradients' fusion.
    gradients: of this replica, with a fusion.
    finite: bool scalar, equal on every replica.
  """
  mask = tf.cast(finite, tf.float32)
  rate = tf.cast(optimizer.learning_rate, tf.float32) * mask
  powers = _powers(optimizer, tf.float32) if hasattr(optimizer, "beta_1") else None
  fusion = cast("Fusion", gradients.fusion)
  _decay_weights(optimizer, gradients, rate)
  for number, (variable, piece) in enumerate(zip(fusion.variables, gradients.pieces, strict=True)):
    if piece is None:
      continue
    index = optimizer._get_variable_index(variable)
    piece = tf.math.multiply_no_nan(piece, mask)
    raw = models.raw(variable)
    if number < len(fusion.groups):
      alpha, delta = _direction(optimizer, index, piece, rate, mask, powers)
      for original, part in fusion.split(number, delta):
        if not gradients.missing[original]:
          _descend(models.raw(fusion.originals[original]), alpha, part)
    elif powers and not _forks(raw):
      _adam(optimizer, index, piece, raw.handle, rate, powers, mask)
    else:
      _descend(raw, *_direction(optimizer, index, piece, rate, mask, powers))
  count = models.raw(optimizer.iterations)
  tf.raw_ops.AssignAddVariableOp(resource=count.handle, value=tf.cast(finite, count.dtype))


def _decay_weights(optimizer: Any, gradients: Gradients, rate: tf.Tensor) -> None:
  """Subtracts rate * weight_decay of the weights from them, before the update, as Keras does."""
  if not optimizer.weight_decay:
    return
  fusion = cast("Fusion", gradients.fusion)
  for variable, missing in zip(fusion.originals, gradients.missing, strict=True):
    if not missing and optimizer._use_weight_decay(variable):
      raw = models.raw(variable)
      _descend(raw, rate * optimizer.weight_decay, raw.read_value())


def _powers(optimizer: Any, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns both betas to the power of the update's number, from 1."""
  step = tf.cast(models.raw(optimizer.iterations) + 1, dtype)
  beta_1, beta_2 = (tf.cast(beta, dtype) for beta in (optimizer.beta_1, optimizer.beta_2))
  return tf.pow(beta_1, step), tf.pow(beta_2, step)


def _direction(
  optimizer: Any,
  index: int,
  gradient: tf.Tensor,
  rate: tf.Tensor,
  mask: tf.Tensor,
  powers: tuple[tf.Tensor, tf.Tensor] | None,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Updates the slots; returns (rate, direction) of the descent, a scalar and [*shape]."""
  if powers is None:
    return _momentum(optimizer, index, gradient, rate, mask)
  m, v = (models.raw(slots[index]) for slots in (optimizer._momentums, optimizer._velocities))
  # Keras's own operations, with its rounding of 1 - beta, and as few as there can be.
  _descend(m, (optimizer.beta_1 - 1) * mask, gradient - m.read_value())
  _descend(v, (optimizer.beta_2 - 1) * mask, tf.square(gradient) - v.read_value())
  direction = m.read_value() / (tf.sqrt(v.read_value()) + optimizer.epsilon)
  return rate * tf.sqrt(1 - powers[1]) / (1 - powers[0]), direction


def _momentum(
  optimizer: Any, index: int, gradient: tf.Tensor, rate: tf.Tensor, mask: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns (rate, direction) of SGD; the kernel with momentum moves weights at rate 0 too."""
  if not optimizer.momentum:
    return rate, gradient
  velocity = models.raw(optimizer.momentums[index])
  _descend(velocity, mask, (1 - optimizer.momentum) * velocity.read_value() + rate * gradient)
  moves = velocity.read_value()
  if optimizer.nesterov:
    moves = optimizer.momentum * moves - rate * gradient
  return -mask, moves


def _descend(variable: tf.Variable, alpha: tf.Tensor, delta: tf.Tensor) -> None:
  """Subtracts alpha * delta, in one operation."""
  tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=alpha, delta=delta)


def _apply(
  optimizer: Any, index: int, gradient: tf.Tensor, variable: Any, learning_rate: Any
) -> bool:
  """A `Kernel` of Adam, AdamW and SGD."""
  dtype = variable.dtype
  gradient, rate = tf.cast(gradient, dtype), tf.cast(learning_rate, dtype)
  raw = models.raw(variable)
  handle = raw.handle
  if hasattr(optimizer, "beta_1"):
    if optimizer.amsgrad or _forks(raw):
      return False
    _adam(optimizer, index, gradient, handle, rate, _powers(optimizer, dtype))
    return True
  if not optimizer.momentum:
    tf.raw_ops.ResourceApplyGradientDescent(var=handle, alpha=rate, delta=gradient)
    return True
  tf.raw_ops.ResourceApplyKerasMomentum(
    var=handle,
    accum=models.raw(optimizer.momentums[index]).handle,
    lr=rate,
    grad=gradient,
    momentum=tf.cast(optimizer.momentum, dtype),
    use_nesterov=optimizer.nesterov,
  )
  return True


def _forks(variable: tf.Variable) -> bool:
  on_cpu = tf.DeviceSpec.from_string(variable.device).device_type == "CPU"
  return on_cpu and variable.shape.num_elements() in FORKED


def _adam(
  optimizer: Any,
  index: int,
  gradient: tf.Tensor,
  handle: tf.Tensor,
  rate: tf.Tensor,
  powers: tuple[tf.Tensor, tf.Tensor],
  mask: tf.Tensor | None = None,
) -> None:
  """Kingma & Ba, "Adam" (2015), the form that ends section 2: epsilon outside the correction.

  With a `mask` of 0 the slots stay: their decays become 1.
  """
  dtype = gradient.dtype
  beta_1, beta_2 = tf.cast(optimizer.beta_1, dtype), tf.cast(optimizer.beta_2, dtype)
  if mask is not None:
    beta_1, beta_2 = tf.maximum(beta_1, 1 - mask), tf.maximum(beta_2, 1 - mask)
  tf.raw_ops.ResourceApplyAdam(
    var=handle,
    m=models.raw(optimizer._momentums[index]).handle,
    v=models.raw(optimizer._velocities[index]).handle,
    beta1_power=powers[0],
    beta2_power=powers[1],
    lr=rate,
    beta1=beta_1,
    beta2=beta_2,
    epsilon=tf.cast(optimizer.epsilon, dtype),
    grad=gradient,
  )


_KERNELS: dict[type, Kernel] = dict.fromkeys(
  (keras.optimizers.Adam, keras.optimizers.AdamW, keras.optimizers.SGD), _apply
)
