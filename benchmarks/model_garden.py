"""The logs of a Model Garden task, step by step, in its own trainer and in this loop.

Both begin with the same weights; tests/tasks/test_model_garden.py compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
import tf_keras

from loopwright import Task, Trainer
from loopwright.inputs import datasets
from loopwright.tasks.model_garden import ModelGarden, garden_optimizer


def theirs(
  experiment: Any, make_task: Callable[[], Any], strategy: tf.distribute.Strategy
) -> Iterator[dict[str, float]]:
  """Yields the logs of the Garden's own trainer, one per step; it makes the optimizer itself."""
  from official.core import base_trainer

  tf_keras.utils.set_random_seed(0)
  with strategy.scope():
    task = make_task()
    model = task.build_model()
    config = experiment.trainer.optimizer_config
    trainer = base_trainer.Trainer(
      experiment, task, model=model, optimizer=task.create_optimizer(config), evaluate=False
    )
  while True:
    logs = trainer.train(tf.constant(1))
    yield {"loss": logs.pop("training_loss"), **logs}


def ours(
  experiment: Any, make_task: Callable[[], Any], strategy: tf.distribute.Strategy
) -> Iterator[dict[str, float]]:
  """Yields the logs of this loop, one per step, with the same optimizer and examples."""
  trainer = trainer_of(ModelGarden(task=make_task), experiment, strategy)
  while True:
    yield trainer.train(tf.constant(1))


def trainer_of(task: Task, experiment: Any, strategy: tf.distribute.Strategy) -> Trainer:
  """Returns a trainer of an experiment in this loop, with the initial weights of `theirs`."""
  size = experiment.task.train_data.global_batch_size
  tf_keras.utils.set_random_seed(0)
  trainer = Trainer(
    task=task, strategy=strategy, global_batch_size=size,
    optimizer=lambda: garden_optimizer(experiment=experiment),
    dataset_fn=lambda position: datasets.train_dataset(
      task.source("train"), global_batch_size=size, pad_multiple=trainer.batch_multiple,
      position=position,
    ),
  )  # fmt: skip
  return trainer
