"""`loopwright ls runs`: a line for each run. Imports no task and no TensorFlow."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loopwright.errors import printable
from loopwright.run_folder import folders

if TYPE_CHECKING:
  from loopwright.commands.arguments import Parsed
  from loopwright.commands.parser import Parser

HEADS = ("name", "step", "status", "best", "age", "size")
DAMAGED = "damaged"
STATUSES = ("running", "done", "stopped", "failed", DAMAGED)
_TIMES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_SIZES = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))


@dataclasses.dataclass(frozen=True)
class Row:
  """What `ls` tells of a run; `of` reads it, and the attributes are what `--json` prints."""

  name: str
  step: int
  train_steps: int | None
  status: str
  best: folders.Best | None
  evaluation: Mapping[str, Any]
  age_s: float
  bytes: int
  faults: Sequence[str]

  @classmethod
  def of(cls, path: str, name: str) -> Row:
    """Returns what a run folder tells (host)."""
    run = folders.Run(path)
    last = [*run.evaluations.values()][-1:]
    return cls(
      name, run.step, run.train_steps, run.status(), run.best(), dict(*last),
      time.time() - run.changed(), run.size(), run.faults(name),
    )  # fmt: skip

  def cells(self) -> Sequence[str]:
    """Returns what `HEADS` names."""
    of = "" if self.train_steps is None else f"/{self.train_steps}"
    status = f"{self.status}, {DAMAGED}" if self.faults else self.status
    age, size = rounded(self.age_s, _TIMES), rounded(self.bytes, _SIZES)
    return self.name, f"{self.step}{of}", status, str(self.best or ""), age, size

  def record(self) -> Mapping[str, Any]:
    """Returns it as an object of JSON."""
    return {**vars(self), "best": self.best and self.best._asdict(), "faults": [*self.faults]}


_ORDERS: Mapping[str, Callable[[Row], Any]] = {
  "name": lambda row: folders.natural(row.name),
  "step": lambda row: -row.step,
  "status": lambda row: row.status,
  "best": lambda row: (row.best is None, row.best and row.best.place()),
  "age": lambda row: row.age_s,
  "size": lambda row: -row.bytes,
}
"""How `--sort` orders the runs: the best, the latest, the largest first."""


def define(parser: Parser) -> None:
  """Adds the command's flags."""
  parser.choice(
    "sort", None, [*_ORDERS], "What orders the runs: the best, the latest, the largest first; "
    "default: the folders that are named, in each by name.",
  )  # fmt: skip
  parser.value("status", [], _statuses, f"Only these: {', '.join(STATUSES)}; with commas between.")
  parser.text("name", None, "Only names that match, such as '*lr*'.")
  parser.switch("json", "Print a JSON array, with all that is known.")


def _statuses(text: str) -> list[str]:
  found = [each.strip() for each in text.split(",") if each.strip()]
  if {*found} - {*STATUSES}:
    raise ValueError(f"it must be one or more of {', '.join(STATUSES)}")
  return found


def run(parsed: Parsed) -> int:
  """Prints the runs in the folders that are named, by default in runs/; returns 0 (host)."""
  values = parsed.values
  rows = [row for top in parsed.arguments or ["runs"] for row in _rows(top)]
  if values.status:
    rows = [row for row in rows if {row.status, DAMAGED if row.faults else ""} & {*values.status}]
  if values.name:
    rows = [row for row in rows if fnmatch.fnmatchcase(row.name, values.name)]
  if values.sort:
    rows.sort(key=_ORDERS[values.sort])
  if values.json:
    print(json.dumps([row.record() for row in rows], indent=2))
    return 0
  print("\n".join(table([HEADS, *(row.cells() for row in rows)])) if rows else "no runs")
  for row in rows:
    for fault in row.faults:
      print(printable(f"{DAMAGED}: {fault}"))
  return 0


def _rows(top: str) -> Iterator[Row]:
  folder = folders.local(top)
  for path in folders.find(folder):
    with contextlib.suppress(OSError):  # removed just now
      yield Row.of(path, path.replace(folder, top.rstrip("/"), 1) if folder != top else path)


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
  """Yields lines with aligned columns; control characters are escaped."""
  safe = [[printable(cell) for cell in row] for row in rows]
  widths = [max(map(len, column)) for column in zip(*safe, strict=True)]
  for row in safe:
    yield "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()


def rounded(value: float, units: Sequence[tuple[int, str]]) -> str:
  """Returns a number in the largest of the `units` that it reaches, such as "3 h"."""
  size, name = next((unit for unit in units if value >= unit[0]), units[-1])
  return f"{max(value, 0) / size:.0f} {name}"
