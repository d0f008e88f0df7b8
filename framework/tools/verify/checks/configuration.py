"""The config: names, types, duplicate, unused and missing bindings; uses no device.

The same checks reject a config before a run. Here each is a result with counts, and all mistakes
are reported at once.

    for result in examine(["mine.gin"], ["run.seed = 3"]):
      print(result.check, result.status, result.detail)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from framework import configurables
from framework.configurables import table
from framework.configurables.checks import Kind, Mistake, in_force
from framework.configurables.examination import Examination
from framework.configurables.reading import MACRO
from framework.errors import first_line, printable
from framework.tools.verify.bench.bench import Subject
from framework.tools.verify.report import Group, Result

GROUP = Group("configuration")
CAUSES: dict[Kind, str] = {
  "reading": "a file that cannot be read",
  "imports": "a module that cannot be imported",
  "names": "unknown name",
  "one value each": "shadowed binding",
  "values": "wrong value",
  "used": "unused binding",
  "complete": "missing binding",
}
AFTER: dict[Kind, tuple[Kind, ...]] = {
  "imports": ("reading",),
  "names": ("reading", "imports"),
  "one value each": ("reading", "imports"),
  "values": ("reading", "imports"),
  "used": ("reading", "imports", "names", "one value each", "values"),
  "complete": ("reading", "imports", "names", "one value each", "values"),
}
"""Check -> checks that must pass before it, as their mistakes would cause it to report others."""


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group for the config in force, which `parse` has accepted."""
  del subject  # it was made from the config
  examination = configurables.examined_in_force()
  if not examination.history:
    why = "gin configured nothing"
    return [GROUP.skipped("config", why)]
  return results(examination)


def examine(gin_files: Sequence[str], gin_params: Sequence[str] = ()) -> list[Result]:
  """Returns the results of this group for gin files, without putting them in force (host)."""
  return results(configurables.examine(gin_files, gin_params))


def check_config(gin_files: Sequence[str], gin_params: Sequence[str] = ()) -> int:
  """Prints one line per mistake, or that there is none; returns the exit status, 2 or 0."""
  examination = configurables.examine(gin_files, gin_params)
  for mistake in examination.mistakes:
    print(f"error: {_line(mistake)}", file=sys.stderr)
  if examination.mistakes:
    return 2
  print(f"ok: {_files(examination)}: {_used(examination)}")
  return 0


def results(examination: Examination) -> list[Result]:
  """Returns one result per check, or one per mistake."""
  told = {
    "reading": _read(examination),
    "imports": _count(len(examination.config.import_lines()), "module"),
    "names": _names(examination),
    "one value each": _overridden(examination),
    "values": _values(examination),
    "used": _used(examination),
    "complete": "every required parameter of what gin calls is bound",
  }
  found: list[Result] = []
  wrong = {mistake.kind for mistake in examination.mistakes}
  for kind, cause in CAUSES.items():
    failures = [_failure(each, cause) for each in examination.mistakes if each.kind == kind]
    first = next((other for other in AFTER.get(kind, ()) if other in wrong), None)
    if failures:
      found += failures
    elif first:
      why = f"is checked when {first!r} is right"
      found.append(GROUP.skipped(kind, why))
    else:
      found.append(GROUP.passed(kind, told[kind]))
  return found


def _failure(mistake: Mistake, cause: str) -> Result:
  where = mistake.where
  return GROUP.failed(
    mistake.kind,
    detail=_line(mistake).removeprefix(f"{where}: "),
    cause=cause,
    place=where if where.startswith("--") else Path(where).name if where else "",
  )


def _line(mistake: Mistake) -> str:
  return printable(first_line(mistake.error))


def _read(examination: Examination) -> str:
  return f"{_count(len(examination.config.bindings), 'binding')} in {_files(examination)}"


def _files(examination: Examination) -> str:
  return printable(", ".join(Path(file).name for file in examination.config.files)) or "memory"


def _names(examination: Examination) -> str:
  names = {binding.name for binding in examination.history}
  macros = sum(binding.name == MACRO for binding in in_force(examination.history))
  told = f"{_count(len(names - {MACRO}), 'name')}, all known"
  return f"{told}, and {_count(macros, 'macro')}" if macros else told


def _overridden(examination: Examination) -> str:
  keys = [binding.key for binding in examination.history]
  again = {str(b): None for i, b in enumerate(examination.history) if b.key in keys[:i]}
  if not again:
    return "no parameter is bound twice"
  return f"{_count(len(again), 'binding')} overridden by a later file or flag: {', '.join(again)}"


def _values(examination: Examination) -> str:
  bindings = [b for b in in_force(examination.history) if b.name != MACRO]
  annotated = [
    parameter
    for binding in bindings
    if (parameter := table.parameters(binding.name).get(binding.parameter))
    and parameter.annotation is not table.UNKNOWN
  ]
  free = len(bindings) - len(annotated)
  told = f"{_count(len(annotated), 'value')}, all of the annotated type"
  return f"{told}; {free} without an annotation" if free else told


def _used(examination: Examination) -> str:
  return f"{_count(len(in_force(examination.history)), 'binding')}, all used"


def _count(number: int, what: str) -> str:
  return f"{number} {what}{'' if number == 1 else 's'}"
