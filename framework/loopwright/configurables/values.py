"""Checks whether a value in a gin file fits the annotation of its parameter.

gin itself does not check this. A value fits if it cannot be decided.
"""

import inspect
import types
import typing
from collections import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

from loopwright.configurables.reading import Reference
from loopwright.configurables.table import UNKNOWN, result

SEQUENCES = (list, tuple, set, frozenset, abc.Sequence, abc.Iterable, abc.Collection, abc.Set)
UNIONS = (typing.Union, types.UnionType)


def map_references(value: Any, change: Callable[[Any], Any], kind: type = Reference) -> Any:
  """Returns `value` with `change` applied to each reference, also inside lists, tuples, dicts."""
  if isinstance(value, kind):
    return change(value)
  if type(value) in (list, tuple):
    return type(value)(map_references(item, change, kind) for item in value)
  if type(value) is dict:
    changed = (map_references(item, change, kind) for pair in value.items() for item in pair)
    return dict(zip(changed, changed, strict=True))
  return value


def references(value: Any) -> list[Reference]:
  """Returns every reference in `value`."""
  found: list[Reference] = []
  map_references(value, found.append)
  return found


def fits(value: Any, annotation: Any) -> bool:
  """Whether `value`, with macros replaced, may be passed to a parameter with this annotation.

  As in Python's type checkers, an int is a float. Unlike there, a bool is not an int, a string is
  not a sequence, and a list fits a tuple. A reference fits by the type that calling it returns.
  """
  origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
  if annotation in (Any, object, UNKNOWN) or isinstance(annotation, (str, TypeVar)):
    return True
  if origin in UNIONS:
    return any(fits(value, argument) for argument in arguments)
  if origin is typing.Annotated:
    return fits(value, arguments[0])
  if isinstance(value, Reference):
    return _reference_fits(value, origin or annotation, arguments)
  if origin is Literal:
    return any(value == choice and type(value) is type(choice) for choice in arguments)
  if isinstance(value, (list, tuple)):
    return _sequence_fits(value, origin or annotation, arguments)
  if isinstance(value, dict):
    return _dict_fits(value, origin or annotation, arguments)
  return _scalar_fits(value, origin or annotation)


def wanted(annotation: Any) -> Iterator[tuple[type, str]]:
  """Yields the classes that an annotation accepts, each with the form of a reference to it."""
  origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
  if origin in UNIONS:
    for argument in arguments:
      yield from wanted(argument)
  elif origin is abc.Callable and arguments:
    yield from ((each, "@{}") for each, _ in wanted(arguments[-1]))
  elif origin in SEQUENCES and arguments:
    yield from ((each, f"[{form}]") for each, form in wanted(arguments[0]))
  elif is_plain_class(annotation):
    yield annotation, "@{}()"


def is_plain_class(annotation: Any) -> bool:
  """Whether `issubclass` accepts it."""
  if annotation in (Any, object, UNKNOWN) or getattr(annotation, "_is_protocol", False):
    return False
  # Before Python 3.11, isclass(dict[str, int]) is true.
  return inspect.isclass(annotation) and typing.get_origin(annotation) is None


def _scalar_fits(value: Any, kind: Any) -> bool:
  if kind is None:
    return value is None
  if kind in (int, float):
    return type(value) in (int, kind)
  if isinstance(value, (str, bytes)) and kind in SEQUENCES:
    return False
  try:
    return isinstance(value, kind)
  except TypeError:  # A protocol or a NewType, which cannot be tested.
    return True


def _sequence_fits(value: Sequence[Any], kind: Any, arguments: tuple[Any, ...]) -> bool:
  if kind not in SEQUENCES:
    return _scalar_fits(value, kind)
  if kind is tuple and arguments and arguments[-1] is not Ellipsis:
    return len(value) == len(arguments) and all(map(fits, value, arguments))
  return not arguments or all(fits(item, arguments[0]) for item in value)


def _dict_fits(value: dict[Any, Any], kind: Any, arguments: tuple[Any, ...]) -> bool:
  if not _scalar_fits(value, kind) or len(arguments) != 2:
    return _scalar_fits(value, kind)
  return all(fits(k, arguments[0]) and fits(v, arguments[1]) for k, v in value.items())


def _reference_fits(value: Reference, kind: Any, arguments: tuple[Any, ...]) -> bool:
  given = result(value.name)
  if value.called and kind is abc.Callable and arguments:
    # A Keras model is callable, but the parameter expects a function that makes one.
    return _may_be(given, kind) and not _is_surely(given, arguments[-1])
  if value.called:
    return _may_be(given, kind)
  if kind is abc.Callable:
    return not arguments or _may_be(given, arguments[-1])
  if kind is type:
    return inspect.isclass(given) and (not arguments or _may_be(given, arguments[0]))
  return bool(getattr(kind, "_is_protocol", False))


def _may_be(given: Any, annotation: Any) -> bool:
  if typing.get_origin(annotation) in UNIONS:
    return any(_may_be(given, member) for member in typing.get_args(annotation))
  if typing.get_origin(given) in UNIONS:
    return any(_may_be(member, annotation) for member in typing.get_args(given))
  have, want = _kind(given), _kind(annotation)
  if want is abc.Callable and is_plain_class(have):
    return have is abc.Callable or any("__call__" in vars(base) for base in have.__mro__)
  if not (is_plain_class(have) and is_plain_class(want)):
    return True
  return issubclass(have, want) or issubclass(want, have) or (have, want) == (int, float)


def _is_surely(given: Any, annotation: Any) -> bool:
  return is_plain_class(given) and is_plain_class(annotation) and issubclass(given, annotation)


def _kind(annotation: Any) -> Any:
  return type(None) if annotation is None else typing.get_origin(annotation) or annotation
