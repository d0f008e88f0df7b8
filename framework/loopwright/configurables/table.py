"""The names that a gin file may use without an import, and their parameters.

They are those of the registry, and the optimizers and schedules of both Kerases. gin gets to know
one, and its module is imported, when a config names it.
"""

import ast
import functools
import importlib
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import gin
from gin.selector_map import SelectorMap

from loopwright.configurables.imports import uncollected
from loopwright.configurables.reading import Reference
from loopwright.errors import ConfigError
from loopwright.host import lazy_keras
from loopwright.options.declaration import declared, signature
from loopwright.registry import CONFIGURABLE, Entry, entries, load

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Target = TypeVar("Target", bound=Callable[..., Any])

ROOTS = ("run", "Trainer", "Evaluator")
"""What `run` always makes. Everything else in a config must be reachable from these."""

OPTIMIZER_PACKAGES = ("keras", "tf_keras")
# A base class, one replaced by optimizers/loss_scale.py, one whose argument gin cannot write.
NOT_OPTIMIZERS = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")

YIELDING = ("gin.", "official.")
"""Names that yield to others: gin's, and the TF Model Garden's, which has its own `Trainer`."""

ENVIRONMENT = "gin.environment"
"""What stands in gin for "env:NAME", see `register_environment`."""

UNKNOWN = inspect.Parameter.empty
"""Marks a missing annotation or default."""


def register(target: Target) -> Target:
  """Registers a class or function with gin; also a decorator. Direct calls are unchanged.

  A gin file can then write `tasks.digits.Digits` as `@Digits`, `@digits.Digits` or in full. A
  second definition, as in a notebook cell, replaces the first.
  """
  _register(target)
  return target


def register_environment() -> None:
  """Registers what reads a variable of the environment, whose name is the scope of the call."""
  gin.register("environment", module="gin")(_environment) if ENVIRONMENT not in registry() else None


def _environment() -> str:
  name = gin.current_scope()[-1]
  if name not in os.environ:
    raise ConfigError(
      f"the environment has no variable {name!r}, which 'env:{name}' reads; set it."
    )
  return os.environ[name]


def register_roots() -> None:
  """Registers what `run` always makes. Imports TensorFlow; uses no device."""
  with uncollected():
    for complete, each in listed().items():
      if each.name in ROOTS:
        _load(complete)


def register_all() -> None:
  """Registers every name that there is, for lists of them; idempotent. Uses no device.

  Raises:
    AttributeError: a module does not have a name that the registry says it has.
  """
  register_roots()
  for package in OPTIMIZER_PACKAGES:
    _keras_classes(package)
  for complete in _known():
    _load(complete)


@functools.cache
def listed() -> dict[str, Entry]:
  """Returns the names of the registry for configs, each in full."""
  return {each.complete: each for each in entries(*CONFIGURABLE)}


def configured(target: Callable[Parameters, Result]) -> Callable[..., Result]:
  """Returns a version of a class or function whose parameters come from the config in force.

  Returns `target` itself if it is not registered, so `run` works without gin.
  """
  known = any(entry.wrapped is target for _, entry in registry().items())
  return gin.get_configurable(target) if known else target


def options(target: Callable[..., Any]) -> dict[str, Any]:
  """Returns what the config in force binds for a class or function: parameter -> value.

  For a class that stands in for the registered one. Empty if `target` is not registered.
  """
  known = any(entry.wrapped is target for _, entry in registry().items())
  return gin.get_bindings(target) if known else {}


def registry() -> Any:
  """Returns gin's registry: private, but setup.cfg pins gin 0.5 and a test checks it."""
  return gin.config._REGISTRY  # noqa: SLF001


def entry(selector: str) -> Any:
  """Returns gin's entry for a selector: wrapped, wrapper, allowlist, denylist."""
  return registry()[_load(*matching(selector))]


def selectors() -> list[str]:
  """Returns the shortest unambiguous selector of everything that is registered."""
  return [_selector(complete) for complete, _ in registry().items()]


def known_selectors() -> list[str]:
  """Returns that of every name that there is, registered or not."""
  return [_selector(name) for name in dict.fromkeys(_known()) if not name.startswith("gin.")]


def roots() -> list[str]:
  """Returns the selectors of those `ROOTS` that are registered."""
  names = [complete for complete, each in listed().items() if each.name in ROOTS]
  return [_selector(name) for name in names if name in registry()]


def find(name: str) -> str:
  """Returns the shortest selector for `name`, and registers it; others yield to `YIELDING`.

  Raises:
    ConfigError: there is nothing, or more than one thing, of this name.
  """
  matches = matching(name)
  if not matches or any(_is_of("tf_keras", match) for match in matches):
    for package in OPTIMIZER_PACKAGES:
      _keras_classes(package)
    matches = matching(name)  # without those that tf_keras was only supposed to have
  matches = [match for match in matches if not match.startswith(YIELDING)] or matches
  if len(matches) == 1:
    return _selector(_load(matches[0]))
  if matches:
    choices = " or ".join(sorted(map(_selector, matches)))
    raise ConfigError(f"{name!r} is ambiguous; it must be {choices}.")
  hint = load("part", "where_it_may_be")(name)
  raise ConfigError(f"unknown configurable {name!r}.{hint}")


def parameters(selector: str) -> dict[str, inspect.Parameter]:
  """Returns the parameters that a config may set."""
  denied = entry(selector).denylist or ()
  return {n: p for n, p in _named(entry(selector).wrapped).items() if n not in denied}


def takes_any(selector: str) -> bool:
  """Whether it has **kwargs, so any name is a parameter."""
  return _has_kwargs(entry(selector).wrapped) and not entry(selector).allowlist


def inherited(selector: str) -> dict[str, inspect.Parameter] | None:
  """Returns the parameters that a class takes as **kwargs for its bases; None if it takes any."""
  target, names = entry(selector).wrapped, dict[str, inspect.Parameter]()
  for base in target.__mro__ if inspect.isclass(target) else ():
    if init := vars(base).get("__init__"):
      names = {n: p for n, p in _named(init).items() if n != "self"} | names
      if base is object or not _has_kwargs(init):
        return names
      if not _only_for_bases(init):
        return None
  return None


def result(selector: str) -> Any:
  """Returns the type that calling it returns: the class or the return annotation, or `UNKNOWN`."""
  target = entry(selector).wrapped
  return target if inspect.isclass(target) else signature(target).return_annotation


def default_references(selector: str) -> dict[str, Reference]:
  """Returns the parameters whose default has a name here, each with a reference to it."""
  names = {id(entry.wrapped): complete for complete, entry in registry().items()}
  found: dict[str, Reference] = {}
  for each in parameters(selector).values():
    if complete := names.get(id(each.default)) or _complete(each.default):
      found[each.name] = Reference("", _selector(complete), called=False)
  return found


def _complete(target: Any) -> str | None:
  """Returns the name of a class or function that may not be registered yet; registers it."""
  complete = f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', '')}"
  if complete in listed():
    return _load(complete)
  library = complete.partition(".")[0]
  if inspect.isclass(target) and library in OPTIMIZER_PACKAGES:
    names = (name for name, each in _keras_classes(library).items() if each is target)
    return next(map(_load, names), None)
  return None


def calls_itself(selector: str) -> bool:
  """Whether plain calls use bindings too (`@gin.configurable`), so its uses cannot be known."""
  known = entry(selector)
  module = sys.modules.get(getattr(known.wrapped, "__module__", ""))
  return known.wrapper in (known.wrapped, getattr(module, known.name, None))


def _register(target: Callable[..., Any], module: str | None = None, **lists: list[str]) -> None:
  earlier = registry().get(f"{module or target.__module__}.{target.__name__}")
  if earlier is None or earlier.wrapped is not target:
    with gin.config.interactive_mode():  # Allows a second definition.
      gin.register(target.__name__, module=module, **lists)(target)


def _load(complete: str) -> str:
  """Registers what has a name, if it is not registered yet; returns the name."""
  if complete in registry():
    return complete
  if each := listed().get(complete):
    given = [name for name, option in declared(each.load()).items() if option.instead]
    _register(each.load(), each.module, denylist=given)
  elif target := _keras_classes(complete.partition(".")[0])[complete]:
    # Keras's optimizers accept **kwargs only to raise an error.
    lists = {} if _SCHEDULES in complete else {"allowlist": [*_named(target)]}
    _register(target, complete.rpartition(".")[0], **lists)
  return complete


def _known() -> Iterator[str]:
  """Yields every name in full, registered or not; imports Keras 3, and does not execute tf_keras.

  Until it is executed, tf_keras is supposed to have what Keras 3 has.
  """
  yield from dict(registry().items())
  yield from listed()
  for package in OPTIMIZER_PACKAGES:
    if package != "tf_keras" or lazy_keras.tf_keras_loaded():
      yield from _keras_classes(package)
    else:
      yield from (f"tf_{name}" for name in _keras_classes("keras"))


def _names() -> SelectorMap:
  return _names_of(tuple(_known()))


@functools.lru_cache(maxsize=2)
def _names_of(known: tuple[str, ...]) -> SelectorMap:
  names = SelectorMap()
  for each in known:
    names[each] = each
  return names


def matching(name: str) -> list[str]:
  """Returns the names in full that a name may stand for, registered or not."""
  return _names().matching_selectors(name)


def _is_of(package: str, complete: str) -> bool:
  return complete.startswith(f"{package}.")


_SCHEDULES = ".optimizers.schedules."


@functools.cache
def _keras_classes(package: str) -> dict[str, type]:
  """Returns the optimizers and schedules of Keras 3 or of tf_keras, which it executes, by name."""
  module = importlib.import_module(f"{package}.optimizers")
  base = importlib.import_module(f"{package}.optimizers.schedules").LearningRateSchedule
  classes = [value for value in vars(module).values() if inspect.isclass(value)]
  optimizers = [each for each in classes if issubclass(each, module.Optimizer)]
  found = {f"{package}.{x.__name__}": x for x in optimizers if x.__name__ not in NOT_OPTIMIZERS}
  schedules = [each for each in base.__subclasses__() if _is_of(package, each.__module__)]
  return found | {f"{package}{_SCHEDULES}{each.__name__}": each for each in schedules}


def _selector(complete: str) -> str:
  if complete.startswith("gin.") or getattr(registry().get(complete), "is_method", False):
    return complete
  if any(_is_of(package, complete) for package in OPTIMIZER_PACKAGES):
    return complete  # the same name, whether the other package is registered or not
  return _names().minimal_selector(complete)


def _named(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
  kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
  return {p.name: p for p in signature(target).parameters.values() if p.kind in kinds}


def _has_kwargs(target: Callable[..., Any]) -> bool:
  kinds = [p.kind for p in signature(target).parameters.values()]
  return inspect.Parameter.VAR_KEYWORD in kinds


def _only_for_bases(init: Callable[..., Any]) -> bool:
  """Whether its **kwargs are used once, in `super().__init__(..., **kwargs)`."""
  try:
    [made] = ast.parse(textwrap.dedent(inspect.getsource(init))).body
  except (OSError, TypeError, SyntaxError, ValueError):
    return False  # the source is not there
  [name] = [n for n, p in signature(init).parameters.items() if p.kind is p.VAR_KEYWORD]
  uses = [x for x in ast.walk(made) if isinstance(x, ast.Name) and x.id == name]
  calls = [x for x in ast.walk(made) if isinstance(x, ast.Call)]
  above = [x for x in calls if ast.unparse(x.func) == "super().__init__"]
  given = [k.value for x in above for k in x.keywords if k.arg is None]
  return len(uses) == 1 and uses == given
