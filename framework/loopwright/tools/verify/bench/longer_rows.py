"""The same examples with more padding inside their rows, and with other contents in it.

`Buckets` says how long each example is and which axes are cut to it. A task that pads by itself
says so by a feature: a mask [n, length] of ones and then zeros, or the number [n] of what comes
before the padding. Features are positional if an axis is as long, and if they are the same in the
padding of all examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from loopwright.inputs import datasets
from loopwright.inputs.buckets import Axes, Buckets
from loopwright.inputs.sources import ArraySource, Source, eval_sets
from loopwright.task import Task, preprocess_of
from loopwright.tools.verify.bench.bench import Rows

ROWS, _READ = 12, 64


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


def find(task: Task) -> Padded | None:
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
    if isinstance(source, Source) and (found := _of_features(_fetched(source))):
      return found
  return None


def preprocessed(task: Task, features: Rows) -> Rows:
  """Returns examples as evaluation reads them, in one batch without padding rows."""
  batches = datasets.eval_dataset(
    ArraySource(features=features), global_batch_size=len(next(iter(features.values()))),
    preprocess=preprocess_of(task),
  )  # fmt: skip
  return dict(next(batches.as_numpy_iterator()))


def _fetched(source: Source, indices: np.ndarray | None = None) -> Rows:
  if indices is None:
    indices = np.arange(min(_READ, source.num_examples))
  ids = tf.data.Dataset.from_tensors(indices.astype(np.int64))
  return dict(next(ids.map(source.fetch).as_numpy_iterator()))


def _spread(lengths: np.ndarray) -> np.ndarray:
  """Returns the places of `ROWS` examples, from the longest to the shortest."""
  order = np.argsort(-lengths, kind="stable")
  return order[np.linspace(0, len(order) - 1, ROWS).round().astype(int)]


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
  known = known_lengths(rows)
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


def known_lengths(rows: Rows) -> tuple[str, np.ndarray, int] | None:
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
