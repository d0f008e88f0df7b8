"""flight/<worker>.jsonl: what each process of a run spent its time on, and what it does now.

One JSON object a line, a leg: from the start of a process to its first save, from a save to the
next one, from the last one to the end. The last line is written again, in place, twice a second. So
what a kill leaves is behind by half a second at most. The legs of a process follow each other
without a gap, and the parts of a leg exclude each other. Imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from loopwright.errors import is_finite
from loopwright.host import bounded, json_lines
from loopwright.run_folder import layout

INPUT, COMPUTE, COLLECTIVE = "input", "compute", "collective"
_LAST_BYTES = 2**16
_FILE = re.compile(r"(\d{1,6})\.jsonl")


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
  pace: dict[str, float] = dataclasses.field(default_factory=dict)
  phase: list[str] = dataclasses.field(default_factory=list)
  unchanged_s: float = 0.0
  beat: int = 0
  doing: str = ""
  ended: str = ""

  @property
  def end(self) -> float:
    """When it ended, in seconds since the epoch."""
    return self.began + sum(self.parts.values())

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


def read(model_dir: str, *, last_bytes: int | None = None) -> dict[int, list[Leg]]:
  """Returns worker -> its legs, oldest first; {} of a run that has no record (host).

  Args:
    last_bytes: read only so many of each file, its last ones.

  Raises:
    ConfigError: a file cannot be read.
  """
  found: dict[int, list[Leg]] = {}
  folder = Path(model_dir, layout.FLIGHT)
  for name in filter(None, map(_FILE.fullmatch, os.listdir(folder) if folder.is_dir() else ())):
    path = str(folder / name[0])
    size = bounded.require_file(path, "a flight record")
    with bounded.reading(path, "move it away to go on without it"), open(path, "rb") as file:
      file.seek(max(0, size - (last_bytes or size)))
      text = file.read()
    if legs := of_lines(text.decode(errors="replace").splitlines()):
      found[int(name[1])] = legs
  return dict(sorted(found.items()))


def of_lines(lines: Iterable[str]) -> list[Leg]:
  """Returns the legs in some lines; leaves out lines that are not legs."""
  return [leg for line in lines if (leg := _leg(json_lines.parsed(line))) is not None]


def last(model_dir: str) -> dict[int, Leg]:
  """Returns worker -> its last leg, from the end of each file; raises as `read` does (host)."""
  return {worker: legs[-1] for worker, legs in read(model_dir, last_bytes=_LAST_BYTES).items()}


def _leg(record: Mapping[str, object] | None) -> Leg | None:
  """Returns the leg of a line; None if a field is not of the type of its default."""
  if record is None or not is_finite(record.get("began")):
    return None
  defaults = vars(Leg(from_step=0))
  known = {name: record[name] for name in defaults if record.get(name) is not None}
  for name, value in known.items():
    wanted = type(defaults[name])
    if not isinstance(value, (float, int) if wanted is float else wanted):
      return None
  leg = Leg(**known)  # type: ignore[arg-type]
  for parts in (leg.parts, leg.pace):
    for name in [name for name, seconds in parts.items() if not is_finite(seconds)]:
      del parts[name]
  return leg


def age_s() -> float:
  """Returns for how long this process has been running; 0 if the system does not say."""
  with contextlib.suppress(OSError, ValueError, IndexError):
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
  return 0.0
