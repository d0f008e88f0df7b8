"""Which checkpoints a folder has: their files, the complete ones, TensorFlow's state file."""

from __future__ import annotations

import os
import re

import tensorflow as tf
from google.protobuf import text_format
from tensorflow.python.training.checkpoint_state_pb2 import CheckpointState

from loopwright.host import files
from loopwright.run_folder import layout

PREFIX = layout.PREFIX
STATE = "checkpoint"
"""Name of TensorFlow's state file, written for other readers."""
_FILE = re.compile(rf"{PREFIX}-(\d+)[._](.*)")


def write_state(directory: str, names: list[str]) -> None:
  """Writes TensorFlow's state file, "checkpoint"; the last name is the newest.

  On return the folder's names are on disk, so what the file no longer names may be removed.
  """
  state = CheckpointState(model_checkpoint_path=names[-1], all_model_checkpoint_paths=names)
  path, text = os.path.join(directory, STATE), text_format.MessageToString(state)
  if not tf.io.gfile.exists(path) or files.read(path) != text.encode():
    files.atomic_write(path, text)
  else:
    files.sync(directory)


def list_checkpoints(directory: str) -> list[str]:
  """Returns the paths, without suffix, of all complete checkpoints, oldest first."""
  steps = sorted(step for step, suffix, _ in files_in(directory) if suffix == "index")
  return [os.path.join(directory, f"{PREFIX}-{step}") for step in steps]


def find(path: str) -> str | None:
  """Returns the checkpoint, without suffix, that a path means; None if there is none (host).

  Args:
    path: a checkpoint without suffix, or a run folder or a folder of checkpoints, which mean their
      newest one.
  """
  for folder in (os.path.join(path, layout.CHECKPOINTS), path):
    newest = tf.train.latest_checkpoint(folder) or next(reversed(list_checkpoints(folder)), None)
    if newest is not None:
      return newest
  return path if tf.io.gfile.exists(f"{path}.index") else None


def newest_line(directory: str) -> str:
  """Returns what the last line of a run that cannot write says of its newest checkpoint."""
  newest = list_checkpoints(directory)[-1:]
  saved = "".join(f"the newest complete checkpoint is {path}" for path in newest)
  return saved or "there is no complete checkpoint yet"


def files_in(directory: str) -> list[tuple[int, str, str]]:
  """Returns (step, suffix, name) of every file in `directory` that belongs to a checkpoint."""
  names = tf.io.gfile.listdir(directory) if tf.io.gfile.isdir(directory) else []
  matches = [_FILE.fullmatch(name) for name in names]
  return [(int(match[1]), match[2], match[0]) for match in matches if match]


def step_of(path: str) -> int:
  """Returns the step of a checkpoint's path."""
  return int(path.rpartition("-")[2])


def written_at(path: str) -> int | None:
  """Returns when a checkpoint was written, in ns, to the second; None if it does not exist."""
  try:
    return tf.io.gfile.stat(f"{path}.index").mtime_nsec
  except tf.errors.NotFoundError:
    return None


def write_with_the_chief(
  checkpoint: tf.train.Checkpoint, options: tf.train.CheckpointOptions | None = None
) -> None:
  """Does what the chief's `write` needs of every other worker, and keeps nothing (host)."""
  try:
    checkpoint.write(f"{files.IN_MEMORY}/{PREFIX}", options)
  finally:
    files.remove(files.IN_MEMORY)
