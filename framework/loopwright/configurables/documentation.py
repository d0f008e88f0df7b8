"""What a config can set, with type, default and meaning, from signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from loopwright.configurables import table
from loopwright.configurables.checks import Examination
from loopwright.configurables.reading import MACRO, scoped
from loopwright.configurables.remedies import spelled
from loopwright.host import redaction
from loopwright.options.declaration import declared

_FOREIGN = ("gin.", "official.")
_NOTHING = object()


class Setting(NamedTuple):
  """One binding that a config can take.

  Attributes:
    name: what the config writes before "=".
    parameter: with annotation and default.
    meaning: one line.
    value: what the config has; the default where it has nothing.
    is_set: whether the config has it.
  """

  name: str
  parameter: inspect.Parameter
  meaning: str
  value: Any
  is_set: bool

  @property
  def kind(self) -> str:
    """The type as source code; "any" if there is no annotation."""
    annotation = self.parameter.annotation
    return "any" if annotation is table.UNKNOWN else spelled(annotation)


def settings(examination: Examination) -> list[Setting]:
  """Returns every setting of the registered names: first of those that the config uses (host)."""
  table.register_all()
  uses = {(use.scope, use.name) for use in examination.graph.uses}
  uses |= {(each.scope, each.name) for each in examination.history if each.name != MACRO}
  names = [name for name in table.selectors() if not name.startswith(_FOREIGN)]
  used = sorted(uses, key=lambda use: (_place(use[1]), use[1], use[0]))
  rest = [("", name) for name in names if ("", name) not in uses]
  return [each for scope, name in (*used, *rest) for each in _settings_of(scope, name, examination)]


def _place(name: str) -> int:
  return table.ROOTS.index(name) if name in table.ROOTS else len(table.ROOTS)


def _settings_of(scope: str, name: str, examination: Examination) -> Iterator[Setting]:
  target = table.entry(name).wrapped
  values, told = examination.graph.values(scope, name), meanings(target)
  for parameter in table.parameters(name).values():
    value = values.get(parameter.name, _NOTHING)
    yield Setting(
      name=f"{scoped(scope, name)}.{parameter.name}",
      parameter=parameter,
      meaning=told.get(parameter.name) or summary(target),
      value=redaction.shown(parameter.name, parameter.default if value is _NOTHING else value),
      is_set=value is not _NOTHING and parameter.name not in table.default_references(name),
    )


def summary(target: Any) -> str:
  """Returns the first line of a docstring; of a class its own, not an inherited one."""
  doc = vars(target).get("__doc__") if inspect.isclass(target) else target.__doc__
  return (inspect.cleandoc(doc or "") or "").partition("\n")[0]


def meanings(target: Any) -> dict[str, str]:
  """Returns what declarations and docstrings of a class or function say of its parameters."""
  docs = [inspect.getdoc(target)]
  if inspect.isclass(target):
    docs.append(inspect.getdoc(target.__init__))
  said = {name: text for doc in docs for name, text in described_arguments(doc or "").items()}
  return said | {name: each.meaning for name, each in declared(target).items() if each.meaning}


def described_arguments(doc: str) -> dict[str, str]:
  """Returns the block "Args:" of a docstring: name -> text in one line."""
  block = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n(?=[ \t]))*)", doc, re.MULTILINE)
  lines = inspect.cleandoc(block[1]).splitlines() if block else []
  found: dict[str, str] = {}
  names: list[str] = []
  for line in lines:
    if start := re.match(r"(\w+(?:, \w+)*): (.*)", line):
      names = start[1].split(", ")
      found |= dict.fromkeys(names, start[2])
    else:
      found |= {name: f"{found[name]} {line.strip()}".strip() for name in names}
  return found


def default(parameter: inspect.Parameter) -> str:
  """Returns a default as a config writes it; "required" if there is none."""
  value = parameter.default
  if value is parameter.empty:
    return "required"
  if inspect.isclass(value) or inspect.isfunction(value):
    prefix = "keras." if value.__module__.startswith("keras") else ""
    return f"@{prefix}{value.__name__}"
  return repr(redaction.shown(parameter.name, value))
