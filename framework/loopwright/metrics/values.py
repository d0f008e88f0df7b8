"""What a task returns: losses and metrics, as sums over the examples of one replica."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import tensorflow as tf

from loopwright.errors import ConfigError, kind
from loopwright.graphs.aliases import Scalar, TensorLike
from loopwright.graphs.autograph import as_written

Weighted: TypeAlias = tuple[tf.Tensor, tf.Tensor]
"""(total, weight): a sum over this replica's examples and the sum of their weights."""


@as_written
def weighted_sum(per_example: TensorLike, weight: TensorLike | None = None) -> Weighted:
  """Sums one value per example into a (total, weight) pair (any context).

  >>> total, weight = lw.weighted_sum([3.0, 5.0, np.nan], [1.0, 0.5, 0.0])
  >>> float(total), float(weight)
  (5.5, 1.5)

  An example of weight 0 adds exactly 0, even if its value is not finite.

  Args:
    per_example: [n], any numeric or bool dtype; this replica's examples.
    weight: float [n]; None means 1 each.

  Returns:
    Two float32 scalars (float64 for float64 values): weighted sum and sum of weights.

  Raises:
    ConfigError: `per_example` is not a vector, or `weight` is not a vector of the same length.
  """
  values = tf.convert_to_tensor(per_example)
  if values.dtype.is_complex:
    raise ConfigError(f"per-example values are {values.dtype.name}; use tf.abs or tf.math.real.")
  values = tf.cast(values, tf.float64 if values.dtype == tf.float64 else tf.float32)
  _require_vector("per-example values", values)
  weights = tf.cast(tf.ones_like(values) if weight is None else weight, values.dtype)
  _require_vector("weight", weights)
  if not values.shape.is_compatible_with(weights.shape):
    raise ConfigError(
      f"per-example values have shape {values.shape} but weight has shape {weights.shape}; "
      "give one value and one weight for each example."
    )
  return tf.reduce_sum(tf.math.multiply_no_nan(values, weights)), tf.reduce_sum(weights)


def _float(value: TensorLike) -> tf.Tensor:
  tensor = tf.convert_to_tensor(value)
  return tensor if tensor.dtype.is_floating else tf.cast(tensor, tf.float32)


def _require_vector(what: str, value: tf.Tensor) -> None:
  if value.shape.rank != 1:
    raise ConfigError(
      f"{what} must be a vector [n], one number per example, got shape {value.shape}; "
      "reduce every axis but the first (for example tf.reduce_mean(x, axis=[1, 2]))."
    )


class _Sum(NamedTuple):
  tensor: tf.Tensor


class Sum(_Sum):
  """Plain sums over this replica's examples, for a metric that is not a mean (replica context).

  >>> labels, found, weight = [0, 1, 1], [0, 1, 0], [1, 1, 0]
  >>> lw.Sum(tf.math.confusion_matrix(labels, found, 2, weight)).tensor.numpy().tolist()
  [[1, 0], [0, 1]]

  For a confusion matrix, counts of bins, true positives of each class. `Task.derived` gets the sum
  over all replicas, batches and steps. Give rows of weight 0 no part in it: they are padding.

  Attributes:
    tensor: numeric or bool, of any static shape; added up in float64.
  """

  __slots__ = ()

  def __new__(cls, tensor: TensorLike) -> Sum:
    """Keeps it as it is."""
    return super().__new__(cls, tensor)


class _PerExample(NamedTuple):
  values: tf.Tensor
  weight: tf.Tensor


class PerExample(_PerExample):
  """Values of single examples, for a metric that needs all at once (replica context).

      return {"scores": lw.PerExample(scores, batch["weight"])}

  For an exact AUC, a rank correlation, a calibration error. An evaluation collects the rows of all
  replicas in the memory of each process and gives them to `Task.derived`. Training ignores them.

  Attributes:
    values: numeric or bool [n, ...], of static shape, one row for each example.
    weight: [n]; rows of weight 0 are dropped. The weight itself is not kept.
  """

  __slots__ = ()

  def __new__(cls, values: TensorLike, weight: TensorLike) -> PerExample:
    """Keeps both as they are."""
    return super().__new__(cls, values, weight)

  @property
  def wide(self) -> PerExample:
    """With dtypes that every collective and NumPy have: float32 and int32 or wider."""
    return PerExample(_wide(self.values), _wide(self.weight))


def _wide(tensor: tf.Tensor) -> tf.Tensor:
  if tensor.dtype.is_floating:
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor
  if tensor.dtype in (tf.int32, tf.int64):
    return tensor
  return tf.cast(tensor, tf.int32 if tensor.dtype.size < 4 else tf.int64)


Summed: TypeAlias = Weighted | Sum
Checked: TypeAlias = Weighted | Sum | PerExample
Metric: TypeAlias = tuple[Scalar, Scalar] | Sum | PerExample
"""What `Task.metrics` and `step.log` take for a name."""


class _Sums(NamedTuple):
  total: tf.Tensor
  weight: tf.Tensor


class Loss(_Sums):
  """This replica's part of a loss: sums, not means, so that they add up over replicas.

  >>> replicas = [lw.Loss.from_examples([3.0, 5.0, 1.0]), lw.Loss.from_examples([7.0])]
  >>> float(sum(r.total for r in replicas) / sum(r.weight for r in replicas))
  4.0

  Attributes:
    total: float scalar, the weighted sum of this replica's per-example losses.
    weight: float scalar, the sum of this replica's example weights; the global loss is sum of
      totals / sum of weights over all replicas.
  """

  __slots__ = ()

  def __new__(cls, total: Scalar, weight: Scalar) -> Loss:
    """Keeps both as they are; the framework makes tensors of them, see `checked`."""
    return super().__new__(cls, total, weight)

  @classmethod
  @as_written
  def from_examples(cls, per_example: TensorLike, weight: TensorLike | None = None) -> Loss:
    """Returns the sums of losses [n] and weights [n]; see `weighted_sum`, which it calls."""
    return cls(*weighted_sum(per_example, weight))

  @classmethod
  def checked(cls, loss: object) -> Loss:
    """Returns `loss` as two float tensors if it is a `Loss` of two scalars, such as Python's.

    Raises:
      ConfigError: it is something else, such as a mean.
    """
    if not isinstance(loss, Loss):
      raise ConfigError(
        f"the loss is {kind(loss)}; it must be a Loss, this replica's sums: "
        "return Loss.from_examples(per_example_losses, batch['weight'])."
      )
    total, weight = _float(loss.total), _float(loss.weight)
    for name, value in (("total", total), ("weight", weight)):
      if value.shape.rank != 0:
        raise ConfigError(
          f"Loss.{name} has shape {value.shape}; it must be a scalar, this replica's sum: "
          "use Loss.from_examples(per_example_losses, batch['weight'])."
        )
    return cls(total, weight)

  @as_written
  def plus_regularization(self, penalty: tf.Tensor | float) -> Loss:
    """Adds `penalty` (a float scalar, equal on all replicas) to the *mean* loss, once.

    Each replica adds penalty x its own weight. The division by the global weight leaves exactly
    one penalty, for any number of replicas and micro-batches.
    """
    if isinstance(penalty, float) and penalty == 0.0:
      return self
    return Loss(self.total + tf.cast(penalty, self.total.dtype) * self.weight, self.weight)
