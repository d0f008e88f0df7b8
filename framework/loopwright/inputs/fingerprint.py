"""Tells whether two processes, or two starts of a run, read the same examples."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from loopwright.inputs.checks import checked_batch

if TYPE_CHECKING:
  from loopwright.inputs.sources import Source

TRAINING, BUCKETS, RATIO = "training", "training buckets", " ratio"
WEIGHTS = "training weights"
"""Of a `Mixture`; of one that is a part, with its name."""
ROWS_OF_ARRAYS, ROWS = 4096, 64
_BYTES = 2**26


def of_rows(source: Source, *, most: int) -> str:
  """Returns the fingerprint of a source, from at most so many of its rows (host)."""
  digest = hashlib.sha256()
  size = max(1, sum(value.nbytes for value in first_row(source).values()))
  count = max(1, min(_BYTES // size, most))
  spread = np.unique(np.linspace(0, source.num_examples - 1, count).astype(np.int64))
  for name, value in sorted(fetched(source, spread).items()):
    digest.update(f"{name} {value.dtype} {value.shape}".encode())
    digest.update(repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes())
  return counted(source.num_examples, digest)


def counted(number: int | str, digest: Any) -> str:
  """Returns a fingerprint of a number of examples and a digest of hashlib."""
  return f"{number} examples, {digest.hexdigest()[:12]}"


def first_row(source: Source) -> dict[str, np.ndarray]:
  """Returns the first row, which is kept: the first one of a folder of images takes 0.3 s."""
  if "_fingerprinted" not in vars(source):
    vars(source)["_fingerprinted"] = fetched(source, np.array([0]))
  return vars(source)["_fingerprinted"]


def fetched(source: Source, rows: np.ndarray) -> dict[str, np.ndarray]:
  """Returns some rows, int64 [n], of each feature (host)."""
  with tf.init_scope(), tf.device("CPU:0"):
    batch = source.fetch(tf.constant(rows, tf.int64))
  batch = checked_batch(batch, len(rows), f"{type(source).__name__}.fetch")
  return {name: value.numpy() for name, value in batch.items()}
