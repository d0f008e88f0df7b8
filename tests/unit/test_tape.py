"""Tapes around a forward pass in `train_step`: against loops in float64, on 1 and 2 replicas."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from runs import copies, make_trainer

from loopwright.errors import ConfigError
from loopwright.inputs.sources import ArraySource
from loopwright.metrics import Loss
from loopwright.models import models
from loopwright.optimizers import loss_scale
from loopwright.task import Task

X = np.random.default_rng(0).normal(size=[27, 3]).astype(np.float32)
Y = np.sin(X.sum(1)).astype(np.float32)
STEPS, BATCH, RATE = 3, 9, 0.1
SCALES = {"none": loss_scale.none, "fixed": lambda: loss_scale.fixed(scale=1024.0)}
SCALES["dynamic"] = lambda: loss_scale.dynamic(initial=1024.0, growth_steps=2)


def initial():
  """The weights before the first step, float64: two of the generator, three of the critic."""
  rng = np.random.default_rng(1)
  return [rng.normal(size=shape) for shape in ([3, 2], [2], [1, 4], [4], [4, 1])]


def constant(value):
  return keras.initializers.Constant(value)


class Shared(Task):
  """One forward pass with batch normalisation, and a loss for each of two networks."""

  def __init__(self, tape="step", scaled=True):
    self.tape, self.scaled = tape, scaled

  def build_model(self):
    layers, start = keras.layers, list(map(constant, initial()))
    norm = layers.BatchNormalization(
      gamma_initializer=start[1], momentum=0.5, synchronized=True, center=False
    )
    hidden = layers.Dense(2, use_bias=False, kernel_initializer=start[0])
    critic = layers.Dense(4, "tanh", kernel_initializer=start[2], bias_initializer=start[3])
    last = layers.Dense(1, use_bias=False, kernel_initializer=start[4])
    return {"made": toys.network([3], hidden, norm), "critic": toys.network([1], critic, last)}

  def source(self, split):
    return ArraySource(features={"x": X, "y": Y})

  def train_step(self, step, batch):
    own = tf.GradientTape(persistent=True)
    with step.tape() if self.tape == "step" else own as tape:
      losses = self.losses(batch)
    found = {}
    for name, loss in losses.items():
      if self.scaled:
        found[name] = step.gradients_of(tape, loss, step.variables(name))
      else:
        found[name] = tape.gradient(loss.total, [v.value for v in step.variables(name)])
    for name, gradients in found.items():
      gradients, loss = step.all_reduce(gradients, losses[name])
      gradients = step.unscale(gradients, loss)
      finite, norm = step.check(gradients)
      step.apply(gradients, finite & (loss.weight > 0), name)
      step.log_update(loss, finite, norm, name)

  def losses(self, batch):
    made = tf.reduce_sum(self.model["made"](batch["x"], training=True), axis=1, keepdims=True)
    fake, real = (self.model["critic"](v)[:, 0] for v in (made, batch["y"][:, tf.newaxis]))
    distance = tf.square(made[:, 0] - batch["y"])
    losses = {"made": tf.nn.softplus(-fake) + 2.0 * distance}
    losses["critic"] = tf.nn.softplus(-real) + tf.nn.softplus(fake)
    return {name: Loss.from_examples(each, batch["weight"]) for name, each in losses.items()}


def by_hand():
  """The same in float64 on whole batches: weights, moving statistics, and each step's losses."""
  weights = [tf.Variable(value) for value in initial()]
  moving, logged = [np.zeros(2), np.ones(2)], []
  for step in range(STEPS):
    x, y = (tf.constant(v[step * BATCH : (step + 1) * BATCH], tf.float64) for v in (X, Y))
    with tf.GradientTape(persistent=True) as tape:
      hidden = x @ weights[0]
      mean, variance = tf.nn.moments(hidden, axes=[0])
      made = tf.reduce_sum((hidden - mean) / tf.sqrt(variance + 1e-3) * weights[1], 1)
      fake, real = (
        (tf.tanh(v[:, tf.newaxis] @ weights[2] + weights[3]) @ weights[4])[:, 0] for v in (made, y)
      )
      first = tf.reduce_mean(tf.nn.softplus(-fake) + 2.0 * tf.square(made - y))
      second = tf.reduce_mean(tf.nn.softplus(-real) + tf.nn.softplus(fake))
    found = [*tape.gradient(first, weights[:2]), *tape.gradient(second, weights[2:])]
    for variable, gradient in zip(weights, found, strict=True):
      variable.assign_sub(RATE * gradient)
    norms = [float(tf.linalg.global_norm(part)) for part in (found[:2], found[2:])]
    moving = [0.5 * a + 0.5 * b.numpy() for a, b in zip(moving, (mean, variance), strict=True)]
    logged.append([float(first), float(second), *norms])
  return [v.numpy() for v in weights], moving, logged


def sgd():
  return keras.optimizers.SGD(RATE)


def trainer_of(task, strategy, *, batch=BATCH, names=("made", "critic"), **options):
  optimizer = dict.fromkeys(names, sgd) if names else sgd
  return make_trainer(
    task, strategy, batch=batch, optimizer=optimizer, data={"shuffle": False}, **options
  )


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("tape", ["step", "own"])
@pytest.mark.parametrize("scale", ["none", "fixed", "dynamic"])
def test_two_losses_of_one_forward_pass(scale, tape, replicas, mirrored):
  """On 2 replicas, a batch of 9 has a padded row, which batch normalisation must not count."""
  strategy = mirrored(replicas)
  task = Shared(tape)
  trainer = trainer_of(task, strategy, loss_scale=SCALES[scale])
  keys = ("made_loss", "critic_loss", "made_gradient_norm", "critic_gradient_norm")
  steps = [trainer.train(tf.constant(1)) for _ in range(STEPS)]
  weights, moving, logged = by_hand()
  np.testing.assert_allclose([[step[key] for key in keys] for step in steps], logged, rtol=3e-6)
  trained = [variable for net in task.model.values() for variable in net.trainable_variables]
  for replica in copies(strategy, trained):
    for one, other in zip(replica, weights, strict=True):
      np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
  for replica in copies(strategy, task.model["made"].non_trainable_variables):
    for one, other in zip(replica, moving, strict=True):  # once a step, though there are two losses
      np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("scale", ["fixed", "dynamic"])
def test_gradients_without_the_scale_are_refused_where_there_is_one(scale, replicas, mirrored):
  trainer = trainer_of(Shared(scaled=False), mirrored(replicas), loss_scale=SCALES[scale])
  with pytest.raises(
    ConfigError, match=r"2 of 2 gradients were made without it.*write step\.gradients_of\(tape, "
  ):
    trainer.train(tf.constant(1))


@pytest.mark.parametrize("replicas", [1, 2])
def test_without_a_scale_they_are_right(replicas, mirrored):
  strategy = mirrored(replicas)
  task = Shared("own", scaled=False)
  trainer_of(task, strategy).train(tf.constant(STEPS))
  trained = [variable for net in task.model.values() for variable in net.trainable_variables]
  for one, other in zip(copies(strategy, trained)[-1], by_hand()[0], strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


# ---- one loss ----


class Single(toys.Regression):
  """A linear model of 3 inputs, trained by the gradients that `made` returns with its loss."""

  features = {"x": X, "y": Y}

  def __init__(self, made, model=lambda: toys.linear([1.0, -2.0, 0.5])):
    super().__init__(model)
    self.made = made

  def total(self, batch):
    return self.loss(self.forward(batch, training=True), batch)

  def by_step(self, step, batch, factor=1.0):
    def scaled(part):
      loss = self.total(part)
      return Loss(factor * loss.total, loss.weight)

    return step.gradients(scaled, batch, step.variables())

  def train_step(self, step, batch):
    gradients, loss = self.made(self, step, batch)
    gradients, loss = step.all_reduce(gradients, loss)
    gradients = step.unscale(gradients, loss)
    finite, norm = step.check(gradients)
    step.apply(gradients, finite & (loss.weight > 0))
    step.log_update(loss, finite, norm)


def single_by_hand(factor=1.0):
  kernel = np.array([1.0, -2.0, 0.5])
  for start in range(0, STEPS * BATCH, BATCH):
    x, y = (v[start : start + BATCH].astype(np.float64) for v in (X, Y))
    kernel = kernel - factor * RATE * 2.0 / BATCH * (x @ kernel - y) @ x
  return kernel


def by_tape(task, step, batch):
  with step.tape() as tape:
    loss = task.total(batch)
  return step.gradients_of(tape, loss, step.variables()), loss


def a_list(task, step, batch):
  gradients, loss = task.by_step(step, batch)
  return [tf.convert_to_tensor(g) * np.float32(1.0) for g in gradients], loss


def two_passes(task, step, batch):
  """Two gradients of which one is projected onto the other, as in PCGrad: they are parallel."""
  (first,), loss = task.by_step(step, batch)
  (second,), _ = by_tape(task, step, batch)
  share = tf.reduce_sum(first * second) / tf.reduce_sum(first * first)
  return [share * first], loss


def in_a_loop(task, step, batch):
  """A loop on a tensor, of one turn."""
  kernel = models.raw(step.variables()[0])
  gradient, total, weight = tf.zeros(kernel.shape), tf.constant(0.0), tf.constant(0.0)

  def turn(number, gradient, total, weight):
    (more,), loss = task.by_step(step, batch)
    return number + 1, gradient + more, total + loss.total, weight + loss.weight

  start = (tf.constant(0), gradient, total, weight)
  _, gradient, total, weight = tf.while_loop(lambda number, *_: number < 1, turn, start)
  return [gradient], Loss(total, weight)


def conditional(task, step, batch):
  return step.gradients(task.total, batch, step.variables(), when=step.number >= 0)


def by_numpy(task, step, batch):
  (gradient,), loss = task.by_step(step, batch)
  same = tf.numpy_function(lambda g: g, [gradient], tf.float32)
  return [tf.ensure_shape(same, gradient.shape)], loss


def in_a_function(task, step, batch):
  (gradient,), loss = task.by_step(step, batch)
  return [tf.function(lambda: gradient + 0.0)()], loss


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("scale", ["fixed", "dynamic"])
@pytest.mark.parametrize(
  "made", [by_tape, a_list, two_passes, in_a_loop, conditional, by_numpy, in_a_function]
)
def test_gradients_with_the_scale_may_have_passed_through_anything(made, scale, replicas, mirrored):
  task = Single(made)
  trainer = trainer_of(task, mirrored(replicas), names=(), loss_scale=SCALES[scale])
  trainer.train(tf.constant(STEPS))
  kernel = task.model.get_weights()[0][:, 0]
  np.testing.assert_allclose(kernel, single_by_hand(), rtol=1e-5)


@pytest.mark.parametrize("options", [{"accumulation_steps": 3}, {"jit_compile": True}, {}])
def test_zeros_and_constants_need_no_scale(options):
  def made(task, step, batch):
    gradients, loss = task.by_step(step, batch)
    frozen = [np.zeros([4, 1], np.float32), tf.zeros_like(step.variables()[2])]
    return [gradients[0], *frozen], loss

  def model():
    first = keras.layers.Dense(4, kernel_initializer="ones", use_bias=False)
    return toys.network([3], first, keras.layers.Dense(1, kernel_initializer="ones"))

  task = Single(made, model)
  trainer = trainer_of(
    task, tf.distribute.get_strategy(), names=(), loss_scale=SCALES["fixed"], **options
  )
  trainer.train(tf.constant(2))
  first, *others = task.model.get_weights()
  assert np.abs(first - 1.0).max() > 0.01
  for other, start in zip(others, (1.0, 0.0), strict=True):
    np.testing.assert_array_equal(other, np.full_like(other, start))


def hidden(task, step, batch):
  """Some gradients with the scale, and one without."""
  gradients, loss = task.by_step(step, batch)
  return [gradients[0], *(1e-4 * tf.convert_to_tensor(v) for v in step.variables()[1:])], loss


def in_an_own_function(task, step, batch):
  @tf.function
  def derived():
    with tf.GradientTape() as tape:
      total, weight = task.total(batch)
    return tape.gradient(total, [models.raw(v) for v in step.variables()]), total, weight

  gradients, total, weight = derived()
  return gradients, Loss(total, weight)


@pytest.mark.parametrize(("made", "count"), [(hidden, "1 of 2"), (in_an_own_function, "2 of 2")])
def test_each_gradient_must_have_the_scale(made, count):
  task = Single(made, lambda: toys.network([3], keras.layers.Dense(1)))
  trainer = trainer_of(
    task, tf.distribute.get_strategy(), names=(), loss_scale=SCALES["fixed"], fuse_updates=False
  )
  with pytest.raises(ConfigError, match=f"but {count} gradients were made without it"):
    trainer.train(tf.constant(1))


# ---- what the block runs as ----


@pytest.mark.parametrize("replicas", [1, 2])
def test_random_layers_draw_what_they_draw_in_gradients(replicas, mirrored):
  """The same bits, two passes a step, from `step.seed` too."""

  def model():
    dense = keras.layers.Dense(8, kernel_initializer=keras.initializers.GlorotUniform(seed=1))
    return toys.network([3], dense, keras.layers.Dropout(0.5, seed=3), toys.linear(np.ones(8)))

  def noisy(task, step, part):
    loss = task.total(part)
    return Loss(loss.total * (1 + tf.random.stateless_uniform([], step.seed())), loss.weight)

  def by_gradients(task, step, batch):
    step.gradients(task.total, batch, step.variables())
    return step.gradients(lambda part: noisy(task, step, part), batch, step.variables())

  def by_tapes(task, step, batch):
    with step.tape():
      task.total(batch)
    with step.tape() as tape:
      loss = noisy(task, step, batch)
    return step.gradients_of(tape, loss, step.variables()), loss

  found = []
  for made in (by_gradients, by_tapes):
    task = Single(made, model)
    trainer = trainer_of(task, mirrored(replicas), names=())
    trainer.train(tf.constant(STEPS))
    found.append(task.model.get_weights())
  for one, other in zip(*found, strict=True):
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("part", ["given", "not given"])
def test_a_pass_over_a_part_of_the_batch_is_given_it(part, mirrored):
  """Of each replica's five rows the first four: the padded row is left out or the pass refused."""

  def made(task, step, batch):
    some = {name: value[:4] for name, value in batch.items()}
    with step.tape(some if part == "given" else None) as tape:
      loss = task.total(some)
    return step.gradients_of(tape, loss, step.variables()), loss

  def model():
    norm = keras.layers.BatchNormalization(momentum=0.0)
    return toys.network([3], norm, toys.linear([1.0, -2.0, 0.5]))

  task = Single(made, model)
  trainer = trainer_of(task, mirrored(2), names=())
  if part == "not given":
    with pytest.raises(ConfigError, match="its input has 4 rows and the batch 5"):
      trainer.train(tf.constant(1))
    return
  trainer.train(tf.constant(1))
  means = [X[:4].mean(0), X[5:9].mean(0)]
  np.testing.assert_allclose(task.model.layers[0].moving_mean, np.mean(means, 0), rtol=1e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_repeated_rows_of_an_embedding_count_each_time(replicas, mirrored):
  """The gradient of an own tape is IndexedSlices with an index twice."""
  ids = np.array([0, 2, 2, 1, 2, 0], np.int32)

  class Table(Single):
    features = {"x": ids, "y": np.arange(6, dtype=np.float32)}

    def build_model(self):
      return toys.network([], keras.layers.Embedding(3, 1, embeddings_initializer="zeros"))

  def made(task, step, batch):
    with tf.GradientTape() as tape:
      loss = task.total(batch)
    return tape.gradient(loss.total, [models.raw(v) for v in step.variables()]), loss

  task = Table(made)
  result = trainer_of(task, mirrored(replicas), names=(), batch=6).train(tf.constant(1))
  expected = np.array([np.sum(-2.0 * np.arange(6)[ids == row]) / 6 for row in range(3)])
  np.testing.assert_allclose(task.model.get_weights()[0][:, 0], -RATE * expected, rtol=1e-6)
  assert result["gradient_norm"] == pytest.approx(np.linalg.norm(expected), rel=1e-6)


# ---- what is refused ----


@pytest.mark.parametrize(
  ("options", "line"),
  [
    ({"accumulation_steps": 3}, "Trainer.accumulation_steps=3, but the pass of step.tape()"),
    ({"jit_compile": True}, "Trainer.jit_compile=True, but the pass of step.tape()"),
  ],
)
def test_a_pass_that_the_trainer_would_change_is_refused(options, line):
  trainer = trainer_of(Single(by_tape), tf.distribute.get_strategy(), names=(), **options)
  with pytest.raises(ConfigError, match=f"received {re.escape(line)}.*takes the loss as a func"):
    trainer.train(tf.constant(1))


def test_a_loss_outside_of_the_block_depends_on_nothing():
  def made(task, step, batch):
    with step.tape() as tape:
      pass
    loss = task.total(batch)
    return step.gradients_of(tape, loss, step.variables()), loss

  trainer = trainer_of(Single(made), tf.distribute.get_strategy(), names=())
  with pytest.raises(ConfigError, match="the loss depends on none of 1 trainable variables"):
    trainer.train(tf.constant(1))


def test_a_mean_is_no_loss():
  def made(task, step, batch):
    with step.tape() as tape:
      loss = tf.reduce_mean(task.forward(batch, training=True))
    return step.gradients_of(tape, loss, step.variables()), loss

  trainer = trainer_of(Single(made), tf.distribute.get_strategy(), names=())
  with pytest.raises(ConfigError, match="it must be a Loss, this replica's sums"):
    trainer.train(tf.constant(1))


def test_a_variable_that_a_loss_does_not_reach_has_no_gradient():
  seen = []

  def made(task, step, batch):
    with step.tape() as tape:
      loss = task.total(batch)
      other = Loss(tf.reduce_sum(models.raw(step.variables()[1])), loss.weight)
    seen[:] = [step.gradients_of(tape, other, step.variables())[0]]
    return step.gradients_of(tape, loss, step.variables()), loss

  task = Single(made, lambda: toys.network([3], keras.layers.Dense(1)))
  trainer_of(task, tf.distribute.get_strategy(), names=()).train(tf.constant(1))
  assert seen == [None]
