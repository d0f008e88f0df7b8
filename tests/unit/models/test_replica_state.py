"""State that replicas keep: the mean of their copies."""

import numpy as np
import tensorflow as tf

from loopwright.models import replica_state


def test_the_mean_of_copies_is_rounded_once_and_equal_copies_stay(mirrored):
  """Frozen weights too: in float32 the mean of 3 equal numbers is another one for every third."""
  strategy, random = mirrored(3), np.random.default_rng(0)
  given = random.normal(size=[3, 1000]).astype(np.float32)
  given[:, :500] = given[0, :500]
  model = tf.Module()
  with strategy.scope():
    model.state = tf.Variable(
      given[0], trainable=False, aggregation=tf.VariableAggregation.MEAN,
      synchronization=tf.VariableSynchronization.ON_READ,
    )  # fmt: skip
  copies = strategy.experimental_local_results(model.state)
  for copy, value in zip(copies, given, strict=True):
    copy.assign(value)
  replica_state.average(strategy, model)
  expected = given.astype(np.float64).mean(axis=0).astype(np.float32)
  np.testing.assert_array_equal(expected[:500], given[0, :500])
  for copy in strategy.experimental_local_results(model.state):
    np.testing.assert_array_equal(copy.numpy(), expected)
