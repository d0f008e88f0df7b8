"""The variables and tables that an object holds, each in a place that the next process has too.

A place is the way to it, from the object, and can be followed again:

    memory.keys.0      attributes, keys and indices; "%2E" stands for a "." in one of them
    stats.[0]          a key that is no text
    touch.<count>      what a function has in its closure, as default or as global
    <Base%2Ecount>     an attribute of a class that another one hides

Elements of a set, or keys such as `variable.ref()`, have no such place. Globals and classes of an
installed library are not looked through: one function may lead to all that a program has loaded.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import itertools
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import stateful_random_ops
from tensorflow.python.trackable import base

from loopwright.models import models
from loopwright.models.models import TABLES, Hidden

_GENERATOR = "<tf random>"
"""The place of TensorFlow's global generator."""
_MOST = 10_000
"""Of the elements of a list or dict, those in which variables are looked for."""
_LISTS = (list, tuple, collections.deque)
_CALLS = ("func", "args", "keywords")
_POINTERS: dict[type, tuple[str, ...]] = {
  types.MethodType: ("__self__", "__func__"),
  functools.partial: _CALLS,
  functools.partialmethod: _CALLS,
  functools.cached_property: ("func",),
  property: ("fget", "fset"),
  staticmethod: ("__func__",),
  classmethod: ("__func__",),
  tf.types.experimental.PolymorphicFunction: ("python_function",),
}
"""Objects without attributes of their own, and what leads on."""
_OPAQUE = (types.ModuleType, tf.Tensor, tf.Graph, tf.data.Dataset, tf.distribute.Strategy)
_NO_OBJECTS = {"tensorflow", "numpy", "builtins"}
_LIBRARIES = {*_NO_OBJECTS, "absl", "keras", "loopwright", "tf_keras", "wrapt"}
_LIBRARIES |= sys.stdlib_module_names
_INSTALLED = {"site-packages", "dist-packages"}


class Place(NamedTuple):
  """Where an object has a variable, or a table that can be changed.

  Attributes:
    name: the way to it, such as "memory.keys.0".
    variable: what is there.
    holder: whose attribute or element it is.
    bare: whether only attributes of the object, lists and dicts lead to it.
    of_network: whether a layer of Keras leads to it.
  """

  name: str
  variable: Any
  holder: Any = None
  bare: bool = False
  of_network: bool = False


def reachable(root: object, *, by_code: bool = True) -> Iterator[Place]:
  """Yields the variables and tables that an object holds, or those below it, each once.

  By the shortest way: first through attributes and elements, then, `by_code`, through what its
  functions read. TensorFlow's and Keras's own lists of what is tracked do not matter.
  """
  data = collections.deque([Place("", root, bare=True)])
  code: collections.deque[Place] = collections.deque()
  if by_code and stateful_random_ops.global_generator is not None:
    code.append(Place(_GENERATOR, stateful_random_ops.global_generator))
  seen: dict[int, Any] = {}  # with each object, which may be made anew for each look
  own = _packages(root)
  while waiting := data or code:
    place = waiting.popleft()
    value = place.variable
    if id(value) in seen:
      continue
    seen[id(value)] = value
    if is_state(value):
      yield place
      continue
    deep = place.of_network or models.is_keras(value)
    plain = place.bare and (not place.name or isinstance(value, (Mapping, list, tuple)))
    for part, each in _tolerant(_data(value)):
      if _is_followed(each, own):
        waiting.append(Place(_joined(place.name, part), each, value, plain, deep))
    for part, each in _tolerant(_code(value, own)) if by_code else ():
      if _is_followed(each, own):
        code.append(Place(_joined(place.name, part), each, value, of_network=deep))


def follow(root: object, name: str) -> Any:
  """Returns the variable or table in a place of an object; None if there is none."""
  parts, own = name.split("."), _packages(root)
  if parts[0] == _GENERATOR:
    root, parts = tf.random.get_global_generator(), parts[1:]
  for part in parts:
    found = (each for key, each in itertools.chain(_data(root), _code(root, own)) if key == part)
    root = next(found, None)
    if not _is_followed(root, own):
      return None
  return root if is_state(root) else None


def named_before(root: object) -> dict[str, list[Place]]:
  """Returns name -> places of an object, by the names of earlier versions, which may be of several.

  They joined all keys by ".", looked into attributes, lists and dicts alone, and took the name of
  the variable for the rest.
  """
  names: dict[int, str] = {}
  waiting, seen = [("", root)], {id(root): root}
  for name, holder in waiting:  # grows
    for key, value in _members_before(holder):
      if id(value) not in seen and (is_state(value) or _was_followed(value)):
        seen[id(value)] = value
        names[id(value)] = _joined(name, str(key))
        waiting += [] if is_state(value) else [(names[id(value)], value)]
  found = collections.defaultdict(list)
  for place in reachable(root):
    own = str(getattr(models.raw(place.variable), "name", ""))
    found[names.get(id(place.variable), f"other.{own.partition(':')[0]}")].append(place)
  return found


def _members_before(holder: Any) -> Iterable[tuple[Any, Any]]:
  if isinstance(holder, (Mapping, list, tuple)):
    if len(holder) > _MOST:
      return ()
    return list(holder.items()) if isinstance(holder, Mapping) else enumerate(holder)
  return list(vars(holder).items())


def _was_followed(value: Any) -> bool:
  of_code = (type, types.FunctionType, tf.types.experimental.PolymorphicFunction)
  if isinstance(value, (Mapping, list, tuple, base.Trackable)):
    return not isinstance(value, (Hidden, *of_code, *_OPAQUE))
  plain = type(value).__module__.partition(".")[0] not in _NO_OBJECTS
  return hasattr(value, "__dict__") and plain and not isinstance(value, (*of_code, *_OPAQUE))


def is_state(value: Any) -> bool:
  """Whether it is a variable, or a table that can be changed."""
  return models.is_variable(value) or isinstance(value, TABLES)


def _joined(name: str, part: str) -> str:
  return f"{name}.{part}" if name else part


def _tolerant(parts: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
  """Yields up to where an object of a library raises something of its own."""
  with contextlib.suppress(Exception):
    yield from parts


def _is_followed(value: Any, own: Set[str]) -> bool:
  try:
    return _may_hold(value, own)
  except Exception:  # of a library's object, which raises something of its own
    return False


def _may_hold(value: Any, own: Set[str]) -> bool:
  if value is None or isinstance(value, (Hidden, *_OPAQUE)):
    return False
  if is_state(value) or isinstance(value, (Mapping, *_LISTS, *_POINTERS, weakref.ref)):
    return True
  if isinstance(value, types.FunctionType):
    return _package(value) not in _LIBRARIES
  if isinstance(value, type):
    return _is_of_user(value, own)
  return isinstance(value, base.Trackable) or (
    _package(type(value)) not in _NO_OBJECTS
    and (_attributes(value) is not None or next(_slots(value), None) is not None)
  )


def _is_of_user(code: Any, own: Set[str]) -> bool:
  """Whether a class, function or module is of no library; `own` are no libraries."""
  package = _package(code)
  return package not in _LIBRARIES and (package in own or not _is_installed(package))


def _packages(root: object) -> Set[str]:
  """Returns the packages that define the class of an object: the user's, even if installed."""
  return {"__main__", *map(_package, type(root).__mro__)}


@functools.cache
def _is_installed(package: str) -> bool:
  module = sys.modules.get(package)
  places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
  return any(not _INSTALLED.isdisjoint(PurePath(place).parts) for place in places)


def _package(code: Any) -> str:
  name = code.__name__ if isinstance(code, types.ModuleType) else code.__module__
  return name.partition(".")[0] if isinstance(name, str) else "builtins"


def _data(holder: Any) -> Iterator[tuple[str, Any]]:
  """Yields the attributes and elements of an object, each with the part of a name."""
  if isinstance(holder, (type, types.FunctionType, *_POINTERS, weakref.ref)):
    return
  contains = isinstance(holder, (Mapping, *_LISTS))
  if contains and len(holder) <= _MOST:
    yield from _keyed(holder) if isinstance(holder, Mapping) else _numbered(holder)
  if not contains or _package(type(holder)) not in _NO_OBJECTS:
    for name, value in list((_attributes(holder) or {}).items()):
      yield ("@" if contains else "") + _escaped(str(name)), value
    yield from _slots(holder)


def _attributes(holder: Any) -> Mapping[str, Any] | None:
  """Returns the attributes of an object itself; None if it can have none."""
  try:
    return vars(holder) if hasattr(holder, "__dict__") else None
  except Exception:  # its own `__getattr__` raises something else than an AttributeError
    return None


def _numbered(elements: Iterable[Any]) -> Iterator[tuple[str, Any]]:
  return ((str(number), value) for number, value in enumerate(list(elements)))


def _keyed(holder: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
  found = [(_key(key), value) for key, value in list(holder.items())]
  counts = collections.Counter(part for part, _ in found)
  return ((part, value) for part, value in found if part and counts[part] == 1)


def _key(key: Any) -> str:
  """Returns the part of a name for a key; "" if that is not the same in each process."""
  if type(key) is str:
    return _escaped(key)
  text = _told(key)
  return f"[{text.translate(_ESCAPES)}]" if text else ""


def _told(key: Any) -> str:
  if isinstance(key, enum.Enum):
    return f"{type(key).__qualname__}:{key.name}"
  if isinstance(key, (str, bytes, bool, int, float, complex, tf.DType, type(None))):
    return repr(key)
  if isinstance(key, np.generic):
    return repr(key.item())
  if isinstance(key, tuple):
    parts = [_told(part) for part in key]
    return f"({', '.join(parts)})" if all(parts) else ""
  return f"{key.__module__}:{key.__qualname__}" if isinstance(key, type) else ""


_ESCAPES = {ord(sign): f"%{ord(sign):02X}" for sign in "%./"}


def _escaped(name: str) -> str:
  """Returns a name as a part of a place, so that no other name, or way, gives the same."""
  text = name.translate(_ESCAPES)
  odd = text[:1] in ("", "[", "<", "@")
  return f"%{ord(text[0]):02X}{text[1:]}" if odd and text else text or "%"


def _slots(holder: Any) -> Iterator[tuple[str, Any]]:
  for kind in type(holder).__mro__:
    for name, member in vars(kind).items():
      if isinstance(member, types.MemberDescriptorType) and _package(kind) not in _LIBRARIES:
        try:
          value = member.__get__(holder)
        except AttributeError:  # it has no value
          continue
        hidden = vars(type(holder)).get(name, getattr(type(holder), name, None)) is not member
        yield _of_class(kind, name) if hidden else _escaped(name), value


def _of_class(kind: type, name: str) -> str:
  return f"<{_escaped(f'{kind.__qualname__}.{name}')}>"


def _code(holder: Any, own: Set[str]) -> Iterator[tuple[str, Any]]:
  """Yields what the functions and the class of an object lead to, with the part of a name."""
  if isinstance(holder, weakref.ref):
    yield "<>", holder()
  for kind, names in _POINTERS.items():
    if isinstance(holder, kind):
      yield from ((name, getattr(holder, name)) for name in names)
      return
  if isinstance(holder, types.FunctionType):
    yield from _of_function(holder, own)
    return
  hidden = set() if isinstance(holder, type) else {*(_attributes(holder) or ())}
  for kind in (holder if isinstance(holder, type) else type(holder)).__mro__:
    for name, value in list(vars(kind).items()) if _is_of_user(kind, own) else ():
      if not isinstance(value, types.MemberDescriptorType) and name != "__dict__":
        yield _of_class(kind, name) if name in hidden else _escaped(name), value
        hidden.add(name)


def _of_function(function: types.FunctionType, own: Set[str]) -> Iterator[tuple[str, Any]]:
  yield from ((_escaped(name), value) for name, value in vars(function).items())
  cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
  for name, cell in cells:
    if cell != types.CellType():  # it is not empty
      yield f"<{name}>", cell.cell_contents
  for number, value in enumerate(function.__defaults__ or ()):
    yield f"<default {number}>", value
  for name, value in (function.__kwdefaults__ or {}).items():
    yield f"<default {name}>", value
  names = _names(function.__code__) if _is_of_user(function, own) else set()
  for name in sorted(names & function.__globals__.keys()):
    value = function.__globals__[name]
    yield f"<global {name}>", value
    if isinstance(value, types.ModuleType) and _is_of_user(value, own):
      for each in sorted(names & vars(value).keys()):
        yield f"<global {name}:{each}>", vars(value)[each]


def _names(code: types.CodeType) -> set[str]:
  """Returns the globals and attributes that a function, or one inside it, reads."""
  inner = (_names(each) for each in code.co_consts if isinstance(each, types.CodeType))
  return {*code.co_names}.union(*inner)
