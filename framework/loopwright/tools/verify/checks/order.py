"""The order of operations in the traced step, shown as a pipeline with its communications."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from loopwright.tools.verify.bench import recording
from loopwright.tools.verify.bench.bench import Subject
from loopwright.tools.verify.bench.recording import OWN, REPLICAS, Call
from loopwright.tools.verify.report import Group, Result

GROUP = Group("order")
NEVER_REDUCED = (
  "never reduced",
  "call step.all_reduce(gradients, loss) before step.unscale and step.apply",
)
CLIPPED_FIRST = (
  "clipped before the reduction",
  "clip reduced gradients: step.clip after step.all_reduce and step.unscale",
)
CHECKED_FIRST = (
  "finite check before the reduction",
  "call step.check on the reduced gradients, so that all replicas decide alike",
)
NEVER_UNSCALED = (
  "never unscaled",
  "call step.unscale after step.all_reduce: it divides by the global weight and the loss scale",
)
TWICE = "reduced twice"
LOCAL_STATE = (
  "state fed from local rows only",
  "give step.assign() a value that is equal on every replica: step.all_gather() the rows, or "
  "compute it from sums over all replicas",
)
LOCAL_CONDITION = (
  "a condition that differs between replicas",
  "compute `when` from step.number, variables or reduced values, such as the loss that "
  "step.update() returns, not from the rows of this replica",
)
LOCAL_UPDATE = (
  "an update that differs between replicas",
  "give step.apply() the same on every replica: gradients and sums that step.all_reduce() returns, "
  "noise from a seed without the replica, such as [seed, step.number]",
)
LOCAL = {"assign": LOCAL_STATE, "apply": LOCAL_UPDATE}


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  recorded, here = recording.record(subject)
  pipeline = " > ".join(map(str, recorded.calls))
  counted = [b for call in recorded.calls for b in call.communications]
  shown = GROUP.passed(
    "pipeline of the step", detail=pipeline,
    values={"calls": [str(call) for call in recorded.calls]},
  )  # fmt: skip
  if (mistake := first_mistake(recorded.calls)) is not None:
    cause, remedy, call = mistake
    shown = dataclasses.replace(
      shown, status="failed", cause=cause, remedy=remedy, place=call.place,
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


def _followed(calls: Sequence[Call]) -> list[Result]:
  """Returns a note of what assignments follow, weights before or after their update."""
  assigned = [call for call in calls if call.verb == "assign"]
  if not assigned:
    return []
  early = [call for call in assigned if call.early]
  detail = f"{len(assigned)} variables, none follows weights that the step updates afterwards"
  if early:
    first = early[0]
    detail = (
      f"{first.what} ({first.place}) follows {first.early} as it is before the update; if it must "
      "follow the new value, assign after step.update()"
    )
  return [GROUP.passed("what assignments follow", detail)]


def first_mistake(calls: Sequence[Call]) -> tuple[str, str, Call] | None:
  """Returns (cause, remedy, call) of the call out of order; None if all are in order.

  What is never reduced comes first, because it explains the others.
  """
  found = list(mistakes(calls))
  return next((each for each in found if each[:2] == NEVER_REDUCED), next(iter(found), None))


def wrong_update(calls: Sequence[Call]) -> tuple[str, str, Call] | None:
  """As `first_mistake`, but not of when gradients are checked or divided."""
  found = first_mistake(calls)
  return None if found and found[:2] in (CHECKED_FIRST, NEVER_UNSCALED) else found


def mistakes(calls: Sequence[Call]) -> Iterator[tuple[str, str, Call]]:
  """Yields (cause, remedy, call) for each call out of order."""
  for call in calls:
    if call.local:
      yield *LOCAL.get(call.verb, LOCAL_CONDITION), call
    if call.verb == "all_reduce" and call.clipped:
      yield *CLIPPED_FIRST, call
    if call.verb == "all_reduce" and call.reduced:
      yield TWICE, "call step.all_reduce once for each step.gradients", call
    elif call.verb == "clip" and call.raw:
      yield *CLIPPED_FIRST, call
    elif call.verb == "check finite" and call.raw:
      yield *CHECKED_FIRST, call
    elif call.verb == "apply" and call.raw:
      yield *NEVER_REDUCED, call
    elif call.verb == "apply" and call.communications:
      remedy = "step.apply does not reduce, and your own optimizer must not either"
      yield TWICE, remedy, call
    elif call.verb == OWN and call.reduced:
      remedy = "something communicates after step.all_reduce: the optimizer's apply() reduces again"
      yield TWICE, remedy, call
  applied = [call for call in calls if call.verb == "apply"]
  if applied and not any(call.verb == "unscale" for call in calls):
    yield *NEVER_UNSCALED, applied[0]
