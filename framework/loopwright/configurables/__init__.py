"""Checks a gin config completely, and reports each mistake in one line, before using any device.

The framework's classes are plain Python and do not import gin. The registry lists those that a gin
file may name, and a config drives only the function `run`.

    configurables.parse(["configs/digits.gin"], ["run.seed = 3"])
    configurables.configured(run)(mode="train", model_dir="/tmp/digits")

docs/configuration.md shows how to register your own class.

    table.py        the names that a gin file may use, registered when it does; their parameters
    imports.py      the modules that a gin file imports
    reading.py      gin files -> bindings with their places
    values.py       whether a value fits an annotation
    graph.py        what a config reaches
    checks.py       all mistakes of a config
    remedies.py     what their lines suggest
    changes.py      what may change when a run goes on
    documentation.py  what a config can set
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import gin

from loopwright.configurables import table
from loopwright.configurables.checks import examine, in_force, resolved
from loopwright.configurables.graph import Graph
from loopwright.configurables.imports import REPOSITORY, SHIPPED
from loopwright.configurables.reading import MACRO, Binding, Config, Reference, is_writable
from loopwright.configurables.table import configured, options, register, register_all
from loopwright.configurables.values import map_references, references
from loopwright.host import redaction
from loopwright.host.replacing import replaced

__all__ = [
  "REPOSITORY",
  "SHIPPED",
  "apart",
  "bindings",
  "bound",
  "configured",
  "examine",
  "operative_config",
  "options",
  "parse",
  "recorded",
  "register",
  "register_all",
  "values_that_matter",
]


def parse(gin_files: Sequence[str], gin_params: Sequence[str] = ()) -> None:
  """Reads and checks a config, then puts it in force in place of any earlier one.

  Searches a gin file in the working directory, then in the repository; an included file first next
  to the including one. Later bindings override earlier ones. Makes modules in the working directory
  and next to the gin files importable.

  Args:
    gin_files: paths.
    gin_params: single bindings such as "run.seed = 3", read after the files.

  Raises:
    ConfigError: a mistake in the config, in one line, with file and line if known.
  """
  examination = examine(gin_files, gin_params)
  for mistake in examination.mistakes:
    raise mistake.error
  history, graph = examination.history, examination.graph
  _put_in_force(examination.config, [*in_force(history), *_defaults_in_use(graph)])


@contextlib.contextmanager
def apart() -> Iterator[None]:
  """What is parsed inside `with` is in force only there."""
  nothing: dict[str, Any] = {
    "_CONFIG": {},
    "_SINGLETONS": {},
    "_OPERATIVE_CONFIG": {},
    "_IMPORTS": set(),
  }
  with replaced(gin.config, **nothing):
    yield


def operative_config() -> str:
  """Returns the config in force as a gin file: everything that a run can reach, with all defaults.

  gin's own operative config has only what was already called, so before the first step it is
  incomplete. This one follows references, so it is complete at any time, and `parse` reads it as
  the same config, but that secrets are digests. It omits defaults that gin cannot write, such as
  objects.
  """
  config = _from_gin()
  if not config.bindings:
    return "# Nothing was configured by gin.\n"
  return _written(config, recorded(_values(config.bindings)))


def values_that_matter(
  free: Collection[str], counts: Callable[[Any], bool] = lambda target: False
) -> dict[str, str]:
  """Returns everything that a run can reach, with all defaults: name -> value as gin writes it.

  Secrets are digests.

  Args:
    free: parameters of `run` to leave out, with what only they reach.
    counts: whether a class or function that such a parameter names matters all the same.
  """
  bindings = _from_gin().bindings
  graph = Graph(bindings)
  given = {f"run.{parameter}": graph.values("", "run").get(parameter) for parameter in free}
  named = {
    name: [each for each in references(value) if counts(table.entry(each.name).wrapped)]
    for name, value in given.items()
  }
  kept = [binding for binding in bindings if str(binding) not in given]
  kept += [
    Binding("", "", "", "run", name.partition(".")[2], found or None)
    for name, found in named.items()
  ]
  values = recorded(_values(kept))
  return {name: repr(value) for name, value in values.items() if named.get(name, True)}


def _values(bindings: Sequence[Binding]) -> dict[str, Any]:
  graph = Graph(bindings)
  used = {str(binding): binding.value for binding in bindings if graph.is_used(binding)}
  for use in sorted(graph.uses):
    values = graph.values(use.scope, use.name)
    for parameter in table.parameters(use.name).values():
      if parameter.name not in values and is_writable(parameter.default):
        used.setdefault(f"{use.name}.{parameter.name}", parameter.default)
  return used


def bindings() -> dict[str, str]:
  """Returns the bindings of the config in force, name -> value as gin writes it.

  Secrets are digests.
  """
  found = recorded({str(binding): binding.value for binding in _from_gin().bindings})
  return {name: repr(value) for name, value in found.items()}


def recorded(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns bindings, name -> value, as files and logs may have them: secrets are digests.

  A macro is one if a secret is bound to it.
  """
  hidden: set[str] = set()
  while (
    more := {
      reference.scope
      for name, value in values.items()
      if name in hidden or redaction.is_secret(name)
      for reference in references(value)
      if reference.is_macro
    }
    - hidden
  ):
    hidden |= more
  return {
    name: redaction.shown("secret" if name in hidden else name, value)
    for name, value in values.items()
  }


def bound(name: str, parameter: str, default: Any) -> Any:
  """Returns the value of a binding, or `default`; each call evaluates `@Class()` in it anew."""
  try:
    value = gin.query_parameter(f"{name}.{parameter}")
  except ValueError:
    return default
  return copy.deepcopy(value)  # as gin does it; errors of a class pass through


def _written(config: Config, values: Mapping[str, Any]) -> str:
  groups: dict[str, list[str]] = {}
  for name in sorted(values, key=lambda name: (name.rpartition(".")[0] not in table.ROOTS, name)):
    groups.setdefault(name.rpartition(".")[0], []).append(f"{name} = {values[name]!r}")
  blocks = [config.import_lines(), groups.pop("", []), *groups.values()]
  return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _put_in_force(config: Config, bindings: Iterable[Binding]) -> None:
  """Gives gin the bindings; in place of "env:NAME" a call that reads the variable when it is used.

  gin's name for it is a call in a scope of the variable's name.
  """
  table.register_environment()
  values = ((each, map_references(each.value, _from_environment, str)) for each in bindings)
  lines = [*config.import_lines(), *(f"{binding} = {value!r}" for binding, value in values)]
  gin.clear_config()
  gin.parse_config("\n".join(lines))


def _from_gin() -> Config:
  """Returns the config in force. gin's public `config_str` would sort the keys of dicts."""
  kind = gin.config.ConfigurableReference
  own = functools.partial(map_references, change=_own_reference, kind=kind)
  bindings = [
    Binding("the config in force", "", scope, name, parameter, own(value))
    for (scope, name), values in gin.config._CONFIG.items()  # noqa: SLF001
    for parameter, value in values.items()
  ]
  statements = sorted(gin.config._IMPORTS, key=lambda statement: statement.module)  # noqa: SLF001
  imports = [("", statement) for statement in statements]
  return Config([], imports, [resolved(b) for b in bindings if is_writable(b.value)])


def _from_environment(value: str) -> str | Reference:
  found = redaction.ENVIRONMENT.fullmatch(value)
  return Reference(found[1], table.ENVIRONMENT, called=True) if found else value


def _own_reference(reference: Any) -> Reference | str:
  if reference.selector == table.ENVIRONMENT:
    return f"env:{reference.scopes[-1]}"
  name = MACRO if reference.selector == "gin.constant" else reference.selector
  return Reference("/".join(reference.scopes), name, reference.evaluate)


def _defaults_in_use(graph: Graph) -> list[Binding]:
  """Returns bindings that make gin configure defaults of the table as if they were named."""
  return [
    Binding("", "", "", name, parameter, reference)
    for name in sorted({use.name for use in graph.uses})
    for parameter, reference in table.default_references(name).items()
    if parameter not in graph.bound("", name)
  ]
