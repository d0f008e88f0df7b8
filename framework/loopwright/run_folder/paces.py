"""How fast each worker is by itself: the seconds of a step in its phases, in its flight record.

In synchronous training all workers take the same time for a loop; who is slow is seen from the
phases: it computes, or waits for its input, while the others wait for it in the collective. Imports
no TensorFlow.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from loopwright.run_folder.legs import COLLECTIVE, COMPUTE, FINEST_S, INPUT, Leg, bucket_of

RATIO, NOTABLE = 1.3, 0.05
"""A worker is slow at so many times the others' time, if that is so much of a step."""
HEADS = ("worker", "phase", "p50, ms", "p99, ms", "slowest, ms")


class Times(NamedTuple):
  """Seconds of a step in one phase: of half of the steps, of 99 %, of all at most; to 2.5 %."""

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
    """The seconds of a step if this worker were as the others, as docs/scaling.md has it."""
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
