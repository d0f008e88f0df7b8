"""Is a slow worker named, and does it cost what the cost model says? Slows one of two workers.

    python -m benchmarks.straggler_trials
    python -m benchmarks.straggler_trials --phases input --factors 1 2 4

The forward pass of each worker sleeps for 20 ms, that of worker 1 so many times longer; or its
input does, which the pipeline makes ahead. A step must take what an even step takes, and what
worker 1 sleeps more (docs/scaling.md), or as long as its input; and from a factor of 1.3 on one
line must name worker 1 and the phase.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

import loopwright
from loopwright import ArraySource, Batch, Loss, Task
from loopwright.run_folder import layout, legs, paces
from loopwright.stragglers import WHILE_S

REPOSITORY = Path(__file__).parents[1]
BASE_S = 0.02
PHASES = {"compute": paces.COMPUTE, "input": paces.INPUT}


@loopwright.register
class Sleeping(Task):
  """A linear regression that sleeps as `SLOWED` says: {"compute": [seconds, ...], "input": ...}."""

  def __init__(self) -> None:
    """Reads how long this worker sleeps."""
    index = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
    slowed = json.loads(os.environ.get("SLOWED", "{}"))
    self._one = {phase: threading.Lock() for phase in PHASES}
    self._seconds = {phase: slowed[phase][index] if slowed else 0.0 for phase in PHASES}

  def build_model(self) -> keras.Model:
    """Makes one dense layer."""
    return keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])

  def source(self, split: str) -> ArraySource:
    """Returns the same rows for both splits."""
    x = np.random.default_rng(0).normal(size=[64, 2]).astype(np.float32)
    return ArraySource(features={"x": x, "y": x.sum(1)})

  def preprocess(self, batch: Batch, training: bool) -> Batch:
    """Sleeps."""
    return {**batch, "x": self._slept(batch["x"], "input")}

  def forward(self, batch: Batch, training: bool) -> tf.Tensor:
    """Sleeps."""
    return self.model(self._slept(batch["x"], "compute"))[:, 0]

  def loss(self, outputs: tf.Tensor, batch: Batch) -> Loss:
    """Returns the square."""
    return Loss.from_examples((outputs - batch["y"]) ** 2, batch["weight"])

  def _slept(self, value: tf.Tensor, phase: str) -> tf.Tensor:
    def sleep(array: np.ndarray) -> np.ndarray:
      with self._one[phase]:  # the pipeline asks for several batches at a time
        time.sleep(self._seconds[phase])
      return array

    if not self._seconds[phase]:
      return value
    return tf.ensure_shape(tf.numpy_function(sleep, [value], value.dtype), value.shape)


class Told(NamedTuple):
  """What a run of two workers has told.

  Attributes:
    times: worker -> phase -> times.
    slow: who is slow by the last loops.
    line: the one that names it; "" without.
    step_s: the median of all loops' seconds of a step.
  """

  times: dict[int, dict[str, paces.Times]]
  slow: paces.Slow | None
  line: str
  step_s: float


def trial(folder: str, slowed: dict[str, list[float]], *, steps: int) -> Told:
  """Trains two workers that sleep in each step.

  Args:
    folder: the run folder.
    slowed: phase -> seconds of each worker.
    steps: of the run, in loops of ten.
  """
  command = [sys.executable, "launch.py", "train", "benchmarks/straggler_trials.gin"]
  command += ["--local_workers=2", "--mode=train"]
  done = subprocess.run(
    [*command, f"run.train_steps={steps}", f"--model_dir={folder}"],
    cwd=REPOSITORY, capture_output=True, text=True, check=False,
    env={**os.environ, "SLOWED": json.dumps(slowed)},
  )  # fmt: skip
  if done.returncode:
    raise RuntimeError(done.stderr[-2000:])
  told = [line for line in done.stderr.splitlines() if "WARNING: slow worker" in line]
  times = {worker: paces.times(found) for worker, found in legs.read(folder).items()}
  last = {worker: leg.pace for worker, leg in legs.last(folder).items()}
  log = Path(folder, layout.METRICS).read_text().splitlines()
  rates = [json.loads(line)["steps_per_second"] for line in log]
  return Told(times, paces.slow(last), told[0] if told else "", 1 / statistics.median(rates))


def main() -> None:
  """Prints a row for each factor, and exits with 1 if a line is missing or wrong."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--factors", type=float, nargs="+", default=[1, 1.2, 1.5, 2, 4])
  parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
  parser.add_argument("--seconds", type=float, default=WHILE_S + 15, help="of each run")
  asked = parser.parse_args()
  print("| slowed | factor | step, ms | predicted, ms | error | worker 1 to 0 | the line |")
  print(f"|{'---|' * 7}")
  wrong, even_s = 0, 0.0
  for phase in asked.phases:
    for factor in asked.factors:
      other = {each: [0.0, 0.0] for each in PHASES}
      slowed = {**other, "compute": [BASE_S, BASE_S]}
      slowed[phase][1] = factor * BASE_S
      if factor == 1 and phase != asked.phases[0]:
        continue
      with tempfile.TemporaryDirectory() as folder:
        steps = 10 * round(asked.seconds / (BASE_S * factor) / 10)
        told = trial(folder, slowed, steps=steps)
      even_s = even_s or told.step_s
      predicted_s = even_s + (factor - 1) * BASE_S
      if phase == "input":  # made while the step before computes
        predicted_s = max(even_s, factor * BASE_S)
      own = [sum(told.times[w][p].p50 for p in PHASES.values()) for w in (0, 1)]
      named = f"worker 1 on {os.uname().nodename} is slow, mostly in {phase}" in told.line
      expected = own[1] >= paces.RATIO * own[0]
      wrong += named != expected
      error = f"{100 * (predicted_s / told.step_s - 1):+.1f} %"
      print(
        f"| {phase} | {factor:g} | {1e3 * told.step_s:.1f} | {1e3 * predicted_s:.1f} | {error} | "
        f"{own[1] / own[0]:.2f} | {'named' if named else told.line or 'none'} |", flush=True,
      )  # fmt: skip
  sys.exit(int(wrong > 0))


if __name__ == "__main__":
  main()
