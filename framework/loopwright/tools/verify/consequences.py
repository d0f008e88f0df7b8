"""Which failures only follow from an earlier one: they are shown, but not as failures.

One mistake often makes several checks fail. The first names it; whoever corrects it need not look
into the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from loopwright.tools.verify.report import Result

RUNS = "runs at all"
"""The check that fails if a group raises."""
_LEARNING = ("far from chance at the start", "learning rate too high", "cannot learn one batch")
_HALF = (
  "overflow in the forward pass", "underflow in the forward pass", "loss scale too small",
  "loss scale too large", "a sum in half precision", "a logarithm in half precision", "unknown",
)  # fmt: skip
_NUMBERS = ("non-finite gradient", "zero gradient", *_HALF, *_LEARNING)
_RESTORE = (
  "position of the data", "random numbers outside the checkpoint", "task differs between builds",
  "random generator outside the checkpoint",
)  # fmt: skip
_SUMS = (
  "loss divided by the local count of tokens", "metric divided by the local count of tokens",
  "padding enters the mean", "metric divided by a local count",
)  # fmt: skip
_MEANS = (
  "mean of means", "loss divided by the local batch", "loss divided by a local count",
  "metric divided by a local count", "padding counts",
)  # fmt: skip
_OUTSIDE = ("variable outside the checkpoint", "variables created late")
FOLLOWS: dict[str, Sequence[str]] = {
  "source() is random": _RESTORE,
  "stateful random op": _RESTORE,
  "non-finite features": _NUMBERS,
  "labels out of range": _NUMBERS,
  "labels start at 1": _NUMBERS,
  "preprocess() makes a feature constant": _NUMBERS,
  "inputs are not scaled": _NUMBERS,
  "variable outside the model": (*_OUTSIDE, *_RESTORE),
  "variable without gradient": ("zero gradient", "cannot learn one batch"),
  "zero gradient": ("cannot learn one batch",),
  "non-finite gradient": (*_HALF, *_LEARNING),
  "wrong gradient": ("cannot learn one batch",),
  "documents see one another": ("a token sees later ones", "padding is seen"),
  "a token sees later ones": ("padding is seen",),
  "padding counts inside a row": ("padding enters the mean", "padding is seen"),
  **dict.fromkeys(_MEANS, _SUMS),
  "average of what never changes": ("average that leaves out variables",),
  "evaluation changes the model": ("evaluation depends on something else than its batch",),
  "far from chance at the start": ("learning rate too high", "cannot learn one batch"),
}
"""A cause -> causes of later checks that it explains."""


def marked(results: Sequence[Result], before: Sequence[Result]) -> list[Result]:
  """Returns results in which what follows from an earlier failure is not a failure.

  Args:
    results: of one group.
    before: of the groups before it.
  """
  failures = [result for result in before if result.status == "failed"]
  made = []
  for result in results:
    if result.status == "failed":
      if first := next((each for each in failures if _follows(result, each)), None):
        result = dataclasses.replace(
          result, status="not applicable", cause="", remedy="", place="",
          detail=f"stops at the error that {first.group!r} reports"
          if result.check == RUNS
          else f"follows from {first.check!r} above; {result.detail}",
        )  # fmt: skip
      else:
        failures.append(result)
    made.append(result)
  return made


def _follows(result: Result, first: Result) -> bool:
  if result.check == first.check == RUNS:
    return (result.place or result.detail) == (first.place or first.detail)
  same = (result.cause, result.place) == (first.cause, first.place)
  return (same and result.cause != "unknown") or result.cause in FOLLOWS.get(first.cause, ())
