"""`loopwright diff runs/a runs/b`: what differs. Imports no task and no TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from loopwright.errors import ConfigError, printable, shown
from loopwright.run_folder import folders
from loopwright.tools.runs import ls

if TYPE_CHECKING:
  from loopwright.commands.arguments import Parsed

_WIDTH = 60


def run(parsed: Parsed) -> int:
  """Prints the differences of two runs; returns 0, also if there are some (host)."""
  if len(parsed.arguments) != 2:
    raise ConfigError("`loopwright diff` takes two run folders, as in `diff runs/a runs/b`.")
  runs = [folders.Run(folders.local(path)) for path in parsed.arguments]
  sides = [sections(run) for run in runs]
  rows: list[Sequence[str]] = [["", *parsed.arguments]]
  for title in sides[0]:
    found = differences(sides[0][title], sides[1][title])
    rows += [[title if found else f"{title}: no difference", "", ""], *found]
  print("\n".join(ls.table(rows)))
  for run, name in zip(runs, parsed.arguments, strict=True):
    for fault in run.faults(name):
      print(printable(f"{ls.DAMAGED}: {fault}"))
  return 0


def sections(run: folders.Run) -> dict[str, Mapping[str, str]]:
  """Returns what is compared: title -> name -> value."""
  config = {name: told for name, told in run.values("config").items() if "; from step " in told}
  commit = run.values("commit").get("commit")
  return {
    "bindings": {**run.bindings, **config},
    "data": run.values("data"),
    "versions": {**run.values("versions"), **({"commit of the task": commit} if commit else {})},
    "results": results(run),
  }


def results(run: folders.Run) -> dict[str, str]:
  """Returns the step, the values of the last evaluation, and the best one."""
  last = list(run.evaluations.values())[-1:]
  values = {f"eval {name}": _text(value) for each in last for name, value in each.items()}
  return {"step": str(run.step), "status": run.status(), **values, "best": str(run.best() or "")}


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[Sequence[str]]:
  """Returns name and both values, where they differ; a missing one is "-"."""
  return [
    [f"  {name}", _short(one.get(name, "-")), _short(other.get(name, "-"))]
    for name in sorted({*one, *other})
    if one.get(name) != other.get(name)
  ]


def _short(value: str) -> str:
  return value if len(value) <= _WIDTH else f"{value[: _WIDTH // 2]}...{value[-_WIDTH // 2 :]}"


def _text(value: object) -> str:
  return f"{value:.6g}" if isinstance(value, float) else shown(value)
