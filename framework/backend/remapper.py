"""Turns off one rewriting of TensorFlow's where it makes a step slower: small fused products.

TensorFlow's remapper replaces a product, the addition of a bias and an activation by a single
operation. On a CPU this saves passes over the result, but oneDNN's operation costs about 4 us more
than the two or three of TensorFlow's: worth it for convolutions and large results, a loss for small
ones (benchmarks/fused_products.py). Results differ by rounding at most.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from framework.backend import autograph, graphs

SMALL = 2**14
"""Up to this many elements of the result, a product is faster when it is not fused."""
_ADDITIONS = {"BiasAdd", "Add", "AddV2"}
_CONVOLUTIONS = {"Conv2D", "Conv3D", "DepthwiseConv2dNative"}
_OPTION = "remapping"


class Compiled:
  """A `tf.function` of `function`, whose calls fuse products where that is faster.

  Without fused products if all that could be fused are small. They stay if there is a device that
  is no CPU, and if `tf.config.optimizer.set_experimental_options` sets "remapping". Each trace
  decides, for the calls from then on.
  """

  def __init__(self, function: Callable[..., Any]) -> None:
    """Traces nothing yet (host)."""

    @functools.wraps(function)
    def traced(*args: Any) -> Any:
      results = function(*args)
      self._fuses = _fuses(tf.compat.v1.get_default_graph())
      self._choose()  # for the call that has started this trace
      return results

    self.function = autograph.compiled(traced)
    self._fuses = True
    self._options = context.FunctionCallOptions()  # of the call that runs

  def __call__(self, *args: Any) -> Any:
    """Calls the function with these options, and leaves those of the thread as they were (host)."""
    here = context.context()
    usual = here.function_call_options
    self._options = here.function_call_options = copy.copy(usual)
    self._choose()
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

  def _choose(self) -> None:
    """Sets the options of the call that runs."""
    if self._fuses:
      return
    config = tf.compat.v1.ConfigProto.FromString(self._options.config_proto_serialized)
    rewriting = config.graph_options.rewrite_options
    rewriting.remapping = rewriting.OFF
    self._options.config_proto_serialized = config


def _fuses(graph: Any) -> bool:
  """Whether to call a function of this graph with fused products."""
  kinds = {device.device_type for device in tf.config.list_logical_devices()}
  chosen = _OPTION in tf.config.optimizer.get_experimental_options()
  return chosen or kinds != {"CPU"} or not fuses_small_only(graph)


def fuses_small_only(graph: Any) -> bool:
  """Whether TensorFlow would fuse products of a concrete function's graph, all of them small."""
  sizes = []
  for operation in graphs.operations(graph):
    if operation.type not in _ADDITIONS:
      continue
    kinds = {value.op.type for value in operation.inputs}
    if kinds & _CONVOLUTIONS:
      return False
    if "MatMul" in kinds:
      sizes.append(operation.outputs[0].shape.num_elements())
  return bool(sizes) and all(size is not None and size <= SMALL for size in sizes)
