"""What is saved, when, and how a run finds the newest checkpoint that is whole."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from framework.errors import ConfigError
from framework.trainer import Trainer

PREFIX = "ckpt"
_DAMAGE = (
  tf.errors.DataLossError,
  tf.errors.NotFoundError,
  tf.errors.OutOfRangeError,
  tf.errors.InvalidArgumentError,
  tf.errors.UnknownError,
  tf.errors.InternalError,
)


class CheckpointManager(tf.train.CheckpointManager):
  """TensorFlow's manager, which also survives a torn checkpoint and refuses a foreign one.

  A checkpoint exists once its index file does, which TensorFlow writes last; the newest is found
  by looking at the files, so a lost or damaged `checkpoint` state file costs nothing.
  """

  def __init__(
    self,
    *,
    trainer: Trainer,
    directory: str,
    experiment: Mapping[str, str],
    every_steps: int | None = None,
    keep: int = 3,
  ) -> None:
    """Names what is saved; reads nothing yet.

    Args:
      trainer: whose state to save and restore.
      directory: `<model_dir>/checkpoints`.
      experiment: what must be the same on restore (such as the task's name), saved alongside.
      every_steps: interval for the controller's periodic saves.
      keep: how many to keep.
    """
    self._trainer, self._experiment = trainer, dict(experiment)
    self._every_steps, self._saved_step = every_steps, 0
    labels = {k: tf.Variable(v, trainable=False) for k, v in experiment.items()}
    checkpoint = tf.train.Checkpoint(**trainer.checkpoint_items(), experiment=labels)
    _repair_state(directory)
    super().__init__(
      checkpoint,
      directory,
      max_to_keep=keep,
      checkpoint_name=PREFIX,
      step_counter=trainer.global_step,
      checkpoint_interval=every_steps,
    )

  def save(
    self,
    checkpoint_number: int | None = None,
    check_interval: bool = True,
    options: tf.train.CheckpointOptions | None = None,
  ) -> str | None:
    """Saves `ckpt-<global step>` and drops the oldest beyond `keep` (host).

    Returns:
      The path, or None where there is nothing new: the same step as the last save or restore, or,
      with `check_interval`, fewer than `every_steps` steps after it.
    """
    del checkpoint_number
    step = int(self._trainer.global_step.numpy())
    due = self._saved_step + (self._every_steps or 0) if check_interval else 0
    if step == self._saved_step or step < due:
      return None
    path = super().save(checkpoint_number=step, check_interval=False, options=options)
    self._saved_step = step
    return path

  def restore_or_initialize(self) -> str | None:
    """Restores the newest checkpoint that is whole; a damaged one is reported and passed over.

    Returns:
      Its path, or None where there is none at all.

    Raises:
      ConfigError: the checkpoint belongs to another experiment, or every one is damaged.
    """
    paths = list_checkpoints(self.directory)
    for path in reversed(paths):
      try:
        self.restore(path)
      except _DAMAGE as error:
        logging.error("checkpoint %s is damaged (%s); trying the one before", path, _line(error))
        continue
      return path
    if paths:
      raise ConfigError(
        f"all {len(paths)} checkpoints in {self.directory} are damaged; move the folder away to "
        "start afresh, or bring a good copy back."
      )
    return None

  def restore(self, path: str) -> None:
    """Restores one checkpoint into the trainer, and the input's position with it (host).

    Raises:
      ConfigError: it belongs to another task or another model.
      tf.errors.OpError: it is damaged.
    """
    reader = tf.train.load_checkpoint(path)
    self._refuse_foreign(path, reader)
    try:
      with self._trainer.strategy.scope():
        self.checkpoint.restore(path).assert_existing_objects_matched()
    except (AssertionError, ValueError) as error:
      raise ConfigError(
        f"checkpoint {path} does not fit this model: {_line(error)}; choose another --model_dir, "
        "or the config that this one was trained with."
      ) from error
    self._trainer.reset_input()
    self._saved_step = int(self._trainer.global_step.numpy())

  def _refuse_foreign(self, path: str, reader: Any) -> None:
    for name, value in self._experiment.items():
      key = f"experiment/{name}/.ATTRIBUTES/VARIABLE_VALUE"
      if not reader.has_tensor(key):
        raise ConfigError(
          f"checkpoint {path} was not written by this framework; choose another --model_dir."
        )
      saved = reader.get_tensor(key).decode()
      if saved != value:
        raise ConfigError(
          f"checkpoint {path} belongs to another experiment: its {name} is {saved!r}, this one's "
          f"is {value!r}; choose another --model_dir."
        )


def list_checkpoints(directory: str) -> list[str]:
  """Returns the paths (without suffix) of all complete checkpoints, oldest first."""
  found = []
  for index in glob.glob(os.path.join(glob.escape(directory), f"{PREFIX}-*.index")):
    match = re.search(rf"{PREFIX}-(\d+)\.index$", index)
    if match:
      found.append((int(match.group(1)), index.removesuffix(".index")))
  return [path for _, path in sorted(found)]


def _repair_state(directory: str) -> None:
  """Makes TensorFlow's `checkpoint` state file agree with the files that are there."""
  paths = list_checkpoints(directory)
  state = tf.train.get_checkpoint_state(directory) if paths else None
  if paths and (state is None or list(state.all_model_checkpoint_paths) != paths):
    tf.compat.v1.train.update_checkpoint_state(
      directory, paths[-1], all_model_checkpoint_paths=paths
    )


def _line(error: Exception) -> str:
  text = getattr(error, "message", None) or str(error)
  return text.strip().splitlines()[0][:300] if text.strip() else type(error).__name__
