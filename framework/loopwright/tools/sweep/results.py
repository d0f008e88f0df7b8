"""What a sweep gives: its table, best.gin, and the time by batch size and device."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from optuna.trial import FrozenTrial, TrialState

from loopwright.errors import ConfigError, is_finite
from loopwright.host.json_lines import Record
from loopwright.run_folder import folders
from loopwright.tools.runs import ls, repetitions
from loopwright.tools.runs.repetitions import SEED
from loopwright.tools.sweep.jobs import OUTPUT
from loopwright.tools.sweep.study import FAILURE, Study

BEST = "best.gin"
_STRATEGY = re.compile(r"^strategy +(\w+?)(?:Strategy)?, (\d+) replicas?(?: on (.*))?$", re.M)
_MAX_OUTPUT = 2**16
_TIMED = ("batch", "devices", "precision", "time", "examples/s")


class Cost(NamedTuple):
  """What a trial ran on, and its time.

  Attributes:
    batch: the global batch size.
    devices: such as "2 CPU, Mirrored".
    precision: the dtype policy.
    seconds: in training loops, without start-up and evaluations.
    rate: examples per second in those.
  """

  batch: str
  devices: str
  precision: str
  seconds: float
  rate: float


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
  if len(lines := list(by_device(study, complete))) > 2:
    print("\n".join(["", f"the best {study.goal.metric} by batch size and device:", *lines]))
  print()
  if path := write_best(study, complete[0]):
    print(f"wrote {path}: `loopwright train {path}` trains it again")
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
  print(f"\n`loopwright report {study.folder}` shows the curves; `loopwright repeat` is for this")
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


def by_device(study: Study, complete: Sequence[FrozenTrial]) -> Iterator[str]:
  """Yields a table with the best of the trials for each batch size, device and precision.

  Args:
    study: see there.
    complete: trials, the best first.
  """
  rows: dict[Sequence[str], list[str]] = {}
  for trial in complete:
    if cost := cost_of(study.folder_of(trial.number)):
      end = [*cost[:3], f"{cost.seconds:.1f} s", f"{cost.rate:,.0f}", _number(trial.value)]
      rows.setdefault(cost[:3], [*end, str(trial.number)])
  ordered = sorted(rows.values(), key=lambda row: (row[1], row[2], row[0].zfill(12)))
  yield from ls.table([[*_TIMED, study.goal.metric, "trial"], *ordered])


def cost_of(path: str) -> Cost | None:
  """Returns what a run ran on, and its time; None if its folder does not tell (host)."""
  try:
    run = folders.Run(path)
    examples, seconds = pace(folders.log(path))
    with open(os.path.join(path, OUTPUT), "rb") as file:
      found = _STRATEGY.search(file.read(_MAX_OUTPUT).decode(errors="replace"))
  except (ConfigError, OSError):
    return None
  config = folders.texts(run.start.get("config"))
  batch = config.get("global batch size", "?")
  devices = _devices(*found.groups()) if found else "?"
  precision = run.bindings.get("run.precision", "?").strip("'\"")
  return Cost(batch, devices, precision, seconds, examples / seconds if seconds else 0.0)


def pace(log: Iterator[Record]) -> tuple[float, float]:
  """Returns the examples and the seconds of all training loops."""
  step, examples, seconds = 0, 0.0, 0.0
  for record in log:
    steps_per_s, rate = record.get("steps_per_second", 0), record.get("examples_per_second", 0)
    known = is_finite(rate) and is_finite(steps_per_s) and steps_per_s > 0
    if known and record.get("split") == "train":
      spent = (record["step"] - step) / steps_per_s
      step, seconds, examples = record["step"], seconds + spent, examples + spent * rate
  return examples, seconds


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


def _devices(strategy: str, replicas: str, names: str | None) -> str:
  kind = re.sub(r":.*", "", names or "") or "device"
  return f"{replicas} {kind}, {strategy}"


def _replace(path: str, text: str) -> None:
  """Writes a file whole or not at all, as machines may write it at the same time."""
  own = f"{path}.{os.getpid()}"
  Path(own).write_text(text, encoding="utf-8")
  os.replace(own, path)
