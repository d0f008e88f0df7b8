"""How long a step waits for the other replicas, with a delay planted where it should be found."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys

from loopwright.monitoring.communication import Communication
from loopwright.runs.builder import Recipe

STEPS, LATE_S = 4, 0.4


def delayed(x):
  """Returns `x`, later."""

  def wait(value):
    time.sleep(LATE_S)
    return value

  # Not stateful: else one replica's would wait for the other's.
  return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype, stateful=False), x.shape)


class LastIsSlow(toys.Regression):
  features = {"x": np.random.default_rng(2).normal(size=[12, 2]).astype(np.float32)}

  def build_model(self):
    return toys.network([2], keras.layers.Dense(1))

  def forward(self, batch, training):
    context, x = tf.distribute.get_replica_context(), batch["x"]
    is_last = context.replica_id_in_sync_group == context.num_replicas_in_sync - 1
    return super().forward({"x": tf.cond(is_last, lambda: delayed(x), lambda: x)}, training)

  def losses(self, outputs, batch):
    return tf.square(outputs)


def trained(strategy, *, times):
  """Returns the results of a loop and the weights."""
  keras.utils.set_random_seed(1)
  task = LastIsSlow()
  recipe = Recipe(optimizer=keras.optimizers.SGD, global_batch_size=6, options={})
  observers = Communication.of(strategy) if times else []
  trainer = recipe.trainer(task, strategy, observers=observers)
  return trainer.train(tf.constant(STEPS)), [v.numpy() for v in task.model.weights]


def test_waiting_for_the_slowest_replica_is_measured_and_changes_no_weight(mirrored):
  """Two of three replicas wait for the third: by the mean, for 2/3 of its delay."""
  found, weights = trained(mirrored(3), times=True)
  assert found["communication_s"] == pytest.approx(STEPS * LATE_S * 2 / 3, rel=0.2)
  none, same = trained(mirrored(3), times=False)
  assert "communication_s" not in none
  for one, other in zip(weights, same, strict=True):
    np.testing.assert_array_equal(one, other)


def test_one_replica_waits_for_no_other(mirrored):
  assert Communication.of(mirrored(1)) == []
