"""Batches of one static shape, from any position of a source.

    source = ArraySource(features={"x": np.arange(10, dtype=np.float32)})
    dataset = train_dataset(source, global_batch_size=4, seed=1)
    batches = list(dataset.take(5).as_numpy_iterator())       # two epochs: 5 x 4 = 2 x 10
    resumed = train_dataset(source, global_batch_size=4, seed=1, position=8)
    assert np.array_equal(next(resumed.as_numpy_iterator())["x"], batches[2]["x"])

With n examples, position p of the endless training sequence reads example
`permutation(seed, epoch)[p % n]` of epoch `p // n`, and of a `Mixture` what its weights say;
docs/inputs.md describes what follows from it.

A batch is a dict of tensors that share their first axis, the rows. Four names are reserved:

    "weight"      float32 [rows]: 0 for padding. A source may provide its own (>= 0).
    "example_id"  int64 [rows]: the index in the source; -1 for padding.
    "seed"        int32 [rows, 2]: a function of (seed, position), for tf.random.stateless_* in
                  `preprocess`, so that augmentation is reproducible. Only in training.
    "step"        int64 [rows]: the number of the training step, from 0. In `preprocess` only in
                  training; the trainer and the evaluator add it to the batch of the task.

A batch is made in this order: its rows (`Plan`), positions and examples (`ordering`), `fetch`
(`sources`), weights and ids, `preprocess`.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops as ops
from tensorflow.python.ops import gen_dataset_ops

from loopwright.errors import require_integer
from loopwright.graphs.aliases import AnySource, Batch
from loopwright.graphs.autograph import as_written
from loopwright.host.replacing import replaced
from loopwright.inputs.ordering import examples_at, seeds_at
from loopwright.inputs.plan import Element, Plan, Preprocess, Start
from loopwright.inputs.sources import Source, check_source, main_source

Shard = tuple[int, Any]
"""(n, i): only the batches k = 0, 1, ... with k % n == i; i is an int or an int64 scalar."""
Elements = tuple[tf.data.Dataset, Callable[..., Element]]
"""What to read for each batch, and the function that reads it."""

_POSITIONS_AT_ONCE = 4096
"""Indices are computed this many at a time. A batch of 128 at a time would cost 170 us of CPU time
per batch instead of 110, mostly to start about forty small ops."""


def train_dataset(
  source: AnySource,
  *,
  global_batch_size: int,
  pad_multiple: int = 1,
  seed: int = 0,
  position: int = 0,
  preprocess: Preprocess | None = None,
  shuffle: bool = True,
  rows: range | None = None,
  shard: Shard | None = None,
  first_step: int | None = None,
) -> Any:
  """Returns endless batches; batch k starts at position + k * global_batch_size.

  Call it on the host and pass the result to `strategy.experimental_distribute_dataset`, which
  splits the rows of a batch over replicas. With `rows` the dataset is already one worker's share
  and must not be split again.

  Args:
    source: what to read. Of `Sources`, sizes and positions are those of the main one; a part is
      read from position x ratio on. Of `Buckets`, batch k is that of step position /
      global_batch_size + k of the schedule.
    global_batch_size: examples per batch, over all replicas.
    pad_multiple: rows are padded to the next multiple of this.
    seed: an integer from 0 to 2**32 - 1; with the position it determines order and seeds.
    position: examples consumed so far. Only a `StreamSource` takes time to start there.
    preprocess: called as `preprocess(batch, True)` on each batch, or on its `rows`, on the host, in
      graph mode with AutoGraph. It must keep the rows, "weight", "example_id" and static shapes. To
      give the same result on any number of workers, it must treat each row independently.
    shuffle: False reads each epoch in the order of the source, as a `StreamSource` always does.
    rows: the rows of the padded global batch to make, for one of several workers; None makes all.
      Other examples are not fetched, except the batch's first, for padding. With a `StreamSource`,
      every worker reads all examples, but pads and preprocesses only its rows.
    shard: the batches to make, for workers that take turns; None makes all. With an indexed source,
      other batches are not fetched.
    first_step: the number of the step that gets batch 0; None is position / global_batch_size.

  Returns:
    Dicts of the features, "weight" and "example_id", each of static shape [rows, ...]. Of
    `Buckets`, a `Scheduled` of such data sets.

  Raises:
    ConfigError: a wrong argument, or a source or preprocess that breaks its contract.
  """
  check_source(main_source(source))
  plan = Plan(global_batch_size, pad_multiple, preprocess, rows, training=True)
  require_integer("position", position, at_least=0)
  require_integer("seed", seed, at_least=0, at_most=2**32 - 1)
  step = position // global_batch_size if first_step is None else first_step
  return training(source, plan, Start(seed, position, shuffle, step), shard)


def eval_dataset(
  source: AnySource,
  *,
  global_batch_size: int,
  pad_multiple: int = 1,
  preprocess: Preprocess | None = None,
  rows: range | None = None,
  shard: Shard | None = None,
  steps: int | None = None,
) -> Any:
  """Returns every example exactly once, in the order of the source, in batches of one static shape.

  The last batch is padded like the others. Every worker gets the same number of batches; its `rows`
  of the last one may all be padding. See `train_dataset` for arguments, results and errors, but
  `preprocess(batch, False)` gets no "seed". With `steps`, only the first so many batches of the
  whole source, before `shard`. An endless stream needs `steps`, or `num_examples` of its source.
  Of `Buckets`, returns a list of data sets, one for each bucket; `steps` are shared out to them.
  """
  most = -1 if steps is None else require_integer("steps", steps, at_least=1)
  check_source(main_source(source))
  plan = Plan(global_batch_size, pad_multiple, preprocess, rows, training=False)
  return evaluation(source, plan, most, shard)


# ---- What a kind of source may answer in its own way ----


@functools.singledispatch
def training(source: AnySource, plan: Plan, start: Start, shard: Shard | None) -> Any:
  """Returns what `train_dataset` returns."""
  elements, read = reading(source, plan, start)
  return batches(sharded(elements, shard), completing(plan, read), rewrite=rewrites(source))


@functools.singledispatch
def evaluation(source: AnySource, plan: Plan, most: int, shard: Shard | None) -> Any:
  """Returns what `eval_dataset` returns; `most` is -1 for all batches."""
  elements, make = one_pass(source, plan, most)
  return batches(sharded(elements, shard), make, rewrite=rewrites(source))


@functools.singledispatch
def one_pass(
  source: AnySource, plan: Plan, most: int
) -> tuple[tf.data.Dataset, Callable[..., Batch]]:
  """Returns what to read for each batch of one pass, and the function that makes the batch.

  Args:
    source: what to read.
    plan: the rows of a batch.
    most: the most batches; -1 for all.
  """
  end = source.num_examples

  def make(start: tf.Tensor) -> Batch:
    indices = start + plan.row_numbers()
    real = plan.real_rows() & (indices < end)
    batch = source.fetch(tf.where(real, indices, start))
    batch = plan.checked_features(batch, f"{type(source).__name__}.fetch")
    return plan.completed(batch, tf.where(real, example_ids(source, indices), -1))

  return tf.data.Dataset.range(0, end, plan.global_batch_size).take(most), make


@functools.singledispatch
def reading(source: AnySource, plan: Plan, start: Start) -> Elements:
  """Returns what to read for each batch of training, and the function that reads it."""

  def read(indices: tf.Tensor, seeds: tf.Tensor, step: tf.Tensor) -> Element:
    features = plan.checked_features(source.fetch(indices), f"{type(source).__name__}.fetch")
    return features, tf.where(plan.real_rows(), example_ids(source, indices), -1), seeds, step

  return _ordered(source, plan, start), read


@functools.singledispatch
def examples_of(source: AnySource, positions: tf.Tensor, start: Start) -> tf.Tensor:
  """Returns the example of each position, int64 [m]."""
  if not start.shuffle:
    return positions % source.num_examples
  return examples_at(positions, num_examples=source.num_examples, seed=start.seed)


def has_own_order(source: Source) -> bool:
  """Whether a kind of source says itself which example each position reads."""
  return examples_of.dispatch(type(source)) is not examples_of.dispatch(Source)


@functools.singledispatch
def example_ids(source: AnySource, indices: tf.Tensor) -> tf.Tensor:
  """Returns the ids of the examples at some indices, int64 [m]."""
  return indices


@functools.singledispatch
def rewrites(source: AnySource) -> bool:
  """Whether TensorFlow may optimize the stages before a batch is made."""
  return False


# ---- Pipelines ----


def sharded(elements: tf.data.Dataset, shard: Shard | None) -> tf.data.Dataset:
  """Returns every n-th element; all without a shard."""
  return elements.shard(*shard) if shard else elements


def batches(
  dataset: tf.data.Dataset, make: Callable[..., Batch], *, rewrite: bool
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
  made = dataset.map(as_written(make), num_parallel_calls=tf.data.AUTOTUNE)
  return made.prefetch(tf.data.AUTOTUNE).with_options(options)


def completing(plan: Plan, read: Callable[..., Element]) -> Callable[..., Batch]:
  """Returns the function that makes a batch of what `read` has read."""

  def make(*element: Any) -> Batch:
    return plan.completed(*read(*element))

  return make


def _ordered(source: Source, plan: Plan, start: Start) -> tf.data.Dataset:
  """Yields (indices int64 [rows], seeds int32 [rows, 2], step int64) for each batch."""
  count = max(1, _POSITIONS_AT_ONCE // plan.global_batch_size)
  size = count * plan.global_batch_size

  def make(first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    positions = first + tf.range(size, dtype=tf.int64)
    indices = examples_of(source, positions, start)
    of_batches = tf.reshape(tf.stack([indices, positions]), [2, count, -1])
    indices, positions = tf.unstack(tf.gather(of_batches, plan.example_rows(), axis=2))
    seeds = seeds_at(tf.reshape(positions, [-1]), seed=start.seed)
    steps = plan.step(first, start) + tf.range(count, dtype=tf.int64)
    return indices, tf.reshape(seeds, [count, -1, 2]), steps

  return tf.data.Dataset.counter(start.position, size).map(as_written(make)).unbatch()


# ---- Replicas ----

# An iterator that is freed after the interpreter's end has begun waits forever for Python that it
# calls, as tf.numpy_function does. So what a run left in cycles is freed before.
atexit.register(gc.collect)


def iterate(given: Iterable[Batch]) -> Iterator[Batch]:
  """Returns `iter(given)` of a distributed dataset that can be ended at any time (host).

  Two faults of TensorFlow 2.20 are mended here, for the iterators made here alone:

  - It makes a dataset per replica and tunes it in a thread, which `batches` disables for its own.
    With that thread, ending an iterator, and so a process, took up to a minute per replica.
  - The thread that reads for all replicas uses the dataset until the iterator's end has stopped it,
    but the dataset's last reference is dropped before: a segmentation fault, where a batch was
    being made. `iter` of plain datasets keeps that reference, and so does what is returned here.
  """
  make, begin = ops._create_device_dataset, gen_dataset_ops.multi_device_iterator_init  # noqa: SLF001
  read = []

  def untuned(*args: Any) -> tf.data.Dataset:
    options = tf.data.Options()
    options.autotune.enabled = False
    return make(*args).with_options(options)

  def kept(dataset: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
    read.append(dataset)
    return begin(dataset, *args, **kwargs)

  with (
    replaced(ops, _create_device_dataset=untuned),
    replaced(gen_dataset_ops, multi_device_iterator_init=kept),
  ):
    iterator: Any = iter(given)
  # Attributes end in the order in which they were set: this one after the iterator's own.
  if read:
    iterator._datasets = tuple(read)  # noqa: SLF001
  return iterator


# ---- Batches of several shapes ----


class Schedule(Protocol):
  """Which of several data sets each step reads; see `loopwright.inputs.buckets.Schedule`."""

  def buckets(self, first: int, steps: int) -> np.ndarray:
    """Returns the data set of each of some steps from `first` on, int64 [steps]."""


@dataclasses.dataclass
class Scheduled:
  """The batches of all buckets, from some step on: data sets, or iterators made of them (host).

  Attributes:
    datasets: of each bucket, endless, from its next batch on.
    schedule: says which one each step takes.
    step: the next step.
  """

  datasets: list[Any]
  schedule: Schedule
  step: int

  def iterate(self, make: Callable[[tf.data.Dataset], Iterator[Batch]]) -> Scheduled:
    """Returns an iterator; `make` makes that of one bucket."""
    return dataclasses.replace(self, datasets=[*map(make, self.datasets)])

  def __iter__(self) -> Scheduled:
    return self

  def __next__(self) -> Batch:
    [(iterator, _)] = runs(self, tf.constant(1))
    return next(iterator)


def runs(iterator: Any, steps: tf.Tensor) -> Iterator[tuple[Any, tf.Tensor]]:
  """Yields (iterator of one shape, number of steps) until so many steps are shared out (host)."""
  if not isinstance(iterator, Scheduled):
    yield iterator, steps
    return
  order = iterator.schedule.buckets(iterator.step, int(steps))
  ends = [*(np.flatnonzero(np.diff(order)) + 1).tolist(), len(order)]
  for begin, end in zip([0, *ends], ends, strict=False):
    yield iterator.datasets[order[begin]], tf.constant(end - begin)
    iterator.step += end - begin
