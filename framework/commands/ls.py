"""`loopwright ls runs`: a line for each run. Imports no task and no TensorFlow."""

import time
from collections.abc import Iterator, Sequence

from absl import flags

from framework.commands import folders
from framework.commands.arguments import Parsed
from framework.errors import ConfigError, printable

HEADS = ("name", "step", "status", "best", "age", "size")
_TIMES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_SIZES = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))


def define(values: flags.FlagValues) -> None:
  """Adds the command's flags: none."""


def run(parsed: Parsed) -> int:
  """Prints the runs in the folders that are named, by default in runs/; returns 0 (host)."""
  rows = []
  for top in parsed.arguments or ["runs"]:
    folder = folders.local(top)
    for path in folders.find(folder):
      name, *told = row(path)
      rows.append((name.replace(folder, top.rstrip("/"), 1) if folder != top else name, *told))
  print("\n".join(table([HEADS, *rows])) if rows else "no runs")
  return 0


def row(path: str) -> Sequence[str]:
  """Returns what `HEADS` names of one run; of a damaged one, what is wrong."""
  try:
    found = folders.Run(path)
    age, size = time.time() - found.changed(), found.size()
  except (ConfigError, OSError) as error:
    return path, "", "damaged", "", "", str(error)
  of = "" if found.train_steps is None else f"/{found.train_steps}"
  told = (path, f"{found.step}{of}", found.status(), str(found.best() or ""))
  return *told, rounded(age, _TIMES), rounded(size, _SIZES)


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
