"""Where in the user's code something is: a line that mentions it, or what made an operation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from framework import errors

_OUTSIDE = ("verify", "trainer.py")
"""What of the framework is called by no user: what lies further out is not what made an op."""


def is_the_users(kind: type) -> bool:
  """Whether a class is written in the user's own code, not in a library or the framework."""
  try:
    return errors.is_the_users(inspect.getfile(kind))
  except (OSError, TypeError):
    return False


def mention(owner: Any, *texts: str) -> str:
  """Returns the first line that holds one of some texts, in the methods that the user wrote.

  Args:
    owner: an object, such as the task.
    texts: the first that is found anywhere decides.

  Returns:
    "file.py:31, in Mine.loss", or "" where no line holds any.
  """
  return _first(own_methods(owner), texts)


def _first(methods: Iterable[Callable[..., Any]], texts: Sequence[str]) -> str:
  sources = [(method, *_source(method)) for method in methods]
  for text in texts:
    for method, lines, first in sources:
      for number, line in enumerate(lines, first):
        if text in _code(line):
          return _told(method, number)
  return ""


def _code(line: str) -> str:
  return line.partition("#")[0]


def _told(method: Callable[..., Any], number: int) -> str:
  return f"{Path(inspect.getsourcefile(method) or '').name}:{number}, in {method.__qualname__}"


def find(owner: Any, *names: str, containing: Sequence[str] = (), anywhere: bool = False) -> str:
  """Returns where in the user's code a method is written, or a line that holds one of some texts.

  Args:
    owner: an object, whose methods `names` are looked at in order.
    names: methods.
    containing: such as "reduce_mean"; the first line with any of them. Without any, or if none is
      found, the first line of the first of `names` that is the user's.
    anywhere: look at all other methods as well.

  Returns:
    As `mention` does.
  """
  own: dict[str, Callable[..., Any]] = {}
  for method in own_methods(owner):
    own.setdefault(method.__name__, method)
  named = [own[name] for name in names if name in own]
  others = [method for method in own.values() if method not in named] if anywhere else []
  for method in (*named, *others):
    lines, first = _source(method)
    for number, line in enumerate(lines, first):
      if any(text in _code(line) for text in containing):
        return _told(method, number)
  return next((_told(method, _source(method)[1]) for method in named), "")


def change(owner: Any, attribute: str) -> str:
  """Returns the line that changes an attribute, else one that uses it; see `mention`."""
  changes = (".assign", ".append", ".extend", ".update", "[", " +=", " -=", " *=", " /=", " =", "")
  methods = [method for method in own_methods(owner) if method.__name__ != "__init__"]
  texts = [f"self.{attribute}{change}" for change in changes]
  return _first(methods, texts) or mention(owner, *texts)


def own_methods(owner: Any) -> Iterator[Callable[..., Any]]:
  """Yields the functions in the body of the owner's class and of its bases, as the user wrote."""
  for kind in type(owner).__mro__:
    for value in vars(kind).values() if is_the_users(kind) else ():
      function = inspect.unwrap(
        getattr(value, "python_function", getattr(value, "__func__", value))
      )
      if inspect.isfunction(function):
        yield function


def _source(function: Callable[..., Any]) -> tuple[list[str], int]:
  """The lines of a function and the number of the first; of one typed at a prompt, none."""
  try:
    return inspect.getsourcelines(function)
  except (OSError, TypeError):
    return [], 0


def of_operation(operation: tf.Operation, owner: Any) -> str:
  """Returns the user's innermost line that made an operation, "" if only libraries' did.

  Args:
    operation: of a graph that was traced in this process.
    owner: the task, whose methods are told with its class.
  """
  frames = [(frame.filename, frame.lineno, frame.name) for frame in operation.traceback or ()]
  return of_frames(frames, owner)


def of_frames(frames: list[tuple[str, int, str]], owner: Any) -> str:
  """As `of_operation`, of (file, line, function) from the outermost frame to the innermost."""
  root = Path(__file__).parents[2]
  for file, line, name in reversed(frames):
    if any(Path(file).is_relative_to(root / outside) for outside in _OUTSIDE):
      return ""
    if errors.is_the_users(file):
      return f"{Path(file).name}:{line}, in {_qualified(name, file, owner)}"
  return ""


def _qualified(name: str, file: str, owner: Any) -> str:
  for method in own_methods(owner):
    if method.__name__ == name and method.__code__.co_filename == file:
      return method.__qualname__
  return name
