import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from loopwright.errors import ConfigError
from loopwright.models import models
from loopwright.optimizers import adapters, groups, rule, schedules
from loopwright.optimizers.ema import Ema

KERAS = {"keras": keras.optimizers, "tf_keras": tf_keras.optimizers}
both = pytest.mark.parametrize("library", KERAS)
either_way = pytest.mark.parametrize("fuse", [True, False])


def step_counter():
  return tf.Variable(0, dtype=tf.int64, trainable=False)


def build(factories, variables, *, step=None, fuse=False):
  step = step_counter() if step is None else step
  return adapters.build(factories, lambda name: variables, step, fuse=fuse)


def apply(strategy, optimizer, gradients):
  """One compiled update with the same gradients on every replica, through the framework's verbs."""
  packed = adapters.Gradients.of(optimizer.fusion, gradients)

  def update(context_strategy, *tensors):
    optimizer.apply(context_strategy, packed.replaced(list(tensors)))

  def replica_step():
    tensors = tuple(tf.identity(tensor) for tensor in packed.tensors)
    tf.distribute.get_replica_context().merge_call(update, args=tensors)

  tf.function(lambda: strategy.run(replica_step))()


# ---- Keras's private switch ----


def test_canary_keras_3_still_reduces_by_the_method_that_the_adapter_replaces():
  """If it fails after an upgrade of Keras: rule.Keras3 no longer switches its reduction off."""
  optimizer, variable = keras.optimizers.SGD(1.0), tf.Variable(0.0)
  optimizer.build([variable])
  assert callable(optimizer._all_reduce_sum_gradients)
  seen = []
  optimizer._all_reduce_sum_gradients = lambda pairs: (
    seen.extend(pairs) or [(tf.constant(5.0), variable)]
  )
  optimizer.apply([tf.constant(2.0)], [variable])
  assert [float(gradient) for gradient, _ in seen] == [2.0]
  assert variable.numpy() == -5.0


def test_canary_tf_keras_still_has_its_public_switch():
  signature = inspect.signature(tf_keras.optimizers.Optimizer.apply_gradients)
  assert "skip_gradients_aggregation" in signature.parameters


@both
@either_way
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.fast(replicas=[2])
def test_an_update_communicates_nothing(mirrored, library, fuse, replicas):
  strategy = mirrored(replicas)
  with strategy.scope():
    variables = [tf.Variable([1.0, 2.0]), tf.Variable([[3.0]])]
    made = build(lambda: KERAS[library].SGD(0.5), variables, fuse=fuse)["default"]
  apply(strategy, made, [tf.constant([2.0, 4.0]), tf.constant([[6.0]])])
  for copy in strategy.experimental_local_results(variables[0]):
    np.testing.assert_array_equal(copy, [0.0, 0.0])
  np.testing.assert_array_equal(variables[1], [[0.0]])
  assert made.optimizer.iterations.numpy() == 1


@both
@either_way
def test_a_missing_gradient_leaves_variable_and_slots_alone(mirrored, library, fuse):
  strategy = mirrored(2)
  with strategy.scope():
    variables = [tf.Variable([1.0, 2.0]), tf.Variable([3.0])]
    made = build(lambda: KERAS[library].AdamW(0.5, weight_decay=0.5), variables, fuse=fuse)
  apply(strategy, made["default"], [tf.constant([2.0, 4.0]), None])
  np.testing.assert_array_equal(variables[1], [3.0])
  # Decay first: x - 0.5 * 0.5 * x; then Adam's first step, of the size of the learning rate.
  np.testing.assert_allclose(variables[0], [0.75 - 0.5, 1.5 - 0.5], rtol=0, atol=1e-5)


# ---- Learning rates ----


def test_a_plain_function_as_learning_rate_is_refused():
  def decay(step):
    return 0.1 / (1 + step)

  line = (
    r"^the learning rate of SGD is a function, decay; wrap it in loopwright.Schedule\(function\)"
  )
  with pytest.raises(ConfigError, match=line):
    build(lambda: keras.optimizers.SGD(decay), [tf.Variable(1.0)])


@both
def test_the_learning_rate_is_that_of_the_next_update(library):
  step = step_counter()
  schedule = schedules.Schedule(lambda s: 1.0 / (1.0 + s))
  made = build(lambda: KERAS[library].SGD(schedule), [tf.Variable(1.0)], step=step)["default"]
  assert float(made.learning_rate()) == 1.0
  apply(tf.distribute.get_strategy(), made, [tf.constant(0.0)])
  step.assign(3)  # two updates were skipped
  assert float(made.learning_rate()) == 0.25


@both
def test_a_learning_rate_that_was_assigned_is_the_one_told(library):
  made = build(lambda: KERAS[library].SGD(0.5), [tf.Variable(1.0)])["default"]
  made.optimizer.learning_rate = 0.125
  assert float(made.learning_rate()) == 0.125


# ---- What is refused ----


def optimizer_error(factory, variables=None):
  variables = [tf.Variable(1.0)] if variables is None else variables
  with pytest.raises(ConfigError) as error:
    build({"critic": factory}, variables)
  assert "\n" not in str(error.value)
  return str(error.value)


@pytest.mark.parametrize(
  ("options", "remedy"),
  [
    ({"global_clipnorm": 1.0}, "use Trainer.clip_norm"),
    ({"clipvalue": 0.5}, "use Trainer.clip_value"),
    ({"use_ema": True}, "use Trainer.ema_decay"),
  ],
)
@both
def test_options_that_are_the_loops_work_are_refused(library, options, remedy):
  message = optimizer_error(lambda: KERAS[library].SGD(0.1, **options))
  [(name, value)] = options.items()
  assert f"optimizer 'critic' sets {name}={value}" in message
  assert remedy in message


@pytest.mark.parametrize(
  ("options", "remedy"),
  [
    ({"gradient_accumulation_steps": 4}, "use Trainer.accumulation_steps"),
    ({"loss_scale_factor": 8.0}, "use Trainer.loss_scale"),
  ],
)
def test_options_that_keras_3_alone_has_are_refused(options, remedy):
  assert remedy in optimizer_error(lambda: keras.optimizers.SGD(0.1, **options))


@both
def test_loss_scale_optimizers_are_refused(library):
  kinds = {
    "keras": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    "tf_keras": lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD(0.1)),
  }
  message = optimizer_error(kinds[library])
  assert "checks only replica 0" in message
  assert "Trainer.loss_scale = @dynamic" in message


@both
def test_an_optimizer_in_place_of_a_factory_is_refused(library):
  message = optimizer_error(KERAS[library].SGD(0.1))
  assert (
    "optimizer 'critic' is SGD, already built; pass a factory, such as lambda: keras." in message
  )


@pytest.mark.parametrize(
  "factory",
  [lambda: "adam", lambda: tf_keras.optimizers.legacy.SGD(0.1), lambda: None],
  ids=["str", "legacy", "None"],
)
def test_what_is_no_optimizer_is_refused(factory):
  assert "it must be a Keras 3 optimizer or a tf_keras optimizer" in optimizer_error(factory)


def test_an_optimizer_without_variables_is_refused():
  message = optimizer_error(lambda: keras.optimizers.SGD(0.1), variables=[])
  assert "optimizer 'critic' has no trainable variable to update" in message


def test_several_optimizers_own_what_variables_of_says():
  owned = {"a": [tf.Variable(1.0)], "b": [tf.Variable(2.0), tf.Variable(3.0)]}
  factories = {"a": lambda: keras.optimizers.Adam(), "b": lambda: tf_keras.optimizers.SGD()}
  made = adapters.build(factories, owned.__getitem__, step_counter())
  assert {name: optimizer.variables for name, optimizer in made.items()} == owned
  assert rule.of(made["a"].optimizer) is rule.Keras3
  assert rule.of(made["b"].optimizer) is rule.TfKeras


# ---- The moving average ----


@pytest.mark.parametrize("replicas", [1, 2])
def test_ema_is_the_recurrence_of_its_docstring(mirrored, replicas):
  strategy = mirrored(replicas)
  with strategy.scope():
    variables = [tf.Variable([1.0, 2.0]), tf.Variable(5.0)]
    ema = Ema(decay=0.75, variables=variables)
  values, expected = ([5.0, 6.0], [3.0, -2.0]), np.array([1.0, 2.0])
  for value in values:
    variables[0].assign(value)
    variables[1].assign(7.0)
    tf.function(lambda: ema.update(strategy, variables[:1]))()
    expected = 0.75 * expected + 0.25 * np.array(value)
  for copy in strategy.experimental_local_results(ema.averages[0]):
    np.testing.assert_allclose(copy, expected, rtol=1e-6)
  assert ema.averages[1].numpy() == 5.0  # of an optimizer that made no update


def evaluate_and_fail(ema):
  with ema.in_place():
    raise KeyError


def test_ema_takes_the_place_of_the_weights_for_a_while(mirrored):
  with mirrored(2).scope():
    variable = tf.Variable(1.0)
    ema = Ema(decay=0.5, variables=[variable])
  variable.assign(3.0)
  with ema.in_place():
    assert (variable.numpy(), ema.averages[0].numpy()) == (1.0, 3.0)
  assert (variable.numpy(), ema.averages[0].numpy()) == (3.0, 1.0)
  with pytest.raises(KeyError):
    evaluate_and_fail(ema)
  assert (variable.numpy(), ema.averages[0].numpy()) == (3.0, 1.0)


def test_ema_starts_again_at_the_weights(mirrored):
  with mirrored(2).scope():
    variables = [tf.Variable(1.0), tf.Variable([2.0, 3.0])]
    ema = Ema(decay=0.5, variables=variables)
  variables[0].assign(4.0)
  variables[1].assign([5.0, 6.0])
  ema.restart()
  assert ema.averages[0].numpy() == 4.0
  np.testing.assert_array_equal(ema.averages[1], [5.0, 6.0])


def test_ema_gives_the_averages_of_those_that_have_one():
  one, two, other = tf.Variable(1.0), tf.Variable(2.0), tf.Variable(3.0)
  ema = Ema(decay=0.5, variables=[one, two])
  assert [average.numpy() for average in ema.averages_of([other, two])] == [2.0]
  assert not any(average.trainable for average in ema.averages)


@pytest.mark.parametrize("decay", [0, 1, -0.1, 1.5, float("nan")])
def test_ema_refuses_a_decay_out_of_range(decay):
  with pytest.raises(
    ConfigError, match=f"Trainer.ema_decay is {decay}; it must be between 0 and 1"
  ):
    Ema(decay=decay, variables=[])


# ---- Weight decay ----

STEPS, RATE, DECAY = 4, 0.01, 0.5


class Names(keras.layers.Layer):
  """A kernel, a bias and an embedding, each to be told apart by its own name alone."""

  def build(self, input_shape):
    self.kernel = self.add_weight(shape=[3, 2], initializer="ones", name="kernel")
    self.bias = self.add_weight(shape=[2], initializer="ones", name="bias")
    self.embeddings = self.add_weight(shape=[5, 3], initializer="ones", name="embeddings")


def adamw_by_hand(weight, gradients, *, decay):
  """Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2."""
  first = second = np.zeros_like(weight)
  for step, gradient in enumerate(gradients, 1):
    first = 0.9 * first + 0.1 * gradient
    second = 0.999 * second + 0.001 * gradient**2
    direction = (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-7)
    weight = weight - RATE * decay * weight - RATE * direction
  return weight


@both
@either_way
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.fast(replicas=[2])
def test_decay_leaves_the_named_variables_alone(mirrored, library, fuse, replicas):
  strategy = mirrored(replicas)
  adamw = KERAS[library].AdamW

  def factory():
    return groups.without_decay(
      of=lambda: adamw(RATE, weight_decay=DECAY), names=["bias", "embeddings"]
    )

  with strategy.scope():
    layer = Names(name="kernel_and_bias")  # a layer's own name does not matter
    layer.build(None)
    variables = layer.trainable_variables
    made = build(factory, variables, fuse=fuse)["default"]
  rng = np.random.default_rng(0)
  before = [v.numpy().astype(float) for v in variables]
  slopes = [[rng.normal(size=v.shape) for v in variables] for _ in range(STEPS)]
  for gradients in slopes:
    apply(strategy, made, [tf.constant(g, tf.float32) for g in gradients])
  for index, variable in enumerate(variables):
    decay = {"kernel": DECAY, "bias": 0.0, "embeddings": 0.0}[variable.name]
    expected = adamw_by_hand(before[index], [each[index] for each in slopes], decay=decay)
    for copy in strategy.experimental_local_results(models.raw(variable)):
      np.testing.assert_allclose(copy, expected, rtol=0, atol=2e-6, err_msg=variable.name)


@both
def test_what_is_not_decayed_must_be_there(library):
  def factory():
    return groups.without_decay(
      of=lambda: KERAS[library].AdamW(0.1, weight_decay=0.1), names=["kernel", "gama"]
    )

  variables = [tf.Variable(1.0, name="gama/kernel"), tf.Variable(1.0, name="gama/bias")]
  assert optimizer_error(factory, variables) == (
    "optimizer 'critic': without_decay.names has 'gama', which matches no variable; the names are "
    "bias, kernel."
  )


@both
def test_without_decay_needs_decay(library):
  message = optimizer_error(
    lambda: groups.without_decay(of=lambda: KERAS[library].Adam(0.1), names=["bias"])
  )
  assert message.startswith("without_decay.of returns a Adam without weight decay; set its")


@pytest.mark.parametrize("names", [[], "bias", ()])
def test_without_decay_needs_names(names):
  message = optimizer_error(
    lambda: groups.without_decay(of=lambda: keras.optimizers.AdamW(0.1), names=names)
  )
  assert message == f"without_decay.names is {names!r}; it must be a list such as ['bias']."


def test_without_decay_passes_on_what_is_no_optimizer():
  message = optimizer_error(lambda: groups.without_decay(of=lambda: "adamw", names=["bias"]))
  assert "optimizer 'critic' is a str; it must be a Keras 3 optimizer" in message
