"""What the config in force says of a run, for tools that make its parts themselves.

configurables.parse(["configs/digits_cnn.gin"])
trainer = bound_recipe().trainer(made_task(bound("task")), strategy)
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from loopwright import configurables
from loopwright.builder import Recipe, made_task
from loopwright.errors import ConfigError
from loopwright.options import BatchSize, Made, names_of, taken
from loopwright.run_folder import assets, history, layout, places
from loopwright.run_folder.checkpoints import CheckpointManager
from loopwright.running import defaults
from loopwright.strategies import factories, placement
from loopwright.task import Task
from loopwright.trainer import Trainer


def bound(parameter: str) -> Any:
  """Returns the value that the current config binds to a parameter of `run`, else its default."""
  return configurables.bound("run", parameter, defaults()[parameter])


def bound_group(group: type[Made], **more: Any) -> Made:
  """Returns a group of `run`'s options as the current config binds them, except for `more`."""
  names = names_of(group) & defaults().keys() - more.keys()
  return taken(group, {name: bound(name) for name in names}, **more)


def bound_recipe(replicas: int = 1) -> Recipe:
  """Returns the recipe that the current config binds to `run`, on this number of replicas.

  It is never eager.
  """
  return bound_group(Recipe, global_batch_size=bound_group(BatchSize).on(replicas), eager=False)


def bound_mesh() -> tuple[Callable[[], tf.distribute.Strategy] | None, int]:
  """Returns what makes the mesh of the current config, on logical CPUs, and its size.

  The maker is None if the strategy is another.
  """
  name = "model_parallel"
  if name not in configurables.bindings().get("run.strategy", ""):
    return None, 1
  sizes = configurables.bound(name, "mesh", {})
  size = math.prod(sizes.values())

  def make() -> tf.distribute.Strategy:
    return placement.made(functools.partial(bound("strategy"), devices=factories.split_cpu(size)))

  return make, size


def restored(model_dir: str) -> Task:
  """Returns the task of a run folder, with the weights of its newest checkpoint (host).

  Uses moving averages if the run has them. For a task's own commands, such as
  `python -m loopwright.tasks.samples`; runs on the default device.

  Raises:
    ConfigError: the folder has no run, or no complete checkpoint of it.
  """
  return restored_trainer(model_dir)[0].task


def restored_trainer(model_dir: str) -> tuple[Trainer, str]:
  """Returns the trainer of a run folder, as `restored` does its task, and the digest of its assets.

  Raises:
    ConfigError: the folder has no run, or no complete checkpoint of it.
  """
  model_dir = places.copied(model_dir)
  configurables.parse([os.path.join(model_dir, layout.CONFIG)])
  task, strategy = made_task(bound("task")), factories.default()
  keras.config.set_dtype_policy(bound("precision"))
  cluster = placement.of(strategy).cluster
  learned = assets.provide(
    task, model_dir=model_dir, cluster=cluster, training=False, timeout_s=0.0
  )
  recipe = bound_recipe()
  optimizer = task.own_optimizer or recipe.optimizer
  trainer = dataclasses.replace(recipe, optimizer=optimizer).trainer(task, strategy)
  directory = os.path.join(model_dir, layout.CHECKPOINTS)
  known = history.starts(model_dir)  # none, if only what is read here was copied
  manager = CheckpointManager(
    trainer=trainer, directory=directory, experiment={}, assets=learned,
    starts=(lambda: known) if known else None,
  )  # fmt: skip
  if not manager.restore_newest():
    raise ConfigError(f"there is no complete checkpoint in {directory!r}; train first.")
  if trainer.parts.ema is not None:
    trainer.parts.ema.swap()
  return trainer, learned
