"""Assigns to variables on all replicas, and averages state that differs between replicas.

Each replica keeps its own statistics of batch normalisation, for example. Without averaging they
drift apart: Keras 3 evaluates with other statistics on each replica, and a checkpoint stores the
first copy or the mean, so a resumed run differs from an uninterrupted one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from loopwright.graphs.aliases import Model, PerReplica
from loopwright.graphs.autograph import as_written
from loopwright.models import models


@as_written
def average(
  strategy: tf.distribute.Strategy, model: Model, *, equal: Mapping[str, tf.Variable] | None = None
) -> None:
  """Assigns to every replica the mean of all copies (cross-replica).

  tf_keras evaluates with this mean and saves it. Updates of moving averages are linear, so
  averaging at intervals changes results only by rounding.

  Args:
    model: averages its non-trainable float variables, except those that are equal by design.
    equal: further variables that are.
  """

  if strategy.num_replicas_in_sync == 1:
    return
  for variable in averaged(model, equal=equal or {}):
    copies = strategy.extended.call_for_each_replica(_wide, args=(variable,))
    mean = strategy.reduce(tf.distribute.ReduceOp.MEAN, copies, axis=None)
    assign(strategy, variable, tf.cast(mean, variable.dtype))


def averaged(model: Model, *, equal: Mapping[str, tf.Variable]) -> list[tf.Variable]:
  """Returns the variables that `average` assigns (any context)."""
  left_out = {id(models.raw(variable)) for variable in models.trainable_variables(model)}
  left_out |= {id(variable) for variable in equal.values()}
  found = map(models.raw, models.all_variables(model))
  return [each for each in found if id(each) not in left_out and _may_differ(each)]


@as_written
def _wide(variable: tf.Variable) -> tf.Tensor:
  """Returns this replica's copy: in float32 the mean of 3 equal numbers is not always theirs."""
  return tf.cast(variable.read_value(), tf.float64)


def assign(strategy: tf.distribute.Strategy, variable: tf.Variable, value: PerReplica) -> None:
  """Assigns `value`, a tensor or one per replica, to a variable's copies (cross-replica)."""
  assign_result(strategy, variable, lambda copy, new: new, (value,))


def assign_result(
  strategy: tf.distribute.Strategy,
  variable: tf.Variable,
  function: Callable[..., tf.Tensor],
  args: tuple[Any, ...],
) -> None:
  """Assigns `function(copy, *args)` to each copy of a variable, on its device (cross-replica).

  Args:
    variable: of any distribution.
    function: returns a tensor of the variable's shape and dtype.
    args: tensors or per-replica values.
  """

  @as_written
  def assign_copy(copy: tf.Variable, *values: tf.Tensor) -> None:
    copy.assign(function(copy, *values), read_value=False)

  strategy.extended.update(variable, assign_copy, args=args, group=False)


def made_at_once(make: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
  """Makes a variable of a traced step with its first value, as no later call would set it.

  TensorFlow lifts first values out of the trace, but not those of several replicas.
  """
  several = tf.distribute.get_strategy().num_replicas_in_sync > 1
  values = tf.nest.flatten(options.get("initial_value"))
  if not several or any(map(tf.is_symbolic_tensor, values)):  # which nothing outside can compute
    return make(**options)
  with tf.init_scope():
    return make(**options)


def _may_differ(variable: tf.Variable) -> bool:
  differ = (tf.VariableAggregation.NONE, tf.VariableAggregation.MEAN)
  distributed = isinstance(variable, tf.distribute.DistributedValues)
  return distributed and variable.dtype.is_floating and variable.aggregation in differ
