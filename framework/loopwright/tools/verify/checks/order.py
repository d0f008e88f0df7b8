"""The order of operations in the traced step, shown as a pipeline with its communications."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from loopwright.optimizers.loss_scale import fixed, none
from loopwright.tools.verify.bench import explanations as known
from loopwright.tools.verify.bench import recorded_step
from loopwright.tools.verify.bench.bench import PLAIN, Bench, Subject, weighted
from loopwright.tools.verify.bench.recorded_step import OWN, REPLICAS, Call
from loopwright.tools.verify.report import Group, Result

GROUP = Group("order")
PIPELINE = "pipeline of the step"
LOCAL = {
  "assign": known.LOCAL_STATE,
  "apply": "an update that differs between replicas",
  "unscale": known.LOCAL_WEIGHT,
}
"""Verb -> the cause if what it gets is of one replica's rows; of others it is a condition."""
RAW = {
  "perturbed": known.LOCAL_OFFSETS,
  "clip": known.CLIPPED_FIRST,
  "check finite": known.CHECKED_FIRST,
  "apply": known.NEVER_REDUCED,
}
"""Verb -> the cause if it gets gradients that are not reduced."""
Mistake: TypeAlias = tuple[str, str]
"""Cause and place."""


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  recorded, here = recorded_step.record(subject)
  calls = recorded.calls
  mistake = first_mistake(calls) or scaled(subject, calls)
  shown = GROUP.failed(PIPELINE, in_order(calls), *mistake) if mistake else None
  counted = [number for call in calls for number in call.communications]
  total = f"{recorded_step.communicated(counted) or 'none'} a step on {REPLICAS} replicas, for "
  total += f"{sum(here.trainable)} variables of {here.parameters:,} numbers "
  total += f"({here.trainer.parts.reduction.describe()})"
  results = [shown or GROUP.passed(PIPELINE, in_order(calls)), GROUP.passed("communication", total)]
  if idle := next((call for call in calls if call.idle), None):
    told = f"{idle.what} is computed only from itself and what no step changes"
    cause = "average of what never changes"
    results.append(GROUP.failed("what assignments follow", told, cause, idle.place))
  return results


def in_order(calls: Sequence[Call]) -> str:
  """Returns the calls as one line, in which assignments in a row are one."""
  told: list[str] = []
  for assigned, run in itertools.groupby(calls, key=lambda call: call.verb == "assign"):
    first, *more = run
    short = assigned and more
    told += [f"assign ({first.what} and {len(more)} more)"] if short else map(str, [first, *more])
  return " > ".join(told)


def first_mistake(calls: Sequence[Call]) -> Mistake | None:
  """Returns what is wrong with the call that is out of order; None if all are in order.

  What is never reduced comes first, because it explains the others.
  """
  found = sorted(mistakes(calls), key=lambda each: each[0] != known.NEVER_REDUCED)
  return next(iter(found), None)


def wrong_update(calls: Sequence[Call]) -> Mistake | None:
  """As `first_mistake`, but not of when gradients are checked."""
  return first_mistake([call for call in calls if call.verb != "check finite"])


def mistakes(calls: Sequence[Call]) -> Iterator[Mistake]:
  """Yields what is wrong with each call out of order."""
  for call in calls:
    if call.local:
      yield LOCAL.get(call.verb, known.LOCAL_CONDITION), call.place
    if call.verb == "all_reduce" and call.clipped:
      yield known.CLIPPED_FIRST, call.place
    if call.verb in ("all_reduce", OWN) and call.reduced:
      yield known.TWICE, call.place
    elif call.verb in RAW and call.raw:
      yield RAW[call.verb], call.place
    elif call.verb == "apply" and call.communications:
      yield known.TWICE, call.place


def scaled(subject: Subject, calls: Sequence[Call]) -> Mistake | None:
  """Returns what is done to gradients that still have the loss scale in them, if it is wrong.

  Without `step.unscale`, or with limits before it, an update may be right. The judge is the update:
  that of two replicas, and that with a loss scale if the config has one, must be that of one.
  """
  applied, unscaled = (
    [call for call in calls if call.verb == verb] for verb in ("apply", "unscale")
  )
  if applied and not unscaled:
    suspect = "never unscaled", applied[0].place
  elif limits := [call.limited for call in unscaled if call.limited]:
    suspect = "clipped while scaled", limits[0]
  else:
    return None
  one, has_scale = _update(subject, 1, none)
  others = [_update(subject, REPLICAS, none)[0]]
  others += [_update(subject, 1, functools.partial(fixed, scale=64.0))[0]] if has_scale else []
  return None if all(known.fits(other, one) for other in others) else suspect


def _update(subject: Subject, replicas: int, scale: Any) -> tuple[np.ndarray, bool]:
  """Returns the update by gradient descent, as one vector, and whether the config has a scale."""
  rows = subject.divisible_rows
  here = Bench(subject, replicas, rows=rows, **PLAIN)
  has_scale = here.trainer.parts.loss_scale.factor() is not None
  here.trainer.use(loss_scale=scale())
  outcome = here.step(weighted(subject.rows(here.task, rows)))
  updates = zip(outcome.update(), here.trainable, strict=True)
  return np.concatenate([update.ravel() for update, used in updates if used]), has_scale
