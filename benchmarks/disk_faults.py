"""Fails file operations of a run, one run for each, restarts it, and compares with a whole run.

  python -m benchmarks.trials disk --trials 300

A library (benchmarks/disk_faults.c, compiled here) fails the n-th operation below the run folder:
ENOSPC, EIO or EROFS, once or from then on; or it sends SIGKILL or SIGTERM right before it. The run
must end within 30 s with status 0, or with status 1 or 2 and one last line that says why, or as the
signal ends it. Then the same command runs on a sound disk. It must
end with status 0, bit-identical to a run without faults, or say in one line why it cannot continue.
The points of an error are tried in turn: every kind of call and file, then the next of each.

  hang       it did not end
  crash      a status that is not documented, or a last line that says nothing
  different  the second run ended with status 0, and its folder is not that of a whole run
  stuck      the second run failed too: the line is printed, and judged by the reader
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import dataclasses
import errno
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import comparison, forks
from benchmarks.trials import Outcome, Run

SOURCE = Path(__file__).with_suffix(".c")
ERRORS = ("ENOSPC", "EIO", "EROFS")
SIGNALS = {"SIGKILL": -signal.SIGKILL, "SIGTERM": 75}
"""Signals and the status after them."""
KINDS = (*ERRORS, *SIGNALS)
LIMIT_S = 30.0


@dataclasses.dataclass(frozen=True)
class Point:
  """Which operation fails, how, and from then on or once."""

  number: int
  error: str
  forever: bool
  call: str = ""

  def __str__(self) -> str:
    """Returns the options that repeat it."""
    lasting = "forever" if self.forever else "once"
    return f"{self.error} {lasting} at operation {self.number} ({self.call})"

  @property
  def changes(self) -> bool:
    """Whether only operations that change something count: a full disk can still be read."""
    return self.error != "EIO"


class Library:
  """The preloaded library."""

  def __init__(self) -> None:
    """Finds it in this process."""
    self._arm = ctypes.CDLL(None).faults_arm

  def arm(self, folder: Path, point: Point, trace: Path | None = None) -> None:
    """Plants a fault in this process; operation 0 plants none."""
    names = [str(path).encode() for path in (folder, trace or "")]
    number, code = ctypes.c_long(point.number), code_of(point.error)
    self._arm(names[0], number, code, point.forever, point.changes, names[1])


def preload() -> None:
  """Starts this command again with the library, unless it is there."""
  if "faults" not in os.environ.get("LD_PRELOAD", ""):
    library = Path(tempfile.mkdtemp(prefix="disk_faults_")) / "faults.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    command = [sys.executable, "-m", "benchmarks.trials", *sys.argv[1:]]
    os.execve(sys.executable, command, environment)


def prepare(base: Path, options: argparse.Namespace) -> Run:
  """Makes the whole run to compare with; returns what runs a trial."""
  preload()
  forks.warm_up()
  faults = Faults(base)
  kinds = [kind for kind in KINDS if re.search(options.only, kind)]
  of_kind = {kind: points(kind, faults.operations(kind), options.seed) for kind in kinds}
  print({kind: len(found) for kind, found in of_kind.items()}, "points", flush=True)

  def trial(kind: str, number: int, folder: Path, rng: random.Random) -> Outcome:
    point = of_kind[kind][number % len(of_kind[kind])]
    word, line = faults.result(point, folder)
    good = word in ("resumed", "tolerated", "stuck")
    return Outcome([] if good else [line], f"{word}, {point}" + (f", {line}" * (word == "stuck")))

  return trial


class Faults:
  """Runs with faults, and a whole one to compare with."""

  def __init__(self, base: Path) -> None:
    """Makes the whole run."""
    self._base, self._library = base, Library()
    self._reference = forks.whole(base)

  def operations(self, error: str) -> list[str]:
    """Returns the calls of a run that this error can fail, in order."""
    folder, trace = self._base / "counted", self._base / "trace.txt"
    self._run(folder, Point(0, error, False), trace).wait(60)
    shutil.rmtree(folder)
    return [line.split("\t", 1)[1].replace("\t", " ") for line in trace.read_text().splitlines()]

  def _run(self, folder: Path, point: Point, trace: Path | None = None) -> forks.Fork:
    return forks.small(folder, before=lambda: self._library.arm(folder, point, trace))

  def result(self, point: Point, folder: Path) -> tuple[str, str]:
    """Returns how a run with this fault and the run after it ended: a word, and lines."""
    first = self._run(folder, point)
    status, line = first.wait(LIMIT_S), first.last_line()
    if status is None:
      first.kill()
      return "hang", line
    if not is_documented(point, status, line):
      return "crash", f"status {status}: {line}"
    second = self._run(folder, Point(0, "EIO", False))
    again, last = second.wait(LIMIT_S), second.last_line()
    if again is None:
      second.kill()
      return "hang", f"{line} | on restart: {last}"
    if again:
      return ("stuck" if again in (1, 2) else "crash"), f"{line} | status {again}: {last}"
    # SIGTERM saves at another step.
    same = point.error != "SIGTERM"
    found = comparison.differences(folder, self._reference, same_steps=same)
    word = "different" if found else "tolerated" if status == 0 else "resumed"
    return word, " | ".join([line, *found[:3]])


def code_of(error: str) -> int:
  """Returns the number of an error; minus that of a signal."""
  return -getattr(signal, error) if error in SIGNALS else getattr(errno, error)


def is_documented(point: Point, status: int, line: str) -> bool:
  """Whether a run may end so: with launch.py's line, or by the signal."""
  if point.error in SIGNALS:
    return status in (0, SIGNALS[point.error])
  return status == 0 or (status in (1, 2) and line.startswith(("error: ", "failed: ")))


def points(error: str, calls: Sequence[str], seed: int) -> list[Point]:
  """Returns all points: every kind of call and file in turn, then the next of each."""
  rng = random.Random(f"{seed}/{error}")
  kinds: dict[tuple[bool, str], list[Point]] = collections.defaultdict(list)
  for number, call in enumerate(calls, 1):
    for forever in (False,) if error in SIGNALS else (False, True):
      kinds[forever, re.sub(r"\d+", "", call)].append(Point(number, error, forever, call))
  for kind in kinds.values():
    rng.shuffle(kind)
  return [*filter(None, itertools.chain(*itertools.zip_longest(*kinds.values())))]
