"""Whether the metrics of a task are what can be summed."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from loopwright.errors import ConfigError, kind
from loopwright.graphs.aliases import TensorLike
from loopwright.metrics.values import Checked, PerExample, Sum


def checked(metrics: object) -> dict[str, Checked]:
  """Returns `metrics` if they are name -> (total, weight), Sum or PerExample, with tensors inside.

  Raises:
    ConfigError: they are something else, such as means.
  """
  if not isinstance(metrics, Mapping):
    raise ConfigError(
      f"the metrics are {kind(metrics)}; they must be a dict of name -> (total, weight), "
      "for example {'accuracy': weighted_sum(hits, batch['weight'])}."
    )
  return {name: _checked(name, value) for name, value in metrics.items()}


def _checked(name: str, value: object) -> Checked:
  if isinstance(value, Sum):
    return Sum(_numeric(name, "Sum", value.tensor))
  if isinstance(value, PerExample):
    return _checked_rows(name, value)
  if not isinstance(value, (tuple, list)) or len(value) != 2:
    raise ConfigError(
      f"metric {name!r} is {kind(value)}; it must be a pair (total, weight) of this "
      "replica's sums, for example weighted_sum(per_example, batch['weight']), or a loopwright.Sum "
      "or PerExample."
    )
  for part in value:
    shape = tf.convert_to_tensor(part).shape
    if shape.rank != 0:
      raise ConfigError(
        f"metric {name!r} has shape {shape}; total and weight must be scalars, this replica's "
        "sums over its examples. For sums of another shape return loopwright.Sum(tensor)."
      )
  total, weight = value
  return total, weight


def _checked_rows(name: str, value: PerExample) -> PerExample:
  values = _numeric(name, "PerExample.values", value.values)
  weight = _numeric(name, "PerExample.weight", value.weight)
  if not values.shape.rank or weight.shape.rank != 1 or values.shape[0] != weight.shape[0]:
    raise ConfigError(
      f"metric {name!r} is a PerExample of values {values.shape} and weight {weight.shape}; they "
      "must be [n, ...] and [n], such as PerExample(scores, batch['weight'])."
    )
  return PerExample(values, weight)


def _numeric(name: str, what: str, value: TensorLike) -> tf.Tensor:
  """Returns a tensor of static shape and a real dtype."""
  tensor = tf.convert_to_tensor(value)
  if not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool):
    raise ConfigError(f"metric {name!r} is a {what} of {tensor.dtype.name}; it must hold numbers.")
  if not tensor.shape.is_fully_defined():
    raise ConfigError(
      f"metric {name!r} is a {what} of shape {tensor.shape}; it must be static: keep all rows, and "
      "leave rows out by a weight of 0 instead of tf.boolean_mask."
    )
  return tensor
