"""A slow worker that is named: a run of two workers of which one sleeps, and what it tells.

The forward pass of each worker sleeps, or its input, which the pipeline makes ahead.
tests/clusters/test_hangs.py has a case.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

import loopwright
from loopwright import ArraySource, Batch, Loss, Task
from loopwright.monitoring import stragglers
from loopwright.run_folder import layout

REPOSITORY = Path(__file__).parents[1]
PHASES = {"compute": "compute", "input": "input"}


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
    paces: worker -> phase -> seconds of a step.
    slow: who is slow by the last loops.
    line: the one that names it; "" without.
    step_s: the median of all loops' seconds of a step.
  """

  paces: stragglers.Paces
  slow: stragglers.Slow | None
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
  told = [line for line in done.stderr.splitlines() if " is slow, mostly in " in line]
  paces = stragglers.paces(folder)
  log = Path(folder, layout.METRICS).read_text().splitlines()
  rates = [json.loads(line)["steps_per_second"] for line in log]
  return Told(paces, stragglers.slow(paces), told[0] if told else "", 1 / statistics.median(rates))
