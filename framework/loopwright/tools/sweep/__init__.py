"""`loopwright sweep my.gin --vary '...'`: searches for the best bindings, by Optuna.

    space.py    what varies: --vary -> bindings, checked as the config is
    study.py    Optuna's study: which trial is next, what each gave; survives a kill
    jobs.py     trials as processes of `loopwright train`, on a part of the cores or GPUs each
    runner.py   starts, watches, prunes and ends trials
    results.py  the table, best.gin

docs/sweeps.md describes it. This module imports nothing heavy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from loopwright.errors import ConfigError, Preempted, first_line

if TYPE_CHECKING:
  from loopwright.tools.sweep.space import Dimension, Goal
  from loopwright.tools.sweep.study import Sampling


def run_trials(
  files: Sequence[str],
  params: Sequence[str],
  dimensions: Sequence[Dimension],
  *,
  folder: str,
  sampling: Sampling,
  trials: int | None,
  jobs: int,
  storage: str | None = None,
  goal: Callable[[Goal | None], Goal] | None = None,
) -> int:
  """Runs or continues trials and prints their table; returns the exit status (host).

  Args:
    files: gin files, with the bindings `params`.
    params: see `files`.
    dimensions: what varies.
    folder: of the study and the trials.
    sampling: how values are chosen.
    trials: how many; None for the default.
    jobs: how many at once.
    storage: an Optuna storage; None for a file in the folder.
    goal: the metric, given that of the config; by default that one, else the loss.

  Raises:
    ConfigError: a mistake in the config, or the folder has something else.
  """
  from loopwright.tools.sweep import results, runner, space, study
  from loopwright.tools.sweep.jobs import Command, slots

  free = slots(jobs)
  facts = space.in_another_process(space.checked, files, params, dimensions)
  wanted = goal(facts.goal) if goal else facts.goal or space.Goal("loss", maximize=False)
  opened = study.Study(
    folder, storage, dimensions, wanted, bindings=facts.bindings, sampling=sampling
  )
  try:
    runner.Runner(opened, Command(files, params), free, trials=trials).run()
  except Preempted as stop:
    print(first_line(stop), file=sys.stderr)
    return 75
  return results.finish(opened)


def require_optuna(what: str) -> None:
  """Raises a ConfigError that names what needs Optuna, if it is missing."""
  try:
    import optuna  # noqa: F401
  except ImportError as error:
    raise ConfigError(
      f"{what} needs optuna ({error}); install the extra: `pip install "
      "'loopwright[sweep]'`, with uv `uv run --extra sweep loopwright sweep`."
    ) from error
