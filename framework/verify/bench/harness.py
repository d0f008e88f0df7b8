"""The user's task as `run` makes it: a trainer with its own input, from the task's constructor on.

Where bench.py feeds batches of its own, one step at a time, this one trains in loops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from framework.backend import randomness
from framework.task import Task
from framework.trainer import Trainer
from framework.verify.bench import bench
from framework.verify.bench.bench import Rows, Subject

TIMES = ("input_wait_s", "examples_per_second")
"""Metrics that no two runs share."""


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

  options = {**subject.options, **options}
  recipe = dataclasses.replace(subject, global_batch_size=rows, options=options)
  return recipe.trainer(made, strategy)


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
  bench.stepper(trainer)(bench.distributed(trainer.strategy, batch))


def batches(subject: Subject, task: Task, *, rows: int, position: int) -> Iterator[Rows]:
  """Yields training batches from a position on, as a process would that starts there (host)."""
  randomness.seed_everything(subject.seed)
  return subject.dataset(task, rows, position=position).as_numpy_iterator()
