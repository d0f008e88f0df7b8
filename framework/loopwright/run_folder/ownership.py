"""One run at a time trains in a folder: it locks owner.lock, and owner.json says who it is.

The lock ends with its process. Processes that only read a run, or append an evaluation to its log,
own nothing.

Before each write a process looks whether the folder at its path is still the run's: an owner,
whether owner.json is the file that it wrote. A folder that was removed, moved or replaced in the
middle ends the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import filelock
import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.host import files, redaction
from loopwright.run_folder import layout

PATIENCE_S = 1.0
"""Seconds to wait for the lock: `loopwright ls` takes it for a moment."""


class Owner:
  """The ownership of one folder by this process; see `owned`."""

  def __init__(self, model_dir: str) -> None:
    """Owns nothing yet."""
    self._model_dir, self._path = model_dir, os.path.join(model_dir, layout.OWNER)
    self._record: dict[str, Any] = {
      "host": platform.node(),
      "process": os.getpid(),
      "started": time.strftime("%Y-%m-%d %H:%M:%S"),
      "command": redaction.command()[:300],
      "token": uuid.uuid4().hex,
    }
    lock = os.path.join(model_dir, layout.LOCK)
    self._lock = filelock.FileLock(lock, timeout=PATIENCE_S, thread_local=False)
    self._written: tuple[int, ...] = ()

  def claim(self) -> None:
    """Takes the folder; raises a ConfigError if another process owns it."""
    try:
      self._lock.acquire()
    except filelock.Timeout:
      raise self._refusal() from None
    files.atomic_write(self._path, f"{json.dumps(self._record)}\n")
    self._written = self._now()

  def require(self) -> None:
    """Raises a ConfigError unless the folder is still there, and this process's (host, any thread).

    Cheap enough to come before each write.
    """
    if self._now() == self._written:
      return
    if not os.path.isdir(self._model_dir):
      raise vanished(self._model_dir)
    if self._owner().get("token", self._record["token"]) != self._record["token"]:
      raise self._refusal()
    raise ConfigError(
      f"what was in the run folder {self._model_dir!r}, at least {layout.OWNER}, was removed or "
      "replaced while the run trained in it, so the run has ended; start the same command again to "
      "go on from the newest checkpoint that is still there."
    )

  def release(self) -> None:
    """Gives the folder back; does nothing if it is another's."""
    if self._now() == self._written:
      os.remove(self._path)
    self._lock.release()

  def _now(self) -> tuple[int, ...]:
    """Returns what changes when owner.json is replaced; () if it is not there."""
    with contextlib.suppress(OSError):
      facts = os.stat(self._path)
      return facts.st_dev, facts.st_ino, facts.st_mtime_ns
    return ()

  def _owner(self) -> dict[str, Any]:
    """Returns what owner.json says; {} if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, TypeError), open(self._path, "rb") as file:
      return dict(json.load(file))
    return {}

  def _refusal(self) -> ConfigError:
    name = "another process"
    with contextlib.suppress(KeyError):
      known = "process {process} on {host}, started {started} ({command})"
      name = known.format(**self._owner())
    return ConfigError(
      f"model_dir {self._model_dir!r} is in use by {name}; wait until it ends, stop it, or choose "
      "another --model_dir."
    )


def vanished(model_dir: str) -> ConfigError:
  """Returns the error for a run folder that is no longer there."""
  return ConfigError(
    f"the run folder {model_dir!r} was removed or moved while the run used it, so the run has "
    "ended; put the folder back, or give its new path as --model_dir, and start the same command "
    "again to go on from its newest checkpoint."
  )


def require_there(model_dir: str) -> None:
  """Raises a ConfigError if a folder that this process only reads has gone (host, any thread)."""
  if not os.path.isdir(model_dir):
    raise vanished(model_dir)


@contextlib.contextmanager
def owned(model_dir: str) -> Iterator[Owner]:
  """Owns a run folder in the `with`; raises a ConfigError if another process does (host)."""
  owner = Owner(model_dir)
  owner.claim()
  try:
    yield owner
  finally:
    owner.release()


@contextlib.contextmanager
def explained(require: Callable[[], None]) -> Iterator[None]:
  """Replaces an error of files by the line about the run folder, if that is no longer the run's."""
  try:
    yield
  except (OSError, tf.errors.OpError):
    require()
    raise
