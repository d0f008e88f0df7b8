"""Spikes of the loss against a NumPy loop: which steps and examples, and what then is learned."""

import json
import os
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from runs import records

from loopwright import Action, ConfigError, Loss
from loopwright.inputs.ordering import examples_at
from loopwright.runs.runner import run
from loopwright.strategies import factories
from loopwright.strategies.parameter_server.strategy import ParameterServer
from loopwright.tools.forensics import examine
from loopwright.tools.forensics.spikes import Diverged, Spikes
from loopwright.tools.ledger import __main__

EXAMPLES, BATCH, STEPS, RATE, SEED, WINDOW = 230, 10, 60, 0.02, 5, 16
RNG = np.random.default_rng(2)
X = RNG.normal(size=[EXAMPLES, 3]).astype(np.float32)
Y = (X @ [1.0, -2.0, 0.5] + RNG.normal(size=EXAMPLES)).astype(np.float32)
WEIGHT = RNG.uniform(0.5, 2.0, size=EXAMPLES).astype(np.float32)


class Fit(toys.Regression):
  """Regression in which some examples have targets a hundred times as large; odd ones garbage."""

  def __init__(self, poisoned=(), garbage=()):
    x, y = X.copy(), Y.copy()
    y[list(poisoned)] *= 100.0
    x[list(garbage)] = 1e4
    self.features = {"x": x, "y": y, "weight": WEIGHT}

  def build_model(self):
    return toys.linear(np.zeros(3))


def order():
  """The examples of each step, int64 [STEPS, BATCH]."""
  ids = examples_at(tf.range(STEPS * BATCH, dtype=tf.int64), num_examples=EXAMPLES, seed=SEED)
  return ids.numpy().reshape(STEPS, BATCH)


def judged(task, kernel, ids, without):
  """Returns [loss, norm] of a batch, its gradient, and the gradient of each example's part."""
  weight = WEIGHT[ids].astype(float) * ~np.isin(ids, list(without))
  error = task.features["x"][ids].astype(float) @ kernel - task.features["y"][ids]
  each = 2 * (weight * error)[:, None] * task.features["x"][ids]
  gradient = each.sum(axis=0) / weight.sum()
  loss = np.average(error**2, weights=weight)
  return np.array([loss, np.linalg.norm(gradient)]), gradient, weight * error**2, each


def in_order(high, losses, each, replicas):
  """Returns the rows by what they add to the loss, or to the norm of their replica's gradient."""
  if high[0]:
    return np.argsort(-losses)
  share = -(-BATCH // replicas)
  of_replica = [each[i : i + share].sum(axis=0) for i in range(0, BATCH, share)]
  return np.argsort([-row @ of_replica[i // share] for i, row in enumerate(each)])


def by_numpy(task, on_spike, *, never=(), replicas=2):
  """Returns the kernel, the spikes as {step: (usual, most)} and what is left out."""
  kernel, past, spikes, left_out = np.zeros(3), np.zeros([0, 2]), {}, set(never)
  for step, ids in enumerate(order(), 1):
    now, gradient, losses, each = judged(task, kernel, ids, left_out)
    if len(past) >= WINDOW:
      usual = np.median(past[-WINDOW:], axis=0)
      spread = np.maximum(1.4826 * np.median(np.abs(past[-WINDOW:] - usual), axis=0), usual / 100)
      high = now > usual + 10 * spread
      if high.any():
        spikes[step] = (now, usual, usual + 10 * spread)
        largest = list(ids[in_order(high, losses, each, replicas)])
        while on_spike == "rewind" and (now > usual + 3 * spread).any():
          left_out.add(int(largest.pop(0)))
          now, gradient, *_ = judged(task, kernel, ids, left_out)
    past = np.append(past, [now], axis=0)
    if not (on_spike == "skip" and step in spikes):
      kernel = kernel - RATE * gradient
  return kernel, spikes, left_out


def some_examples():
  """Two examples of one step and one of a later one, all after the first WINDOW + 2 steps."""
  steps = order()
  return (int(steps[19, 1]), int(steps[19, 7])), (int(steps[21, 4]),)


class Killed(BaseException):
  """Stands for SIGKILL."""


class Kill(Action):
  on = "train"

  def __init__(self, after):
    self.after = after

  def __call__(self, output):
    if self.run.step >= self.after:
      raise Killed


def trained(folder, task, on_spike, *more, replicas=2, **options):
  """Runs; returns the kernel and the spikes that are logged."""
  actions = [Spikes(on_spike=on_spike, window=WINDOW, **options.pop("spikes", {})), *more]
  given = {"strategy": lambda: factories.mirrored(cpu_replicas=replicas), **options}
  run(
    task=task, train_steps=STEPS, global_batch_size=BATCH, mode="train", model_dir=str(folder),
    optimizer=lambda: keras.optimizers.SGD(RATE), steps_per_loop=7, checkpoint_every_steps=10,
    seed=SEED, ledger=True, actions=actions, **given,
  )  # fmt: skip
  return task.model.trainable_variables[-1].numpy().reshape([-1]), records(folder, "spike")


@pytest.mark.parametrize("on_spike", ["report", "skip", "rewind"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.fast(replicas=[2], on_spike=["rewind"])
def test_the_steps_and_weights_are_those_of_numpy(replicas, on_spike, tmp_path, capsys):
  poisoned, garbage = some_examples()
  task = Fit(poisoned, garbage)
  kernel, logged = trained(tmp_path, task, on_spike, replicas=replicas)
  expected, spikes, left_out = by_numpy(task, on_spike, replicas=replicas)
  np.testing.assert_allclose(kernel, expected, rtol=2e-4)
  assert [record["step"] for record in logged] == list(spikes)
  for record, values in zip(logged, spikes.values(), strict=True):
    got = [[record[f"{n}{k}"] for n in ("loss", "gradient_norm")] for k in ("", "_usual", "_most")]
    np.testing.assert_allclose(got, values, rtol=2e-4)
  assert [set(r["examples"]) for r in logged[:2]] == [set(poisoned), set(garbage)]
  assert __main__.main([str(tmp_path)]) == 0
  said = capsys.readouterr()
  assert "step 20: the loss is " in said.err.replace("\n", " ")
  if on_spike == "rewind":
    assert left_out == {*poisoned, *garbage}
    clean, none, _ = by_numpy(task, on_spike, never=left_out)
    np.testing.assert_allclose(expected, clean, rtol=1e-12)
    assert not none
    times = np.isin(order()[19:], list(left_out)).sum()
    assert f"left out: {times} of the examples in these steps were padding instead" in said.out
  else:
    assert "left out" not in said.out


@pytest.mark.parametrize("after", [21, 25, 35])
@pytest.mark.fast(after=[25])
def test_a_killed_run_ends_bit_for_bit_as_one_that_was_not(after, tmp_path, capsys):
  """Killed before, between and after the checkpoint that knows what is left out; 2 replicas."""
  poisoned, garbage = some_examples()
  whole, logged = trained(tmp_path / "whole", Fit(poisoned, garbage), "rewind")
  with pytest.raises(Killed):
    trained(tmp_path / "killed", Fit(poisoned, garbage), "rewind", Kill(after))
  again, logged_again = trained(tmp_path / "killed", Fit(poisoned, garbage), "rewind")
  np.testing.assert_array_equal(again, whole)
  for record in [*logged, *logged_again]:
    del record["wall_time"]
  assert logged_again == logged
  capsys.readouterr()
  assert __main__.main([str(tmp_path / "killed")]) == 0
  assert "left out: " in capsys.readouterr().out


@pytest.mark.whole
def test_a_run_goes_on_with_another_number_of_replicas(tmp_path, capsys):
  poisoned, garbage = some_examples()
  with pytest.raises(Killed):
    trained(tmp_path, Fit(poisoned, garbage), "rewind", Kill(35), replicas=2)
  kernel, _ = trained(tmp_path, Fit(poisoned, garbage), "rewind", replicas=3)
  np.testing.assert_allclose(kernel, by_numpy(Fit(poisoned, garbage), "rewind")[0], rtol=2e-4)
  assert __main__.main([str(tmp_path)]) == 0


SCRIPT = """
import os, signal, sys
from pathlib import Path
from loopwright import Action
from test_spikes import Fit, some_examples, trained

class Die(Action):
  on = "train"

  def __call__(self, output):
    if self.run.step >= int(sys.argv[2]):
      os.kill(os.getpid(), signal.SIGKILL)

kernel, _ = trained(Path(sys.argv[1]), Fit(*some_examples()), "rewind", Die(), replicas=1)
print("kernel", kernel.tobytes().hex())
"""


@pytest.mark.whole
def test_kill_9(tmp_path):
  paths = os.pathsep.join([*sys.path, os.path.dirname(__file__)])

  def started(folder, kill_at):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / folder), str(kill_at)]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.returncode, [line for line in done.stdout.splitlines() if "kernel" in line]

  whole = started("whole", 1000)
  assert started("killed", 25)[0] == -signal.SIGKILL
  assert started("killed", 1000) == whole
  assert (whole[0], len(whole[1])) == (0, 1)
  assert __main__.main([str(tmp_path / "killed")]) == 0


def test_a_ledger_without_what_was_left_out_is_disproved(tmp_path, capsys):
  """It says that the examples are missing where they were."""
  poisoned, garbage = some_examples()
  trained(tmp_path, Fit(poisoned, garbage), "rewind", replicas=1)
  path = tmp_path / "ledger-0.jsonl"
  lines = [json.loads(line) for line in path.read_text().splitlines() if line]
  for line in lines:
    line.pop("left_out", None)
  path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
  capsys.readouterr()
  assert __main__.main([str(tmp_path)]) == 1
  assert capsys.readouterr().out.startswith("step 20, worker 0: ")


# ---- When no few examples cause it ----


class Doubling(Fit):
  """From step 30 on, the loss is a thousand times as large, whatever the examples."""

  def loss(self, outputs, batch):
    factor = tf.where(batch["step"] >= 30, 1000.0, 1.0)
    return Loss.from_examples(factor * tf.square(outputs - batch["y"]), batch["weight"])


@pytest.mark.parametrize("on_spike", ["skip", "rewind"])
@pytest.mark.fast(on_spike=["rewind"])
def test_a_loss_that_stays_high_fails_the_run(on_spike, tmp_path, capsys):
  with pytest.raises(Diverged, match=r"in 4 steps in a row, up to step 34, so it is not single"):
    trained(tmp_path, Doubling(), on_spike, spikes={"patience": 3})
  said = capsys.readouterr().err
  assert "not a few examples: it is still high without half of the 10" in said


class Normed(Fit):
  """With batch normalisation, whose statistics a left-out example must not enter."""

  def build_model(self):
    normed = keras.layers.BatchNormalization(momentum=0.5, epsilon=1e-2)
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    return keras.Sequential([keras.Input([3]), normed, dense])

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)[:, 0]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.fast(replicas=[2])
def test_statistics_are_those_of_a_run_that_never_had_them(replicas, tmp_path):
  poisoned, _ = some_examples()
  task, clean = Normed(poisoned), Normed()
  trained(tmp_path / "rewound", task, "rewind", replicas=replicas)

  class LeavesOut(Spikes):
    def begin(self):
      self.run.trainer.left_out = frozenset(poisoned)

  strategy = {"strategy": lambda: factories.mirrored(cpu_replicas=replicas)}
  run(
    task=clean, train_steps=STEPS, global_batch_size=BATCH, mode="train", seed=SEED,
    model_dir=str(tmp_path / "clean"), optimizer=lambda: keras.optimizers.SGD(RATE),
    steps_per_loop=7, actions=[LeavesOut(on_spike="rewind", deviations=1e9)], **strategy,
  )  # fmt: skip
  for one, other in zip(task.model.variables, clean.model.variables, strict=True):
    np.testing.assert_array_equal(one.numpy(), other.numpy())


# ---- Mistakes ----


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"on_spike": "rewnd"}, "unknown Spikes.on_spike 'rewnd'; it must be one of report, rewind, "
     "skip. Did you mean 'rewind'?"),
    ({"window": 4}, "Spikes.window is 4; it must be a whole number of at least 8."),
    ({"patience": 0}, "Spikes.patience is 0; it must be a whole number of at least 1."),
    ({"deviations": -1.0}, "Spikes.deviations is -1.0; it must be above 0."),
  ],
)  # fmt: skip
def test_a_mistake_is_one_line(options, message):
  with pytest.raises(ConfigError) as caught:
    Spikes(**options)
  assert str(caught.value) == message


def test_parameter_servers_are_refused():
  with pytest.raises(ConfigError, match="a step cannot be replayed under parameter_server, where"):
    examine.require_replays(ParameterServer(None))
