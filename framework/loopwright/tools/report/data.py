"""What a report shows of a run: read as data, in bounded memory, damaged or not."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from loopwright.errors import ConfigError, is_finite
from loopwright.host import bounded
from loopwright.host.json_lines import Record
from loopwright.monitoring import goodput, stragglers
from loopwright.run_folder import folders

VERIFY, MEDIA = "verify.json", "media"
FEW, MOST_POINTS, MOST_OF_ALL, MOST_SHOWN = 4, 2000, 30_000, 6
"""Runs with several pictures; points of a curve, of all runs (100 each at least); pictures."""
_MAX_JSON, _MAX_MEDIUM, _MAX_MEDIA, _MAX_FILES = 2**24, 2**22, 2**25, 10_000
_MEDIUM = re.compile(r"(.+)-(\d{1,18})\.(png|txt)")
_PNG = b"\x89PNG\r\n\x1a\n"
_ABOUT = ("step", "split", "wall_time")
Result = TypeVar("Result")


class Curve:
  """A metric of a split over the steps; of a long one every second, fourth, ... point.

  Attributes:
    steps, minutes, values: lists of equal length; None where a value is not finite.
    every: which points were kept.
  """

  def __init__(self, most: int = MOST_POINTS) -> None:
    self._most = most
    self.steps, self.minutes, self.values = list[int](), list[float](), list[float | None]()
    self.every, self._count = 1, 0

  def add(self, step: int, minute: float, value: float | None) -> None:
    """Adds a point."""
    if self._count % self.every == 0:
      self.steps.append(step)
      self.minutes.append(minute)
      self.values.append(value)
    self._count += 1
    if len(self.steps) > self._most:
      self.every *= 2
      del self.steps[1::2], self.minutes[1::2], self.values[1::2]


class Medium(NamedTuple):
  """A picture (PNG) or a text that a run wrote."""

  step: int
  content: bytes


@dataclasses.dataclass
class Shown:
  """What the page shows of a run.

  Attributes:
    name: what the page calls it.
    run: what `ls` and `diff` know of it; None if it is damaged.
    curves: metric -> split ("train" or "eval") -> curve.
    goodput: where the wall time of all its starts went; None if it has no flight record.
    workers: the rows of `stragglers.HEADS`.
    verify: the report of `verify --json`; {} if there is none.
    media: name -> the newest first, and of few runs earlier ones at even distances.
    starts: the lines of the run's history.
    faults: a line for each thing that cannot be read.
  """

  name: str
  run: folders.Run | None = None
  curves: dict[str, dict[str, Curve]] = dataclasses.field(default_factory=dict)
  goodput: goodput.Goodput | None = None
  workers: list[list[str]] = dataclasses.field(default_factory=list)
  verify: dict[str, Any] = dataclasses.field(default_factory=dict)
  media: dict[str, list[Medium]] = dataclasses.field(default_factory=dict)
  starts: list[Record] = dataclasses.field(default_factory=list)
  faults: list[str] = dataclasses.field(default_factory=list)


def read_all(paths: Sequence[str]) -> list[Shown]:
  """Returns what a report shows of run folders, named without the folder that all are in (host)."""
  tops = {os.path.dirname(os.path.normpath(path)) for path in paths}
  common = os.path.commonpath(tops) if len({os.path.isabs(top) for top in tops}) == 1 else ""
  names = [os.path.relpath(path, common) if len(paths) > 1 and common else path for path in paths]
  return [read(path, name, len(paths)) for path, name in zip(paths, names, strict=True)]


def read(path: str, name: str, of: int = 1) -> Shown:
  """Returns what a report of so many runs shows of one; what is damaged is a fault (host)."""
  shown = Shown(name)
  most, pictures = min(MOST_POINTS, max(100, MOST_OF_ALL // of)), MOST_SHOWN if of <= FEW else 1

  def part(reader: Callable[[], Result], otherwise: Result) -> Result:
    try:
      return reader()
    except (ConfigError, OSError, ValueError, RecursionError) as error:
      shown.faults += [str(error)] if str(error) not in shown.faults else []
      return otherwise

  shown.run = part(lambda: folders.Run(path), None)
  shown.faults += shown.run.unreadable if shown.run else []
  shown.curves = part(lambda: logged(folders.log(path), most), {})
  shown.goodput = part(lambda: goodput.read(path), None)
  shown.workers = part(lambda: stragglers.rows(stragglers.paces(path)), [])
  shown.verify = part(lambda: _verified(os.path.join(path, VERIFY)), {})
  shown.media = part(lambda: _media(os.path.join(path, MEDIA), pictures, shown.faults), {})
  shown.starts = part(lambda: list(folders.starts(path)), [])
  return shown


def logged(log: Iterable[Record], most: int = MOST_POINTS) -> dict[str, dict[str, Curve]]:
  """Returns the curves of a log."""
  curves: dict[str, dict[str, Curve]] = {}
  began: float | None = None
  for record in log:
    split, at = record.get("split"), record.get("wall_time")
    now = float(at) if isinstance(at, int | float) and is_finite(at) else began or 0.0
    began = now if began is None else began
    minute = (now - began) / 60 if is_finite(now - began) else 0.0
    if split in ("train", "eval"):
      for name, value in record.items():
        known = is_finite(value) or value in ("NaN", "Infinity", "-Infinity")
        if known and name not in _ABOUT:
          curve = curves.setdefault(name, {}).setdefault(split, Curve(most))
          curve.add(record["step"], minute, float(value) if is_finite(value) else None)
  return curves


def _verified(path: str) -> dict[str, Any]:
  if not os.path.lexists(path):
    return {}
  remedy = "write it again with `loopwright verify --json`, or move it away"
  with bounded.reading(path, remedy):
    found = json.loads(bounded.content(path, "a file", max_bytes=_MAX_JSON, remedy=remedy))
    results = [each for each in found["results"] if isinstance(each, Mapping)]
  return {"seconds": found.get("seconds"), "results": results}


def _media(top: str, most: int, faults: list[str]) -> dict[str, list[Medium]]:
  names: dict[str, list[tuple[int, str]]] = {}
  for path in _files(top):
    if found := _MEDIUM.fullmatch(os.path.relpath(path, top)):
      names.setdefault(f"{found[1]}.{found[3]}", []).append((int(found[2]), path))
  media: dict[str, list[Medium]] = {}
  left = _MAX_MEDIA
  for name, files in sorted(names.items()):
    for step, path in _spread(sorted(files), most):
      try:
        content = bounded.content(
          path, "a picture or text", max_bytes=min(left, _MAX_MEDIUM), remedy="move it away"
        )
      except ConfigError as error:
        faults.append(str(error))
        continue
      if name.endswith(".png") and not content.startswith(_PNG):
        faults.append(f"{path!r} is no PNG file.")
        continue
      left -= len(content)
      media.setdefault(name, []).append(Medium(step, content))
  return media


def _files(top: str) -> Iterator[str]:
  """Yields the files in a folder, by name; follows no links."""
  found = 0
  for folder, _, files in os.walk(top):
    for file in sorted(files):
      path = os.path.join(folder, file)
      with contextlib.suppress(OSError):
        if not os.path.islink(path) and (found := found + 1) <= _MAX_FILES:
          yield path


def _spread(items: list[tuple[int, str]], most: int) -> list[tuple[int, str]]:
  """Returns so many of them at most, the last first, evenly."""
  count, last = min(len(items), most), len(items) - 1
  return [items[last - index * last // max(count - 1, 1)] for index in range(count)]
