"""Finds the line of the user's code behind a finding, by its text or an operation's traceback."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.util import tf_stack

from loopwright import errors
from loopwright.graphs import operations as graphs
from loopwright.graphs.aliases import Variable
from loopwright.models import models

_OUTSIDE = ("verify", "trainer.py")
"""Parts of the framework that user code does not call; frames further out do not count."""


_METRICS = Path(__file__).parents[3] / "metrics"


def is_the_users(kind: type | Callable[..., Any]) -> bool:
  """Whether a class or function belongs to the user's code, not to a library or the framework."""
  try:
    return errors.is_the_users(inspect.getfile(kind))
  except (OSError, TypeError):
    return False


def mention(owner: Any, *texts: str) -> str:
  """Returns the first line of the user's methods that contains one of some texts.

  Args:
    owner: an object, such as the task.
    texts: in order of preference; the first one found anywhere decides.

  Returns:
    "file.py:31, in Mine.loss", or "" if no line contains any.
  """
  return _first(own_methods(owner), texts)


def _first(methods: Iterable[Callable[..., Any]], texts: Sequence[str]) -> str:
  code = [(method, list(_code(method))) for method in methods]
  found = ((m, n) for text in texts for m, lines in code for n, line in lines if text in line)
  return next((_told(method, number) for method, number in found), "")


def _code(function: Callable[..., Any]) -> Iterator[tuple[int, str]]:
  """Yields the numbers of a function's lines, and the lines without comments."""
  lines, first = _source(function)
  return ((number, line.partition("#")[0]) for number, line in enumerate(lines, first))


def _told(method: Callable[..., Any], number: int) -> str:
  return f"{Path(inspect.getsourcefile(method) or '').name}:{number}, in {method.__qualname__}"


def find(owner: Any, *names: str, containing: Sequence[str] = (), anywhere: bool = False) -> str:
  """Returns the line where a user's method begins, or one in it that contains one of some texts.

  Args:
    owner: an object with the methods.
    names: methods, in the order to search.
    containing: texts such as "reduce_mean". If no line has any, the result is the first line of the
      first of `names` that is the user's.
    anywhere: search all other methods too.

  Returns:
    As `mention`.
  """
  own = nearest_methods(owner)
  named = [own[name] for name in names if name in own]
  others = [method for method in own.values() if method not in named] if anywhere else []
  for method in (*named, *others):
    for number, line in _code(method):
      if any(text in line for text in containing):
        return _told(method, number)
  return next((_told(method, _source(method)[1]) for method in named), "")


def change(owner: Any, attribute: str) -> str:
  """Returns the line that changes an attribute, otherwise one that uses it; see `mention`."""
  changes = (".assign", ".append", ".extend", ".update", "[", " +=", " -=", " *=", " /=", " =", "")
  methods = [method for method in own_methods(owner) if method.__name__ != "__init__"]
  texts = [f"self.{attribute}{change}" for change in changes]
  return _first(methods, texts) or mention(owner, *texts)


def own_methods(owner: Any) -> Iterator[Callable[..., Any]]:
  """Yields the user's functions in the body of the owner's class and of its base classes."""
  for kind in type(owner).__mro__:
    for value in vars(kind).values() if is_the_users(kind) else ():
      function = inspect.unwrap(
        getattr(value, "python_function", getattr(value, "__func__", value))
      )
      if inspect.isfunction(function):
        yield function


def nearest_methods(owner: Any) -> dict[str, Callable[..., Any]]:
  """Returns name -> the user's method that the owner has, whatever it overrides."""
  own: dict[str, Callable[..., Any]] = {}
  for method in own_methods(owner):
    own.setdefault(method.__name__, method)
  return own


def _source(function: Callable[..., Any]) -> tuple[list[str], int]:
  """Returns a function's lines and the number of the first; none if it was typed at a prompt."""
  try:
    return inspect.getsourcelines(function)
  except (OSError, TypeError):
    return [], 0


def of_operation(operation: tf.Operation, owner: Any) -> str:
  """Returns the innermost line of the user's code that made an operation; "" if there is none.

  Args:
    operation: of a graph traced in this process.
    owner: the task, whose methods are named with its class.
  """
  return of_frames(_frames(operation), owner)


def near(operation: tf.Operation, owner: Any) -> str:
  """As `of_operation`, whatever called the user's code or was called by it."""
  return of_frames([f for f in _frames(operation) if errors.is_the_users(f[0])], owner)


def _frames(operation: tf.Operation) -> list[tuple[str, int, str]]:
  return [(frame.filename, frame.lineno, frame.name) for frame in operation.traceback or ()]


def method(owner: Any, *names: str) -> str:
  """Returns "file.py:31, in Mine.loss" for the first of some methods that is the user's, or ""."""
  own = nearest_methods(owner)
  found = (own[name] for name in names if name in own)
  return next((_told(each, _source(each)[1]) for each in found), "")


def made_at(tensors: Any, task: Any) -> str:
  """Returns the user's innermost line that made some tensors, else the nearest one behind them.

  Args:
    tensors: of a graph traced in this process, in any structure; eager ones have no line.
    task: whose methods are named with its class.

  Returns:
    As `method`.
  """
  flat = tf.nest.flatten(tensors, expand_composites=True)
  waiting = [each.op for each in flat if tf.is_symbolic_tensor(each)]
  seen = {id(operation) for operation in waiting}
  for operation in waiting:
    if place := of_caller(_frames(operation), task):
      return place
    if graphs.function_names(operation):
      continue  # what it takes is not what a function in it makes of it
    before = {id(tensor.op): tensor.op for tensor in operation.inputs if id(tensor.op) not in seen}
    waiting += before.values()
    seen |= before.keys()
  return ""


def assigned_at(graph: tf.Graph, variable: Variable, task: Any) -> str:
  """Returns the user's first line that assigns to a variable in a traced graph, or ""."""
  handle = getattr(models.raw(variable), "handle", None)
  inner = {id(inside) for outside, inside in graph.captures if outside is handle}
  changes = (op for op in graphs.operations(graph) if op.type.startswith("Assign"))
  places = (of_caller(_frames(op), task) for op in changes if id(op.inputs[0]) in inner)
  return next(filter(None, places), "")


def of_frames(frames: list[tuple[str, int, str]], owner: Any) -> str:
  """As `of_operation`, for (file, line, function) from the outermost frame to the innermost."""
  root = Path(__file__).parents[2]
  for file, line, name in reversed(frames):
    if any(Path(file).is_relative_to(root / outside) for outside in _OUTSIDE):
      return ""
    if errors.is_the_users(file):
      return f"{Path(file).name}:{line}, in {_qualified(name, file, line, owner)}"
  return ""


def frames(*, but: str) -> list[tuple[str, int, str]]:
  """Returns the running code's frames for `of_frames`, except those of the file `but`."""
  running = [(f.filename, f.lineno, f.name) for f in tf_stack.extract_stack()[:-1]]
  return [frame for frame in running if frame[0] != but]


def of_caller(frames: list[tuple[str, int, str]], owner: Any) -> str:
  """As `of_frames`; "" if the framework's own code, but for `Loss`, is nearer than the user's."""
  near = [f for f in frames if errors.is_the_users(f[0]) or errors.is_the_frameworks(f[0])]
  near = [f for f in near if not Path(f[0]).is_relative_to(_METRICS)]
  return of_frames(near[-1:], owner)


def qualified(place: str, owner: Any) -> str:
  """Returns "file.py:31, in loss" with the class of the owner's method, if it has one."""
  file, _, name = place.rpartition(", in ")
  for method in own_methods(owner):
    if method.__name__ == name and Path(method.__code__.co_filename).name in file:
      return f"{file}, in {method.__qualname__}"
  return place


def _qualified(name: str, file: str, line: int, owner: Any) -> str:
  """Returns the name of the owner's method that a line is in, also in a function inside of it."""
  for method in own_methods(owner):
    code = method.__code__
    if code.co_filename == file and code.co_firstlineno <= line <= _last_line(code):
      return method.__qualname__
  return name


@functools.cache
def _last_line(code: types.CodeType) -> int:
  inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
  return max(*(line or 0 for *_, line in code.co_lines()), *map(_last_line, inner))
