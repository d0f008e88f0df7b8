"""The first line of the user's code that brings the rows of a batch together, from a traced graph.

It is found by shapes: the batch has a number of rows that no other axis has, so an axis of this
size that is not the first one says that rows meet.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.metrics import values
from loopwright.tools.verify.bench import source_lines
from loopwright.tools.verify.bench.bench import Rows

PRIMES = (17, 19, 23, 29, 31, 37, 41, 43, 47)
_SORTS = ("TopK", "Sort", "Unique", "Cumsum", "Where", "Roll", "Reverse")
_SLICES = ("StridedSlice", "Slice", "GatherV2")
_MEANS = ("Mean", "Max", "Min", "Prod")
_OURS = str(Path(tf.__file__).parent), values.__file__


def resized(rows: Rows) -> Rows:
  """Returns as many rows as no axis of the features has, the first ones repeated."""
  sizes = {size for value in rows.values() for size in value.shape[1:]}
  count = next(prime for prime in PRIMES if prime not in sizes)
  return {name: value[np.arange(count) % len(value)] for name, value in rows.items()}


def place(graph: tf.Graph, count: int, owner: Any) -> str:
  """Returns the line where `count` rows first meet, or "".

  Rows that are compared with one another come first, then sorted or chosen ones, then means.
  """
  found: dict[int, str] = {}
  for operation in graph.get_operations():
    kind = _kind(operation, count)
    if kind is not None and kind not in found and not _is_ours(operation):
      line = source_lines.of_operation(operation, owner)
      if line:
        found[kind] = line
  return found[min(found)] if found else ""


def _kind(operation: tf.Operation, count: int) -> int | None:
  inputs, outputs = _shapes(operation.inputs), _shapes(operation.outputs)
  if any(count in shape[1:] or count * count in shape for shape in outputs):
    return 0
  if any(shape[:1] == [count] for shape in inputs):
    if any(word in operation.type for word in _SORTS):
      return 1
    if operation.type in _SLICES and any(shape[:1] not in ([], [count]) for shape in outputs):
      return 1
    if operation.type in _MEANS and not any(shape[:1] == [count] for shape in outputs):
      return 2
  return None


def _shapes(tensors: Iterable[tf.Tensor]) -> list[list[int | None]]:
  return [tensor.shape.as_list() for tensor in tensors if tensor.shape.rank is not None]


def _is_ours(operation: tf.Operation) -> bool:
  """Whether the framework's sums over rows made an operation, on behalf of the user's code."""
  frames = [frame.filename for frame in operation.traceback or ()]
  own = [file for file in frames if not file.startswith(_OURS[0])]
  return bool(own) and own[-1] == _OURS[1]
