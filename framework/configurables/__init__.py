"""The gin table, and the check of a config: every mistake in one line, before a device is touched.

gin composes the framework, which does not know it: classes are plain Python, `table.py` lists those
that a gin file may name, and `run` is the one function that a config drives.

    configurables.parse(["configs/digits.gin"], ["run.seed = 3"])
    configurables.configured(run)(mode="train", model_dir="/tmp/digits")

A class of your own registers itself where it is defined, and the gin file imports its module:

    @framework.register                          import my_tasks
    class Digits(framework.Task):                run.task = @Digits()
      ...                                        Digits.width = 64

A parameter whose default is itself in the table (`strategy=strategies.auto`) is bound to it, so
`auto.cpu_replicas = 2` works without `run.strategy = @auto`.

    table.py     what a gin file may name, and what is known about it
    imports.py   the modules that a gin file imports
    reading.py   gin files -> bindings, each with its place
    values.py    whether a value fits an annotation
    graph.py     what a config reaches
    checks.py    the mistakes
    examination.py  all of them at once
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gin

from framework.configurables import table
from framework.configurables.checks import check_all, in_force, resolved
from framework.configurables.examination import Examination, examine, examined
from framework.configurables.graph import Graph
from framework.configurables.imports import REPOSITORY
from framework.configurables.reading import MACRO, Binding, Config, Reference, is_writable
from framework.configurables.table import configured, options, register, register_all
from framework.configurables.values import map_references

__all__ = [
  "REPOSITORY",
  "bindings",
  "bound",
  "check",
  "configured",
  "examine",
  "examined_in_force",
  "operative_config",
  "options",
  "parse",
  "register",
  "register_all",
]

_latest: tuple[Examination, dict[str, str]] | None = None
"""What `parse` read last, and what `bindings` said then."""


def parse(gin_files: Sequence[str], gin_params: Sequence[str] = ()) -> None:
  """Reads a config, checks all of it, and only then puts it in force in place of any earlier one.

  A gin file is looked for in the working directory and then in the repository; an include first
  beside the file that includes it. Later bindings override earlier ones. Modules in the working
  directory and beside the gin files can be imported.

  Args:
    gin_files: paths.
    gin_params: single bindings such as "run.seed = 3"; they come last.

  Raises:
    ConfigError: a mistake in the config, in one line, with file and line where there is one.
  """
  global _latest
  examination = examine(gin_files, gin_params)
  for mistake in examination.mistakes:
    raise mistake.error
  history, graph = examination.history, examination.graph
  _put_in_force(examination.config, [*in_force(history), *_defaults_in_use(graph)])
  _latest = examination, bindings()


def examined_in_force() -> Examination:
  """Returns the examination of the config in force: as `parse` read it, or as gin has it."""
  if _latest is not None and _latest[1] == bindings():
    return _latest[0]
  return examined(_from_gin())


def check() -> None:
  """Checks the config in force, for bindings that were made through gin itself.

  Raises:
    ConfigError: as `parse` does.
  """
  check_all(_from_gin().bindings)


def operative_config() -> str:
  """Returns the config in force as a gin file: what a run can reach, every default included.

  gin's own operative config holds what has been called so far, so before the first step it lacks
  all that is called later. This one follows the references instead: it is complete at any time,
  and `parse` reads it as the same config. Defaults that gin cannot write, such as objects, are left
  out.
  """
  config = _from_gin()
  if not config.bindings:
    return "# Nothing was configured by gin.\n"
  graph = Graph(config.bindings)
  used = {str(binding): binding.value for binding in config.bindings if graph.is_used(binding)}
  for use in sorted(graph.uses):
    values = graph.values(use.scope, use.name)
    for parameter in table.parameters(use.name).values():
      if parameter.name not in values and is_writable(parameter.default):
        used.setdefault(f"{use.name}.{parameter.name}", parameter.default)
  return _written(config, used)


def bindings() -> dict[str, str]:
  """Returns what the config in force binds, name -> value as gin writes it."""
  return {str(binding): repr(binding.value) for binding in _from_gin().bindings}


def bound(name: str, parameter: str, default: Any) -> Any:
  """Returns the value of a binding, `default` without one; `@Class()` in it is called each time."""
  try:
    value = gin.query_parameter(f"{name}.{parameter}")
  except ValueError:
    return default
  return copy.deepcopy(value)  # which is how gin calls it; what a class refuses comes through


def _written(config: Config, values: Mapping[str, Any]) -> str:
  """Lays out imports, macros, the roots, and the rest in alphabetical order."""
  groups: dict[str, list[str]] = {}
  for name in sorted(values, key=lambda name: (name.rpartition(".")[0] not in table.ROOTS, name)):
    groups.setdefault(name.rpartition(".")[0], []).append(f"{name} = {values[name]!r}")
  blocks = [config.import_lines(), groups.pop("", []), *groups.values()]
  return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _put_in_force(config: Config, bindings: Iterable[Binding]) -> None:
  lines = [*config.import_lines(), *(f"{binding} = {binding.value!r}" for binding in bindings)]
  gin.clear_config()
  gin.parse_config("\n".join(lines))


def _from_gin() -> Config:
  """Returns what is in force. `gin.config_str` would be public, but sorts the keys of dicts."""
  bindings = [
    Binding("the config in force", "", scope, name, parameter, _own_references(value))
    for (scope, name), values in gin.config._CONFIG.items()
    for parameter, value in values.items()
  ]
  statements = sorted(gin.config._IMPORTS, key=lambda statement: statement.module)
  imports = [("", statement) for statement in statements]
  return Config([], imports, [resolved(b) for b in bindings if is_writable(b.value)])


def _own_references(value: Any) -> Any:
  return map_references(value, _own_reference, gin.config.ConfigurableReference)


def _own_reference(reference: Any) -> Reference:
  name = MACRO if reference.selector == "gin.constant" else reference.selector
  return Reference("/".join(reference.scopes), name, reference.evaluate)


def _defaults_in_use(graph: Graph) -> list[Binding]:
  """Returns the bindings that make gin configure a default of the table as if it were named."""
  return [
    Binding("", "", "", name, parameter, reference)
    for name in sorted({use.name for use in graph.uses})
    for parameter, reference in table.default_references(name).items()
    if parameter not in graph.bound("", name)
  ]
