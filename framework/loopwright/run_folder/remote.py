"""Run folders behind a URL: fetched at the start, sent after each checkpoint and at the end.

What makes other files count, such as a checkpoint's index, is sent last and removed first, so that
what is in the store is whole at every moment. See docs/remote-folders.md.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import platform
import posixpath
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator

from absl import logging

from loopwright.errors import ConfigError, first_line, printable
from loopwright.host.files import StorageError
from loopwright.host.urls import EXTRAS
from loopwright.run_folder import layout, ownership
from loopwright.run_folder.places import RunFolder

_OWNER = "trained_by.txt"
"""In the store alone: which process trains there, or trained there last."""
_MARK, _LAST = "/assets.extra/", (".index", "best.json", "saved_model.pb", "/checkpoint")


class Remote(RunFolder):
  """A run folder behind a URL; each process works in a local folder of its own."""

  def __init__(self, url: str) -> None:
    """Asks the store for its files; raises a ConfigError if it cannot be read."""
    super().__init__("")
    self.url = self.shown = url.rstrip("/")
    self._id = f"process {os.getpid()} on {platform.node()} ({uuid.uuid4().hex[:12]})"
    self._sent: dict[str, tuple[int, int]] = {}
    with _reading(self.url):
      import fsspec  # an extra

      self._system, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
      self._at_start = self._names()

  def has_checkpoints(self) -> bool:
    """Whether the run had a complete checkpoint at the start."""
    return any(n.startswith("checkpoints/") and n.endswith(".index") for n in self._at_start)

  def require_one_process(self, workers: int) -> None:
    """Raises a ConfigError for several workers, which share files while they train."""
    if workers > 1:
      raise ConfigError(
        f"model_dir is {self.url!r}, which one process works on, but the run has {workers}: "
        "choose a folder on a file system that all workers share."
      )

  @contextlib.contextmanager
  def opened(self, *, training: bool, export: bool) -> Iterator[None]:
    """Fetches the run and gives its local folder, which is removed when all is sent (host).

    Raises:
      ConfigError: the store cannot be read.
      StorageError: at the end, also after an error, it cannot be written; the local folder stays.
    """
    self.fetch()
    if training:
      with _reading(self.url):
        self._system.pipe_file(self._there(_OWNER), self._id.encode())
    failed = None
    try:
      with ownership.explained(self.require):
        yield
    finally:
      if training or export:
        failed = self.send(under="" if training else "export/")
      if failed is None:
        shutil.rmtree(os.path.dirname(self.path), ignore_errors=True)
    if failed is not None:
      raise StorageError(f"{failed}: copy it there, or go on with it as --model_dir.")

  def fetch(self, *, weights: bool = True) -> None:
    """Copies the run to a new local folder, `path`; raises a ConfigError if it cannot (host)."""
    with _reading(self.url):
      cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
      os.makedirs(beside := os.path.join(cache, "loopwright"), exist_ok=True)
      top = tempfile.mkdtemp(prefix="run-", dir=beside)
      self.path = os.path.join(top, posixpath.basename(self.url))
      os.makedirs(self.path)
      for name in (name for name in self._names() if weights or ".data-" not in name):
        os.makedirs(os.path.dirname(self.file(name)), exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # a run has removed it since it was listed
          self._system.get_file(self._there(name), self.file(name))
    self._sent = _local(self.path)

  def send(self, under: str = "") -> str | None:
    """Sends what has changed (host); of a store that fails, warns of it and returns the line."""
    try:
      if not under:
        self._require_own()
      self._send(under)
    except ConfigError:
      raise
    except Exception as error:
      reason = f"{type(error).__name__}: {printable(first_line(error))[:200]}"
      line = f"cannot write to {self.url!r} ({reason}); the run is whole in {self.path!r}"
      logging.warning("%s", line)
      return line
    return None

  def _send(self, under: str) -> None:
    local = {name: facts for name, facts in _local(self.path).items() if name.startswith(under)}
    changed = sorted((n for n in local if self._sent.get(n) != local[n]), key=_order)
    gone = [n for n in self._sent if n.startswith(under) and n not in local]
    self._remove(name for name in (*changed, *gone) if name.endswith(_LAST))
    for name in changed:
      with contextlib.suppress(FileNotFoundError):  # gone since it was listed
        self._system.put_file(self.file(name), self._there(name))
        self._sent[name] = local[name]
    self._remove(gone)

  def _remove(self, names: Iterable[str]) -> None:
    for name in sorted(names, key=_order, reverse=True):
      if self._sent.pop(name, None):
        with contextlib.suppress(FileNotFoundError):
          self._system.rm_file(self._there(name))

  def _require_own(self) -> None:
    owner = "it was removed"
    with contextlib.suppress(FileNotFoundError):
      owner = self._system.cat_file(self._there(_OWNER)).decode(errors="replace")
    if owner != self._id:
      raise ConfigError(
        f"the run in {self.url!r} is no longer that of this process ({printable(owner)}), which "
        f"has ended; what it has trained is in {self.path!r}."
      )

  def _names(self) -> list[str]:
    self._system.invalidate_cache()
    found = (path.removeprefix(self._root)[1:] for path in self._system.find(self._root))
    return sorted(filter(_is_kept, found), key=_order)

  def _there(self, name: str) -> str:
    return f"{self._root}/{name}"


@functools.cache
def local_copy(url: str, *, weights: bool = True) -> str:
  """Returns a local copy of a folder behind a URL, for as long as this process lives (host)."""
  remote = Remote(url)
  remote.fetch(weights=weights)
  atexit.register(shutil.rmtree, os.path.dirname(remote.path), ignore_errors=True)
  if not os.listdir(remote.path):
    raise ConfigError(f"{url!r} has no files; give the URL of a run folder.")
  return remote.path


def _order(name: str) -> tuple[bool, int, str]:
  """Sorts names: the mark of an export first, then what others name, then what names others."""
  rank = next((rank for rank, end in enumerate(_LAST, 2) if name.endswith(end)), 1)
  return name.startswith("checkpoints/"), 0 if _MARK in name else rank, name


def _is_kept(name: str) -> bool:
  unsafe = {"", ".", ".."} & {*name.split("/")}
  passing = name in (_OWNER, *layout.OF_PROCESS) or name.endswith(".tmp")
  return not (unsafe or passing or f"/{layout.UNFINISHED}/" in name)


def _local(folder: str) -> dict[str, tuple[int, int]]:
  """Returns name -> size and time of the last change, of the files in a local folder."""
  found = {}
  for parent, _, names in os.walk(folder):
    for path in (os.path.join(parent, name) for name in names):
      with contextlib.suppress(FileNotFoundError):
        facts = os.stat(path)
        found[os.path.relpath(path, folder)] = facts.st_size, facts.st_mtime_ns
  return {name: facts for name, facts in found.items() if _is_kept(name)}


@contextlib.contextmanager
def _reading(url: str) -> Iterator[None]:
  """Turns whatever a library raises into a ConfigError with the URL."""
  try:
    yield
  except ConfigError:
    raise
  except Exception as error:  # libraries differ in what they raise
    extra = EXTRAS.get(url.partition("://")[0])
    remedy = "check the URL, the network and the credentials, then start the same command again"
    if extra and isinstance(error, ImportError):
      remedy = f"pip install 'loopwright[{extra}]'"
    reason = f"{type(error).__name__}: {printable(first_line(error))[:200]}"
    raise ConfigError(f"cannot use {url!r} ({reason}); {remedy}.") from error
