"""State beside the model: saved to the bit for each replica, and not changed by evaluations."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from runs import make_evaluator, make_trainer

from loopwright import ArraySource, ConfigError, Loss, Sum, Task
from loopwright.models.task_state import copies_of
from loopwright.optimizers.rollback import Rollback
from loopwright.runs.runner import run
from loopwright.strategies import factories

ROWS, RATE = 6, 0.125
X = np.random.default_rng(0).normal(size=[12, 3]).astype(np.float32)
Y = X.sum(axis=1)
SUM, NONE = tf.VariableAggregation.SUM, tf.VariableAggregation.NONE
ON_READ = tf.VariableSynchronization.ON_READ


class Stateful(Task):
  """A line; `make(task)` makes its state, `touch(task, batch)` uses it, `look(task)` has it."""

  def __init__(self, make=None, touch=None, *, layer=None, always=False):
    self._make, self._touch, self._layer, self._always = make, touch, layer, always
    self.rows = ROWS

  def build_model(self):
    if self._make:
      self._make(self)
    self.rows = ROWS // tf.distribute.get_strategy().num_replicas_in_sync
    layers = [self._layer(self)] if self._layer else []
    last = keras.layers.Dense(1, kernel_initializer="ones")
    return keras.Sequential([keras.Input(batch_shape=[self.rows, 3]), *layers, last])

  def source(self, split):
    return ArraySource(features={"x": X, "y": Y})

  def forward(self, batch, training):
    model = getattr(self.model, "inner", self.model)
    model = model["net"] if isinstance(model, dict) else model
    if self._touch and (training or self._always):
      self._touch(self, batch)
    return model(batch["x"], training=training)[:, 0]

  def loss(self, outputs, batch):
    return Loss.from_examples(tf.square(outputs - batch["y"]), batch["weight"])


class Weighed(Stateful):
  """A learned weight of the loss, of a `tf.Module` that the optimizer gets."""

  def variables_of(self, optimizer):
    return [*super().variables_of(optimizer), self.kept.log_sigma]

  def loss(self, outputs, batch):
    s = self.kept.log_sigma
    return Loss.from_examples(tf.exp(-s) * tf.square(outputs - batch["y"]) + s, batch["weight"])


class Slow(Stateful):
  """`Step.assign` sets a variable of the task."""

  def train_step(self, step, batch):
    super().train_step(step, batch)
    step.assign(self.kept, 0.5 * self.kept + self.model.trainable_variables[0].value)


def variable(value, **options):
  def make(task):
    task.kept = tf.Variable(value, trainable=False, **options)

  return make


def nested(task):
  task.kept = {"deep": (None, [tf.Variable(0.0, trainable=False)])}


def module(task):
  task.kept = tf.Module()
  task.kept.log_sigma = tf.Variable(0.5)


def table(task):
  task.kept = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)


class Counting(keras.layers.Layer):
  """Counts rows with x0 > 0, by a variable that Keras does not know, or one that it does."""

  def __init__(self, known):
    super().__init__()
    self.known = known

  def build(self, shape):
    if self.known:
      self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
    else:
      self.count = tf.Variable(0, trainable=False)

  def call(self, x):
    self.count.assign_add(tf.reduce_sum(tf.cast(x[:, 0] > 0, tf.int32)))
    return x


def counting(known):
  def layer(task):
    task.layer = Counting(known)
    return task.layer

  return layer


def recurrent(task):
  ones = {"kernel_initializer": "ones", "recurrent_initializer": "identity"}
  task.layer = keras.layers.SimpleRNN(3, stateful=True, **ones)
  return keras.Sequential(
    [keras.Input(batch_shape=[task.rows, 3]), keras.layers.Reshape([3, 1]), task.layer]
  )


def first_of(batch):
  return tf.reduce_sum(batch["x"][:, 0])


def parts(replicas):
  """Returns the first column of each step's rows, [5, replicas, n]."""
  return np.stack([X[:6, 0], X[6:, 0]] * 3)[:5].reshape([5, replicas, -1]).astype(np.float64)


def sums(replicas):
  return parts(replicas).sum(axis=(0, 2))


CASES = {
  "a sum over replicas": (
    lambda: Stateful(
      variable(0.0, aggregation=SUM), lambda t, b: t.kept.assign_add(tf.reduce_sum(b["weight"]))
    ),
    lambda t: t.kept, lambda n: [30.0] * n,
  ),
  "each replica's own": (
    lambda: Stateful(nested, lambda t, b: t.kept["deep"][1][0].assign_add(first_of(b))),
    lambda t: t.kept["deep"][1][0], sums,
  ),
  "summed when read": (
    lambda: Stateful(
      variable(0, synchronization=ON_READ, aggregation=SUM),
      lambda t, b: t.kept.assign_add(tf.reduce_sum(tf.cast(b["x"][:, 0] > 0, tf.int32))),
    ),
    lambda t: t.kept, lambda n: (parts(n) > 0).sum(axis=(0, 2)),
  ),
  "of a layer": (
    lambda: Stateful(layer=counting(known=False)),
    lambda t: t.layer.count, lambda n: (parts(n) > 0).sum(axis=(0, 2)),
  ),
  "of a layer, known to Keras": (
    lambda: Stateful(layer=counting(known=True)),
    lambda t: t.layer.count, lambda n: (parts(n) > 0).sum(axis=(0, 2)),
  ),
  "assigned by the step": (
    lambda: Slow(variable(np.zeros([3, 1], np.float32))), lambda t: t.kept, None,
  ),
  "trained": (lambda: Weighed(module), lambda t: t.kept.log_sigma, None),
  "of a recurrent layer": (lambda: Stateful(layer=recurrent), lambda t: t.layer.states[0], None),
  "of a table": (
    lambda: Stateful(table, lambda t, b: t.kept.insert(b["example_id"], b["x"][:, 0])),
    lambda t: t.kept, lambda n: [np.sort(X[:, 0])],
  ),
}  # fmt: skip


def held(task, look):
  """Returns the state on each replica, and the weights."""
  found = look(task)
  if isinstance(found, tf.lookup.experimental.MutableHashTable):
    return [np.sort(found.export()[1])], task.model.get_weights()
  return [copy.numpy() for copy in copies_of(found)], task.model.get_weights()


def trainer_of(task, strategy):
  sgd, data = lambda: keras.optimizers.SGD(RATE), {"shuffle": False}
  return make_trainer(task, strategy, batch=ROWS, optimizer=sgd, data=data)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_it_is_there_after_a_restart(case, replicas, mirrored, tmp_path):
  make, look, expected = CASES[case]
  whole, first, second = make(), make(), make()
  trainer_of(whole, mirrored(replicas)).train(tf.constant(5))
  wanted, weights = held(whole, look)
  trainer = trainer_of(first, mirrored(replicas))
  trainer.train(tf.constant(3))
  path = tf.train.Checkpoint(**trainer.checkpoint_items()).write(str(tmp_path / "saved"))
  again = trainer_of(second, mirrored(replicas))
  tf.train.Checkpoint(**again.checkpoint_items()).restore(path)
  again.reset_input()
  again.train(tf.constant(2))
  found, same = held(second, look)
  assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
  assert all(np.array_equal(a, b) for a, b in zip(same, weights, strict=True))
  assert again.traces == 1
  if expected:
    np.testing.assert_allclose(found, expected(replicas), rtol=1e-6)


def train(task, folder, strategy, steps, **options):
  run(
    task=task, mode=options.pop("mode", "train"), train_steps=steps, global_batch_size=ROWS,
    model_dir=str(folder), strategy=strategy, steps_per_loop=1, shuffle=False,
    optimizer=lambda: keras.optimizers.SGD(RATE), **options,
  )  # fmt: skip
  return task


def seen(**options):
  touch = lambda task, batch: task.kept.assign_add(tf.reduce_sum(batch["weight"]))  # noqa: E731
  return Stateful(variable(0.0, aggregation=SUM), touch, **options)


def own(aggregation=NONE, synchronization=tf.VariableSynchronization.AUTO):
  make = variable(0.0, aggregation=aggregation, synchronization=synchronization)
  return Stateful(make, lambda task, batch: task.kept.assign_add(first_of(batch)))


def test_a_run_goes_on_with_it_says_so_and_opens_older_checkpoints(tmp_path, capsys, mirrored):
  two = mirrored(2)
  train(seen(), tmp_path / "a", two, 3)
  assert "also saved  kept\n" in capsys.readouterr().err
  task = train(seen(), tmp_path / "a", factories.default(), 5)
  assert task.kept.numpy() == 30
  assert train(seen(), tmp_path / "a", two, 5, mode="evaluate").kept.numpy() == 30
  train(Stateful(variable(7.0)), tmp_path / "b", two, 3)  # has no value of it, as older ones
  task = train(seen(), tmp_path / "b", two, 5)
  assert task.kept.numpy() == 12


def test_what_differs_between_replicas_fits_others_or_is_refused(tmp_path, mirrored):
  two, one = mirrored(2), factories.default()
  train(own(SUM, ON_READ), tmp_path / "sum", two, 3)
  assert train(own(SUM, ON_READ), tmp_path / "sum", one, 3).kept.numpy() == pytest.approx(
    parts(1)[:3].sum(), rel=1e-6
  )
  train(own(), tmp_path / "own", two, 3)
  with pytest.raises(ConfigError, match="'kept' on each of 2 replicas, and they differ, but this "):
    train(own(), tmp_path / "own", one, 5)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("first", ["training", "evaluation"])
def test_an_evaluation_that_assigns_what_training_uses_is_refused(first, replicas, mirrored):
  task = seen(always=True)
  trainer = trainer_of(task, mirrored(replicas))
  evaluator = make_evaluator(task, trainer.strategy, batch=ROWS)
  if first == "evaluation":
    evaluator.evaluate()
    task.kept.assign(0.0)
  trainer.train(tf.constant(1))
  with pytest.raises(ConfigError, match="evaluation assigns 'Variable', which training uses, so "):
    evaluator.evaluate()
  assert [copy.numpy() for copy in copies_of(task.kept)] == [6.0] * replicas


@pytest.mark.parametrize("replicas", [1, 2])
def test_evaluation_gives_states_of_recurrent_layers_back(replicas, mirrored):
  task = Stateful(layer=recurrent)
  trainer = trainer_of(task, mirrored(replicas))
  evaluator = make_evaluator(task, trainer.strategy, batch=ROWS)
  trainer.train(tf.constant(2))
  before = [copy.numpy() for copy in copies_of(task.layer.states[0])]
  assert np.abs(before).max() > 0
  losses = {evaluator.evaluate()["loss"] for _ in "ab"}
  assert len(losses) == 1
  np.testing.assert_array_equal([copy.numpy() for copy in copies_of(task.layer.states[0])], before)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_that_is_undone_leaves_it(replicas, mirrored):
  task = seen()
  task.loss = lambda outputs, batch: Loss.from_examples(
    outputs * tf.where(batch["step"] == 2, np.inf, 1.0), batch["weight"]
  )
  trainer = trainer_of(task, mirrored(replicas))
  counters = [trainer.global_step, trainer.nonfinite_step]
  scale, model = trainer.parts.loss_scale, task.model
  trainer.observe(
    Rollback(strategy=trainer.strategy, model=model, loss_scale=scale, counters=counters)
  )
  trainer.train(tf.constant(5))
  assert (trainer.global_step.numpy(), trainer.traces) == (2, 1)
  assert [copy.numpy() for copy in copies_of(task.kept)] == [12.0] * replicas


def test_an_evaluation_may_read_a_table_that_training_fills():
  def touch(task, batch):
    task.kept.insert(batch["example_id"], task.kept.lookup(batch["example_id"]) + 1.0)

  task = Stateful(table, touch)
  trainer = trainer_of(task, factories.default())
  task.metrics = lambda outputs, batch: {
    "seen": Sum(tf.reduce_sum(task.kept.lookup(batch["example_id"])))
  }
  task.derived = lambda found: {"total": found["seen"]}
  evaluator = make_evaluator(task, trainer.strategy, batch=ROWS)
  trainer.train(tf.constant(3))
  assert evaluator.evaluate()["total"] == 18
  task._always = True
  with pytest.raises(ConfigError, match="evaluation assigns 'MutableHashTable', which training"):
    make_evaluator(task, trainer.strategy, batch=ROWS).evaluate()


class Half(Stateful):
  """Float32 weights, cast to float16 by hand; without a scale its gradients are zero."""

  def build_model(self):
    return tf.Variable(np.full([3, 1], 0.5, np.float32))

  def forward(self, batch, training):
    halves = [tf.cast(each, tf.float16) for each in (batch["x"], self.model)]
    return tf.cast(tf.matmul(*halves), tf.float32)[:, 0]

  def loss(self, outputs, batch):
    return Loss.from_examples(tf.square(outputs - batch["y"]) * 1e-8, batch["weight"])


@pytest.mark.parametrize("replicas", [1, 2])
def test_gradients_in_float16_have_a_loss_scale(replicas, mirrored, tmp_path, capsys):
  task, weights = Half(), np.full(3, 0.5)
  optimizer = lambda: keras.optimizers.SGD(1e6)  # noqa: E731
  data = {"shuffle": False}
  trainer = make_trainer(task, mirrored(replicas), batch=ROWS, optimizer=optimizer, data=data)
  result = trainer.train(tf.constant(4))
  for rows in (slice(6), slice(6, 12)) * 2:
    error = X[rows] @ weights - Y[rows]
    weights = weights - 1e6 * 1e-8 * 2 * error @ X[rows] / 6
  assert (result["loss_scale"], trainer.traces) == (2.0**15, 1)
  np.testing.assert_allclose(task.model.numpy()[:, 0], weights, rtol=2e-3)
  for steps in (2, 4):
    task = train(Half(), tmp_path, trainer.strategy, steps)
    lines = capsys.readouterr().err
    assert "precision   float32, gradients in float16\nloss scale  dynamic, now 32768" in lines
  assert '"loss scale": "dynamic, now 32768' in (tmp_path / "history.jsonl").read_text()


class Sound(Stateful):
  """`build(task)` makes its model; `error(task, outputs, batch)` is its loss."""

  def __init__(self, build=None, error=None, touch=None, evaluated=None):
    super().__init__(touch=touch)
    self._build, self._error, self._evaluated = build, error, evaluated

  def build_model(self):
    return self._build(self) or line(self)

  def loss(self, outputs, batch):
    error = self._error(self, outputs, batch) if self._error else outputs - batch["y"]
    return Loss.from_examples(tf.square(error), batch["weight"])

  def eval_step(self, step, batch):
    super().eval_step(step, batch)
    if self._evaluated:
      self._evaluated(self)


def line(task, *layers):
  return keras.Sequential([keras.Input([3]), *layers, keras.layers.Dense(1)])


def held_by(make):
  """Keeps something of the task's own, and returns no model."""

  def build(task):
    task.own = make(task)

  return build


def taught(task, outputs, batch):
  return outputs - batch["y"] + 0.1 * task.own(batch["x"])[:, 0]


def module_teacher(task):
  task.own = tf.Module()
  task.own.kernel = tf.Variable(tf.ones([3, 1]))


class Listed(keras.Model):
  """Layers in a list of lists, which TensorFlow does not track."""

  def __init__(self, task):
    super().__init__()
    self.blocks = [(keras.layers.Dense(1),), task]
    self.blocks[0][0].build([None, 3])
    self.built = True

  def call(self, x, training=None):
    return self.blocks[0][0](x)


def odd(task):
  return [
    task,
    np.zeros(9),
    list(range(20_000)),
    lambda: task,
    tf.data.Dataset.range(3),
    open,
    iter(""),
  ]


def slowly(task):
  task.own = [tf.Variable(tf.zeros([3, 1]), trainable=False)]


def with_module(task):
  model = tf.Module()
  model.inner, model.shift = line(task), tf.Variable(0.0)
  model.best = tf.Variable(0.0, trainable=False)
  return model


def adapted(task):
  layer = keras.layers.Normalization()
  layer.adapt(X)
  return line(task, layer)


TABLE = tf.lookup.KeyValueTensorInitializer([0, 1], [0.5, 0.25])
SOUND = {
  "a teacher": (Sound(held_by(line), taught), []),
  "a teacher of tf_keras": (Sound(held_by(lambda t: tf_keras.Sequential(
    [tf_keras.layers.InputLayer([3]), tf_keras.layers.Dense(1)])), taught), []),
  "a teacher in a module": (Sound(module_teacher,
    lambda t, o, b: o - (b["x"] @ t.own.kernel)[:, 0]), []),
  "a constant": (Sound(held_by(lambda t: tf.Variable(2.0, trainable=False)),
    lambda t, o, b: o - b["y"] * t.own), []),
  "whole numbers": (Sound(held_by(lambda t: [tf.Variable([1, 2, 3])]),
    lambda t, o, b: o - tf.cast(t.own[0][0], tf.float32)), []),
  "a constant table": (Sound(held_by(lambda t: tf.lookup.StaticHashTable(TABLE, 0.0)),
    lambda t, o, b: o - t.own.lookup(tf.constant(1))), []),
  "odd attributes": (Sound(held_by(odd)), []),
  "a metric of the host": (Sound(held_by(lambda t: keras.metrics.Mean())), []),
  "a metric of the step": (Sound(held_by(lambda t: keras.metrics.Mean()),
    touch=lambda t, b: t.own.update_state(b["y"])), ["own.total", "own.count"]),
  "noise": (Sound(held_by(lambda t: keras.random.SeedGenerator(1)),
    lambda t, o, b: o - b["y"] + keras.random.normal([1], seed=t.own)), []),
  "dropout": (Sound(lambda t: line(t, keras.layers.Dropout(0.5))), []),
  "batch norm": (Sound(lambda t: line(t, keras.layers.BatchNormalization())), []),
  "spectral norm": (Sound(lambda t: line(t, keras.layers.SpectralNormalization(
    keras.layers.Dense(3)))), []),
  "an adapted layer": (Sound(adapted), []),
  "frozen layers": (Sound(lambda t: line(t, keras.layers.Dense(3, trainable=False))), []),
  "layers in a list": (Sound(Listed), []),
  "a module around Keras": (Sound(with_module), []),
  "a queue of the model": (Sound(lambda t: {"net": line(t), "queue": tf.Variable(
    tf.zeros(3), trainable=False)}), []),
  "a slow copy": (Sound(slowly, touch=lambda t, b: t.own[0].assign(
    0.9 * t.own[0] + t.model.trainable_variables[0].value)), ["own.0"]),
  "the best so far": (Sound(held_by(lambda t: tf.Variable(0.0, trainable=False)),
    evaluated=lambda t: t.own.assign_add(1.0)), []),
}  # fmt: skip
"""Name -> a task in which nothing is wrong, and what is kept of it."""


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_task_is_not_accused(name, mirrored, caplog):
  task, kept = SOUND[name]
  trainer = trainer_of(task, mirrored(2))
  trainer.train(tf.constant(1))
  make_evaluator(task, trainer.strategy, batch=ROWS).evaluate(tf.constant(-1))
  state = trainer.state
  assert (list(state.kept), state.untrained) == (kept, [])
  assert trainer.parts.loss_scale.factor() is None
  if name == "the best so far":
    assert task.own.numpy() > 0


def test_what_looks_like_a_weight_and_is_not_trained_is_named():
  def build(task):
    task.own = {"sigma": tf.Variable(0.5)}
    task.layer = Counting(known=False)
    task.layer.gain = tf.Variable(1.0)
    return line(task, task.layer)

  task = Sound(build, lambda t, o, b: o * t.layer.gain - b["y"] * t.own["sigma"])
  trainer = trainer_of(task, factories.default())
  trainer.examine()
  assert trainer.state.untrained == ["own.sigma", "layer.gain"]
  assert (
    "no optimizer trains own.sigma, layer.gain, which the loop reads" in trainer.state.note()[0]
  )
