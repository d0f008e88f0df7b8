"""A folder in memory, which is removed when this process ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator

from loopwright.errors import ConfigError
from loopwright.run_folder import folders, layout
from loopwright.tools.local_process import say

_IN_MEMORY, _PREFIX = "/dev/shm", "loopwright-"
_REMOVER = 'trap "" HUP INT TERM; cat >/dev/null; rm -rf "$0"'
_REMOVES_S = 10.0
_ABANDONED_S = 60.0
"""A folder that no process has locked for so long belongs to none that lives."""


@contextlib.contextmanager
def folder() -> Iterator[str | None]:
  """Makes a folder in shared memory; None, with a line that says so, if there is none.

  Folders of processes that were killed together with their remover are removed first.
  """
  for other in glob.glob(os.path.join(_IN_MEMORY, f"{_PREFIX}*")):
    _remove_abandoned(other)
  try:
    made = tempfile.mkdtemp(prefix=_PREFIX, dir=_IN_MEMORY)
  except OSError as error:
    say(f"no folder in {_IN_MEMORY} ({error.strerror}): a fault goes back to the newest checkpoint")
    yield None
    return
  lock = os.open(made, os.O_RDONLY)
  fcntl.flock(lock, fcntl.LOCK_EX)
  remover = subprocess.Popen(
    ["/bin/sh", "-c", _REMOVER, made], stdin=subprocess.PIPE, start_new_session=True
  )  # it reads the end of its input also after a SIGKILL of this process
  try:
    yield made
  finally:
    try:
      remover.communicate(timeout=_REMOVES_S)
    except subprocess.TimeoutExpired:  # it is stopped
      remover.kill()
      remover.wait()
    shutil.rmtree(made, ignore_errors=True)
    os.close(lock)


def _remove_abandoned(path: str) -> None:
  with contextlib.suppress(OSError):  # another user's, or removed just now
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      if time.time() - os.fstat(descriptor).st_ctime > _ABANDONED_S:
        shutil.rmtree(path)
    finally:
      os.close(descriptor)


def keep_on_disk(copies: str, model_dir: str) -> None:
  """Copies the newest checkpoint in memory into a run folder, if it has none as new.

  The index file, which makes it count, is the last. It does so only if the folder is still that of
  the run, and no process trains in it.
  """
  step = max(layout.checkpoint_steps(copies), default=0)
  if step <= max(layout.checkpoint_steps(model_dir), default=0):
    return
  if reason := _not_ours(copies, model_dir):
    say(f"the copy in memory of step {step} is not saved to {model_dir}: {reason}")
    return
  into = os.path.join(model_dir, layout.CHECKPOINTS)
  unfinished = os.path.join(into, layout.UNFINISHED)
  files = glob.glob(os.path.join(copies, layout.CHECKPOINTS, f"{layout.PREFIX}-{step}.*"))
  try:
    for made in (into, unfinished):  # not the run folder: if that is gone, it must stay so
      with contextlib.suppress(FileExistsError):
        os.mkdir(made)
    for file in sorted(files, key=lambda name: name.endswith(".index")):
      copy = shutil.copy(file, unfinished)
      with open(copy, "rb") as written:
        os.fsync(written.fileno())
      os.replace(copy, os.path.join(into, os.path.basename(file)))
    shutil.rmtree(unfinished)
  except OSError as error:
    say(f"cannot save the copy in memory of step {step} to {into} ({error.strerror})")
  else:
    say(f"saved the copy in memory of step {step} to {into}")


def _not_ours(copies: str, model_dir: str) -> str:
  """Returns why a run folder is not to be written to; "" if it is that of the copies, and free."""
  with contextlib.suppress(OSError):
    descriptor = os.open(os.path.join(model_dir, layout.OWNER), os.O_RDONLY)
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      return "another process trains there"
    finally:
      os.close(descriptor)
  with contextlib.suppress(OSError, ConfigError):
    with open(os.path.join(copies, layout.STARTS)) as file:
      ours = file.read().split()
    if any(start.get("start") in ours for start in folders.starts(model_dir)):
      return ""
  return "it was removed, moved or replaced while the run trained in it"
