"""What AutoGraph converts: the user's code, and nothing of the framework.

Converting takes 10 to 100 ms per function, which for the verbs of a step was most of the time to
the first step; and none of them branches on a tensor. So the loop is compiled with
`autograph=False`, what the user's code calls is kept `as_written`, and where the framework calls
the user's code, that call is `converted`.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)


def as_written(function: Function) -> Function:
  """Keeps AutoGraph from converting a function, and what it calls (a decorator)."""
  return tf.autograph.experimental.do_not_convert(function)


def methods_as_written(cls: Class) -> Class:
  """Keeps AutoGraph from converting the methods that a class itself defines (a decorator).

  Methods of its subclasses are converted as usual.
  """
  for name, member in list(vars(cls).items()):
    if inspect.isfunction(member) and not name.startswith("__"):
      setattr(cls, name, as_written(member))
    elif isinstance(member, classmethod):
      setattr(cls, name, classmethod(as_written(member.__func__)))
  return cls


@as_written
def converted(function: Function) -> Function:
  """Lets AutoGraph convert a function again when it is called from one kept `as_written`.

  Run eagerly, for debugging, it stays what it is. Exceptions come through as they are.
  """

  def call(*args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)

  def choose(*args: Any, **kwargs: Any) -> Any:
    chosen = call if tf.executing_eagerly() else tf.autograph.to_graph(call)
    return chosen(*args, **kwargs)

  return as_written(choose)  # type: ignore[return-value]
