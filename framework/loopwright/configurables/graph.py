"""Finds what a config reaches from the roots through references, macros and defaults."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import gin

from loopwright.configurables import table
from loopwright.configurables.reading import MACRO, Binding, Reference
from loopwright.configurables.values import map_references, references
from loopwright.errors import ConfigError
from loopwright.host import redaction


class Use(NamedTuple):
  """A configurable that a run reaches; `called` means that gin calls it, without arguments."""

  scope: str
  name: str
  called: bool

  def is_in(self, scope: str) -> bool:
    """Whether bindings of `scope` count for it."""
    return scope in _outer_scopes(self.scope)


class Graph:
  """A set of bindings, one per parameter, and what it reaches."""

  def __init__(self, bindings: Iterable[Binding]) -> None:
    self.macros: dict[str, Any] = {}
    self._bound: dict[tuple[str, str], dict[str, Any]] = {}
    self._read_macros: set[str] = set()
    for binding in bindings:
      if binding.name == MACRO:
        self.macros[binding.scope] = binding.value
      else:
        self._bound.setdefault((binding.scope, binding.name), {})[binding.parameter] = binding.value

  @functools.cached_property
  def uses(self) -> set[Use]:
    """The configurables reached.

    Raises:
      ConfigError: a macro is defined by itself.
    """
    todo = [Use("", name, called=True) for name in table.roots()]
    todo += [Use(*key, called=False) for key in self._bound if table.calls_itself(key[1])]
    reached: set[Use] = set()
    while todo:
      use = todo.pop()
      if use not in reached:
        reached.add(use)
        todo += self._uses_by(use)
    return reached

  def bound(self, scope: str, name: str) -> dict[str, Any]:
    """Returns the bindings of exactly this scope, parameter -> value."""
    return self._bound.get((scope, name), {})

  def values(self, scope: str, name: str) -> dict[str, Any]:
    """Returns the values of a configurable used in `scope`: bindings and registered defaults."""
    values: dict[str, Any] = dict(table.default_references(name))
    for outer in _outer_scopes(scope):
      values |= self.bound(outer, name)
    return {parameter: self.expand(value) for parameter, value in values.items()}

  def expand(self, value: Any, inside: tuple[str, ...] = ()) -> Any:
    """Replaces macros and gin constants by their values; keeps undefined ones.

    Raises:
      ConfigError: a macro is defined by itself.
    """
    return map_references(value, lambda r: self._macro_value(r, inside) if r.is_macro else r)

  def told(self, value: Any) -> Any:
    """Returns what `expand` does, for messages: the value of a secret's macro is its digest."""
    shown = Graph([])
    shown.macros = {name: redaction.shown(name, each) for name, each in self.macros.items()}
    return shown.expand(value)

  def is_used(self, binding: Binding) -> bool:
    """Whether anything reached uses the binding."""
    scopes = [use.scope for use in self.uses if use.name == binding.name]
    if binding.name == MACRO:
      return binding.scope in self._read_macros
    return any(binding.scope in _outer_scopes(scope) for scope in scopes)

  def circle(self, start: Use) -> list[Use]:
    """Returns a call that needs itself, with the calls in between: [a, b, a]; [] if none (host).

    Follows the calls that gin makes before it calls `start`.
    """
    path: list[Use] = []
    todo: list[tuple[int, Use]] = [(0, start)]
    done: set[Use] = set()
    while todo:
      depth, use = todo.pop()
      path[depth:] = [use]
      if use in path[:depth]:
        return path[path.index(use) :]
      if use not in done:
        done.add(use)
        todo += [(depth + 1, needed) for needed in self._uses_by(use) if needed.called]
    return []

  def _macro_value(self, reference: Reference, inside: tuple[str, ...]) -> Any:
    name = reference.scope
    if name in inside:
      raise ConfigError(f"the macro %{name} is defined by itself; it must have a value.")
    if name not in self.macros:
      return _constant(reference)
    self._read_macros.add(name)
    value = self.expand(self.macros[name], (*inside, name))
    # gin makes calls inside a macro in a scope of the macro's name.
    return map_references(
      value, lambda r: r if r.scope or not r.called else dataclasses.replace(r, scope=name)
    )

  def _uses_by(self, use: Use) -> Iterator[Use]:
    for reference in references(self.values(use.scope, use.name)):
      if not reference.is_macro:
        yield Use(reference.scope or use.scope, reference.name, reference.called)


def _outer_scopes(scope: str) -> list[str]:
  """Returns "", "a" and "a/b" for "a/b"."""
  parts = scope.split("/") if scope else []
  return ["/".join(parts[:depth]) for depth in range(len(parts) + 1)]


def _constant(reference: Reference) -> Any:
  try:
    return gin.query_parameter(reference.scope) if reference.scope else reference
  except ValueError:
    return reference
