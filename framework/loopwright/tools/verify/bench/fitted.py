"""Statistics of the evaluation set among the constants of a task.

Means and deviations are looked for in the task's attributes, in what its preprocess() computes with
and in what its model keeps: those of the evaluation set, or of both sets together, where those of
the training set belong.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from loopwright.aliases import AnySource, Model
from loopwright.graphs.autograph import as_written, converted
from loopwright.models import models
from loopwright.task import Task, preprocess_of
from loopwright.tools.verify.bench import source_lines, survey
from loopwright.tools.verify.bench.bench import Rows

LARGEST = 2**20
"""Elements of a constant to compare."""
FEW = 3
"""A constant of fewer elements may be equal by chance, so mean and deviation must both be there."""
SCALES = (1.0, 1 / 255)
Moments = tuple[int, np.ndarray, np.ndarray]
"""Number of examples, and the sum over them of a feature and of its squares."""


class Constant(NamedTuple):
  """A constant of the task, and the line of the user's code that uses it."""

  value: np.ndarray
  place: str


def reads_evaluation(task: Task) -> str:
  """Returns the line of fit(), or of an adapt() in build_model(), that reads the evaluation set."""
  texts = ('source("eval")', "source('eval')")
  for method in source_lines.own_methods(task):
    code = inspect.getsource(method)
    fits = method.__name__ == "fit" or (method.__name__ == "build_model" and "adapt(" in code)
    if fits and any(text in code for text in texts):
      return source_lines.find(task, method.__name__, containing=texts)
  return ""


def find(task: Task, train: Any, held_out: Any, *, seconds: float) -> tuple[str, str] | None:
  """Returns (what was found, its line) for statistics of the evaluation set; None for none.

  Args:
    task: with its model.
    train: the source of training examples.
    held_out: that of evaluation examples.
    seconds: to read each.
  """
  constants = list(_constants(task, held_out))
  if not constants:
    return None
  ours, theirs = (_moments(source, seconds) for source in (train, held_out))
  for name in ours.keys() & theirs.keys():
    right = list(_statistics(ours[name]).values())
    both = _together(ours[name], theirs[name])
    for of, moments in (("the evaluation set", theirs[name]), ("both sets", both)):
      found = {
        kind: constant
        for kind, value in _statistics(moments).items()
        for constant in constants
        if _equal(constant.value, value) and not any(_equal(constant.value, r) for r in right)
      }
      sure = any(constant.value.size >= FEW for constant in found.values())
      if found and (sure or len({kind[0] for kind in found}) > 1):
        kinds = " and ".join(dict.fromkeys(kind[0] for kind in found))
        return f"{kinds} of {name!r} over {of}", next(iter(found.values())).place
  return None


def _moments(source: AnySource, seconds: float) -> dict[str, Moments]:
  """Returns the moments of each numeric feature; none if there is no time to read all."""
  timed, began = survey.Timed(survey.batches(source), seconds), time.perf_counter()
  found: dict[str, Moments] = {}
  seen: set[int] = set()
  for batch in timed:
    share = len(seen) / (source.num_examples or 1)
    if seen and source.num_examples and time.perf_counter() - began > 2 * seconds * share:
      return {}  # it would not be ready in time
    new = [row for row, i in enumerate(batch["example_id"].tolist()) if i not in seen]
    seen.update(batch["example_id"][new].tolist())
    for name, value in batch.items():
      if name in ("example_id", "weight") or value.dtype.kind not in "iuf":
        continue
      rows = value[new]
      squares = np.einsum("i...,i...->...", rows, rows, dtype=np.float64, casting="unsafe")
      made = len(new), rows.sum(axis=0, dtype=np.float64), squares
      found[name] = _together(found[name], made) if name in found else made
    if len(seen) == source.num_examples:
      return found
  return {} if timed.late or source.num_examples else found


def _together(one: Moments, other: Moments) -> Moments:
  return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def _statistics(moments: Moments) -> dict[tuple[str, Any, float], np.ndarray]:
  """Returns (kind, axes, scale) -> mean or deviation, of elements, of channels and of all."""
  count, total, squares = moments
  found: dict[tuple[str, Any, float], np.ndarray] = {}
  axes = {(), tuple(range(total.ndim - 1)), tuple(range(total.ndim))}
  for over, scale in itertools.product(axes, SCALES):
    many = count * np.prod([total.shape[axis] for axis in over], initial=1.0)
    mean = scale * total.sum(axis=over) / many
    variance = np.maximum(scale**2 * squares.sum(axis=over) / many - np.square(mean), 0)
    found["mean", over, scale] = mean
    found["variance", over, scale] = variance
    found["deviation", over, scale] = np.sqrt(variance)
    found["deviation", (over, 1), scale] = np.sqrt(variance * many / max(1, many - 1))
  return found


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
  one, other = np.squeeze(one), np.squeeze(other)
  if one.shape != other.shape or not np.any(other) or not np.isfinite(one).all():
    return False
  return np.allclose(one, other, rtol=1e-4 if one.size >= FEW else 5e-6, atol=1e-6)


def _constants(task: Task, source: AnySource) -> Iterator[Constant]:
  for name, value in vars(task).items():
    for held in tf.nest.flatten(value) if isinstance(value, (list, tuple, dict)) else [value]:
      yield from _kept(held, source_lines.mention(task, f"self.{name} =", f"self.{name}"))
  for variable in _untrained(task.model):
    place = source_lines.mention(task, "adapt(", "Normalization", "def build_model")
    yield from _kept(variable.numpy(), place)
  if preprocess := preprocess_of(task):
    batch: Rows = next(iter(survey.batches(source)))
    batch.setdefault("weight", np.ones(len(batch["example_id"]), np.float32))
    specs: Mapping[str, Any] = {n: tf.TensorSpec(v.shape, v.dtype) for n, v in batch.items()}
    function = tf.function(as_written(lambda rows: converted(preprocess)(dict(rows), False)))
    graph = function.get_concrete_function(specs).graph
    held_by = {id(inner): outer for outer, inner in graph.captures}
    for operation in graph.get_operations():
      for given in operation.inputs:
        value = held_by.get(id(given))
        value = tf.get_static_value(given) if value is None else value
        if value is not None and getattr(value, "dtype", None) != tf.resource:
          yield from _kept(value, source_lines.of_operation(operation, task))


def _untrained(model: Model) -> Iterator[Any]:
  trained = {id(models.raw(v)) for v in models.trainable_variables(model)}
  for variable in models.all_variables(model):
    raw = models.raw(variable)
    if id(raw) not in trained and isinstance(raw, tf.Variable) and raw.dtype.is_floating:
      yield raw


def _kept(value: Any, place: str) -> Iterator[Constant]:
  """Yields a number or an array of floats that is not made of round numbers."""
  if isinstance(value, (tf.Tensor, tf.Variable)) and hasattr(value, "numpy"):
    value = value.numpy()
  if isinstance(value, (float, np.floating, np.ndarray)):
    array = np.asarray(value)
    floats = array.dtype.kind == "f" and 0 < array.size <= LARGEST
    if floats and not np.allclose(array, np.round(array, 3), rtol=0, atol=1e-9):
      yield Constant(array.astype(np.float64), place)
