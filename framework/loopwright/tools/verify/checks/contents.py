"""The values that a training batch has: features, labels and weights; a part of "inputs"."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from loopwright.inputs.streams import StreamSource
from loopwright.task import Task
from loopwright.tools.verify.bench import evaluated, source_lines
from loopwright.tools.verify.bench.bench import Bench, Rows, padded
from loopwright.tools.verify.bench.survey import Column, Survey
from loopwright.tools.verify.checks import augmentation
from loopwright.tools.verify.report import Group, Result

if TYPE_CHECKING:
  from loopwright.tools.verify.checks.inputs import Reading

GROUP = Group("inputs")
FAR = 30.0
"""Initial weights do not expect a feature with a larger mean or standard deviation."""
ENOUGH = 20
"""So many examples say whether a feature, or a label, is a constant."""


class Contents:
  """What the training pipeline gave, after `Reading.pipeline`."""

  def __init__(self, reading: Reading) -> None:
    self.reading, self.survey, self.bench = reading, reading.survey, reading.bench
    self.task, self.subject, self.total = reading.task, reading.subject, reading.train.total
    self.whole_epoch = self.total is not None and self.survey.examples >= self.total

  def results(self) -> Iterator[Result]:
    """Checks the values of features, labels and weights."""
    columns = self.survey.columns
    wide = [name for name, column in columns.items() if column.dtype == np.float64]
    told = "; ".join(f"{name} {_described(column)}" for name, column in columns.items())
    told += f". float64 takes twice the memory: {', '.join(wide)}" if wide else ""
    yield GROUP.passed("features", told)
    yield self._weights()
    yield self._finite()
    yield self._varying()
    labels = Labels(self.survey, self.bench)
    yield self._label_range(labels)
    yield self._label_order(labels)
    yield self._scale(labels)
    yield from self._balance(labels)

  def _failed(self, name: str, told: str, cause: str, feature: str) -> Result:
    place = augmentation.line(self.subject, self.task, feature)
    return GROUP.failed(name, told, cause, place)

  def _weights(self) -> Result:
    name, (low, high) = "weights", self.survey.weights
    if self.survey.bad_weight is not None:
      told = f"{low:.6g} at the lowest, first at example {self.survey.bad_weight}"
      return self._failed(name, told, "negative weights", "weight")
    if high <= 0:
      told = f"all of {self.survey.examples} examples have weight 0: nothing is learned"
      return self._failed(name, told, "all weights are zero", "weight")
    return GROUP.passed(name, "all 1" if low == high == 1 else f"{low:.6g} to {high:.6g}")

  def _finite(self) -> Result:
    name = "finite features"
    bad = ((key, column) for key, column in self.survey.columns.items() if column.not_finite)
    first, column = next(bad, ("", None))
    if column is None:
      return GROUP.passed(name, f"{self.survey.examples} examples")
    told = f"{first!r} has {column.not_finite} numbers that are not finite, first in example "
    told += f"{column.bad_example}"
    if self._copes_with(column.bad_example):
      return GROUP.passed(name, f"{told}; the step stays finite")
    return self._failed(name, told, "non-finite features", first)

  def _copes_with(self, example: int | None) -> bool:
    """Whether a step on the batch of an example is made and logs finite numbers."""
    batches = self.reading.batches().take(self.survey.batches).as_numpy_iterator()
    rows = next((each for each in batches if example in each["example_id"]), None)
    if rows is None:
      return True
    start, count, size = self.bench.read(), len(rows["weight"]), self.reading.bench_rows
    whole = {name: np.resize(value, [size, *value.shape[1:]]) for name, value in rows.items()}
    try:
      metrics = self.bench.step(padded(whole, count)).metrics
    except tf.errors.InvalidArgumentError:
      return False
    self.bench.assign(start)
    return not metrics.get("skipped", 0.0) and bool(np.isfinite([*metrics.values()]).all())

  def _varying(self) -> Result:
    name, survey = "features vary", self.survey
    constant = [key for key, column in survey.columns.items() if column.constant]
    enough = survey.examples >= ENOUGH and (self.whole_epoch or self.subject.shuffle)
    for key in constant if enough else ():
      if key in self.reading.train.varying:
        column = survey.columns[key]
        value = f"{column.low:.3g}" if column.low == column.high else "the same"
        told = f"{key!r} is {value} for all of {survey.examples} examples, but not in the source"
        return self._failed(name, told, "preprocess() makes a feature constant", key)
    told = f"all {len(survey.columns)}" if not constant else f"all but {', '.join(constant)}"
    return GROUP.passed(name, told)

  def _label_range(self, labels: Labels) -> Result:
    name, count, classes = "label range", self.survey.examples, f"{labels.classes} classes"
    if labels.unknown:
      return GROUP.skipped(name, labels.unknown)
    if not labels.name:
      why_not = f"no integer feature picks one of {labels.classes} outputs in the loss"
      return GROUP.skipped(name, why_not)
    key, column = labels.name, self.survey.columns[labels.name]
    told = f"{key!r} is {column.low:.0f} to {column.high:.0f}"
    if labels.wrong:
      from_one = column.low == 1 and column.high == labels.classes
      told += f", but forward() returns {classes}, 0 to {labels.classes - 1}: {labels.wrong}"
      cause = "labels start at 1" if from_one else "labels out of range"
      return self._failed(name, told, cause, key)
    if column.constant and self.whole_epoch and count >= ENOUGH:
      told = f"{key!r} is {column.low:.0f} for all of {count} examples, of {classes}"
      return self._failed(name, told, "all labels are the same", key)
    return GROUP.passed(name, f"{told} of {classes}")

  def _balance(self, labels: Labels) -> Iterator[Result]:
    """Finds weights of classes that are whole parts of those that balance them, some of them 0."""
    column = self.survey.columns.get(labels.name)
    if column is None or not self.whole_epoch or set(column.values) != set(range(labels.classes)):
      return
    counts = np.array([column.values[each] for each in range(labels.classes)])
    whole = counts.sum() // (labels.classes * counts)
    if whole.all() or len(set(whole[whole > 0].tolist())) < 2:
      return
    of_rows = np.array([column.weighed[each] for each in range(labels.classes)]) / counts
    first = int(np.argmin(whole))
    if of_rows[first] and labels.pull(first) != 0:
      return
    pulls = of_rows * [labels.pull(each) for each in range(labels.classes)]
    if np.allclose(pulls / pulls.max(), whole / whole.max(), rtol=0.0, atol=1e-4):
      told = f"of {labels.name!r} with {counts.tolist()} examples, the loss counts each "
      told += f"{whole.tolist()} times, the whole parts of what balances them"
      yield GROUP.failed("weights of classes", told, "weights divided as whole numbers")

  def _label_order(self, labels: Labels) -> Result:
    name = "labels in mixed order"
    stream = isinstance(self.reading.source, StreamSource)
    if self.subject.shuffle and not stream:
      return GROUP.passed(name, "run.shuffle is on")
    column = self.survey.columns.get(labels.name)
    if column is None:
      return GROUP.skipped(name, "no class label is known")
    alone, batches = column.alone, self.survey.batches
    if batches < 4 or len(column.values) < 2 or alone <= 0.8 * batches:
      return GROUP.passed(name, f"{batches - alone} of {batches} batches hold several classes")
    how = "a stream is never shuffled" if stream else "run.shuffle is False"
    told = f"{alone} of {batches} batches of {self.reading.batch_size} hold only one class of "
    told += f"{labels.name!r}, and {how}"
    place = source_lines.method(self.task, "source")
    return GROUP.failed(name, told, "examples sorted by label", place)

  def _scale(self, labels: Labels) -> Result:
    name = "scale of features"
    far = {
      key: column for key, column in self.survey.columns.items()
      if column.numeric and column.shape and max(abs(column.mean), column.std) > FAR
    }  # fmt: skip
    if not far:
      return GROUP.passed(name, f"means and standard deviations within {FAR:.0f}")
    told = "; ".join(f"{key} {_described(column)}" for key, column in far.items())
    if not labels.name:
      return GROUP.passed(name, f"{told}; without class labels, whether it matters is unknown")
    chance, rows = math.log(labels.classes), labels.rows
    for key, column in far.items():
      size = math.hypot(column.mean, column.std)
      scaled = {**rows, key: (rows[key] / size).astype(np.float32)}
      as_is, divided = labels.loss(rows), labels.loss(scaled)
      if as_is > 3 * chance and divided < as_is / 2:
        told = f"{key!r} has mean {column.mean:.3g} and standard deviation {column.std:.3g}: the "
        told += f"first loss is {as_is:.3g}, divided by {size:.3g} it is {divided:.3g} "
        told += f"(chance: {chance:.3g})"
        return self._failed(name, told, "inputs are not scaled", key)
    return GROUP.passed(name, f"{told}; the first loss does not suffer")


def _described(column: Column) -> str:
  shape = f" {list(column.shape)}" if column.shape else ""
  if not column.numeric or not column.count:
    return f"{column.dtype}{shape}"
  if column.integer:
    return f"{column.dtype}{shape} {column.low:.0f} to {column.high:.0f}"
  return f"{column.dtype}{shape} mean {column.mean:.3g} std {column.std:.3g}"


class Labels:
  """Finds the integer feature that the loss uses as the class, and whether it is in range.

  A feature is the label if changing it changes the loss but not the outputs. It is out of range if
  the loss fails or is not finite, or is the same for all values from `classes` on. forward() and
  loss() run on one replica, with its initial weights (host).

  Attributes:
    rows: the first batch.
    classes: the last axis of the output of forward().
    unknown: why nothing can be told.
    name: of the label, or "".
    wrong: what the loss does with values out of range, or "".
  """

  def __init__(self, survey: Survey, bench: Bench) -> None:
    """Checks all integer features with the shape of the outputs without their last axis."""
    self.bench, self.rows, self.classes = bench, survey.first, 0
    self.name = self.wrong = self.unknown = ""
    task = type(bench.task)
    if task.forward is Task.forward or task.loss is Task.loss:
      self.unknown = f"{task.__name__} has no forward() and loss()"
      return
    try:
      self.outputs = evaluated.forward(bench, self.rows)
    except Exception as error:
      self.unknown = f"forward() cannot be called alone: {type(error).__name__}"
      return
    shape: Any = getattr(self.outputs, "shape", ())
    if len(shape) < 2 or not self.outputs.dtype.is_floating:
      self.unknown = "forward() returns no float tensor [n, classes]"
      return
    self.classes = shape[-1]
    if self.classes < 2:
      self.unknown = f"forward() returns {list(shape)}, not several classes"
      return
    for name, column in survey.columns.items():
      if not self.wrong and column.integer and column.shape == shape[1:-1] and self._is_label(name):
        self.wrong = self._judged(name, column)
        self.name = name if self.wrong else self.name or name

  def loss(self, rows: Rows) -> float:
    """Returns the mean loss of rows in evaluation mode; NaN if it cannot be computed."""
    try:
      outputs = evaluated.forward(self.bench, rows)
      loss = evaluated.loss(self.bench, outputs, rows)
    except Exception:  # a label out of range, or forward() does not accept the dtype
      return math.nan
    weight = float(loss.weight)
    return float(loss.total) / weight if weight else 0.0

  def pull(self, value: int) -> float:
    """Returns how much the loss of a class pulls at outputs that are all alike; NaN if unknown."""
    rows = {**self._with(self.name, value), "weight": np.ones_like(self.rows["weight"])}
    outputs = tf.zeros_like(self.outputs)
    try:
      with tf.GradientTape() as tape:
        tape.watch(outputs)
        total = evaluated.loss(self.bench, outputs, rows).total
      return float(tf.norm(tape.gradient(total, outputs)))
    except (ValueError, tf.errors.InvalidArgumentError):
      return math.nan

  def _is_label(self, name: str) -> bool:
    low, high = (self._with(name, value) for value in (0, self.classes - 1))
    losses = [self.loss(low), self.loss(high)]
    if not np.isfinite(losses).all() or losses[0] == losses[1]:
      return False
    return bool(np.array_equal(*(evaluated.forward(self.bench, rows) for rows in (low, high))))

  def _judged(self, name: str, column: Column) -> str:
    """Returns what the loss does with the lowest or the highest value, if it is out of range."""
    first = (int(self.rows["weight"].argmax()), *(0,) * len(column.shape))
    values = (column.low, column.high, column.high + 1)
    low, high, above = (self.loss(self._with(name, value, first)) for value in values)
    outside = column.high >= self.classes
    if (column.low < 0 and not np.isfinite(low)) or (outside and not np.isfinite(high)):
      return "the loss fails or is not finite"
    return f"the loss treats {column.high:.0f} as no class" if outside and high == above else ""

  def _with(self, name: str, value: float, where: Any = ...) -> Rows:
    """Returns the first batch with another value of a feature."""
    changed = self.rows[name].copy()
    changed[where] = value
    return {**self.rows, name: changed}
