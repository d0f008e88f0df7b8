"""Finds all mistakes of a config, not only the first."""

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from loopwright.configurables import imports
from loopwright.configurables.checks import (
  Mistake,
  caught,
  in_force,
  mistakes,
  mistakes_in_use,
  resolved,
)
from loopwright.configurables.graph import Graph
from loopwright.configurables.reading import Binding, Config, read
from loopwright.configurables.table import register_roots
from loopwright.errors import ConfigError
from loopwright.host import modules


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
  register_roots()  # before a module of the user's can be in the way
  imports.make_importable(config.files)
  config = config._replace(imports=[_current(each) for each in config.imports])
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


def _current(line: tuple[str, Any]) -> tuple[str, Any]:
  """Returns an import with the name that a shipped task has now."""
  where, statement = line
  return where, statement._replace(module=modules.current(statement.module))


def _failed_imports(config: Config) -> Iterator[Mistake]:
  for where, statement in config.imports:
    load = functools.partial(imports.import_module, statement.module)
    yield from caught("imports", where, load)
