"""The rows of a batch that are made here, and what completes them: weights, ids, `preprocess`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from loopwright.aliases import Batch
from loopwright.errors import ConfigError, require_integer
from loopwright.graphs.autograph import converted
from loopwright.inputs.checks import (
  checked_batch,
  refuse_reserved,
  require_kept,
  require_rows,
)
from loopwright.inputs.sources import check_source

Preprocess = Callable[[Batch, bool], Batch]
MOST_ROWS = 2**27
"""Rows of a batch; more would take gigabytes for their ids and weights alone."""
Element = tuple[Batch, tf.Tensor, tf.Tensor, tf.Tensor]
"""Features, ids, seeds and step of a batch."""


def padded_batch_size(global_batch_size: int, multiple: int) -> int:
  """Returns the smallest multiple of `multiple` that is at least `global_batch_size`."""
  return -(-global_batch_size // multiple) * multiple


class Start(NamedTuple):
  """Where training begins to read, and in which order."""

  seed: int
  position: int
  shuffle: bool
  first_step: int = 0

  @classmethod
  def checked(
    cls, global_batch_size: int, seed: int, position: int, shuffle: bool, first_step: int | None
  ) -> Start:
    """Checks the arguments of `datasets.train_dataset`."""
    require_integer("position", position, at_least=0)
    require_integer("seed", seed, at_least=0, at_most=2**32 - 1)
    counted = position // global_batch_size if first_step is None else first_step
    return cls(seed, position, shuffle, counted)


class Plan:
  """Which rows of each batch are made here, and what completes them.

  See `datasets.train_dataset` for the arguments.
  """

  def __init__(
    self,
    source: object,
    global_batch_size: int,
    pad_multiple: int,
    preprocess: Preprocess | None,
    rows: range | None,
    *,
    training: bool,
    left_out: Collection[int] = (),
  ) -> None:
    """Checks the arguments."""
    self._left_out = np.array(sorted(left_out), np.int64)
    check_source(source)
    require_integer("global_batch_size", global_batch_size, at_least=1, at_most=MOST_ROWS)
    require_integer("pad_multiple", pad_multiple, at_least=1, at_most=MOST_ROWS)
    padded_rows = padded_batch_size(global_batch_size, pad_multiple)
    self.rows = range(padded_rows) if rows is None else rows
    require_rows(self.rows, padded_rows)
    self.global_batch_size, self.training = global_batch_size, training
    self.pad_multiple = pad_multiple
    self.preprocess = converted(preprocess) if preprocess else None
    self.name_of_preprocess = getattr(preprocess, "__qualname__", "preprocess")

  def row_numbers(self) -> np.ndarray:
    """Returns int64 [rows]: the rows of the padded global batch to make."""
    return np.arange(self.rows.start, self.rows.stop, dtype=np.int64)

  def real_rows(self) -> tf.Tensor:
    """Returns bool [rows]: whether a row of a full batch holds an example."""
    return tf.constant(self.row_numbers() < self.global_batch_size)

  def example_rows(self) -> np.ndarray:
    """Returns int64 [rows]: the row of a full batch that each row copies; padding copies row 0."""
    rows = self.row_numbers()
    return np.where(rows < self.global_batch_size, rows, 0)

  def step(self, position: tf.Tensor, start: Start) -> tf.Tensor:
    """Returns the number of the step whose batch begins at a position."""
    return start.first_step + (position - start.position) // self.global_batch_size

  def checked_features(self, batch: object, who: str) -> Batch:
    """Returns what `who` made, checked, without reserved features."""
    checked = checked_batch(batch, len(self.rows), who)
    refuse_reserved(who, checked)
    return checked

  def numbered(self, features: Batch, ids: tf.Tensor) -> Batch:
    """Adds ids, -1 for padding and for what is left out, and weights."""
    if self._left_out.size:
      features, ids = self._without(features, ids)
    weight = features.get("weight", tf.ones([len(self.rows)]))
    return {**features, "example_id": ids, "weight": _masked(weight, ids)}

  def _without(self, features: Batch, ids: tf.Tensor) -> tuple[Batch, tf.Tensor]:
    """Replaces what is left out by padding: copies of the first row that stays."""
    out = tf.reduce_any(ids[:, tf.newaxis] == self._left_out, axis=1)
    taken = tf.where(out, tf.argmax(~out & (ids >= 0)), self.row_numbers() - self.rows.start)
    features = {name: tf.gather(value, taken) for name, value in features.items()}
    return features, tf.where(~out, ids, -1)

  def completed(
    self,
    features: Batch,
    ids: tf.Tensor,
    seeds: tf.Tensor | None = None,
    step: tf.Tensor | None = None,
    parts: Mapping[str, Batch] | None = None,
  ) -> Batch:
    """Adds the reserved features and applies `preprocess`; `ids` is -1 for padding.

    `parts` is name -> features of further parts, each [rows, ratio, ...].
    """
    batch = self.numbered(features, ids)
    for name, part in (parts or {}).items():
      batch |= _prefixed(name, part, batch)
    if self.preprocess is None:
      return batch
    if seeds is not None and step is not None:
      batch |= {"seed": seeds, "step": tf.fill([len(self.rows)], step)}
    batch = self.preprocess(batch, self.training)
    batch = checked_batch(batch, len(self.rows), self.name_of_preprocess)
    prefixes = ["", *(f"{name}/" for name in parts or {})]
    dropped = {"step", *(f"{prefix}seed" for prefix in prefixes)}
    batch = {name: value for name, value in batch.items() if name not in dropped}
    for prefix in prefixes:
      require_kept(batch, self.name_of_preprocess, prefix)
      # Again, as a preprocess may compute new weights or, with its ids, reorder rows.
      weight, ids = batch[f"{prefix}weight"], batch[f"{prefix}example_id"]
      batch[f"{prefix}weight"] = _masked(weight, ids)
    return batch


def _masked(weight: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
  return tf.where(ids >= 0, weight, 0.0)


def _prefixed(name: str, features: Batch, batch: Batch) -> Batch:
  named = {f"{name}/{key}": value for key, value in features.items()}
  for key in named.keys() & batch.keys():
    raise ConfigError(
      f"the main source has a feature named {key!r}, like one of the part {name!r}; rename it."
    )
  return named
