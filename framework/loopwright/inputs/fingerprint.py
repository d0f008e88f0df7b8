"""Tells whether two processes, or two starts of a run, read the same examples."""

from __future__ import annotations

import hashlib

import numpy as np
import tensorflow as tf

from loopwright.inputs.buckets import Buckets
from loopwright.inputs.mixture import Mixture
from loopwright.inputs.packed import Packed
from loopwright.inputs.sources import ArraySource, Source, StreamSource

_ROWS_OF_ARRAYS = 4096
_ROWS = 64
_BYTES = 2**26


def fingerprint(source: Source | StreamSource | Buckets) -> str:
  """Returns number and digest of a source's examples, such as "1437 examples, 3f2a90c1d4e5" (host).

  The digest is SHA-256 of names, dtypes, shapes and evenly spread rows: at most 4096 of arrays, 64
  of another indexed source, and 64 MB. Of a stream it has only the types, because reading it takes
  as long as training does.
  """
  if isinstance(source, Buckets):
    shares = (f"{bucket.num_examples} of length {bucket.length}" for bucket in source.buckets)
    return f"{fingerprint(source.source)}, {' and '.join(shares)}"
  if isinstance(source, Mixture):
    return ", ".join(f"{name!r}: {fingerprint(part)}" for name, part in source.parts.items())
  digest = hashlib.sha256()
  if isinstance(source, StreamSource):
    number = source.num_examples or "unknown number of"
    digest.update(repr(sorted(source.dataset.element_spec.items())).encode())
  else:
    number = source.num_examples
    first = _fetched(source, np.array([0]))
    size = max(1, sum(value.nbytes for value in first.values()))
    most = min(_BYTES // size, _ROWS_OF_ARRAYS if isinstance(source, ArraySource) else _ROWS)
    spread = np.unique(np.linspace(0, number - 1, max(1, most)).astype(np.int64))
    for name, value in sorted(_fetched(source, spread).items()):
      digest.update(f"{name} {value.dtype} {value.shape}".encode())
      digest.update(repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes())
  packed = f", packed {source.digest()}" if isinstance(source, Packed) else ""
  return f"{number} examples, {digest.hexdigest()[:12]}{packed}"


def _fetched(source: Source, rows: np.ndarray) -> dict[str, np.ndarray]:
  with tf.init_scope(), tf.device("CPU:0"):
    batch = source.fetch(tf.constant(rows, tf.int64))
  return {name: value.numpy() for name, value in batch.items()}
