"""A compiled loss of Keras 3 or tf_keras, without its mean over the batch.

The loss object that the user gave is called, never a copy: what `get_config` does not say, a copy
would lose.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras

from loopwright.errors import ConfigError
from loopwright.graphs.aliases import Structure
from loopwright.graphs.autograph import as_written
from loopwright.models import synthetic_rows

_MEANS = ("sum_over_batch_size", "mean", "auto")


class ElementLoss:
  """The loss of one output: (y_true, y_pred) -> what each example adds to Keras's mean."""

  def __init__(self, output: str, loss: Any, package: Any) -> None:
    """Looks up a loss as `compile` takes it (any context).

    Raises:
      ConfigError: an unknown name, a reduction that is not a mean over the batch, or an own
        `__call__`.
    """
    self._output, self._package, self._checked = output, package, False
    self._loss = _found(loss, package)

  def __call__(self, y_true: Structure, y_pred: Structure) -> tuple[tf.Tensor, tf.Tensor, bool]:
    """Returns float32 [n], float32 [n] and whether there is a mask (replica context).

    Keras's loss of a batch is sum(first x sample weight) / sum(second).

    Raises:
      ConfigError: the loss gives no value for each example.
    """
    if not self._checked:
      self._require_single_rows(y_true, y_pred)
      self._checked = True
    values, count, masked = self._of_rows(y_true, y_pred)
    return tf.cast(values, tf.float32), tf.cast(count, tf.float32), masked

  def _of_rows(self, y_true: Structure, y_pred: Structure) -> tuple[tf.Tensor, tf.Tensor, bool]:
    values, mask = self._elements(y_true, y_pred)
    if not values.shape.rank or not values.shape[:1].is_compatible_with(y_pred.shape[:1]):
      of = f"a tensor of shape {values.shape}" if values.shape.rank else "a scalar"
      raise ConfigError(
        f"the loss of output {self._output!r} returns {of}, but N replicas need one value for each "
        "example; return a tensor [n], without the mean over the batch."
      )
    axes = [*range(1, values.shape.rank)]
    if mask is None:
      return tf.reduce_mean(values, axes), tf.ones(tf.shape(values)[:1], values.dtype), False
    mask = self._of_rank(tf.cast(mask, values.dtype), values)
    inside = [*range(1, mask.shape.rank)]
    of_row = tf.cast(tf.reduce_prod(tf.shape(mask)[1:]), values.dtype)
    return of_row * tf.reduce_mean(values * mask, axes), tf.reduce_sum(mask, inside), True

  def _of_rank(self, mask: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Returns a mask that multiplies these values, by the rules of both Kerases."""
    missing = values.shape.rank - mask.shape.rank
    if missing == -1 and mask.shape[-1] == 1:
      return mask[..., 0]
    if missing in (0, 1):
      return mask[..., tf.newaxis] if missing else mask
    raise ConfigError(
      f"the loss of output {self._output!r} has shape {values.shape} and its mask {mask.shape}; "
      "they must have the same axes: write a loopwright.Task."
    )

  def _elements(self, y_true: Structure, y_pred: Structure) -> tuple[tf.Tensor, Any]:
    """Returns the values of `Loss.call`, [n, ...], and the mask that Keras applies to them."""
    before = getattr(y_pred, "_keras_mask", None)
    y_true, y_pred = tf.convert_to_tensor(y_true), tf.convert_to_tensor(y_pred)
    if self._package is keras:
      y_true, y_pred = (tf.cast(tensor, self._loss.dtype) for tensor in (y_true, y_pred))
    else:
      if (y_true.shape.rank, y_pred.shape.rank) == (1, 2):
        y_true = y_true[:, tf.newaxis]
      if y_true.dtype.is_floating and y_pred.dtype.is_floating:
        y_true = tf.cast(y_true, y_pred.dtype)
    losses = self._loss.call(y_true, y_pred)
    after = getattr(losses, "_keras_mask", None)
    values = tf.convert_to_tensor(losses)
    values = values if values.dtype.is_floating else tf.cast(values, tf.float32)
    return values, _both(before, after)

  @as_written
  def _require_single_rows(self, y_true: Structure, y_pred: Structure) -> None:
    """Checks on made-up rows, outside of the graph, that each row's loss is its own."""

    def compute() -> tuple[Any, list[Any]]:
      rows = synthetic_rows.like((y_true, y_pred))
      return self._of_rows(*rows), [self._of_rows(*part) for part in synthetic_rows.split(rows)]

    try:
      whole, parts = synthetic_rows.outside(compute)
    except ConfigError:
      raise
    except Exception:  # made-up rows may be none that this loss takes; the real ones will tell
      return
    for number in (0, 1):
      joined = np.concatenate([part[number] for part in parts])
      if not synthetic_rows.are_close(whole[number], joined):
        raise ConfigError(
          f"in the loss of output {self._output!r} the value of an example depends on the others "
          "of its batch, and each of N replicas sees its own rows only; write a loopwright.Task, "
          "which has step.all_gather() (docs/full-control.md)."
        )


def _both(one: Any, other: Any) -> Any:
  if one is None or other is None:
    return other if one is None else one
  return one & other


def _found(loss: Any, package: Any) -> Any:
  """Returns the given Loss, or a Loss around the given function, as `compile` makes it."""
  try:
    found = package.losses.get(loss)
  except (TypeError, ValueError) as error:
    raise ConfigError(
      f"compile() got the loss {loss!r}, which {package.__name__}.losses.get() does not know; name "
      "one of its losses, such as 'mse', or pass a function or Loss."
    ) from error
  if not isinstance(found, package.losses.Loss):
    return _wrapper(package)(found)
  if type(found).__call__ is not package.losses.Loss.__call__:
    raise ConfigError(
      f"the loss {type(found).__name__} defines its own __call__(), which from_keras() cannot "
      "take; define call() instead, or write a loopwright.Task."
    )
  if found.reduction not in _MEANS:
    raise ConfigError(
      f"the loss {found.name!r} has reduction={found.reduction!r}, but only a mean over the batch "
      "is the same on N replicas here; leave the reduction out, or write a loopwright.Task."
    )
  return found


def _wrapper(package: Any) -> Any:
  """Returns the class that `compile` puts around a function; only tf_keras exports it."""
  if package is tf_keras:
    return tf_keras.__internal__.losses.LossFunctionWrapper
  return keras.losses.MeanSquaredError.__base__
