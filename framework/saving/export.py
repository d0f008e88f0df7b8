"""Exports a SavedModel: a complete one or none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.ops import lookup_ops

from framework.backend import models
from framework.errors import ConfigError

if TYPE_CHECKING:
  from framework.task import Task

_FILES = {"saved_model.pb", "fingerprint.pb", "variables", "assets"}
"""What a SavedModel consists of; a kill may have left a part of it."""


def export(task: Task, directory: str, *, is_chief: bool = True) -> None:
  """Writes what `task.export_signature()` serves as a SavedModel (host).

  Signatures may use lookup tables and a `tf.Module` that are attributes of the task. A reader of
  `directory` always finds a complete export, except between the two renames that replace an older
  one: then it finds none.

  Args:
    task: with its model built. `export_signature` returns a `tf.function` with an input signature,
      served as "serving_default", or a dict of name -> `tf.function`.
    is_chief: False on other workers, which must call this too but keep nothing.

  Raises:
    ConfigError: a signature is not a `tf.function` with an input signature, or the export would
      replace something that is not a SavedModel.
  """
  signatures = _signatures(task)
  module = tf.Module()
  module.model = task.model
  # Keras 3 does not track the seeds of random layers, but an LSTM reads its own when it serves.
  module.variables_of_model = [models.raw(each) for each in models.all_variables(task.model)]
  module.held = [each for each in vars(task).values() if _is_served(each)]
  if not is_chief:
    with tempfile.TemporaryDirectory() as scratch:
      tf.saved_model.save(module, scratch, signatures=signatures)
    return
  directory = directory.rstrip("/")
  require_replaceable(directory)
  _mend(directory)
  tf.saved_model.save(module, f"{directory}.new", signatures=signatures)
  _swap(directory)


def require_replaceable(directory: str) -> None:
  """Raises a ConfigError if an export to `directory` would delete anything but an export (host)."""
  directory = directory.rstrip("/")
  for path in (directory, f"{directory}.old"):
    found = tf.io.gfile.listdir(path) if tf.io.gfile.isdir(path) else [path]
    is_export = {name.rstrip("/") for name in found} <= _FILES
    if os.path.islink(path) or (tf.io.gfile.exists(path) and not is_export):
      raise ConfigError(
        f"an export to {directory!r} would replace {path!r}, which is not a SavedModel in a folder "
        "of its own; choose another directory, or move it away."
      )


def _is_served(held: Any) -> bool:
  kinds = (tf.Module, lookup_ops.LookupInterface)
  return isinstance(held, kinds) and not models.is_keras(held)


def _signatures(task: Task) -> dict[str, Callable[..., Any]]:
  signature = task.export_signature()
  named = signature if isinstance(signature, Mapping) else {"serving_default": signature}
  for name, function in named.items():
    if getattr(function, "input_signature", None) is None:
      raise ConfigError(
        f"{type(task).__name__}.export_signature() returns {function!r} for {name!r}; it must be a "
        "tf.function with an input_signature: @tf.function(input_signature=[tf.TensorSpec(...)])."
      )
  return dict(named)


def _swap(directory: str) -> None:
  if tf.io.gfile.exists(directory):
    tf.io.gfile.rename(directory, f"{directory}.old")
  tf.io.gfile.rename(f"{directory}.new", directory)
  _mend(directory)


def _mend(directory: str) -> None:
  """Restores the old export if a kill came between the renames; removes all other remains."""
  if tf.io.gfile.exists(f"{directory}.old") and not tf.io.gfile.exists(directory):
    tf.io.gfile.rename(f"{directory}.old", directory)
  for remains in (f"{directory}.old", f"{directory}.new"):
    if tf.io.gfile.exists(remains):
      tf.io.gfile.rmtree(remains)
