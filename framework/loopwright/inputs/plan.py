"""The rows of a batch that are made here, and what completes them: weights, ids, `preprocess`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError, require_integer
from loopwright.graphs.aliases import Batch
from loopwright.graphs.autograph import as_written, converted
from loopwright.inputs.checks import (
  checked_batch,
  refuse_reserved,
  require_kept,
  require_rows,
)

Preprocess = Callable[[Batch, bool], Batch]
MOST_ROWS = 2**27
"""Rows of a batch; more would take gigabytes for their ids and weights alone."""
Element = tuple[Batch, tf.Tensor, tf.Tensor, tf.Tensor]
"""Features, ids, seeds and step of a batch."""
Elements = tuple[tf.data.Dataset, Callable[..., Element]]
"""What to read for each batch, and the function that reads it."""
Shard = tuple[int, Any]
"""(n, i): only the batches k = 0, 1, ... with k % n == i; i is an int or an int64 scalar."""


def padded_batch_size(global_batch_size: int, multiple: int) -> int:
  """Returns the smallest multiple of `multiple` that is at least `global_batch_size`."""
  return -(-global_batch_size // multiple) * multiple


class Start(NamedTuple):
  """Where training begins to read, and in which order."""

  seed: int
  position: int
  shuffle: bool
  first_step: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
  """Which rows of each batch are made here, and what completes them.

  See `datasets.train_dataset` for the attributes.
  """

  global_batch_size: int
  pad_multiple: int
  preprocess: Preprocess | None
  given_rows: range | None
  training: bool

  def __post_init__(self) -> None:
    """Raises a ConfigError for a number that is wrong."""
    require_integer("global_batch_size", self.global_batch_size, at_least=1, at_most=MOST_ROWS)
    require_integer("pad_multiple", self.pad_multiple, at_least=1, at_most=MOST_ROWS)
    require_rows(self.rows, padded_batch_size(self.global_batch_size, self.pad_multiple))

  @functools.cached_property
  def rows(self) -> range:
    """The rows of the padded global batch to make."""
    if self.given_rows is not None:
      return self.given_rows
    return range(padded_batch_size(self.global_batch_size, self.pad_multiple))

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
    """Adds ids, -1 for padding, and weights."""
    weight = features.get("weight", tf.ones([len(self.rows)]))
    return {**features, "example_id": ids, "weight": _masked(weight, ids)}

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
    who = getattr(self.preprocess, "__qualname__", "preprocess")
    batch = converted(self.preprocess)(batch, self.training)
    batch = checked_batch(batch, len(self.rows), who)
    prefixes = ["", *(f"{name}/" for name in parts or {})]
    dropped = {"step", *(f"{prefix}seed" for prefix in prefixes)}
    batch = {name: value for name, value in batch.items() if name not in dropped}
    for prefix in prefixes:
      require_kept(batch, who, prefix)
      # Again, as a preprocess may compute new weights or, with its ids, reorder rows.
      weight, ids = batch[f"{prefix}weight"], batch[f"{prefix}example_id"]
      batch[f"{prefix}weight"] = _masked(weight, ids)
    return batch

  def completing(self, read: Callable[..., Element]) -> Callable[..., Batch]:
    """Returns the function that makes a batch of what `read` has read."""

    def make(*element: Any) -> Batch:
      return self.completed(*read(*element))

    return make


def batches(
  dataset: tf.data.Dataset,
  make: Callable[..., Batch],
  *,
  rewrite: bool,
  shard: Shard | None = None,
) -> tf.data.Dataset:
  """Maps in order, ahead of the step; `rewrite` lets TensorFlow optimize the earlier stages."""
  options = tf.data.Options()
  options.deterministic = True
  # The autotune thread sleeps for up to a minute and sometimes misses the stop signal, so ending an
  # iterator took seconds. Without it, one batch per core is mapped at a time.
  options.autotune.enabled = False
  # DATA: if a strategy splits the dataset, every worker keeps its rows of whole batches.
  options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
  if not rewrite:  # The optimizer keeps a second copy of the arrays and improves nothing here.
    options.experimental_optimization.apply_default_optimizations = False
  dataset = dataset.shard(*shard) if shard else dataset
  made = dataset.map(as_written(make), num_parallel_calls=tf.data.AUTOTUNE)
  return made.prefetch(tf.data.AUTOTUNE).with_options(options)


def _masked(weight: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
  return tf.where(ids >= 0, weight, 0.0)


def _prefixed(name: str, features: Batch, batch: Batch) -> Batch:
  named = {f"{name}/{key}": value for key, value in features.items()}
  for key in named.keys() & batch.keys():
    raise ConfigError(
      f"the main source has a feature named {key!r}, like one of the part {name!r}; rename it."
    )
  return named
