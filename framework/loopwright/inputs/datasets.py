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
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops as ops
from tensorflow.python.ops import gen_dataset_ops

from loopwright.errors import require_integer
from loopwright.graphs.aliases import AnySource, Batch
from loopwright.host.replacing import replaced
from loopwright.inputs.plan import Plan, Preprocess, Shard, Start
from loopwright.inputs.sources import check_source, main_source


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
  return source.training_batches(plan, Start(seed, position, shuffle, step), shard)


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
  return source.evaluation_batches(plan, most, shard)


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
