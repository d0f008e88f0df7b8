"""One run at a time trains in a folder.

<model_dir>/owner.json names the process: host, boot, process id, start, command, and a beat that it
counts up. The process also locks the file, where the file system has locks. So another process can
tell:

    the lock is held on this machine        the owner lives
    the lock is free on this machine        the owner is dead, as after a kill
    another machine, or another boot        the beat tells: it grows, or the owner is dead

Clocks of machines are not compared. Processes that only read a run, or append an evaluation to its
log, are guests and own nothing.

Before each write a process looks whether the folder at its path is still the run's: an owner,
whether the file there is the one that it has locked, or holds what it wrote last. A folder that was
removed, moved or replaced in the middle ends the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from loopwright.errors import ConfigError
from loopwright.host import files, redaction
from loopwright.run_folder import layout, legs

FILE = layout.OWNER
BEAT_S = 5.0
"""Seconds between two beats."""
PATIENCE_S = 20.0
"""An owner whose beat does not grow for so many seconds is dead."""
LEASE_S = 120.0
"""Seconds to wait for the lock of a silent owner on another machine: NFS keeps it for a while."""
_held: set[Owner] = set()


class Owner:
  """The ownership of one folder by this process; see `owned`."""

  def __init__(self, model_dir: str) -> None:
    self._model_dir, self._path = model_dir, os.path.join(model_dir, FILE)
    self._record: dict[str, Any] = {
      "host": platform.node(),
      "boot": legs.boot(),
      "process": os.getpid(),
      "started": time.strftime("%Y-%m-%d %H:%M:%S"),
      "command": redaction.command()[:300],
      "token": uuid.uuid4().hex,
      "beat": 0,
    }
    self._descriptor: int | None = None
    self._locked, self._written = False, 0
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._beat, name="loopwright-owner", daemon=True)
    self._lost: ConfigError | None = None

  def claim(self) -> None:
    """Waits until the folder is this process's.

    Raises:
      ConfigError: another process owns it.
    """
    try:
      locked, earlier = self._lock(), self._read()
      if locked is False and earlier is None:  # it has the lock, and has not written its name yet
        time.sleep(BEAT_S / 10)
        earlier = self._read() or {}
      here = not earlier or earlier.get("boot") == self._record["boot"]
      if locked is False and here:
        raise self._refusal(earlier or {})
      if earlier and not (locked and here):
        self._await_death(earlier, locked)
      self._write()
      if locked is None:
        time.sleep(BEAT_S)
        self._require_own()
    except BaseException:
      self.close()
      raise
    _held.add(self)
    self._thread.start()

  def require(self) -> None:
    """Raises a ConfigError unless the folder is still there, and this process's (host, any thread).

    Cheap enough to come before each write: with a lock, about 20 us on a local disk.
    """
    if self._lost is None and not (self._locked and self._is_still()):
      self._require_own()
    if self._lost is not None:
      raise self._lost

  def release(self) -> None:
    """Gives the folder back, wherever it is now; does nothing if it is another's."""
    self._ended.set()
    self._thread.join()
    with contextlib.suppress(OSError, tf.errors.OpError):
      self._remove()
    _held.discard(self)
    self.close()

  def _lock(self) -> bool | None:
    """Returns whether this process has the lock now; None if the file system has no locks."""
    self.close()
    while True:
      self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
      try:
        locked = files.lock(self._descriptor, wait=False)
      except BlockingIOError:
        return False
      if files.is_still(self._path, self._descriptor):
        self._locked = locked
        return locked or None
      self.close()  # the owner before has removed it just now

  def close(self) -> None:
    """Lets go of the lock; the file stays (host)."""
    if self._descriptor is not None:
      os.close(self._descriptor)  # ends the lock
    self._descriptor = None

  def _await_death(self, earlier: Mapping[str, Any], locked: bool | None) -> None:
    """Returns when the owner on another machine has ended, or has not counted up its beat."""
    beat_s, patience_s = self._times()
    patience_s = LEASE_S if locked is False else patience_s
    logging.warning(
      "%s belongs to %s; waiting up to %g s to see whether it still runs",
      self._model_dir, _name(earlier), patience_s,
    )  # fmt: skip
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
      time.sleep(beat_s / 5)
      if (now := self._read()) is None:
        return
      if any(now.get(key) != earlier.get(key) for key in ("token", "beat")):
        raise self._refusal(now)
      if locked is False and self._lock():
        return
    if locked is False:
      raise self._refusal(earlier)

  def _beat(self) -> None:
    while not self._ended.wait(self._times()[0]):
      self._record["beat"] += 1
      with contextlib.suppress(OSError, tf.errors.OpError, ConfigError):
        self._require_own()
        self._write()

  def _require_own(self) -> None:
    written = self._written  # the beat may write while this reads
    now = self._read()
    if now is None:  # some stores have no file for a moment while it is written
      time.sleep(BEAT_S / 10)
      now = self._read()
    if now is None:
      self._lost = self._vanished()
    elif now.get("token") != self._record["token"]:
      self._lost = self._refusal(now)
    elif int(now.get("beat", 0)) < written:  # a copy
      self._lost = self._replaced()
    if self._lost is not None:
      raise self._lost

  def _is_still(self) -> bool:
    return self._descriptor is not None and files.is_still(self._path, self._descriptor)

  def _write(self) -> None:
    """Writes a text of constant length, so that others never read a part of it."""
    content = self._content()
    if self._descriptor is not None:
      os.pwrite(self._descriptor, content, 0)
      os.ftruncate(self._descriptor, len(content))
    self._written = self._record["beat"]

  def _content(self) -> bytes:
    record = {**self._record, "beat": f"{self._record['beat']:012d}"}
    return f"{json.dumps(record)}\n".encode()

  def _load(self) -> bytes:
    with contextlib.suppress(tf.errors.NotFoundError):
      return files.read(self._path)
    return b""

  def _remove(self) -> None:
    path = self._now_at()
    if path is not None and self._is_own(files.read(path)):
      files.remove(path)

  def _is_own(self, content: bytes) -> bool:
    return str(self._record["token"]).encode() in content

  def _now_at(self) -> str | None:
    """Returns where the file is that this process has open; None if it was removed."""
    if self._descriptor is None or self._is_still():
      return self._path
    return files.path_of(self._descriptor)

  def _times(self) -> tuple[float, float]:
    """Returns the seconds between two beats, and those after which silence means death."""
    return BEAT_S, PATIENCE_S

  def _read(self) -> dict[str, Any] | None:
    """Returns the owner's record; None if there is none; {} if it cannot be read."""
    content = self._load()
    if not content:
      return None
    with contextlib.suppress(ValueError):
      record = json.loads(content)
      return record if isinstance(record, dict) else {}
    return {}

  def _refusal(self, owner: Mapping[str, Any]) -> ConfigError:
    return ConfigError(
      f"model_dir {self._model_dir!r} is in use by {_name(owner)}; wait until it ends, stop it, or "
      "choose another --model_dir."
    )

  def _vanished(self) -> ConfigError:
    now_at = None if self._descriptor is None else self._now_at()
    folder, name = os.path.split(now_at or "")
    if name == FILE:
      return ConfigError(
        f"the run folder {self._model_dir!r} was moved to {folder!r} while the run trained in it, "
        "so the run has ended; start the same command with the new --model_dir to go on from its "
        "newest checkpoint."
      )
    return self._replaced() if os.path.isdir(self._model_dir) else vanished(self._model_dir)

  def _replaced(self) -> ConfigError:
    return ConfigError(
      f"what was in the run folder {self._model_dir!r}, at least {FILE}, was removed or replaced "
      "while the run trained in it, so the run has ended; start the same command again to go on "
      "from the newest checkpoint that is still there."
    )


def vanished(model_dir: str) -> ConfigError:
  """Returns the error for a run folder that is no longer there."""
  return ConfigError(
    f"the run folder {model_dir!r} was removed while the run used it, so the run has ended; put "
    "the folder back and start the same command again to go on from its newest checkpoint, or "
    "start it without the folder to train from the beginning."
  )


def require_there(model_dir: str) -> None:
  """Raises a ConfigError if a folder that this process only reads has gone (host, any thread)."""
  if not os.path.isdir(model_dir):
    raise vanished(model_dir)


@contextlib.contextmanager
def owned(model_dir: str) -> Iterator[Owner]:
  """Owns a run folder in the `with` (host); other processes cannot train in it.

  Raises:
    ConfigError: another process owns it; or it was removed or moved in the middle, whatever error
      that has led to.
  """
  owner = Owner(model_dir)
  owner.claim()
  try:
    with explained(owner.require):
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


def _name(owner: Mapping[str, Any]) -> str:
  if not owner:
    return "another process"
  get = owner.get
  return f"process {get('process')} on {get('host')}, started {get('started')} ({get('command')})"


def _leave() -> None:
  """In a forked child: lets go of the lock, which otherwise would outlive a killed owner."""
  for owner in _held:
    owner.close()
  _held.clear()


os.register_at_fork(after_in_child=_leave)
