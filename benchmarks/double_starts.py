"""Starts several runs in one folder at once; leaves locks of dead owners; looks for two owners.

  python -m benchmarks.trials starts --trials 50

A trial of `starts` starts two or three runs in one new folder, at random moments. Exactly one of
those that meet must train; the others end with status 2 and one line that names it. What is left
must be bit-identical to a run alone. In the other kinds a run that SIGKILL ended has left its
owner.json, whole or cut off: two more runs start, and one takes the folder over and goes on.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import signal
import time
from pathlib import Path

from benchmarks import comparison, forks
from benchmarks.trials import Outcome, Run

KINDS = ("starts", "killed", "unreadable")
LIMIT_S = 60.0
SPREAD_S = 2.0
"""Starts differ by up to this; a run takes about a second."""


def prepare(base: Path, options: argparse.Namespace) -> Run:
  """Makes the run alone, to compare with; returns what runs a trial."""
  del options
  forks.warm_up()
  reference = forks.whole(base)

  def trial(kind: str, number: int, folder: Path, rng: random.Random) -> Outcome:
    return judged((starts if kind == "starts" else stale)(kind, folder, rng), folder, reference)

  return trial


def starts(kind: str, folder: Path, rng: random.Random) -> list[forks.Fork]:
  """Starts two or three runs."""
  del kind
  spread, runs = rng.choice([0.0, 0.1, SPREAD_S]), []
  for index in range(rng.choice([2, 2, 3])):
    time.sleep(rng.uniform(0, spread) if index else 0)
    runs.append(started(folder, index))
  return runs


def stale(kind: str, folder: Path, rng: random.Random) -> list[forks.Fork]:
  """Leaves an owner.json, then starts two runs at once."""
  first, owner = forks.small(folder), folder / "owner.json"
  while not owner.exists() and first.poll() is None:
    time.sleep(0.01)
  time.sleep(rng.uniform(0, 1.0))
  record = owner.read_bytes() if first.poll() is None else b"{}\n"
  first.send(signal.SIGKILL)
  first.wait(LIMIT_S)
  if kind == "unreadable":
    owner.write_bytes(record[: len(record) // 2])
  return [started(folder, index) for index in range(2)]


def started(folder: Path, index: int) -> forks.Fork:
  """Starts a run with a log of its own."""
  log = folder.with_name(f"{folder.name}-{index}.txt")
  arguments = [f"--gin_file={forks.CONFIG}", f"--model_dir={folder}"]
  return forks.Fork(arguments, log)


def judged(runs: list[forks.Fork], folder: Path, reference: Path) -> Outcome:
  """Returns how the runs ended, and what was wrong."""
  statuses = [run.wait(LIMIT_S) for run in runs]
  outcome = Outcome(done=f"statuses {' '.join(map(str, statuses))}")
  for run, status in zip(runs, statuses, strict=True):
    line = run.last_line()
    others = [str(other.pid) for other in runs if other is not run]
    if status == 2 and not ("in use" in line and any(pid in line for pid in others)):
      outcome.misses.append(f"status 2, but the line names no other run: {line!r}")
    elif status not in (0, 2):
      outcome.misses.append(f"status {status}: {line!r}")
    run.kill()
  if 0 not in statuses:
    outcome.misses.append("no run ended with status 0")
  outcome.misses += comparison.differences(folder, reference)
  lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
  keys = collections.Counter((line["step"], line["split"]) for line in lines)
  outcome.misses += [f"step {step} of {split} twice" for (step, split), n in keys.items() if n > 1]
  return outcome
