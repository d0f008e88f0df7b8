"""Replaces the update rules of Keras optimizers by TensorFlow's fused kernels.

Keras writes an update as a dozen elementwise operations, each a pass over memory. TensorFlow has
the same formulas as single kernels. Slots and hyperparameters stay Keras's. Results differ only by
rounding: Keras rounds 1 - beta_2 before its bias correction, the kernel after it.

On a CPU, TensorFlow splits its Adam kernel over several threads from about 400 elements on. Up to
some ten thousand elements, waiting for these threads takes longer than Keras's operations, up to
three times as long if other processes use the cores (benchmarks/adam_kernel.py).
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf
import tf_keras

from framework.backend import models

FORKED = range(2**9, 2**15)
"""Sizes in elements for which, on a CPU, Adam's kernel is slower than Keras's operations."""


def use(optimizer: Any) -> None:
  """Replaces the update rule of `optimizer` by a kernel of the same formula, if there is one.

  For Adam and AdamW (without amsgrad) and SGD of both Keras generations, but not for subclasses.
  """
  kind = type(optimizer)
  if kind in (keras.optimizers.Adam, keras.optimizers.AdamW, keras.optimizers.SGD):
    optimizer.update_step = functools.partial(_keras_3_step, optimizer, optimizer.update_step)
  elif kind in (
    tf_keras.optimizers.Adam,
    tf_keras.optimizers.AdamW,
    tf_keras.optimizers.SGD,
  ):
    optimizer.update_step = functools.partial(_tf_keras_step, optimizer, optimizer.update_step)


def _keras_3_step(
  optimizer: Any, usual: Any, gradient: tf.Tensor, variable: Any, learning_rate: Any
) -> None:
  index = optimizer._get_variable_index(variable)
  if not _apply(optimizer, index, gradient, variable, learning_rate):
    usual(gradient, variable, learning_rate)


def _tf_keras_step(optimizer: Any, usual: Any, gradient: tf.Tensor, variable: tf.Variable) -> None:
  index = optimizer._index_dict[optimizer._var_key(variable)]
  if not _apply(optimizer, index, gradient, variable, optimizer.learning_rate):
    usual(gradient, variable)


def _apply(
  optimizer: Any, index: int, gradient: tf.Tensor, variable: Any, learning_rate: Any
) -> bool:
  """Updates one variable on its device; False if no kernel supports the options or is faster."""
  dtype = variable.dtype
  gradient, rate = tf.cast(gradient, dtype), tf.cast(learning_rate, dtype)
  raw = models.raw(variable)
  handle = raw.handle
  if hasattr(optimizer, "beta_1"):
    if optimizer.amsgrad or _forks(raw):
      return False
    _adam(optimizer, index, gradient, handle, rate)
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
  optimizer: Any, index: int, gradient: tf.Tensor, handle: tf.Tensor, rate: tf.Tensor
) -> None:
  """Kingma & Ba, "Adam" (2015), the form that ends section 2: epsilon outside the correction."""
  dtype = gradient.dtype
  step = tf.cast(models.raw(optimizer.iterations) + 1, dtype)
  beta_1, beta_2 = tf.cast(optimizer.beta_1, dtype), tf.cast(optimizer.beta_2, dtype)
  tf.raw_ops.ResourceApplyAdam(
    var=handle,
    m=models.raw(optimizer._momentums[index]).handle,
    v=models.raw(optimizer._velocities[index]).handle,
    beta1_power=tf.pow(beta_1, step),
    beta2_power=tf.pow(beta_2, step),
    lr=rate,
    beta1=beta_1,
    beta2=beta_2,
    epsilon=tf.cast(optimizer.epsilon, dtype),
    grad=gradient,
  )
