"""A Trainer as `run` makes it, with its own input, trained in loops.

bench.py instead feeds prepared batches, one step at a time.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from loopwright.graphs import randomness
from loopwright.task import Task
from loopwright.tools.verify.bench.bench import Subject, numbers
from loopwright.trainer import Trainer

TIMES = ("input_wait_s", "examples_per_second")
"""Metrics that differ in every run."""


def make_trainer(subject: Subject, task: Task, strategy: Any, **options: Any) -> Trainer:
  """Builds a trainer in the same order as `run`: the task, whose model comes last, then the seed.

  `options` of `Trainer` replace the config's.
  """
  randomness.seed_everything(subject.seed)
  options = {**subject.options, **options}
  rows = subject.divisible_rows
  recipe = dataclasses.replace(subject, global_batch_size=rows, one_shape=True, options=options)
  return recipe.trainer(task, strategy)


def train(trainer: Trainer, steps: int) -> dict[str, float]:
  """Trains one loop; returns its metrics except times (host)."""
  metrics = trainer.train(tf.constant(steps))
  return numbers({name: value for name, value in metrics.items() if name not in TIMES})
