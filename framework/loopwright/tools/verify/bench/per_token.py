"""What a task computes for each token, and the line where tokens meet (host)."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.graphs.autograph import converted
from loopwright.task import Task
from loopwright.tools.verify.bench import evaluated, recorded_step, row_influence
from loopwright.tools.verify.bench.bench import Rows, Subject
from loopwright.tools.verify.bench.evaluated import Evaluated
from loopwright.tools.verify.bench.recorded_step import Operation

_ROUNDING, _INFLUENCE = 2e-6, 2e-5
_MASK_VALUES = 3


class PerToken:
  """A task in evaluation mode, with initial weights and a little noise."""

  def __init__(self, subject: Subject, length: int) -> None:
    """Builds the model; `length` is that of the rows."""
    self.here, self._length = Evaluated(subject), length
    self.task = self.here.task
    for variable, value in zip(self.here.variables, self.here.values, strict=True):
      variable.assign(value)

  def outputs(self, batch: Rows) -> Any:
    """Returns what forward() does."""
    return evaluated.forward(self.here, batch)

  def numbers(self, batch: Rows) -> np.ndarray:
    """Returns the output of each token, float64 [n, length, -1]."""
    flat, index = self._flat(self.outputs(batch))
    return _of_tokens(flat[index]).astype(np.float64)

  def _flat(self, outputs: Any) -> tuple[list[Any], int]:
    """Returns all outputs, and which has numbers of each token, at all positions or all but one."""
    flat = tf.nest.flatten(outputs)
    for index, value in enumerate(flat):
      number = isinstance(value, tf.Tensor) and value.dtype.is_floating and len(value.shape) >= 2
      if number and value.shape[1] in (self._length, self._length - 1):
        return flat, index
    raise ValueError("forward() returns nothing for each token")

  def means(self, outputs: Any, batch: Rows) -> dict[str, tuple[float, float]]:
    """Returns (mean, weight) of the loss and of metrics of some outputs; only of pairs."""
    batch_here, found = evaluated.placed(self.here, batch), {}
    if type(self.task).metrics is not Task.metrics:
      metrics = converted(self.task.metrics)
      found = self.here.strategy.run(lambda: dict(metrics(outputs, batch_here)))
    found["loss"] = tuple(evaluated.loss(self.here, outputs, batch))
    pairs = {n: v for n, v in found.items() if isinstance(v, tuple) and len(v) == 2}
    return {
      name: (float(tf.math.divide_no_nan(*(tf.cast(v, tf.float64) for v in pair))), float(pair[1]))
      for name, pair in pairs.items()
    }

  def pulls(self, outputs: Any, batch: Rows) -> np.ndarray:
    """Returns the gradient of the sum of the losses by each output, [n, length, -1]."""
    flat, index = self._flat(outputs)
    with tf.GradientTape() as tape:
      tape.watch(flat[index])
      total = evaluated.loss(self.here, outputs, batch).total
    return _of_tokens(tf.convert_to_tensor(tape.gradient(total, flat[index])))

  def replaced(self, outputs: Any, value: np.ndarray) -> Any:
    """Returns outputs with other numbers of each token."""
    flat, index = self._flat(outputs)
    flat[index] = tf.constant(value.reshape(flat[index].shape), flat[index].dtype)
    return tf.nest.pack_sequence_as(outputs, flat)

  def line(self, one: Rows, other: Rows, kept: np.ndarray) -> str:
    """Returns the line of the mask by which tokens that are equal in two batches differ; or "".

    The mask [.., length, length] goes into the first operation whose numbers change where `kept`,
    bool [n, length], but is not made on the line of it: Keras makes its own form of a mask where a
    layer is called. Without such a mask it is that line.
    """
    runs = []
    for batch in (one, other):
      with recorded_step.watched(self.task) as seen:
        self.outputs(batch)
      runs.append(seen)
    pairs = list(zip(*runs, strict=False))
    meeting = next((i for i, (a, b) in enumerate(pairs) if self._moved(a, b, kept)), None)
    if meeting is None:
      return ""
    place = runs[0][meeting].place
    for index in sorted(row_influence.sources(runs[0], meeting), reverse=True):
      if self._is_mask(*pairs[index]) and runs[0][index].place not in ("", place):
        return runs[0][index].place
    return place

  def _is_mask(self, one: Operation, other: Operation) -> bool:
    return any(
      a.shape[-2:].count(self._length) == 2
      and np.array_equal(a, b) and len(np.unique(a)) <= _MASK_VALUES
      for a, b in zip(one.values, other.values, strict=False)
    )  # fmt: skip

  def _moved(self, one: Operation, other: Operation, kept: np.ndarray) -> bool:
    for a, b in zip(one.values, other.values, strict=False):
      if a.shape != b.shape or a.dtype.kind != "f" or a.shape.count(self._length) != 1:
        continue
      axis = a.shape.index(self._length)
      if axis and a.shape[0] == len(kept):
        before, after = (_of_tokens(np.moveaxis(v.astype(np.float64), axis, 1)) for v in (a, b))
        if moved(before, after, kept, ~kept).any():
          return True
    return False


def _of_tokens(value: Any) -> np.ndarray:
  """Returns numbers as [n, length, -1]."""
  return np.reshape(value, [*value.shape[:2], -1])


def moved(one: np.ndarray, other: np.ndarray, kept: np.ndarray, changed: np.ndarray) -> np.ndarray:
  """Returns which of the kept tokens have other numbers, bool [n, length].

  Args:
    one: [n, length, -1].
    other: the same, of rows that were changed.
    kept: bool [n, length], tokens whose numbers must not move.
    changed: those whose numbers may; they say what is more than rounding.
  """
  change = np.abs(one - other).max(axis=2)
  size = max(
    _INFLUENCE * float(change[changed].max(initial=0.0)),
    _ROUNDING * float(np.abs(one).max(initial=0.0)),
  )
  return kept & (change > size)
