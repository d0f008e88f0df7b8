"""What the line of a mistake in a config suggests; loaded when there is one."""

import ast
import contextlib
import dataclasses
import inspect
import os
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from loopwright.configurables import imports, table
from loopwright.configurables.graph import Graph
from loopwright.configurables.reading import MACRO, Binding, scoped
from loopwright.configurables.values import (
  UNIONS,
  fits,
  is_plain_class,
  map_references,
  references,
  wanted,
)
from loopwright.errors import ConfigError, shown, suggest
from loopwright.host import modules, redaction

INSTEAD: Mapping[str, str] = {
  "LossScaleOptimizer": "Write `Trainer.loss_scale = @dynamic`, which looks at all replicas.",
}
"""What to write for a name that Keras users may expect."""


def requirement(value: Any, annotation: Any) -> str:
  """Returns what a value that does not fit must be, with a suggestion if there is one."""
  choices = _choices(annotation)
  if choices and isinstance(value, str):
    listed = [*map(repr, choices)]
    listed += [spelled(each) for each in _members(annotation) if not _choices(each)]
    if len(listed) > len(choices):
      listed[-1] = f"or {listed[-1]}"
    return f"one of {', '.join(listed)}.{suggest(value, map(str, choices))}"
  return f"{spelled(annotation)}.{_remedy(value, annotation)}"


def spelled(annotation: Any) -> str:
  """Returns an annotation as source code, without module names; what `Annotated` says, if it is."""
  if typing.get_origin(annotation) is typing.Annotated:
    return str(annotation.__metadata__[0])
  if annotation is type(None):
    return "None"
  return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=\w)", "", inspect.formatannotation(annotation))


def _choices(annotation: Any) -> list[Any]:
  if typing.get_origin(annotation) is Literal:
    return list(typing.get_args(annotation))
  members = _members(annotation)
  return [choice for each in members if each is not annotation for choice in _choices(each)]


def _members(annotation: Any) -> tuple[Any, ...]:
  is_union = typing.get_origin(annotation) in UNIONS
  return typing.get_args(annotation) if is_union else (annotation,)


def _remedy(value: Any, annotation: Any) -> str:
  if isinstance(value, str):
    with contextlib.suppress(ValueError, SyntaxError):
      if fits(literal := ast.literal_eval(value), annotation):
        return f" Write {literal!r}, without quotes."
  if isinstance(value, float) and value.is_integer() and fits(int(value), annotation):
    return f" Write {int(value)}."
  toggled = map_references(value, lambda r: dataclasses.replace(r, called=not r.called))
  if references(value) and fits(toggled, annotation):
    if references(toggled)[0].called:
      return f" Write {toggled!r}, with parentheses."
    return f" Write {toggled!r}, without parentheses: the framework calls it later."
  return f" Write {[value]!r}." if fits([value], annotation) else ""


def unused(binding: Binding, graph: Graph) -> ConfigError:
  """Returns the error for a binding that nothing uses."""
  if binding.name == MACRO:
    from loopwright.options import words

    names = {
      f"{use.name}.{parameter}" for use in graph.uses for parameter in table.parameters(use.name)
    }
    same = sorted(name for name in names if name.endswith(f".{binding.scope}"))
    sure = words.option(binding.scope) or (same[0] if same else "")
    meant = f" Did you mean {sure!r}?" if sure else suggest(binding.scope, names)
    remedy = meant or f" Write %{binding} where it belongs, or remove it."
    return ConfigError(f"{binding.place}: nothing uses the macro {str(binding)!r}.{remedy}")
  user = _possible_user(binding, graph)
  return ConfigError(f"{binding.place}: nothing uses {binding}. Add {user}, or remove it.")


def _possible_user(binding: Binding, graph: Graph) -> str:
  """Returns a line that would use the configurable of `binding`, based on annotations."""
  given = table.result(binding.name)
  target = scoped(binding.scope, binding.name)
  for use in sorted(graph.uses):
    for parameter in table.parameters(use.name).values():
      for want, form in wanted(parameter.annotation):
        if is_plain_class(given) and issubclass(given, want):
          return f"`{use.name}.{parameter.name} = {form.format(target)}`"
  return f"a reference to it, @{target}"


def where_it_may_be(name: str) -> str:
  """Returns what to do about a name that is not known."""
  last = name.rpartition(".")[2]
  if last in INSTEAD:
    return f" {INSTEAD[last]}"
  definition = re.compile(rf"^(class|def) {re.escape(last)}\b", re.MULTILINE)
  for module, path in own_modules().items():
    if definition.search(path.read_text(encoding="utf-8", errors="replace")):
      if module in sys.modules:
        return f" {module} defines it but does not register it: add @loopwright.register above it."
      return f" Add `import {module}`, which defines it."
  known = table.known_selectors()
  same = [other for other in known if other.rpartition(".")[2].lower() == last.lower()]
  if same:
    return f" Did you mean {' or '.join(map(repr, sorted(same)))}?"
  return suggest(name, known) or " If it is yours, import its module: `import my_tasks`."


def own_modules() -> dict[str, Path]:
  """Returns name -> file of the modules: the user's, two levels deep, and the shipped tasks."""
  folders = map(Path, modules.users_folders())
  files = [(top, file) for top in folders for file in (*top.glob("*.py"), *top.glob("*/*.py"))]
  names = {".".join(file.relative_to(top).with_suffix("").parts): file for top, file in files}
  hidden = ("loopwright.", "framework.", "tests.", "benchmarks.")
  names = {n: f for n, f in names.items() if not n.startswith(hidden)}
  shipped = {f"{modules.TASKS}.{file.stem}": file for file in modules.FOLDER.glob("*.py")}
  return {n: f for n, f in (names | shipped).items() if f.stem != "__init__"}


def unreadable_line(where: str, read: str, message: str) -> ConfigError:
  """Returns the error for a line in which gin's parser, or Python's, raised a message."""
  if (told := redaction.line(read)) != read:
    return ConfigError(
      f"{where}: cannot read {told!r}, a secret; write it in quotes, or write 'env:NAME'."
    )
  path = re.fullmatch(r"[^=]*=\s*([^\s'\"#@%,(){}\[\]]*/[^\s'\"#@%,(){}\[\]]*)", read)
  path = path or re.fullmatch(r"[^=]*=\s*([A-Za-z][\w.]*-[\w.-]+)", read)
  if token := path or re.search(r"Failed to parse token '(.*)'", message):
    return ConfigError(
      f"{where}: {shown(token[1])} is not a value.{_value_hint(token[1], read, where)}"
    )
  reason = " ".join(message.split()).rstrip(".")
  return ConfigError(f"{where}: cannot read {shown(read)}: {reason[:1].lower()}{reason[1:]}.")


def _value_hint(token: str, line: str, where: str) -> str:
  python = {"true": "True", "false": "False", "none": "None", "null": "None"}.get(token.lower())
  if python:
    return f" Write {python}."
  name, _, parameter = line.partition("=")[0].strip().rpartition(".")
  with contextlib.suppress(ConfigError, KeyError):
    annotation = table.parameters(table.find(name))[parameter].annotation
    if {*_members(annotation)} <= {int, float, bool, type(None)}:
      return f" It must be {spelled(annotation)}."
  shell = " In a shell, quote the whole binding too." if where.startswith("--gin_param") else ""
  if "/" in token:
    return f" Quote a path ('{token}').{shell}"
  if not token.isidentifier():
    return f" Quote a string ('{token}').{shell}" if "-" in token else ""
  kinds = f"write @{token} for a configurable, %{token} for a macro"
  return f" Quote a string ('{token}'); {kinds}.{shell}"


def no_gin_file(name: str, paths: Sequence[str]) -> ConfigError:
  """Returns the error for a name that no file has; `paths` are where it was looked for."""
  siblings: list[str] = []
  with contextlib.suppress(OSError, ValueError):  # a name that no file can have
    siblings += [file.name for path in paths for file in Path(path).parent.glob("*.gin")]
  looked = " or ".join(os.path.dirname(path) or "." for path in paths)
  hint = suggest(os.path.basename(name), siblings)
  shipped = os.path.join("configs", name)
  if os.path.isfile(os.path.join(imports.SHIPPED, shipped)):
    hint = f" Did you mean {shipped!r}, which comes with Loopwright?"
  return ConfigError(f"there is no gin file {name!r} in {looked}.{hint}")
