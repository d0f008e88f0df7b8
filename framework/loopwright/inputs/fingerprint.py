"""Tells whether two processes, or two starts of a run, read the same examples.

A kind of source that has more to tell registers it.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.graphs.aliases import AnySource
from loopwright.inputs.checks import checked_batch
from loopwright.inputs.sources import ArraySource, Source

TRAINING, BUCKETS, RATIO = "training", "training buckets", " ratio"
WEIGHTS = "training weights"
"""Of a `Mixture`; of one that is a part, with its name."""
_ROWS_OF_ARRAYS = 4096
_ROWS = 64
_BYTES = 2**26


@functools.singledispatch
def fingerprint(source: AnySource) -> str:
  """Returns number and digest of a source's examples, such as "1437 examples, 3f2a90c1d4e5" (host).

  The digest is SHA-256 of names, dtypes, shapes and evenly spread rows: at most 4096 of arrays, 64
  of another indexed source, and 64 MB. Of a stream it has only the types, because reading it takes
  as long as training does.
  """
  digest = hashlib.sha256()
  size = max(1, sum(value.nbytes for value in _first(source).values()))
  most = min(_BYTES // size, _ROWS_OF_ARRAYS if isinstance(source, ArraySource) else _ROWS)
  spread = np.unique(np.linspace(0, source.num_examples - 1, max(1, most)).astype(np.int64))
  for name, value in sorted(fetched(source, spread).items()):
    digest.update(f"{name} {value.dtype} {value.shape}".encode())
    digest.update(repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes())
  return counted(source.num_examples, digest)


@functools.singledispatch
def kinds(source: AnySource) -> dict[str, str]:
  """Returns name -> kind of dtype and shape of an example's features, such as "f(3,)" (host)."""
  return {name: f"{value.dtype.kind}{value.shape[1:]}" for name, value in _first(source).items()}


def counted(number: int | str, digest: Any) -> str:
  """Returns a fingerprint of a number of examples and a digest of hashlib."""
  return f"{number} examples, {digest.hexdigest()[:12]}"


@functools.singledispatch
def described(source: AnySource, global_batch_size: int) -> dict[str, str]:
  """Returns name -> text of all that a run records of what it trains on (host)."""
  del global_batch_size
  weights = {name: mixture.shares.described() for name, (mixture, _) in mixtures(source).items()}
  return {TRAINING: fingerprint(source), **weights}


@functools.singledispatch
def mixtures(source: AnySource) -> dict[str, tuple[Any, int]]:
  """Returns name -> `Mixture` and ratio of each source of training that is one."""
  del source
  return {}


def _first(source: Source) -> dict[str, np.ndarray]:
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
