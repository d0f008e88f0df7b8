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
from loopwright.tools.verify.report import Explanation, Group, Result

if TYPE_CHECKING:
  from loopwright.tools.verify.checks.inputs import Reading

GROUP = Group("inputs")
FAR = 30.0
"""Initial weights do not expect a feature with a larger mean or standard deviation."""
SOURCE = ("source",)
PREPROCESS = ("preprocess", "source")
OUT_OF_RANGE = Explanation("labels out of range", ("Dense(", "classes", "one_hot"))
FROM_ONE = Explanation("labels start at 1", OUT_OF_RANGE.containing)


class Contents:
  """What the training pipeline gave, after `Reading.pipeline`."""

  def __init__(self, reading: Reading) -> None:
    self.reading, self.survey, self.bench = reading, reading.survey, reading.bench
    self.task, self.subject = reading.task, reading.subject
    self.train, self.source, self.batch_size = reading.train, reading.source, reading.batch_size

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
    probe = Probe(self.bench, self.survey.first)
    labels = Labels(self.survey, probe)
    yield self._label_range(labels)
    yield self._label_order(labels)
    yield self._scale(labels)
    yield from self._balance(labels)

  def _weights(self) -> Result:
    name, (low, high) = "weights", self.survey.weights
    place = source_lines.find(self.task, *PREPROCESS, containing=("weight",))
    if self.survey.bad_weight is not None:
      told = f"{low:.6g} at the lowest, first at example {self.survey.bad_weight}"
      return GROUP.failed(name, told, "negative weights", place)
    if high <= 0:
      told = f"all of {self.survey.examples} examples have weight 0: nothing is learned"
      return GROUP.failed(name, told, "all weights are zero", place)
    return GROUP.passed(name, "all 1" if low == high == 1 else f"{low:.6g} to {high:.6g}")

  def _finite(self) -> Result:
    name = "finite features"
    bad = {key: column for key, column in self.survey.columns.items() if column.not_finite}
    if not bad:
      return GROUP.passed(name, f"{self.survey.examples} examples")
    first, column = next(iter(bad.items()))
    told = f"{first!r} has {column.not_finite} numbers that are not finite, first in example "
    told += f"{column.bad_example}"
    rows = self._rows_of(column.bad_example)
    if rows is None or self._copes_with(rows):
      return GROUP.passed(name, f"{told}; the step stays finite")
    words = (*_quoted(first), "read", "load")
    return GROUP.failed(
      name, told, "non-finite features",
      source_lines.find(self.task, *PREPROCESS, containing=words),
    )  # fmt: skip

  def _rows_of(self, example: int | None) -> Rows | None:
    batches = self.reading.batches().take(self.survey.batches).as_numpy_iterator()
    return next((rows for rows in batches if example in rows["example_id"]), None)

  def _copes_with(self, rows: Rows) -> bool:
    start, count = self.bench.read(), len(rows["weight"])
    whole = {n: np.resize(v, [self.reading.bench_rows, *v.shape[1:]]) for n, v in rows.items()}
    try:
      outcome = self.bench.step(padded(whole, count))
    except tf.errors.InvalidArgumentError:
      return False
    self.bench.assign(start)
    skipped = outcome.metrics.get("skipped", 0.0) > 0
    return not skipped and all(np.isfinite(value) for value in outcome.metrics.values())

  def _varying(self) -> Result:
    name, survey = "features vary", self.survey
    constant = [key for key, column in survey.columns.items() if column.constant]
    enough = survey.examples >= 20 and (self._whole_epoch or self.subject.shuffle)
    destroyed = [key for key in constant if key in self.train.varying and enough]
    if not destroyed:
      told = f"all {len(survey.columns)}" if not constant else f"all but {', '.join(constant)}"
      return GROUP.passed(name, told)
    key = destroyed[0]
    column = survey.columns[key]
    value = f"{column.low:.3g}" if column.low == column.high else "the same"
    told = f"{key!r} is {value} for all of {survey.examples} examples, but differs in the source"
    return GROUP.failed(
      name, told, "preprocess() makes a feature constant",
      source_lines.find(self.task, "preprocess", containing=("//", "cast(", "int", key)),
    )  # fmt: skip

  @property
  def _whole_epoch(self) -> bool:
    return self.train.total is not None and self.survey.examples >= self.train.total

  def _label_range(self, labels: Labels) -> Result:
    name, count, classes = "label range", self.survey.examples, f"{labels.classes} classes"
    if labels.unknown:
      return GROUP.skipped(name, labels.unknown)
    if labels.wrong:
      key, seen = labels.wrong
      column = self.survey.columns[key]
      told = f"{key!r} is {column.low:.0f} to {column.high:.0f}, but forward() returns {classes}"
      from_one = column.low == 1 and column.high == labels.classes
      why = FROM_ONE if from_one else OUT_OF_RANGE
      place = source_lines.find(self.task, "build_model", "loss", containing=why.containing)
      return GROUP.explained(name, f"{told}, 0 to {labels.classes - 1}: {seen}", why, place)
    if labels.name is None:
      why_not = f"no integer feature picks one of {labels.classes} outputs in the loss"
      return GROUP.skipped(name, why_not)
    column = self.survey.columns[labels.name]
    if column.constant and self._whole_epoch and count >= 20:
      told = f"{labels.name!r} is {column.low:.0f} for all of {count} examples, of {classes}"
      place = source_lines.find(self.task, *SOURCE, containing=_quoted(labels.name))
      return GROUP.failed(name, told, "all labels are the same", place)
    told = f"{labels.name!r} is {column.low:.0f} to {column.high:.0f} of {classes}"
    return GROUP.passed(name, told)

  def _balance(self, labels: Labels) -> Iterator[Result]:
    """Finds weights of classes that are whole parts of those that balance them, some of them 0."""
    column = self.survey.columns.get(labels.name or "")
    if column is None or not self._whole_epoch or set(column.values) != set(range(labels.classes)):
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
      told = f"of {labels.name!r} 0 to {labels.classes - 1}, with {_listed(counts)} examples, the "
      told += f"loss counts each {_listed(whole)} times: the whole parts of "
      told += _listed(counts.sum() / (labels.classes * counts))
      yield GROUP.failed("weights of classes", told, "weights divided as whole numbers")

  def _label_order(self, labels: Labels) -> Result:
    name = "labels in mixed order"
    stream = isinstance(self.source, StreamSource)
    if self.subject.shuffle and not stream:
      return GROUP.passed(name, "run.shuffle is on")
    column = self.survey.columns.get(labels.name or "")
    if column is None:
      return GROUP.skipped(name, "no class label is known")
    alone, batches = column.alone, self.survey.batches
    if batches < 4 or len(column.values) < 2 or alone <= 0.8 * batches:
      return GROUP.passed(name, f"{batches - alone} of {batches} batches hold several classes")
    how = "a stream is never shuffled" if stream else "run.shuffle is False"
    told = f"{alone} of {batches} batches of {self.batch_size} hold only one class of "
    told += f"{labels.name!r}, and {how}"
    words = ("sort", "concatenate", "StreamSource", "return")
    place = source_lines.find(self.task, *SOURCE, containing=words)
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
    if labels.name is None:
      return GROUP.passed(name, f"{told}; without class labels, whether it matters is unknown")
    chance = math.log(labels.classes)
    for key, column in far.items():
      size = math.hypot(column.mean, column.std)
      as_is, scaled = labels.probe.losses_if_divided(key, size)
      if as_is > 3 * chance and scaled < as_is / 2:
        told = f"{key!r} has mean {column.mean:.3g} and standard deviation {column.std:.3g}: the "
        told += f"first loss is {as_is:.3g}, divided by {size:.3g} it is {scaled:.3g} "
        told += f"(chance: {chance:.3g})"
        place = source_lines.find(self.task, "preprocess", "forward", containing=_quoted(key))
        values = {"loss": as_is, "loss_scaled": scaled}
        return GROUP.failed(name, told, "inputs are not scaled", place, values=values)
    return GROUP.passed(name, f"{told}; the first loss does not suffer")


def _listed(numbers: np.ndarray) -> str:
  return ", ".join(f"{number:.3g}" for number in numbers[:6]) + (", .." if len(numbers) > 6 else "")


def _quoted(name: str) -> tuple[str, str]:
  return f'"{name}"', f"'{name}'"


def _described(column: Column) -> str:
  shape = f" {list(column.shape)}" if column.shape else ""
  if not column.numeric or not column.count:
    return f"{column.dtype}{shape}"
  if column.integer:
    return f"{column.dtype}{shape} {column.low:.0f} to {column.high:.0f}"
  return f"{column.dtype}{shape} mean {column.mean:.3g} std {column.std:.3g}"


# ---- Labels ----


class Probe:
  """forward() and loss() of a task, on one replica, with its initial weights (host)."""

  def __init__(self, bench: Bench, rows: Rows) -> None:
    """Calls forward() once; `unknown` says why it cannot be used, if so."""
    self.bench, self.rows, self.outputs, self.unknown = bench, rows, None, ""
    task = type(bench.task)
    if task.forward is Task.forward or task.loss is Task.loss:
      self.unknown = f"{task.__name__} has no forward() and loss()"
      return
    try:
      outputs = self.forward(rows)
    except Exception as error:
      self.unknown = f"forward() cannot be called alone: {type(error).__name__}"
      return
    if isinstance(outputs, tf.Tensor) and outputs.dtype.is_floating and len(outputs.shape) > 1:
      self.outputs = outputs.numpy()
    else:
      self.unknown = "forward() returns no float tensor [n, classes]"

  def forward(self, rows: Rows) -> Any:
    """Returns the outputs in evaluation mode."""
    return evaluated.forward(self.bench, rows)

  def loss(self, rows: Rows) -> float:
    """Returns the mean loss of rows in evaluation mode; NaN if it cannot be computed."""
    try:
      loss = evaluated.loss(self.bench, self.forward(rows), rows)
    except tf.errors.InvalidArgumentError:
      return math.nan
    weight = float(loss.weight)
    return float(loss.total) / weight if weight else 0.0

  def losses_if_divided(self, name: str, size: float) -> tuple[float, float]:
    """Returns the first batch's loss, as it is and with a feature divided by `size`."""
    divided = (self.rows[name] / size).astype(np.float32)
    try:
      return self.loss(self.rows), self.loss({**self.rows, name: divided})
    except Exception:  # forward() does not accept the dtype
      return 0.0, 0.0


class Labels:
  """Finds the integer feature that the loss uses as the class, and whether it is in range.

  A feature is the label if changing it changes the loss but not the outputs. It is out of range if
  the loss fails or is not finite, or is the same for all values from `classes` on.

  Attributes:
    name: of the label, or None.
    classes: the last axis of the output of forward().
    unknown: why nothing can be told.
    wrong: the label with values out of range, and what the loss does with them.
  """

  def __init__(self, survey: Survey, probe: Probe) -> None:
    """Checks all integer features with the shape of the outputs without their last axis."""
    self.probe, self.classes, self.unknown = probe, 0, probe.unknown
    self.wrong: tuple[str, str] | None = None
    self.name: str | None = None
    if probe.outputs is None:
      return
    self.classes = probe.outputs.shape[-1]
    if self.classes < 2:
      self.unknown = f"forward() returns {list(probe.outputs.shape)}, not several classes"
      return
    for name, column in survey.columns.items():
      if column.integer and column.shape == probe.outputs.shape[1:-1] and self._is_label(name):
        self.name = self.name or name
        self._judge(name, column, survey)

  def pull(self, value: int) -> float:
    """Returns how much the loss of a class pulls at outputs that are all alike; NaN if unknown."""
    assert self.name is not None
    rows = {**self._with(self.name, value), "weight": np.ones_like(self.probe.rows["weight"])}
    outputs = tf.zeros_like(self.probe.outputs)
    try:
      with tf.GradientTape() as tape:
        tape.watch(outputs)
        total = evaluated.loss(self.probe.bench, outputs, rows).total
      return float(tf.norm(tape.gradient(total, outputs)))
    except (ValueError, tf.errors.InvalidArgumentError):
      return math.nan

  def _is_label(self, name: str) -> bool:
    low, high = self._with(name, 0), self._with(name, self.classes - 1)
    losses = self.probe.loss(low), self.probe.loss(high)
    if not np.isfinite(losses).all() or losses[0] == losses[1]:
      return False
    return bool(np.array_equal(self.probe.forward(low), self.probe.forward(high)))

  def _judge(self, name: str, column: Column, survey: Survey) -> None:
    fails = "the loss fails or is not finite"
    if column.low < 0 and not np.isfinite(self.probe.loss(survey.extremes[name, "low"])):
      self.wrong = name, fails
    if column.high >= self.classes:
      rows = survey.extremes[name, "high"]
      above = (rows[name] >= self.classes).astype(rows[name].dtype)
      seen, further = self.probe.loss(rows), self.probe.loss({**rows, name: rows[name] + above})
      if not np.isfinite(seen):
        self.wrong = name, fails
      elif seen == further:
        self.wrong = name, f"the loss treats {column.high:.0f} as no class"

  def _with(self, name: str, value: int) -> Rows:
    return {**self.probe.rows, name: np.full_like(self.probe.rows[name], value)}
