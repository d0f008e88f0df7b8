"""Asks a task's own forward() and loss() which feature is the label, and whether it is in range."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.graphs.autograph import converted
from loopwright.metrics import Loss
from loopwright.task import Task
from loopwright.tools.verify.bench.bench import Bench, Rows
from loopwright.tools.verify.bench.survey import Column, Survey


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
    task, batch = self.bench.task, self.bench.distributed(_with_step(rows))
    return self.bench.strategy.run(lambda: converted(task.forward)(batch, training=False))

  def loss(self, rows: Rows) -> float:
    """Returns the mean loss of rows in evaluation mode; NaN if it cannot be computed."""
    task, batch = self.bench.task, self.bench.distributed(_with_step(rows))

    def compute() -> Loss:
      outputs = converted(task.forward)(batch, training=False)
      return Loss.checked(converted(task.loss)(outputs, batch))

    try:
      loss = self.bench.strategy.run(compute)
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


def _with_step(rows: Rows) -> Rows:
  return {**rows, "step": np.zeros(len(rows["weight"]), np.int64)}


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
