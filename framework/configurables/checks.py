"""The mistakes in a config: names, values, what is missing, what contradicts, what nothing uses."""

import dataclasses
from collections.abc import Iterable, Sequence

import gin

from framework.configurables import table
from framework.configurables.graph import Graph, Use
from framework.configurables.reading import MACRO, Binding, at, scoped
from framework.configurables.values import (
  fits,
  is_plain_class,
  map_references,
  references,
  requirement,
  spelled,
  wanted,
)
from framework.errors import ConfigError, suggest

EXAMPLES = {
  "run.task": "`import tasks.image_classification` and `run.task = @ImageClassification()`"
}
"""What to add for a parameter that must be set, where `... = ...` would not help."""


def resolved(binding: Binding) -> Binding:
  """Returns the binding with every name in its shortest unambiguous form.

  Raises:
    ConfigError: a name or parameter that is not known, or that must not be bound.
  """
  with at(binding.where):
    name = table.find(binding.name)
    if name != MACRO:
      _check_parameter(name, binding.parameter)
    value = map_references(
      binding.value,
      lambda r: r if r.is_macro else dataclasses.replace(r, name=table.find(r.name)),
    )
  return dataclasses.replace(binding, name=name, value=value)


def in_force(history: Iterable[Binding]) -> list[Binding]:
  """Returns the last binding of each parameter."""
  return list({binding.key: binding for binding in history}.values())


def check_all(history: Sequence[Binding]) -> Graph:
  """Checks resolved bindings, given in the order in which they were read; returns what they reach.

  Raises:
    ConfigError: the first mistake.
  """
  _check_contradictions(history)
  bindings = in_force(history)
  graph = Graph(bindings)
  for binding in bindings:
    with at(binding.where):
      _check_value(binding, graph)
  _check_used(history, graph)
  for use in sorted(graph.uses):
    if use.called:
      _check_complete(use, graph)
  return graph


def _check_parameter(name: str, parameter: str) -> None:
  entry = table.entry(name)
  if parameter in (entry.denylist or ()):
    instead = table.GIVEN.get(entry.name, {}).get(parameter, "its caller passes it")
    raise ConfigError(f"{name}.{parameter} cannot be set in a config; {instead}.")
  known = table.parameters(name)
  if parameter not in known and not table.takes_any(name):
    hint = suggest(parameter, known) or f" It must be one of {', '.join(known) or 'none'}."
    raise ConfigError(f"{name} has no parameter {parameter!r}.{hint}")


def _check_contradictions(history: Iterable[Binding]) -> None:
  first: dict[tuple[str, tuple[str, str, str]], Binding] = {}
  for binding in history:
    other = first.setdefault((binding.file, binding.key), binding)
    if repr(other.value) != repr(binding.value):
      raise ConfigError(
        f"{binding.where}: {binding} is {binding.value!r}, but {other.value!r} at {other.where}. "
        "Remove one of the two lines."
      )


def _check_value(binding: Binding, graph: Graph) -> None:
  value = graph.expand(binding.value)
  for reference in references(value):
    if reference.is_macro:
      hint = suggest(reference.scope, graph.macros) or f" Add a line `{reference.scope} = ...`."
      raise ConfigError(f"the macro {reference} is not defined.{hint}")
  if value is gin.REQUIRED:
    raise ConfigError(f"{binding} is {binding.value}; a later line or --gin_param must set it.")
  parameter = table.parameters(binding.name).get(binding.parameter)
  if binding.name == MACRO or parameter is None or repr(value) == repr(parameter.default):
    return
  if not fits(value, parameter.annotation):
    said = f"{binding.value!r}" if value == binding.value else f"{binding.value}, or {value!r}"
    must = requirement(value, parameter.annotation)
    raise ConfigError(f"{binding} is {said}; it must be {must}")


def _check_complete(use: Use, graph: Graph) -> None:
  """Raises if gin would call something without one of its required parameters."""
  values = graph.values(use.scope, use.name)
  for parameter in table.parameters(use.name).values():
    required = parameter.default in (table.UNKNOWN, gin.REQUIRED)
    if required and parameter.name not in values:
      name = f"{scoped(use.scope, use.name)}.{parameter.name}"
      known = parameter.annotation is not table.UNKNOWN
      must = f"; it must be {spelled(parameter.annotation)}" if known else ""
      raise ConfigError(f"{name} is not set{must}. Add {EXAMPLES.get(name, f'`{name} = ...`')}.")


def _check_used(history: Sequence[Binding], graph: Graph) -> None:
  """Raises for a binding that nothing takes, except where a later line has overridden its user.

  A binding counts as used if it was so just before some later binding was overridden. So a base
  file's `mirrored.num_packs` may stay when --gin_param says `run.strategy = @default`.
  """
  unused = [index for index, binding in enumerate(history) if not graph.is_used(binding)]
  keys = [binding.key for binding in history]
  for stop in (index for index, key in enumerate(keys) if key in keys[:index]):
    earlier = Graph(in_force(history[:stop]))
    unused = [index for index in unused if index >= stop or not earlier.is_used(history[index])]
  if unused:
    raise _unused(history[unused[0]], graph)


def _unused(binding: Binding, graph: Graph) -> ConfigError:
  if binding.name == MACRO:
    names = {
      f"{use.name}.{parameter}" for use in graph.uses for parameter in table.parameters(use.name)
    }
    same = sorted(name for name in names if name.endswith(f".{binding.scope}"))
    meant = f" Did you mean {same[0]!r}?" if same else suggest(binding.scope, names)
    remedy = meant or f" Write %{binding} where it belongs, or remove it."
    return ConfigError(f"{binding.where}: nothing uses the macro {str(binding)!r}.{remedy}")
  user = _possible_user(binding, graph)
  return ConfigError(f"{binding.where}: nothing uses {binding}. Add {user}, or remove it.")


def _possible_user(binding: Binding, graph: Graph) -> str:
  """Returns a line that would use the configurable of `binding`, going by the annotations."""
  given = table.result(binding.name)
  target = scoped(binding.scope, binding.name)
  for use in sorted(graph.uses):
    for parameter in table.parameters(use.name).values():
      for want, form in wanted(parameter.annotation):
        if is_plain_class(given) and issubclass(given, want):
          return f"`{use.name}.{parameter.name} = {form.format(target)}`"
  return f"a reference to it, @{target}"
