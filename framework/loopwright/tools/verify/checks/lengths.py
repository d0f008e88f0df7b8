"""Padding inside a row: the same examples, padded further, give the same loss and evaluation.

Graphs, texts and sounds are padded to a common length. Twelve examples are evaluated, and trained
on for one step, as they are in their bucket and as they would be in the longest one; or, if the
task pads by itself, with more of the same padding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.tools.verify.bench import bench, longer_rows, shared_noise, source_lines
from loopwright.tools.verify.bench.bench import Bench, Rows, Subject
from loopwright.tools.verify.bench.evaluated import Evaluated, Values, different
from loopwright.tools.verify.bench.layer_calls import normalisations
from loopwright.tools.verify.bench.longer_rows import Padded
from loopwright.tools.verify.report import Group, Result

GROUP = Group("lengths")
NAMES = ("same evaluation if padded further", "same step if padded further", "contents of padding")
EVALUATION, STEP, CONTENTS = NAMES
CAUSE = "padding counts inside a row"
REFUSED = (ConfigError, ValueError, TypeError, KeyError, tf.errors.InvalidArgumentError)
TOLERANCE = 1e-3
METHODS = ("forward", "loss", "metrics", "build_model")
WORDS = ("reduce_mean", "reduce_max", "Pooling", "softmax", "reduce_sum", "matmul", "self.model")
STEP_WORDS = ("tf.size", "shape", "reduce_mean", "len(")
_FIRST, _NEXT = ("Mean", "Max", "Min", "Prod"), ("Softmax", "Sum", "BatchMatMulV2", "Einsum")
_NEVER = ("Shape", "Size", "Rank", "Const", "Identity")


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  task = subject.fresh_task()
  padded = longer_rows.find(task)
  if padded is None:
    return [GROUP.skipped(NAMES[0], "no Buckets, and no feature that says how long an example is")]
  return list(Lengths(subject, padded).results())


class Lengths:
  """The same examples with less and with more padding."""

  def __init__(self, subject: Subject, padded: Padded) -> None:
    self.subject, self.padded = subject, padded
    self.told = f"rows of {padded.sizes[0]} and of {padded.sizes[1]}, lengths by {padded.known_by}"

  def results(self) -> Iterator[Result]:
    """Yields a result for each of `NAMES`."""
    self.here = Evaluated(self.subject)
    self.task = self.here.task
    try:
      self.short, self.long = (self._rows(each) for each in (self.padded.short, self.padded.long))
      short, long = (self._evaluated(rows) for rows in (self.short, self.long))
    except REFUSED as error:
      why = f"the task takes no longer rows: {type(error).__name__}"
      yield from (GROUP.skipped(name, why) for name in NAMES)
      return
    if wrong := different(long, short):
      yield self._failed(EVALUATION, f"{self.told}: {wrong[1]} in short rows", long, short)
      yield from (GROUP.skipped(name, f"{EVALUATION!r} fails") for name in (STEP, CONTENTS))
      return
    yield GROUP.passed(EVALUATION, f"{self.told}: the same {', '.join(short)}")
    yield self._training()
    yield self._contents(long)

  def _rows(self, features: Rows) -> Rows:
    return longer_rows.preprocessed(self.task, features)

  def _evaluated(self, rows: Rows) -> Values:
    return self.here({"rows": [rows]})["rows"]

  def _training(self) -> Result:
    """Compares a step of gradient descent, in which nothing is random."""
    if normalised := normalisations(self.task.model):
      why = f"{normalised[0].name} normalises over all positions, padding included"
      return GROUP.skipped(STEP, why)
    try:
      short, long = (self._step(rows) for rows in (self.short, self.long))
    except REFUSED as error:
      return GROUP.skipped(STEP, f"the step does not take these rows: {type(error).__name__}")
    if wrong := different(*({"loss": np.array([each[0]])} for each in (long, short))):
      return self._failed(STEP, f"{self.told}: {wrong[1]} in short rows")
    apart = np.linalg.norm(long[1] - short[1]) / max(np.linalg.norm(short[1]), 1e-12)
    if apart > TOLERANCE:
      return self._failed(STEP, f"{self.told}: the update differs by {apart:.2g} of its size")
    return GROUP.passed(STEP, f"{self.told}: relative difference {apart:.1e}")

  def _step(self, rows: Rows) -> tuple[float, np.ndarray]:
    """Returns the loss of a step and the update."""
    here = Bench(self.subject, rows=len(rows["weight"]), **bench.PLAIN)
    here.around = shared_noise.still
    outcome = here.step(rows)
    update = np.concatenate([np.ravel(each) for each in outcome.update()])
    return outcome.metrics.get("loss", np.nan), update

  def _contents(self, long: Values) -> Result:
    if self.padded.others is None:
      return GROUP.skipped(CONTENTS, "no float feature is padded")
    others = self._evaluated(self._rows(self.padded.others))
    wrong = different(others, long)
    if not wrong:
      return GROUP.passed(CONTENTS, "other numbers in the padding change nothing")
    if changing := ", ".join(self.padded.changing):
      told = f"{changing} have other numbers in the padding: {wrong[1]} before"
      return self._failed(CONTENTS, told, others, long)
    told = f"they count ({wrong[1]} before), but are one constant: keep it so"
    return GROUP.passed(CONTENTS, told)

  def _failed(self, name: str, detail: str, *compared: Values) -> Result:
    place = ""
    if name == STEP:  # evaluation is right
      place = source_lines.find(self.task, "train_step", "training_loss", containing=STEP_WORDS)
    with contextlib.suppress(Exception):
      place = place or self._place(*compared)
    place = place or source_lines.find(self.task, *METHODS, containing=WORDS)
    return GROUP.failed(name, detail, CAUSE, place)

  def _place(self, *compared: Values) -> str:
    """Returns the first line that makes one number of all positions, from both graphs.

    Of what is `compared`, if anything, it is before a metric that differs; best if before no other.
    """
    both = [self.here.graph(rows).get_operations() for rows in (self.short, self.long)]
    behind: dict[bool, set[str]] = {False: set(), True: set()}
    for name in compared[0] if compared else ():
      wrong = different(*({name: each[name]} for each in compared)) is not None
      behind[wrong] |= self.here.behind(name)
    wanted = (behind[True] - behind[False], behind[True] or {op.name for op in both[0]})
    return next(filter(None, (self._line(both, among) for among in wanted)), "")

  def _line(self, both: Sequence[Any], among: set[str]) -> str:
    graphs = [[op for op in graph if op.name in among] for graph in both]
    lines: dict[int, str] = {}
    for one, other in zip(*graphs, strict=False):
      kind = _kind(one, other)
      line = source_lines.of_operation(one, self.task) if kind not in (None, *lines) else ""
      if kind is not None and line:
        lines[kind] = line
    return lines[min(lines)] if lines else ""


def _kind(one: tf.Operation, other: tf.Operation) -> int | None:
  """Returns how likely an operation forgets to mask; None if it does not join positions.

  Its inputs depend on the length of the rows, and its outputs do not.
  """
  if one.type != other.type or one.type in _NEVER:
    return None
  longer = _shapes(one.inputs) != _shapes(other.inputs)
  if one.type == "Softmax" and longer:
    return 1
  if not longer or _shapes(one.outputs) != _shapes(other.outputs):
    return None
  return 0 if one.type in _FIRST else 1 if one.type in _NEXT else 2


def _shapes(tensors: Any) -> list[Any]:
  return [tensor.shape.as_list() if tensor.shape.rank is not None else None for tensor in tensors]
