"""The same random numbers under TensorFlow, XLA and every dtype, so that steps can be compared.

For the same seed, XLA draws other masks, and so does a dtype with fewer bits. Here all random ops
that take a seed return the same fixed sequence, with the right mean and variance.
"""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from loopwright.tools.verify.bench import shared_noise
from loopwright.tools.verify.bench.shared_noise import Draw


def alike() -> contextlib.AbstractContextManager[None]:
  """Makes random ops inside the context, traced or eager, return the sequence (host)."""
  return shared_noise.replaced(lambda name, draw: _uniform(draw) if "uniform" in name else _centred)


def _uniform(usual: Draw) -> Draw:
  def draw(
    shape: Any, seed: Any, minval: Any = 0, maxval: Any = None, dtype: Any = tf.float32,
    name: str | None = None, alg: str = "auto_select",
  ) -> tf.Tensor:  # fmt: skip
    wanted = tf.convert_to_tensor(shape, tf.int32)
    whole = not tf.as_dtype(dtype).is_floating
    if whole and ((wanted.shape[0] or 0) < 2 or maxval is None):  # probably a seed
      return usual(shape, seed, minval, maxval, dtype, name, alg)
    low, high = tf.cast(minval, tf.float64), tf.cast(1 if maxval is None else maxval, tf.float64)
    return tf.cast(low + (high - low) * _sequence(wanted), dtype)

  return draw


def _centred(
  shape: Any, seed: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = tf.float32,
  name: str | None = None, alg: str = "auto_select",
) -> tf.Tensor:  # fmt: skip
  del seed, name, alg
  numbers = tf.cast((_sequence(tf.convert_to_tensor(shape, tf.int32)) - 0.5) * 12**0.5, dtype)
  return tf.cast(mean, dtype) + tf.cast(stddev, dtype) * numbers


def _sequence(shape: tf.Tensor) -> tf.Tensor:
  """Returns float64 in (0, 1), evenly spread: multiples of the golden ratio, in 128 levels.

  Each is exact in float16 and bfloat16, and half way between multiples of 1/128.
  """
  numbers = tf.cast(tf.range(1, tf.reduce_prod(shape) + 1), tf.float64) * 0.6180339887498949
  levels = tf.floor(128.0 * (numbers - tf.floor(numbers)))
  return tf.reshape((levels + 0.5) / 128.0, shape)
