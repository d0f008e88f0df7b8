"""Limits AutoGraph to the user's code and the framework's training loop.

Converting takes 10 to 100 ms per function. For the verbs of a step this was most of the time to the
first step, and none of them branches on a tensor. So the framework's functions are `as_written`,
and where one calls a user's function, that call is `converted`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

Function = TypeVar("Function", bound=Callable[..., Any])


def as_written(function: Function) -> Function:
  """Decorator: AutoGraph does not convert the function or anything that it calls."""
  return tf.autograph.experimental.do_not_convert(function)


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
