"""Runs many hostile inputs in forked processes: each has a time limit and a cap of memory.

    tally = hunt("idx", examine, inputs=1000, seed=0)
    print(tally.line())

`examine(rng, workplace)` makes one input from `rng` and uses it. It returns one of `OUTCOMES`, or a
text that describes a failure. The process is forked after all imports, and again after a crash, a
hang, or growth beyond the cap; the next input follows. An input depends only on the seed, the name
and its number, so `--only NUMBER` repeats it.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import random
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

MISTAKE, FINE = "mistake", "fine"
OUTCOMES = (MISTAKE, FINE)
CAP_BYTES = 2 * 2**30
Examine = Callable[[random.Random, Path], str]


@dataclasses.dataclass
class Tally:
  """What came of the inputs of one reader.

  Attributes:
    name: of the reader.
    outcomes: outcome or "failure" -> number of inputs.
    failures: (number of the input, what happened).
    seconds: wall time.
    peak_bytes: the most memory that a process had above what it began with.
  """

  name: str
  outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
  failures: list[tuple[int, str]] = dataclasses.field(default_factory=list)
  seconds: float = 0.0
  peak_bytes: int = 0

  def add(self, number: int, outcome: str) -> None:
    """Counts one input."""
    if outcome in OUTCOMES:
      self.outcomes[outcome] += 1
      return
    self.outcomes["failure"] += 1
    self.failures.append((number, outcome))

  def line(self) -> str:
    """Returns the row of a table."""
    inputs = sum(self.outcomes.values())
    counts = " ".join(f"{self.outcomes[key]:8}" for key in (MISTAKE, FINE, "failure"))
    return f"{self.name:14} {inputs:8} {counts} {self.peak_bytes / 2**20:8.0f} {self.seconds:8.0f}"


HEAD = (
  f"{'reader':14} {'inputs':>8} {'one line':>8} {'fine':>8} {'failures':>8} {'MB more':>8} "
  f"{'seconds':>8}"
)


def hunt(
  name: str, examine: Examine, *, inputs: int, seed: int, limit_s: float = 10.0, first: int = 0
) -> Tally:
  """Examines the inputs `first` .. `first + inputs - 1`; returns what came of them."""
  tally, began, number = Tally(name), time.monotonic(), first
  while number < first + inputs:
    with tempfile.TemporaryDirectory(dir=_memory_folder()) as folder:
      for outcome, grown in _reports(name, examine, range(number, first + inputs), seed, limit_s,
                                     Path(folder)):  # fmt: skip
        tally.add(number, outcome)
        tally.peak_bytes = max(tally.peak_bytes, grown)
        number += 1
  tally.seconds = time.monotonic() - began
  return tally


def rng_of(name: str, seed: int, number: int) -> random.Random:
  """Returns the random numbers of one input."""
  return random.Random(f"{seed}/{name}/{number}")


def _reports(
  name: str, examine: Examine, numbers: range, seed: int, limit_s: float, folder: Path
) -> Iterator[tuple[str, int]]:
  """Forks once; yields (outcome, bytes of growth) of each input until the process ends."""
  reader, writer = os.pipe()
  pid = os.fork()
  if pid == 0:
    os.close(reader)
    _work(writer, name, examine, numbers, seed, folder)
  os.close(writer)
  left, buffer, reason = len(numbers), b"", ""
  while left:
    if not select.select([reader], [], [], limit_s)[0]:
      reason = f"no end within {limit_s:g} s"
      os.kill(pid, signal.SIGKILL)
      break
    if not (data := os.read(reader, 2**16)):
      break
    *lines, buffer = (buffer + data).split(b"\n")
    for line in lines:
      outcome, grown = json.loads(line)
      left -= 1
      yield outcome, grown
  os.close(reader)
  status = os.waitpid(pid, 0)[1]
  if left and (reason or status):
    yield reason or f"the process ended with {_ended(status)}", 0


def _work(
  writer: int, name: str, examine: Examine, numbers: range, seed: int, folder: Path
) -> None:
  """Runs the inputs in a forked process, which ends early after one that grew beyond the cap."""
  status = 1
  try:
    before = _resident_bytes()
    held = _held_bytes() + CAP_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (held, held))
    for number in numbers:
      outcome = _outcome(examine, rng_of(name, seed, number), folder)
      grown = _resident_bytes() - before
      if grown > CAP_BYTES:
        outcome = f"grew by {grown / 2**20:.0f} MB ({outcome[:200]})"
      os.write(writer, json.dumps([outcome, grown]).encode() + b"\n")
      if grown > CAP_BYTES:
        break
    status = 0
  finally:
    os._exit(status)


def _outcome(examine: Examine, rng: random.Random, folder: Path) -> str:
  try:
    return examine(rng, folder)
  except BaseException:
    return traceback.format_exc(limit=-6)[-3000:]


def _ended(status: int) -> str:
  if os.WIFSIGNALED(status):
    return signal.Signals(os.WTERMSIG(status)).name
  return f"status {os.waitstatus_to_exitcode(status)}"


def _resident_bytes() -> int:
  """Returns the most memory that this process ever used."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _held_bytes() -> int:
  """Returns the memory that this process has reserved for its data."""
  status = Path("/proc/self/status").read_text()
  return int(status.partition("VmData:")[2].split()[0]) * 1024


def _memory_folder() -> str | None:
  return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def report(tallies: Sequence[Tally], *, examples: int = 3) -> int:
  """Prints a table and some failures; returns the exit status."""
  print("\n".join([HEAD, *(tally.line() for tally in tallies)]))
  for tally in tallies:
    for number, text in tally.failures[:examples]:
      print(f"\n{tally.name} {number}: {text}", file=sys.stderr)
  return 1 if any(tally.failures for tally in tallies) else 0
