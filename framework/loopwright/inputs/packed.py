"""Documents in rows of one length, several to a row, that do not see one another.

Which document lies where is a function of the lengths, computed once when the source is made. A row
is an example: rows are shuffled, counted and recorded like those of any other source.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError, kind, require_integer, unknown
from loopwright.graphs.aliases import Batch
from loopwright.inputs.sources import Source

SEGMENT, POSITION = "segment", "position"
WINDOW = 2**16


class Packed(Source):
  """Documents in rows of one length; `Task.source` may return it, also as a part of a `Mixture`.

  >>> tokens = lw.ArraySource({"token": np.arange(1, 10)})
  >>> batch = lw.Packed(tokens, lengths=[3, 2, 4], length=5).fetch(tf.constant([0, 1]))
  >>> batch["token"].numpy().tolist()
  [[6, 7, 8, 9, 0], [1, 2, 3, 4, 5]]
  >>> batch["segment"].numpy().tolist(), batch["position"].numpy().tolist()
  ([[1, 1, 1, 1, 0], [1, 1, 1, 2, 2]], [[0, 1, 2, 3, 0], [0, 1, 2, 0, 1]])

  To the features of each token, [rows, length, ...] and 0 in padding, it adds "segment" and
  "position", both int32 [rows, length].

  Attributes:
    num_examples: the number of rows.
    padding: the share of tokens that are none.
  """

  def __init__(
    self,
    tokens: Source,
    /,
    *,
    lengths: Sequence[int] | np.ndarray,
    length: int,
    packing: str = "best_fit",
    cut: bool = False,
    window: int = WINDOW,
  ) -> None:
    """Finds a place for each document (host).

    Args:
      tokens: the tokens of all documents, one after the other; each is an example. For more than
        fits into memory give memory-mapped arrays. `fetch` gets any number of indices.
      lengths: of each document, int [documents].
      length: tokens in a row.
      packing: "best_fit" puts the longest documents first, each where the least is left (Ding et
        al., "Fewer Truncations Improve Language Modeling", 2024); "in_order" fills row after row.
      cut: whether documents may be cut. Then "in_order" cuts where a row is full, so only the last
        has padding, and "best_fit" cuts only documents that are longer than a row. What follows
        a cut begins at position 0 and does not see what is before it.
      window: documents that "best_fit" looks at together, so that the others stay apart.

    Raises:
      ConfigError: a wrong argument, or a document above `length` that must not be cut.
    """
    if not isinstance(tokens, Source):
      raise ConfigError(f"Packed got {kind(tokens)}; it must be a Source, each example a token.")
    sizes = np.asarray(lengths)
    if sizes.ndim != 1 or sizes.dtype.kind not in "iu" or not len(sizes) or sizes.min() < 1:
      raise ConfigError("Packed.lengths must be whole numbers of at least 1, one a document.")
    if sizes.sum() != tokens.num_examples:
      raise ConfigError(
        f"Packed.lengths adds up to {sizes.sum()}, but there are {tokens.num_examples} tokens; it "
        "must have the length of each document."
      )
    self.length = require_integer("Packed.length", length, at_least=1)
    if packing not in ("best_fit", "in_order"):
      raise unknown("Packed.packing", packing, ("best_fit", "in_order"))
    if not cut and sizes.max() > length:
      raise ConfigError(
        f"document {sizes.argmax()} has {sizes.max()} tokens, above Packed.length, {length}; raise "
        "it, leave the document out, or set cut=True."
      )
    require_integer("Packed.window", window, at_least=1)
    ends = np.cumsum(sizes)
    if cut:
      ends = _cut(ends, sizes, length, everywhere=packing == "in_order")
    pieces = np.diff(ends, prepend=0)
    rows = _in_order(pieces, length) if packing == "in_order" else _best_fit(pieces, length, window)
    order = np.argsort(rows, kind="stable")
    self._tokens, self.num_examples = tokens, int(rows.max()) + 1
    self.numbered = tokens.numbered
    self._sizes, self._starts = pieces[order], (ends - pieces)[order]
    self._firsts = np.searchsorted(rows[order], np.arange(self.num_examples + 1))
    self.padding = 1 - sizes.sum() / (self.num_examples * length)

  @functools.cached_property
  def _tables(self) -> list[tf.Tensor]:
    with tf.init_scope(), tf.device("CPU:0"):
      return [tf.constant(t, tf.int64) for t in (self._firsts, self._sizes, self._starts)]

  def fetch(self, indices: tf.Tensor) -> Batch:
    """See `Source.fetch`; reads the tokens of these rows alone."""
    firsts, sizes, starts = self._tables
    ranges = tf.ragged.range(tf.gather(firsts, indices), tf.gather(firsts, indices + 1))
    pieces, row = ranges.flat_values, ranges.value_rowids()
    size = tf.gather(sizes, pieces)
    position = tf.ragged.range(size).flat_values
    number = tf.ragged.range(ranges.row_lengths()).flat_values + 1
    within_batch = tf.cumsum(size, exclusive=True)
    first_of_row = tf.gather(within_batch, tf.gather(ranges.row_starts(), row))
    column = tf.repeat(within_batch - first_of_row, size) + position
    batch = {
      **self._tokens.fetch(tf.repeat(tf.gather(starts, pieces), size) + position),
      SEGMENT: tf.cast(tf.repeat(number, size), tf.int32), POSITION: tf.cast(position, tf.int32),
    }  # fmt: skip
    at = tf.repeat(row, size) * self.length + column
    room = tf.size(indices, tf.int64) * self.length
    token = tf.scatter_nd(at[:, tf.newaxis], tf.range(1, tf.size(at) + 1), room[tf.newaxis])
    shape = [*indices.shape, self.length]
    return {
      name: tf.ensure_shape(
        tf.reshape(
          tf.gather(tf.concat([tf.zeros_like(value[:1]), value], axis=0), token),
          tf.concat([tf.shape(indices), [self.length], tf.shape(value)[1:]], axis=0),
        ),
        [*shape, *value.shape[1:]],
      )
      for name, value in batch.items()
    }

  def digest(self) -> str:
    """Returns a hash of which tokens lie where (host)."""
    tables = b"".join(np.asarray(t, "<i8").tobytes() for t in (self._firsts, self._starts))
    return hashlib.sha256(tables).hexdigest()[:12]

  def fingerprint(self) -> str:
    """See `Source.fingerprint`: also of where the tokens lie."""
    return f"{super().fingerprint()}, packed {self.digest()}"


def _cut(ends: np.ndarray, sizes: np.ndarray, length: int, *, everywhere: bool) -> np.ndarray:
  """Returns where pieces end: at each row's end, or `length` after the start of a document."""
  if everywhere:
    return np.unique(np.concatenate([ends, np.arange(length, ends[-1], length)]))
  long = np.flatnonzero(sizes > length)
  cuts = [np.arange(ends[i] - sizes[i] + length, ends[i], length) for i in long]
  return np.unique(np.concatenate([ends, *cuts]))


def _in_order(sizes: np.ndarray, length: int) -> np.ndarray:
  """Returns the row of each piece, int64 [pieces]; a new one where the next does not fit."""
  rows, row, left = [], -1, 0
  for size in sizes.tolist():
    if size > left:
      row, left = row + 1, length
    rows.append(row)
    left -= size
  return np.array(rows, np.int64)


def _best_fit(sizes: np.ndarray, length: int, window: int) -> np.ndarray:
  """Returns the row of each piece, int64 [pieces]: the longest first, where the least is left."""
  rows, count = np.empty(len(sizes), np.int64), 0
  for begin in range(0, len(sizes), window):
    some = sizes[begin : begin + window]
    left: list[int] = []  # ascending: what rows that are open have left
    with_left: dict[int, list[int]] = {}
    for piece in np.argsort(-some, kind="stable").tolist():
      size = int(some[piece])
      at = bisect.bisect_left(left, size)
      if at == len(left):
        row, room, count = count, length, count + 1
      else:
        room = left[at]
        row = with_left[room].pop()
        if not with_left[room]:
          del left[at]
      rows[begin + piece] = row
      rest = room - size
      if rest and not with_left.setdefault(rest, []):
        bisect.insort(left, rest)
      if rest:
        with_left[rest].append(row)
  return rows
