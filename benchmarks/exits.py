"""Ends runs in every way, with every kind of input and every layout, and checks how they end.

  python -m benchmarks.exits --times 5 --cluster_times 1

After the first loops of training, one of `ENDS` comes. The run must end within 30 s with the
documented status and a last line that says why; after a signal its state must be saved; no process
may be left. The examples of "numpy_function" and "generator" come from Python code that is slower
than a step. Exit status 1 if anything else happens.

  error, mistake     an action raises RuntimeError, or ConfigError: status 1, 2
  ctrl_c             SIGINT: saved, status 130
  sigterm, sighup    saved, status 75
  lost_peer          SIGKILL of another worker: status 1; of a parameter server: status 1
  closed_output      its reader ends after the first line, as `| head -1`: trains on to status 0

The processes are forks, also those of a local cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import comparison, forks

CONFIG = "benchmarks/trials.gin"
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

  def arguments(self, folder: Path) -> list[str]:
    """Returns the command line after launch.py."""
    endless = self.end in SIGNALS or self.end == "lost_peer"
    bindings = [
      f"Small.kind = '{self.source}'",
      f"Small.read_s = {READ_S}",
      f"run.train_steps = {1_000_000 if endless else 60}",
      *LAYOUTS[self.layout],
    ]
    if self.end in ("error", "mistake"):
      bindings += ["run.actions = [@Fail()]", f"Fail.as_mistake = {self.end == 'mistake'}"]
    params = [f"--gin_param={binding}" for binding in bindings]
    return [f"--gin_file={CONFIG}", f"--model_dir={folder}", *FLAGS.get(self.layout, []), *params]


def run_case(base: Path, case: Case, rng: random.Random) -> str:
  """Returns what was wrong, or ""."""
  folder, pids = base / "run", base / "pids"
  for path in (folder, pids):
    shutil.rmtree(path, ignore_errors=True)
  pids.mkdir()
  (base / "log.txt").unlink(missing_ok=True)
  reader, writer = os.pipe() if case.end == "closed_output" else (None, None)
  run = forks.Fork(
    case.arguments(folder), base / "log.txt", before=lambda: _begin(reader),
    environment={"FORK_PIDS": str(pids)}, stdout=writer,
  )  # fmt: skip
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


def _begin(reader: int | None) -> None:
  forks.fork_workers()
  if reader is not None:
    os.close(reader)


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


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--times", type=int, default=5, help="each case of one process")
  parser.add_argument("--cluster_times", type=int, default=1, help="each case of a cluster")
  parser.add_argument("--ends", nargs="+", choices=ENDS, default=list(ENDS))
  parser.add_argument("--sources", nargs="+", choices=SOURCES, default=SOURCES)
  parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
  parser.add_argument("--seed", type=int, default=0)
  options = parser.parse_args()
  forks.warm_up()
  base = Path(tempfile.mkdtemp(prefix="exits_", dir="/dev/shm"))
  rng, done, missed = random.Random(options.seed), 0, 0
  for case in itertools.starmap(
    Case, itertools.product(options.ends, options.sources, options.layouts)
  ):
    if case.end == "lost_peer" and case.layout not in PEERS:
      continue
    if case.refused() and case.end != "error":  # it ends before any of the ends could come
      continue
    for _ in range(options.cluster_times if case.layout in FLAGS else options.times):
      began, done = time.monotonic(), done + 1
      miss = run_case(base, case, rng)
      missed += bool(miss)
      print(f"{case}: {time.monotonic() - began:.1f} s: {miss or 'as documented'}", flush=True)
  print(f"{done} runs, {missed} not as documented")
  shutil.rmtree(base)
  return 1 if missed else 0


if __name__ == "__main__":
  sys.exit(main())
