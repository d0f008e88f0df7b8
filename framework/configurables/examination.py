"""A config with all its mistakes, not only the first."""

import functools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from framework.configurables import imports
from framework.configurables.checks import (
  Mistake,
  caught,
  in_force,
  mistakes,
  mistakes_in_use,
  resolved,
)
from framework.configurables.graph import Graph
from framework.configurables.reading import Binding, Config, read
from framework.configurables.table import register_all
from framework.errors import ConfigError


class Examination(NamedTuple):
  """What was read, and what is wrong with it.

  Attributes:
    config: what was read; empty where that failed.
    history: its bindings, names resolved, in order; without those whose names are not known.
    graph: what they reach.
    mistakes: the first is the one that a run ends with.
  """

  config: Config
  history: list[Binding]
  graph: Graph
  mistakes: list[Mistake]


def examine(gin_files: Sequence[str], gin_params: Sequence[str] = ()) -> Examination:
  """Reads a config and looks for all of its mistakes; nothing is put in force, no device touched.

  What would follow from an earlier mistake is not looked for: without its imports, a config's names
  are not known; without its names and values, neither is what it uses and what it lacks.
  """
  try:
    config = read(gin_files, gin_params)
  except ConfigError as error:
    place = re.match(r"(.+?:\d+): ", str(error))
    unread = Mistake("reading", place[1] if place else "", error)
    return Examination(Config([], [], []), [], Graph([]), [unread])
  imports.make_importable(config.files)
  register_all()
  found = list(_failed_imports(config))
  return examined(config, found)


def examined(config: Config, found: Sequence[Mistake] = ()) -> Examination:
  """Returns the examination of what was read, unless a mistake was found already."""
  found = list(found)
  history: list[Binding] = []
  for binding in config.bindings if not found else ():
    try:
      history.append(resolved(binding))
    except ConfigError as error:
      found.append(Mistake("names", binding.where, error))
  graph = Graph(in_force(history))
  found += mistakes(history, graph)
  if not found:
    found += mistakes_in_use(history, graph)
  return Examination(config, history, graph, found)


def _failed_imports(config: Config) -> Iterator[Mistake]:
  for where, statement in config.imports:
    load = functools.partial(imports.import_module, statement.module)
    yield from caught("imports", where, load)
