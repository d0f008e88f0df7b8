"""Breaks runs in every way that a promise speaks of, and says what was lost: one line a trial.

  python -m benchmarks.trials kills --trials 250       # SIGKILL and SIGTERM in every part of a run
  python -m benchmarks.trials exits --trials 5         # errors, signals, lost peers, closed output
  python -m benchmarks.trials starts --trials 50       # several starts in one folder, stale locks
  python -m benchmarks.trials disk --trials 300        # ENOSPC, EIO, EROFS; needs gcc
  python -m benchmarks.trials power --snapshots 25     # copies of a mounted image; as root
  python -m benchmarks.trials cluster --trials 10      # two workers, and parameter servers
  python -m benchmarks.trials elastic --trials 40      # workers that are lost and come back

A module has kinds of trials (`KINDS`), and `prepare` returns what runs one: it gets a folder and
random numbers of its own, which depend on the seed, the kind and the number alone. What a trial
found wrong it returns; the folder of such a trial stays. Exit status 1 if anything was wrong, or a
process is left.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

MODULES = {
  "kills": "kill_trials", "exits": "exits", "starts": "double_starts", "disk": "disk_faults",
  "power": "power_loss", "cluster": "fault_trials", "elastic": "elastic_trials",
}  # fmt: skip


@dataclasses.dataclass
class Outcome:
  """What came of a trial.

  Attributes:
    misses: what was wrong, a line each.
    done: what was done, where the kind does not say it.
    times: (what it was, seconds until the run went on).
  """

  misses: list[str] = dataclasses.field(default_factory=list)
  done: str = ""
  times: list[tuple[str, float]] = dataclasses.field(default_factory=list)


Run = Callable[[str, int, Path, random.Random], Outcome]
"""(kind, number, folder, random numbers) -> what came of it."""


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs trials and prints a line for each, then a table."""
  options = _parse(arguments)
  module = importlib.import_module(f"benchmarks.{MODULES[options.what]}")
  kinds = [kind for kind in module.KINDS if re.search(options.only, kind)]
  base = Path(tempfile.mkdtemp(prefix=f"trials_{options.what}_", dir=_in_memory()))
  run: Run = module.prepare(base, options)
  outcomes: dict[str, list[Outcome]] = {kind: [] for kind in kinds}
  for number in range(options.first, options.first + options.trials):
    for kind in kinds:
      folder, began = base / re.sub(r"\W+", "-", f"{kind} {number}"), time.monotonic()
      found = run(kind, number, folder, random.Random(f"{options.seed}/{kind}/{number}"))
      outcomes[kind].append(found)
      done = f" {found.done}:" if found.done else ""
      said = f"MISS: {'; '.join(found.misses[:5])}" if found.misses else "nothing lost"
      print(f"{kind} {number}:{done} {time.monotonic() - began:.1f} s: {said}", flush=True)
      if not found.misses:
        shutil.rmtree(folder, ignore_errors=True)
  return _summarize(outcomes, base)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.trials", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("what", choices=MODULES)
  parser.add_argument("--trials", type=int, default=1, help="of each kind")
  parser.add_argument("--first", type=int, default=0, help="the number of the first")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--only", default="", help="a regular expression: the kinds to try")
  parser.add_argument("--replicas", type=int, default=2, help="of `kills`")
  parser.add_argument("--snapshots", type=int, default=25, help="of a trial of `power`")
  return parser.parse_args(arguments)


def _summarize(outcomes: dict[str, list[Outcome]], base: Path) -> int:
  print("| kind | trials | with losses |\n|---|---|---|")
  for kind, found in outcomes.items():
    print(f"| {kind} | {len(found)} | {sum(bool(one.misses) for one in found)} |")
  every = [one for found in outcomes.values() for one in found]
  times: dict[str, list[float]] = collections.defaultdict(list)
  for what, seconds in (each for one in every for each in one.times):
    times[what].append(seconds)
  for what, found in times.items():
    print(f"{what}: {statistics.median(found):.1f} s to go on, at most {max(found):.1f}")
  missed, left = sum(bool(one.misses) for one in every), processes_of(base)
  kept = f", see {base}" if missed else ""
  print(f"{len(every)} trials, {missed} with losses, {len(left)} processes left{kept}")
  if not missed:
    shutil.rmtree(base)
  return 1 if missed or left else 0


def processes_of(folder: Path) -> list[int]:
  """Returns the processes whose command names a folder."""
  found = []
  for path in Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(OSError):
      if str(folder) in path.read_text(errors="replace"):
        found.append(int(path.parent.name))
  return found


def _in_memory() -> str | None:
  return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
  sys.exit(main())
