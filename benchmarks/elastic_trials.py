"""Breaks workers of runs whose number of workers varies, and checks that each run is the same run.

  python -m benchmarks.elastic_trials --trials 10

Each trial trains on LEAST:MOST workers, breaks one or two of them at random loops, and waits for
the end; the place of a lost worker is used again after 3 s. A run is lost

- if it does not end with status 0 at the last step;
- if its ledger does not prove that each example was read once;
- if a loss or a weight differs from an uninterrupted run's by more than 1e-5, relative (of a
  tensor: to its largest value); the model has no kinks, which would make more of a rounding;
- if a loss differs in any bit before the copy from which the first restart goes on, where both
  runs have three workers until then.

It prints for each fault the seconds from the fault to the first loop beyond the step already
reached, and the steps repeated. Exit status 1 if any run is lost.

  kill_chief, kill_worker   SIGKILL of worker 0, of another
  kill_two                  SIGKILL of two at once, of 2:4 workers
  kill_twice                SIGKILL of one, and of another when the run has gone on
  sigstop                   a worker that runs but does not answer
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from benchmarks.fault_trials import REPOSITORY, Training, environment, reached, records
from framework.configurables import PROGRAM
from framework.tools.ledger import __main__ as ledger
from framework.tools.local_cluster import run_local

CONFIG = "benchmarks/elastic_trials.gin"
STEPS, TOLERANCE = 1500, 1e-5  # as in the config
UNBROKEN = 3  # workers of the uninterrupted run
SIZES = {"kill_two": (2, 4)}
FAULTS = ("kill_chief", "kill_worker", "kill_two", "kill_twice", "sigstop")


@dataclasses.dataclass
class Trial:
  """What came of one run."""

  recovery_s: list[float] = dataclasses.field(default_factory=list)
  repeated: int = 0
  sizes: list[int] = dataclasses.field(default_factory=list)
  first_fault: int = 0
  misses: list[str] = dataclasses.field(default_factory=list)


class Elastic(Training):
  """A run on `least` to `most` workers, observed from outside."""

  def __init__(self, folder: Path, least: int, most: int, *params: str) -> None:
    self.folder = folder
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.elastic_trials", "--run", str(folder)]
    with (folder / "log.txt").open("a") as log:
      self.process = subprocess.Popen(
        [*command, str(least), str(most), *params], cwd=REPOSITORY, env=environment(),
        stdout=log, stderr=log,
      )  # fmt: skip

  def pid(self, job: str, index: int) -> int | None:
    """Returns that of the flight record: a fork has the environment of another process."""
    lines = (self.folder / "flight" / f"{index}.jsonl").read_text().splitlines()
    return int(json.loads(lines[-1])["process"]) if job == "worker" else None

  def wait_for_step(self, step: int) -> None:
    self.wait_until(lambda: reached(self.folder) >= step)

  @property
  def sizes(self) -> list[int]:
    return [int(size) for size in re.findall(r"(?:going on with|growing to) (\d)", self.log)]

  @property
  def restarts(self) -> int:
    return len(re.findall(r"; (?:going on with|restarting) |^growing to ", self.log, re.M))

  @property
  def log(self) -> str:
    return (self.folder / "log.txt").read_text()


def run(folder: str, least: str, most: str, *params: str) -> int:
  arguments = [f"--gin_file={CONFIG}", f"--model_dir={folder}", "--mode=train_and_evaluate"]
  return run_local(
    command=[*PROGRAM, *arguments, *(f"--gin_param={each}" for each in params)],
    model_dir=folder, least=int(least), workers=int(most), max_restarts=2, rest_s=3.0, imports=True,
  )  # fmt: skip


def break_one(training: Elastic, indices: list[int], number: int, trial: Trial) -> None:
  """Sends a signal to workers, and waits until the run is beyond where it was."""
  pids = [training.pid("worker", index) for index in indices]
  before, restarts, at = reached(training.folder), training.restarts, time.time()
  for pid in pids:
    if pid is None:
      raise RuntimeError("the process to break is not there")
    os.kill(pid, number)

  def later() -> list[float]:
    found = [r for r in records(training.folder) if r["wall_time"] > ended and r["step"] > before]
    return [record["wall_time"] for record in found]

  trial.first_fault = trial.first_fault or before
  training.wait_until(lambda: training.restarts > restarts)
  ended = time.time()  # a loop that had begun may still be reported before
  training.wait_until(lambda: bool(later()))
  trial.recovery_s.append(min(later()) - at)


def broken(folder: Path, kind: str, most: int, rng: random.Random) -> Trial:
  least, most = SIZES.get(kind, (most - 1 - (kind == "kill_twice" and most > 2), most))
  training, trial = Elastic(folder, least, most), Trial()
  training.wait_for_step(rng.randrange(10, STEPS // 3))
  time.sleep(rng.random() * 0.3)  # not only at the end of a loop
  others = list(range(1, most))
  indices = {"kill_chief": [0], "kill_two": rng.sample(range(most), 2)}.get(
    kind, [rng.choice(others)]
  )
  number = signal.SIGSTOP if kind == "sigstop" else signal.SIGKILL
  break_one(training, indices, number, trial)
  if kind == "kill_twice":
    training.wait_for_step(reached(folder) + rng.randrange(10, 50))
    break_one(training, [0], number, trial)
  if status := training.end():
    trial.misses.append(f"status {status} at the end, see {folder}/log.txt")
  trial.sizes = [most, *training.sizes]
  return trial


def check(folder: Path, reference: Path, trial: Trial) -> None:
  """Compares with the uninterrupted run."""
  if reached(folder) != STEPS:
    trial.misses.append(f"it ended at step {reached(folder)}, not {STEPS}")
    return
  said = io.StringIO()
  with redirect_stdout(said):
    if ledger.main([str(folder)]):
      trial.misses.append(f"the ledger: {said.getvalue().strip()}")
  trial.repeated = int((re.findall(r"(\d+) steps rerun", said.getvalue()) or [0])[0])
  trial.misses += different(folder, reference)
  if trial.sizes[0] == UNBROKEN:
    kept = trial.first_fault - trial.repeated  # a step that is repeated is reported again
    early = [r for r in records(folder) if r["step"] <= kept]
    exact = {r["step"]: r["loss"] for r in records(reference)}
    if any(r["loss"] != exact[r["step"]] for r in early):
      trial.misses.append("a loss before the fault differs in its bits")


def different(folder: Path, reference: Path) -> list[str]:
  """Returns which losses and tensors are further than TOLERANCE from the reference's."""
  found = []
  for split in ("train", "eval"):
    losses = [{r["step"]: r["loss"] for r in records(f, split)} for f in (folder, reference)]
    if losses[0].keys() != losses[1].keys():
      found.append(f"the {split} steps of metrics.jsonl differ")
      continue
    off = max(abs(loss - losses[0][step]) / loss for step, loss in losses[1].items())
    if off > TOLERANCE:
      found.append(f"a {split} loss differs by {off:.1e}")
  name = f"checkpoints/ckpt-{STEPS}"
  ours, theirs = (tf.train.load_checkpoint(str(each / name)) for each in (folder, reference))
  for key, dtype in theirs.get_variable_to_dtype_map().items():
    if dtype.is_floating:
      a, b = ours.get_tensor(key), theirs.get_tensor(key)
      off = float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-12)) if a.size else 0.0
      if off > TOLERANCE:
        found.append(f"{key} differs by {off:.1e}")
  return found


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--trials", type=int, default=10, help="of each kind")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--kinds", nargs="+", choices=FAULTS, default=FAULTS)
  options = parser.parse_args()
  base = Path(tempfile.mkdtemp(prefix="elastic_trials_"))
  if status := Elastic(base / "unbroken", UNBROKEN, UNBROKEN).end():
    raise SystemExit(f"the unbroken run ended with {status}; see {base}/unbroken/log.txt")
  done: dict[str, list[Trial]] = {kind: [] for kind in options.kinds}
  for number in range(options.trials):
    for kind in options.kinds:
      rng, folder = random.Random(f"{options.seed}/{kind}/{number}"), base / f"{kind}-{number}"
      trial = broken(folder, kind, rng.choice([2, 3, 4]), rng)
      check(folder, base / "unbroken", trial)
      done[kind].append(trial)
      times = ", ".join(f"{each:.1f} s" for each in trial.recovery_s)
      outcome = "; ".join(trial.misses[:3]) or "the same run"
      print(
        f"{kind} {number + 1}: workers {trial.sizes}, recovered in {times}, {trial.repeated} steps "
        f"repeated: {outcome}", flush=True,
      )  # fmt: skip
      if not trial.misses:
        shutil.rmtree(folder)
  print("| fault | trials | lost | seconds to recover: median (most) | steps repeated: most |")
  print("|---|---|---|---|---|")
  for kind, trials in done.items():
    times = [each for trial in trials for each in trial.recovery_s]
    spent = f"{statistics.median(times):.1f} ({max(times):.1f})"
    repeated = max(trial.repeated for trial in trials)
    lost = sum(bool(trial.misses) for trial in trials)
    print(f"| {kind} | {len(trials)} | {lost} | {spent} | {repeated} |")
  lost = any(trial.misses for trials in done.values() for trial in trials)
  if not lost:
    shutil.rmtree(base)
  return 1 if lost else 0


if __name__ == "__main__":
  sys.exit(run(*sys.argv[2:]) if sys.argv[1:2] == ["--run"] else main())
