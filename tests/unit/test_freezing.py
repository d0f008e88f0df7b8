"""The head alone until a step, then all with another rate; and adapters beside frozen weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from runs import make_trainer

from loopwright.models import models
from loopwright.task import Task

RNG = np.random.default_rng(0)
X = RNG.normal(size=[4, 3]).astype(np.float32)
Y = RNG.normal(size=4).astype(np.float32)
UNFROZEN_AT = 2


class Gradual(toys.Regression):
  """Its last two methods are in docs/transfer-learning.md."""

  features = {"x": X, "y": Y}

  def build_model(self):
    keras.utils.set_random_seed(1)
    body = keras.layers.Dense(3, activation="tanh", name="body")
    return toys.network([3], body, keras.layers.Dense(1, name="head"))

  def variables_of(self, optimizer):
    layer = self.model.get_layer("head") if optimizer == "head" else self.model
    return layer.trainable_variables

  def train_step(self, step, batch):
    frozen = step.number < UNFROZEN_AT
    step.update(lambda part: self.training_loss(step, part), batch, "head", when=frozen)
    step.update(lambda part: self.training_loss(step, part), batch, "all", when=~frozen)


OPTIMIZERS = {
  "head": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.5, epsilon=0.1),
  "all": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.5, epsilon=0.1),
}


def make(task, strategy, optimizer):
  return make_trainer(task, strategy, batch=4, optimizer=optimizer, ema_decay=0.5)


def weights_of(model):
  return [models.raw(v).numpy() for v in models.all_variables(model)]


def by_hand(steps):
  """The same in a plain loop, with a new optimizer when all is trained."""
  model = Gradual().build_model()
  parts = {"head": model.get_layer("head").trainable_variables, "all": model.trainable_variables}
  made = {name: make_one() for name, make_one in OPTIMIZERS.items()}
  for step in range(steps):
    name = "head" if step < UNFROZEN_AT else "all"
    with tf.GradientTape() as tape:
      loss = tf.reduce_mean(tf.square(model(X)[:, 0] - Y))
    made[name].apply(tape.gradient(loss, [v.value for v in parts[name]]), parts[name])
  return model.get_weights()


@pytest.mark.fast(replicas=[2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_body_is_frozen_until_a_step(replicas, mirrored, tmp_path):
  trainer = make(Gradual(), mirrored(replicas), OPTIMIZERS)
  model, later = trainer.task.model, trainer.parts.optimizers["all"].optimizer
  body, state = weights_of(model.get_layer("body")), [np.array(v) for v in later.variables]
  trainer.train(tf.constant(UNFROZEN_AT))
  for before, after in zip(body, weights_of(model.get_layer("body")), strict=True):
    np.testing.assert_array_equal(after, before)  # nor does its weight decay
  for before, after in zip(state, later.variables, strict=True):
    np.testing.assert_array_equal(np.array(after), before)
  metrics = trainer.train(tf.constant(1))
  assert np.isnan(metrics["head_loss"])
  assert metrics["all_loss"] > 0
  saved = tf.train.Checkpoint(**trainer.checkpoint_items()).save(str(tmp_path / "saved"))
  trainer.train(tf.constant(2))
  for expected, got in zip(by_hand(5), weights_of(model), strict=True):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
  assert trainer.traces == 1

  again = make(Gradual(), mirrored(replicas), OPTIMIZERS)
  tf.train.Checkpoint(**again.checkpoint_items()).restore(saved).assert_consumed()
  again.train(tf.constant(2))
  for expected, got in zip(weights_of(model), weights_of(again.task.model), strict=True):
    np.testing.assert_array_equal(got, expected)


class Adapted(Gradual):
  """Adapters of rank 2 in the body; docs/transfer-learning.md shows these lines."""

  train_step = Task.train_step
  variables_of = Task.variables_of

  def build_model(self):
    model = super().build_model()
    model.get_layer("body").enable_lora(rank=2, lora_alpha=6)
    for variable in model.trainable_variables:
      variable.trainable = "lora" in variable.name
    return model


@pytest.mark.fast(replicas=[2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_adapters_alone_are_trained(replicas, mirrored, tmp_path):
  trainer = make(Adapted(), mirrored(replicas), lambda: keras.optimizers.SGD(0.5))
  model = trainer.task.model
  (kernel, bias, a, b), (out, out_bias) = (weights_of(layer) for layer in model.layers)
  frozen = [kernel, bias, out, out_bias]
  assert not b.any()
  trainer.train(tf.constant(3))
  for _ in range(3):  # scale = lora_alpha / rank = 3
    hidden = np.tanh(X @ (kernel + 3 * a @ b) + bias)
    upstream = 2 * (hidden @ out + out_bias - Y[:, None]) / 4
    of_product = 3 * X.T @ (upstream @ out.T * (1 - hidden**2))
    a, b = a - 0.5 * of_product @ b.T, b - 0.5 * a.T @ of_product
  (*same, trained_a, trained_b), head = (weights_of(layer) for layer in model.layers)
  for before, after in zip(frozen, [*same, *head], strict=True):
    np.testing.assert_array_equal(after, before)
  np.testing.assert_allclose(trained_a, a, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(trained_b, b, rtol=1e-5, atol=1e-6)
  assert len(trainer.parts.ema.averages) == 2

  served = models.serving_function(model)(tf.constant(X))
  merged = np.tanh(X @ (kernel + 3 * a @ b) + bias) @ out + out_bias
  np.testing.assert_allclose(served, merged, rtol=1e-5, atol=1e-6)
  saved = tf.train.Checkpoint(**trainer.checkpoint_items()).save(str(tmp_path / "saved"))
  again = make(Adapted(), mirrored(replicas), lambda: keras.optimizers.SGD(0.5))
  tf.train.Checkpoint(**again.checkpoint_items()).restore(saved).assert_consumed()
  for expected, got in zip(weights_of(model), weights_of(again.task.model), strict=True):
    np.testing.assert_array_equal(got, expected)
