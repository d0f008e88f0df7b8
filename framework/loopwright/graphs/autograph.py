"""Limits AutoGraph to the user's code.

Converting takes 10 to 100 ms per function. For the verbs of a step this was most of the time to the
first step, and none of them branches on a tensor. So the loop is compiled with `autograph=False`,
framework functions that the user's code calls are `as_written`, and the framework's calls of the
user's code are `converted`.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import tensorflow as tf

from loopwright.errors import ConfigError, is_the_users

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)


def as_written(function: Function) -> Function:
  """Decorator: AutoGraph does not convert the function or anything that it calls."""
  return tf.autograph.experimental.do_not_convert(function)


def methods_as_written(cls: Class) -> Class:
  """Class decorator: AutoGraph does not convert the methods defined in this class.

  Methods defined in subclasses are converted as usual.
  """
  for name, member in list(vars(cls).items()):
    if inspect.isfunction(member) and not name.startswith("__"):
      setattr(cls, name, as_written(member))
    elif isinstance(member, classmethod):
      setattr(cls, name, classmethod(as_written(member.__func__)))
  return cls


@as_written
def converted(function: Function) -> Function:
  """Returns a function that AutoGraph converts even when called from an `as_written` function.

  In eager mode, for debugging, it is not converted. Exceptions pass through unchanged.
  """

  def call(*args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)

  def choose(*args: Any, **kwargs: Any) -> Any:
    chosen = call if tf.executing_eagerly() else tf.autograph.to_graph(call)
    return chosen(*args, **kwargs)

  return as_written(choose)  # type: ignore[return-value]


def _place(code: Any) -> str:
  """Returns " (file:line, in function)" of the innermost converted line, or "" if unknown."""
  for frame in code.translated_stack:  # the innermost first
    if frame.is_converted and is_the_users(frame.filename):
      return f" ({Path(frame.filename).name}:{frame.lineno}, in {frame.function_name})"
  return ""


def compiled(function: Callable[..., Any]) -> Any:
  """Returns a `tf.function` that AutoGraph leaves alone, except for what it calls `converted`.

  An error in converted code names the line of the user's file, as `tf.function` itself reports it;
  a ConfigError stays one.
  """

  @functools.wraps(function)
  def call(*args: Any, **kwargs: Any) -> Any:
    try:
      return function(*args, **kwargs)
    except Exception as error:
      if (code := getattr(error, "ag_error_metadata", None)) is None:
        raise
      if isinstance(error, ConfigError):
        raise ConfigError(f"{error}{_place(code)}") from error
      raise code.to_exception(error) from error

  return tf.function(call, autograph=False)
