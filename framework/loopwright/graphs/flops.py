"""Floating-point operations of matrix products and convolutions, from the shapes of a trace.

`tf.compat.v1.profiler` counts no Einsum and no product of batches, and nothing inside a function.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Collection, Iterable
from typing import Any

import tensorflow as tf

from loopwright.graphs import operations

_LOOPS, _BRANCHES = ("While", "StatelessWhile"), ("If", "StatelessIf", "Case", "StatelessCase")
_PRODUCT = re.compile("(Batch)?MatMul(V2|V3)?")
_CONVOLUTION = re.compile("(Depthwise)?Conv(2D|3D|2dNative)?(Backprop(Input|Filter)(V2)?)?")
_OPAQUE = re.compile("CudnnRNN.*|Sparse.*MatMul|.*SparseMatrix.*MatMul")
"""Products whose sizes are not in their shapes."""


class Count:
  """What some tensors need; a multiply-add counts as 2, all else as 0.

  Attributes:
    dtypes: name of a dtype -> floating-point operations that give it.
    unknown: names of operations that are not in it: loops of unknown length, unknown shapes.
  """

  def __init__(
    self, tensors: Iterable[tf.Tensor], *, among: Collection[tf.Operation] | None = None
  ) -> None:
    """Counts the operations of a trace that tensors depend on, with those of called functions.

    Args:
      tensors: of one graph.
      among: counts only these of its operations; None all.
    """
    self.dtypes: collections.Counter[str] = collections.Counter()
    self.unknown: list[str] = []
    needed = [tensor.op for tensor in tensors if tf.is_symbolic_tensor(tensor)]
    seen = set(needed)
    for operation in needed:  # grows
      if among is None or operation in among:
        self._add(operation)
        before = [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
        needed += [each for each in dict.fromkeys(before) if each not in seen]
        seen.update(before)

  @property
  def flops(self) -> int:
    """The floating-point operations of all dtypes."""
    return self.dtypes.total()

  def _add(self, operation: tf.Operation) -> None:
    called = _called(operation)
    inner, turns = [Count(graph.outputs) for graph in called.values() if graph is not None], 1
    if operation.type in _BRANCHES:
      inner = sorted(inner, key=lambda branch: branch.flops)[-1:]
    elif operation.type in _LOOPS:
      turns = _turns(operation)
    unknown = None in called.values() or (not turns and any(each.flops for each in inner))
    try:
      flops = _own(operation)
    except (TypeError, ValueError):  # a size is None
      unknown = True
    else:
      if flops:
        self.dtypes[operation.outputs[0].dtype.name] += flops
    if unknown or _OPAQUE.fullmatch(operation.type):
      self.unknown.append(operation.name)
    for each in inner:
      self.dtypes.update({dtype: turns * flops for dtype, flops in each.dtypes.items()})
      self.unknown += each.unknown


def _called(operation: tf.Operation) -> dict[str, Any]:
  """Returns the functions that an operation calls: name -> graph, None if it cannot be had."""
  names = operations.function_names(operation)
  return {name: operations.function_of(operation.graph, name) for name in names}


def _turns(loop: tf.Operation) -> int:
  """Returns how often a loop turns at most, by what counts up to a constant in it; 0 if unknown."""
  condition, body = (_called(loop)[loop.get_attr(name).name] for name in ("cond", "body"))
  if condition is None or body is None:
    return 0
  after = [_source(output) for output in body.outputs]

  def constant(tensor: tf.Tensor, graph: Any) -> Any:
    place = _place(tensor, graph)
    if place is None:
      return tf.get_static_value(tensor)
    return tf.get_static_value(loop.inputs[place]) if after[place] is body.inputs[place] else None

  found, tests = [], [condition.outputs[0]]
  for test in map(_source, tests):  # grows
    if test.op.type == "LogicalAnd":
      tests += test.op.inputs
    elif test.op.type == "Less" and (place := _place(test.op.inputs[0], condition)) is not None:
      added = after[place].op
      if added.type == "AddV2" and _place(added.inputs[0], body) == place:
        first = tf.get_static_value(loop.inputs[place])
        last, more = constant(test.op.inputs[1], condition), constant(added.inputs[1], body)
        if None not in (first, last, more) and last > 0 < more:
          found.append(max(0, math.ceil((last - first) / more)))
  return min(found, default=0)


def _source(tensor: tf.Tensor) -> tf.Tensor:
  """Returns what copies are copies of."""
  while tensor.op.type == "Identity":
    [tensor] = tensor.op.inputs
  return tensor


def _place(tensor: tf.Tensor, graph: Any) -> int | None:
  """Returns which input of a function's graph a tensor is; None if none."""
  return next((n for n, each in enumerate(graph.inputs) if each is tensor), None)


def _own(operation: tf.Operation) -> int:
  """Returns the floating-point operations of an operation itself.

  Raises:
    TypeError, ValueError: a size is unknown.
  """
  if _PRODUCT.fullmatch(operation.type):
    first = "transpose_a" if operation.type == "MatMul" else "adj_x"
    summed = operation.inputs[0].shape[-2 if operation.get_attr(first) else -1]
    return 2 * math.prod([*operation.outputs[0].shape, summed])
  if operation.type == "Einsum":
    return _einsum(operation)
  if operation.type == "XlaCallModule" and b"__cudnn$fmha" in operation.get_attr("module"):
    query, key = (tensor.shape for tensor in operation.inputs[:2])  # products as of plain attention
    return 4 * math.prod([*query, key[1]])
  if _CONVOLUTION.fullmatch(operation.type):
    result = operation.inputs[2] if "Backprop" in operation.type else operation.outputs[0]
    kernel = operation.outputs[0] if "Filter" in operation.type else operation.inputs[1]
    taps = kernel.shape[: 2 if "Depthwise" in operation.type else -1]
    return 2 * math.prod([*result.shape, *taps])
  return 0


def _einsum(operation: tf.Operation) -> int:
  """Returns the same of an Einsum; that of one operand multiplies nothing."""
  given, _, kept = operation.get_attr("equation").decode().partition("->")
  if len(operation.inputs) == 1:
    return 0
  sizes: dict[str, int | None] = {}
  for term, operand in zip(given.split(","), operation.inputs, strict=True):
    before, _, after = term.partition("...")
    sizes |= zip(before, operand.shape.as_list(), strict=False)
    sizes |= zip(after[::-1], operand.shape.as_list()[::-1], strict=False)
  summed = [size for axis, size in sizes.items() if axis not in kept]
  return 2 * math.prod([*operation.outputs[0].shape, *summed])
