"""Sequences of a task's source, the documents in their rows, and the same rows with one changed.

Documents are known by a feature [n, length] of whole numbers: one whose name has "segment" or "doc"
and that is 1, 1, 1, 2, 2, ... with 0 or -1 in padding, as `Packed` makes it; or one whose name has
"pos" and that counts from 0 in each. Otherwise a row is one document, without what a mask or a
length calls padding.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from loopwright.inputs.packed import POSITION, SEGMENT, Packed
from loopwright.inputs.sources import main_source, of_one_shape
from loopwright.task import Task
from loopwright.tools.verify.bench import longer_rows, survey
from loopwright.tools.verify.bench.bench import Rows

ROWS, MOST = 6, 40
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

  def last(self) -> np.ndarray:
    """Returns the number of each row's last document, int [n, 1]."""
    return self.number.max(axis=1, keepdims=True)

  def changed(self, where: np.ndarray) -> Rows:
    """Returns the rows with other contents where bool [n, length]: those of other documents."""
    made = dict(self.rows)
    real = self.number > 0
    starts = np.flatnonzero(self._starts()[real])
    rng = np.random.default_rng(1)
    for row in range(len(where)):
      size = int(where[row].sum())
      first = rng.choice(starts)
      own = np.flatnonzero(np.flatnonzero(real.ravel()) // self.length == row)
      if own[0] <= first <= own[-1]:
        first = (own[-1] + 1) % real.sum()
      taken = (first + np.arange(size)) % real.sum()
      for name in self.contents:
        made[name] = made[name].copy() if made[name] is self.rows[name] else made[name]
        made[name][row, where[row]] = self.rows[name][real][taken]
    return made

  def rotated(self) -> tuple[Rows, np.ndarray]:
    """Returns the rows with the first document behind the others, and where each token was."""
    first = self.number == 1
    order = np.where(first, self.number.max() + 1, self.number)
    order = np.where(self.number > 0, order, self.number.max() + 2)
    places = np.argsort(order, axis=1, kind="stable")
    made = dict(self.rows)
    for name in self.per_token:
      made[name] = np.stack([v[at] for v, at in zip(self.rows[name], places, strict=True)])
    if self.known_by and self.known_by != self.counted:
      made[self.known_by] = self.rows[self.known_by]  # its numbers ascend, whatever they stand for
      for row, at in enumerate(places):
        values = self.rows[self.known_by][row]
        sizes = np.bincount(self.number[row][at])
        kept = [values[self.number[row] == n][0] for n in range(1, self.number[row].max() + 1)]
        moved = np.roll(sizes[1 : len(kept) + 1], -1)
        made[self.known_by] = np.array(made[self.known_by])
        made[self.known_by][row, : moved.sum()] = np.repeat(kept, moved)
    return made, places

  def emptied(self, where: np.ndarray) -> Rows:
    """Returns the rows with padding where bool [n, length], which must be the rows' ends."""
    made = dict(self.rows)
    for name, value in (self.padding or {}).items():
      made[name] = made[name].copy()
      made[name][where] = value
    return made

  def anew(self) -> Rows | None:
    """Returns the rows with positions from 0 in each document; None if it is so already."""
    if not self.counted:
      return None
    value = self.rows[self.counted]
    starts = self._starts()
    if (value[starts] == value[starts][0]).all():
      return None
    first = np.maximum.accumulate(np.where(starts, np.arange(self.length), 0), axis=1)
    restarted = np.where(self.number > 0, np.arange(self.length) - first, value)
    return {**self.rows, self.counted: restarted.astype(value.dtype)}

  @property
  def per_token(self) -> list[str]:
    """The features with an axis of tokens."""
    return [n for n, v in self.rows.items() if v.ndim >= 2 and v.shape[1] == self.length]

  def _starts(self) -> np.ndarray:
    return (np.diff(self.number, axis=1, prepend=0) != 0) & (self.number > 0)


def find(task: Task) -> Sequences | None:
  """Returns sequences of the training set; None if it has no feature [n, length] of integers."""
  source = main_source(of_one_shape(task.source("train")))
  read = itertools.islice(survey.batches(source), MOST)
  rows = _with_documents(dict(next(read)), read)
  if not (whole := _whole(rows)):
    return None
  length = next(iter(whole.values())).shape[1]
  known_by, number = _documents(whole)
  if not known_by:
    number = np.ones([len(next(iter(rows.values()))), length], np.int64)
    if (found := longer_rows.known_lengths(rows)) and found[2] == length:
      number = (np.arange(length) < found[1][:, np.newaxis]).astype(np.int64)
  chosen = _chosen(number)
  rows, number = {name: value[chosen] for name, value in rows.items()}, number[chosen]
  counted = next((n for n, v in whole.items() if _counts(v[chosen], number)), "")
  tokens = [n for n, v in rows.items() if v.ndim >= 2 and v.shape[1] == length]
  places = (known_by, counted)
  contents = [n for n in tokens if n not in places and not _is_mask(rows[n], number)]
  padding = _padding(rows, tokens, number)
  if padding is None and isinstance(source, Packed):
    padding = {n: np.zeros(rows[n].shape[2:], rows[n].dtype) for n in tokens}
  return Sequences(
    rows=rows, number=number, known_by=known_by, contents=contents, counted=counted, padding=padding
  )


def _with_documents(rows: Rows, others: Iterator[Rows]) -> Rows:
  """Returns a batch, with rows of several documents from further ones if it has few."""
  for name in survey.RESERVED:
    rows.pop(name, None)
  for other in others:
    known_by, number = _documents(_whole(rows))
    if not known_by or (number.max(axis=1) > 1).sum() >= ROWS:
      break
    _, number = _documents(_whole(other))
    several = number.max(axis=1, initial=0) > 1
    if len(several):
      rows = {name: np.concatenate([other[name][several], value]) for name, value in rows.items()}
  return rows


def _whole(rows: Rows) -> Rows:
  """Returns the features [n, length] of whole numbers, of the length that most of them have."""
  found = {n: v for n, v in rows.items() if v.ndim == 2 and v.dtype.kind in "iu" and v.shape[1] > 3}
  lengths = [value.shape[1] for value in found.values()]
  most = max(lengths, key=lengths.count, default=0)
  return {name: v.astype(np.int64) for name, v in found.items() if v.shape[1] == most}


def _documents(whole: Rows) -> tuple[str, np.ndarray]:
  for name, value in whole.items():
    if name == SEGMENT or any(word in name.lower() for word in ("segment", "doc")):
      padded = np.minimum.accumulate((value <= 0)[:, ::-1], axis=1)[:, ::-1]
      steps = np.diff(value, axis=1)
      if (value[~padded] > 0).all() and (steps[~padded[:, 1:]] >= 0).all():
        number = 1 + np.cumsum(np.diff(value, axis=1, prepend=value[:, :1]) > 0, axis=1)
        return name, np.where(padded, 0, number)
  for name, value in whole.items():
    if name == POSITION or "pos" in name.lower():
      steps = np.diff(value, axis=1)
      begins = np.diff(value, axis=1, prepend=-1) != 1
      begins[:, 0] = True
      if (value[:, 0] == 0).all() and (value[begins] == 0).all() and (steps[:, :] <= 1).all():
        ones = np.minimum.accumulate((value == 0)[:, ::-1], axis=1)[:, ::-1]
        padded = ones & np.roll(ones, 1, axis=1)  # a document of one token before padding is kept
        padded[:, 0] = False
        number = np.cumsum(begins, axis=1)
        return name, np.where(padded, 0, number)
  return "", np.zeros([0, 0], np.int64)


def _chosen(number: np.ndarray) -> np.ndarray:
  """Returns the rows with the most documents that are not too short, at most `ROWS`."""
  worth = [
    sum(1 for size in np.bincount(row[row > 0])[1:] if size >= SHORTEST) * (min(row.max(), 2))
    for row in number
  ]
  best = np.argsort(-np.minimum(worth, 6), kind="stable")[:ROWS]
  several = [i for i in best if number[i].max() > 1]
  return np.array(several if len(several) > 1 else best)


def _counts(value: np.ndarray, number: np.ndarray) -> bool:
  """Whether a feature grows by 1 from token to token of each document, as places in a row do."""
  within = (number[:, 1:] == number[:, :-1]) & (number[:, 1:] > 0)
  return bool(
    within.any() and value.max() < value.shape[1] and (np.diff(value, axis=1)[within] == 1).all()
  )


def _is_mask(value: np.ndarray, number: np.ndarray) -> bool:
  real = number > 0
  return value.ndim == 2 and bool(
    np.array_equal(value.astype(bool), real) and np.isin(value, (0, 1)).all()
  )


def _padding(rows: Rows, names: Sequence[str], number: np.ndarray) -> Rows | None:
  where = number == 0
  if not where.any():
    return None
  return {name: rows[name][where][-1] for name in names}
