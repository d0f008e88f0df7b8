"""What a sweep gives: its table, and best.gin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from loopwright.run_folder import folders
from loopwright.tools.runs import costs, ls
from loopwright.tools.sweep.study import Study, state, value_of


def finish(study: Study, *, report: bool) -> int:
  """Prints the table, writes best.gin; returns 0, or 1 if no trial is complete (host)."""
  begun = [trial for trial in study.trials() if trial.state != TrialState.WAITING]
  ordered = sorted(begun, key=lambda trial: _place(trial, maximize=study.maximize))
  print("\n".join(ls.table(_rows(study, ordered))))
  if report:
    paths = filter(folders.is_run, (study.folder_of(trial.number) for trial in begun))
    names = [each.name for each in study.space]
    print("\n" + "\n".join(ls.table(costs.rows([*map(folders.Run, paths)], names))))
  if not ordered or ordered[0].state != TrialState.COMPLETE:
    print(f"no trial is complete; each has its output in {study.folder}/trial-*/output.txt")
    return 1
  print()
  best, path = ordered[0], Path(study.folder, "best.gin")
  source = Path(study.folder_of(best.number), folders.CONFIG)
  if source.exists():  # else it ran on another machine
    about = [f"# Trial {best.number}: {study.metric} {_number(best.value)}, with"]
    about += [f"#   {each.name} = {best.params[each.name]}" for each in study.space]
    path.write_text("\n".join([*about, "", source.read_text()]), encoding="utf-8")
    print(f"wrote {path}: `loopwright train {path}` trains it again")
  print(f"`loopwright report {study.folder}` shows the trials beside one another")
  return 0


def _rows(study: Study, trials: Sequence[FrozenTrial]) -> list[list[str]]:
  names = [each.name for each in study.space]
  rows = [["trial", study.metric, *names, "status"]]
  for trial in trials:
    given = [trial.params.get(name, "-") for name in names]
    values = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in given]
    rows.append([str(trial.number), _number(value_of(trial)), *values, state(trial)])
  return rows


def _place(trial: FrozenTrial, *, maximize: bool) -> tuple[bool, float, int]:
  value = value_of(trial)
  if value is None or math.isnan(value):
    return True, math.inf, trial.number
  return trial.state != TrialState.COMPLETE, -value if maximize else value, trial.number


def _number(value: float | None) -> str:
  return "-" if value is None else f"{value:.5g}"
