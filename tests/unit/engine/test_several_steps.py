"""Several steps as one program: the numbers of steps one by one, wherever a loop begins or ends."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from runs import make_trainer, records

import loopwright as lw
from loopwright.engine import examination, several_steps
from loopwright.errors import ConfigError
from loopwright.observers import Observer
from loopwright.optimizers import loss_scale, schedules
from loopwright.options.groups import Cadence
from loopwright.run_folder import history
from loopwright.strategies import local

ROWS, BATCH = 24, 4
RNG = np.random.default_rng(0)
STEPS = 13
RATE = 0.05


class Kinds(toys.Regression):
  """Features of all kinds, random numbers, and a loss of which each step has its own."""

  features = {
    "x": RNG.normal(size=[ROWS, 3]).astype(np.float32),
    "small": RNG.integers(-9, 9, [ROWS]).astype(np.int32),
    "large": RNG.integers(-(2**40), 2**40, [ROWS, 2]).astype(np.int64),
    "flag": RNG.integers(0, 2, [ROWS]).astype(bool),
  }

  def build_model(self):
    return keras.Sequential([keras.Input([3]), keras.layers.Dense(2), keras.layers.Dropout(0.5)])

  def forward(self, batch, training):
    outputs = self.model(batch["x"], training=training)
    return outputs * tf.where(batch["flag"], 1.0, 2.0)[:, None]

  def losses(self, outputs, batch):
    far = outputs - tf.cast(batch["large"], tf.float32) / 2**40
    each = tf.reduce_sum(far**2, 1) + tf.cast(batch["small"], tf.float32)
    return each * (1 + tf.cast(batch["step"] % 3, tf.float32))


class Line(toys.Regression):
  """One weight w, and the loss (w x - y)^2; x and y are 1, 2, ... in order."""

  features = {name: np.arange(1, ROWS + 1, dtype=np.float32)[:, None] for name in "xy"}

  def build_model(self):
    return toys.linear([0.0])

  def losses(self, outputs, batch):
    return tf.square(outputs - 3 * batch["y"][:, 0])


class InPython(Line):
  """Asks Python in each step, which XLA cannot."""

  def losses(self, outputs, batch):
    same = tf.numpy_function(lambda each: each, [batch["y"][:, 0]], tf.float32)
    return tf.square(outputs - 3 * tf.ensure_shape(same, [BATCH]))


class Looks(Observer):
  """Looks at each batch."""


def made(task, **options):
  """A trainer on one replica; `steps_per_program` is 1 unless it is given."""
  keras.utils.set_random_seed(1)
  given = {
    "optimizer": lambda: keras.optimizers.Adam(schedules.linear_warmup(warmup_steps=5, after=0.1)),
    "loss_scale": loss_scale.dynamic, "steps_per_program": 1,
  }  # fmt: skip
  return make_trainer(task, local.one_device(device="CPU:0"), batch=BATCH, **given | options)


def line(task=None, **options):
  """A trainer of `Line` by plain descent at RATE."""
  options = {"optimizer": lambda: keras.optimizers.SGD(RATE / 100), "loss_scale": None} | options
  return made(task or Line(), data={"shuffle": False}, **options)


def trained(trainer, loops):
  """The results of loops of so many steps, and then all that a checkpoint has."""
  results = [trainer.train(tf.constant(steps)) for steps in loops]
  times = {"examples_per_second", "input_wait_s"}
  found = [{k: v for k, v in each.items() if k not in times} for each in results]
  return found, state(trainer)


def state(trainer):
  root = tf.train.Checkpoint(**trainer.checkpoint_items())
  every = [v for v in tf.train.TrackableView(root).descendants() if isinstance(v, tf.Variable)]
  return [each.numpy() for each in every]


def assert_same(one, other):
  assert len(one) == len(other) > 5
  for a, b in zip(one, other, strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def straight():
  """Metrics and state after all steps in one loop, step by step in a program each."""
  return trained(made(Kinds(), jit_compile=True), [STEPS])


@pytest.mark.parametrize("loops", [[STEPS], [1, 2, 3, 7], [5, 8]])
def test_bits_are_those_of_the_step_as_a_program(straight, loops):
  trainer = made(Kinds(), steps_per_program=4)
  found, after = trained(trainer, loops)
  assert (trainer.compiled, trainer.traces) == ("4 steps as one program", 1)
  assert int(trainer.global_step.numpy()) * BATCH == int(trainer.position.numpy()) == STEPS * BATCH
  assert_same(after, straight[1])
  sums = np.sum([each["loss"] * n for each, n in zip(found, loops, strict=True)])
  assert sums / STEPS == pytest.approx(straight[0][0]["loss"], rel=1e-12)


@pytest.mark.parametrize("at", [1, 3, 4, 6])
def test_a_run_goes_on_at_any_step(straight, at, tmp_path):
  first = made(Kinds(), steps_per_program=4)
  first.train(tf.constant(at))
  path = tf.train.Checkpoint(**first.checkpoint_items()).write(str(tmp_path / "at"))
  second = made(Kinds(), steps_per_program=4)
  second.examine()
  tf.train.Checkpoint(**second.checkpoint_items()).read(path).assert_consumed()
  second.train(tf.constant(STEPS - at))
  assert_same(state(second), straight[1])


def test_weights_are_those_of_descent_by_hand():
  trainer, weight, losses = line(steps_per_program=3), 0.0, []
  results = [trainer.train(tf.constant(steps)) for steps in (2, 5)]
  for step in range(7):
    x = np.arange(1, ROWS + 1)[step % 6 * BATCH :][:BATCH]
    losses.append(np.mean((weight * x - 3 * x) ** 2))
    weight -= RATE / 100 * np.mean(2 * (weight * x - 3 * x) * x)
  assert trainer.task.model.get_weights()[0].item() == pytest.approx(weight, rel=1e-5)
  assert results[1]["loss"] == pytest.approx(np.mean(losses[2:]), rel=1e-5)
  assert 0 <= results[1]["input_wait_s"] < 60


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted():
  task = Line(features={n: v.copy() for n, v in Line.features.items()})
  task.features["y"][2 * BATCH] = np.inf  # of step 3
  trainer = line(task, steps_per_program=4)
  results = trainer.train(tf.constant(5))
  without = line()
  without.train(tf.constant(2))
  without.position.assign(3 * BATCH)
  without.train(tf.constant(2))
  assert results["skipped_steps"] == 1
  assert results["nonfinite_step"] == 3
  [found, expected] = [each.task.model.get_weights()[0] for each in (trainer, without)]
  np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
  ("options", "why"),
  [
    ({"task": InPython()}, "PyFunc (test_several_steps.py:"),
    ({"observers": [Looks()]}, "Looks sees each step"),
  ],
)
def test_what_cannot_be_a_program_runs_step_by_step_and_says_so(options, why, caplog):
  caplog.set_level("INFO", "absl")
  trainer, plain = line(**options, steps_per_program=4), line()
  for each in (trainer, plain):
    each.train(tf.constant(6))
  assert f"XLA does not compile 4 steps as one program: {why}" in caplog.text
  assert trainer.parts.steps_per_program == 1
  assert trainer.compiled == ""
  np.testing.assert_allclose(
    trainer.task.model.get_weights()[0], plain.task.model.get_weights()[0], rtol=1e-6
  )


def test_an_observer_that_comes_later_sees_each_step():
  trainer, seen = line(steps_per_program=4), []

  class Counts(Observer):
    def loop_ends(self, results, *, done, ran):
      seen.append((done, ran))

  trainer.train(tf.constant(4))
  assert trainer.compiled == "4 steps as one program"
  trainer.observe(Counts())
  trainer.train(tf.constant(3))
  assert (seen, trainer.compiled) == ([(3, 3)], "")


@pytest.mark.parametrize(
  ("options", "says"),
  [
    ({"steps_per_program": 0}, "Trainer.steps_per_program is 0; it must be"),
    ({"steps_per_program": 2, "eager": True}, "received both eager=True and"),
    ({"steps_per_program": 2, "jit_compile": False}, "Trainer.jit_compile=False and Trainer.steps"),
  ],
)
def test_wrong_options(options, says):
  with pytest.raises(ConfigError, match=says):
    line(**options)


# ---- "auto" ----


class Convolves(Line):
  def build_model(self):
    return keras.Sequential(
      [keras.Input([1]), keras.layers.Reshape([1, 1, 1]), keras.layers.Conv2D(1, 1),
       keras.layers.Flatten()]
    )  # fmt: skip


class LooksUp(Line):
  def build_model(self):
    return keras.Sequential(
      [keras.Input([1]), keras.layers.Embedding(30, 1), keras.layers.Flatten()]
    )


class Large(Line):
  features = {**Line.features, "x": np.ones([ROWS, 2**11], np.float32)}

  def build_model(self):
    return keras.Sequential([keras.Input([2**11]), keras.layers.Dense(2**12)])


@pytest.mark.parametrize(
  ("task", "planned", "steps"),
  [
    (Line, Cadence(train_steps=10**5, steps_per_loop=100), several_steps.STEPS),
    (Line, Cadence(train_steps=10**5, steps_per_loop=5), 5),
    (Line, Cadence(train_steps=10**5, steps_per_loop=1), "auto"),
    (Line, Cadence(train_steps=examination.LONG - 1), "auto"),
    (Line, None, "auto"),
    *((each, Cadence(train_steps=10**5), "auto") for each in (Convolves, LooksUp, Large, InPython)),
  ],
)
def test_auto_depends_on_the_graph_and_the_length(task, planned, steps):
  trainer = line(task(), steps_per_program="auto")
  trainer.planned = planned
  trainer.examine()
  assert trainer.parts.steps_per_program == steps
  assert trainer.compiled == ("" if steps == "auto" else f"{steps} steps as one program")


@pytest.mark.parametrize(
  ("left", "right", "transposed", "count", "fits"),
  [
    ([256, 256], [256, 256], False, 100, True),  # 2^24 products
    ([257, 256], [256, 256], False, 100, False),
    ([512, 64], [512, 64], True, 100, False),  # 2^21 in sums of 512
    ([512, 64], [512, 63], True, 100, True),
    ([511, 128], [511, 128], True, 100, True),
    ([64, 512], [512, 64], False, 100, True),
    ([64, 512], [512, 64], False, 99, False),
  ],
)
def test_the_rule_at_its_edges(left, right, transposed, count, fits):
  graph = tf.Graph()
  with graph.as_default():
    x, y = tf.compat.v1.placeholder(tf.float32, left), tf.compat.v1.placeholder(tf.float32, right)
    tf.linalg.matmul(x, y, transpose_a=transposed)
    for _ in range(count - 3):
      tf.identity(x)
  assert several_steps.suits(graph) == fits


def test_auto_is_bounded_by_the_bytes_of_batches(monkeypatch):
  monkeypatch.setattr(several_steps, "BYTES", 4 * (4 + 4 + 4 + 8) * BATCH)
  trainer = line(steps_per_program="auto")
  trainer.planned = Cadence(train_steps=10**5)
  trainer.examine()
  assert trainer.parts.steps_per_program == 4


def test_a_run_that_goes_on_keeps_the_choice(tmp_path, monkeypatch):
  monkeypatch.setattr(examination, "LONG", 6)
  given = {
    "task": Line, "strategy": local.one_device, "global_batch_size": BATCH, "steps_per_loop": 3,
    "optimizer": lambda: keras.optimizers.SGD(RATE / 100),
  }  # fmt: skip
  long, short = tmp_path / "long", tmp_path / "short"
  lw.run(**given, model_dir=str(long), train_steps=6, mode="train")
  lw.run(**given, model_dir=str(short), train_steps=3, mode="train")
  monkeypatch.setattr(several_steps, "suits", lambda graph: False)
  for folder in (long, short):
    lw.run(**given, model_dir=str(folder), train_steps=9, mode="train")
  compiled = [
    [each["in_use"].get("compiled by XLA") for each in history.records(str(folder))]
    for folder in (long, short)
  ]
  assert compiled == [["3 steps as one program"] * 2, [None] * 2]
  assert records(long)[-1]["step"] == 9
