"""The user's task as `run` makes it: a trainer with its own input, from the task's constructor on.

Where bench.py feeds batches of its own, one step at a time, this one trains in loops.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from framework import configurables, inputs, local_state, randomness
from framework.task import Task
from framework.trainer import Trainer
from framework.verify.bench import Rows, Subject

TIMES = ("input_wait_s", "examples_per_second")
"""Metrics that no two runs share."""


def rows_for(subject: Subject) -> int:
  """Returns a batch that up to 3 replicas and the config's micro-batches divide."""
  micro = subject.accumulation_steps
  return 6 * micro if micro > 1 else 12


def make_trainer(
  subject: Subject,
  strategy: tf.distribute.Strategy,
  *,
  rows: int,
  task: Task | None = None,
  **options: Any,
) -> Trainer:
  """Builds a trainer in the order in which `run` does: the task, then the seed, then the model.

  Args:
    subject: what to verify.
    strategy: where.
    rows: the global batch.
    task: whose model is not built yet; None makes one.
    options: of `Trainer`, in place of the config's.
  """
  made = task or subject.fresh_task()
  randomness.seed_everything(subject.seed)

  def dataset(position: int) -> tf.data.Dataset:
    return _dataset(subject, made, rows, position, trainer.batch_multiple)

  trainer: Trainer = configurables.configured(Trainer)(
    task=made,
    strategy=strategy,
    dataset_fn=dataset,
    global_batch_size=rows,
    optimizer=subject.optimizer,
    seed=subject.seed,
    **{**subject.trainer, **options},
  )
  return trainer


def train(trainer: Trainer, steps: int) -> dict[str, float]:
  """Trains one loop; returns its metrics but for times (host)."""
  metrics = trainer.train(tf.constant(steps))
  return {name: value for name, value in metrics.items() if name not in TIMES}


def step(trainer: Trainer, batch: Rows) -> None:
  """Takes one compiled step on a global batch, without an input pipeline (host).

  Args:
    trainer: under any strategy of this process.
    batch: whose rows divide by the number of replicas.
  """
  strategy = trainer.strategy
  share = len(batch["weight"]) // strategy.num_replicas_in_sync

  def part(context: Any, value: Any) -> tf.Tensor:
    return tf.constant(value[context.replica_id_in_sync_group * share :][:share])

  parts = {
    name: strategy.experimental_distribute_values_from_function(
      lambda context, value=value: part(context, value)
    )
    for name, value in batch.items()
  }

  def train_step(parts: Any) -> None:
    trainer.train_step(iter([parts]))
    local_state.average(strategy, trainer.task.model)

  (train_step if trainer.eager else tf.function(train_step))(parts)


def batches(subject: Subject, task: Task, *, rows: int, position: int) -> Iterator[Rows]:
  """Yields training batches from a position on, as a process would that starts there (host)."""
  randomness.seed_everything(subject.seed)
  return _dataset(subject, task, rows, position, 1).as_numpy_iterator()


def _dataset(subject: Subject, task: Task, rows: int, position: int, multiple: int) -> Any:
  preprocess = task.preprocess if type(task).preprocess is not Task.preprocess else None
  return inputs.train_dataset(
    task.source("train"),
    global_batch_size=rows,
    pad_multiple=multiple,
    seed=subject.seed,
    position=position,
    preprocess=preprocess,
    shuffle=subject.shuffle,
  )
