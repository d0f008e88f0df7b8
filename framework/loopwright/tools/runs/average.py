"""`average(["runs/a", "runs/b"], "runs/soup")`: the mean of the weights of runs.

Wortsman et al., "Model soups" (2022): weights that were fine-tuned from the same start, with other
options, average well. Of one run whose weights are averaged already (`weight_averaging`) it makes a
model with statistics of batch normalisation that fit.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.graphs.aliases import Layer
from loopwright.models import models
from loopwright.optimizers.ema import Ema
from loopwright.run_folder import layout
from loopwright.run_folder.checkpoints import CheckpointManager
from loopwright.runs import from_config as runs
from loopwright.runs import start_record
from loopwright.task import Task
from loopwright.trainer import Trainer


def average(folders: Sequence[str], to: str, *, batches: int = 100) -> str:
  """Writes a run folder with the mean of the weights of runs; returns a line about it (host).

  Of each run these are the weights that it evaluates, at its newest checkpoint. Its config, assets
  and the state of its optimizer are those of the first.

  Args:
    to: a folder that does not exist.
    batches: so many batches of the first run's training data give batch normalisation its
      statistics: the means over these batches, at the new weights.

  Raises:
    ConfigError: `to` exists, a folder has no run, or their models differ.
  """
  if os.path.exists(to):
    raise ConfigError(f"to={to!r} exists; give a new folder.")
  total = [np.zeros([], np.float64)]
  for folder in folders[1:]:
    total = _sum(total, runs.restored_trainer(folder)[0], folders[0], folder)
  trainer, learned = runs.restored_trainer(folders[0])
  total = _sum(total, trainer, folders[0], folders[-1])
  for variable, value in zip(_floating(trainer), total, strict=True):
    variable.assign(tf.cast(value / len(folders), variable.dtype))
  told = _with_statistics(trainer, batches)
  if trainer.parts.ema is not None:
    Ema.restart(trainer.parts.ema)  # schedule-free ones too: their mean is in the variables
  _write(trainer, learned, folders[0], to)
  step = int(trainer.global_step.numpy())
  return f"{to}: the mean of {len(folders)} run{'s' * (len(folders) > 1)}, at step {step}{told}"


def _sum(total: Sequence[np.ndarray], trainer: Trainer, one: str, other: str) -> list[np.ndarray]:
  """Adds the weights of a run to a sum, float64."""
  own = [variable.numpy().astype(np.float64) for variable in _floating(trainer)]
  if len(total) == 1 and total[0].ndim == 0:
    return own
  if [value.shape for value in own] != [value.shape for value in total]:
    raise ConfigError(
      f"the models of {one!r} and {other!r} have other variables; average runs of one model."
    )
  return [a + b for a, b in zip(total, own, strict=True)]


def _floating(trainer: Trainer) -> list[tf.Variable]:
  raw = map(models.raw, models.all_variables(trainer.task.model))
  return [variable for variable in raw if variable.dtype.is_floating]


def _with_statistics(trainer: Trainer, batches: int) -> str:
  """Gives batch normalisation the statistics of the new weights; returns what to say of it."""
  task = trainer.task
  layers: list[Layer] = [
    layer
    for layer in models.layers(task.model)
    if "BatchNormalization" in type(layer).__name__ and layer.trainable
  ]
  if not layers:
    return ""
  if type(task).train_step is not Task.train_step:
    return (
      f"; the statistics of batch normalisation are means of the runs', as {type(task).__name__} "
      "has a train_step of its own: train on from it (run.warm_start) to renew them"
    )
  held, iterator = [layer.momentum for layer in layers], trainer.make_iterator()
  for number in range(batches):
    for layer in layers:
      layer.momentum = number / (number + 1)  # so each batch counts alike
    batch = next(iterator)
    with trainer.parts.forward_pass(trainer.parts.key(number), batch):
      task.forward(batch, training=True)
  for layer, momentum in zip(layers, held, strict=True):
    layer.momentum = momentum
  return f"; batch normalisation has the statistics of {batches} batches"


def _write(trainer: Trainer, learned: str, one: str, to: str) -> None:
  """Writes the checkpoint with what its evaluation needs."""
  os.makedirs(to)
  shutil.copy(os.path.join(one, layout.CONFIG), to)
  if os.path.isdir(own := os.path.join(one, layout.ASSETS)):
    shutil.copytree(own, os.path.join(to, layout.ASSETS))
  directory = os.path.join(to, layout.CHECKPOINTS)
  labels = start_record.experiment(trainer)
  manager = CheckpointManager(
    trainer=trainer, directory=directory, experiment=labels, assets=learned
  )
  manager.save()
  manager.wait()
