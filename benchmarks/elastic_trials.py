"""Breaks workers of runs whose number of workers varies, and checks that each is the same run.

  python -m benchmarks.trials elastic --trials 40

Each trial is a run that begins with 2 to 6 workers, may go on with one, and meets eight faults at
random moments; the place of a lost worker is used again after a second. One run in five has a fixed
number of workers. A run is lost

- if it hangs, or does not end with status 0 at the last step (after a SIGTERM: 75, and it is
  started again);
- if its ledger does not prove that each example was read once;
- if a loss or a weight differs from an uninterrupted run's by more than 1e-5, relative (of a
  tensor: to its largest value); the model has no kinks, which would make more of a rounding;
- if a loss, or with one number of workers throughout a weight, differs in any bit from an
  uninterrupted run of that number, before another number of workers has trained;
- if a process of it lives 30 s after its end.

  faults   kill (SIGKILL), stop (SIGSTOP), term (SIGTERM)
  phases   import, connecting, trace: of a start, so of a recovery if it is not the first fault;
           step, save, evaluation
  whom     worker 0, another one, or two at once
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from benchmarks.comparison import different_tensors, reached, records
from benchmarks.trials import Outcome, Run
from loopwright.host.children import PROGRAM
from loopwright.monitoring import record
from loopwright.run_folder import checkpoints, layout
from loopwright.tools.ledger import __main__ as ledger
from loopwright.tools.local_cluster import LocalCluster

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIG = "benchmarks/elastic_trials.gin"
KINDS = ("run",)
STEPS, EVERY, TOLERANCE = 400, 40, 1e-5  # as in the config
UNBROKEN = 3  # workers of the uninterrupted run
FAULTS_A_RUN = 8
LIMIT_S = 300.0  # to recover, or to end
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
STARTING = ("import", "connecting", "trace")
PHASES = (*STARTING, "step", "save", "evaluation")
MARK = "ELASTIC_TRIAL"
"""The variable that all processes of a run have."""


class HangError(Exception):
  """What did not happen in time."""


def children(pid: int) -> list[int]:
  path = Path(f"/proc/{pid}/task/{pid}/children")
  return [int(child) for child in path.read_text().split()] if path.exists() else []


class Elastic:
  """A run on `least` to `most` workers, observed from outside."""

  def __init__(self, folder: Path, least: int, most: int) -> None:
    self.folder, self._sizes = folder, (str(least), str(most))
    folder.mkdir(parents=True, exist_ok=True)
    self.start()

  def start(self) -> None:
    command = [sys.executable, "-m", "benchmarks.elastic_trials", str(self.folder)]
    with (self.folder / "log.txt").open("a") as log:
      self.process = subprocess.Popen(
        [*command, *self._sizes], cwd=REPOSITORY, stdout=log, stderr=log,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", MARK: str(self.folder)},
      )  # fmt: skip

  def wait(self, happened: Callable[[], Any], what: str, poll_s: float = 0.01) -> Any:
    """Returns the first true value, or None if the run ends before."""
    end = time.monotonic() + LIMIT_S
    while not (found := happened()):
      if self.process.poll() is not None:
        return happened() or None
      if time.monotonic() > end:
        raise HangError(f"no {what} within {LIMIT_S:.0f} s")
      time.sleep(poll_s)
    return found

  def workers(self) -> list[int]:
    """Returns the living workers, in order."""
    found = []
    for pid in children(self.process.pid):
      with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        if state != "Z":
          found.append((int(fields[18]), pid))
    return [pid for _, pid in sorted(found)]

  def all_workers(self) -> list[int] | None:
    """Returns the workers of a start if none has ended."""
    found = self.workers()
    return found if found and len(found) == self.sizes()[-1] else None

  def addresses(self, header: str) -> list[str]:
    found = re.search(r"TF_CONFIG='(.*?)'", header)
    assert found
    return json.loads(found[1])["cluster"]["worker"]

  def sizes(self) -> list[int]:
    return [len(self.addresses(header)) for header in headers(self.folder)] or [99]

  def leg(self, worker: int, pid: int) -> record.Leg | None:
    with suppress(Exception):  # it is being written
      found = record.last(str(self.folder))[worker]
      return found if found.process == pid else None

  def alive(self) -> list[int]:
    """Returns the processes of this run."""
    found, mark = [], f"{MARK}={self.folder}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
      with suppress(OSError):
        if mark in path.read_bytes().split(b"\0"):
          found.append(int(path.parent.name))
    return found

  def end(self) -> None:
    for pid in {self.process.pid, *self.alive()}:
      with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    self.process.wait()


def run(folder: str, least: str, most: str) -> int:
  arguments = [f"--gin_file={CONFIG}", f"--model_dir={folder}", "--mode=train_and_evaluate"]
  cluster = LocalCluster(
    command=[*PROGRAM, *arguments], model_dir=folder, least=int(least), workers=int(most),
    max_restarts=20, rest_s=1.0,
  )  # fmt: skip
  return cluster.run()


def open_ports(pid: int) -> Iterator[int]:
  """Yields the ports of this machine that a process has open."""
  with suppress(OSError):
    links = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
      fields = line.split()
      if fields[9] in inodes:
        yield int(fields[1].partition(":")[2], 16)


# ---- A run ----


class Breaking:
  """Injects the faults of one run, one after another."""

  def __init__(self, run: Elastic, outcome: Outcome, rng: random.Random) -> None:
    self._run, self._outcome, self._rng = run, outcome, rng
    self._broken: set[int] = set()

  def go(self) -> int:
    """Returns the exit status in the end."""
    cells = list(itertools.product(SIGNALS, PHASES))
    self._rng.shuffle(cells)
    cells = cells[:FAULTS_A_RUN]
    for (kind, phase), (_, after) in itertools.zip_longest(cells, cells[1:], fillvalue=("", "")):
      if not self._break(kind, phase, recovers=after not in STARTING):
        break
    while (status := self._ended()) == 75:
      self._run.start()
    return status

  def _ended(self) -> int:
    self._run.wait(lambda: self._run.process.poll() is not None, "end")
    return self._run.process.returncode

  def _break(self, kind: str, phase: str, *, recovers: bool) -> bool:
    """Breaks something, and waits until the run has started again, or goes on; False at its end."""
    while workers := self._run.wait(
      self._new if phase in STARTING else self._run.all_workers, phase
    ):
      of, rng = len(workers), self._rng
      whom = rng.choice([[0], [rng.randrange(of)], rng.sample(range(of), min(2, of))])
      if not self._wait_for(phase, whom[0], workers):
        return False
      if self._run.all_workers() == workers or phase in STARTING:
        break
    else:
      return False
    before = reached(self._run.folder)
    self._outcome.done += f"{kind} {whom} of {of} at {phase}, "
    self._broken, at = set(workers), time.time()
    for each in whom:
      with suppress(ProcessLookupError):
        os.kill(workers[each], SIGNALS[kind])
    if not self._run.wait(self._new, "start after a fault", 0.002):
      if self._run.process.returncode != 75:
        if before < STEPS - EVERY and not self._run.process.returncode:
          self._outcome.misses.append(f"{kind} at {phase} changed nothing")
        return False
      self._run.start()
    began = time.time()
    if recovers:
      later = self._run.wait(lambda: self._later(began, before), "loop after a fault")
      self._outcome.times += [(each, later - at) for each in (kind, phase) if later]
    return True

  def _new(self) -> list[int] | None:
    """Returns the workers of a start after that of the last fault."""
    found = self._run.all_workers()
    return found if found and not self._broken & set(found) else None

  def _later(self, began: float, step: int) -> float | None:
    lines = records(self._run.folder, "train", times=True)
    found = [r for r in lines if r["wall_time"] > began and r["step"] > step]
    return min((record["wall_time"] for record in found), default=None)

  def _wait_for(self, phase: str, worker: int, workers: Sequence[int]) -> bool:
    """Waits for a moment in a phase; returns whether there still is one."""
    folder, uniform, pid = self._run.folder, self._rng.uniform, workers[worker]
    now = reached(folder)
    end = now + self._rng.randrange(5, 30) if phase == "step" else now // EVERY * EVERY + EVERY
    if phase not in STARTING and end >= STEPS:
      return False

    def begun() -> bool:
      if phase not in STARTING:
        writes = phase == "save" and (folder / "checkpoints" / checkpoints.UNFINISHED).is_dir()
        saved = end in layout.checkpoint_steps(str(folder)) if phase != "step" else False
        return writes or saved or (phase == "step" and reached(folder) >= end)
      if pid not in self._run.workers() or phase == "import":
        return True
      if phase == "connecting":
        return next(open_ports(pid), None) is not None
      return bool((leg := self._run.leg(worker, pid)) and leg.loops)

    if not self._run.wait(begun, phase, 0.001):
      return False
    most = {
      "import": 0.3,
      "connecting": 0.6,
      "trace": 1.0,
      "step": 0.3,
      "save": 0.0,
      "evaluation": 0.2,
    }
    time.sleep(uniform(0, most[phase]))
    return True


def headers(folder: Path) -> list[str]:
  """Returns a line for each start."""
  path = folder / "logs" / "worker-0.log"
  lines = path.read_text().splitlines() if path.exists() else []
  return [line for line in lines if line.startswith("=== ")]


def prepare(base: Path, options: argparse.Namespace) -> Run:
  """Returns what runs a trial."""
  del options
  unbroken(base, UNBROKEN)

  def trial(kind: str, number: int, folder: Path, rng: random.Random) -> Outcome:
    most = rng.choices([2, 3, 4, 5, 6], [12, 5, 1, 1, 1])[0]
    run, outcome = Elastic(folder, most if rng.random() < 0.2 else 1, most), Outcome()
    try:
      if status := Breaking(run, outcome, rng).go():
        outcome.misses.append(f"status {status} at the end")
      until = time.monotonic() + 30.0
      while (alive := run.alive()) and time.monotonic() < until:
        time.sleep(0.1)
      if alive:
        outcome.misses.append(f"{len(alive)} processes live 30 s after the end")
    except Exception as error:
      outcome.misses.append(f"{type(error).__name__}: {error}")
    finally:
      run.end()
    if not outcome.misses:
      check(folder, base, run.sizes(), outcome)
    outcome.done = f"{outcome.done} workers {run.sizes()}"
    return outcome

  return trial


def unbroken(base: Path, size: int) -> Path:
  """Returns the folder of an uninterrupted run of so many workers."""
  folder = base / f"unbroken-{size}"
  if not (folder / "log.txt").exists():
    run = Elastic(folder, size, size)
    if status := run.process.wait():
      raise SystemExit(f"the unbroken run ended with {status}; see {folder}/log.txt")
  return folder


def check(folder: Path, base: Path, sizes: Sequence[int], outcome: Outcome) -> None:
  """Compares with uninterrupted runs."""
  if reached(folder) != STEPS:
    outcome.misses.append(f"it ended at step {reached(folder)}, not {STEPS}")
    return
  said = io.StringIO()
  with redirect_stdout(said):
    if ledger.main([str(folder)]):
      outcome.misses.append(f"the ledger: {said.getvalue().strip()}")
  repeated = (re.findall(r"(\d+) steps rerun", said.getvalue()) or [0])[0]
  outcome.done += f"{repeated} steps repeated,"
  outcome.misses += different(folder, unbroken(base, UNBROKEN))
  same = unbroken(base, sizes[0])
  kept, exact = exact_until(folder, sizes), {r["step"]: r["loss"] for r in records(same, "train")}
  if any(r["loss"] != exact[r["step"]] for r in records(folder, "train") if r["step"] <= kept):
    outcome.misses.append(f"a loss until step {kept} differs in its bits")
  if kept == STEPS:
    name = f"checkpoints/ckpt-{STEPS}"
    outcome.misses += different_tensors(folder / name, same / name)


def exact_until(folder: Path, sizes: Sequence[int]) -> int:
  """Returns the step until which only the first number of workers can have trained."""
  other = [line for line, size in zip(headers(folder), sizes, strict=True) if size != sizes[0]]
  if not other:
    return STEPS
  at = datetime.fromisoformat(other[0].split()[1]).timestamp()
  after = [leg for leg in record.read(str(folder))[0] if leg.first and leg.began >= at - 1]
  return min((leg.from_step or 0 for leg in after), default=0)


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


if __name__ == "__main__":  # a run, as `Elastic` starts it
  sys.exit(run(*sys.argv[1:]))
