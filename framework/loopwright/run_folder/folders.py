"""Reads run folders as data: runs no code of them, imports no TensorFlow, uses bounded memory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from loopwright import registry
from loopwright.errors import ConfigError, is_finite, suggest
from loopwright.host import bounded, json_lines, urls
from loopwright.host.json_lines import Record
from loopwright.run_folder import layout

METRICS, HISTORY, CONFIG = layout.METRICS, layout.HISTORY, layout.CONFIG
OWNER, REPORT, CHECKPOINTS = layout.OWNER, f"{layout.NONFINITE}/report.txt", layout.CHECKPOINTS
DEPTH = 4
"""How many levels below a folder run folders are looked for."""
_MAX_LINE = 2**20
_BINDING = re.compile(r"^(\S+) = (.*)$", re.MULTILINE)
_STRING = re.compile(r"(['\"])(.*)\1")
_GOALS = ("BestCheckpoint", "EarlyStopping", "Export")
_ABOUT = ("step", "split", "wall_time")

Result = TypeVar("Result")


class Best(NamedTuple):
  """The best evaluation: its metric, value and step, and what is best: "max" or "min"."""

  metric: str
  value: float
  step: int
  mode: str

  def place(self) -> tuple[str, float]:
    """Returns a sort key, the best first; by metric if these differ."""
    return self.metric, -self.value if self.mode == "max" else self.value

  def __str__(self) -> str:
    """Returns it as `ls` shows it."""
    return f"{self.metric} {self.value:.4g} @{self.step}"


class Run:
  """A run folder, read once. What cannot be read is left out.

  Attributes:
    path: the folder.
    step: of the newest checkpoint or line of the log; 0 if there is none.
    evaluations: the last evaluation of each step, by step, oldest first.
    config: the text of the config.
    bindings: name -> value as gin writes it.
    starts: the lines of history.jsonl that can be read, oldest first.
    start: the last of them; {} if there is none.
    unreadable: a line for each file that is none, or cannot be read.
  """

  def __init__(self, path: str) -> None:
    """Reads the folder.

    Raises:
      ConfigError: it is no run folder.
    """
    if not is_run(path):
      raise _no_run(path)
    self.path = path
    self.unreadable: list[str] = []
    nothing: list[Record] = []
    self.starts = self._read(lambda: [*starts(path)], nothing)
    self.start = self.starts[-1] if self.starts else {}
    self.config = self._read(lambda: _content(os.path.join(path, CONFIG)), "")
    bindings = {found[1]: found[2] for found in _BINDING.finditer(self.config)}
    self.bindings = bindings or texts(self.start.get("config"))
    no_log: tuple[int, dict[int, Record]] = 0, {}
    logged, self.evaluations = self._read(lambda: _logged(path), no_log)
    self.step = max(logged, *layout.checkpoint_steps(path), 0)

  def _read(self, reader: Callable[[], Result], otherwise: Result) -> Result:
    try:
      return reader()
    except ConfigError as error:
      self.unreadable += [str(error)] if str(error) not in self.unreadable else []
      return otherwise

  def faults(self, name: str) -> list[str]:
    """Returns `unreadable`, with what the user calls the folder in place of its path."""
    return [fault.replace(self.path, name) for fault in self.unreadable]

  def values(self, part: str) -> dict[str, str]:
    """Returns name -> value of a part of the history: "config", "data", "versions" or "commit".

    One that has changed in the middle is told whole, such as "3.1; from step 40: 3.2".
    """
    told: dict[str, str] = {}
    before: dict[str, str] = {}
    for start in self._in_force():
      now = texts(start.get(part)) or texts({part: start.get(part)})
      if part == "data":  # a start that only trains reads no evaluation examples
        now = {**before, **now}
      at = f"; from step {_step(start)}: "
      changed = {n for n in {*now, *before} if now.get(n) != before.get(n)} if before else set(now)
      for name in changed:
        value = now.get(name, "-")
        told[name] = f"{told.get(name, '-')}{at}{value}" if before else value
      before = now
    return told

  def _in_force(self) -> list[Record]:
    """Returns the starts whose steps count: a later one that began before them made them anew."""
    kept: list[Record] = []
    for start in self.starts:
      kept = [*(each for each in kept if _step(each) < _step(start)), start]
    return kept

  @property
  def train_steps(self) -> int | None:
    """The step at which the run ends."""
    of_start = self.start.get("train_steps")  # of a run that Python started
    return self.whole_number("run.train_steps") or (of_start if isinstance(of_start, int) else None)

  def whole_number(self, name: str) -> int | None:
    """Returns the value of a binding, if it is a whole number."""
    value = self.bindings.get(name, "")
    return int(value) if value.isdecimal() and len(value) < 20 else None

  def status(self) -> str:
    """Returns "running", "failed", "done" or "stopped", as far as the folder shows it (host).

    A run that ends removes owner.json: one that is there without the lock was killed.
    """
    if self.is_running():
      return "running"
    if self.is_at_end() and not os.path.exists(os.path.join(self.path, OWNER)):
      return "done"
    failed = (os.path.join(self.path, name) for name in (OWNER, REPORT))
    return "failed" if any(map(os.path.exists, failed)) else "stopped"

  def is_running(self) -> bool:
    """Whether a process trains in it, and so holds its lock."""
    with contextlib.suppress(OSError), open(os.path.join(self.path, layout.LOCK), "rb") as file:
      try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
      except BlockingIOError:
        return True
    return False

  def is_at_end(self) -> bool:
    """Whether it has all its steps."""
    return self.train_steps is not None and self.step >= self.train_steps

  def best(self) -> Best | None:
    """Returns the best evaluation: by the config's actions, else by accuracy, else by loss."""
    metric, mode = self._goal()
    found = [
      Best(metric, float(values[metric]), step, mode)
      for step, values in self.evaluations.items()
      if is_finite(values.get(metric))
    ]
    return min(found, key=Best.place, default=None)

  def _goal(self) -> tuple[str, str]:
    for action in _GOALS:
      if metric := _STRING.fullmatch(self.bindings.get(f"{action}.metric", "")):
        mode = _STRING.fullmatch(self.bindings.get(f"{action}.mode", ""))
        return metric[2], mode[2] if mode else direction(metric[2]) or "max"
    known = {name for values in self.evaluations.values() for name in values}
    return ("accuracy", "max") if "accuracy" in known else ("loss", "min")

  def changed(self) -> float:
    """Returns when the newest of its files was written, in seconds since the epoch."""
    times = [os.stat(self.path).st_mtime]
    for name in (METRICS, HISTORY, OWNER, CHECKPOINTS):
      with contextlib.suppress(OSError):
        times.append(os.stat(os.path.join(self.path, name)).st_mtime)
    return max(times)

  def size(self) -> int:
    """Returns the bytes of all files in it; follows no links."""
    total = 0
    for folder, _, files in os.walk(self.path):
      for file in files:
        with contextlib.suppress(OSError):
          total += os.lstat(os.path.join(folder, file)).st_size
    return total


def direction(metric: str) -> str:
  """Returns what is best: "min" of a loss, "max" of an accuracy, "" of what has another name."""
  return "min" if metric.endswith("loss") else "max" if metric.endswith("accuracy") else ""


def local(top: str) -> str:
  """Returns a folder itself; of a URL, a local copy without weights (host)."""
  return registry.load("part", "local_copy")(top, weights=False) if urls.is_url(top) else top


def is_run(path: str) -> bool:
  """Whether a folder has a file that only runs write."""
  return any(os.path.exists(os.path.join(path, name)) for name in (METRICS, HISTORY, CONFIG))


def find(top: str, depth: int = DEPTH) -> Iterator[str]:
  """Yields the run folders in `top`, or `top` itself, by name; none in another or in a hidden one.

  Raises:
    ConfigError: `top` is no folder, or cannot be read.
  """
  if is_run(top):
    yield top
    return
  try:
    inside = [each for each in os.scandir(top) if each.is_dir(follow_symlinks=False)]
  except (OSError, ValueError) as error:
    raise bounded.unreadable(top, error, "give a folder of runs") from error
  for folder in sorted(
    (each.path for each in inside if not each.name.startswith(".")), key=natural
  ):
    if depth:
      yield from find(folder, depth - 1)


def natural(name: str) -> list[str | int]:
  """Returns a sort key of names, by their numbers: r2 before r10."""
  parts = re.split(r"(\d{1,18})", name)
  return [int(part) if index % 2 else part for index, part in enumerate(parts)]


def log(path: str) -> Iterator[Record]:
  """Yields the records of a run's log in its order; skips unreadable lines (host).

  Raises:
    ConfigError: the log is no file, or cannot be read.
  """
  for line in _lines(os.path.join(path, METRICS)):
    if record := json_lines.of_a_step(line):
      yield record


def starts(path: str) -> Iterator[Record]:
  """Yields how each process that trained here was started; skips unreadable lines (host).

  Raises:
    ConfigError: the history is no file, or cannot be read.
  """
  for line in _content(os.path.join(path, HISTORY)).splitlines():
    if record := json_lines.parsed(line):
      yield record


def _step(start: Record) -> int:
  step = start.get("step")
  return step if isinstance(step, int) else 0


def texts(values: object) -> dict[str, str]:
  """Returns the pairs of texts in a JSON value; {} if it is not an object."""
  pairs = values.items() if isinstance(values, Mapping) else ()
  return {name: value for name, value in pairs if isinstance(value, str)}


def _no_run(path: str) -> ConfigError:
  beside = Path(path).parent
  with contextlib.suppress(OSError, ValueError):
    hint = suggest(Path(path).name, (each.name for each in beside.iterdir() if is_run(str(each))))
    return ConfigError(
      f"{path!r} is no run folder.{hint or f' It must have {METRICS} or {CONFIG}.'}"
    )
  return ConfigError(f"{path!r} is no run folder. It must have {METRICS} or {CONFIG}.")


def _content(path: str) -> str:
  """Returns the text of a file; "" if there is none."""
  if not os.path.lexists(path):
    return ""
  remedy = "move it away to go on without it"
  return bounded.content(path, "a file", remedy=remedy).decode(errors="replace")


def _logged(path: str) -> tuple[int, dict[int, Record]]:
  """Returns the last step of a run's log, and its evaluations."""
  last, evaluations = 0, dict[int, Record]()
  for record in log(path):
    last = record["step"]
    if record.get("split") == "eval":
      evaluations[last] = {name: value for name, value in record.items() if name not in _ABOUT}
  return last, dict(sorted(evaluations.items()))


def _lines(path: str) -> Iterator[bytes]:
  """Yields the lines of a log, none longer than it may be."""
  if not os.path.lexists(path):
    return
  bounded.require_file(path, "a log")
  with bounded.reading(path, "move it away"), open(path, "rb") as file:
    yield from iter(lambda: file.readline(_MAX_LINE), b"")
