"""What the config in force says of a run, for tools that make its parts themselves; trained runs.

run = loopwright.load("runs/digits")
run.model.predict(images)

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
from loopwright.distribution import placement
from loopwright.errors import ConfigError
from loopwright.graphs.aliases import Model
from loopwright.host import files
from loopwright.optimizers.adapters import Optimizers
from loopwright.options.groups import BatchSize, Made, names_of, taken
from loopwright.run_folder import assets, history, layout, places
from loopwright.run_folder.checkpoints import CheckpointManager
from loopwright.runs.builder import Recipe, made_task
from loopwright.runs.runner import defaults
from loopwright.strategies import factories
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
  """A trained run, as `load` returns it.

  Attributes:
    task: with its assets and its model; `task.source("eval")` has its data.
    model: the model, with the trained weights.
    step: the number of steps that they were trained for.
    averaged: whether they are the moving averages of the weights.
  """

  task: Task
  model: Model
  step: int
  averaged: bool


def load(
  model_dir: str | os.PathLike[str],
  *,
  checkpoint: str | None = None,
  averages: bool = True,
  task: Task | None = None,
  optimizer: Optimizers = keras.optimizers.Adam,
) -> Loaded:
  """Returns the task, model and weights of a run folder, on the default device (host).

  A config is in force only inside of this call, so it changes nothing for what comes after it.

  Args:
    model_dir: the run folder, or its URL. Its task is that of its config, whose modules are looked
      for in the working directory.
    checkpoint: None for the newest; or as `run.checkpoint`, such as "runs/x/best".
    averages: the moving averages of the weights, if the run has them, as evaluations use; False for
      the weights themselves.
    task, optimizer: of a run that Python started, what `loopwright.run` got; a task of `from_keras`
      has its own optimizer.

  Raises:
    ConfigError: the folder has no run, no complete checkpoint of it, or no config.
  """
  policy = keras.config.dtype_policy()
  with configurables.apart():
    try:
      trainer = restored_trainer(model_dir, checkpoint=checkpoint, task=task, optimizer=optimizer)[
        0
      ]
    finally:
      keras.config.set_dtype_policy(policy)
  if trainer.parts.ema is not None and not averages:
    trainer.parts.ema.swap()
  return Loaded(
    task=trainer.task, model=trainer.task.model, step=int(trainer.global_step.numpy()),
    averaged=averages and trainer.parts.ema is not None,
  )  # fmt: skip


def restored_trainer(
  model_dir: str | os.PathLike[str],
  *,
  checkpoint: str | None = None,
  task: Task | None = None,
  optimizer: Optimizers = keras.optimizers.Adam,
) -> tuple[Trainer, str]:
  """Returns the trainer of a run folder, and the digest of its assets; see `load`.

  It has the moving averages if the run has them. The run's config stays in force.
  """
  model_dir = places.local_copy(places.path_of(model_dir))
  recipe = Recipe(optimizer=optimizer, global_batch_size=1)
  if task is None:
    path = os.path.join(model_dir, layout.CONFIG)
    if not os.path.exists(path) or b"run.task" not in files.read(path):
      raise ConfigError(
        f"{model_dir!r} has no {layout.CONFIG} with a task: it is no run folder, Python started "
        "the run, or the file is damaged; correct the path, or give what loopwright.run got: "
        "load(..., task=..., optimizer=...)."
      )
    configurables.parse([path])
    keras.config.set_dtype_policy(bound("precision"))
    task, recipe = bound("task"), bound_recipe()
  task = made_task(task)
  strategy = factories.default()
  learned = assets.provide(
    task, model_dir=model_dir, cluster=placement.of(strategy).cluster, training=False
  )
  optimizer = task.own_optimizer or recipe.optimizer
  trainer = dataclasses.replace(recipe, optimizer=optimizer).trainer(task, strategy)
  directory = os.path.join(model_dir, layout.CHECKPOINTS)
  known = history.starts(model_dir)  # none, if only what is read here was copied
  manager = CheckpointManager(
    trainer=trainer, directory=directory, experiment={}, assets=learned,
    starts=(lambda: known) if known else None,
  )  # fmt: skip
  if checkpoint is not None:
    manager.restore_from(places.local_copy(checkpoint))
  elif not manager.restore_or_initialize():
    raise ConfigError(f"there is no complete checkpoint in {directory!r}; train first.")
  if trainer.parts.ema is not None:
    trainer.parts.ema.swap()
  return trainer, learned
