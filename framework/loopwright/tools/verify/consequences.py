"""Which failures only follow from an earlier one: they are shown, but not as failures.

One mistake often makes several checks fail. The first names it; whoever corrects it need not look
into the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from loopwright.tools.verify import causes
from loopwright.tools.verify.report import Result

RUNS = "runs at all"
"""The check that fails if a group raises."""


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
  return (same and result.cause != "unknown") or causes.follows(result.cause, first.cause)
