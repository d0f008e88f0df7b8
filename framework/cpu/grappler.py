"""Calls compiled loops without two of TensorFlow's graph rewritings that cost more than they give.

Grappler, TensorFlow's graph optimizer, has options that belong to a call. These calls run without:

- the inference of shapes of its MLIR part ("tfg"). It changes no operation, and its time grows with
  the square of the inputs of one operation: 14 of the 34 s to the first step of 2,000 variables.
- the remapper, where it makes a step slower. It replaces a product, the addition of a bias and an
  activation by a single operation. On a CPU this saves passes over the result, but oneDNN's
  operation costs about 4 us more than the two or three of TensorFlow's: worth it for convolutions
  and large results, a loss for small ones (benchmarks/fused_products.py). Results differ by
  rounding at most.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from framework.graphs import autograph
from framework.graphs import operations as graphs

SMALL = 2**14
"""Up to this many elements of the result, a product is faster when it is not fused."""
_ADDITIONS = {"BiasAdd", "Add", "AddV2"}
_CONVOLUTIONS = {"Conv2D", "Conv3D", "DepthwiseConv2dNative"}
_OPTION = "remapping"


class Compiled:
  """A `tf.function` of `function`, whose calls leave out the rewritings described above.

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
    usual = self._options.config_proto_serialized
    self._options.config_proto_serialized = _without(usual, remapper=not self._fuses)


@functools.cache
def _without(config_proto: bytes, *, remapper: bool) -> Any:
  """Returns a ConfigProto that leaves out what no call needs, and the remapper if asked for."""
  config = tf.compat.v1.ConfigProto.FromString(config_proto)
  rewriting = config.graph_options.rewrite_options
  rewriting.disable_tfg_optimizer = True
  if remapper:
    rewriting.remapping = rewriting.OFF
  return config


def _fuses(graph: Any) -> bool:
  """Whether to call a function of this graph with fused products."""
  chosen = _OPTION in tf.config.optimizer.get_experimental_options()
  return chosen or not only_cpus() or not fuses_small_only(graph)


def only_cpus() -> bool:
  """Returns whether TensorFlow sees no other device (host)."""
  return {device.device_type for device in tf.config.list_logical_devices()} == {"CPU"}


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
