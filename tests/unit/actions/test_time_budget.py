"""Where the time goes, with delays planted where it should be found."""

import inspect
import re
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from runs import records

from loopwright.actions import time_budget
from loopwright.actions.base import Action
from loopwright.actions.time_budget import SUGGESTIONS, TimeBudget, table
from loopwright.kinds.parameter_server.strategy import ParameterServer
from loopwright.run_folder import checkpoints
from loopwright.running import run
from loopwright.strategies import factories, reduction

STEPS, LOOP = 12, 4
RNG = np.random.default_rng(2)
X = RNG.normal(size=[12, 2]).astype(np.float32)
LOCK = threading.Lock()


def delayed(tensor, seconds):
  """Returns `tensor`, after so many seconds."""

  def wait(value):
    time.sleep(seconds)
    return value

  # Not stateful: else one replica's would wait for the other's.
  late = tf.numpy_function(wait, [tensor], tensor.dtype, stateful=False)
  return tf.ensure_shape(late, tensor.shape)


class Slow(toys.Regression):
  """A linear regression that sleeps where it is told to, some seconds a step or batch."""

  features = {"x": X}

  def __init__(self, *, batch=0.0, forward=0.0, last_replica=0.0, evaluation=0.0):
    self.batch, self.training, self.last = batch, forward, last_replica
    self.evaluation = evaluation

  def build_model(self):
    return toys.network([2], keras.layers.Dense(1))

  def preprocess(self, batch, training):
    def wait(weight):
      with LOCK:  # several batches are mapped at a time
        time.sleep(self.batch)
      return weight

    if not training or not self.batch:
      return batch
    weight = tf.numpy_function(wait, [batch["weight"]], tf.float32)
    return {**batch, "weight": tf.ensure_shape(weight, batch["weight"].shape)}

  def forward(self, batch, training):
    x, seconds = batch["x"], self.training if training else self.evaluation
    context = tf.distribute.get_replica_context()
    replicas = context.num_replicas_in_sync
    if seconds:
      x = delayed(x, seconds)
    if training and self.last:
      is_last = tf.equal(context.replica_id_in_sync_group, replicas - 1)
      x = tf.cond(is_last, lambda: delayed(x, self.last), lambda: x)
    return super().forward({"x": x}, training)

  def losses(self, outputs, batch):
    return tf.square(outputs)


class Sleep(Action):
  on = "train"

  def __init__(self, seconds):
    self._seconds = seconds

  def __call__(self, output):
    time.sleep(self._seconds)


BESIDE = 0.3
"""Seconds that an action sleeps after each loop, beside the delay that a test plants.

All parts together are the wall time. So a part that has a second of another is found by what the
other lacks, however slow the machine is: each has at least its own delay.
"""


class Beside(Sleep):
  """See `BESIDE`."""


class Wall(Action):
  """The wall time from the first `begin` to the last `end`, by a clock of its own."""

  on = "train"

  def begin(self):
    self.began = time.monotonic()

  def __call__(self, output):
    pass

  def end(self):
    self.seconds = time.monotonic() - self.began


def measured(folder, *, task=None, actions=(), replicas=None, **options):
  """Returns part -> seconds, after checking their sum against the wall time."""
  wall, budget = Wall(), TimeBudget()
  run(
    task=task or Slow(),
    train_steps=STEPS,
    global_batch_size=6,
    steps_per_loop=LOOP,
    checkpoint_every_steps=LOOP,
    model_dir=str(folder),
    strategy=replicas or factories.default,
    optimizer=keras.optimizers.SGD,
    actions=[wall, budget, *actions, Beside(BESIDE)],
    **{"mode": "train", **options},
  )
  parts = budget.parts()
  assert parts["action Beside"] >= STEPS // LOOP * BESIDE
  assert sum(parts.values()) == pytest.approx(wall.seconds, rel=0.05)
  assert all(seconds >= 0 for seconds in parts.values())
  return parts


def largest(parts):
  return max(parts, key=parts.__getitem__)


def test_a_slow_input_is_found(tmp_path, capsys):
  parts = measured(tmp_path, task=Slow(batch=0.5))
  planted, ahead = STEPS * 0.5, 2 * 0.5  # two batches are there before the clock starts
  beside = sum(parts.values()) - parts["input wait"] - parts["compute"]  # others are read meanwhile
  assert planted - ahead - beside < parts["input wait"]
  assert largest(parts) == "input wait"
  assert f"largest: input wait; {SUGGESTIONS['input wait']}" in capsys.readouterr().err


@pytest.mark.whole
def test_a_slow_forward_pass_is_found(tmp_path):
  parts = measured(tmp_path, task=Slow(forward=0.5))
  planted = STEPS * 0.5
  assert planted <= parts["compute"]
  assert largest(parts) == "compute"
  assert "communication" not in parts


class SlowReduction(reduction.Reduction):
  """Every sum comes half a second late."""

  def all_reduce(self, gradients, scalars):
    sums, scalars = super().all_reduce(gradients, scalars)
    return sums, [delayed(scalars[0], 0.5), *scalars[1:]]


@pytest.mark.whole
def test_a_slow_reduction_is_found(tmp_path, mirrored, monkeypatch):
  monkeypatch.setattr(
    "loopwright.builder.configurables.options", lambda cls: {"reduction": SlowReduction}
  )
  parts = measured(tmp_path, replicas=lambda: mirrored(2))
  planted = STEPS * 0.5
  assert planted <= parts["communication"]
  assert largest(parts) == "communication"


@pytest.mark.whole
def test_waiting_for_the_slowest_replica_is_communication(tmp_path, mirrored):
  """Two of three replicas wait for the third: by the mean, 2/3 of its delay, and 1/3 computes."""
  parts = measured(tmp_path, task=Slow(last_replica=0.6), replicas=lambda: mirrored(3))
  planted = STEPS * 0.6
  assert parts["communication"] == pytest.approx(planted * 2 / 3, rel=0.2)
  assert planted / 3 <= parts["compute"]
  assert largest(parts) == "communication"


@pytest.mark.whole
def test_a_slow_action_is_found_by_its_name(tmp_path, capsys):
  parts = measured(tmp_path, actions=[Sleep(2.0)])
  planted = STEPS // LOOP * 2.0
  assert planted <= parts["action Sleep"]
  assert largest(parts) == "action Sleep"
  assert "largest: action Sleep; make it cheaper, or call it less" in capsys.readouterr().err


@pytest.mark.whole
def test_a_slow_checkpoint_is_found(tmp_path, monkeypatch):
  write = checkpoints.CheckpointManager._write

  def slowly(self, *args):
    time.sleep(2.0)
    return write(self, *args)

  monkeypatch.setattr(checkpoints.CheckpointManager, "_write", slowly)
  parts = measured(tmp_path)
  planted = STEPS // LOOP * 2.0
  assert planted <= parts["checkpoints"]
  assert largest(parts) == "checkpoints"


@pytest.mark.whole
def test_a_slow_evaluation_is_found(tmp_path):
  task = Slow(evaluation=1.0)
  parts = measured(tmp_path, task=task, mode="train_and_evaluate", eval_every_steps=LOOP)
  planted = STEPS // LOOP * 2 * 1.0  # two batches of 6
  assert planted <= parts["evaluation"]
  assert largest(parts) == "evaluation"


@pytest.mark.whole
def test_tracing_is_the_start_of_the_first_loop(tmp_path, monkeypatch):
  forward = Slow.forward

  def slowly(self, batch, training):
    time.sleep(5.0)  # in Python: only while it is traced
    return forward(self, batch, training)

  monkeypatch.setattr(Slow, "forward", slowly)
  parts = measured(tmp_path)
  assert parts["start"] >= 5
  assert largest(parts) == "start"


def test_it_is_a_line_of_the_log(tmp_path):
  parts = measured(tmp_path, actions=[Sleep(0.1)])
  [record] = records(tmp_path, "time")
  assert record["step"] == STEPS
  names = {f"{name.replace(' ', '_')}_s": seconds for name, seconds in parts.items()}
  assert {k: record[k] for k in names} == names
  assert "action_Sleep_s" in names


def test_timing_changes_no_weight(tmp_path, mirrored):
  weights = []
  for budget in ([], [TimeBudget()]):
    task = Slow()
    run(
      task=task, train_steps=6, global_batch_size=6, mode="train", strategy=lambda: mirrored(3),
      model_dir=str(tmp_path / str(len(budget))), actions=budget,
    )  # fmt: skip
    weights.append([v.numpy() for v in task.model.weights])
  for one, other in zip(*weights, strict=True):
    np.testing.assert_array_equal(one, other)


def test_a_run_that_fails_before_it_begins_has_no_budget(tmp_path, capsys):
  class Fails(Action):
    on = "train"

    def begin(self):
      raise ZeroDivisionError

  with pytest.raises(ZeroDivisionError):
    run(
      task=Slow(), train_steps=2, global_batch_size=6, mode="train", model_dir=str(tmp_path),
      strategy=factories.default, actions=[Fails(), TimeBudget()],
    )  # fmt: skip
  assert "time budget" not in capsys.readouterr().err


def test_a_gpu_has_one_part_for_what_cannot_be_told_apart():
  budget = TimeBudget()
  budget._separable = False
  budget.watch.seconds.update({"training": 3.0, "host": 1.0})
  budget({"input_wait_s": 0.5, "start_s": 0.25})
  assert budget.parts() == {
    "host": 1.0, "input wait": 0.5, "start": 0.25, "compute and communication": 2.25,
  }  # fmt: skip


def test_parameter_servers_are_refused(monkeypatch):
  monkeypatch.setattr(time_budget.placement, "of", lambda _: ParameterServer(None))
  run_of = type("Run", (), {"strategy": None})()
  with pytest.raises(
    ValueError, match=r"\Arun.actions has @TimeBudget\(\), but under param[^\n]*\Z"
  ):
    TimeBudget().bind(run_of)


def test_the_table():
  text = table({"host": 0.5, "input wait": 7.25, "checkpoints": 2.25})
  assert text == (
    "time budget of 10.0 s:\n"
    "  input wait       7.25 s  72.5 %\n"
    "  checkpoints      2.25 s  22.5 %\n"
    "  host             0.50 s   5.0 %\n"
    f"largest: input wait; {SUGGESTIONS['input wait']}\n"
    f"also 22 %: checkpoints; {SUGGESTIONS['checkpoints']}"
  )


def test_a_large_wait_for_input_is_named_beside_the_compute():
  text = table({"compute": 7.0, "input wait": 2.4, "host": 0.6})
  assert text.splitlines()[-2:] == [
    f"largest: compute; {SUGGESTIONS['compute']}",
    f"also 24 %: input wait; {SUGGESTIONS['input wait']}",
  ]


def test_every_part_has_a_suggestion_that_names_options_that_exist():
  from loopwright.trainer import Trainer

  for text in SUGGESTIONS.values():
    for owner, name in re.findall(r"\b(run|Trainer|Reduction)\.(\w+)", text):
      code = {"run": run, "Trainer": Trainer.__init__, "Reduction": reduction.Reduction.__init__}
      assert name in inspect.signature(code[owner]).parameters
