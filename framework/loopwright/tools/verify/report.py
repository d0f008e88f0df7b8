"""Results of checks: a table for people and JSON for programs."""

from __future__ import annotations

import collections
import dataclasses
import json
import textwrap
from collections.abc import Sequence
from typing import Any, Literal

Status = Literal["passed", "accepted", "failed", "not applicable"]
WIDTH, COLUMN = 100, 30


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
    self, check: str, detail: str, cause: str, remedy: str = "", place: str = "", **values: Any
  ) -> Result:
    """Returns what is wrong."""
    return Result(
      group=self.name, check=check, status="failed", detail=detail, cause=cause, remedy=remedy,
      place=place, **values,
    )  # fmt: skip


class Report:
  """All results of one verification."""

  def __init__(self, results: Sequence[Result], *, seconds: float) -> None:
    """Keeps the results; `seconds` is the duration."""
    self.results, self.seconds = list(results), seconds

  @property
  def failures(self) -> list[Result]:
    """The failed results, in order."""
    return [result for result in self.results if result.status == "failed"]

  def table(self) -> str:
    """Returns the table, 100 columns wide, and a line with the counts."""
    groups = dict.fromkeys(result.group for result in self.results)
    parts = [section([r for r in self.results if r.group == group]) for group in groups]
    return "\n\n".join([*parts, self.count()])

  def count(self) -> str:
    """Returns one line with the number of results of each status, and the seconds."""
    count = collections.Counter(result.status for result in self.results)
    named: list[Status] = ["passed", "failed", "not applicable"]
    named += ["accepted"] if count["accepted"] else []
    counts = ", ".join(f"{count[status]} {status}" for status in named)
    return f"{counts} in {self.seconds:.0f} s"

  def json(self) -> str:
    """Returns the report as a JSON object: seconds, failed (a count), results."""
    found = [dataclasses.asdict(result) for result in self.results]
    report = {"seconds": self.seconds, "failed": len(self.failures), "results": found}
    return json.dumps(report, indent=2, default=float) + "\n"


def section(results: Sequence[Result]) -> str:
  """Returns the lines of one group, beginning with its name."""
  lines = [results[0].group] if results else []
  for result in results:
    lines += _lines(result, max(COLUMN, *(len(r.check) for r in results)))
  return "\n".join(lines)


def _lines(result: Result, widest: int) -> list[str]:
  mark = {"passed": "ok", "failed": "FAILED"}.get(result.status, "-")
  first = f"  {result.check:{widest}}  {mark:6}  "
  lines = _wrapped(result.detail, max(40, WIDTH - len(first))) or [""]
  lines = [(first + lines[0]).rstrip(), *(" " * len(first) + line for line in lines[1:])]
  parts = {"likely cause": result.cause, "where": result.place, "remedy": result.remedy}
  for name, text in parts.items():
    if text:
      told = _wrapped(f"{name}: {text}", WIDTH - 8)
      lines += [" " * (8 if index else 6) + line for index, line in enumerate(told)]
  return lines


def _wrapped(text: str, width: int) -> list[str]:
  """Breaks a text between words; a name or a path that is longer than a line stays whole."""
  return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
