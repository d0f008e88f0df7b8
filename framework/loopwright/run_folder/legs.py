"""flight/<worker>.jsonl: where the time of each process of a run went, and what it does now.

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

BEGAN = "LOOPWRIGHT_BEGAN"
"""The variable that tells the first processes of a local cluster when its own process began."""
HANG, STACKS = "hang", "stacks"
"""Why a process asks all for their stacks."""
_MAX_BYTES, _LAST_BYTES = 2**26, 2**16
_REMEDY = "move it away to go on without it"
_FILE = re.compile(r"(\d{1,6})\.jsonl")
_BUCKET = re.compile(r"-?\d{1,3}")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass
class Leg:
  """A part of a process's time.

  Attributes:
    process: its number on `host`, which started (`boot`) once and made it at `ticks`.
    began: seconds since the epoch.
    parts: name -> seconds.
    first: whether the process began with it.
    from_step, step: completed steps at its start, None before the restore, and now.
    loops: the loops that the process has begun.
    traced: steps of loops that were traced; their time is the part "tracing".
    saved: whether it ended with a save of `step`.
    times: phase of a step -> bucket of seconds -> steps; see paces.py.
    pace: phase -> seconds of a step, the median of the last loops.
    phase: what the process did when the line was written, the innermost last.
    unchanged_s: since when, or since its last sign of progress.
    beat: counts up while the process lives.
    doing: what a hang, or a question for stacks, has found out about `phase`.
    ended: "done", "preempted" or "failed"; "" before the end, and after a kill.
  """

  process: int = 0
  host: str = ""
  boot: str = ""
  ticks: int = 0
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
  return Leg(
    process=os.getpid(), host=os.uname().nodename, boot=boot(), ticks=ticks(os.getpid()), first=True
  )


def boot() -> str:
  """Returns what this machine calls the time since it was started; "" if it does not say."""
  return _BOOT.read_text().strip() if _BOOT.exists() else ""


def ticks(process: int) -> int:
  """Returns when a process of this machine began, in ticks since the machine did; 0 if unknown."""
  with contextlib.suppress(OSError, ValueError, IndexError):
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
  return 0


def age_s() -> float:
  """Returns for how long this process has been running; 0 if the system does not say.

  Of the first processes of a local cluster, for how long what started them has.
  """
  if told := os.environ.get(BEGAN):
    return time.time() - float(told)
  began = ticks(os.getpid())
  if not began:
    return 0.0
  return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")


def read(model_dir: str, *, last_bytes: int | None = None) -> dict[int, list[Leg]]:
  """Returns worker -> its legs, oldest first; {} of a run that has no record (host).

  Args:
    last_bytes: read only so many of each file, its last ones.

  Raises:
    ConfigError: a file cannot be read.
  """
  found: dict[int, list[Leg]] = {}
  folder = Path(model_dir, layout.FLIGHT)
  names = (_FILE.fullmatch(each) for each in os.listdir(folder)) if folder.is_dir() else ()
  for name in filter(None, names):
    with bounded.Reader(str(folder / name[0]), "a flight record", _REMEDY) as file:
      if last_bytes is None:
        bounded.require_bytes(file.path, file.size or 0, _MAX_BYTES)
      file.seek(max(0, (file.size or 0) - (last_bytes or _MAX_BYTES)))
      text = file.read(_MAX_BYTES)
    if legs := of_lines(text.decode(errors="replace").splitlines()):
      found[int(name[1])] = legs
  return dict(sorted(found.items()))


def of_lines(lines: Iterable[str]) -> list[Leg]:
  """Returns the legs that lines tell; leaves out those that are none."""
  return [leg for line in lines if (leg := _leg(json_lines.parsed(line))) is not None]


def last(model_dir: str) -> dict[int, Leg]:
  """Returns worker -> its last leg, from the end of each file (host).

  Raises:
    ConfigError: a file cannot be read.
  """
  return {worker: legs[-1] for worker, legs in read(model_dir, last_bytes=_LAST_BYTES).items()}


def starts(worker: Iterable[Leg]) -> list[list[Leg]]:
  """Returns the legs of each process, of those of one worker."""
  starts: list[list[Leg]] = []
  for leg in worker:
    if leg.first or not starts:
      starts.append([])
    starts[-1].append(leg)
  return starts


def ask(model_dir: str, why: str) -> None:
  """Asks all processes of a run for their stacks (host)."""
  path = Path(model_dir, layout.FLIGHT, layout.ASKED)
  new = path.with_name(f"{layout.ASKED}.{uuid.uuid4().hex}.tmp")
  new.write_text(f"{why} {uuid.uuid4().hex}")
  new.replace(path)


def asked(model_dir: str) -> str:
  """Returns what was last asked, and an id of it; "" if nothing was (host)."""
  with contextlib.suppress(OSError, ValueError):
    return Path(model_dir, layout.FLIGHT, layout.ASKED).read_text()[:100]
  return ""


_FIELDS = dataclasses.fields(Leg)


def _leg(record: Mapping[str, object] | None) -> Leg | None:
  if record is None or not is_finite(record.get("began")):
    return None
  default = Leg()
  known = {each.name: record[each.name] for each in _FIELDS if each.name in record}
  for name, value in known.items():
    wanted = int if name == "from_step" else type(getattr(default, name))
    fits = (wanted, int) if wanted is float else wanted
    if not (isinstance(value, fits) or (name == "from_step" and value is None)):
      return None
  leg = Leg(**known)  # type: ignore[arg-type]
  leg.parts = {name: float(each) for name, each in leg.parts.items() if is_finite(each)}
  leg.pace = {name: float(each) for name, each in leg.pace.items() if is_finite(each)}
  leg.times = {name: _counts(each) for name, each in leg.times.items() if isinstance(each, dict)}
  return leg


def _counts(record: Mapping[str, object]) -> dict[str, int]:
  """Returns bucket -> steps, without what is none."""
  return {
    name: count
    for name, count in record.items()
    if _BUCKET.fullmatch(name) and isinstance(count, int) and count > 0
  }
