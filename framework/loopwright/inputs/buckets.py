"""Length buckets: batches of a few shapes, each example padded to the next of some lengths.

Each bucket has the examples whose length is at most its boundary and above the one before, in
random order, and batches of one shape. A step trains on a batch of one bucket. Which one is a
function of (seed, step), so a restart is exact and all replicas and workers agree:

    before epoch e   floor(e * n / b) batches of a bucket of n examples, in batches of b
    in epoch e       the batches up to epoch e + 1, of all buckets, in random order

So an epoch of a bucket has each of its examples once; its last batch may end in the next epoch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError, kind, require_integer
from loopwright.graphs.aliases import Batch
from loopwright.graphs.autograph import as_written
from loopwright.graphs.randomness import hashed
from loopwright.inputs import datasets, fingerprint
from loopwright.inputs.ordering import seed_of_part
from loopwright.inputs.plan import Plan, Shard, Start, batches, padded_batch_size
from loopwright.inputs.sources import Readable, Source

Axes = Mapping[str, Sequence[int]]
"""Feature -> its axes that are as long as the example; axis 0 is that of the examples."""


class Bucket(Source):
  """The examples of one bucket.

  Attributes:
    length: what the features are trimmed to.
    axes: the features that are trimmed, and their axes.
    name: in the ledger.
    is_alone: whether "example_id" counts this bucket's examples alone, not the source's.
    first: the number of examples in the shorter buckets.
  """

  def __init__(
    self, source: Source, ids: np.ndarray, *, length: int, axes: Axes, first: int
  ) -> None:
    """Keeps the arguments; `ids` are the examples of the bucket, int64 [num_examples]."""
    self.num_examples, self.length, self.first = len(ids), length, first
    self.name, self.is_alone = f"bucket {length}", False
    self._source, self.ids, self.axes = source, ids, axes
    self.numbered = source.numbered

  def fetch(self, indices: tf.Tensor) -> Batch:
    """See `Source.fetch`."""
    batch = dict(self._source.fetch(self.example_ids(indices)))
    for name, axes in self.axes.items():
      shape = list(batch[name].shape) if name in batch else []
      if any(axis >= len(shape) or shape[axis] < self.length for axis in axes):
        found = batch[name].shape if name in batch else "missing"
        places = f"axis {axes[0]}" if len(axes) == 1 else f"axes {', '.join(map(str, axes))}"
        raise ConfigError(
          f"Buckets trims {name!r}, which is {found} in a batch of {kind(self._source)}; its "
          f"{places} must be there, and padded to at least {self.length}."
        )
      batch[name] = batch[name][
        tuple(slice(self.length if axis in axes else None) for axis in range(len(shape)))
      ]
    return batch

  def ids_of(self, indices: tf.Tensor) -> tf.Tensor:
    """See `Source.ids_of`."""
    if self.is_alone:
      return indices
    return self.example_ids(tf.minimum(indices, self.num_examples - 1))

  def cut_to(self, length: int) -> Bucket:
    """Returns a source of the same examples whose features are trimmed to another length."""
    other = copy.copy(self)
    other.length = length
    return other

  def example_ids(self, indices: tf.Tensor) -> tf.Tensor:
    """Returns the indices in the source of this bucket's examples, int64 [n]."""
    return tf.gather(self._tensor, indices)

  @functools.cached_property
  def _tensor(self) -> tf.Tensor:
    with tf.init_scope(), tf.device("CPU:0"):
      return tf.constant(self.ids)


class Buckets(Readable):
  """A source whose batches have a few shapes; `Task.source` may return it.

  >>> texts, lengths = lw.ArraySource({"text": np.zeros([6, 8])}), [2, 3, 3, 7, 8, 1]
  >>> lw.Buckets(texts, lengths=lengths, boundaries=[4, 8], trim=["text"]).describe(2)
  '4 of length 4, 2 a batch; 2 of length 8, 2 a batch; 1 in a row'

  Attributes:
    source: with the examples of all lengths.
    buckets: those that have examples, the shortest first.
    num_examples: of all buckets.
    lengths: of each example.
  """

  def __init__(
    self,
    source: Source,
    /,
    *,
    lengths: Sequence[int] | np.ndarray,
    boundaries: Sequence[int],
    trim: Sequence[str] | Axes,
    equal_tokens: bool = False,
    in_a_row: int = 1,
  ) -> None:
    """Shares out the examples (host).

    Args:
      source: yields features that are padded to one length, at least the last boundary.
      lengths: the length of each example, int [num_examples].
      boundaries: the lengths of the buckets, ascending; the last is at least the longest example.
      trim: the features to cut to a bucket's length, on axis 1; or feature -> axes, such as
        {"nodes": (1,), "adjacency": (1, 2)}.
      equal_tokens: a batch of a shorter bucket has more examples, so that rows x length is about
        that of the longest bucket, whose batches have the global batch size. False gives all
        batches the global batch size.
      in_a_row: batches of a bucket that follow one another; more than 1 saves a little time
        between short steps.

    Raises:
      ConfigError: a wrong argument, or an example longer than the last boundary.
    """
    if not isinstance(source, Source):
      raise ConfigError(f"Buckets got {kind(source)}; it must be a Source, which has an index.")
    if type(source).examples_of is not Source.examples_of:
      raise ConfigError(
        f"Buckets got a {type(source).__name__}, but each bucket reads all its examples once an "
        "epoch, so weights would not count; give the parts one length, or use Packed sources as "
        "the parts."
      )
    sizes = np.asarray(lengths)
    if sizes.shape != (source.num_examples,) or sizes.dtype.kind not in "iu":
      raise ConfigError(
        f"lengths is {sizes.dtype} of shape {list(sizes.shape)}; it must be a whole number for "
        f"each of the {source.num_examples} examples."
      )
    ends = [require_integer("boundaries", end, at_least=1) for end in boundaries]
    if not ends or ends != sorted(set(ends)):
      raise ConfigError(f"boundaries is {boundaries}; it must be ascending lengths.")
    if sizes.max() > ends[-1]:
      raise ConfigError(
        f"example {sizes.argmax()} has length {sizes.max()}, above the last boundary, {ends[-1]}; "
        "raise it, or cut the example."
      )
    axes = _axes(trim)
    self.source, self.num_examples, self.lengths = source, source.num_examples, sizes
    self.equal_tokens = equal_tokens
    self.in_a_row = require_integer("in_a_row", in_a_row, at_least=1)
    self.buckets: list[Bucket] = []
    places, first = np.searchsorted(ends, sizes), 0
    for place, length in enumerate(ends):
      ids = np.flatnonzero(places == place)
      if len(ids):
        self.buckets.append(Bucket(source, ids, length=length, axes=axes, first=first))
      first += len(ids)

  @property
  def longest(self) -> Bucket:
    """The bucket of the longest examples, as a source of its own with ids from 0."""
    alone = copy.copy(self.buckets[-1])
    alone.is_alone = True
    return alone

  def batch_sizes(self, global_batch_size: int) -> list[int]:
    """Returns the examples in a batch of each bucket."""
    if not self.equal_tokens:
      return [global_batch_size] * len(self.buckets)
    tokens = global_batch_size * self.buckets[-1].length
    return [tokens // bucket.length for bucket in self.buckets]

  def describe(self, global_batch_size: int) -> str:
    """Returns what its schedule is made of: a run that goes on must have the same."""
    sizes = zip(self.buckets, self.batch_sizes(global_batch_size), strict=True)
    shares = [f"{one.num_examples} of length {one.length}, {size} a batch" for one, size in sizes]
    return f"{'; '.join(shares)}; {self.in_a_row} in a row"

  def places(self) -> np.ndarray:
    """Returns each example's place in the list of all buckets' examples, int64 [num_examples]."""
    places = np.empty(self.num_examples, np.int64)
    places[np.concatenate([bucket.ids for bucket in self.buckets])] = np.arange(self.num_examples)
    return places

  def schedule(self, global_batch_size: int, *, seed: int, shuffle: bool) -> Schedule:
    """Returns which bucket each step trains on."""
    return Schedule(
      counts=tuple(bucket.num_examples for bucket in self.buckets),
      sizes=tuple(self.batch_sizes(global_batch_size)),
      seed=seed,
      shuffle=shuffle,
      in_a_row=self.in_a_row,
    )

  def main_source(self) -> Bucket:
    """See `Readable.main_source`."""
    return self.longest

  def of_one_shape(self) -> Bucket:
    """See `Readable.of_one_shape`."""
    return self.longest

  def training_batches(self, plan: Plan, start: Start, shard: Shard | None) -> datasets.Scheduled:
    """See `Readable.training_batches`."""
    _refuse_shard(shard)
    schedule = self.schedule(plan.global_batch_size, seed=start.seed, shuffle=start.shuffle)
    batch = start.position // plan.global_batch_size
    before, made = schedule.batches_before(batch), []
    for place, bucket in enumerate(self.buckets):
      size = schedule.sizes[place]
      steps = functools.partial(schedule.steps_of, place, batch, start.first_step - batch)
      own = _with_size(plan, size)
      first = Start(seed_of_part(start.seed, bucket.name), before[place] * size, start.shuffle)
      elements, read = bucket.training_elements(own, first)
      if plan.preprocess:
        elements = _numbered(elements, steps)
      made.append(batches(elements, own.completing(read), rewrite=False))
    return datasets.Scheduled(made, schedule, batch)

  def evaluation_batches(self, plan: Plan, most: int, shard: Shard | None) -> list[tf.data.Dataset]:
    """See `Readable.evaluation_batches`: a data set for each bucket."""
    _refuse_shard(shard)
    pairs = list(zip(self.buckets, self.batch_sizes(plan.global_batch_size), strict=True))
    counts = np.array([-(-bucket.num_examples // size) for bucket, size in pairs])
    if 0 <= most < counts.sum():
      ends = np.cumsum(counts) * most // counts.sum()
      counts = np.diff(ends, prepend=0)
    return [
      bucket.evaluation_batches(_with_size(plan, size), int(count), None)
      for (bucket, size), count in zip(pairs, counts, strict=True)
      if count
    ]

  def fingerprint(self) -> str:
    """See `Readable.fingerprint`."""
    shares = (f"{bucket.num_examples} of length {bucket.length}" for bucket in self.buckets)
    return f"{self.source.fingerprint()}, {' and '.join(shares)}"

  def described(self, global_batch_size: int) -> dict[str, str]:
    """See `Readable.described`."""
    own = {fingerprint.BUCKETS: self.describe(global_batch_size)}
    return {fingerprint.TRAINING: self.fingerprint(), **own}


def _axes(trim: Sequence[str] | Axes) -> Axes:
  """Returns the axes to cut of each feature; raises ConfigError for anything else."""
  if isinstance(trim, str) or not trim:
    raise ConfigError(f"trim is {trim!r}; it must be the names of features, such as ('tokens',).")
  if not isinstance(trim, Mapping):
    return dict.fromkeys(trim, (1,))
  for name, axes in trim.items():
    if (
      not isinstance(axes, Sequence) or not axes or not all(type(a) is int and a > 0 for a in axes)
    ):
      raise ConfigError(
        f"trim[{name!r}] is {axes!r}; it must be the axes to cut, from 1 on, such as (1, 2)."
      )
  return trim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
  """Which bucket each step trains on, as a function of the step alone (host).

  Attributes:
    counts: examples in each bucket.
    sizes: examples in a batch of each bucket.
  """

  counts: tuple[int, ...]
  sizes: tuple[int, ...]
  seed: int = 0
  shuffle: bool = True
  in_a_row: int = 1

  def buckets(self, first: int, steps: int) -> np.ndarray:
    """Returns the bucket of each of some steps from `first` on, int64 [steps]."""
    found: list[np.ndarray] = []
    while steps > 0:
      epoch = self._epoch(first)
      order = _order(self, epoch)[first - self.steps_before(epoch) :][:steps]
      found.append(order)
      first, steps = first + len(order), steps - len(order)
    return np.concatenate([np.zeros(0, np.int64), *found])

  def batches_before(self, step: int) -> list[int]:
    """Returns the number of batches of each bucket in the steps before `step`."""
    epoch = self._epoch(step)
    before = self.before(epoch)
    since = np.bincount(_order(self, epoch)[: step - sum(before)], minlength=len(before))
    return [count + int(more) for count, more in zip(before, since, strict=True)]

  def steps_before(self, epoch: int) -> int:
    """Returns the number of steps in the epochs before `epoch`."""
    return sum(self.before(epoch))

  def steps_of(self, bucket: int, first: int, shift: int) -> Iterator[int]:
    """Yields the steps from `first` on that train on a bucket, each plus `shift`, without end."""
    while True:
      steps = max(1, self.steps_before(self._epoch(first) + 1) - first)
      yield from (np.flatnonzero(self.buckets(first, steps) == bucket) + first + shift).tolist()
      first += steps

  def before(self, epoch: int) -> list[int]:
    """Returns the steps of each bucket before an epoch."""
    return [epoch * n // size for n, size in zip(self.counts, self.sizes, strict=True)]

  def _epoch(self, step: int) -> int:
    """Returns the last epoch that begins at or before a step."""
    low, high = 0, 1
    while self.steps_before(high) <= step:
      low, high = high, 2 * high
    while high - low > 1:
      middle = (low + high) // 2
      low, high = (middle, high) if self.steps_before(middle) <= step else (low, middle)
    return low


@functools.lru_cache(maxsize=4)
def _order(schedule: Schedule, epoch: int) -> np.ndarray:
  """Returns the bucket of each step of an epoch, int64 [steps of the epoch]."""
  before, after = schedule.before(epoch), schedule.before(epoch + 1)
  counts = [end - begin for begin, end in zip(before, after, strict=True)]
  in_order = np.repeat(np.arange(len(counts)), counts)
  if not schedule.shuffle:
    return in_order
  # A run of batches moves as a whole; it has the number of its first batch.
  within = np.concatenate([np.arange(count) for count in counts])
  runs = np.cumsum(within % schedule.in_a_row == 0) - 1
  numbers = sum(before) + np.flatnonzero(within % schedule.in_a_row == 0)
  with tf.init_scope(), tf.device("CPU:0"):
    hashes = hashed(tf.constant(numbers, tf.int64), schedule.seed, "buckets").numpy()
  return in_order[np.argsort(hashes[runs], kind="stable")]


# ---- How they are read ----


def _with_size(plan: Plan, size: int) -> Plan:
  rows = rows_of(plan.given_rows, size, plan.global_batch_size, plan.pad_multiple)
  return dataclasses.replace(plan, global_batch_size=size, given_rows=rows)


def rows_of(rows: range | None, size: int, global_batch_size: int, multiple: int) -> range | None:
  """Returns a worker's rows of a batch of `size`, if it has `rows` of a global batch; None: all."""
  if rows is None:
    return None
  padded, whole = padded_batch_size(size, multiple), padded_batch_size(global_batch_size, multiple)
  return range(rows.start * padded // whole, rows.stop * padded // whole)


def _refuse_shard(shard: Shard | None) -> None:
  if shard is not None:
    raise ConfigError(
      "the source is a Buckets, whose steps follow one schedule, but parameter_server's workers "
      "take steps as they come; use another run.strategy, or a source of one length."
    )


def _numbered(elements: tf.data.Dataset, steps: Callable[[], Iterator[int]]) -> tf.data.Dataset:
  """Replaces the steps, the last part of each element: a bucket does not have those of a row."""
  numbers = tf.data.Dataset.from_generator(steps, output_signature=tf.TensorSpec([], tf.int64))
  return tf.data.Dataset.zip((elements, numbers)).map(
    as_written(lambda element, step: (*element[:-1], step))
  )
