"""Results of checks: a table for people and JSON for programs."""

from __future__ import annotations

import collections
import dataclasses
import json
import textwrap
from collections.abc import Sequence
from typing import Any, Literal

from loopwright.tools.verify import causes

Status = Literal["passed", "accepted", "failed", "not applicable"]
WIDTH, COLUMN = 100, 30
RUNS = "runs at all"
"""The check that fails if a group raises."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """The result of one check, a line of the table.

  Attributes:
    group: a group of docs/verify.md, such as "replicas".
    check: what was checked, such as "same update on 2 replicas".
    status: "passed", "failed", "accepted" (a failure that the task allows in `Task.accepted`) or
      "not applicable".
    detail: what was found: numbers, names; if not applicable or accepted, the reason.
    cause: if failed, the likely cause, as named in docs/verify.md, such as "mean of means".
    remedy: if failed, what to do.
    place: if failed, file, line and function, such as "tasks/mine.py:31, in Mine.loss".
    values: the numbers, for JSON.
  """

  group: str
  check: str
  status: Status
  detail: str = ""
  cause: str = ""
  remedy: str = ""
  place: str = ""
  values: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Group:
  """Makes the results of one group of docs/verify.md; the arguments are `Result`'s."""

  name: str

  def passed(self, check: str, detail: str = "", **values: Any) -> Result:
    """Returns what is right."""
    return Result(group=self.name, check=check, status="passed", detail=detail, **values)

  def skipped(self, check: str, detail: str, **values: Any) -> Result:
    """Returns what does not apply; `detail` says why."""
    return Result(group=self.name, check=check, status="not applicable", detail=detail, **values)

  def failed(
    self, check: str, detail: str, cause: str, place: str = "", remedy: str = "", **values: Any
  ) -> Result:
    """Returns what is wrong; a cause of the table has its remedy."""
    remedy = remedy or causes.remedy(cause, self.name)
    return Result(
      group=self.name, check=check, status="failed", detail=detail, cause=cause, remedy=remedy,
      place=place, **values,
    )  # fmt: skip


@dataclasses.dataclass
class Report:
  """All results of one verification.

  Attributes:
    results: of all groups, in order.
    seconds: the duration.
    shares: group -> its seconds; several may have run at a time.
  """

  results: list[Result]
  seconds: float = 0.0
  shares: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def failures(self) -> list[Result]:
    """The failed results, in order."""
    return [result for result in self.results if result.status == "failed"]

  def table(self) -> str:
    """Returns the table, 100 columns wide, and a line with the counts."""
    groups = dict.fromkeys(result.group for result in self.results)
    parts = [section([r for r in self.results if r.group == group]) for group in groups]
    return "\n\n".join(filter(None, [*parts, self.left_out(), self.count()]))

  def left_out(self) -> str:
    """Returns the lines of all checks that do not apply, each reason once; "" if there are none."""
    names: dict[tuple[str, str], list[str]] = {}
    for result in self.results:
      if result.status == "not applicable":
        names.setdefault((result.group, result.detail), []).append(result.check)
    widest = max((len(group) for group, _ in names), default=0)
    lines = [
      line
      for (group, detail), checks in names.items()
      for line in _hanging(f"  {group:{widest}}  ", f"{', '.join(checks)}: {detail}")
    ]
    return "\n".join(["not applicable", *lines] if lines else [])

  def times(self) -> str:
    """Returns the lines of the groups' shares of the time, the longest first."""
    whole, widest = sum(self.shares.values()) or 1.0, max(map(len, self.shares), default=0)
    shares = sorted(self.shares.items(), key=lambda share: -share[1])
    lines = [f"  {name:{widest}}  {s:6.1f} s  {s / whole:4.0%}" for name, s in shares]
    return "\n".join(["time", *lines])

  def count(self) -> str:
    """Returns one line with the number of results of each status, and the seconds."""
    count = collections.Counter(result.status for result in self.results)
    named: list[Status] = ["passed", "failed", "not applicable"]
    named += ["accepted"] if count["accepted"] else []
    counts = ", ".join(f"{count[status]} {status}" for status in named)
    return f"{counts} in {self.seconds:.0f} s"

  def json(self) -> str:
    """Returns the report as a JSON object: seconds, failed (a count), results, shares."""
    found = [dataclasses.asdict(result) for result in self.results]
    report = {"seconds": self.seconds, "failed": len(self.failures), "results": found}
    report |= {"shares": self.shares}
    return json.dumps(report, indent=2, default=float) + "\n"


def section(results: Sequence[Result]) -> str:
  """Returns the lines of one group that say something, beginning with its name; "" if none do."""
  results = [result for result in results if result.status != "not applicable"]
  lines = [results[0].group] if results else []
  for result in results:
    lines += _lines(result, max(COLUMN, *(len(r.check) for r in results)))
  return "\n".join(lines)


def _lines(result: Result, widest: int) -> list[str]:
  mark = {"passed": "ok", "failed": "FAILED"}.get(result.status, "-")
  first = f"  {result.check:{widest}}  {mark:6}  "
  lines = _hanging(first, result.detail)
  parts = {"likely cause": result.cause, "where": result.place, "remedy": result.remedy}
  for name, text in parts.items():
    if text:
      told = _wrapped(f"{name}: {text}", WIDTH - 8)
      lines += [" " * (8 if index else 6) + line for index, line in enumerate(told)]
  return lines


def _hanging(first: str, text: str) -> list[str]:
  """Returns the lines of a text behind `first`, and below it."""
  lines = _wrapped(text, max(40, WIDTH - len(first))) or [""]
  return [(first + lines[0]).rstrip(), *(" " * len(first) + line for line in lines[1:])]


def _wrapped(text: str, width: int) -> list[str]:
  """Breaks a text between words; a name or a path that is longer than a line stays whole."""
  return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def marked(results: Sequence[Result], before: Sequence[Result]) -> list[Result]:
  """Returns results in which what follows from an earlier failure is not a failure.

  One mistake often makes several checks fail. The first names it; whoever corrects it need not look
  into the others.

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
