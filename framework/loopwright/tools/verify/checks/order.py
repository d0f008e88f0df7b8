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
from loopwright.tools.verify.report import Explanation, Group, Result

GROUP = Group("order")
FOLLOWED = "what assignments follow"
LIMITED = Explanation("clipped while scaled")
LOCAL = {"assign": known.LOCAL_STATE, "apply": known.LOCAL_UPDATE, "unscale": known.LOCAL_WEIGHT}
Mistake: TypeAlias = tuple[Explanation, Call]


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  recorded, here = recorded_step.record(subject)
  pipeline = in_order(recorded.calls)
  counted = [b for call in recorded.calls for b in call.communications]
  values = {"calls": [str(call) for call in recorded.calls]}
  shown = GROUP.passed("pipeline of the step", pipeline, values=values)
  if (mistake := first_mistake(recorded.calls) or scaled(subject, recorded.calls)) is not None:
    why, call = mistake
    told = f"{call} depends on the rows of one replica; {pipeline}" if call.local else pipeline
    place = call.limited or call.place
    shown = GROUP.explained("pipeline of the step", told, why, place, values=values)
  total = f"{recorded_step.communicated(counted) or 'none'} a step on {REPLICAS} replicas, for "
  total += f"{sum(here.trainable)} variables of {here.parameters:,} numbers "
  total += f"({here.trainer.parts.reduction.describe()})"
  communication = GROUP.passed("communication", total, values={"bytes": counted})
  return [shown, communication, *_followed(recorded.calls)]


def in_order(calls: Sequence[Call]) -> str:
  """Returns the calls as one line, in which assignments in a row are one."""
  told: list[str] = []
  for assigned, run in itertools.groupby(calls, key=_assigned):
    first, *more = run
    short = assigned and more
    told += [f"assign ({first.what} and {len(more)} more)"] if short else map(str, [first, *more])
  return " > ".join(told)


def _assigned(call: Call) -> bool:
  return call.verb == "assign"


def _followed(calls: Sequence[Call]) -> list[Result]:
  """Returns a note of what assignments follow, weights before or after their update."""
  assigned = [*filter(_assigned, calls)]
  if not assigned:
    return []
  early, idle = ([c for c in assigned if getattr(c, which)] for which in ("early", "idle"))
  if idle:
    told = f"{idle[0].what} is computed only from itself and what no step changes"
    return [GROUP.failed(FOLLOWED, told, "average of what never changes", idle[0].place)]
  detail = f"{len(assigned)} variables, none follows weights that the step updates afterwards"
  if early:
    first = early[0]
    detail = (
      f"{first.what} ({first.place}) follows {first.early} as it is before the update; if it must "
      "follow the new value, assign after step.update()"
    )
  return [GROUP.passed(FOLLOWED, detail)]


def first_mistake(calls: Sequence[Call]) -> Mistake | None:
  """Returns what is wrong with the call that is out of order; None if all are in order.

  What is never reduced comes first, because it explains the others.
  """
  found = list(mistakes(calls))
  return next((each for each in found if each[0] is known.NEVER_REDUCED), next(iter(found), None))


def wrong_update(calls: Sequence[Call]) -> Mistake | None:
  """As `first_mistake`, but not of when gradients are checked."""
  found = first_mistake(calls)
  return None if found and found[0] is known.CHECKED_FIRST else found


def mistakes(calls: Sequence[Call]) -> Iterator[Mistake]:
  """Yields what is wrong with each call out of order."""
  for call in calls:
    if call.local:
      yield LOCAL.get(call.verb, known.LOCAL_CONDITION), call
    if call.verb == "all_reduce" and call.clipped:
      yield known.CLIPPED_FIRST, call
    if call.verb in ("all_reduce", OWN) and call.reduced:
      yield known.TWICE, call
    elif call.verb == "perturbed" and call.raw:
      yield known.LOCAL_OFFSETS, call
    elif call.verb == "clip" and call.raw:
      yield known.CLIPPED_FIRST, call
    elif call.verb == "check finite" and call.raw:
      yield known.CHECKED_FIRST, call
    elif call.verb == "apply" and call.raw:
      yield known.NEVER_REDUCED, call
    elif call.verb == "apply" and call.communications:
      yield known.TWICE, call


def scaled(subject: Subject, calls: Sequence[Call]) -> Mistake | None:
  """Returns what is done to gradients that still have the loss scale in them, if it is wrong.

  Without `step.unscale`, or with limits before it, an update may be right. The judge is the update:
  that of two replicas, and that with a loss scale if the config has one, must be that of one.
  """
  applied = [call for call in calls if call.verb == "apply"]
  unscaled = [call for call in calls if call.verb == "unscale"]
  suspect = next(((LIMITED, call) for call in unscaled if call.limited), None)
  if applied and not unscaled:
    suspect = known.NEVER_UNSCALED, applied[0]
  if suspect is None:
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
