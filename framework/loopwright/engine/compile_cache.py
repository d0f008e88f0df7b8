"""Programs that XLA has compiled, kept for the next process, which then compiles nothing.

TensorFlow can read and write a folder of them, but it trusts that folder: it runs the machine code
that it finds, and a damaged file or a full disk ends the step. So each process gives TensorFlow a
folder of its own, with links to those kept programs that are whole and the user's. What TensorFlow
adds to it is kept after the first loop and at the end.

    <cache>/<key>/<digest>-<TensorFlow's name>    a kept program; the key is of what it depends on
    <cache>/work-<host>-<process>-...             TensorFlow's folder of one process
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import tensorflow as tf
from absl import logging

from loopwright.hooks import Hook, Output

MOST_BYTES = 2**29
"""Of all kept programs; the oldest go first."""
FREE_BYTES = 2**28
"""On the disk, at least: TensorFlow ends a step whose program it cannot write."""
STALE_S = 7 * 24 * 3600.0
_FLAGS, _FOLDER = "TF_XLA_FLAGS", "--tf_xla_persistent_cache_directory"
_MATTER = ("XLA_", "TF_", "NVIDIA_", "CUDA_")
"""Beginnings of the variables of the environment on which a program may depend."""


class CompileCache(Hook):
  """The kept programs of one process.

  Attributes:
    untried: the one whose programs TensorFlow has not run yet.
    by_itself: whether nobody has asked for it.
  """

  untried: ClassVar[CompileCache | None] = None
  by_itself = False

  def __init__(self, folder: str, settings: Mapping[str, object]) -> None:
    """Links what is kept (host); before TensorFlow knows its devices, when it reads its flags.

    Raises:
      OSError: the folder is another user's, others may write to it, or it cannot be used.
    """
    self._folder = Path(folder)
    _make_own(self._folder)
    if shutil.disk_usage(folder).free < FREE_BYTES:
      raise OSError(f"fewer than {FREE_BYTES >> 20} MiB are free on the disk of {folder}")
    self._work = _work(self._folder)
    os.environ[_FLAGS] = f"{os.environ.get(_FLAGS, '')} {_FOLDER}={self._work}".strip()
    self._store = self._folder / _key(settings)
    _make_own(self._store)
    self._linked: list[Path] = []
    self._at_fault: list[Path] = []
    for path in self._store.iterdir():
      name = path.name.partition("-")[2]
      with contextlib.suppress(FileNotFoundError):  # another process has removed it
        if name and not (self._work / name).exists() and _is_whole(path):
          os.utime(path)
          os.link(path, self._work / name)
          self._linked.append(path)
        else:  # also what several processes have compiled at once
          path.unlink()
    self._known = {path.name for path in self._work.iterdir()}
    CompileCache.untried = self
    logging.info("XLA's programs are kept in %s, %d so far", self._store, len(self._known))

  def loop_ends(self, step: int, output: Output, traces: int) -> None:
    """Keeps what TensorFlow has compiled meanwhile."""
    del step, output, traces
    CompileCache.untried = None
    for path in self._at_fault:
      path.unlink(missing_ok=True)
    self.keep()

  def give_up(self, *, failed: bool) -> None:
    """Gives TensorFlow an empty folder, in memory if there is one.

    If the loop ends then after it `failed`, what was kept was at fault, and is removed.
    """
    CompileCache.untried, self._at_fault = None, self._linked if failed else []
    shutil.rmtree(self._work, ignore_errors=True)
    shared = "/dev/shm"
    roomy = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > FREE_BYTES
    here = tempfile.mkdtemp(dir=shared if roomy else None)
    atexit.register(shutil.rmtree, here, ignore_errors=True)
    self._work.symlink_to(here)
    atexit.register(self._work.unlink, missing_ok=True)

  def keep(self) -> None:
    """Keeps new programs; one that cannot be kept is left out."""
    with contextlib.suppress(OSError):
      new = [path for path in self._work.glob("*.pb") if path.name not in self._known]
      for path in new:
        self._known.add(path.name)
        path.chmod(0o600)
        with contextlib.suppress(FileExistsError):
          os.link(path, self._store / f"{_digest(path.read_bytes())}-{path.name}")
      if new:
        self._bound()

  def _bound(self) -> None:
    """Removes the oldest programs beyond `MOST_BYTES`, of any key."""
    kept = [(path.stat(), path) for path in self._folder.glob("*/*-*.pb")]
    size = sum(found.st_size for found, _ in kept)
    for found, path in sorted(kept, key=lambda each: each[0].st_mtime):
      if size > MOST_BYTES:
        path.unlink(missing_ok=True)
        size -= found.st_size


def opened(folder: str, settings: Mapping[str, object]) -> CompileCache | None:
  """Returns the cache that an option asks for, with one line of what is kept or why not (host).

  Args:
    folder: "auto" takes the user's cache folder.
    settings: of the run, on which programs may depend.
  """
  if _FOLDER in os.environ.get(_FLAGS, ""):
    return None  # the user's own, or that of an earlier run of this process
  if by_itself := folder == "auto":
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.join(base, "loopwright", "xla")
  before = os.environ.get(_FLAGS, "")
  try:
    cache = CompileCache(folder, settings)
    cache.by_itself = by_itself
    return cache
  except OSError as error:
    os.environ[_FLAGS] = before
    logging.warning("XLA's programs are not kept: %s; see run.compile_cache", error)
    return None


def without_kept(error: Exception | None = None) -> bool:
  """Whether XLA compiles anew from here on, as kept programs may be the cause of an error (host).

  Only until the first loop has ended: TensorFlow ends a step whose program it cannot read or write.
  Without an error, only those that are kept without being asked for are given up.
  """
  if (cache := CompileCache.untried) is None or (error is None and not cache.by_itself):
    return False
  try:
    cache.give_up(failed=error is not None)
  except OSError:
    return False
  from loopwright.host.failures import failure

  why = failure(error) if error else "the step is several programs; see run.compile_cache"
  logging.log(logging.WARNING if error else logging.INFO, "XLA's programs are not kept: %s", why)
  return True


def _key(settings: Mapping[str, object]) -> str:
  """Returns a digest of what a program depends on, beside what it computes."""
  gpus = tf.config.list_physical_devices("GPU")
  details = [sorted(tf.config.experimental.get_device_details(gpu).items()) for gpu in gpus]
  environment = {
    name: value for name, value in os.environ.items()
    if name.startswith(_MATTER) and name not in (_FLAGS, "TF_CONFIG")
  }  # fmt: skip
  parts = [
    *(tf.__version__, tf.version.GIT_VERSION, sorted(tf.sysconfig.get_build_info().items())),
    *(details, _cpu(), sorted(environment.items()), sorted(settings.items())),
  ]
  return _digest(repr(parts).encode())


def _cpu() -> str:
  """Returns the kind of CPU and its features."""
  with contextlib.suppress(OSError):
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    return str(sorted({line for line in lines if line.startswith(("flags", "Features"))}))
  return platform.processor()


def _digest(content: bytes) -> str:
  return hashlib.blake2b(content, digest_size=16).hexdigest()


def _make_own(folder: Path) -> None:
  folder.mkdir(mode=0o700, parents=True, exist_ok=True)
  _require_own(folder.lstat(), folder)


def _require_own(found: os.stat_result, path: Path) -> None:
  """Raises an OSError unless only this user can have written to a folder or file."""
  if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
    raise OSError(f"{path} is a link, or no folder")
  if found.st_uid != os.getuid():
    raise OSError(f"{path} belongs to another user")
  if found.st_mode & 0o022:
    raise OSError(f"other users may write to {path}; chmod go-w {path}")


def _is_whole(path: Path) -> bool:
  """Whether a kept program is this user's, and as it was written."""
  try:
    _require_own(path.lstat(), path)
  except OSError:
    return False
  return path.name.startswith(_digest(path.read_bytes()))


@functools.cache
def _work(folder: Path) -> Path:
  """Returns TensorFlow's folder of this process; removes those of processes that are gone."""
  begin = f"work-{platform.node()}-"
  for path in folder.glob("work-*"):
    with contextlib.suppress(OSError):
      process = path.name.removeprefix(begin).partition("-")[0]
      gone = path.name.startswith(begin) and not Path("/proc", process).exists()
      if gone or time.time() - path.lstat().st_mtime > STALE_S:
        shutil.rmtree(path)
  made = Path(tempfile.mkdtemp(prefix=f"{begin}{os.getpid()}-", dir=folder))
  atexit.register(shutil.rmtree, made, ignore_errors=True)
  return made
