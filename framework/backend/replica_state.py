"""State that a layer keeps on each replica for itself, such as batch normalisation's statistics.

Left alone, the copies drift apart: Keras 3 evaluates with another one on each replica, and of all a
checkpoint holds the first or their mean, so that a resumed run is not the uninterrupted one.
"""

from typing import Any

import tensorflow as tf

from framework.backend import models
from framework.backend.autograph import as_written


@as_written
def average(strategy: tf.distribute.Strategy, model: Any) -> None:
  """Gives every replica the mean of all copies (cross-replica).

  That is what tf_keras evaluates with and saves. The averaging of moving averages is linear, so
  doing it now and then changes nothing but roundings.

  Args:
    strategy: the current one.
    model: whose non-trainable float variables, unless they are the same everywhere by contract.
  """

  def assign(variable: tf.Variable, value: tf.Tensor) -> None:
    variable.assign(value, read_value=False)

  for variable in _local_variables(strategy, model):
    copies = strategy.extended.call_for_each_replica(variable.read_value)
    mean = strategy.reduce(tf.distribute.ReduceOp.MEAN, copies, axis=None)
    strategy.extended.update(variable, assign, args=(mean,))


def _local_variables(strategy: tf.distribute.Strategy, model: Any) -> list[tf.Variable]:
  if strategy.num_replicas_in_sync == 1:
    return []
  trainable = {id(models.raw(v)) for v in models.trainable_variables(model)}
  others = [models.raw(v) for v in models.all_variables(model)]
  return [v for v in others if id(v) not in trainable and _may_differ(v)]


def _may_differ(variable: tf.Variable) -> bool:
  differ = (tf.VariableAggregation.NONE, tf.VariableAggregation.MEAN)
  distributed = isinstance(variable, tf.distribute.DistributedValues)
  return distributed and variable.dtype.is_floating and variable.aggregation in differ
