"""What a config can set, with type, default and meaning, from signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from loopwright.configurables import table
from loopwright.configurables.checks import Examination
from loopwright.configurables.reading import MACRO, scoped
from loopwright.configurables.remedies import spelled
from loopwright.configurables.values import SEQUENCES, UNIONS
from loopwright.declaration import declared
from loopwright.errors import is_finite
from loopwright.host import redaction

REFERENCE = {"$ref": "#/$defs/reference"}
_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
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


def json_schema(found: list[Setting]) -> dict[str, Any]:
  """Returns the JSON schema of an object name -> value; a reference or macro is a string."""
  return {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "A config of Loopwright: what a gin file binds",
    "type": "object",
    "properties": {each.name: _property(each) for each in found},
    "patternProperties": {"^[^.]+$": {"description": "A macro."}, "/": {"description": "A scope."}},
    "additionalProperties": False,
    "$defs": {"reference": {"type": "string", "pattern": "^[@%]"}},
  }


def _property(setting: Setting) -> dict[str, Any]:
  parameter = setting.parameter
  schema = schema_of(parameter.annotation)
  either = schema if schema in ({}, REFERENCE) else {"anyOf": [schema, REFERENCE]}
  value = redaction.shown(parameter.name, parameter.default)
  plain = value is None or isinstance(value, bool | str) or is_finite(value)
  return {"description": setting.meaning, **either, **({"default": value} if plain else {})}


def schema_of(annotation: Any) -> dict[str, Any]:
  """Returns the JSON schema of the values that fit an annotation; {} if that is not known."""
  origin, arguments = get_origin(annotation), get_args(annotation)
  if annotation in (Any, object, table.UNKNOWN) or isinstance(annotation, str | TypeVar):
    return {}
  if origin in UNIONS or origin is Union:
    return {"anyOf": [schema_of(each) for each in arguments]}
  if origin is Annotated:
    return schema_of(arguments[0])
  if origin is Literal:
    return {"enum": list(arguments)}
  kind = type(None) if annotation is None else origin or annotation
  if kind in _SCALARS:
    return {"type": _SCALARS[kind]}
  if kind in SEQUENCES:
    items = [each for each in arguments if each is not Ellipsis]
    return {"type": "array", **({"items": schema_of(items[0])} if len(items) == 1 else {})}
  is_mapping = inspect.isclass(kind) and issubclass(kind, Mapping)
  return {"type": "object"} if is_mapping else REFERENCE
