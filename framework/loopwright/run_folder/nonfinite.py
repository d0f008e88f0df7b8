"""The state before a step with a NaN or an infinity, and the report of it, in a run folder."""

from __future__ import annotations

import os

import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.host import files
from loopwright.run_folder import layout
from loopwright.run_folder.checkpoint_files import write_with_the_chief

FOLDER = layout.NONFINITE
_STATE, _REPORT = "before", "report.txt"


def save(checkpoint: tf.train.Checkpoint, model_dir: str, *, is_chief: bool = True) -> str:
  """Writes the state before the bad step, replaces an earlier one, returns its path (host).

  Every worker of a cluster must call it; only the chief's files are kept.
  """
  folder = os.path.join(model_dir, FOLDER)
  path = os.path.join(folder, _STATE)
  if is_chief:
    files.remove(os.path.join(folder, _REPORT))  # of the earlier state
    checkpoint.write(path)
    files.sync_tree(folder)
  else:
    write_with_the_chief(checkpoint)
  return path


def save_report(report: object, model_dir: str) -> None:
  """Writes the table into the same folder (host, chief only)."""
  files.atomic_write(os.path.join(model_dir, FOLDER, _REPORT), f"{report}\n")


def saved_state(model_dir: str) -> str:
  """Returns the path of the state that `save` wrote.

  Raises:
    ConfigError: there is none.
  """
  path = os.path.join(model_dir, FOLDER, _STATE)
  if not tf.io.gfile.exists(f"{path}.index"):
    raise ConfigError(
      f"no step to replay in {os.path.join(model_dir, FOLDER)}; a run with run.actions = "
      "[@StopOnNonFinite()] saves one there when it meets NaN or infinity."
    )
  return path
