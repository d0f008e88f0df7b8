"""What AutoGraph converts: the user's code, and of the framework nothing but the training loop.

Converting takes 10 to 100 ms a function, which for the verbs of a step came to most of the time to
the first step; and none of them branches on a tensor. So the framework's functions are kept
`as_written`, and where one of them calls the user's, that call is `converted`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

Function = TypeVar("Function", bound=Callable[..., Any])


def as_written(function: Function) -> Function:
  """Keeps AutoGraph from converting a function, and what it calls (a decorator)."""
  return tf.autograph.experimental.do_not_convert(function)


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
