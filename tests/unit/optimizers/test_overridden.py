"""What a user's optimizer overrides of what `fit` calls: it is called, or refused at the start."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from test_optimizers import apply, build, optimizer_error

from loopwright.optimizers.groups import grouped

KERAS = {"keras": keras.optimizers, "tf_keras": tf_keras.optimizers}
RATE, DECAY = 0.5, 0.25
both = pytest.mark.parametrize("library", KERAS)


def halved(pairs):
  return [(gradient / 2, variable) for gradient, variable in pairs]


def overriding(library, method):
  """Returns a class whose `method` halves the gradients, and names no argument that it ignores."""
  base = KERAS[library].SGD

  class Halving(base):
    if method == "apply":

      def apply(self, grads, trainable_variables=None):
        super().apply([g / 2 for g in grads], trainable_variables)

    elif method == "apply_gradients":

      def apply_gradients(self, grads_and_vars):
        return super().apply_gradients(halved(grads_and_vars))

    elif method == "update_step":

      def update_step(self, gradient, variable, *rate):
        super().update_step(gradient / 2, variable, *rate)

    elif method == "compute_gradients":

      def compute_gradients(self, loss, var_list, tape=None):
        return halved(super().compute_gradients(loss, var_list, tape))

    elif method == "minimize":

      def minimize(self, loss, var_list, tape=None):
        self.apply_gradients(halved(self.compute_gradients(loss, var_list, tape)))

    elif method == "aggregate_gradients":

      def aggregate_gradients(self, grads_and_vars):
        return halved(super().aggregate_gradients(grads_and_vars))

  return lambda: Halving(RATE, weight_decay=DECAY)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
  ("library", "method"),
  [
    ("keras", "apply"),
    ("keras", "apply_gradients"),
    ("keras", "update_step"),
    ("tf_keras", "apply_gradients"),
    ("tf_keras", "update_step"),
  ],
)
@pytest.mark.fast(replicas=[2], fuse=[True])
def test_what_a_class_overrides_is_called(mirrored, library, method, replicas, fuse):
  strategy = mirrored(replicas)
  with strategy.scope():
    variables = [tf.Variable([1.0, -2.0]), tf.Variable([[4.0]])]
    made = build(overriding(library, method), variables, fuse=fuse)["default"]
  wanted = [np.array([1.0, -2.0]), np.array([[4.0]])]
  for number in (1.0, 2.0):
    gradients = [number * np.array([8.0, 2.0]), number * np.array([[-4.0]])]
    apply(strategy, made, [tf.constant(g, tf.float32) for g in gradients])
    wanted = [w - RATE * DECAY * w - RATE * g / 2 for w, g in zip(wanted, gradients, strict=True)]
  for variable, value in zip(variables, wanted, strict=True):
    for copy in strategy.experimental_local_results(variable):
      np.testing.assert_array_equal(copy, value)
  assert made.optimizer.iterations.numpy() == 2


@pytest.mark.parametrize("method", ["minimize", "compute_gradients", "aggregate_gradients"])
def test_what_is_not_called_is_refused(method):
  assert optimizer_error(overriding("tf_keras", method)) == (
    f"optimizer 'critic' is a Halving, which overrides {method}(), but the framework calls only "
    "its apply_gradients(); do it there, or to the gradients in Task.train_step()."
  )


@pytest.mark.parametrize(
  ("library", "method"),
  [("keras", "apply"), ("keras", "apply_gradients"), ("tf_keras", "apply_gradients")],
)
def test_groups_refuse_what_they_do_not_call(library, method):
  factory = overriding(library, method)
  message = optimizer_error(lambda: grouped(of=factory, groups={".*": {"weight_decay": 0.0}}))
  assert message == (
    f"optimizer 'critic' is a Halving, which overrides {method}(), but @grouped calls only its "
    "update_step(); do it there, or to the gradients in Task.train_step()."
  )


@both
def test_groups_call_an_update_step_of_a_users_own(mirrored, library):
  strategy = mirrored(2)
  with strategy.scope():
    variables = [tf.Variable(1.0, name="one"), tf.Variable(2.0, name="two")]
    factory = overriding(library, "update_step")
    groups = {"two.*": {"learning_rate_scale": 0.5, "weight_decay": 0.0}}
    made = build(lambda: grouped(of=factory, groups=groups), variables)["default"]
  apply(strategy, made, [tf.constant(4.0), tf.constant(4.0)])
  assert variables[0].numpy() == 1.0 - RATE * DECAY - RATE * 2.0
  assert variables[1].numpy() == 2.0 - RATE * 0.5 * 2.0


def test_a_schedule_free_optimizer_of_a_users_own_updates_as_it_says():
  class Still(keras.optimizers.ScheduleFreeAdamW):
    def update_step(self, gradient, variable, learning_rate):
      variable.assign_sub(gradient)

  variable = tf.Variable(1.0)
  made = build(lambda: Still(0.5), [variable])["default"]
  apply(tf.distribute.get_strategy(), made, [tf.constant(0.25)])
  assert variable.numpy() == 0.75


def test_variables_that_keras_sets_to_their_gradients_are_refused():
  """Float8: the "gradients" are new scales and histories, which nothing may sum or divide."""
  layer = keras.layers.Dense(3, name="wide")
  layer.build((None, 4))
  layer.quantize("float8")
  assert [v.path for v in layer.trainable_variables if v.overwrite_with_gradient]
  message = optimizer_error(lambda: keras.optimizers.Adam(), layer.trainable_variables)
  assert message == (
    "optimizer 'critic': variable 'wide/inputs_scale' is one that Keras sets to its gradient "
    "(float8), but the framework divides gradients by the global weight; train in mixed_bfloat16 "
    "instead of quantize('float8')."
  )
