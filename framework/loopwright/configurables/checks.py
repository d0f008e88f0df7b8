"""Finds all mistakes in a config: names, values, missing, contradictory and unused bindings."""

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import gin

from loopwright.configurables import imports, table
from loopwright.configurables.graph import Graph, Use
from loopwright.configurables.reading import MACRO, Binding, Config, at, read, scoped
from loopwright.configurables.values import (
  fits,
  map_references,
  references,
)
from loopwright.errors import ConfigError, shown, suggest
from loopwright.host import redaction
from loopwright.options.declaration import declared, either_of, require

EXAMPLES = {
  "run.task": (
    "`import loopwright.tasks.image_classification` and `run.task = @ImageClassification()`"
  )
}
"""What to add for a required parameter if `... = ...` would not help."""

_MOST_UNUSED = 100
"""Bindings that nothing uses, of which each gets a line with a remedy."""


Kind = Literal["reading", "imports", "names", "one value each", "values", "used", "complete"]
"""The kinds of mistakes, in the order of the checks."""


class Mistake(NamedTuple):
  """A mistake: its kind, its place ("" if none), and its line, which begins with the place."""

  kind: Kind
  where: str
  error: ConfigError


def caught(kind: Kind, where: str, check: Callable[[], object]) -> Iterator[Mistake]:
  """Yields the mistake that `check` raises, if any, with its place."""
  try:
    with at(where):
      check()
  except ConfigError as error:
    yield Mistake(kind, where, error)


class Examination(NamedTuple):
  """A config that was read, and its mistakes.

  Attributes:
    config: what was read; empty if that failed.
    history: its bindings in order, names resolved; without bindings of unknown names.
    graph: what the bindings reach.
    mistakes: a run ends with the first.
  """

  config: Config
  history: list[Binding]
  graph: Graph
  mistakes: list[Mistake]


def examine(gin_files: Sequence[str], gin_params: Sequence[str] = ()) -> Examination:
  """Reads a config and finds its mistakes; does not put it in force or use a device.

  Skips checks that an earlier mistake makes meaningless: with a failed import, names are unknown;
  with a wrong name or value, so is what is used or missing.
  """
  try:
    config = read(gin_files, gin_params)
  except ConfigError as error:
    place = re.match(r"(.+?:\d+): ", str(error))
    unread = Mistake("reading", place[1] if place else "", error)
    return Examination(Config([], [], []), [], Graph([]), [unread])
  table.register_roots()  # before a module of the user's can be in the way
  imports.make_importable(config.files)
  found = list(_failed_imports(config))
  return examined(config, found)


def examined(config: Config, found: Sequence[Mistake] = ()) -> Examination:
  """Returns the examination of a config that was read; stops if `found` has mistakes."""
  found = list(found)
  history: list[Binding] = []
  for binding in config.bindings if not found else ():
    try:
      history.append(resolved(binding))
    except ConfigError as error:
      found.append(Mistake("names", binding.place, error))
  graph = Graph(in_force(history))
  found += mistakes(history, graph)
  if not found:
    found += mistakes_in_use(history, graph)
  return Examination(config, history, graph, found)


def _failed_imports(config: Config) -> Iterator[Mistake]:
  for where, statement in config.imports:
    load = functools.partial(imports.import_module, statement.module)
    yield from caught("imports", where, load)


def resolved(binding: Binding) -> Binding:
  """Returns the binding with every name in its shortest unambiguous form.

  Raises:
    ConfigError: an unknown name or parameter, or a parameter that must not be bound.
  """
  with at(binding.place):
    return _resolved(binding)


def in_force(history: Iterable[Binding]) -> list[Binding]:
  """Returns the last binding of each parameter."""
  return list({binding.key: binding for binding in history}.values())


def mistakes(history: Sequence[Binding], graph: Graph) -> Iterator[Mistake]:
  """Yields the mistakes of single bindings, and bindings that contradict each other."""
  yield from _contradictions(history)
  for binding in in_force(history):
    check = functools.partial(_check_value, binding, graph)
    yield from caught("values", binding.where, check)


def mistakes_in_use(history: Sequence[Binding], graph: Graph) -> Iterator[Mistake]:
  """Yields unused bindings and missing ones; meaningful only if there are no `mistakes`."""
  unused = _unused(history, graph)
  for binding in unused[:_MOST_UNUSED]:
    from loopwright.configurables import remedies

    yield Mistake("used", binding.place, remedies.unused(binding, graph))
  for binding in unused[_MOST_UNUSED : _MOST_UNUSED + 1]:
    line = f"{binding.place}: nothing uses this and {len(unused) - _MOST_UNUSED - 1:,} more."
    yield Mistake("used", binding.place, ConfigError(line))
  for use in sorted(graph.uses):
    if use.called:
      yield from _missing(use, graph)
      yield from _not_one(use, graph)


def _resolved(binding: Binding) -> Binding:
  name = table.find(binding.name)
  if name != MACRO:
    _check_parameter(name, binding.parameter)
  value = map_references(
    binding.value,
    lambda r: r if r.is_macro else dataclasses.replace(r, name=table.find(r.name)),
  )
  return dataclasses.replace(binding, name=name, value=value)


def _check_parameter(name: str, parameter: str) -> None:
  entry = table.entry(name)
  if parameter in (entry.denylist or ()):
    option = declared(entry.wrapped).get(parameter)
    instead = option.instead.says if option and option.instead else "its caller passes it"
    raise ConfigError(f"{name}.{parameter} cannot be set in a config; {instead}.")
  known: Collection[str] = table.parameters(name)
  if parameter not in known and table.takes_any(name):
    inherited = table.inherited(name)
    if inherited is None:
      return
    known = sorted(inherited)
  if parameter not in known:
    from loopwright.options import words

    meant = words.option(parameter, known)
    hint = f" Did you mean {meant!r}?" if meant else suggest(parameter, known)
    hint = hint or f" It must be one of {', '.join(known) or 'none'}."
    raise ConfigError(f"{name} has no parameter {parameter!r}.{hint}")


def _contradictions(history: Iterable[Binding]) -> Iterator[Mistake]:
  first: dict[tuple[str, tuple[str, str, str]], Binding] = {}
  for binding in history:
    other = first.setdefault((binding.file, binding.key), binding)
    if repr(other.value) != repr(binding.value):
      error = ConfigError(
        f"{binding.where}: {binding} is {binding.told}, but {other.told} at "
        f"{other.where}. Remove one of the two lines."
      )
      yield Mistake("one value each", binding.where, error)


def _check_value(binding: Binding, graph: Graph) -> None:
  value = graph.expand(binding.value)
  for reference in references(value):
    if reference.is_macro:
      hint = suggest(reference.scope, graph.macros) or f" Add a line `{reference.scope} = ...`."
      raise ConfigError(f"the macro {reference} is not defined.{hint}")
  if value is gin.REQUIRED:
    raise ConfigError(f"{binding} is {binding.value}; a later line or --gin_param must set it.")
  _check_circle(binding, value, graph)
  _check_secret(binding)
  if binding.name == MACRO:
    return
  known = (table.inherited(binding.name) or {}) | table.parameters(binding.name)
  parameter = known.get(binding.parameter)
  if parameter is None or repr(value) == repr(parameter.default):
    return
  told = redaction.shown(str(binding), graph.told(binding.value))
  if not fits(value, parameter.annotation):
    said = binding.told if value == binding.value else f"{binding.told}, or {shown(told)}"
    from loopwright.configurables import remedies

    must = remedies.requirement(told, parameter.annotation)
    raise ConfigError(f"{binding} is {said}; it must be {must}")
  option = declared(table.entry(binding.name).wrapped).get(binding.parameter)
  if option is not None and not references(value):
    require(str(binding), value, parameter.annotation, option)


def _check_secret(binding: Binding) -> None:
  """Refuses a variable that the environment does not have, and a digest in place of a secret."""

  def check(value: str) -> str:
    variable = redaction.ENVIRONMENT.fullmatch(value)
    if variable and variable[1] not in os.environ:
      raise ConfigError(
        f"{binding} is {value!r}, but the environment has no variable {variable[1]}; set it, as in "
        f"`export {variable[1]}=...`."
      )
    if redaction.is_digest(value) and redaction.is_secret(str(binding)):
      raise ConfigError(
        f"{binding} is the digest of a secret, which run folders do not keep; write 'env:NAME' "
        f"there, or add --gin_param=\"{binding} = 'env:NAME'\"."
      )
    return value

  map_references(binding.value, check, str)


def _check_circle(binding: Binding, value: Any, graph: Graph) -> None:
  """Refuses `@a()` in a binding of `a` itself, or of what `@a()` needs: gin would call it again."""
  for reference in references(value):
    start = Use(reference.scope or binding.scope, reference.name, called=True)
    circle = graph.circle(start) if reference.called and not reference.is_macro else []
    if any(use.name == binding.name and use.is_in(binding.scope) for use in circle):
      calls = " needs ".join(f"@{scoped(use.scope, use.name)}()" for use in circle)
      raise ConfigError(
        f"{binding} is {binding.value!r}, but {calls}, without end; give one of "
        "them a value that does not need it."
      )


def _missing(use: Use, graph: Graph) -> Iterator[Mistake]:
  """Yields required parameters without a value in a call that gin makes."""
  values = graph.values(use.scope, use.name)
  for parameter in table.parameters(use.name).values():
    required = parameter.default in (table.UNKNOWN, gin.REQUIRED)
    if required and parameter.name not in values:
      name = f"{scoped(use.scope, use.name)}.{parameter.name}"
      from loopwright.configurables import remedies

      known = parameter.annotation is not table.UNKNOWN
      kind = remedies.spelled(parameter.annotation) if known else ""
      must = kind and f"; it must be {kind}"
      example = EXAMPLES.get(name, f"`{name} = ...`")
      yield Mistake("complete", "", ConfigError(f"{name} is not set{must}. Add {example}."))


def _not_one(use: Use, graph: Graph) -> Iterator[Mistake]:
  """Yields a mistake if none, or several, of parameters that exclude each other are set."""
  values = graph.values(use.scope, use.name)
  for names in either_of(table.entry(use.name).wrapped):
    chosen = [name for name in names if values.get(name) is not None]
    if len(chosen) != 1:
      full = [f"{use.name}.{name}" for name in names]
      told = f"neither {' nor '.join(full)} is set; add one of them."
      if chosen:
        told = f"both {' and '.join(full)} are set; keep one of them, such as {full[0]} = None."
      yield Mistake("complete", "", ConfigError(told))


def _unused(history: Sequence[Binding], graph: Graph) -> list[Binding]:
  """Returns the bindings that nothing uses, except those whose user a later line replaced.

  A binding counts as used if it was used just before a later binding was overridden. So a base
  file's `mirrored.num_packs` may stay when --gin_param sets `run.strategy = @default`.
  """
  unused = [index for index, binding in enumerate(history) if not graph.is_used(binding)]
  first = {binding.key: index for index, binding in reversed([*enumerate(history)])}
  for stop in (index for index, each in enumerate(history) if first[each.key] < index):
    if not unused:
      break
    earlier = Graph(in_force(history[:stop]))
    unused = [index for index in unused if index >= stop or not earlier.is_used(history[index])]
  return [history[index] for index in unused]
