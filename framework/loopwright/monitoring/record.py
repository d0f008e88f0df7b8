"""flight/<worker>.jsonl: what each process of a run spent its time on, and what it does now.

One JSON object a line, a leg: from the start of a process to its first save, from a save to the
next one, from the last one to the end. The last line is written again, in place, twice a second. So
what a kill leaves is behind by half a second at most. The legs of a process follow each other
without a gap, and the parts of a leg exclude each other. Imports no TensorFlow; flights.py reads
them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import os
import statistics
import time
import uuid
from pathlib import Path

from loopwright.run_folder import layout

INPUT, COMPUTE, COLLECTIVE = "input", "compute", "collective"
FINEST_S, _LEAST_S = 1.05, 1e-6
_RECENT = 9


@dataclasses.dataclass
class Leg:
  """A part of a process's time.

  Attributes:
    process: its number on `host`.
    began: seconds since the epoch.
    parts: name -> seconds.
    first: whether the process began with it.
    from_step, step: completed steps at its start, None before the restore, and now.
    loops: the loops that the process has begun.
    traced: steps of loops that were traced; their time is the part "tracing".
    saved: whether it ended with a save of `step`.
    times: phase of a step -> bucket of seconds -> steps; see flights.py.
    pace: phase -> seconds of a step, the median of the last loops.
    phase: what the process did when the line was written, the innermost last.
    unchanged_s: since when, or since its last sign of progress.
    beat: counts up while the process lives.
    doing: what a hang has found out about `phase`.
    ended: "done", "preempted" or "failed"; "" before the end, and after a kill.
  """

  process: int = 0
  host: str = ""
  began: float = 0.0
  parts: dict[str, float] = dataclasses.field(default_factory=dict)
  first: bool = False
  from_step: int | None = None
  step: int = 0
  loops: int = 0
  traced: int = 0
  saved: bool = False
  times: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
  pace: dict[str, float] = dataclasses.field(default_factory=dict)
  phase: list[str] = dataclasses.field(default_factory=list)
  unchanged_s: float = 0.0
  beat: int = 0
  doing: str = ""
  ended: str = ""

  @property
  def seconds(self) -> float:
    """How long it took so far."""
    return sum(self.parts.values())

  @property
  def end(self) -> float:
    """When it ended, in seconds since the epoch."""
    return self.began + self.seconds

  @property
  def path(self) -> str:
    """The phase in one text, without what is below all others."""
    return " > ".join(self.phase[1:] or self.phase)


class Writer:
  """Writes the legs of one process; an error of the disk is the run's to report."""

  def __init__(self, model_dir: str, worker: int) -> None:
    """Opens the file, behind what earlier processes have written."""
    path = os.path.join(model_dir, layout.flight(worker))
    with contextlib.suppress(FileExistsError):
      os.mkdir(os.path.dirname(path))  # not the run folder: if that is gone, it must stay so
    self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    self._at, self._width = os.fstat(self._descriptor).st_size, 0
    if self._at and os.pread(self._descriptor, 1, self._at - 1) != b"\n":
      os.pwrite(self._descriptor, b"\n", self._at)
      self._at += 1

  def write(self, leg: Leg) -> None:
    """Writes the last line again, never shorter: a reader finds no rest of the earlier one."""
    line = json.dumps(dataclasses.asdict(leg)).encode()
    self._width = max(self._width, len(line))
    with contextlib.suppress(OSError):
      os.pwrite(self._descriptor, line.ljust(self._width) + b"\n", self._at)

  def next(self) -> None:
    """Leaves the last line as it is; `write` begins another one."""
    self._at, self._width = self._at + self._width + 1, 0

  def close(self) -> None:
    """Closes the file."""
    os.close(self._descriptor)


def here() -> Leg:
  """Returns a leg of this process, at its start."""
  return Leg(process=os.getpid(), host=os.uname().nodename, first=True)


def ask(model_dir: str) -> None:
  """Asks all processes of a run for their stacks (host)."""
  path = Path(model_dir, layout.FLIGHT, layout.ASKED)
  new = path.with_name(f"{layout.ASKED}.{uuid.uuid4().hex}.tmp")
  new.write_text(uuid.uuid4().hex)
  new.replace(path)


def asked(model_dir: str) -> str:
  """Returns the id of the last request; "" if there is none (host)."""
  with contextlib.suppress(OSError, ValueError):
    return Path(model_dir, layout.FLIGHT, layout.ASKED).read_text()[:100]
  return ""


class Pace:
  """Counts the loops of a process: for `Leg.times`, all of them; for `Leg.pace`, the last ones."""

  def __init__(self) -> None:
    self._recent: dict[str, collections.deque[float]] = collections.defaultdict(
      lambda: collections.deque(maxlen=_RECENT)
    )

  def add(self, leg: Leg, steps: int, seconds: float, input_s: float, wait_s: float | None) -> None:
    """Adds a loop to a leg.

    Args:
      steps: how many it had.
      seconds: how long it took, with `input_s` and `wait_s`.
      input_s: its wait for input.
      wait_s: its wait in collectives; None if that is not known, and counts as computing.
    """
    phases = {INPUT: input_s, COMPUTE: max(0.0, seconds - input_s - (wait_s or 0.0))}
    if wait_s is not None:
      phases[COLLECTIVE] = wait_s
    for phase, value in phases.items():
      step_s = value / steps
      self._recent[phase].append(step_s)
      leg.pace[phase] = round(statistics.median(self._recent[phase]), 9)
      counts = leg.times.setdefault(phase, {})
      counts[bucket_of(step_s)] = counts.get(bucket_of(step_s), 0) + steps


def bucket_of(seconds: float) -> str:
  """Returns the number of a bucket, as text, a key of JSON; each is 5 % wide."""
  return str(round(math.log(max(seconds, _LEAST_S), FINEST_S)))


def age_s() -> float:
  """Returns for how long this process has been running; 0 if the system does not say."""
  with contextlib.suppress(OSError, ValueError, IndexError):
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
  return 0.0
