"""What a sweep gives: its table, and best.gin."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from loopwright.run_folder import folders
from loopwright.tools.runs import ls, repetitions
from loopwright.tools.runs.repetitions import SEED
from loopwright.tools.sweep.jobs import OUTPUT
from loopwright.tools.sweep.study import FAILURE, Study

BEST = "best.gin"


def finish(study: Study) -> int:
  """Prints the tables and writes the files; returns 0, or 1 if no trial is complete (host)."""
  if [each.name for each in study.space] == [SEED]:
    return _finish_repetitions(study)
  ordered = sorted(study.trials(), key=lambda trial: _place(trial, study))
  print("\n".join(table(study, ordered)))
  complete = [trial for trial in ordered if trial.state == TrialState.COMPLETE]
  if not complete:
    print(f"no trial is complete; each has its output in {study.folder}/trial-*/{OUTPUT}")
    return 1
  print()
  if path := write_best(study, complete[0]):
    print(f"wrote {path}: `loopwright train {path}` trains it again")
  print(f"`loopwright report {study.folder}` shows the trials beside one another")
  return 0


def _finish_repetitions(study: Study) -> int:
  """Prints the trials by number and how they differ; none of them is the best."""
  trials = study.trials()
  print("\n".join(table(study, trials)))
  numbers = [each.number for each in trials if each.state == TrialState.COMPLETE]
  paths = [study.folder_of(number) for number in numbers]
  runs = [folders.Run(path) for path in paths if folders.is_run(path)]
  found = [*repetitions.rows(runs)]
  if not found:
    print(f"fewer than two are complete; each has its output in {study.folder}/trial-*/{OUTPUT}")
    return 1
  print("\nonly the seed differs, so none is the best; the last evaluations have")
  print("\n".join(ls.table([repetitions.HEADS, *found])))
  print(f"\n`loopwright report {study.folder}` shows the curves")
  return 0


def told(study: Study, number: int) -> str:
  """Returns the line about a trial that has ended."""
  [trial] = [each for each in study.trials() if each.number == number]
  return f"trial {number} {_state(trial)}{_valued(study, trial)}"


def table(study: Study, trials: Sequence[FrozenTrial]) -> Iterator[str]:
  """Yields the lines of the table of all trials, aligned."""
  names = [each.name for each in study.space]
  yield from ls.table(
    [
      ["trial", study.goal.metric, *names, "status"],
      *(
        [str(trial.number), _number(value_of(trial)), *(_shown(trial, name) for name in names)]
        + [_state(trial)]
        for trial in trials
      ),
    ]
  )


def write_best(study: Study, best: FrozenTrial) -> str | None:
  """Writes the best trial's whole config; returns its path, None if it ran on another machine."""
  source = Path(study.folder_of(best.number), folders.CONFIG)
  path = os.path.join(study.folder, BEST)
  with contextlib.suppress(OSError):
    about = f"# Trial {best.number}: {study.goal.metric} {_number(best.value)}"
    varied = "".join(f"\n#   {each.name} = {best.params[each.name]}" for each in study.space)
    _replace(path, f"{about}, with{varied}\n\n{source.read_text()}")
    return path
  return None


def value_of(trial: FrozenTrial) -> float | None:
  """Returns a trial's value; of one that is not complete that of its last evaluation."""
  if trial.state == TrialState.COMPLETE:
    return trial.value
  last = max(trial.intermediate_values, default=None)
  return None if last is None else trial.intermediate_values[last]


def _place(trial: FrozenTrial, study: Study) -> tuple[bool, float, int]:
  value = value_of(trial)
  if value is None or math.isnan(value):
    return True, math.inf, trial.number
  return trial.state != TrialState.COMPLETE, -value if study.goal.maximize else value, trial.number


def _state(trial: FrozenTrial) -> str:
  if trial.state == TrialState.PRUNED:
    return f"pruned at step {max(trial.intermediate_values, default=0)}"
  if trial.state == TrialState.FAIL:
    return f"failed: {trial.user_attrs.get(FAILURE, 'unknown')}"
  return trial.state.name.lower()


def _valued(study: Study, trial: FrozenTrial) -> str:
  value = value_of(trial)
  return "" if value is None else f", {study.goal.metric} {_number(value)}"


def _number(value: float | None) -> str:
  return "-" if value is None else f"{value:.5g}"


def _shown(trial: FrozenTrial, name: str) -> str:
  value = trial.params.get(name, "-")
  return f"{value:.4g}" if isinstance(value, float) else str(value)


def _replace(path: str, text: str) -> None:
  """Writes a file whole or not at all, as machines may write it at the same time."""
  own = f"{path}.{os.getpid()}"
  Path(own).write_text(text, encoding="utf-8")
  os.replace(own, path)
