"""Made-up rows: they show whether losses and metrics treat the rows of a batch one by one."""

from __future__ import annotations

import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from loopwright.graphs.aliases import Structure

COUNT = 5
_FIRST = 3
_SIZE = 3  # of an axis whose length is not known

Value = TypeVar("Value")


def like(structure: Structure) -> Structure:
  """Returns rows of the same structure, dtypes and shapes but the first axis (any context).

  Integers and half of the floats are 0 or 1, which are labels too; the other floats are between.
  Rows of several floats add up to 1, as probabilities do.
  """
  generator = np.random.default_rng(0)
  return _each(lambda tensor: _made(tensor, generator), structure)


def split(structure: Structure) -> list[Any]:
  """Returns the rows in two parts of different sizes."""
  parts = (slice(None, _FIRST), slice(_FIRST, None))
  return [_each(operator.itemgetter(part), structure) for part in parts]


def outside(function: Callable[[], Value]) -> Value:
  """Returns what a function returns eagerly, outside of this thread's graph and strategy."""
  with ThreadPoolExecutor(1) as thread:
    return thread.submit(function).result()


def are_close(one: Structure, other: Structure) -> bool:
  """Whether two eager tensors are equal up to the rounding of float32 sums."""
  one, other = (np.asarray(tensor).astype(np.float64) for tensor in (one, other))
  return one.shape == other.shape and np.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


def _each(function: Callable[[Any], Any], structure: Structure) -> Structure:
  return tf.nest.map_structure(lambda t: None if t is None else function(t), structure)


def _made(tensor: Any, generator: np.random.Generator) -> tf.Tensor:
  shape = [COUNT, *(size or _SIZE for size in tensor.shape[1:])]
  if not tensor.dtype.is_floating:
    labels = generator.integers(0, 2, size=shape)
    if tensor.dtype == tf.string:
      return tf.strings.as_string(labels)
    return tf.cast(labels, tensor.dtype)
  values = generator.uniform(0.05, 0.95, size=shape)
  if len(shape) > 1 and shape[-1] > 1:
    values /= values.sum(axis=-1, keepdims=True)
  return tf.cast(values, tensor.dtype)
