"""Starts several runs in one folder at once; leaves locks of dead owners; looks for two owners.

  python -m benchmarks.double_starts --trials 200 --stale 50

A trial starts two or three runs in one new folder, at random moments. Exactly one of those that
meet must train; the others end with status 2 and one line that names it. What is left must be
bit-identical to a run alone. A stale lock is that of a run that SIGKILL ended, or of another
machine or an earlier boot, written by hand: one more run takes the folder over and goes on. Exit
status 1 if anything else happens.
"""

from __future__ import annotations

import argparse
import collections
import json
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
LIMIT_S = 60.0
SPREAD_S = 2.0
"""Starts differ by up to this; a run takes about a second."""
STALE = ("killed", "other_boot", "other_host", "unreadable")
_PATIENCE_S = 0.5


class Trials:
  """All trials, in folders below `base`."""

  def __init__(self, base: Path) -> None:
    """Makes the run alone, to compare with."""
    self._base, self.reference = base, base / "reference"
    self.folder = base / "run"
    if (status := self._start("reference", self.reference).wait(60)) != 0:
      raise SystemExit(f"the run alone ended with status {status}")

  def _start(
    self, name: str, folder: Path, before: Callable[[], object] = lambda: None
  ) -> forks.Fork:
    log = self._base / f"{name}.txt"
    log.unlink(missing_ok=True)
    return forks.Fork([f"--gin_file={CONFIG}", f"--model_dir={folder}"], log, before=before)

  def double(self, rng: random.Random) -> tuple[str, list[str]]:
    """Starts two or three runs; returns how they ended, and what was wrong."""
    shutil.rmtree(self.folder, ignore_errors=True)
    spread = rng.choice([0.0, 0.1, SPREAD_S])
    runs = []
    for index in range(rng.choice([2, 2, 3])):
      time.sleep(rng.uniform(0, spread) if index else 0)
      runs.append(self._start(f"run{index}", self.folder))
    return self._judged(runs)

  def _judged(self, runs: list[forks.Fork]) -> tuple[str, list[str]]:
    statuses = [run.wait(LIMIT_S) for run in runs]
    found = []
    for run, status in zip(runs, statuses, strict=True):
      line = run.last_line()
      others = [str(other.pid) for other in runs if other is not run]
      if status == 2 and not ("in use" in line and any(pid in line for pid in others)):
        found.append(f"status 2, but the line names no other run: {line!r}")
      elif status not in (0, 2):
        found.append(f"status {status}: {line!r}")
      run.kill()
    if 0 not in statuses:
      found.append("no run ended with status 0")
    found += comparison.differences(self.folder, self.reference)
    lines = (self.folder / "metrics.jsonl").read_text().splitlines()
    keys = collections.Counter((r["step"], r["split"]) for r in map(json.loads, lines))
    found += [f"step {step} of {split} twice" for (step, split), n in keys.items() if n > 1]
    return " ".join(map(str, statuses)), found

  def stale(self, kind: str, rng: random.Random) -> tuple[str, list[str]]:
    """Leaves a lock, then starts two runs at once; returns how they ended, and what was wrong."""
    shutil.rmtree(self.folder, ignore_errors=True)
    first = self._start("first", self.folder)
    while not (self.folder / "owner.json").exists() and first.poll() is None:
      time.sleep(0.01)
    time.sleep(rng.uniform(0, 1.0))
    record = (self.folder / "owner.json").read_bytes() if first.poll() is None else b"{}\n"
    first.send(signal.SIGKILL)
    first.wait(LIMIT_S)
    if kind != "killed":
      (self.folder / "owner.json").write_bytes(altered(record, kind))
    return self._judged([self._start(f"run{i}", self.folder, _hurry) for i in range(2)])


def altered(record: bytes, kind: str) -> bytes:
  """Returns the record of another machine, of an earlier boot, or half of one."""
  if kind == "unreadable":
    return record[: len(record) // 2]
  changes = (
    {"boot": "another"} if kind == "other_boot" else {"boot": "another", "host": "elsewhere"}
  )
  return json.dumps({**json.loads(record or b"{}"), **changes}).encode() + b"\n"


def _hurry() -> None:
  """Waits less for the beat of another machine's owner; nothing else changes."""
  from loopwright.run_folder import ownership

  ownership.PATIENCE_S, ownership.BEAT_S = _PATIENCE_S * 4, _PATIENCE_S


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--trials", type=int, default=200)
  parser.add_argument("--stale", type=int, default=50)
  parser.add_argument("--seed", type=int, default=0)
  options = parser.parse_args()
  forks.warm_up()
  base = Path(tempfile.mkdtemp(prefix="double_starts_", dir="/dev/shm"))
  trials, rng, missed = Trials(base), random.Random(options.seed), 0
  counts: collections.Counter[str] = collections.Counter()
  for number in range(options.trials + options.stale):
    kind = STALE[number % len(STALE)] if number >= options.trials else "starts"
    ends, found = trials.double(rng) if kind == "starts" else trials.stale(kind, rng)
    counts[f"{kind}: statuses {' '.join(sorted(ends.split()))}"] += 1
    missed += bool(found)
    if found:
      print(f"{number + 1}: {kind}: {ends}: {'; '.join(found[:4])}", flush=True)
  for line, count in sorted(counts.items()):
    print(f"{line}: {count}")
  print(f"{options.trials} double starts, {options.stale} stale locks: {missed} not as wanted")
  shutil.rmtree(base)
  return 1 if missed else 0


if __name__ == "__main__":
  sys.exit(main())
