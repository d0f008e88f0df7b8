"""How fast each worker of a run is by itself, and which one the others wait for.

In synchronous training all workers take the same time for a loop. The phases show which one is
slow: it computes, or waits for its input, while the others wait for it in the collective. Imports
no TensorFlow.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import NamedTuple

from loopwright.monitoring import record
from loopwright.monitoring.record import COLLECTIVE, COMPUTE, INPUT

RATIO, NOTABLE = 1.3, 0.05
"""A worker is slow at so many times the others' time, if that is so much of a step."""
HEADS = ("worker", "phase", "ms")
Paces = Mapping[int, Mapping[str, float]]
"""Worker -> phase -> seconds of a step, the median of its last loops."""


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

  def __str__(self) -> str:
    ratio = f"{self.own_s / self.usual_s:.1f} times" if self.usual_s else "above"
    return (
      f"worker {self.worker} is slow, mostly in {self.phase}: a step of it takes "
      f"{1e3 * self.own_s:.3g} ms before the collective, {ratio} the others' "
      f"{1e3 * self.usual_s:.3g} ms; all wait for it, and without that would take "
      f"{100 * (1 - self.better_s / self.step_s):.0f} % less"
    )


def paces(model_dir: str) -> Paces:
  """Returns the times of a run's workers so far; raises as `record.read` does (host)."""
  return {worker: leg.pace for worker, leg in record.last(model_dir).items()}


def rows(found: Paces) -> list[list[str]]:
  """Returns a row of text for each worker and phase, as `HEADS` says."""
  return [
    [str(worker), phase, f"{1e3 * seconds:.3g}"]
    for worker, pace in found.items()
    for phase, seconds in pace.items()
  ]


def table(found: Paces) -> str:
  """Returns the lines to print, and one about a slow worker; "" if there is nothing to tell."""
  lines = [f"{worker:>8}  {phase:>10}  {ms:>8}" for worker, phase, ms in (HEADS, *rows(found))]
  slowest = slow(found)
  said = ["a step of each worker:", *lines, *([str(slowest)] if slowest else [])]
  return "\n".join(said) if lines[1:] else ""


def slow(found: Paces) -> Slow | None:
  """Returns the slowest worker if it is `RATIO` times slower than the median of the others."""
  if len(found) < 2 or not all(found.values()):
    return None
  apart = all(COLLECTIVE in pace for pace in found.values())
  phases = (INPUT, COMPUTE) if apart else (INPUT,)
  own = {w: sum(pace.get(phase, 0.0) for phase in phases) for w, pace in found.items()}
  worker = max(own, key=own.__getitem__)
  others = [other for other in found if other != worker]
  usual_s = statistics.median(own[other] for other in others)
  step_s = max(sum(pace.values()) for pace in found.values())
  if own[worker] < RATIO * usual_s or own[worker] - usual_s < NOTABLE * step_s:
    return None

  def more_s(phase: str) -> float:
    usual = statistics.median(found[other].get(phase, 0.0) for other in others)
    return found[worker].get(phase, 0.0) - usual

  return Slow(worker, max(phases, key=more_s), own[worker], usual_s, step_s)
