"""Makes trainers and evaluators from a config, for run, verify and tune.

recipe = Recipe(optimizer=keras.optimizers.Adam, global_batch_size=128)
trainer = recipe.trainer(task, strategy)
evaluator = recipe.evaluator(trainer)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
import tf_keras  # executed when something of it is used
from absl import logging

from loopwright import configurables
from loopwright.distribution import placement
from loopwright.errors import ConfigError
from loopwright.evaluator import Evaluator
from loopwright.graphs import randomness
from loopwright.graphs.aliases import AnySource, DatasetFn
from loopwright.host import lazy_keras
from loopwright.inputs import datasets
from loopwright.inputs.plan import Shard, padded_batch_size
from loopwright.inputs.sources import eval_sets, of_one_shape
from loopwright.models import models
from loopwright.observers import Observer, Reading
from loopwright.optimizers.adapters import Optimizers
from loopwright.options.groups import Evaluation, Gpus, Numerics
from loopwright.task import Task, preprocess_of
from loopwright.trainer import Trainer

"""A factory, or name -> factory for a task with several optimizers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(Evaluation):
  """The arguments of a trainer and an evaluator, except task and strategy.

  Attributes:
    optimizer, global_batch_size, seed, eager: see `Trainer`; `seed` also orders the examples.
    shuffle: False reads the training examples in source order.
    one_shape: of `Buckets`, read only the longest bucket.
    options: other options of `Trainer`; they override the config's bindings.
  """

  optimizer: Optimizers
  global_batch_size: int
  seed: int = 0
  shuffle: bool = True
  eager: bool = False
  one_shape: bool = False
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def trainer(
    self,
    task: Task,
    strategy: tf.distribute.Strategy,
    *,
    dataset_fn: DatasetFn | None = None,
    observers: Sequence[Observer] = (),
  ) -> Trainer:
    """Returns a new trainer (host).

    Args:
      task: the task; its model is built here if it has none.
      strategy: any `tf.distribute.Strategy`.
      dataset_fn: see `Trainer`; None reads the task's training data.
      observers: see `Trainer`; each is told what is read.
    """

    source = functools.cache(
      lambda: of_one_shape(task.source("train")) if self.one_shape else task.source("train")
    )

    def dataset(position: int, shard: Shard | None = None) -> tf.data.Dataset:
      return self._dataset(trainer, source(), observers, position, shard)

    place = placement.of(strategy)
    given = {
      "task": task, "strategy": strategy, "dataset_fn": dataset_fn or dataset,
      "optimizer": self.optimizer, "global_batch_size": self.global_batch_size,
      "eager": self.eager, "seed": self.seed, "observers": observers,
    }  # fmt: skip
    with place.cluster.blaming(lambda: 0):  # variables are broadcast
      trainer: Trainer = (place.trainer or Trainer)(
        **{**configurables.options(Trainer), **given, **self.options}
      )
    trainer.source = None if dataset_fn else source
    return trainer

  def evaluator(self, trainer: Trainer) -> Evaluator:
    """Returns an evaluator of the trainer's model on the task's evaluation data (host)."""
    task, strategy = trainer.task, trainer.strategy
    shares, batch_size = trainer.placement.row_shares, self.eval_batch_size
    batch_size = batch_size or self.global_batch_size
    rows = trainer.cluster.rows(padded_batch_size(batch_size, shares))
    sources = eval_sets(task.source("eval"))
    options: dict[str, Any] = {
      "global_batch_size": batch_size, "pad_multiple": shares, "rows": rows,
      "preprocess": preprocess_of(task), "steps": self.eval_steps,
    }  # fmt: skip
    made = {
      name: functools.partial(datasets.eval_dataset, source, **options)
      for name, source in sources.items()
    }
    make = trainer.placement.evaluator or Evaluator
    given = {
      "task": task, "strategy": strategy, "dataset": made, "ema": trainer.parts.ema,
      "global_step": trainer.global_step, "eager": trainer.eager,
    }  # fmt: skip
    evaluator: Evaluator = make(**{**configurables.options(Evaluator), **given})
    evaluator.sources = sources
    return evaluator

  def _dataset(
    self,
    trainer: Trainer,
    source: AnySource,
    observers: Sequence[Observer],
    position: int,
    shard: Shard | None,
  ) -> tf.data.Dataset:
    """Returns the training input from `position` on; in a cluster, this worker's rows."""
    task, rows = trainer.task, trainer.cluster.rows(trainer.padded_batch_size)
    read: dict[str, Any] = {
      "position": position, "seed": self.seed, "shuffle": self.shuffle, "rows": rows,
      "global_batch_size": self.global_batch_size,
    }  # fmt: skip
    for observer in observers:
      padded, multiple = trainer.padded_batch_size, trainer.batch_multiple
      observer.reads(
        Reading(source=source, padded_batch_size=padded, pad_multiple=multiple, **read)
      )
    with tf.init_scope():  # parameter servers make the dataset in a trace
      first_step = int(trainer.global_step.numpy())
    return datasets.train_dataset(
      source, pad_multiple=trainer.batch_multiple, preprocess=preprocess_of(task), shard=shard,
      first_step=first_step, **read,
    )  # fmt: skip


def made_task(task: Task | Callable[[], Task]) -> Task:
  """Returns the task, or what its factory returns; raises ConfigError if it is not a `Task`."""
  is_model = models.is_keras(task)  # which can be called too
  made = task if isinstance(task, Task) or is_model or not callable(task) else task()
  if not isinstance(made, Task):
    remedy = "lw.from_keras(model, x, y)" if is_model else "run.task = @YourTask()"
    raise ConfigError(
      f"run.task is a {type(made).__name__}; it must be a loopwright.Task: subclass Task, and "
      f"write {remedy}."
    )
  if hasattr(type(made), "training_step"):
    from loopwright.options import words

    for line in words.of_methods(type(made)):
      logging.warning("%s", line)
  return made


def set_globals(numerics: Numerics, gpus: Gpus = Gpus()) -> None:  # noqa: B008 (frozen)
  """Configures TensorFlow and both Keras versions for the whole process (host).

  Raises:
    ConfigError: Keras has another backend, or the GPUs cannot be used like that.
  """
  if keras.backend.backend() != "tensorflow":
    raise ConfigError(
      f"Keras's backend is {keras.backend.backend()!r}; it must be 'tensorflow': set KERAS_BACKEND "
      "to it, or backend in ~/.keras/keras.json."
    )
  if gpus != Gpus():
    from loopwright.distribution.gpus import configure

    configure(gpus)
  if numerics.tf32 is not None:
    tf.config.experimental.enable_tensor_float_32_execution(numerics.tf32)
  if (floatx := keras.config.floatx()) != "float32":  # of keras.json or the program
    logging.warning(
      "keras.config.floatx() is %r, which a run sets to float32: give layers dtype=%r",
      *(floatx, floatx),
    )
  keras.config.set_floatx("float32")
  randomness.seed_everything(numerics.seed)
  keras.config.set_dtype_policy(numerics.precision)
  lazy_keras.when_tf_keras_loads(
    lambda: tf_keras.mixed_precision.set_global_policy(numerics.precision)
  )
  if numerics.deterministic:
    tf.config.experimental.enable_op_determinism()
  if numerics.eager:
    tf.data.experimental.enable_debug_mode()  # so that preprocess() runs eagerly too
