"""Calls compiled loops without one of TensorFlow's graph rewritings that costs more than it gives.

The MLIR part of Grappler ("tfg") infers shapes. It changes no operation, and its time grows with
the square of the inputs of one operation: 14 of the 34 s to the first step of 2,000 variables.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from loopwright.graphs import autograph


class Compiled:
  """A `tf.function` of `function`, whose calls leave out the rewriting described above."""

  def __init__(self, function: Callable[..., Any]) -> None:
    self.function = autograph.compiled(function)

  def __call__(self, *args: Any) -> Any:
    """Calls the function with this option, and leaves those of the thread as they were (host)."""
    here = context.context()
    usual = here.function_call_options
    here.function_call_options = copy.copy(usual)
    here.function_call_options.config_proto_serialized = _without(usual.config_proto_serialized)
    try:
      return self.function(*args)
    finally:
      here.function_call_options = usual

  def get_concrete_function(self, *args: Any) -> Any:
    """As that of a `tf.function`."""
    return self.function.get_concrete_function(*args)

  def experimental_get_tracing_count(self) -> int:
    """As that of a `tf.function`."""
    return self.function.experimental_get_tracing_count()


@functools.cache
def _without(config_proto: bytes) -> Any:
  """Returns the ConfigProto with the rewriting turned off."""
  config = tf.compat.v1.ConfigProto.FromString(config_proto)
  config.graph_options.rewrite_options.disable_tfg_optimizer = True
  return config
