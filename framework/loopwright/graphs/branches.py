"""Conditions that are tensors: what is computed only if one holds."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.graphs.aliases import Structure


def condition(when: tf.Tensor | bool) -> tf.Tensor:
  """Returns `when=` of a step's verb as a tensor.

  Raises:
    ConfigError: it is not a bool scalar.
  """
  when = tf.convert_to_tensor(when)
  if when.dtype != tf.bool or when.shape.rank not in (0, None):
    raise ConfigError(
      f"when= is {when.dtype.name} of shape {when.shape}; it must be one bool for the whole step, "
      "such as step.number % 2 == 0."
    )
  return when


def computed_if(when: tf.Tensor, compute: Callable[[], Structure]) -> Structure:
  """Returns `compute()` if `when`, else zeros of the same shapes (under trace, replica context).

  What communicates cannot run in a branch; it is run in any case, and discarded if not `when`.

  Args:
    when: bool scalar, equal on every replica.
    compute: returns tensors; it may be called twice.
  """
  made: list[Structure] = []

  def flat() -> list[tf.Tensor]:
    made[:] = [compute()]
    return [tf.convert_to_tensor(t) for t in tf.nest.flatten(made[0])]

  def zeros() -> list[tf.Tensor]:
    parts = map(tf.convert_to_tensor, tf.nest.flatten(made[0]))
    return [tf.zeros(t.shape, t.dtype) for t in parts]

  try:
    values = tf.nest.flatten(tf.cond(when, flat, zeros))
  except RuntimeError as error:
    if "merge_call" not in str(error):
      raise
    values = [tf.where(when, t, tf.zeros_like(t)) for t in flat()]
  return tf.nest.pack_sequence_as(made[0], values)
