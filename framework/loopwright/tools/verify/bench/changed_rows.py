"""Rows of a source with more padding, with other contents in it, or with another document in them.

`Buckets` says how long each example is and which axes are cut to it. A task that pads by itself
says so by a feature: a mask [n, length] of ones and then zeros, or the number [n] of what comes
before the padding. Features are positional if an axis is as long, and if they are the same in the
padding of all examples.

Documents are known by a feature [n, length] of whole numbers whose name has "segment" or "doc" and
that is 1, 1, 1, 2, 2, ... with 0 or -1 in padding, as `Packed` makes it. Otherwise a row is one
document, without what a mask or a length calls padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from loopwright.inputs import datasets
from loopwright.inputs.buckets import Axes, Buckets
from loopwright.inputs.packed import Packed
from loopwright.inputs.sources import ArraySource, Source, eval_sets, main_source, of_one_shape
from loopwright.inputs.streams import StreamSource
from loopwright.task import Task, preprocess_of
from loopwright.tools.verify.bench import survey
from loopwright.tools.verify.bench.bench import Rows

PADDED, SEQUENCES = 12, 6
"""Rows to look at."""
SHORTEST = 3
"""Tokens of a document that is worth to be changed."""


# ---- Padding ----


class Padded(NamedTuple):
  """Some examples, before preprocess().

  Attributes:
    short: as they are.
    long: with more padding.
    others: as `long`, with other numbers in padding that is no constant; None if all of it is.
    known_by: what says where the padding is.
  """

  short: Rows
  long: Rows
  others: Rows | None
  known_by: str


def padded(task: Task) -> Padded | None:
  """Returns examples of the evaluation or of the training set; None if no padding is known."""
  for split in ("eval", "train"):
    try:
      source = task.source(split)
      source = next(iter(eval_sets(source).values())) if split == "eval" else source
    except Exception:  # a task may only train
      continue
    source = getattr(source, "main", source)
    if isinstance(source, Buckets) and len(source.buckets) > 1:
      return _of_buckets(source)
    if isinstance(source, Source) and (found := _of_features(_read(source))):
      return found
  return None


def preprocessed(task: Task, features: Rows) -> Rows:
  """Returns examples as evaluation reads them, in one batch without padding rows."""
  batches = datasets.eval_dataset(
    ArraySource(features=features), global_batch_size=len(next(iter(features.values()))),
    preprocess=preprocess_of(task),
  )  # fmt: skip
  return dict(next(batches.as_numpy_iterator()))


def _read(source: Source | StreamSource) -> Rows:
  """Returns some examples, in random order."""
  rows = next(iter(survey.batches(source)))
  return {name: value for name, value in rows.items() if name not in survey.RESERVED}


def _fetched(source: Source, indices: np.ndarray) -> Rows:
  ids = tf.data.Dataset.from_tensors(indices.astype(np.int64))
  return dict(next(ids.map(source.fetch).as_numpy_iterator()))


def _spread(lengths: np.ndarray) -> np.ndarray:
  """Returns the places of `PADDED` examples, from the longest to the shortest."""
  order = np.argsort(-lengths, kind="stable")
  return order[np.linspace(0, len(order) - 1, PADDED).round().astype(int)]


def _of_buckets(source: Buckets) -> Padded:
  short = max(source.buckets[:-1], key=lambda bucket: bucket.num_examples)
  long = short.cut_to(source.buckets[-1].length)
  lengths = source.lengths[short.example_ids(tf.range(short.num_examples)).numpy()]
  chosen = _spread(lengths)
  features = _fetched(long, chosen)
  known_by = f"rows of {short.length} and of {long.length}, lengths by Buckets"
  others = _with_others(features, short.axes, lengths[chosen])
  return Padded(_fetched(short, chosen), features, others, known_by)


def _of_features(rows: Rows) -> Padded | None:
  known = _known_lengths(rows)
  if known is None:
    return None
  name, lengths, size = known
  axes = {key: found for key, value in rows.items() if (found := _axes(value, lengths, size))}
  if not axes or (list(axes) == [name]):
    return None
  chosen, more = _spread(lengths), max(2, size // 4)
  short = {key: value[chosen] for key, value in rows.items()}
  long = {key: _extended(value, axes.get(key, ()), more) for key, value in short.items()}
  known_by = f"rows of {size} and of {size + more}, lengths by {name!r}"
  return Padded(short, long, _with_others(long, axes, lengths[chosen]), known_by)


def _known_lengths(rows: Rows) -> tuple[str, np.ndarray, int] | None:
  """Returns the feature that says how long each example is, the lengths, and the padded length."""
  for name, value in rows.items():
    if value.ndim == 2 and value.dtype.kind in "biuf" and np.isin(value, (0, 1)).all():
      lengths = value.sum(axis=1).astype(np.int64)
      if len(set(lengths)) > 1 and np.array_equal(value, _mask(lengths, value.shape[1])):
        return name, lengths, value.shape[1]
  sizes = {size for value in rows.values() for size in value.shape[1:2]}
  for name, value in rows.items():
    if value.ndim == 1 and value.dtype.kind in "iu" and len(set(value.tolist())) > 1:
      for size in sizes:
        if value.min() >= 1 and value.max() <= size and _ends_there(rows, value, size):
          return name, value, size
  return None


def _ends_there(rows: Rows, lengths: np.ndarray, size: int) -> bool:
  """Whether a feature is constant from these lengths on, and not just before them."""
  here = np.flatnonzero(lengths < size)
  for value in rows.values():
    if len(here) and 1 in _axes(value, lengths, size):
      differ = value[here, lengths[here] - 1] != value[here, lengths[here]]
      if np.mean(differ.reshape([len(here), -1]).any(axis=1)) > 0.9:
        return True
  return False


def _axes(value: np.ndarray, lengths: np.ndarray, size: int) -> tuple[int, ...]:
  """Returns the axes of a feature that are padded, all of one constant."""
  kept = []
  for axis in range(1, value.ndim):
    if value.shape[axis] == size:
      padding = np.moveaxis(value, axis, 1)[~_mask(lengths, size)]
      if padding.size and (padding == padding.ravel()[0]).all():
        kept.append(axis)
  return tuple(kept)


def _mask(lengths: np.ndarray, size: int) -> np.ndarray:
  return np.arange(size) < lengths[:, np.newaxis]


def _extended(value: np.ndarray, axes: Sequence[int], more: int) -> np.ndarray:
  """Returns a feature with more of its padding on some axes: what its last position has."""
  for axis in axes:
    end = np.take(value, [value.shape[axis] - 1], axis=axis)
    shortest = end[-1:]  # the last example is the shortest, so this is padding
    filling = np.broadcast_to(shortest, (len(value), *end.shape[1:]))
    value = np.concatenate([value, *[filling] * more], axis=axis)
  return value


def _with_others(features: Rows, axes: Axes, lengths: np.ndarray) -> Rows | None:
  """Returns `Padded.others`."""
  rng, others = np.random.default_rng(0), dict(features)
  for name, of in axes.items():
    moved = np.moveaxis(features[name], of[0], 1).copy()
    padding = ~_mask(lengths, moved.shape[1])
    if moved.dtype.kind == "f" and len(np.unique(moved[padding], axis=0)) > 1:
      moved[padding] = moved[~padding].std() * rng.normal(size=moved[padding].shape)
      others[name] = np.moveaxis(moved, 1, of[0])
  return None if all(others[name] is features[name] for name in features) else others


# ---- Documents ----


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


def sequences(task: Task) -> Sequences | None:
  """Returns sequences of the training set; None if it has no feature [n, length] of integers."""
  source = main_source(of_one_shape(task.source("train")))
  rows = _read(source)
  if not (whole := _whole(rows)):
    return None
  count, length = next(iter(whole.values())).shape
  known_by, number = _documents(whole)
  if not known_by:
    known = _known_lengths(rows)
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
  """Returns the rows with the most documents that are not too short, at most `SEQUENCES`."""
  worth = [
    sum(size >= SHORTEST for size in np.bincount(row)[1:]) * min(row.max(), 2) for row in number
  ]
  best = np.argsort(-np.minimum(worth, 6), kind="stable")[:SEQUENCES]
  several = [i for i in best if number[i].max() > 1]
  return np.array(several if len(several) > 1 else best)


def _counts(value: np.ndarray, number: np.ndarray) -> bool:
  """Whether a feature grows by 1 from token to token of each document, as places in a row do."""
  within = (number[:, 1:] == number[:, :-1]) & (number[:, 1:] > 0)
  steps = np.diff(value, axis=1)[within]
  return bool(steps.size and value.max() < value.shape[1] and (steps == 1).all())
