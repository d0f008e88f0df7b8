"""What a check found, as a table for people and as JSON for machines."""

from __future__ import annotations

import dataclasses
import inspect
import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

Status = Literal["passed", "failed", "not applicable"]
WIDTH = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """One line of the table.

  Attributes:
    group: which of the checks of docs/verify.md, such as "replicas".
    check: what was checked, such as "same update on 2 replicas".
    status: "passed", "failed" or "not applicable".
    detail: what was seen: numbers, names; of what is not applicable, why.
    cause: of a failure, the likely one, by its name in docs/verify.md, such as "mean of means".
    remedy: of a failure, what to do.
    place: of a failure, file, line and function, such as "tasks/mine.py:31, in Mine.loss".
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


class Report:
  """All results of one verification."""

  def __init__(self, results: Sequence[Result], *, seconds: float) -> None:
    """Keeps them."""
    self.results, self.seconds = list(results), seconds

  @property
  def failures(self) -> list[Result]:
    """The results that failed, in order."""
    return [result for result in self.results if result.status == "failed"]

  def table(self) -> str:
    """Returns the table for a terminal of 100 columns, and one line that counts."""
    widest = max((len(result.check) for result in self.results), default=0)
    lines, group = [], ""
    for result in self.results:
      if result.group != group:
        lines += ["", result.group]
        group = result.group
      lines += _lines(result, widest)
    count = {
      status: sum(result.status == status for result in self.results)
      for status in ("passed", "failed", "not applicable")
    }
    counts = ", ".join(f"{number} {status}" for status, number in count.items())
    return "\n".join([*lines, "", f"{counts} in {self.seconds:.0f} s"]).lstrip("\n")

  def json(self) -> str:
    """Returns the report as a JSON object: seconds, failed, results."""
    found = [dataclasses.asdict(result) for result in self.results]
    report = {"seconds": self.seconds, "failed": len(self.failures), "results": found}
    return json.dumps(report, indent=2, default=float) + "\n"


def _lines(result: Result, widest: int) -> list[str]:
  mark = {"passed": "ok", "failed": "FAILED", "not applicable": "-"}[result.status]
  first = f"  {result.check:{widest}}  {mark:6}  "
  lines = textwrap.wrap(result.detail, max(40, WIDTH - len(first))) or [""]
  lines = [(first + lines[0]).rstrip(), *(" " * len(first) + line for line in lines[1:])]
  told = {"likely cause": result.cause, "where": result.place, "remedy": result.remedy}
  for name, text in told.items():
    if text:
      lines += textwrap.wrap(
        f"{name}: {text}", WIDTH, initial_indent="      ", subsequent_indent="        "
      )
  return lines


def place_of(owner: Any, *names: str, containing: Iterable[str] = ()) -> str:
  """Returns where a method is written, or the first of its lines that holds one of some texts.

  Args:
    owner: an object, whose methods `names` are looked at in order.
    names: methods.
    containing: such as "reduce_mean"; without any, or if none is there, the method's first line.

  Returns:
    "file.py:31, in Mine.loss", or "" where there is no source.
  """
  first = ""
  for name in names:
    function = getattr(owner, name, None)
    lines = _source(function)
    if lines is None:
      continue
    for number, line in enumerate(lines[0], lines[1]):
      if any(text in line for text in containing):
        return _place(function, number)
    first = first or _place(function, lines[1])
  return first


def _source(function: Callable[..., Any] | None) -> tuple[list[str], int] | None:
  function = inspect.unwrap(getattr(function, "__func__", function)) if function else None
  try:
    return inspect.getsourcelines(function) if function else None  # type: ignore[arg-type]
  except (OSError, TypeError):
    return None


def _place(function: Any, number: int) -> str:
  inner = inspect.unwrap(getattr(function, "__func__", function))
  return f"{Path(inspect.getsourcefile(inner) or '').name}:{number}, in {inner.__qualname__}"
