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

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops as ops
from tensorflow.python.ops import gen_dataset_ops

from loopwright.aliases import Batch
from loopwright.errors import ConfigError, require_integer
from loopwright.graphs.autograph import as_written
from loopwright.inputs import streams
from loopwright.inputs.buckets import Bucket, Buckets, Scheduled
from loopwright.inputs.mixture import Mixture
from loopwright.inputs.ordering import examples_at, seed_of_part, seeds_at
from loopwright.inputs.parts import Sources, main_source
from loopwright.inputs.plan import MOST_ROWS, Element, Plan, Preprocess, padded_batch_size
from loopwright.inputs.replay import Draws
from loopwright.inputs.sources import Source, StreamSource

Shard = tuple[int, Any]
"""(n, i): only the batches k = 0, 1, ... with k % n == i; i is an int or an int64 scalar."""

_POSITIONS_AT_ONCE = 4096
"""Indices are computed this many at a time. A batch of 128 at a time would cost 170 us of CPU time
per batch instead of 110, mostly to start about forty small ops."""


def train_dataset(
  source: Source | StreamSource | Sources | Buckets,
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
  left_out: Collection[int] = (),
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
    left_out: ids of examples of the main source that become padding wherever they occur.

  Returns:
    Dicts of the features, "weight" and "example_id", each of static shape [rows, ...]. Of
    `Buckets`, a `Scheduled` of such data sets.

  Raises:
    ConfigError: a wrong argument, or a source or preprocess that breaks its contract.
  """
  if isinstance(source, Buckets):
    _refuse_shard(shard)
    options = {
      "pad_multiple": pad_multiple, "preprocess": preprocess, "shuffle": shuffle,
      "left_out": left_out,
    }  # fmt: skip
    return _train_buckets(source, global_batch_size, position, seed, rows, first_step, options)
  plan = Plan(
    main_source(source), global_batch_size, pad_multiple, preprocess, rows, training=True,
    left_out=left_out,
  )  # fmt: skip
  require_integer("position", position, at_least=0)
  require_integer("seed", seed, at_least=0, at_most=2**32 - 1)
  if first_step is None:
    first_step = position // global_batch_size
  if isinstance(source, Sources):
    return _train_parts(source, plan, seed, position, shuffle, shard, first_step)
  elements, read = _reading(source, plan, seed, position, shuffle, first_step)
  rewrite = isinstance(source, StreamSource)
  return _batches(_sharded(elements, shard), _completing(plan, read), rewrite=rewrite)


def eval_dataset(
  source: Source | StreamSource | Buckets,
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
  if isinstance(source, Sources):
    raise ConfigError(
      "source('eval') is a Sources, which only source('train') may return; return name -> source "
      "to evaluate several."
    )
  if isinstance(source, Buckets):
    options = {"pad_multiple": pad_multiple, "preprocess": preprocess}
    _refuse_shard(shard)
    return _eval_buckets(source, global_batch_size, rows, steps, options)
  most = -1 if steps is None else require_integer("steps", steps, at_least=1)
  if steps is None and isinstance(source, Draws):
    raise ConfigError(
      "source('eval') is a Draws, which has no end; return a source with the examples to evaluate, "
      "or set run.eval_steps."
    )
  plan = Plan(source, global_batch_size, pad_multiple, preprocess, rows, training=False)
  if isinstance(source, StreamSource):
    batches, complete = streams.evaluation(source, plan, most)
    return _batches(_sharded(batches, shard), complete, rewrite=True)
  end = source.num_examples

  def make(start: tf.Tensor) -> Batch:
    indices = start + plan.row_numbers()
    real = plan.real_rows() & (indices < end)
    batch = source.fetch(tf.where(real, indices, start))
    batch = plan.checked_features(batch, f"{type(source).__name__}.fetch")
    return plan.completed(batch, tf.where(real, _ids(source, indices), -1))

  starts = tf.data.Dataset.range(0, end, global_batch_size).take(most)
  return _batches(_sharded(starts, shard), make, rewrite=False)


def _sharded(batches: tf.data.Dataset, shard: Shard | None) -> tf.data.Dataset:
  return batches.shard(*shard) if shard else batches


def _batches(
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
  batches = dataset.map(as_written(make), num_parallel_calls=tf.data.AUTOTUNE)
  return batches.prefetch(tf.data.AUTOTUNE).with_options(options)


def _completing(plan: Plan, read: Callable[..., Element]) -> Callable[..., Batch]:
  def make(*element: Any) -> Batch:
    return plan.completed(*read(*element))

  return make


def _reading(
  source: Source | StreamSource,
  plan: Plan,
  seed: int,
  position: int,
  shuffle: bool,
  first_step: int,
) -> tuple[tf.data.Dataset, Callable[..., Element]]:
  """Returns what to read for each batch, and the function that reads it."""
  if isinstance(source, StreamSource):
    return streams.reading(source, plan, seed, position, first_step)

  def read(indices: tf.Tensor, seeds: tf.Tensor, step: tf.Tensor) -> Element:
    features = plan.checked_features(source.fetch(indices), f"{type(source).__name__}.fetch")
    return features, tf.where(plan.real_rows(), _ids(source, indices), -1), seeds, step

  return _ordered(source, plan, seed, position, shuffle, first_step), read


def _train_parts(
  sources: Sources,
  plan: Plan,
  seed: int,
  position: int,
  shuffle: bool,
  shard: Shard | None,
  first_step: int,
) -> tf.data.Dataset:
  elements, read = _reading(sources.main, plan, seed, position, shuffle, first_step)
  plans = {name: plan.of_part(part) for name, part in sources.parts.items()}
  readings = {
    name: _reading(
      part.source, plans[name], seed_of_part(seed, name), position * part.ratio, shuffle, 0
    )
    for name, part in sources.parts.items()
  }

  def make(main: Any, others: dict[str, Any]) -> Batch:
    parts = {}
    for name, element in others.items():
      features, ids, seeds, _ = readings[name][1](*element)
      examples = plans[name].numbered(features, ids)
      if plan.preprocess:
        examples["seed"] = seeds
      rows = [len(plan.rows), sources.parts[name].ratio]
      parts[name] = {
        key: tf.reshape(value, [*rows, *value.shape[1:]]) for key, value in examples.items()
      }
    return plan.completed(*read(*main), parts)

  others = {name: reading[0] for name, reading in readings.items()}
  zipped = tf.data.Dataset.zip((elements, others))
  given = [sources.main, *(part.source for part in sources.parts.values())]
  rewrite = all(isinstance(source, StreamSource) for source in given)
  return _batches(_sharded(zipped, shard), make, rewrite=rewrite)


def _ids(source: Source, indices: tf.Tensor) -> tf.Tensor:
  """Returns the ids of examples; of a bucket, those of the source that it is a part of."""
  if not isinstance(source, Bucket) or source.is_alone:
    return indices
  return source.example_ids(tf.minimum(indices, source.num_examples - 1))


def _refuse_shard(shard: Shard | None) -> None:
  if shard is not None:
    raise ConfigError(
      "the source is a Buckets, whose steps follow one schedule, but parameter_server's workers "
      "take steps as they come; use another run.strategy, or a source of one length."
    )


def rows_of(rows: range | None, size: int, global_batch_size: int, multiple: int) -> range | None:
  """Returns a worker's rows of a batch of `size`, if it has `rows` of a global batch; None: all."""
  if rows is None:
    return None
  padded, whole = padded_batch_size(size, multiple), padded_batch_size(global_batch_size, multiple)
  return range(rows.start * padded // whole, rows.stop * padded // whole)


def _train_buckets(
  source: Buckets,
  global_batch_size: int,
  position: int,
  seed: int,
  rows: range | None,
  first_step: int | None,
  options: dict[str, Any],
) -> Scheduled:
  require_integer("global_batch_size", global_batch_size, at_least=1, at_most=MOST_ROWS)
  schedule = source.schedule(global_batch_size, seed=seed, shuffle=options["shuffle"])
  batch = require_integer("position", position, at_least=0) // global_batch_size
  shift = 0 if first_step is None else first_step - batch
  before, multiple = schedule.batches_before(batch), options["pad_multiple"]
  made = []
  for place, bucket in enumerate(source.buckets):
    size = schedule.sizes[place]
    numbers = functools.partial(schedule.steps_of, place, batch, shift)
    given = rows_of(rows, size, global_batch_size, multiple)
    plan = Plan(
      bucket, size, multiple, options["preprocess"], given, training=True,
      left_out=options["left_out"],
    )  # fmt: skip
    elements, read = _reading(
      bucket, plan, seed_of_part(seed, bucket.name), before[place] * size, options["shuffle"], 0
    )
    if plan.preprocess:
      elements = _numbered(elements, numbers)
    made.append(_batches(elements, _completing(plan, read), rewrite=False))
  return Scheduled(made, schedule, batch)


def _numbered(elements: tf.data.Dataset, steps: Callable[[], Iterator[int]]) -> tf.data.Dataset:
  """Replaces the steps, the last part of each element: a bucket does not have those of a row."""
  numbers = tf.data.Dataset.from_generator(steps, output_signature=tf.TensorSpec([], tf.int64))
  return tf.data.Dataset.zip((elements, numbers)).map(
    as_written(lambda element, step: (*element[:-1], step))
  )


def _eval_buckets(
  source: Buckets,
  global_batch_size: int,
  rows: range | None,
  steps: int | None,
  options: dict[str, Any],
) -> list[tf.data.Dataset]:
  sizes = source.batch_sizes(global_batch_size)
  pairs = list(zip(source.buckets, sizes, strict=True))
  counts = np.array([-(-bucket.num_examples // size) for bucket, size in pairs])
  if steps is not None and steps < counts.sum():
    ends = np.cumsum(counts) * steps // counts.sum()
    counts = np.diff(ends, prepend=0)
  multiple = options["pad_multiple"]
  return [
    eval_dataset(
      bucket, global_batch_size=size, steps=int(count),
      rows=rows_of(rows, size, global_batch_size, multiple),
      **options,
    )
    for (bucket, size), count in zip(pairs, counts, strict=True) if count
  ]  # fmt: skip


def _examples(source: Source, positions: tf.Tensor, seed: int, *, shuffle: bool) -> tf.Tensor:
  """Returns the example of each position, int64 [m]."""
  if isinstance(source, Mixture):
    return source.shares.ids(positions, seed=seed, shuffle=shuffle)
  if not shuffle:
    return positions % source.num_examples
  return examples_at(positions, num_examples=source.num_examples, seed=seed)


def _ordered(
  source: Source, plan: Plan, seed: int, position: int, shuffle: bool, first_step: int
) -> tf.data.Dataset:
  """Yields (indices int64 [rows], seeds int32 [rows, 2], step int64) for each batch."""
  batches = max(1, _POSITIONS_AT_ONCE // plan.global_batch_size)
  size = batches * plan.global_batch_size

  def make(start: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    positions = start + tf.range(size, dtype=tf.int64)
    indices = _examples(source, positions, seed, shuffle=shuffle)
    of_batches = tf.reshape(tf.stack([indices, positions]), [2, batches, -1])
    indices, positions = tf.unstack(tf.gather(of_batches, plan.example_rows(), axis=2))
    seeds = seeds_at(tf.reshape(positions, [-1]), seed=seed)
    steps = plan.step(start, position, first_step) + tf.range(batches, dtype=tf.int64)
    return indices, tf.reshape(seeds, [batches, -1, 2]), steps

  return tf.data.Dataset.counter(position, size).map(as_written(make)).unbatch()


# ---- Replicas ----


def iterate(batches: Iterable[Batch]) -> Iterator[Batch]:
  """Returns `iter(batches)` of a distributed dataset that can be ended at any time (host).

  Two faults of TensorFlow 2.20 are mended here, for the iterators made here alone:

  - It makes a dataset per replica and tunes it in a thread, which `_batches` disables for its own.
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
    mock.patch.object(ops, "_create_device_dataset", untuned),
    mock.patch.object(gen_dataset_ops, "multi_device_iterator_init", kept),
  ):
    iterator: Any = iter(batches)
  # Attributes end in the order in which they were set: this one after the iterator's own.
  if read:
    iterator._datasets = tuple(read)  # noqa: SLF001
  return iterator
