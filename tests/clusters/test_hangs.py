"""A process that hangs says so, and in what; of several workers it names the one that is behind."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks import hang_trials, straggler_trials
from loopwright.host import stacks, threads
from loopwright.monitoring.hang_report import verdict
from loopwright.monitoring.record import Leg
from loopwright.run_folder import layout

REPOSITORY = Path(__file__).resolve().parents[2]
INPUT, COLLECTIVE = "training: input (read, task.py:3)", "training: step or collective"


def leg(loops, step, phase, doing="", unchanged_s=30.0):
  return Leg(loops=loops, step=step, phase=["host", *phase], doing=doing, unchanged_s=unchanged_s)


@pytest.mark.parametrize(
  ("found", "silent", "said"),
  [
    (  # both wait in the same loop, one for its input
      {0: leg(4, 33, ["training"], COLLECTIVE), 1: leg(4, 33, ["training"], INPUT)},
      set(),
      r"worker 1 is behind, at step 33, for 30 s in training: input \(read.*worker 0 is in .*step",
    ),
    (  # one has not done the step that the others have
      {0: leg(4, 33, ["training"], COLLECTIVE), 1: leg(4, 32, ["training"], COLLECTIVE)},
      set(),
      "worker 1 is behind, at step 32, for 30 s in training: step or collective; worker 0 is in",
    ),
    (  # one is still behind the loop before
      {0: leg(5, 40, ["training"], COLLECTIVE), 1: leg(4, 40, ["action Slow"], "action Slow (f)")},
      set(),
      r"worker 1 is behind, at step 40, for 30 s in action Slow \(f\); worker 0",
    ),
    (  # one waits for the other, after the same loop
      {0: leg(4, 40, ["waiting for workers"]), 1: leg(4, 40, ["checkpoints"])},
      set(),
      "worker 1 is behind, at step 40, for 30 s in checkpoints; worker 0 is in waiting for workers",
    ),
    (  # who does not answer is behind, whatever else
      {0: leg(4, 40, ["training"], COLLECTIVE), 1: leg(4, 33, ["training"], INPUT)},
      {0},
      "worker 0 is behind, at step 40, and does not answer: stopped, or a thread keeps Python's",
    ),
    ({0: leg(4, 40, ["checkpoints"])}, set(), "worker 0 is behind, at step 40, for 30 s in check"),
  ],
)
def test_the_worker_that_is_behind_is_named(found, silent, said):
  assert re.match(said, verdict(found, silent))


def test_a_thread_that_waits_for_a_file_is_found(tmp_path):
  """Also one that opens a pipe which has no other end."""
  fifo = str(tmp_path / "fifo")
  os.mkfifo(fifo)
  thread = threading.Thread(target=lambda: open(fifo, "rb").close())
  thread.start()
  try:
    time.sleep(0.2)
    assert f"openat of {fifo}" in threads.blocked_files()
  finally:
    os.close(os.open(fifo, os.O_WRONLY))
    thread.join()
  assert not any(fifo in each for each in threads.blocked_files())


@pytest.fixture
def hung(tmp_path):
  """A run of one process that hangs in its input, and goes on waiting; its folder."""
  command = [sys.executable, "launch.py", "train", "benchmarks/hang_trials.gin"]
  bindings = ["run.strategy = @default", "run.end_if_hung = False", "run.hang_timeout_s = 2.0"]
  process = subprocess.Popen(
    [*command, *bindings, f"--model_dir={tmp_path}/run"], cwd=REPOSITORY, text=True,
    stderr=subprocess.PIPE, env={**os.environ, "HANG": "input", "HANG_WORKER": "0"},
  )  # fmt: skip
  yield process, tmp_path / "run"
  process.kill()
  process.wait()


def test_a_hang_is_told_and_a_signal_writes_the_stacks(hung):
  process, folder = hung
  line = next(line for line in process.stderr if "hang:" in line)
  assert re.search(
    r"worker 0 is behind, at step 4\d, for \d+ s in training: input or host function "
    r"\(deadlock, hang_task.py:\d+\); it goes on waiting; stacks: .*/run/flight/",
    line,
  )
  written = (folder / layout.stacks(0)).read_text()
  assert "in deadlock" in written
  process.send_signal(stacks.SIGNAL)
  deadline = time.monotonic() + 10
  while "in deadlock" not in (folder / layout.stacks(0)).read_text()[len(written) :]:
    assert time.monotonic() < deadline
    time.sleep(0.05)
  assert process.poll() is None


@pytest.mark.whole
@pytest.mark.parametrize("kind", hang_trials.EXPECTED)
def test_each_planted_hang_names_worker_and_phase(kind, tmp_path):
  status, line = hang_trials.trial(kind, str(tmp_path))
  assert re.search(hang_trials.EXPECTED[kind], line)
  assert status == 1


@pytest.mark.whole
def test_the_slow_one_of_two_workers_is_known_by_its_own_times(tmp_path):
  """It sleeps 0.4 s more in each step; the other one waits for it, in the all-reduce."""
  slowed = {"compute": [0.0, 0.4], "input": [0.0, 0.0]}
  told = straggler_trials.trial(str(tmp_path / "run"), slowed, steps=40)
  assert (told.slow.worker, told.slow.phase) == (1, "compute")
  assert told.paces[1]["compute"] >= 0.39
  assert told.paces[0]["collective"] >= 0.2
  assert "worker 1 is slow, mostly in compute" in told.line


ENDS = """
import sys, tempfile, time
sys.path.insert(0, sys.argv[1])
import keras, numpy as np, tensorflow as tf, toys
from loopwright.runs.runner import run

class Slow(toys.Regression):
  features = {"x": np.ones([8, 2], np.float32)}
  def build_model(self):
    return toys.network([2], keras.layers.Dense(1))
  def preprocess(self, batch, training):
    def wait(weight):
      time.sleep(1.0)
      return weight
    weight = tf.numpy_function(wait, [batch["weight"]], tf.float32)
    return {**batch, "weight": tf.ensure_shape(weight, batch["weight"].shape)}
  def losses(self, outputs, batch):
    return tf.square(outputs)

run(task=Slow(), train_steps=2, steps_per_loop=2, global_batch_size=4, mode="train",
    model_dir=tempfile.mkdtemp())
"""


def test_a_program_ends_while_its_input_calls_python():
  support = str(Path(__file__).parents[1] / "support")
  subprocess.run([sys.executable, "-c", ENDS, support], check=True, timeout=60)
