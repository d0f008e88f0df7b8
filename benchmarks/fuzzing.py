"""Runs many hostile inputs in forked processes: each has a time limit and a cap of memory.

    counts, failures = hunt("idx", examine, range(1000), seed=0)

`examine(rng, workplace)` makes one input from `rng` and uses it. It returns one of `OUTCOMES`, or a
text that describes a failure. The process is forked after all imports, and again after a crash, a
hang, or growth beyond the cap; the next input follows. An input depends only on the seed, the name
and its number, so its number repeats it.
"""

from __future__ import annotations

import collections
import json
import os
import random
import resource
import select
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

MISTAKE, FINE = "mistake", "fine"
OUTCOMES = (MISTAKE, FINE)
CAP_BYTES = 2 * 2**30
Examine = Callable[[random.Random, Path], str]


def hunt(
  name: str, examine: Examine, numbers: range, seed: int, limit_s: float = 10.0
) -> tuple[collections.Counter[str], list[str]]:
  """Examines inputs; returns how many had each outcome, and a text for each that failed."""
  counts: collections.Counter[str] = collections.Counter()
  failures: list[str] = []
  while left := numbers[counts.total() :]:
    with tempfile.TemporaryDirectory(dir=_memory_folder()) as folder:
      for outcome in _reports(name, examine, left, seed, limit_s, Path(folder)):
        if outcome not in OUTCOMES:
          failures.append(f"{name} {numbers[counts.total()]}: {outcome}")
        counts[outcome if outcome in OUTCOMES else "failure"] += 1
  return counts, failures


def rng_of(name: str, seed: int, number: int) -> random.Random:
  """Returns the random numbers of one input."""
  return random.Random(f"{seed}/{name}/{number}")


def _reports(
  name: str, examine: Examine, numbers: range, seed: int, limit_s: float, folder: Path
) -> Iterator[str]:
  """Forks once; yields the outcome of each input until the process ends."""
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
      left -= 1
      yield json.loads(line)
  os.close(reader)
  status = os.waitpid(pid, 0)[1]
  if left and (reason or status):
    yield reason or f"the process ended with {_ended(status)}"


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
      os.write(writer, json.dumps(outcome).encode() + b"\n")
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
