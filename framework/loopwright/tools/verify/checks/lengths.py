"""Padding inside a row: the same examples, padded further, give the same loss and evaluation.

Graphs, texts and sounds are padded to a common length. Twelve examples are evaluated, and trained
on for one step, as they are in their bucket and as they would be in the longest one; or, if the
task pads by itself, with more of the same padding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.tools.verify.bench import bench, changed_rows, shared_noise, source_lines
from loopwright.tools.verify.bench.bench import Bench, Subject
from loopwright.tools.verify.bench.changed_rows import Padded
from loopwright.tools.verify.bench.evaluated import Evaluated, Values, different
from loopwright.tools.verify.bench.layer_calls import normalisations
from loopwright.tools.verify.bench.loss_graph import behind
from loopwright.tools.verify.report import Group, Result

GROUP = Group("lengths")
NAMES = ("same evaluation if padded further", "same step if padded further", "contents of padding")
EVALUATION, STEP, CONTENTS = NAMES
CAUSE = "padding counts inside a row"
REFUSED = (ConfigError, ValueError, TypeError, KeyError, tf.errors.InvalidArgumentError)
TOLERANCE = 1e-3
FORGETFUL = (("Mean", "Max", "Min", "Prod"), ("Softmax", "Sum", "BatchMatMulV2", "Einsum"))
"""Types of operations that join positions, those that have no mask first."""
_NEVER = ("Shape", "Size", "Rank", "Const", "Identity")


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  padded = changed_rows.padded(subject.fresh_task())
  if padded is None:
    return [GROUP.skipped(NAMES[0], "no Buckets, and no feature that says how long an example is")]
  return list(Lengths(subject, padded).results())


class Lengths:
  """The same examples with less and with more padding."""

  def __init__(self, subject: Subject, padded: Padded) -> None:
    self.subject, self.told, self.here = subject, padded.known_by, Evaluated(subject)
    self.task, self.padded = self.here.task, padded

  def results(self) -> Iterator[Result]:
    """Yields a result for each of `NAMES`."""
    given = {"short": self.padded.short, "long": self.padded.long, "others": self.padded.others}
    try:
      self.rows = {
        name: changed_rows.preprocessed(self.task, each) for name, each in given.items() if each
      }
      found = self.here({name: [rows] for name, rows in self.rows.items()})
    except REFUSED as error:
      why = f"the task takes no longer rows: {type(error).__name__}"
      yield from (GROUP.skipped(name, why) for name in NAMES)
      return
    if wrong := different(found["long"], found["short"]):
      told = f"{self.told}: {wrong[1]} in short rows"
      yield GROUP.failed(EVALUATION, told, CAUSE, self._place(found["long"], found["short"]))
      yield from (GROUP.skipped(name, f"{EVALUATION!r} fails") for name in (STEP, CONTENTS))
      return
    yield GROUP.passed(EVALUATION, f"{self.told}: the same {', '.join(found['short'])}")
    yield self._training()
    if "others" not in found:
      yield GROUP.skipped(CONTENTS, "no float feature has padding that is no constant")
    elif wrong := different(found["others"], found["long"]):
      told = f"other numbers in the padding: {wrong[1]} before"
      yield GROUP.failed(CONTENTS, told, CAUSE, self._place(found["others"], found["long"]))
    else:
      yield GROUP.passed(CONTENTS, "other numbers in the padding change nothing")

  def _training(self) -> Result:
    """Compares a step of gradient descent, in which nothing is random."""
    if normalised := normalisations(self.task.model):
      why = f"{normalised[0].name} normalises over all positions, padding included"
      return GROUP.skipped(STEP, why)
    here = Bench(self.subject, rows=len(self.rows["short"]["weight"]), **bench.PLAIN)
    here.around, start = shared_noise.still, here.read()
    try:
      outcomes = [here.steps_from(start, self.rows[of]) for of in ("short", "long")]
    except REFUSED as error:
      return GROUP.skipped(STEP, f"the step does not take these rows: {type(error).__name__}")
    short, long = (np.concatenate([np.ravel(each) for each in o.update()]) for o in outcomes)
    apart = np.linalg.norm(long - short) / max(np.linalg.norm(short), 1e-12)
    losses = ({"loss": np.array([o.metrics.get("loss", np.nan)])} for o in reversed(outcomes))
    if wrong := different(*losses):
      told = f"{self.told}: {wrong[1]} in short rows"
    elif apart > TOLERANCE:
      told = f"{self.told}: the update differs by {apart:.2g} of its size"
    else:
      return GROUP.passed(STEP, f"{self.told}: relative difference {apart:.1e}")
    place = source_lines.method(self.task, "train_step", "training_loss", "loss")
    return GROUP.failed(STEP, told, CAUSE, place)  # evaluation is right

  def _place(self, one: Values, other: Values) -> str:
    """Returns the first line that makes one number of all positions, from both graphs.

    It is before a metric that differs; best if before no other.
    """
    both, before = [], dict[bool, set[str]]()
    with contextlib.suppress(*REFUSED):
      for of in ("short", "long"):
        graph, logged = self.here.graph(self.rows[of])
        both.append(graph.get_operations())
      for name in one:
        wrong = different({name: one[name]}, {name: other[name]}) is not None
        before.setdefault(wrong, set()).update(behind(logged.get(name, [])))
      alone = before[True] - before.get(False, set())
      if place := self._line(both, alone) or self._line(both, before[True]):
        return place
    return source_lines.method(self.task, "forward", "loss")

  def _line(self, both: list[list[tf.Operation]], among: set[str]) -> str:
    graphs = [[op for op in graph if op.name in among] for graph in both]
    pairs = [pair for pair in zip(*graphs, strict=False) if _joins_positions(*pair)]
    for kinds in (*FORGETFUL, [pair[0].type for pair in pairs]):
      places = (source_lines.of_operation(op, self.task) for op, _ in pairs if op.type in kinds)
      if place := next(filter(None, places), ""):
        return place
    return ""


def _joins_positions(one: tf.Operation, other: tf.Operation) -> bool:
  """Whether inputs depend on the length of the rows and outputs do not, or it is a softmax."""
  if one.type != other.type or one.type in _NEVER or _shapes(one.inputs) == _shapes(other.inputs):
    return False
  return one.type == "Softmax" or _shapes(one.outputs) == _shapes(other.outputs)


def _shapes(tensors: Any) -> list[Any]:
  return [tensor.shape.as_list() if tensor.shape.rank is not None else None for tensor in tensors]
