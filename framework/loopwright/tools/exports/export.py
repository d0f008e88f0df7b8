"""Exports a SavedModel: complete, or absent."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.ops import lookup_ops

from loopwright.errors import ConfigError
from loopwright.host import files
from loopwright.models import models

if TYPE_CHECKING:
  from loopwright.task import Task

_FILES = {"saved_model.pb", "fingerprint.pb", "variables", "assets"}
"""What a SavedModel consists of."""
_EXTRA = "assets.extra"
MARK = f"{_EXTRA}/loopwright"
"""File in an export that says who wrote it; TensorFlow leaves that folder to others."""
_ABANDONED_S = 300.0
"""Without locks: an unfinished export that has not changed for so long is a killed process's."""


def export(task: Task, directory: str, *, is_chief: bool = True) -> None:
  """Writes what `task.export_signature()` serves as a SavedModel (host).

  Signatures may use lookup tables and networks that are attributes of the task. A reader of
  `directory` always finds a complete export, except between the two renames that replace an older
  one: then it finds none. A power loss leaves the old one or the new one.

  Args:
    task: with its model built. `export_signature` returns a `tf.function` with an input signature,
      served as "serving_default", or a dict of name -> `tf.function`.
    is_chief: False on other workers, which must call this too but keep nothing.

  Raises:
    ConfigError: a signature is not a `tf.function` with an input signature, or the export would
      replace something that is not an export.
  """
  served = signatures(task)
  module = tf.Module()
  module.model = task.model
  # Keras 3 does not track the seeds of random layers, but an LSTM reads its own when it serves.
  networks = [task.model, *filter(models.is_keras, vars(task).values())]  # with frozen parts
  module.variables_of_model = [models.raw(v) for one in networks for v in models.all_variables(one)]
  module.held = [each for each in vars(task).values() if _is_served(each)]
  if is_chief:
    directory = directory.rstrip("/")
    require_replaceable(directory)
    mend(directory)
    new = _beside(directory, "new")
  else:
    new = files.IN_MEMORY
  try:
    with _in_progress(new) as require_still:
      tf.saved_model.save(module, new, signatures=served)
      if is_chief:
        require_still()
        _mark(new)
        files.sync_tree(new)
        _swap(new, directory)
  finally:
    files.remove(new)


def require_replaceable(directory: str) -> None:
  """Raises a ConfigError if an export to `directory` would replace anything else (host)."""
  directory = directory.rstrip("/")
  empty = tf.io.gfile.isdir(directory) and not tf.io.gfile.listdir(directory)
  free = not tf.io.gfile.exists(directory) and not os.path.islink(directory)
  if not free and not empty and not _is_export(directory):
    raise ConfigError(
      f"an export to {directory!r} would replace what is there, which is not an export of this "
      "framework and nothing else; choose another directory, or move it away."
    )


def _is_served(held: Any) -> bool:
  kinds = (tf.Module, lookup_ops.LookupInterface)
  return isinstance(held, kinds) and not models.is_keras(held)


def signatures(task: Task) -> dict[str, Callable[..., Any]]:
  """Returns name -> what a task serves; raises ConfigError if it is no such function (host)."""
  signature = task.export_signature()
  named = signature if isinstance(signature, Mapping) else {"serving_default": signature}
  for name, function in named.items():
    if getattr(function, "input_signature", None) is None:
      raise ConfigError(
        f"{type(task).__name__}.export_signature() returns {function!r} for {name!r}; it must be a "
        "tf.function with an input_signature: @tf.function(input_signature=[tf.TensorSpec(...)])."
      )
  return dict(named)


def _beside(directory: str, kind: str) -> str:
  return f"{directory}.{kind}-{uuid.uuid4().hex}"


def _is_export(path: str) -> bool:
  """Whether a folder, not a link to one, is an export of this framework and nothing more."""
  if os.path.islink(path) or not tf.io.gfile.exists(os.path.join(path, MARK)):
    return False
  found = {
    f"{folder}{name}".rstrip("/") for folder in ("", f"{_EXTRA}/") for name in _names(path, folder)
  }
  return found <= {*_FILES, _EXTRA, MARK}


def _names(path: str, folder: str) -> list[str]:
  return list(tf.io.gfile.listdir(os.path.join(path, folder)))


def _mark(folder: str) -> None:
  tf.io.gfile.makedirs(os.path.join(folder, _EXTRA))
  with tf.io.gfile.GFile(os.path.join(folder, MARK), "w") as file:
    file.write("Exported by Loopwright, which may replace it.\n")


def _swap(new: str, directory: str) -> None:
  if tf.io.gfile.exists(directory) and _names(directory, ""):
    tf.io.gfile.rename(directory, _beside(directory, "old"))
  files.remove(directory)  # only if it is empty
  tf.io.gfile.rename(new, directory)
  files.sync(os.path.dirname(directory) or ".")
  mend(directory)


def mend(directory: str) -> None:
  """Removes what killed exports to `directory` left, or restores the old one from it (host)."""
  for kind, remains in sorted(_remains(directory), reverse=True):  # old ones first
    if kind == "old" and not tf.io.gfile.exists(directory):
      tf.io.gfile.rename(remains, directory)
    elif kind == "old" or _is_abandoned(remains):
      doomed = _beside(directory, "new")  # a part of an old one would no longer pass for an export
      tf.io.gfile.rename(remains, doomed)
      files.remove(doomed)


@contextlib.contextmanager
def _in_progress(folder: str) -> Iterator[Callable[[], None]]:
  """Locks a new folder, if it is local, so that others can tell whether its process lives.

  Gives what raises a FileNotFoundError if the folder was removed since: TensorFlow makes it again.
  """
  tf.io.gfile.makedirs(folder)
  if not files.is_local(folder):
    yield lambda: None
    return
  descriptor = os.open(folder, os.O_RDONLY)

  def require_still() -> None:
    if not files.is_still(folder, descriptor):
      raise FileNotFoundError(errno.ENOENT, "removed while an export was written to it", folder)

  try:
    files.lock(descriptor)
    yield require_still
  finally:
    os.close(descriptor)


def _is_abandoned(folder: str) -> bool:
  if files.is_local(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    try:
      if files.lock(descriptor, wait=False):
        return True
    except BlockingIOError:
      return False
    finally:
      os.close(descriptor)
  return time.time() - _changed(folder) > _ABANDONED_S


def _remains(directory: str) -> Iterator[tuple[str, str]]:
  """Yields (kind, path) of what exports to `directory` left or still write beside it."""
  parent, name = os.path.split(directory)
  for found in tf.io.gfile.listdir(parent or ".") if tf.io.gfile.isdir(parent or ".") else ():
    path = os.path.join(parent, found.rstrip("/"))
    match = re.fullmatch(rf"{re.escape(name)}\.(old|new)-[0-9a-f]{{32}}", found.rstrip("/"))
    if match and not os.path.islink(path) and (match[1] == "new" or _is_export(path)):
      yield match[1], path


def _changed(folder: str) -> float:
  """Returns when a file in a folder was last written, in seconds since the epoch."""
  found = [
    os.path.join(parent, name) for parent, _, names in tf.io.gfile.walk(folder) for name in names
  ]
  return max((tf.io.gfile.stat(path).mtime_nsec / 1e9 for path in [folder, *found]), default=0.0)
