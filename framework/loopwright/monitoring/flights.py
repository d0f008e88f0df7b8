"""Reads flight records, see record.py: the legs of each worker of a run, and how fast it is alone.

In synchronous training all workers take the same time for a loop. The phases show which one is
slow: it computes, or waits for its input, while the others wait for it in the collective. Imports
no TensorFlow.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from loopwright.errors import is_finite
from loopwright.host import bounded, json_lines
from loopwright.monitoring.record import COLLECTIVE, COMPUTE, FINEST_S, INPUT, Leg, bucket_of
from loopwright.run_folder import layout

_LAST_BYTES = 2**16
_REMEDY = "move it away to go on without it"
_FILE = re.compile(r"(\d{1,6})\.jsonl")
_BUCKET = re.compile(r"-?\d{1,3}")
RATIO, NOTABLE = 1.3, 0.05
"""A worker is slow at so many times the others' time, if that is so much of a step."""
HEADS = ("worker", "phase", "p50, ms", "p99, ms", "slowest, ms")


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
    path = str(folder / name[0])
    size = bounded.require_file(path, "a flight record")
    with bounded.reading(path, _REMEDY), open(path, "rb") as file:
      file.seek(max(0, size - (last_bytes or size)))
      text = file.read()
    if legs := of_lines(text.decode(errors="replace").splitlines()):
      found[int(name[1])] = legs
  return dict(sorted(found.items()))


def of_lines(lines: Iterable[str]) -> list[Leg]:
  """Returns the legs in some lines; leaves out lines that are not legs."""
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


class Times(NamedTuple):
  """Seconds of a step in one phase: median, 99th percentile and maximum, accurate to 2.5 %."""

  p50: float
  p99: float
  slowest: float


def times(worker: Iterable[Leg]) -> dict[str, Times]:
  """Returns phase -> times of a worker's steps, each that of the mean step of its loop."""
  counted: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
  for leg in worker:
    for phase, counts in leg.times.items():
      counted[phase].update({int(bucket): steps for bucket, steps in counts.items()})
  return {phase: Times(*_quantiles(counts)) for phase, counts in counted.items()}


def _quantiles(counts: Mapping[int, int]) -> Iterable[float]:
  """Yields the median, the 99th percentile and the largest of counted seconds."""
  for share in (0.5, 0.99, 1.0):
    left = share * sum(counts.values())
    for bucket in sorted(counts):
      left -= counts[bucket]
      if left <= 1e-9:
        yield 0.0 if bucket <= int(bucket_of(0)) else FINEST_S**bucket
        break


def rows(workers: Mapping[int, Iterable[Leg]]) -> list[list[str]]:
  """Returns a row of text for each worker and phase, as `HEADS` says."""
  return [
    [str(worker), phase, *(f"{1e3 * each:.3g}" for each in found)]
    for worker, legs in workers.items()
    for phase, found in times(legs).items()
  ]


def table(workers: Mapping[int, Iterable[Leg]]) -> str:
  """Returns the lines to print; "" if there is nothing to tell."""
  found = rows(workers)
  columns = list(zip(HEADS, *found, strict=True))
  widths = [max(map(len, column)) for column in columns]
  lines = [
    "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    for row in ([list(HEADS), *found] if found else [])
  ]
  return "\n".join(["a step of each worker:", *lines] if lines else [])


class Slow(NamedTuple):
  """A worker that the others wait for.

  Attributes:
    phase: in which it differs most.
    own_s, usual_s: seconds of a step before the collective; of this worker, and the others' median.
    step_s: seconds of a step.
  """

  worker: int
  phase: str
  own_s: float
  usual_s: float
  step_s: float

  @property
  def better_s(self) -> float:
    """The seconds of a step if this worker were as fast as the others; see docs/scaling.md."""
    return self.step_s - (self.own_s - self.usual_s)


def slow(paces: Mapping[int, Mapping[str, float]], *, ratio: float = RATIO) -> Slow | None:
  """Returns the slowest worker if it is `ratio` times slower than the median of the others.

  Args:
    paces: worker -> phase -> seconds of a step.
    ratio: see there.
  """
  if len(paces) < 2 or not all(paces.values()):
    return None
  apart = all(COLLECTIVE in pace for pace in paces.values())
  phases = (INPUT, COMPUTE) if apart else (INPUT,)
  own = {w: sum(pace.get(phase, 0.0) for phase in phases) for w, pace in paces.items()}
  worker = max(own, key=own.__getitem__)
  others = [pace for other, pace in paces.items() if other != worker]
  usual_s = statistics.median(own[other] for other in own if other != worker)
  step_s = max(sum(pace.values()) for pace in paces.values())
  if own[worker] < ratio * usual_s or own[worker] - usual_s < NOTABLE * step_s:
    return None

  def more_s(phase: str) -> float:
    return paces[worker].get(phase, 0.0) - statistics.median(o.get(phase, 0.0) for o in others)

  return Slow(worker, max(phases, key=more_s), own[worker], usual_s, step_s)
