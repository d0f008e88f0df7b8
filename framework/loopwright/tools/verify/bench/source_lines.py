"""Finds the line of the user's code behind a finding, by the traceback of an operation."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.util import tf_stack

from loopwright import errors
from loopwright.graphs import operations as graphs
from loopwright.graphs.aliases import Variable
from loopwright.models import models

_VERIFY = str(Path(__file__).parents[1])
_METRICS = str(Path(__file__).parents[3] / "metrics")


def is_the_users(kind: type | Callable[..., Any]) -> bool:
  """Whether a class or function belongs to the user's code, not to a library or the framework."""
  try:
    return errors.is_the_users(inspect.getfile(kind))
  except (OSError, TypeError):
    return False


def own_methods(owner: Any) -> Iterator[Callable[..., Any]]:
  """Yields the user's functions in the body of the owner's class and of its base classes."""
  for kind in type(owner).__mro__:
    for value in vars(kind).values() if is_the_users(kind) else ():
      function = inspect.unwrap(
        getattr(value, "python_function", getattr(value, "__func__", value))
      )
      if inspect.isfunction(function):
        yield function


def of_operation(operation: tf.Operation, owner: Any) -> str:
  """Returns the innermost line of the user's code that made an operation; "" if there is none.

  The methods of `owner`, the task, are named with its class. The operation is of a graph that this
  process has traced.
  """
  return of_frames(_frames(operation), owner)


def near(operation: tf.Operation, owner: Any) -> str:
  """As `of_operation`, whatever called the user's code or was called by it."""
  return of_frames([f for f in _frames(operation) if errors.is_the_users(f[0])], owner)


def _frames(operation: tf.Operation) -> list[tuple[str, int, str]]:
  return [(frame.filename, frame.lineno, frame.name) for frame in operation.traceback or ()]


def method(owner: Any, *names: str) -> str:
  """Returns "file.py:31, in Mine.loss" for the first of some methods that is the user's, or ""."""
  for name in names:
    for each in own_methods(owner):
      if each.__name__ == name:
        code = each.__code__
        return f"{Path(code.co_filename).name}:{code.co_firstlineno}, in {each.__qualname__}"
  return ""


def made_at(tensors: Any, task: Any) -> str:
  """Returns the user's innermost line that made tensors of a graph, else one behind them, or ""."""
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
  for file, line, name in reversed(frames):
    if file.startswith(_VERIFY):  # what called verify is no part of the task
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
  return of_frames([f for f in near if not f[0].startswith(_METRICS)][-1:], owner)


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
