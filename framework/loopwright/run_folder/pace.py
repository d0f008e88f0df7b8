"""Counts how fast this process is, for its flight record; paces.py compares all workers."""

from __future__ import annotations

import collections
import math
import statistics

from loopwright.run_folder.legs import Leg

INPUT, COMPUTE, COLLECTIVE = "input", "compute", "collective"
FINEST_S, _LEAST_S = 1.05, 1e-6
_RECENT = 9


class Pace:
  """Counts the loops of a process: for `Leg.times`, all of them; for `Leg.pace`, the last ones."""

  def __init__(self) -> None:
    """Starts without loops."""
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
