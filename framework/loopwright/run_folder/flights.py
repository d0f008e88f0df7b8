"""Reads flight records, see legs.py: the legs of each worker of a run; imports no TensorFlow."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from loopwright.errors import is_finite
from loopwright.host import bounded, json_lines
from loopwright.run_folder import layout
from loopwright.run_folder.legs import Leg

_MAX_BYTES, _LAST_BYTES = 2**26, 2**16
_REMEDY = "move it away to go on without it"
_FILE = re.compile(r"(\d{1,6})\.jsonl")
_BUCKET = re.compile(r"-?\d{1,3}")


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
