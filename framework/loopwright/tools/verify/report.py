"""Results of checks: a table for people and JSON for programs."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from loopwright.reporting.live import Terminal
from loopwright.reporting.progress import Line, is_terminal
from loopwright.tools.verify import causes

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


@contextlib.contextmanager
def shown(groups: int) -> Iterator[tuple[Callable[[str], None], Callable[[Sequence[str]], None]]]:
  """Gives a function that prints a section, and one that shows the names of groups that are left.

  On a terminal these are a live line below the sections, elsewhere they are not shown.
  """
  if not is_terminal(sys.stdout):
    yield lambda text: print(f"{text}\n", flush=True), lambda left: None
    return
  terminal = Terminal(sys.stdout)
  yield (
    lambda text: terminal.write(f"{text}\n"),
    lambda left: terminal.show([Line(1 - len(left) / groups, f"left: {', '.join(left)}")]),
  )
  terminal.show([])
  terminal.close()


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
