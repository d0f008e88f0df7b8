"""Hashes, ids and statistics of sources and pipelines, each read for a few seconds.

digests   a source        example id -> hash of its content, before preprocess()
Survey    the pipeline    ids and statistics of features, in batches as the step gets them
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from loopwright.graphs.aliases import AnySource
from loopwright.graphs.autograph import as_written, converted
from loopwright.inputs.buckets import Buckets
from loopwright.inputs.parts import prefixes
from loopwright.inputs.plan import Preprocess
from loopwright.inputs.sources import Source, eval_sets, of_one_shape
from loopwright.inputs.streams import StreamSource
from loopwright.task import Task
from loopwright.tools.verify.bench.bench import Rows

RESERVED = ("weight", "example_id", "seed")
AT_ONCE = 256
MANY = 10_000_000


class Digests(NamedTuple):
  """A source's examples, or as many as could be read in time.

  Attributes:
    by_id: example id -> hash of all features but some, in reading order.
    complete: whether these are all.
    total: number of examples; None if unknown.
    varying: the features in which examples differ.
    measured: whether a feature has several float numbers that hardly any two examples share, so
      that equal examples are copies.
  """

  by_id: dict[int, bytes]
  complete: bool
  total: int | None
  varying: set[str]
  measured: bool = False

  @property
  def share(self) -> float:
    """The share of the source that was read; 1.0 if its size is unknown."""
    return len(self.by_id) / self.total if self.total else 1.0


NO_DIGESTS = Digests({}, True, 0, set())


def numbering(source: Source | StreamSource) -> set[str]:
  """Returns the features that only number the examples: whole numbers at one distance of the id."""
  batch = next(iter(batches(source)))
  ids = batch.pop("example_id")
  return {
    name
    for name, value in batch.items()
    if value.dtype.kind in "iu" and value.size == len(ids) > 1
    and len(set((value.ravel().astype(np.int64) - ids).tolist())) == 1
  }  # fmt: skip


def digests(
  source: Source | StreamSource, *, seconds: float, without: Collection[str] = ()
) -> Digests:
  """Reads a source for some seconds (host): a stream from its start, others in random order."""
  by_id: dict[int, bytes] = {}
  varying: set[str] = set()
  first: Rows = {}
  measured = False
  total, timed = source.num_examples, Timed(batches(source), seconds)
  for batch in timed:
    ids = batch.pop("example_id")
    batch.pop("weight", None)
    if not first:
      first = {name: value[:1] for name, value in batch.items()}
      measured = any(map(_is_measured, batch.values()))
    varying |= {name for name, value in batch.items() if not same(value, first[name])}
    batch = {name: value for name, value in batch.items() if name not in without}
    if not batch:
      return NO_DIGESTS
    by_id.update((int(i), digest(batch, row)) for row, i in enumerate(ids) if int(i) not in by_id)
    if len(by_id) == total:
      return Digests(by_id, True, total, varying, measured)
  complete = isinstance(source, StreamSource) and not timed.late
  return Digests(by_id, complete, len(by_id) if complete else total, varying, measured)


def _is_measured(values: np.ndarray) -> bool:
  """Whether 95 % of the numbers in the rows that differ occur once; of four or more a row."""
  if values.dtype.kind != "f" or values[0].size < 4 or len(values) < 4:
    return False
  rows = np.unique(values.reshape([len(values), -1]), axis=0)
  return bool(len(rows) >= 4 and np.unique(rows).size > 0.95 * rows.size)


def chance(train: Digests, evaluation: Digests) -> float:
  """Returns the share of evaluation examples to expect in training by chance alone.

  Of independent examples, it is the share of training examples whose content occurs again
  (Good and Turing). Training examples that somebody repeated say nothing: then equal examples are
  as frequent as within the evaluation set.
  """
  counts = collections.Counter(train.by_id.values())
  pairs = _pairs(len(evaluation.by_id))
  equal = sum(map(_pairs, collections.Counter(evaluation.by_id.values()).values()))
  expected = pairs * sum(map(_pairs, counts.values())) / max(1, _pairs(len(train.by_id)))
  repeated = len(counts) >= 8 and len(set(counts.values())) == 1 and min(counts.values()) > 1
  if repeated or (expected >= 3 and equal < expected / 3):
    return float(1 - (1 - equal / max(1, pairs)) ** len(counts))
  return 1 - sum(count == 1 for count in counts.values()) / max(1, len(train.by_id))


def _pairs(count: int) -> int:
  return count * (count - 1) // 2


def of_all_lengths(source: AnySource) -> Any:
  """Returns the source of all examples of several buckets, or the source itself."""
  return source.source if isinstance(source, Buckets) else source


def evaluation_sources(
  task: Task, choose: Callable[[Any], Any] = of_one_shape
) -> tuple[dict[str, Source | StreamSource], str]:
  """Returns name -> source of each evaluation set, or none and why: a task may only train."""
  try:
    sets = eval_sets(task.source("eval"))
    return {name: choose(source) for name, source in sets.items()}, ""
  except Exception as error:
    return {}, f"source('eval') fails with {type(error).__name__}"


def eval_source(task: Task) -> tuple[Source | StreamSource | None, str]:
  """Returns the first evaluation set, or None and the reason."""
  sources, why = evaluation_sources(task)
  return next(iter(sources.values()), None), why


def batches(source: Source | StreamSource) -> Iterator[Rows]:
  """Yields the examples in batches, before preprocess(): a stream's once, others in random order.

  The last batches may repeat examples.
  """
  if isinstance(source, StreamSource):
    numbered = source.dataset.enumerate()
    named = numbered.map(as_written(lambda i, features: {**features, "example_id": i}))
    return named.batch(AT_ONCE).as_numpy_iterator()
  order = _random_order(source.num_examples)
  slices = tf.data.Dataset.from_tensor_slices(order)
  fetch = as_written(lambda ids: {**source.fetch(ids), "example_id": ids})
  return slices.map(fetch, num_parallel_calls=tf.data.AUTOTUNE).as_numpy_iterator()


def _random_order(total: int) -> np.ndarray:
  """Returns int64 [batches, rows]: all of `total` indices, or at most about `MANY` of them."""
  random = np.random.default_rng(0)
  order = random.permutation(total) if total <= MANY else random.integers(0, total, MANY)
  rows = min(AT_ONCE, total)
  return np.resize(order, [-(-len(order) // rows), rows]).astype(np.int64)


def fetched_alone(source: Source, ids: Iterable[int]) -> dict[int, bytes]:
  """Returns id -> hash for some examples, each fetched separately (host)."""
  wanted = list(ids)
  indices = tf.data.Dataset.from_tensor_slices(np.array(wanted, np.int64)[:, np.newaxis])
  rows = indices.map(as_written(source.fetch)).as_numpy_iterator()
  return {
    i: digest({n: np.asarray(v) for n, v in row.items() if n != "weight"}, 0)
    for i, row in zip(wanted, rows, strict=True)
  }


def preprocessed(preprocess: Preprocess, batches: Sequence[Rows], training: bool) -> list[Rows]:
  """Returns the output of preprocess() for batches of one shape (host).

  It is traced once for all of them, as in a pipeline.
  """
  called = as_written(lambda batch: converted(preprocess)(dict(batch), training))
  stacked = {name: np.stack([rows[name] for rows in batches]) for name in batches[0]}
  return list(tf.data.Dataset.from_tensor_slices(stacked).map(called).as_numpy_iterator())


def of_training(error: Exception) -> str:
  """Returns the feature that only training has and that an error misses; "" for another error."""
  return next((name for name in ("seed", "step") if f"'{name}'" in str(error)), "")


def digest(batch: Rows, row: int) -> bytes:
  """Returns a hash of one row, over all features of a batch."""
  made = hashlib.blake2b(digest_size=16)
  for name in sorted(batch):
    value = batch[name][row]
    parts = np.ravel(value).tolist() if batch[name].dtype == object else [value.tobytes()]
    for part in (name.encode(), *parts):
      made.update(len(part).to_bytes(8, "little") + part)
  return made.digest()


def same(value: np.ndarray, other: np.ndarray) -> bool:
  """Whether two arrays of one feature are equal, after broadcasting; NaN equals NaN."""
  one, two = np.broadcast_arrays(value, other)
  return np.array_equal(one, two, equal_nan=np.issubdtype(value.dtype, np.floating))


def apart(one: Rows, other: Rows, *, tolerance: float = 0.0) -> str:
  """Returns the first feature that differs by more than a relative tolerance; "" if none does."""
  for name in sorted(one.keys() | other.keys()):
    if name not in one or name not in other or one[name].shape != other[name].shape:
      return name
    if same(one[name], other[name]):
      continue
    if not tolerance or one[name].dtype.kind != "f":
      return name
    bound = tolerance * float(np.nanmax(np.abs(other[name]), initial=0.0))
    if not np.allclose(one[name], other[name], rtol=tolerance, atol=bound, equal_nan=True):
      return name
  return ""


class Timed:
  """Iterates for some seconds, and over at least one element; `late` tells if it was cut off."""

  late = False

  def __init__(self, elements: Iterable[Rows], seconds: float) -> None:
    """The clock starts at the first element."""
    self._elements, self._seconds = elements, seconds

  def __iter__(self) -> Iterator[Rows]:
    started = time.perf_counter()
    for element in self._elements:
      yield element
      self.late = time.perf_counter() - started > self._seconds
      if self.late:
        return


@dataclasses.dataclass
class Column:
  """Statistics of one feature, over the examples with a weight above 0.

  Attributes:
    shape: of one example.
    constant: whether all examples are equal.
    first: the first row.
    count: finite elements; `total`, `squares`, `low` and `high` are over these.
    bad_example: id of the first example with an element that is not finite, or None.
    alone: number of batches in which all examples are equal.
    values: how often each value occurs, for integers with one element per example.
    weighed: the sum of the weights of the examples with each of these values.
  """

  dtype: np.dtype
  shape: tuple[int, ...]
  first: np.ndarray
  constant: bool = True
  count: int = 0
  total: float = 0.0
  squares: float = 0.0
  low: float = math.inf
  high: float = -math.inf
  not_finite: int = 0
  bad_example: int | None = None
  alone: int = 0
  values: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
  weighed: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)

  @property
  def numeric(self) -> bool:
    """Whether its elements are numbers."""
    return np.issubdtype(self.dtype, np.number)

  @property
  def integer(self) -> bool:
    """Whether its elements are integers."""
    return np.issubdtype(self.dtype, np.integer)

  @property
  def mean(self) -> float:
    """Mean of all finite elements."""
    return self.total / max(1, self.count)

  @property
  def std(self) -> float:
    """Standard deviation of all finite elements."""
    return math.sqrt(max(0.0, self.squares / max(1, self.count) - self.mean**2))

  def weigh(self, values: np.ndarray, weights: np.ndarray) -> None:
    """Counts the values [n] of integers, and adds up the weights of their examples."""
    if self.integer and values.ndim == 1 and len(self.values) < 10_000:
      for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        self.values[value] += 1
        self.weighed[value] += weight

  def add(self, values: np.ndarray, ids: np.ndarray) -> None:
    """Adds rows [n, ...] of the examples `ids` [n]."""
    self.constant = self.constant and same(values, self.first)
    if not self.numeric or not len(values):
      return
    self.alone += same(values, values[:1])
    finite = np.isfinite(values)
    if not finite.all():
      self.not_finite += int((~finite).sum())
      bad = ids[~finite.reshape([len(values), -1]).all(axis=1)]
      self.bad_example = int(bad[0]) if self.bad_example is None else self.bad_example
      values = values[finite]
    if values.size:
      self.count += values.size
      self.total += float(np.sum(values, dtype=np.float64))
      self.squares += float(np.sum(np.square(values, dtype=np.float64)))
      self.low = min(self.low, float(values.min()))
      self.high = max(self.high, float(values.max()))


class Survey:
  """Statistics of training batches as the step gets them, read for a few seconds.

  Attributes:
    columns: name -> statistics of the feature, without "weight" and "example_id".
    counts: example id -> how often it occurred.
    weights: the smallest and the largest weight.
    bad_weight: id of the first example whose weight is negative or not finite.
  """

  def __init__(self) -> None:
    self.columns: dict[str, Column] = {}
    self.first: Rows = {}
    self.counts: collections.Counter[int] = collections.Counter()
    self.examples = self.batches = 0
    self.weights = (math.inf, -math.inf)
    self.bad_weight: int | None = None

  def read(self, batches: Iterable[Rows], *, seconds: float) -> Survey:
    """Adds batches for some seconds; returns itself."""
    for batch in Timed(batches, seconds):
      self.add(batch)
    return self

  def add(self, batch: Rows) -> None:
    """Adds one batch, without its padding."""
    real = batch["example_id"] >= 0
    batch = {name: value[real] for name, value in batch.items()}
    ids, weight = batch["example_id"], batch["weight"]
    self.first = self.first or batch
    self.batches += 1
    self.examples += len(ids)
    new = np.array([each not in self.counts for each in ids.tolist()], bool)
    self.counts.update(ids.tolist())
    low, high = self.weights
    self.weights = min(low, float(weight.min())), max(high, float(weight.max()))
    bad = ids[~(np.isfinite(weight) & (weight >= 0))].tolist()
    self.bad_weight = next(iter(bad), None) if self.bad_weight is None else self.bad_weight
    reserved = {f"{prefix}{name}" for prefix in prefixes(batch) for name in RESERVED}
    for name in sorted(batch.keys() - reserved):
      value = batch[name][weight > 0]
      if len(value):
        column = self.columns.setdefault(name, Column(value.dtype, value.shape[1:], value[:1]))
        column.weigh(batch[name][new], weight[new])
        column.add(value, ids[weight > 0])
