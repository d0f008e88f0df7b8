"""Sequences of a task's source, the documents in their rows, and the same rows with one changed.

Documents are known by a feature [n, length] of whole numbers whose name has "segment" or "doc" and
that is 1, 1, 1, 2, 2, ... with 0 or -1 in padding, as `Packed` makes it. Otherwise a row is one
document, without what a mask or a length calls padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from loopwright.inputs.packed import Packed
from loopwright.inputs.sources import main_source, of_one_shape
from loopwright.task import Task
from loopwright.tools.verify.bench import longer_rows, survey
from loopwright.tools.verify.bench.bench import Rows

ROWS = 6
SHORTEST = 3
"""Tokens of a document that is worth to be changed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
  """Rows before preprocess().

  Attributes:
    rows: name -> [n, ...].
    number: which document each token belongs to, from 1 in each row; 0 in padding; int [n, length].
    known_by: what says so; "" if nothing does, and a row is one document.
    contents: the features [n, length, ...] that belong to tokens, without those that only say where
      a document or padding is.
    counted: a feature that counts the tokens of each document, or of the row; "" if none does.
    padding: name -> the value of each feature [n, length, ...] in padding; None if unknown.
  """

  rows: Rows
  number: np.ndarray
  known_by: str
  contents: Sequence[str]
  counted: str
  padding: Rows | None

  @property
  def length(self) -> int:
    """Tokens in a row."""
    return int(self.number.shape[1])

  @property
  def several(self) -> bool:
    """Whether each row has several documents, which are known."""
    return bool(self.known_by) and bool((self.number.max(axis=1) > 1).all())

  @property
  def restarts(self) -> bool:
    """Whether `counted` begins at the same number in each document."""
    starts = (np.diff(self.number, axis=1, prepend=0) != 0) & (self.number > 0)
    return not self.counted or len(np.unique(self.rows[self.counted][starts])) == 1

  def last(self) -> np.ndarray:
    """Returns the number of each row's last document, int [n, 1]."""
    return self.number.max(axis=1, keepdims=True)

  def changed(self, where: np.ndarray) -> Rows:
    """Returns the rows with the contents of other rows where bool [n, length]."""
    made, rng = dict(self.rows), np.random.default_rng(1)
    made |= {name: self.rows[name].copy() for name in self.contents}
    for row, here in enumerate(where):
      others = (self.number > 0) & (np.arange(len(where)) != row)[:, np.newaxis]
      first = rng.integers(others.sum())
      for name in self.contents:
        given = np.roll(self.rows[name][others], -first, axis=0)
        made[name][row, here] = np.resize(given, [here.sum(), *given.shape[1:]])
    return made

  def rotated(self) -> tuple[Rows, np.ndarray]:
    """Returns the rows with the first document behind the others, and where each token was.

    What counts the tokens of the row, whatever the documents, stays as it is.
    """
    most = self.number.max()
    order = np.select([self.number == 0, self.number == 1], [most + 2, most + 1], self.number)
    places = np.argsort(order, axis=1, kind="stable")
    made = dict(self.rows)
    for name, value in self.rows.items():
      if value.shape[1:2] == (self.length,) and (self.restarts or name != self.counted):
        made[name] = value[np.arange(len(value))[:, np.newaxis], places]
    if self.known_by:  # numbers that ascend, as before
      number, value = np.take_along_axis(self.number, places, axis=1), self.rows[self.known_by]
      rank = np.cumsum(np.diff(number, axis=1, prepend=0) != 0, axis=1)
      first = (self.number[:, np.newaxis] == rank[:, :, np.newaxis]).argmax(axis=2)
      made[self.known_by] = np.where(number > 0, np.take_along_axis(value, first, axis=1), value)
    return made, places

  def emptied(self, where: np.ndarray) -> Rows:
    """Returns the rows with padding where bool [n, length], which must be the rows' ends."""
    made = dict(self.rows)
    for name, value in (self.padding or {}).items():
      made[name] = made[name].copy()
      made[name][where] = value
    return made


def find(task: Task) -> Sequences | None:
  """Returns sequences of the training set; None if it has no feature [n, length] of integers."""
  source = main_source(of_one_shape(task.source("train")))
  read = next(iter(survey.batches(source)))
  rows = {name: value for name, value in read.items() if name not in survey.RESERVED}
  if not (whole := _whole(rows)):
    return None
  count, length = next(iter(whole.values())).shape
  known_by, number = _documents(whole)
  if not known_by:
    known = longer_rows.known_lengths(rows)
    lengths = known[1] if known and known[2] == length else np.full([count], length)
    number = (np.arange(length) < lengths[:, np.newaxis]).astype(np.int64)
  chosen = _chosen(number)
  rows, number = {name: value[chosen] for name, value in rows.items()}, number[chosen]
  counted = next((n for n, v in whole.items() if _counts(v[chosen], number)), "")
  tokens = {n: v for n, v in rows.items() if v.shape[1:2] == (length,)}
  places, real = (known_by, counted), number > 0
  contents = [n for n, v in tokens.items() if n not in places and not np.array_equal(v, real)]
  padding = None
  if not real.all():
    padding = {name: value[~real][-1] for name, value in tokens.items()}
  elif isinstance(source, Packed):
    padding = {name: np.zeros(v.shape[2:], v.dtype) for name, v in tokens.items()}
  return Sequences(
    rows=rows, number=number, known_by=known_by, contents=contents, counted=counted, padding=padding
  )


def _whole(rows: Rows) -> Rows:
  """Returns the features [n, length] of whole numbers, of the length that most of them have."""
  found = {n: v for n, v in rows.items() if v.ndim == 2 and v.dtype.kind in "iu" and v.shape[1] > 3}
  lengths = [value.shape[1] for value in found.values()]
  most = max(lengths, key=lengths.count, default=0)
  return {name: v.astype(np.int64) for name, v in found.items() if v.shape[1] == most}


def _documents(whole: Rows) -> tuple[str, np.ndarray]:
  """Returns the feature that says where documents are, and `Sequences.number`; "" if none does."""
  for name, value in whole.items():
    if any(word in name.lower() for word in ("segment", "doc")):
      steps = np.diff(value, axis=1)
      padded = np.minimum.accumulate((value <= 0)[:, ::-1], axis=1)[:, ::-1]
      if (value[~padded] > 0).all() and (steps[~padded[:, 1:]] >= 0).all():
        number = np.cumsum(np.pad(steps > 0, [(0, 0), (1, 0)], constant_values=True), axis=1)
        return name, np.where(padded, 0, number)
  return "", np.zeros([0, 0], np.int64)


def _chosen(number: np.ndarray) -> np.ndarray:
  """Returns the rows with the most documents that are not too short, at most `ROWS`."""
  worth = [
    sum(size >= SHORTEST for size in np.bincount(row)[1:]) * min(row.max(), 2) for row in number
  ]
  best = np.argsort(-np.minimum(worth, 6), kind="stable")[:ROWS]
  several = [i for i in best if number[i].max() > 1]
  return np.array(several if len(several) > 1 else best)


def _counts(value: np.ndarray, number: np.ndarray) -> bool:
  """Whether a feature grows by 1 from token to token of each document, as places in a row do."""
  within = (number[:, 1:] == number[:, :-1]) & (number[:, 1:] > 0)
  steps = np.diff(value, axis=1)[within]
  return bool(steps.size and value.max() < value.shape[1] and (steps == 1).all())
