"""The trainer: its loop, counters and metrics, against a linear regression that NumPy solves."""

import itertools
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
import toys
from absl import logging as absl_logging
from runs import make_trainer
from toys import KERAS

from loopwright.errors import ConfigError
from loopwright.host import timing
from loopwright.inputs import datasets
from loopwright.metrics import Loss, require_free, weighted_sum
from loopwright.models import models
from loopwright.optimizers import ema, loss_scale
from loopwright.task import Task

BATCH, RATE = 5, 0.125
RNG = np.random.default_rng(0)
X = RNG.normal(size=[12, 2]).astype(np.float32)
Y = (X @ [1.5, -0.5] + 0.1 * RNG.normal(size=12)).astype(np.float32)
WEIGHT = RNG.uniform(0.5, 2.0, size=12).astype(np.float32)
KERNEL = np.array([[0.5], [1.0]], np.float32)


class Linear(toys.Regression):
  """x @ kernel, without a bias, as a model of either Keras or a tf.Module."""

  def __init__(self, *, kind="keras", y=Y):
    self.kind, self.forward_calls = kind, []
    self.features = {"x": X, "y": y, "weight": WEIGHT}

  def build_model(self):
    if self.kind == "module":
      module = tf.Module()
      module.kernel = tf.Variable(KERNEL)
      return module
    return toys.linear(KERNEL, KERAS[self.kind])

  def forward(self, batch, training):
    self.forward_calls.append(training)
    if self.kind == "module":
      return (batch["x"] @ self.model.kernel)[:, 0]
    return tf.cast(super().forward(batch, training), tf.float32)

  def metrics(self, outputs, batch):
    return {"mae": weighted_sum(tf.abs(outputs - batch["y"]), batch["weight"])}

  def regularization(self):
    return 0.1 * tf.reduce_sum(self.model.kernel**2) if self.kind == "module" else 0.0


def make(strategy, task=None, *, batch=BATCH, optimizer=None, preprocess=None, **options):
  task = task or Linear()
  sgd = optimizer or (lambda: KERAS.get(task.kind, keras).optimizers.SGD(RATE))
  data = {"shuffle": False, "preprocess": preprocess}
  return make_trainer(task, strategy, batch=batch, optimizer=sgd, data=data, **options)


def train(trainer, steps):
  return trainer.train(tf.constant(steps))


def kernels(trainer):
  """The kernel on each replica."""
  [kernel] = models.trainable_variables(trainer.task.model)
  return [c.numpy() for c in trainer.strategy.experimental_local_results(models.raw(kernel))]


class Reference:
  """The same regression in float64, in the order of the source."""

  def __init__(self, *, y=Y):
    self.y = y.astype(np.float64)
    self.kernel, self.position = KERNEL[:, 0].astype(np.float64), 0

  def step(self):
    """Makes one update and returns (loss, mae, gradient norm, weight) from before it."""
    rows = (self.position + np.arange(BATCH)) % len(X)
    self.position += BATCH
    x, y, weight = X[rows].astype(np.float64), self.y[rows], WEIGHT[rows].astype(np.float64)
    error = x @ self.kernel - y
    loss = weight @ error**2 / weight.sum()
    gradient = 2 * (weight * error) @ x / weight.sum()
    if np.isfinite(loss):
      self.kernel = self.kernel - RATE * gradient
    return loss, weight @ np.abs(error) / weight.sum(), np.linalg.norm(gradient), weight.sum()

  def loop(self, steps):
    """Returns what the trainer reports of a loop: means, each step by its weight."""
    losses, maes, norms, weights = np.array([self.step() for _ in range(steps)]).T
    return {
      "loss": weights @ losses / weights.sum(),
      "mae": weights @ maes / weights.sum(),
      "gradient_norm": norms.mean(),
    }


@pytest.fixture
def one():
  return tf.distribute.get_strategy()


@pytest.fixture
def log(caplog):
  """What was logged, as text, without what TensorFlow says of traces in all tests of a process."""
  absl_logging.use_absl_handler()
  logger = absl_logging.get_absl_logger()
  logger.addHandler(caplog.handler)

  def text():
    messages = {id(r): r.getMessage() for r in caplog.records}.values()
    return "\n".join(m for m in messages if "triggered tf.function retracing" not in m)

  yield text
  logger.removeHandler(caplog.handler)


# ---- The loop ----


@pytest.mark.parametrize("replicas", [1, 3])
def test_loops_of_any_length_are_one_trace_and_the_reference(replicas, mirrored, log):
  trainer, reference = make(mirrored(replicas)), Reference()
  assert trainer.padded_batch_size == {1: 5, 3: 6}[replicas]
  done = 0
  for steps in (1, 4, 2, 7):
    started = time.perf_counter()
    metrics = train(trainer, steps)
    elapsed = time.perf_counter() - started
    done += steps
    expected = reference.loop(steps)
    assert {k: metrics[k] for k in expected} == pytest.approx(expected, rel=1e-5)
    for kernel in kernels(trainer):
      np.testing.assert_allclose(kernel[:, 0], reference.kernel, rtol=1e-6)
    assert trainer.global_step.numpy() == done
    assert trainer.position.numpy() == done * BATCH  # examples, without padding
    assert 0 <= metrics["input_wait_s"] <= elapsed
    assert metrics["examples_per_second"] >= steps * BATCH / elapsed
    assert set(metrics) == {
      *expected, "input_wait_s", "examples_per_second", "learning_rate", "loss_scale",
      "skipped_steps",
    }  # fmt: skip
    assert [metrics[k] for k in ("learning_rate", "loss_scale", "skipped_steps")] == [RATE, 1, 0]
  assert trainer.traces == 1
  assert len(trainer.task.forward_calls) == replicas
  assert "traced again" not in log()


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_trainer_is_iterated_over_up_to_a_step(replicas, mirrored):
  trainer, reference = make(mirrored(replicas)), Reference()
  found = []
  for step, metrics in trainer.steps(9, every=4):
    found.append(step)
    expected = reference.loop(step - ([0, *found][-2]))
    assert {k: metrics[k] for k in expected} == pytest.approx(expected, rel=1e-5)
    if step == 8:
      break
  assert found == [4, 8]
  assert [step for step, _ in trainer.steps(15, every=6)] == [14, 15]
  assert [*trainer.steps(15)] == []
  assert trainer.traces == 1
  with pytest.raises(ConfigError, match=r"steps\(every\) is 0; it must be"):
    next(trainer.steps(20, every=0))


def test_the_rate_of_examples_and_the_wait_are_those_of_slow_input(one):
  """One batch of this loop takes a second; fewer than the loop has steps are read ahead."""
  pauses_s = []

  def pause(weight):
    time.sleep(pauses_s.pop() if pauses_s else 0)
    return weight

  def slow(batch, training):
    rest = tf.numpy_function(pause, [batch["weight"]], tf.float32)
    return {**batch, "weight": tf.ensure_shape(rest, batch["weight"].shape)}

  trainer = make(one, preprocess=slow)
  train(trainer, 1)
  pauses_s.append(1.0)
  started = time.perf_counter()
  metrics = train(trainer, 64)
  elapsed = time.perf_counter() - started
  assert 0.1 <= metrics["input_wait_s"] <= elapsed
  assert 64 * BATCH / elapsed <= metrics["examples_per_second"] <= 64 * BATCH / 0.1


def test_a_clock_set_back_during_a_wait_is_no_negative_wait(one, monkeypatch):
  readings = itertools.count()

  def system():  # the fourth step waits between the readings 7 and 8
    return time.perf_counter() - 3600.0 * (next(readings) >= 8)

  monkeypatch.setattr(timing, "time", types.SimpleNamespace(time=system))
  stamp = lambda: tf.ensure_shape(tf.numpy_function(system, [], tf.float64), [])  # noqa: E731
  monkeypatch.setattr(timing, "timestamp", stamp)
  trainer = make(one)
  started = time.perf_counter()
  metrics = train(trainer, 10)
  assert 0 < metrics["input_wait_s"] <= time.perf_counter() - started
  assert next(readings) > 20


def test_retracing_is_reported_once_a_time(one, log):
  trainer = make(one)
  train(trainer, 2)
  assert (trainer.traces, log()) == (1, "")
  trainer.dataset_fn = lambda position: datasets.train_dataset(
    trainer.task.source("train"), global_batch_size=7, position=position
  )
  trainer.reset_input()
  train(trainer, 2)
  train(trainer, 2)
  assert trainer.traces == 2
  assert log().count("the training loop was traced again (2 times so far)") == 1


def test_a_loop_of_no_steps_does_nothing(one):
  trainer = make(one)
  metrics = train(trainer, 0)
  assert metrics == {"learning_rate": RATE, "loss_scale": 1.0, "skipped_steps": 0.0}
  assert trainer.global_step.numpy() == trainer.position.numpy() == 0
  np.testing.assert_array_equal(kernels(trainer), [KERNEL])


class Noisy(Linear):
  """Dropout, so that the random streams are part of what must not change."""

  def build_model(self):
    layers = keras.layers
    model = keras.Sequential(
      [keras.Input([2]), layers.Dense(8), layers.Dropout(0.5), layers.Dense(1)]
    )
    rng = np.random.default_rng(5)
    model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
    return model


def test_the_steps_of_a_loop_do_not_change_the_result(one):
  """To the bit, moving average, dropout and loss scale included."""
  results = []
  for loops in ((12,), (1,) * 12, (5, 7)):
    trainer = make(
      one, Noisy(), optimizer=lambda: keras.optimizers.Adam(0.01), ema_decay=0.75,
      loss_scale=lambda: loss_scale.DynamicLossScale(growth_steps=5),
    )  # fmt: skip
    losses = [train(trainer, steps)["loss"] for steps in loops]
    kept = [*trainer.task.model.trainable_variables, *trainer.parts.ema.averages]
    results.append(([v.numpy() for v in kept], float(trainer.parts.loss_scale.value()), losses))
  for values, scale, _ in results[1:]:
    assert scale == results[0][1] == 2.0**15 * 4
    for one_value, other in zip(values, results[0][0], strict=True):
      np.testing.assert_array_equal(one_value, other)
  weights = [WEIGHT[(s * BATCH + np.arange(BATCH)) % 12].sum() for s in range(12)]
  assert np.average(results[1][2], weights=weights) == pytest.approx(results[0][2][0], rel=1e-6)
  assert len(set(results[1][2])) == 12


# ---- Models ----


def test_a_model_that_is_there_already_is_trained(one):
  """So two trainers can share one, or a script can load weights first."""
  task = Linear()
  task.model = task.build_model()
  task.model.set_weights([2 * KERNEL])
  kept = task.model
  trainer, reference = make(one, task), Reference()
  reference.kernel *= 2
  train(trainer, 3)
  reference.loop(3)
  assert task.model is kept
  np.testing.assert_allclose(kernels(trainer)[0][:, 0], reference.kernel, rtol=1e-6)


# ---- What goes wrong ----


@pytest.mark.parametrize(("replicas", "bad"), [(1, np.nan), (2, np.nan), (2, np.inf)])
def test_a_loss_that_is_not_finite_is_named_by_its_step(replicas, bad, mirrored):
  """Position 24 is example 0 of 12 again, so y has 24 rows: step 3 reads 10 to 14."""
  y = Y.copy()
  y[4] = bad  # in step 1 (0-4), on the last replica alone; then in step 4 (15-19), 6 and 9.
  trainer, reference = make(mirrored(replicas), Linear(y=y)), Reference(y=y)
  trainer.position.assign(5)  # so its steps are those from 2 on: bad are the 3rd, 5th and 8th
  reference.position = 5
  metrics = train(trainer, 2)
  assert "nonfinite_step" not in metrics
  assert metrics["loss"] == pytest.approx(reference.loop(2)["loss"], rel=1e-5)
  metrics = train(trainer, 5)
  assert (metrics["nonfinite_step"], metrics["skipped_steps"]) == (3, 2)
  assert not np.isfinite(metrics["loss"])
  norms = [reference.step()[2] for _ in range(5)]
  assert metrics["gradient_norm"] == pytest.approx(
    np.mean(norms, where=np.isfinite(norms)), rel=1e-5
  )
  metrics = train(trainer, 2)
  assert (metrics["nonfinite_step"], metrics["skipped_steps"]) == (3, 3)
  reference.loop(2)
  for kernel in kernels(trainer):  # unharmed
    np.testing.assert_allclose(kernel[:, 0], reference.kernel, rtol=1e-6)


# ---- Options ----


AVERAGED = {  # what it must be of the weights before the first step and after each
  "warm-up": (lambda: ema.ema_warmup(decay=0.4), lambda w: warmed_up(w, 0.4)),
  "all from step 3": (lambda: ema.weight_averaging(start_step=3), lambda w: np.mean(w[3:], axis=0)),
  "every other from step 4": (
    lambda: ema.weight_averaging(start_step=4, every_steps=2),
    lambda w: np.mean([w[4], w[6], w[8]], axis=0),
  ),
  "not yet": (lambda: ema.weight_averaging(start_step=20), lambda w: w[-1]),
}


def warmed_up(weights, most):
  """Returns what TensorFlow's own moving average makes of weights, with its `num_updates`."""
  number, weight = tf.Variable(0), tf.Variable(weights[0])
  of_tensorflow = tf.train.ExponentialMovingAverage(most, num_updates=number)
  of_tensorflow.apply([weight])
  weight.assign(weights[0])
  of_tensorflow.average(weight).assign(weights[0])
  for step, each in enumerate(weights[1:]):
    number.assign(step)
    weight.assign(each)
    of_tensorflow.apply([weight])
  return of_tensorflow.average(weight).numpy()


@pytest.mark.parametrize("kind", AVERAGED)
@pytest.mark.parametrize("replicas", [1, 2])
def test_averages_that_follow_the_step(kind, replicas, mirrored):
  decay, of_weights = AVERAGED[kind]
  trainer, reference = make(mirrored(replicas), ema_decay=decay()), Reference()
  weights = [reference.kernel.copy()]
  for _ in range(9):
    reference.step()
    weights.append(reference.kernel.copy())
  train(trainer, 4)
  train(trainer, 5)
  wanted = of_weights(np.array(weights))
  for copy in trainer.strategy.experimental_local_results(trainer.parts.ema.averages[0]):
    np.testing.assert_allclose(copy.numpy()[:, 0], wanted, rtol=1e-6)


@pytest.mark.parametrize(
  ("precision", "kind", "scale"),
  [
    ("mixed_float16", "keras", "dynamic"),
    ("mixed_float16", "tf_keras", "dynamic"),
    ("mixed_bfloat16", "keras", "none"),
  ],
)
def test_mixed_precision_trains_near_the_reference(precision, kind, scale, policy, mirrored):
  """Products are rounded to 2**-11 or 2**-8 of themselves, which the updates shrink further."""
  policy(precision)
  trainer, reference = make(mirrored(2), Linear(kind=kind)), Reference()
  assert trainer.parts.loss_scale.describe().startswith(scale)
  skipped = 0
  for _ in range(15):
    metrics = train(trainer, 1)
    if metrics["skipped_steps"] > skipped:  # 2**15 times a slope is beyond float16 at first
      skipped += 1
      reference.position += BATCH
    else:
      expected = reference.loop(1)
  assert (1 <= skipped <= 5) if scale == "dynamic" else (skipped == 0)
  assert metrics["loss_scale"] == (2.0 ** (15 - skipped) if scale == "dynamic" else 1.0)
  tolerance = 2.0**-9 if precision == "mixed_float16" else 2.0**-6
  assert metrics["mae"] == pytest.approx(expected["mae"], abs=4 * tolerance)
  for kernel in kernels(trainer):
    assert kernel.dtype == np.float32
    np.testing.assert_allclose(kernel[:, 0], reference.kernel, atol=tolerance)
    assert np.abs(kernel[:, 0] - reference.kernel).max() > 1e-6  # so it was narrow arithmetic


class Two(Task):
  """Two kernels, each with its optimizer, its loss and its own number of updates a step."""

  def build_model(self):
    made = {name: tf.Module() for name in ("slow", "fast")}
    for module in made.values():
      module.kernel = tf.Variable(KERNEL)
    return made

  def source(self, split):
    return Linear().source(split)

  def part_loss(self, name):
    def loss(batch):
      error = (batch["x"] @ self.model[name].kernel)[:, 0] - batch["y"]
      return Loss.from_examples(tf.square(error), batch["weight"])

    return loss

  def train_step(self, step, batch):
    step.update(self.part_loss("slow"), batch, "slow")
    step.update(self.part_loss("fast"), batch, "fast")
    step.update(self.part_loss("fast"), batch, "fast")


TWO_OPTIMIZERS = {
  "slow": lambda: keras.optimizers.SGD(RATE),
  "fast": lambda: tf_keras.optimizers.SGD(RATE),
}


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_loop_that_fails_half_way_keeps_count(replicas, mirrored):
  """Three batches come, then an error: three steps were made, and the next goes on from there."""
  trainer, reference = make(mirrored(replicas)), Reference()
  endless = trainer.dataset_fn
  trainer.dataset_fn = lambda position: endless(position).take(3)
  with pytest.raises(tf.errors.OutOfRangeError):
    train(trainer, 5)
  assert trainer.global_step.numpy() == 3
  assert trainer.position.numpy() == 3 * BATCH
  trainer.dataset_fn = endless
  trainer.reset_input()
  reference.loop(3)
  expected = reference.loop(2)
  metrics = train(trainer, 2)
  assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
  for kernel in kernels(trainer):
    np.testing.assert_allclose(kernel[:, 0], reference.kernel, atol=1e-6)


def test_a_metric_may_not_mix_with_what_an_optimizer_reports(one):
  class Mixing(Two):
    def train_step(self, step, batch):
      step.log({"slow_loss": (tf.constant(1000.0), tf.constant(1.0))})
      super().train_step(step, batch)

  trainer = make(one, Mixing(), optimizer=TWO_OPTIMIZERS)
  with pytest.raises(Exception, match="logs 'slow_loss', which the framework reports itself"):
    train(trainer, 1)


@pytest.mark.parametrize("name", ["", " ", 7])
def test_a_metric_needs_a_name(name):
  with pytest.raises(ConfigError, match=f"the task returns {name!r}; the name of a metric must be"):
    require_free([name], who="the task returns")


class Decaying(loss_scale.LossScale):
  """A user's own: its value is the variable itself."""

  def __init__(self):
    super().__init__()
    self._scale = tf.Variable(64.0, trainable=False)

  def value(self):
    return self._scale


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_loss_scale_of_ones_own(replicas, mirrored):
  trainer, reference = make(mirrored(replicas), loss_scale=Decaying), Reference()
  metrics, expected = train(trainer, 3), reference.loop(3)
  assert metrics["loss_scale"] == 64.0
  assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
