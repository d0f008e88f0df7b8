"""Part of the group "replicas": several steps with the config's own optimizer and all options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from loopwright import configurables
from loopwright.inputs.parts import prefixes
from loopwright.models import models
from loopwright.optimizers.loss_scale import dynamic
from loopwright.tools.verify.bench import explanations as known
from loopwright.tools.verify.bench import source_lines
from loopwright.tools.verify.bench.bench import Bench, Outcome, Rows
from loopwright.tools.verify.bench.comparison import (
  AFTER_STEPS,
  METHODS,
  Comparison,
  Difference,
  normalisations,
)
from loopwright.tools.verify.checks import order
from loopwright.tools.verify.checks.later_steps import LaterSteps
from loopwright.tools.verify.report import Explanation, Group, Result

GROUP = Group("replicas")
SAME, OVERFLOW = "same weights after 4 steps", "overflow on one replica"
OWN_CHECK = Explanation(
  cause=known.CHECKED_FIRST.cause,
  remedy="decide by step.check of the reduced gradients, which is the same on every replica",
)
Options = dict[str, dict[str, Any]]
"""What is switched on -> its options of `Trainer`."""


class Steps(NamedTuple):
  """Several steps on 1, 2 and 3 replicas, then one in which a replica overflows.

  Attributes:
    apart: how those on 2 and on 3 replicas differ.
    overflow: the result for the last one.
    later: what runs after these steps.
  """

  apart: dict[int, Difference]
  overflow: Result
  later: LaterSteps

  @property
  def worst(self) -> Difference:
    """The larger of the differences."""
    return max(self.apart.values(), key=lambda each: each.worst)


def same_with_options(of: Comparison, *, alike: bool) -> Iterator[Result]:
  """Checks several steps with all options on; if they differ, each option alone.

  Args:
    of: the step on one replica.
    alike: whether the bare updates agree; otherwise only the overflow is checked.
  """
  options = _options(of)
  try:
    steps = run(of, options)
  except ValueError:
    if of.subject.accumulation_steps > 1:
      raise
    options.pop("accumulation", None)  # the task splits the batch itself, so the config does not
    steps = run(of, options)
  worst = steps.worst
  if not alike:
    yield GROUP.skipped(SAME, "a single step differs; fix that first")
  elif worst.worst <= AFTER_STEPS:
    told = f"own optimizer, {', '.join(options)}: relative difference {worst.worst:.1e}"
    values = {str(replicas): each.worst for replicas, each in steps.apart.items()}
    yield GROUP.passed(SAME, told, values=values)
    yield steps.later.result()
  elif local := [call for call in of.calls if call.local and call.verb == "gradients"]:
    yield GROUP.explained(SAME, worst.detail, known.LOCAL_CONDITION, local[0].place)
    return
  else:
    alone = (
      option for option in options if run(of, {option: options[option]}).worst.worst > AFTER_STEPS
    )
    explanation = known.BY_OPTION.get(next(alone, ""), known.OPTIMIZER)
    yield GROUP.explained(SAME, worst.detail, explanation, of.find(explanation))
  yield steps.overflow


def _options(of: Comparison) -> Options:
  norm = of.reference["full batch"].metrics.get("gradient_norm", 0.0)
  options: Options = {}
  by_value = "Trainer.clip_value" in configurables.bindings() or "clip_value" in of.subject.options
  if norm > 0 and not by_value:
    options["clip_norm"] = {"clip_norm": norm / 2}
  micro = of.subject.accumulation_steps
  if micro > 1 or not of.coupled():
    options["accumulation"] = {"accumulation_steps": micro if micro > 1 else 2}
  options["loss scaling"] = {"loss_scale": dynamic}
  return options


def run(of: Comparison, options: Mapping[str, dict[str, Any]]) -> Steps:
  """Takes the steps on 1, 2 and 3 replicas."""
  arguments = {key: value for option in options.values() for key, value in option.items()}
  planted = _with_infinity(of.batch, np.arange(of.rows) == of.rows - 1)
  ends, skips, later = {}, {}, LaterSteps(of)
  for replicas in (1, 2, 3):
    here = Bench(of.subject, replicas, rows=of.rows, **arguments)
    here.assign(of.start)
    outcomes = [here.step(rows) for rows in (of.batch, *of.cases.values())]
    ends[replicas] = dataclasses.replace(outcomes[-1], before=of.start)
    later.take(replicas, here)
    if planted is not None:
      skips[replicas] = (here.step(planted), here.trainable)
  apart = {n: of.difference(ends[n], ends[1], without=of.noisy) for n in (2, 3)}
  return Steps(apart, _overflow(of, skips), later)


def _overflow(of: Comparison, skips: Mapping[int, tuple[Outcome, list[bool]]]) -> Result:
  if not skips:
    return GROUP.skipped(OVERFLOW, "there is no float feature to set to infinity")
  moved = {n: _moved(outcome, trainable) for n, (outcome, trainable) in skips.items()}
  outcomes = {n: outcome for n, (outcome, _) in skips.items()}
  if moved[1] and not np.isfinite(of.flat(outcomes[1], of.trained)).all():
    why = "the task applies non-finite gradients, on one replica too"
    return GROUP.skipped(OVERFLOW, why)
  if moved[1]:  # it skipped only some of its updates, or none
    apart = {n: of.apart(outcomes[n], outcomes[1]) for n in (2, 3)}
    wrong = [str(n) for n, difference in apart.items() if not difference <= AFTER_STEPS]
    right = "the step is the same on every replica: relative difference "
    right += f"{max(apart.values()):.1e}"
    bad = "the step differs from that of one replica if one of them overflows"
  else:
    wrong = [str(n) for n, there in moved.items() if there]
    right = "the step is skipped on every replica, no weight moves"
    bad = "weights move although one replica overflows"
  if not wrong and not moved[1] and (told := _spoiled(of, outcomes)):
    told, place = f"the step is skipped, but {told} it", of.find(known.KEPT_STATE)
    return GROUP.explained(OVERFLOW, told, known.KEPT_STATE, place)
  if not wrong:
    return GROUP.passed(OVERFLOW, right)
  told = f"on {' and '.join(wrong)} replicas, {bad}"
  mistake = order.first_mistake(of.calls)
  if mistake and mistake[0] is not known.CHECKED_FIRST:
    return GROUP.explained(OVERFLOW, told, mistake[0], mistake[1].place)
  words = ("is_finite", "check(", "apply(")
  return GROUP.explained(
    OVERFLOW, told, OWN_CHECK, source_lines.find(of.task, *METHODS, containing=words)
  )


def _spoiled(of: Comparison, outcomes: Mapping[int, Outcome]) -> str:
  """Returns what an overflow has done to a variable that no optimizer updates; "" if nothing."""
  layers = normalisations(of.task.model)  # Keras updates their statistics in each step
  own = {id(models.raw(v)) for layer in layers for v in layer.variables}
  kept = [i for i in sorted(of.state) if id(of.alone.variables[i]) not in own]
  for outcome in outcomes.values():
    trained = [outcome.before[i] for i in sorted(of.updated)]
    for index in kept:
      before, copies = outcome.before[index], outcome.after[index]
      if np.isfinite(before).all() and not all(np.isfinite(copy).all() for copy in copies):
        return f"{of.alone.names[index]} is not finite after"
      if any(_averages(before, copies[0], each) for each in trained):
        return f"{of.alone.names[index]}, an average of weights, moves in"
  return ""


def _moved(outcome: Outcome, trainable: Sequence[bool]) -> bool:
  return any(
    trained and not np.array_equal(copy, before, equal_nan=True)
    for before, copies, trained in zip(outcome.before, outcome.after, trainable, strict=True)
    for copy in copies
  )


def _averages(before: np.ndarray, after: np.ndarray, weights: np.ndarray) -> bool:
  """Whether a variable has moved a part of the way to some weights, the same for each element."""
  if before.shape != weights.shape or before.dtype.kind != "f" or np.array_equal(before, after):
    return False
  way, moved = (each.astype(np.float64).ravel() - before.ravel() for each in (weights, after))
  part = float(way @ moved / (way @ way or 1.0))
  rest = np.linalg.norm(moved - part * way)
  return 0 < part < 0.999 and way.size > 1 and bool(rest < 0.01 * np.linalg.norm(moved))


def _with_infinity(batch: Rows, where: np.ndarray) -> Rows | None:
  """Returns the batch with every float feature infinite in some rows; None if it has none."""
  weights = {f"{prefix}weight" for prefix in prefixes(batch)}
  floats = [n for n, v in batch.items() if n not in weights and np.issubdtype(v.dtype, np.floating)]
  planted = dict(batch)
  for name in floats:
    planted[name] = batch[name].copy()
    planted[name][where] = np.inf
  return planted if floats else None
