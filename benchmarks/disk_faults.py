"""Fails file operations of a run, one run for each, restarts it, and compares with a whole run.

  python -m benchmarks.disk_faults --points 1000

A library (benchmarks/disk_faults.c, compiled here) fails the n-th operation below the run folder:
ENOSPC, EIO or EROFS, once or from then on; or it sends SIGKILL or SIGTERM right before it. The run
must end within 30 s with status 0, or with status 1 or 2 and one last line that says why, or as the
signal ends it. Then the same command runs on a sound disk. It must
end with status 0, bit-identical to a run without faults, or say in one line why it cannot continue.
Exit status 1 if any run does otherwise.

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
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import comparison, forks

CONFIG = "benchmarks/trials.gin"
SOURCE = Path(__file__).with_suffix(".c")
ERRORS = ("ENOSPC", "EIO", "EROFS")
SIGNALS = {"SIGKILL": -signal.SIGKILL, "SIGTERM": 75}
"""Signals and the status after them."""
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
    command = [sys.executable, "-m", "benchmarks.disk_faults", *sys.argv[1:]]
    os.execve(sys.executable, command, environment)


class Trials:
  """Runs with faults in folders below `base`."""

  def __init__(self, base: Path, options: Sequence[str] = ()) -> None:
    """Makes the whole run to compare with."""
    self._base, self._options, self._library = base, list(options), Library()
    self.reference = base / "reference"
    whole = self._run(self.reference, Point(0, "EIO", False))
    if (status := whole.wait(60)) != 0:
      raise SystemExit(f"the whole run ended with {status}: {whole.last_line()}")

  def operations(self, error: str) -> list[str]:
    """Returns the calls of a run that this error can fail, in order."""
    folder, trace = self._base / "counted", self._base / "trace.txt"
    self._run(folder, Point(0, error, False), trace).wait(60)
    shutil.rmtree(folder)
    return [line.split("\t", 1)[1].replace("\t", " ") for line in trace.read_text().splitlines()]

  def _run(self, folder: Path, point: Point, trace: Path | None = None) -> forks.Fork:
    arguments = [f"--gin_file={CONFIG}", f"--model_dir={folder}", *self._options]
    log = self._base / f"{folder.name}.txt"
    return forks.Fork(arguments, log, before=lambda: self._library.arm(folder, point, trace))

  def result(self, point: Point) -> tuple[str, str]:
    """Returns how a run with this fault and the run after it ended: a word, and lines."""
    folder = self._base / "run"
    shutil.rmtree(folder, ignore_errors=True)
    (self._base / "run.txt").unlink(missing_ok=True)
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
    found = comparison.differences(folder, self.reference, same_steps=same)
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


def points(operations: dict[str, list[str]], count: int, seed: int) -> list[Point]:
  """Returns `count` points: every kind of call and file in turn, then the next of each."""
  rng = random.Random(seed)
  kinds: dict[tuple, list[Point]] = collections.defaultdict(list)
  for error, calls in operations.items():
    for number, call in enumerate(calls, 1):
      for forever in (False,) if error in SIGNALS else (False, True):
        kinds[error, forever, re.sub(r"\d+", "", call)].append(Point(number, error, forever, call))
  for kind in kinds.values():
    rng.shuffle(kind)
  by_turn = itertools.chain(*itertools.zip_longest(*kinds.values()))
  return list(itertools.islice(filter(None, by_turn), count))


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--points", type=int, default=1000)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--errors", nargs="+", choices=(*ERRORS, *SIGNALS), default=ERRORS)
  parser.add_argument("--at", type=int, nargs="+", help="these operations alone, once and forever")
  parser.add_argument("--out", type=Path, help="a file for one line a point")
  parser.add_argument("--gin_param", action="append", default=[], help="for the run")
  options = parser.parse_args()
  preload()
  forks.warm_up()
  base = Path(tempfile.mkdtemp(prefix="disk_faults_", dir="/dev/shm"))
  trials = Trials(base, [f"--gin_param={binding}" for binding in options.gin_param])
  operations = {error: trials.operations(error) for error in options.errors}
  print({error: len(calls) for error, calls in operations.items()}, "operations", flush=True)
  chosen = points(operations, options.points, options.seed)
  if options.at:
    chosen = [point for point in points(operations, 10**9, 0) if point.number in options.at]
  counts: collections.Counter[str] = collections.Counter()
  began = time.monotonic()
  for number, point in enumerate(chosen, 1):
    word, line = trials.result(point)
    counts[word] += 1
    text = f"{number}/{len(chosen)} {word}: {point}: {line}"
    if options.out:
      with options.out.open("a") as out:
        out.write(text + "\n")
    if word not in ("resumed", "tolerated"):
      print(text, flush=True)
  print(f"{len(chosen)} points, {time.monotonic() - began:.0f} s: {dict(counts)}")
  shutil.rmtree(base)
  return 1 if counts.keys() - {"resumed", "tolerated", "stuck"} else 0


if __name__ == "__main__":
  sys.exit(main())
