"""What repetitions of a run give: mean, deviation and confidence interval of every metric."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from framework.errors import is_finite
from framework.run_folder.folders import Run

SEED = "run.seed"
HEADS = ("metric", "mean", "deviation", "95 % interval of the mean", "runs")
_CONFIDENCE = 0.95


class Spread(NamedTuple):
  """How a metric differs between repetitions.

  Attributes:
    runs: how many have it, at least 2.
    mean: of them.
    deviation: their standard deviation, as of a sample (divided by `runs` - 1).
    margin: half of the interval that holds the true mean with a confidence of 95 %, by Student's t:
      right if the values are about normally distributed.
  """

  runs: int
  mean: float
  deviation: float
  margin: float


def spread(values: Sequence[float]) -> Spread:
  """Returns how at least two numbers differ."""
  count, deviation = len(values), statistics.stdev(values)
  margin = quantile(count - 1) * deviation / math.sqrt(count)
  return Spread(count, statistics.fmean(values), deviation, margin)


def quantile(freedom: int) -> float:
  """Returns t so that Student's variable of so many degrees of freedom is in [-t, t] at 95 %."""
  low, high = 0.0, math.pi / 2
  for _ in range(60):
    middle = (low + high) / 2
    low, high = (low, middle) if _inside(middle, freedom) > _CONFIDENCE else (middle, high)
  return math.sqrt(freedom) * math.tan(low)


def _inside(angle: float, freedom: int) -> float:
  """Returns P(|t| < sqrt(freedom) * tan(angle)): Abramowitz and Stegun, 26.7.3 and 26.7.4."""
  odd = freedom % 2
  term = math.sin(angle) * (math.cos(angle) if odd else 1.0)
  total = 0.0
  for index in range(1, freedom // 2 + 1):
    total += term
    term *= math.cos(angle) ** 2 * (2 * index - 1 + odd) / (2 * index + odd)
  return 2 / math.pi * (angle + total) if odd else total


def spreads(runs: Sequence[Run]) -> dict[str, Spread]:
  """Returns metric -> spread of the runs' last evaluations; of those that two runs have."""
  last = [values for run in runs for values in [*run.evaluations.values()][-1:]]
  found = {}
  for name in dict.fromkeys(name for values in last for name in values):
    numbers = [float(values[name]) for values in last if is_finite(values.get(name))]
    if len(numbers) > 1:
      found[name] = spread(numbers)
  return found


def rows(found: Mapping[str, Spread]) -> Iterator[Sequence[str]]:
  """Yields what `HEADS` names of each metric."""
  for name, each in found.items():
    low, high = each.mean - each.margin, each.mean + each.margin
    interval = f"{low:.5g} to {high:.5g}"
    yield name, f"{each.mean:.5g}", f"{each.deviation:.2g}", interval, str(each.runs)


def alike(runs: Sequence[Run]) -> list[list[Run]]:
  """Returns the groups of runs that differ in the seed alone and have ended, in the runs' order."""
  groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
  for run in runs:
    config = tuple(sorted((n, value) for n, value in run.bindings.items() if n != SEED))
    if config and SEED in run.bindings and run.status() in ("done", "stopped"):
      groups.setdefault(config, []).append(run)
  return [group for group in groups.values() if len({run.bindings[SEED] for run in group}) > 1]
