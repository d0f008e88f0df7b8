"""`CSVFile`: the metrics of a run as a table, for a spreadsheet."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.host import files
from loopwright.host.json_lines import Record
from loopwright.run_folder.metrics_log import scalars
from loopwright.tools.trackers.base import Tracker

_FORMULAS = tuple("=+-@\t\r")
"""A cell that begins with one is computed by a spreadsheet, unless a quote is before it."""


class CSVFile(Tracker):
  """Writes the lines of metrics.jsonl to a CSV file: step, split, wall_time, then each metric.

  It is made anew when a run starts, so it always has the lines of metrics.jsonl, each once.
  Arrays are left out. A metric that comes later adds a column. A name that a spreadsheet would
  compute, such as "=1+1", has a quote before it.
  """

  def __init__(self, *, file: str = "metrics.csv") -> None:
    """Sets the file.

    Args:
      file: its name in the run folder.

    Raises:
      ConfigError: the name does not end in .csv, or has a folder.
    """
    super().__init__()
    if not file.endswith(".csv") or os.path.basename(file) != file:
      raise ConfigError(f"CSVFile.file is {file!r}; it must be a name that ends in '.csv'.")
    self._file = file
    self._columns: list[str] = []

  def connect(self) -> None:
    """Forgets what an earlier process wrote: `log` gets all lines again."""
    self._columns = []

  def held(self) -> Mapping[str, int]:
    """Returns nothing, so that all lines are written."""
    return {}

  def log(self, records: Sequence[Record]) -> None:
    """Appends rows; with a new column, or at first, replaces the file."""
    rows = [scalars(record) for record in records]
    path, known = os.path.join(self.run.model_dir, self._file), self._columns
    self._columns = list(dict.fromkeys([*known, *(name for row in rows for name in row)]))
    if self._columns == known:
      with tf.io.gfile.GFile(path, "a") as file:
        file.write(self._text(rows))
    else:
      before = csv.DictReader(io.StringIO(files.read(path).decode()), known) if known else ()
      header = {name: f"'{name}" if name.startswith(_FORMULAS) else name for name in self._columns}
      files.atomic_write(path, self._text([header, *[*before][1:], *rows]))

  def _text(self, rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, self._columns, lineterminator="\n").writerows(rows)
    return text.getvalue()
