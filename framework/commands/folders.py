"""Reads run folders as data: runs nothing of them, imports no TensorFlow, in bounded memory."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from framework.backend import bounded, stores
from framework.errors import ConfigError, is_finite, suggest

METRICS, HISTORY, CONFIG = "metrics.jsonl", "history.jsonl", "operative_config.gin"
OWNER, REPORT, CHECKPOINTS = "owner.json", "nonfinite/report.txt", "checkpoints"
BEAT_S = 20.0
"""A run touches owner.json every 5 s; one that has not for so long does not run."""
DEPTH = 4
"""How many levels below a folder run folders are looked for."""
_MAX_BYTES, _MAX_LINE = 2**26, 2**20
_CHECKPOINT = re.compile(r"ckpt-(\d+)\.index")
_BINDING = re.compile(r"^(\S+) = (.*)$", re.MULTILINE)
_STRING = re.compile(r"(['\"])(.*)\1")
_GOALS = ("BestCheckpoint", "EarlyStopping", "Export")
_ABOUT = ("step", "split", "wall_time")

Record = dict[str, Any]


class Best(NamedTuple):
  """The best evaluation: its metric, value and step."""

  metric: str
  value: float
  step: int

  def __str__(self) -> str:
    """Returns it as `ls` shows it."""
    return f"{self.metric} {self.value:.4g} @{self.step}"


class Run:
  """A run folder, read once.

  Attributes:
    path: the folder.
    step: of the newest checkpoint or line of the log; 0 if there is none.
    evaluations: the last evaluation of each step, by step, oldest first.
    bindings: name -> value as gin writes it.
    start: the last line of history.jsonl; {} if there is none.
  """

  def __init__(self, path: str) -> None:
    """Reads the folder.

    Raises:
      ConfigError: it is no run folder, or a file in it is damaged.
    """
    if not is_run(path):
      raise _no_run(path)
    self.path = path
    self.start = _last_start(path)
    self.bindings = _bindings(path) or texts(self.start.get("config"))
    last, self.evaluations = _logged(os.path.join(path, METRICS))
    self.step = max(last, _newest_checkpoint(path))

  @property
  def train_steps(self) -> int | None:
    """The steps that the run is to have."""
    value = self.bindings.get("run.train_steps", "")
    return int(value) if value.isdecimal() and len(value) < 20 else None

  def status(self) -> str:
    """Returns "running", "failed", "done" or "stopped", as far as the folder tells (host).

    A run that ends removes owner.json: one that is there and silent was killed.
    """
    owner = os.path.join(self.path, OWNER)
    with contextlib.suppress(OSError):
      silent_s = time.time() - os.stat(owner).st_mtime
      return "running" if silent_s < BEAT_S else "failed"
    if self.train_steps is not None and self.step >= self.train_steps:
      return "done"
    return "failed" if os.path.exists(os.path.join(self.path, REPORT)) else "stopped"

  def best(self) -> Best | None:
    """Returns the best evaluation: by the config's actions, else by accuracy, else by loss."""
    metric, sign = self._goal()
    found = [
      Best(metric, float(values[metric]), step)
      for step, values in self.evaluations.items()
      if is_finite(values.get(metric))
    ]
    return max(found, key=lambda each: sign * each.value, default=None)

  def _goal(self) -> tuple[str, int]:
    for action in _GOALS:
      if metric := _STRING.fullmatch(self.bindings.get(f"{action}.metric", "")):
        return metric[2], -1 if "min" in self.bindings.get(f"{action}.mode", "") else 1
    known = {name for values in self.evaluations.values() for name in values}
    return ("accuracy", 1) if "accuracy" in known else ("loss", -1)

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


def local(top: str) -> str:
  """Returns a folder itself; of a URL, a local copy for this process (host).

  The copy has the texts and pictures that tell about runs. Of other files it has the size alone.

  Raises:
    ConfigError: the store cannot be reached.
  """
  if not stores.is_url(top):
    return top
  copy = tempfile.mkdtemp(prefix="loopwright-")
  atexit.register(shutil.rmtree, copy, ignore_errors=True)
  store, folder = stores.Store(top), os.path.join(copy, top.rstrip("/").rpartition("/")[2])
  with stores.reading(top):
    found = {name: file for name, file in store.files().items() if _is_safe(name)}
    if not found:
      raise FileNotFoundError
    store.get_all([name for name, file in found.items() if _is_told(name, file)], folder)
  for name, file in found.items():
    path = Path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, file.size)
    os.utime(path, (file.modified, file.modified))
  return folder


def _is_safe(name: str) -> bool:
  return not {"", ".", ".."} & set(name.split("/"))


def _is_told(name: str, file: stores.File) -> bool:
  told = (METRICS, HISTORY, CONFIG, OWNER, REPORT, "verify.json")
  return file.size <= _MAX_BYTES and (name.endswith(told) or "media/" in name)


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
  for folder in sorted(each.path for each in inside if not each.name.startswith(".")):
    if depth:
      yield from find(folder, depth - 1)


def log(path: str) -> Iterator[Record]:
  """Yields the records of a run's log in its order; skips unreadable lines (host).

  Raises:
    ConfigError: the log is no file, or cannot be read.
  """
  for line in _lines(os.path.join(path, METRICS)):
    record = _parsed(line)
    if record is not None and _is_step(record.get("step")):
      yield record


def starts(path: str) -> Iterator[Record]:
  """Yields how each process that trained here was started; skips unreadable lines (host).

  Raises:
    ConfigError: the history is no file, or cannot be read.
  """
  for line in _content(os.path.join(path, HISTORY)).splitlines():
    if record := _parsed(line):
      yield record


def texts(values: object) -> dict[str, str]:
  """Returns the pairs of texts in what JSON gave; {} if that is no object."""
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
  return bounded.content(path, "a file", max_bytes=_MAX_BYTES, remedy=remedy).decode(
    errors="replace"
  )


def _last_start(path: str) -> Record:
  lines = _content(os.path.join(path, HISTORY)).splitlines()
  record = _parsed(lines[-1]) if lines else {}
  if record is None:
    raise ConfigError(f"{os.path.join(path, HISTORY)!r} is damaged; restore it, or move it away.")
  return record


def _bindings(path: str) -> dict[str, str]:
  return {found[1]: found[2] for found in _BINDING.finditer(_content(os.path.join(path, CONFIG)))}


def _logged(path: str) -> tuple[int, dict[int, Record]]:
  """Returns the last step of a log, and its evaluations; skips unreadable lines."""
  last, evaluations = b"", dict[int, Record]()
  for line in _lines(path):
    last = line if line.endswith(b"\n") else last
    record = _parsed(line) if b'"eval"' in line else None
    if record is not None and _is_step(record.get("step")) and record.get("split") == "eval":
      values = {name: value for name, value in record.items() if name not in _ABOUT}
      evaluations[record["step"]] = values
  found: Any = (_parsed(last) or {}).get("step")
  step = int(found) if _is_step(found) else max(evaluations, default=0)
  return step, dict(sorted(evaluations.items()))


def _is_step(value: object) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _lines(path: str) -> Iterator[bytes]:
  """Yields the lines of a log, none longer than it may be."""
  if not os.path.lexists(path):
    return
  bounded.require_file(path, "a log")
  with bounded.reading(path, "move it away"), open(path, "rb") as file:
    yield from iter(lambda: file.readline(_MAX_LINE), b"")


def _parsed(line: str | bytes) -> Record | None:
  with contextlib.suppress(ValueError, RecursionError):
    record = json.loads(line)
    return record if isinstance(record, dict) else None
  return None


def _newest_checkpoint(path: str) -> int:
  with contextlib.suppress(OSError):
    names = os.listdir(os.path.join(path, CHECKPOINTS))
    return max((int(found[1]) for found in map(_CHECKPOINT.fullmatch, names) if found), default=0)
  return 0
