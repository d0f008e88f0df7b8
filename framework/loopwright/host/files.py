"""Files that are written completely or not at all, and are still there after a power loss.

A rename makes a file complete for other processes, not for the disk: without `sync`, a power loss
may leave its new name with no content. So `sync` the new files before the rename, and the folder
after it. Only then remove what they replace.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator

import tensorflow as tf

from loopwright.errors import Failed


def is_local(path: str) -> bool:
  """Whether `path` belongs to the operating system, not to a service such as gs://."""
  return "://" not in path


def atomic_write(path: str, content: bytes | str) -> None:
  """Replaces the file at `path` (local or remote) for good; readers see all or nothing (host)."""
  temporary = f"{path}.tmp"
  if os.path.islink(temporary):
    os.unlink(temporary)  # do not write where it points
  with tf.io.gfile.GFile(temporary, "w") as file:
    file.write(content)
  sync(temporary)
  tf.io.gfile.rename(temporary, path, overwrite=True)
  sync(os.path.dirname(path) or ".")


def read(path: str) -> bytes:
  """Returns the content of a file (local or remote)."""
  with tf.io.gfile.GFile(path, "rb") as file:
    return file.read()


def sync(*paths: str) -> None:
  """Waits until the content of these local files, and the names in these folders, are on disk.

  Does nothing for a path that does not exist, as one in TensorFlow's memory.

  Raises:
    OSError: the disk has failed or is full; what was written may be lost.
  """
  for path in paths:
    if os.path.exists(path):
      descriptor = os.open(path, os.O_RDONLY)
      try:
        os.fsync(descriptor)
      except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
      finally:
        os.close(descriptor)


def sync_tree(folder: str) -> None:
  """As `sync`, for a local folder with everything in it."""
  for parent, _, names in os.walk(folder, topdown=False):
    sync(*(os.path.join(parent, name) for name in names), parent)


def remove(path: str) -> None:
  """Removes a file, a folder with everything in it, or a link but not where it points (host)."""
  if os.path.islink(path):
    os.unlink(path)
  elif tf.io.gfile.isdir(path):
    tf.io.gfile.rmtree(path)
  elif tf.io.gfile.exists(path):
    tf.io.gfile.remove(path)


@contextlib.contextmanager
def locked(path: str) -> Iterator[int]:
  """Locks a local file, made if it is missing; gives a descriptor to read and append (host).

  The lock holds between processes that call this, and ends with the process. Without effect on a
  file system that has no locks.

  Raises:
    OSError: the file cannot be opened.
  """
  while True:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
      lock(descriptor)
      if is_still(path, descriptor):
        yield descriptor
        return
    finally:
      os.close(descriptor)  # ends the lock


def write(path: str, descriptor: int, content: bytes) -> None:
  """Writes all of `content` to the open file of this path, or raises OSError."""
  try:
    while content:
      content = content[os.write(descriptor, content) :]
  except OSError as error:
    raise OSError(error.errno, error.strerror, path) from error


def lock(descriptor: int, *, wait: bool = True) -> bool:
  """Locks an open file; False if its file system has no locks.

  Raises:
    BlockingIOError: another process has the lock, and `wait` is False.
  """
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
  except BlockingIOError:
    raise
  except OSError:
    return False
  return True


def is_still(path: str, descriptor: int) -> bool:
  """Whether an open file is the one at `path`, which may have been replaced since."""
  opened = os.fstat(descriptor)
  with contextlib.suppress(FileNotFoundError, NotADirectoryError):
    return os.path.samestat(opened, os.stat(path))
  return False


def make_folder(path: str) -> None:
  """Makes a folder in one that exists: a run folder that was removed is not made again (host)."""
  if not tf.io.gfile.isdir(path):
    with contextlib.suppress(tf.errors.AlreadyExistsError):
      tf.io.gfile.mkdir(path)


IN_MEMORY = "ram://loopwright"
"""A folder in this process's memory, for TensorFlow; its user removes it afterwards."""


class StorageError(Failed):
  """The disk of the run folder is full or has failed; the message is one line."""


_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
_OF_LIMITS = (errno.EFBIG, errno.EPERM, errno.EACCES)  # ulimit -f; a folder made immutable
_FAULTS = [os.strerror(number) for number in (*_OF_THE_DISK, *_OF_LIMITS)]


@contextlib.contextmanager
def storage_errors(folder: str, what_is_saved: Callable[[], str]) -> Iterator[None]:
  """Replaces an error of the disk under `folder` by a StorageError, which says what is saved."""
  try:
    yield
  except (OSError, tf.errors.OpError) as error:
    text = f"{getattr(error, 'filename', '')} {error}"
    fault = next((fault for fault in _FAULTS if fault in text), None)
    if fault is None or folder not in text:
      raise
    raise StorageError(
      f"cannot write to {folder!r}: {fault}; {what_is_saved()}; free space, or mend the disk, "
      "its permissions or the limit, then start the same command again."
    ) from error


class Background:
  """Runs one job at a time in a thread, so that a slow disk does not stop training."""

  def __init__(self) -> None:
    self._thread: threading.Thread | None = None
    self._error: BaseException | None = None

  def start(self, job: Callable[[], None]) -> None:
    """Waits for the previous job, then starts this one; raises an error of the previous job."""
    self.wait()
    self._thread = threading.Thread(target=self._run, args=(job,), name="loopwright-files")
    self._thread.start()

  def wait(self) -> None:
    """Waits until nothing runs; raises an error of the last job, once."""
    if self._thread is not None:
      self._thread.join()
    self._thread = None
    self.check()

  def check(self) -> None:
    """Raises an error of the last job, once, without waiting for it."""
    error, self._error = self._error, None
    if error is not None:
      raise error

  def _run(self, job: Callable[[], None]) -> None:
    try:
      job()
    except BaseException as error:  # raised by `wait`, in the thread that trains
      self._error = error
