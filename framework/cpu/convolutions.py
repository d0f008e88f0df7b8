"""The two gradients of a convolution, one after the other on CPUs.

The gradients of a convolution's input and of its filter both need the gradient of its result, so
TensorFlow starts them together. On a CPU each divides its work over all threads and waits for the
parts. It is faster to take that of the input first: the backward pass goes on with it, and that of
the filter runs beside the small operations that follow. benchmarks/convolutions.py has figures.

Results of few pixels stay as they are, for which together is as fast or faster, products of
matrices, for which the order makes no difference, and depthwise convolutions, which get slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any

import tensorflow as tf

from framework.cpu import grappler

_OF_FILTER, _OF_INPUT = "Conv2DBackpropFilter", "Conv2DBackpropInput"
PIXELS = 10_000
"""Of all images of a result: from so many on, one gradient after the other is faster."""
_BETWEEN = {"AddN", "AddV2", "Cast", "Identity"}
"""Operations between a filter's gradient and what the tape returns: regularization, precision."""


def input_first(gradients: Sequence[tf.Tensor | None]) -> None:
  """Lets the gradient of each convolution's filter wait for that of its input (replica context).

  It orders operations of the graph under trace and changes none of them. It does nothing in eager
  mode and where a device is no CPU.

  Args:
    gradients: of the variables, from a tape, and not yet used.
  """
  if tf.executing_eagerly() or not grappler.only_cpus():
    return
  wanted = {g.op for g in gradients if g is not None and tf.is_symbolic_tensor(g)}
  for of_filter in _operations(wanted):
    _, _, of_result = of_filter.inputs
    pixels = of_result.shape[:3].num_elements()
    if pixels is None or pixels < PIXELS:
      continue
    for other in of_result.consumers():
      # Where no variable comes before the convolution, nothing needs the gradient of its input.
      if other.type == _OF_INPUT and _leads(other, wanted) and not _leads(of_filter, {other}):
        of_filter._add_control_input(other)


def _operations(wanted: Set[Any]) -> Iterator[Any]:
  """Yields those that make a filter's gradient, alone or as a part of what is wanted."""
  seen, left = set(wanted), list(wanted)
  while left:
    operation = left.pop()
    if operation.type == _OF_FILTER:
      yield operation
    elif operation.type in _BETWEEN:
      found = {value.op for value in operation.inputs} - seen
      seen |= found
      left += found


def _leads(operation: Any, targets: Set[Any]) -> bool:
  """Returns whether one of `targets` needs the result of an operation."""
  seen, left = {operation}, [operation]
  while left:
    for value in left.pop().outputs:
      found = set(value.consumers()) - seen
      if found & targets:
        return True
      seen |= found
      left += found
  return False
