"""Your own `tf.data.Dataset`, which is read from its beginning up to a position."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from loopwright.errors import ConfigError, kind, require_integer
from loopwright.graphs.aliases import Batch
from loopwright.graphs.autograph import as_written
from loopwright.inputs import fingerprint
from loopwright.inputs.checks import refuse_reserved, require
from loopwright.inputs.ordering import seeds_at
from loopwright.inputs.plan import Element, Elements, Plan, Start
from loopwright.inputs.sources import READS, Readable, wrapping
from loopwright.options.declaration import may_change


@may_change(READS)
class StreamSource(Readable):
  """Your own `tf.data.Dataset`, read in its own order.

  It must yield the same examples in each iteration: seed its shuffle. Training repeats it. It
  cannot be indexed, so a resumed run skips the examples already read, which takes as long as
  reading them; the log gives the time. "example_id" counts within one pass.

  Attributes:
    num_examples: the length of a pass; None if it is not known.
    numbered: "class" -> the `class_names` of Keras's image_dataset_from_directory.
    endless: whether a pass is known to have no end. That of a generator is not known.
  """

  rewrites = True

  def __init__(self, dataset: tf.data.Dataset, *, num_examples: int | None = None) -> None:
    """Checks the types of the elements without reading them.

    Args:
      dataset: yields one example at a time: a flat dict of dense tensors of static shapes.
      num_examples: the length of a pass; None for the whole dataset. Evaluation of an endless
        dataset needs it.

    Raises:
      ConfigError: not a dataset of such dicts, a reserved name, a "weight" that is not a float32
        scalar, an empty dataset, or one known to have fewer than `num_examples`.
    """
    if not isinstance(dataset, tf.data.Dataset):
      raise ConfigError(
        f"dataset is {kind(dataset)}; it must be a tf.data.Dataset: use {wrapping(dataset)}."
      )
    check_elements(dataset.element_spec)
    if num_examples is not None:
      require_integer("num_examples", num_examples, at_least=1)
    known = int(dataset.cardinality())
    if known == 0:
      raise ConfigError("the stream's dataset is empty; it must yield at least one example.")
    if num_examples is not None and 0 < known < num_examples:
      raise ConfigError(
        f"num_examples is {num_examples}, but the stream's dataset has {known} examples; "
        "remove num_examples, or lower it."
      )
    self.endless = num_examples is None and _is_endless(dataset)
    self.dataset = dataset if num_examples is None else dataset.take(num_examples)
    self.num_examples = num_examples or (known if known > 0 else None)
    self.numbered = {"class": names} if (names := _class_names(dataset)) else {}

  def fingerprint(self) -> str:
    """See `Readable.fingerprint`: of the types of the elements."""
    types = repr(sorted(self.dataset.element_spec.items())).encode()
    return fingerprint.counted(self.num_examples or "unknown number of", hashlib.sha256(types))

  def feature_kinds(self) -> dict[str, str]:
    """See `Readable.feature_kinds`."""
    spec = self.dataset.element_spec.items()
    return {n: f"{np.dtype(s.dtype.as_numpy_dtype).kind}{tuple(s.shape)}" for n, s in spec}

  def training_elements(self, plan: Plan, start: Start) -> Elements:
    """See `Readable.training_elements`."""
    position = start.position
    examples = self.dataset.enumerate().repeat()
    examples = examples.concatenate(_failing(examples.element_spec)).skip(position)
    batches = examples.batch(plan.global_batch_size, drop_remainder=True)

    def clock(at: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
      return at, tf.timestamp()

    def read(clocked: tuple[tf.Tensor, tf.Tensor], batch: tuple[tf.Tensor, Batch]) -> Element:
      at, began_s = clocked
      if position:
        _log_once(at == position, position, began_s)
      seeds = seeds_at(at + plan.example_rows(), seed=start.seed)
      step = plan.step(at, start)
      return *_padded(*batch, plan), seeds, step

    if position:
      logging.info("skipping %d examples of a stream, to continue where training stopped", position)
    # zip reads its parts in order, so the clock is read before the first batch, which skips.
    clocked = tf.data.Dataset.counter(position, plan.global_batch_size).map(as_written(clock))
    return tf.data.Dataset.zip((clocked, batches)), read

  def one_pass(self, plan: Plan, most: int) -> tuple[tf.data.Dataset, Callable[..., Batch]]:
    """See `Readable.one_pass`."""
    if most < 0 and self.endless:
      raise ConfigError(
        "the stream to evaluate is endless; set num_examples of its StreamSource to the length of "
        "one pass, or run.eval_steps to the number of batches."
      )

    def make(ids: tf.Tensor, features: Batch) -> Batch:
      return plan.completed(*_padded(ids, features, plan))

    return self.dataset.enumerate().batch(plan.global_batch_size).take(most), make


def _padded(ids: tf.Tensor, features: Batch, plan: Plan) -> tuple[Batch, tf.Tensor]:
  if ids.shape[0] is not None and plan.rows == range(ids.shape[0]):
    return features, ids
  rows = plan.row_numbers()
  real = rows < tf.size(ids, tf.int64)
  taken = tf.where(real, rows, 0)
  features = {name: tf.gather(value, taken) for name, value in features.items()}
  return features, tf.where(real, tf.gather(ids, taken), -1)


def _failing(element_spec: Any) -> tf.data.Dataset:
  """Returns one element that raises: `repeat` of an empty dataset ends, and this follows it."""

  def fail(unused: tf.Tensor) -> Any:
    element = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), element_spec)
    message = ["the stream has no examples; it must yield at least one in each pass."]
    return require(tf.constant(False), element, message)

  return tf.data.Dataset.range(1).map(as_written(fail))


def _log_once(now: tf.Tensor, count: int, began_s: tf.Tensor) -> None:
  def log(began_s: np.ndarray) -> np.bool_:
    seconds = time.time() - float(began_s)
    logging.info("skipped %d examples of the stream in %.3f s", count, seconds)
    return np.bool_(True)

  tf.cond(now, lambda: tf.numpy_function(log, [began_s], tf.bool), lambda: False)


def check_elements(element_spec: object) -> None:
  """Raises a ConfigError unless a stream's elements are dicts of dense tensors of static shape."""
  if not isinstance(element_spec, dict) or not element_spec:
    raise ConfigError(
      f"the stream's elements are {kind(element_spec)}; they must be dicts of feature name -> "
      "tensor, for example from dataset.map(lambda x, y: {'x': x, 'y': y})."
    )
  for name, spec in element_spec.items():
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.is_fully_defined():
      batched = isinstance(spec, tf.TensorSpec) and spec.shape.rank and spec.shape[0] is None
      raise ConfigError(
        f"feature {name!r} of the stream is {spec}; it must be a dense tensor of static shape: use "
        f"tf.ensure_shape, or pad it{', or dataset.unbatch() if it has batches' * bool(batched)}."
      )
  refuse_reserved("the stream", element_spec)
  weight = element_spec.get("weight", tf.TensorSpec([], tf.float32))
  if weight.dtype != tf.float32 or weight.shape.rank != 0:
    raise ConfigError(f"feature 'weight' of the stream is {weight}; it must be a float32 scalar.")


def _class_names(dataset: tf.data.Dataset) -> Sequence[str]:
  """Returns what Keras has named, also behind further steps."""
  own = getattr(dataset, "class_names", None)
  before = map(_class_names, dataset._inputs())  # noqa: SLF001
  return own or next(filter(None, before), ())


def _is_endless(dataset: tf.data.Dataset) -> bool:
  """Whether a data set is known to be endless, also behind steps that hide it, such as a filter."""
  known = int(dataset.cardinality())
  if known != tf.data.UNKNOWN_CARDINALITY:
    return known == tf.data.INFINITE_CARDINALITY
  kind_of_step, parts = type(dataset).__name__, dataset._inputs()  # noqa: SLF001
  if "Take" in kind_of_step or not parts:
    return False
  ends_early = "Zip" in kind_of_step or "DirectedInterleave" in kind_of_step
  return (all if ends_early else any)(map(_is_endless, parts))
