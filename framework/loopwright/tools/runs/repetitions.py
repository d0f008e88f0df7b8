"""What repetitions of a run give: mean, deviation and confidence interval of every metric."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from loopwright.errors import is_finite
from loopwright.run_folder.folders import Run

SEED = "run.seed"
HEADS = ("metric", "mean", "deviation", "95 % interval of the mean", "runs")
_CONFIDENCE = 0.95


def rows(runs: Sequence[Run]) -> Iterator[Sequence[str]]:
  """Yields what `HEADS` names of the last evaluations; of metrics that two runs have.

  The deviation is that of a sample. The interval is by Student's t: right if the values are about
  normally distributed.
  """
  from scipy import stats  # a report, which imports this module, needs neither it nor NumPy

  last = [values for run in runs for values in [*run.evaluations.values()][-1:]]
  for name in dict.fromkeys(name for values in last for name in values):
    numbers = [float(values[name]) for values in last if is_finite(values.get(name))]
    if len(numbers) > 1:
      mean, deviation = statistics.fmean(numbers), statistics.stdev(numbers)
      margin = stats.t.interval(_CONFIDENCE, len(numbers) - 1)[1] * deviation / len(numbers) ** 0.5
      interval = f"{mean - margin:.5g} to {mean + margin:.5g}"
      yield name, f"{mean:.5g}", f"{deviation:.2g}", interval, str(len(numbers))


def alike(runs: Sequence[Run]) -> list[list[Run]]:
  """Returns the groups of runs that differ in the seed alone and have ended, in the runs' order."""
  groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
  for run in runs:
    config = tuple(sorted((n, value) for n, value in run.bindings.items() if n != SEED))
    if config and SEED in run.bindings and run.status() in ("done", "stopped"):
      groups.setdefault(config, []).append(run)
  return [group for group in groups.values() if len({run.bindings[SEED] for run in group}) > 1]
