"""Noise that does not differ between the steps that are compared.

A row's dropout mask depends on its replica. To compare updates, all random ops of the step that
take a seed draw for one row and repeat it. So the noise depends neither on the replica nor on its
number of rows, and still has the right distribution along every other axis.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import stateless_random_ops as ops

Draw = Callable[..., tf.Tensor]
"""A random op, with the arguments of `tf.random.stateless_uniform`."""
_THREE_QUARTERS, _HALF = np.float64(0.75), np.float64(0.5)
_DRAWS = {
  "stateless_uniform": "stateless_random_uniform",
  "stateless_normal": "stateless_random_normal",
  "stateless_truncated_normal": "stateless_truncated_normal",
}


@contextlib.contextmanager
def replaced(by: Callable[[str, Draw], Draw]) -> Iterator[None]:
  """Replaces the random ops that take a seed by those that `by` makes of (name, op) (host)."""
  with contextlib.ExitStack() as stack:
    for public, internal in _DRAWS.items():
      draw = by(public, getattr(ops, internal))
      stack.enter_context(mock.patch.object(tf.random, public, draw))
      stack.enter_context(mock.patch.object(ops, internal, draw))
    yield


@contextlib.contextmanager
def alike_for_all_rows() -> Iterator[None]:
  """Makes random ops inside the context draw the same for all rows (host)."""
  with (
    replaced(lambda name, draw: _of_one_row(draw)),
    mock.patch.object(tf.random, "stateless_categorical", _categorical),
  ):
    yield


def still() -> contextlib.AbstractContextManager[None]:
  """Makes random ops inside the context draw one number alone, whatever their shape (host).

  A uniform one is three quarters of the way to the end: dropout keeps all up to that rate.
  """
  return _fixed(lambda shape: tf.fill(shape, _THREE_QUARTERS), lambda shape: tf.fill(shape, _HALF))


def same_draws() -> contextlib.AbstractContextManager[None]:
  """Makes random ops inside the context return a fixed sequence, the same in every dtype (host).

  For the same seed XLA draws other masks than TensorFlow, and so does a dtype with fewer bits. The
  sequence has the right mean and variance.
  """
  return _fixed(_sequence, _sequence)


def _fixed(
  uniform: Callable[[tf.Tensor], tf.Tensor], centred: Callable[[tf.Tensor], tf.Tensor]
) -> contextlib.AbstractContextManager[None]:
  """Replaces random ops by functions of a shape, which return float64 in (0, 1)."""
  return replaced(
    lambda name, draw: _uniform(draw, uniform) if "uniform" in name else _centred(centred)
  )


def _uniform(usual: Draw, fractions: Callable[[tf.Tensor], tf.Tensor]) -> Draw:
  def draw(
    shape: Any, seed: Any, minval: Any = 0, maxval: Any = None, dtype: Any = tf.float32,
    name: str | None = None, alg: str = "auto_select",
  ) -> tf.Tensor:  # fmt: skip
    wanted = tf.convert_to_tensor(shape, tf.int32)
    whole = not tf.as_dtype(dtype).is_floating
    if whole and ((wanted.shape[0] or 0) < 2 or maxval is None):  # probably a seed
      return usual(shape, seed, minval, maxval, dtype, name, alg)
    low, high = tf.cast(minval, tf.float64), tf.cast(1 if maxval is None else maxval, tf.float64)
    return tf.cast(low + (high - low) * fractions(wanted), dtype)

  return draw


def _centred(fractions: Callable[[tf.Tensor], tf.Tensor]) -> Draw:
  def draw(
    shape: Any, seed: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = tf.float32,
    name: str | None = None, alg: str = "auto_select",
  ) -> tf.Tensor:  # fmt: skip
    del seed, name, alg
    numbers = (fractions(tf.convert_to_tensor(shape, tf.int32)) - 0.5) * 12**0.5
    return tf.cast(mean, dtype) + tf.cast(stddev, dtype) * tf.cast(numbers, dtype)

  return draw


def _sequence(shape: tf.Tensor) -> tf.Tensor:
  """Returns float64 in (0, 1), evenly spread: multiples of the golden ratio, in 128 levels.

  Each is exact in float16 and bfloat16, and half way between multiples of 1/128.
  """
  numbers = tf.cast(tf.range(1, tf.reduce_prod(shape) + 1), tf.float64) * 0.6180339887498949
  levels = tf.floor(128.0 * (numbers - tf.floor(numbers)))
  return tf.reshape((levels + 0.5) / 128.0, shape)


def _of_one_row(draw: Draw) -> Draw:
  def alike(shape: Any, seed: Any, *args: Any, **options: Any) -> tf.Tensor:
    wanted = tf.convert_to_tensor(shape, tf.int32)
    if not wanted.shape[0] or _is_seed(wanted, options.get("dtype", (*args, 0, 0, 0)[2])):
      return draw(shape, seed, *args, **options)
    one = draw(tf.concat([[1], wanted[1:]], axis=0), [11, 29], *args, **options)
    return tf.broadcast_to(one, wanted)

  return alike


def _is_seed(shape: tf.Tensor, dtype: Any) -> bool:
  """Whether a draw of a shape is probably a seed, two integers, and not one number per row."""
  integers = bool(dtype) and not tf.as_dtype(dtype).is_floating
  return integers and shape.shape[0] == 1 and tf.get_static_value(shape) in (None, [2])


def _categorical(
  logits: tf.Tensor, num_samples: Any, seed: Any, dtype: Any = tf.int64, name: str | None = None
) -> tf.Tensor:
  """As `tf.random.stateless_categorical`, with the same noise for all rows (Gumbel's trick)."""
  del seed, name
  logits = tf.convert_to_tensor(logits)
  shape = [1, num_samples, tf.shape(logits)[1]]
  uniform = ops.stateless_random_uniform(shape, [11, 29], 1e-6, 1.0 - 1e-6, logits.dtype)
  noisy = logits[:, tf.newaxis, :] - tf.math.log(-tf.math.log(uniform))
  return tf.argmax(noisy, axis=2, output_type=dtype)
