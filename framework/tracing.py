"""What AutoGraph converts: the user's code, and of the framework only what leads there."""

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

Function = TypeVar("Function", bound=Callable[..., Any])


def as_written(function: Function) -> Function:
  """Keeps AutoGraph from converting a function (a decorator).

  For functions of the framework that neither branch on a tensor nor call the user's code:
  converting all of them made up most of the time to the first step.
  """
  return tf.autograph.experimental.do_not_convert(function)
