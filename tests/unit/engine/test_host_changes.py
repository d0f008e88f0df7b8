"""What the host changes between loops: it counts from the next loop on, or one line refuses it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
import toys
from runs import make_evaluator, make_trainer

from loopwright.errors import ConfigError
from loopwright.metrics import Loss
from loopwright.models import models

RNG = np.random.default_rng(0)
X = RNG.normal(size=[6, 3]).astype(np.float32)
Y = RNG.normal(size=6).astype(np.float32)
KERNEL, RATE = np.array([0.5, -0.25, 1.0], np.float32), 0.125
REPLICAS = pytest.mark.parametrize("replicas", [1, 2])
FAST = pytest.mark.fast(replicas=[2])


class Regression(toys.Regression):
  """kernel @ x, whose error is multiplied by a plain number."""

  features = {"x": X, "y": Y}
  kind = keras
  scale = 1.0

  def build_model(self):
    return toys.linear(KERNEL, self.kind)

  def losses(self, outputs, batch):
    return self.scale * super().losses(outputs, batch)


def trained(task, strategy, optimizer=lambda: keras.optimizers.SGD(RATE)):
  trainer = make_trainer(task, strategy, batch=6, optimizer=optimizer)
  trainer.train(tf.constant(1))
  return trainer


def by_hand(factors, momentums=None):
  """The kernel after a step of each factor, and each momentum."""
  kernel, velocity = KERNEL.astype(np.float64), 0
  for factor, momentum in zip(factors, momentums or [0] * len(factors), strict=True):
    velocity = momentum * velocity - RATE * factor * 2 * (X @ kernel - Y) @ X / 6
    kernel = kernel + velocity
  return kernel


def kernel(trainer):
  return models.raw(models.trainable_variables(trainer.task.model)[-1]).numpy()[:, 0]


@FAST
@REPLICAS
def test_what_python_has_read_counts_after_use(replicas, mirrored, caplog):
  trainer = trained(Regression(), mirrored(replicas))
  evaluator = make_evaluator(trainer.task, trainer.strategy, batch=4)
  losses = [evaluator.evaluate()["loss"]]
  trainer.task.scale = 3.0
  trainer.train(tf.constant(1))
  np.testing.assert_allclose(kernel(trainer), by_hand([1, 1]), rtol=1e-5)
  trainer.use()
  trainer.train(tf.constant(1))
  np.testing.assert_allclose(kernel(trainer), by_hand([1, 1, 3]), rtol=1e-5)
  losses.append(evaluator.evaluate()["loss"])
  evaluator.trace_again()
  losses.append(evaluator.evaluate()["loss"])
  first, last = (np.mean((X @ by_hand(factors) - Y) ** 2) for factors in ([1], [1, 1, 3]))
  np.testing.assert_allclose(losses, [first, last, 3 * last], rtol=1e-5)
  assert not [m for m in caplog.messages if "traced again" in m]


@FAST
@REPLICAS
@pytest.mark.parametrize("library", [keras, tf_keras])
def test_options_of_the_optimizer_count_or_are_refused(library, replicas, mirrored, caplog):
  class Task(Regression):
    kind = library

  trainer = trained(Task(), mirrored(replicas), lambda: library.optimizers.SGD(RATE, momentum=0.5))
  optimizer = trainer.parts.optimizers["default"].optimizer
  optimizer.momentum = 0.25
  trainer.train(tf.constant(2))
  np.testing.assert_allclose(kernel(trainer), by_hand([1] * 3, [0.5, 0.25, 0.25]), rtol=1e-5)
  assert sum("SGD.momentum is 0.25, which was 0.5" in m for m in caplog.messages) == 1
  optimizer.learning_rate = 2 * RATE  # a variable, which needs no trace
  trainer.train(tf.constant(1))
  assert trainer.traces == 1
  for name, value in (("momentum", 0.0), ("clipnorm", 1.0), ("nesterov", True)):
    before = getattr(optimizer, name)
    setattr(optimizer, name, value)
    with pytest.raises(ConfigError, match=f"SGD.{name} is {value}, which was .* when optimizer"):
      trainer.train(tf.constant(1))
    setattr(optimizer, name, before)


@pytest.mark.parametrize(
  ("name", "remedy"),
  [
    ("clip_norm", r"call trainer.use\(clip_norm=...\)"),
    ("global_batch_size", "make another trainer"),
    ("seed", "make another trainer"),
  ],
)
def test_attributes_of_a_trainer_that_no_step_reads_are_refused(name, remedy, one):
  trainer = trained(Regression(), one)
  setattr(trainer, name, 3)
  with pytest.raises(ConfigError, match=rf"^trainer.{name} was set to 3, without an .*{remedy}"):
    trainer.train(tf.constant(1))


class Two(toys.Regression):
  features = {"x": X, "y": Y}
  kind = keras

  def build_model(self):
    layers = self.kind.layers
    start = self.kind.initializers.RandomNormal(seed=3)
    body = layers.Dense(2, kernel_initializer=start, name="body")
    return toys.network(
      [3], body, layers.Dense(1, kernel_initializer=start, name="head"), library=self.kind
    )


@FAST
@REPLICAS
@pytest.mark.parametrize("library", [keras, tf_keras])
def test_frozen_variables_stay_and_are_trained_again_later(library, replicas, mirrored, caplog):
  class Task(Two):
    kind = library

  decayed = lambda: library.optimizers.AdamW(0.1, weight_decay=0.5)  # noqa: E731
  trainer = trained(Task(), mirrored(replicas), decayed)
  model = trainer.task.model
  body = model.get_layer("body")
  body.trainable = False
  frozen = [np.array(v) for v in body.weights]
  head = [np.array(v) for v in model.get_layer("head").weights]
  trainer.train(tf.constant(2))
  for before, now in zip(frozen, body.weights, strict=True):
    np.testing.assert_array_equal(np.array(now), before)
  now = model.get_layer("head").weights
  assert all((np.array(v) != b).any() for v, b in zip(now, head, strict=True))
  assert sum("2 of the optimizers' variables are frozen" in m for m in caplog.messages) == 1
  body.trainable = True
  trainer.train(tf.constant(1))
  assert all((np.array(v) != b).any() for v, b in zip(body.weights, frozen, strict=True))
  assert not [m for m in caplog.messages if "no gradient reaches" in m]
  model.trainable = False
  with pytest.raises(ConfigError, match="optimizer 'default' has no trainable variable left"):
    trainer.train(tf.constant(1))


def test_variables_that_the_optimizer_does_not_have_are_refused(one):
  class Frozen(Two):
    def build_model(self):
      model = super().build_model()
      model.get_layer("body").trainable = False
      return model

  trainer = trained(Frozen(), one)
  trainer.task.model.get_layer("body").trainable = True
  with pytest.raises(ConfigError, match=r"body/(kernel|bias)' is to be trained now, but optimizer"):
    trainer.train(tf.constant(1))
  trainer = trained(Two(), one)
  trainer.task.model.add(keras.layers.Dense(1, name="more"))
  with pytest.raises(ConfigError, match=r"more/(kernel|bias)' is to be trained now"):
    trainer.train(tf.constant(1))


def test_a_layer_without_variables_counts(one, caplog):
  trainer = trained(Two(), one)
  trainer.task.model.add(keras.layers.Rescaling(0.0))
  metrics = trainer.train(tf.constant(1))
  assert metrics["loss"] == pytest.approx(np.mean(Y**2), rel=1e-6)
  assert any("the model has" in m for m in caplog.messages)


class Passes(Two):
  """Two passes that reach one layer each; with `both` false, nothing reaches the body."""

  def __init__(self, both):
    self.both = both

  def train_step(self, step, batch):
    def loss(name):
      return lambda part: Loss.from_examples(
        tf.reduce_sum(tf.square(self.model.get_layer(name).kernel)) * part["weight"], part["weight"]
      )

    passes = [step.gradients(loss(n), batch, step.variables()) for n in ("body", "head")]
    (first, one), (second, _) = passes
    chosen = [a if a is not None and self.both else b for a, b in zip(first, second, strict=True)]
    gradients, loss = step.all_reduce(chosen, one)
    gradients = step.unscale(gradients, loss)
    finite, norm = step.check(gradients)
    step.apply(gradients, finite)
    step.log_update(loss, finite, norm)


def test_no_gradient_reaches_is_said_of_the_whole_step_and_each_time_that_it_is_true(one, caplog):
  said = lambda: [m for m in caplog.messages if "no gradient reaches" in m]  # noqa: E731
  for both, names in ((True, ["body/bias", "head/bias"]), (False, ["body/kernel", "body/bias"])):
    caplog.clear()
    trained(Passes(both), one)
    assert len(said()) == 1
    found = said()[0].removeprefix("no gradient reaches ").split(", ")
    assert [name.partition("/")[2] for name in found][:2] == names


@pytest.mark.parametrize(
  ("change", "line"),
  [
    (lambda g: [*g[:-1], tf.zeros([5])], r"a gradient of shape \(5,\) for '.*/bias' of shape"),
    (lambda g: g[:-1], "3 gradients for 4 variables"),
  ],
)
@FAST
@REPLICAS
def test_a_gradient_of_another_shape_is_refused(change, line, replicas, mirrored):
  class Wrong(Two):
    def train_step(self, step, batch):
      gradients, loss = step.gradients(
        lambda part: self.training_loss(step, part), batch, step.variables()
      )
      gradients, loss = step.all_reduce(gradients, loss)
      step.apply(change(list(gradients)), loss.weight > 0)

  with pytest.raises(ConfigError, match=rf"^step.apply\(\) got {line}"):
    trained(Wrong(), mirrored(replicas))


@pytest.fixture
def one():
  return tf.distribute.get_strategy()
