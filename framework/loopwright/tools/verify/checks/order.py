"""The order of operations in the traced step, shown as a pipeline with its communications."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from loopwright.tools.verify.bench import recording
from loopwright.tools.verify.bench.bench import Subject
from loopwright.tools.verify.bench.explanations import (
  CHECKED_FIRST,
  CLIPPED_FIRST,
  LOCAL_CONDITION,
  LOCAL_OFFSETS,
  LOCAL_STATE,
  LOCAL_UPDATE,
  LOCAL_WEIGHT,
  NEVER_REDUCED,
  NEVER_UNSCALED,
  TWICE,
  Explanation,
)
from loopwright.tools.verify.bench.recording import OWN, REPLICAS, Call
from loopwright.tools.verify.report import Group, Result

GROUP = Group("order")
FOLLOWED = "what assignments follow"
LOCAL = {"assign": LOCAL_STATE, "apply": LOCAL_UPDATE, "unscale": LOCAL_WEIGHT}
Mistake: TypeAlias = tuple[Explanation, Call]


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  recorded, here = recording.record(subject)
  pipeline = in_order(recorded.calls)
  counted = [b for call in recorded.calls for b in call.communications]
  shown = GROUP.passed(
    "pipeline of the step", detail=pipeline,
    values={"calls": [str(call) for call in recorded.calls]},
  )  # fmt: skip
  if (mistake := first_mistake(recorded.calls)) is not None:
    why, call = mistake
    shown = dataclasses.replace(
      shown, status="failed", cause=why.cause, remedy=why.remedy, place=call.place,
      detail=f"{call} depends on the rows of one replica; {pipeline}" if call.local else pipeline,
    )  # fmt: skip
  gradients = sum(here.trainable)
  total = GROUP.passed(
    "communication",
    detail=f"{recording.communicated(counted) or 'none'} a step on {REPLICAS} replicas, for "
    f"{gradients} variables of {here.parameters:,} numbers "
    f"({here.trainer.parts.reduction.describe()})",
    values={"bytes": counted},
  )  # fmt: skip
  return [shown, total, *_followed(recorded.calls)]


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
    return [
      GROUP.failed(
        FOLLOWED, f"{idle[0].what} is computed only from itself and what no step changes",
        cause="average of what never changes", place=idle[0].place,
        remedy="follow the weights that an optimizer updates: 0.99 * slow + 0.01 * trained",
      )
    ]  # fmt: skip
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
  return next((each for each in found if each[0] is NEVER_REDUCED), next(iter(found), None))


def wrong_update(calls: Sequence[Call]) -> Mistake | None:
  """As `first_mistake`, but not of when gradients are checked or divided."""
  found = first_mistake(calls)
  return None if found and found[0] in (CHECKED_FIRST, NEVER_UNSCALED) else found


def mistakes(calls: Sequence[Call]) -> Iterator[Mistake]:
  """Yields what is wrong with each call out of order."""
  for call in calls:
    if call.local:
      yield LOCAL.get(call.verb, LOCAL_CONDITION), call
    if call.verb == "all_reduce" and call.clipped:
      yield CLIPPED_FIRST, call
    if call.verb == "all_reduce" and call.reduced:
      yield _twice("call step.all_reduce once for each step.gradients"), call
    elif call.verb == "perturbed" and call.raw:
      yield LOCAL_OFFSETS, call
    elif call.verb == "clip" and call.raw:
      yield CLIPPED_FIRST, call
    elif call.verb == "check finite" and call.raw:
      yield CHECKED_FIRST, call
    elif call.verb == "apply" and call.raw:
      yield NEVER_REDUCED, call
    elif call.verb == "apply" and call.communications:
      yield _twice("step.apply does not reduce, and your own optimizer must not either"), call
    elif call.verb == OWN and call.reduced:
      yield (
        _twice(
          "something communicates after step.all_reduce: the optimizer's apply() reduces again"
        ),
        call,
      )
  applied = [call for call in calls if call.verb == "apply"]
  if applied and not any(call.verb == "unscale" for call in calls):
    yield NEVER_UNSCALED, applied[0]


def _twice(remedy: str) -> Explanation:
  return Explanation(cause=TWICE.cause, remedy=remedy)
