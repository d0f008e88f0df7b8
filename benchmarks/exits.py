"""Ends runs in every way, with every kind of input and every layout, and checks how they end.

  python -m benchmarks.trials exits --trials 5
  python -m benchmarks.trials exits --only "sigterm arrays"

After the first loops of training, one of `ENDS` comes. The run must end within 30 s with the
documented status and a last line that says why; after a signal its state must be saved; no process
may be left. The examples of "numpy_function" and "generator" come from Python code that is slower
than a step.

  error, mistake     an action raises RuntimeError, or ConfigError: status 1, 2
  ctrl_c             SIGINT: saved, status 130
  sigterm, sighup    saved, status 75
  lost_peer          SIGKILL of another worker: status 1; of a parameter server: status 1
  closed_output      its reader ends after the first line, as `| head -1`: trains on to status 0
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import comparison, forks
from benchmarks.trials import Outcome, Run

SOURCES = ("arrays", "numpy_function", "generator", "memory_mapped", "stream")
SIGNALS = {"ctrl_c": signal.SIGINT, "sigterm": signal.SIGTERM, "sighup": signal.SIGHUP}
LINES = {"error": "failed: ", "mistake": "error: ", "lost_peer": "failed: "}
ENDS = {
  "error": 1, "mistake": 2, "ctrl_c": 130, "sigterm": 75, "sighup": 75, "lost_peer": 1,
  "closed_output": 0,
}  # fmt: skip
LAYOUTS = {
  "replicas-1": [],
  "replicas-2": ["auto.cpu_replicas = 2"],
  "workers-2": ["run.strategy = @multi_worker_mirrored"],
  "servers": [
    "run.strategy = @parameter_server",
    "run.ledger = False",
    "run.deterministic = False",
    "Trainer.loss_scale = @fixed",
  ],
}
FLAGS = {"workers-2": ["--local_workers=2"], "servers": ["--local_workers=1", "--local_ps=1"]}
HERE = ("numpy_function", "generator", "memory_mapped", "stream")
"""Sources that need the chief's process, which the workers of parameter servers cannot reach."""
PEERS = {"workers-2": "worker-1", "servers": "ps-0"}
READ_S = 0.02
START_S, LIMIT_S = 90.0, 30.0


@dataclasses.dataclass(frozen=True)
class Case:
  """One way to end one run."""

  end: str
  source: str
  layout: str

  def __str__(self) -> str:
    """Returns the beginning of a line."""
    return f"{self.end} {self.source} {self.layout}"

  def refused(self) -> bool:
    """Whether the run cannot begin, which one line says."""
    return self.layout == "servers" and self.source in HERE

  def bindings(self) -> list[str]:
    """Returns what the run gets."""
    endless = self.end in SIGNALS or self.end == "lost_peer"
    bindings = [
      f"Small.kind = '{self.source}'",
      f"Small.read_s = {READ_S}",
      f"run.train_steps = {1_000_000 if endless else 60}",
      *LAYOUTS[self.layout],
    ]
    if self.end in ("error", "mistake"):
      bindings += ["run.actions = [@Fail()]", f"Fail.as_mistake = {self.end == 'mistake'}"]
    return bindings

  def comes(self) -> bool:
    """Whether this end can come: a lost peer to a cluster, any other to a run that begins."""
    peer = self.end != "lost_peer" or self.layout in PEERS
    return peer and not (self.refused() and self.end != "error")


def _cases() -> dict[str, Case]:
  every = itertools.starmap(Case, itertools.product(ENDS, SOURCES, LAYOUTS))
  return {str(case): case for case in every if case.comes()}


CASES = _cases()
KINDS = tuple(CASES)


def prepare(base: Path, options: argparse.Namespace) -> Run:
  """Returns what runs a trial."""
  del base, options
  forks.warm_up()

  def trial(kind: str, number: int, folder: Path, rng: random.Random) -> Outcome:
    wrong = ended(folder, CASES[kind], rng)
    return Outcome([wrong] if wrong else [])

  return trial


def ended(folder: Path, case: Case, rng: random.Random) -> str:
  """Returns what was wrong, or ""."""
  pids = folder.with_name(f"{folder.name}-pids")
  pids.mkdir()
  reader, writer = os.pipe() if case.end == "closed_output" else (None, None)

  def before() -> None:
    forks.tasks_in(pids)
    if reader is not None:
      os.close(reader)

  flags = FLAGS.get(case.layout, [])
  run = forks.small(folder, *case.bindings(), flags=flags, before=before, stdout=writer)
  if reader is not None:
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
  elif case.end not in ("error", "mistake"):
    if not _wait(lambda: comparison.records(folder, "train") or run.poll() is not None):
      run.kill()
      return f"no training after {START_S:g} s: {run.last_line()}"
    time.sleep(rng.uniform(0, 0.5))
    _break(run, case, pids)
  limit_s = START_S if case.end in ("error", "mistake", "closed_output") else LIMIT_S
  status = run.wait(limit_s)
  left = [] if status is None else _left(pids)
  run.kill()
  return wrong(case, folder, status, run.last_line(), left)


def wrong(case: Case, folder: Path, status: int | None, line: str, left: list[str]) -> str:
  """Returns how the end differs from what is documented, or ""."""
  if status is None:
    return f"it did not end: {line}"
  if case.refused():
    return (
      "" if status == 2 and line.startswith("error: the input ") else f"status {status}: {line}"
    )
  if status != ENDS[case.end]:
    return f"status {status}, not {ENDS[case.end]}: {line}"
  if not line.startswith(LINES.get(case.end, "")):
    return f"status {status}, but the last line is {line!r}"
  if left:
    return f"left behind: {', '.join(left)}"
  if case.end in SIGNALS:
    if "saved step" not in line:
      return f"the last line is {line!r}"
    steps = [record["step"] for record in comparison.records(folder, "train")]
    saved = comparison.kept(folder)[-1:]
    if saved != [f"ckpt-{max(steps, default=0)}"]:
      return f"the last loop ended at step {max(steps, default=0)}, but {saved} is saved"
  return ""


def _break(run: forks.Fork, case: Case, pids: Path) -> None:
  if case.end == "lost_peer":
    with contextlib.suppress(ProcessLookupError):  # it has ended, which its status then shows
      os.kill(int((pids / PEERS[case.layout]).read_text()), signal.SIGKILL)
  else:
    run.send(SIGNALS[case.end])


def _wait(happened: Callable[[], object], limit_s: float = START_S) -> bool:
  until = time.monotonic() + limit_s
  while not happened() and time.monotonic() < until:
    time.sleep(0.02)
  return time.monotonic() < until


def _left(pids: Path) -> list[str]:
  """Returns the tasks of a cluster whose processes still run a second after its end."""
  tasks = {path.name: Path("/proc", path.read_text(), "stat") for path in pids.iterdir()}
  _wait(lambda: not any(map(_lives, tasks.values())), 1.0)
  return [name for name, stat in tasks.items() if _lives(stat)]


def _lives(stat: Path) -> bool:
  with contextlib.suppress(OSError):
    return stat.read_text().rpartition(")")[2].split()[0] != "Z"
  return False
