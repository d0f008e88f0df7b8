"""Part of the group "replicas": several steps with the config's own optimizer and all options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from loopwright import configurables
from loopwright.inputs.parts import prefixes
from loopwright.models import models
from loopwright.optimizers.loss_scale import dynamic
from loopwright.tools.verify.bench import recording, source_lines
from loopwright.tools.verify.bench.bench import Bench, Outcome, Rows
from loopwright.tools.verify.bench.comparison import (
  AFTER_STEPS,
  METHODS,
  Comparison,
  Difference,
  normalisations,
)
from loopwright.tools.verify.bench.explanations import (
  BY_OPTION,
  CHECKED_FIRST,
  KEPT_STATE,
  LOCAL_CONDITION,
  OPTIMIZER,
)
from loopwright.tools.verify.checks import order
from loopwright.tools.verify.checks.later_steps import LaterSteps
from loopwright.tools.verify.report import Group, Result

GROUP = Group("replicas")


class OwnOptimizer:
  """Several steps on 1, 2 and 3 replicas, then one in which a replica overflows."""

  def __init__(self, compared: Comparison) -> None:
    self.compared, self.task = compared, compared.task
    self._later = LaterSteps(compared)

  def same_with_options(self, *, alike: bool) -> Iterator[Result]:
    """Checks several steps with all options on; if they differ, each option alone.

    Args:
      alike: whether the bare updates agree; otherwise only the overflow is checked.
    """
    name = "same weights after 4 steps"
    options = self._options()
    try:
      steps = self.run(options)
    except ValueError:
      if self.compared.subject.accumulation_steps > 1:
        raise
      options.pop("accumulation", None)  # the task splits the batch itself, so the config does not
      steps = self.run(options)
    told = f"own optimizer, {', '.join(options)}"
    overflow = steps.pop("overflow")
    worst = max(steps.values(), key=lambda each: each.worst)
    if not alike:
      yield GROUP.skipped(name, "a single step differs; fix that first")
    elif worst.worst <= AFTER_STEPS:
      yield GROUP.passed(
        name, detail=f"{told}: relative difference {worst.worst:.1e}",
        values={str(replicas): each.worst for replicas, each in steps.items()},
      )  # fmt: skip
      yield self._later.result()
    elif condition := self._local_condition():
      cause, remedy = LOCAL_CONDITION.cause, LOCAL_CONDITION.remedy
      yield GROUP.failed(name, worst.detail, cause, remedy, condition.place)
      return
    else:
      yield self._option_fails(name, options, worst)
    yield overflow

  def _local_condition(self) -> recording.Call | None:
    """Returns the call whose `when` depends on the rows of one replica."""
    return next(
      (call for call in self.compared.calls if call.local and call.verb == "gradients"), None
    )

  def _options(self) -> dict[str, dict[str, Any]]:
    norm = self.compared.reference["full batch"].metrics.get("gradient_norm", 0.0)
    options: dict[str, dict[str, Any]] = {}
    clipped_by_value = (
      "Trainer.clip_value" in configurables.bindings()
      or "clip_value" in self.compared.subject.options
    )
    if norm > 0 and not clipped_by_value:
      options["clip_norm"] = {"clip_norm": norm / 2}
    micro = self.compared.subject.accumulation_steps
    if micro > 1 or not self.compared.coupled():
      options["accumulation"] = {"accumulation_steps": micro if micro > 1 else 2}
    options["loss scaling"] = {"loss_scale": dynamic}
    return options

  def run(self, options: Mapping[str, dict[str, Any]]) -> dict[Any, Any]:
    """Returns how 2 and 3 replicas differ from one, and the result for the "overflow"."""
    arguments = {key: value for option in options.values() for key, value in option.items()}
    last = np.arange(self.compared.rows) == self.compared.rows - 1
    planted = _with_infinity(self.compared.batch, last)
    order = [self.compared.cases["full batch"], *self.compared.cases.values()]
    ends, skips = {}, {}
    for replicas in (1, 2, 3):
      here = Bench(self.compared.subject, replicas, rows=self.compared.rows, **arguments)
      here.assign(self.compared.start)
      outcomes = [here.step(rows) for rows in order]
      ends[replicas] = dataclasses.replace(outcomes[-1], before=self.compared.start)
      self._later.take(replicas, here)
      if planted is not None:
        skips[replicas] = (here.step(planted), here.trainable)
    found: dict[Any, Any] = {
      replicas: self.compared.difference(ends[replicas], ends[1], without=self.compared.noisy)
      for replicas in (2, 3)
    }
    return {**found, "overflow": self._overflow(skips)}

  def _overflow(self, skips: Mapping[int, tuple[Outcome, list[bool]]]) -> Result:
    name = "overflow on one replica"
    if not skips:
      return GROUP.skipped(name, "there is no float feature to set to infinity")
    moved = {n: _moved(outcome, trainable) for n, (outcome, trainable) in skips.items()}
    outcomes = {n: outcome for n, (outcome, _) in skips.items()}
    if moved[1] and not np.isfinite(self.compared.flat(outcomes[1], self.compared.trained)).all():
      return GROUP.skipped(name, "the task applies non-finite gradients, on one replica too")
    if moved[1]:  # it skipped only some of its updates, or none
      apart = {n: self.compared.apart(outcomes[n], outcomes[1]) for n in (2, 3)}
      wrong = [str(n) for n, difference in apart.items() if not difference <= AFTER_STEPS]
      worst = max(apart.values())
      right = f"the step is the same on every replica: relative difference {worst:.1e}"
      bad = "the step differs from that of one replica if one of them overflows"
    else:
      wrong = [str(n) for n, there in moved.items() if there]
      right = "the step is skipped on every replica, no weight moves"
      bad = "weights move although one replica overflows"
    if not wrong and not moved[1] and (told := self._spoiled(outcomes)):
      return GROUP.failed(
        name, detail=f"the step is skipped, but {told} it",
        cause=KEPT_STATE.cause, remedy=KEPT_STATE.remedy, place=self.compared.find(KEPT_STATE),
      )  # fmt: skip
    if not wrong:
      return GROUP.passed(name, right)
    told = f"on {' and '.join(wrong)} replicas, {bad}"
    mistake = order.first_mistake(self.compared.calls)
    if mistake and mistake[0] is not CHECKED_FIRST:
      why, call = mistake
      return GROUP.failed(name, told, why.cause, why.remedy, call.place)
    return GROUP.failed(
      name, detail=told,
      cause=CHECKED_FIRST.cause,
      remedy="decide by step.check of the reduced gradients, which is the same on every replica",
      place=source_lines.find(self.task, *METHODS, containing=("is_finite", "check(", "apply(")),
    )  # fmt: skip

  def _spoiled(self, outcomes: Mapping[int, Outcome]) -> str:
    """Returns what an overflow has done to a variable that no optimizer updates; "" if nothing."""
    layers = normalisations(self.task.model)  # Keras updates their statistics in each step
    own = {id(models.raw(v)) for layer in layers for v in layer.variables}
    alone = self.compared.alone
    kept = [i for i in sorted(self.compared.state) if id(alone.variables[i]) not in own]
    for outcome in outcomes.values():
      trained = [outcome.before[i] for i in sorted(self.compared.updated)]
      for index in kept:
        before, copies = outcome.before[index], outcome.after[index]
        if np.isfinite(before).all() and not all(np.isfinite(copy).all() for copy in copies):
          return f"{alone.names[index]} is not finite after"
        if any(_averages(before, copies[0], each) for each in trained):
          return f"{alone.names[index]}, an average of weights, moves in"
    return ""

  def _option_fails(
    self, name: str, options: Mapping[str, dict[str, Any]], worst: Difference
  ) -> Result:
    culprit = ""
    for option, arguments in options.items():
      alone = self.run({option: arguments})
      if max(alone[2].worst, alone[3].worst) > AFTER_STEPS:
        culprit = option
        break
    explanation = BY_OPTION.get(culprit, OPTIMIZER)
    place = self.compared.find(explanation)
    return GROUP.failed(name, worst.detail, explanation.cause, explanation.remedy, place)


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
    planted[name] = np.where(
      where.reshape([-1] + [1] * (batch[name].ndim - 1)), np.inf, batch[name]
    ).astype(batch[name].dtype)
  return planted if floats else None
