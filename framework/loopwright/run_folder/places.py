"""Where a run's files are: a folder on disk, or behind a URL, for which remote.py is loaded.

with place("runs/digits").opened(training=True, export=False) as at:
  ...  # at.folder is local
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import tensorflow as tf

from loopwright import registry
from loopwright.errors import ConfigError
from loopwright.host import bounded
from loopwright.host.urls import is_url
from loopwright.run_folder import layout, ownership
from loopwright.run_folder.checkpoint_files import list_checkpoints


class Opened(NamedTuple):
  """A run folder in use.

  Attributes:
    folder: local.
    shown: what the user calls it: the folder, or the URL of which it is a copy.
    require: called before each write; raises if the folder is gone, or no longer the run's.
    changed: to be called when there is something new to mirror; returns at once.
  """

  folder: str
  shown: str
  require: Callable[[], None] = lambda: None
  changed: Callable[[], None] = lambda: None


class Place:
  """A run folder that is not in use yet, on disk; of a URL, it is a `Remote`.

  Attributes:
    folder: local.
  """

  def __init__(self, folder: str) -> None:
    self.folder = folder

  def require_one_process(self, workers: int) -> None:
    """Raises a ConfigError if so many workers cannot share the folder."""

  def checkpoints(self) -> bool:
    """Whether the run has a complete checkpoint."""
    return bool(list_checkpoints(os.path.join(self.folder, layout.CHECKPOINTS)))

  @contextlib.contextmanager
  def opened(self, *, training: bool, export: bool) -> Iterator[Opened]:
    """Gives the folder, owned while training; see `ownership.owned`."""
    del export
    if training:
      with ownership.owned(self.folder) as owner:
        yield Opened(self.folder, self.folder, owner.require)
      return
    require = functools.partial(ownership.require_there, self.folder)
    with ownership.explained(require):
      yield Opened(self.folder, self.folder, require)


def path_of(model_dir: str | os.PathLike[str]) -> str:
  """Returns the path or the URL of a run folder as text; raises a ConfigError if it is neither."""
  if isinstance(model_dir, (str, os.PathLike)):
    return os.fspath(model_dir)
  raise ConfigError(f"model_dir is {model_dir!r}; it must be the path of a folder.")


def place(model_dir: str) -> Place:
  """Returns a run folder; a URL that cannot be used is a ConfigError (host)."""
  if is_url(model_dir):
    remote: Place = registry.load("part", "Remote")(model_dir)
    return remote
  return Place(model_dir)


def copied(model_dir: str) -> str:
  """Returns a run folder itself; of a URL, a local copy to read (host)."""
  with place(model_dir).opened(training=False, export=False) as opened:
    return opened.folder


def local_copy(path: str) -> str:
  """Returns a path itself; of a URL, a local copy of the weights that it names (host).

  Args:
    path: as `WarmStart.path`: a file, a checkpoint without suffix, a run folder or a folder of
      checkpoints, of which it takes the newest.

  Raises:
    ConfigError: there are none, or the store cannot be reached.
  """
  return registry.load("part", "local_copy")(path) if is_url(path) else path


def require_writable(model_dir: str) -> None:
  """Makes the run folder; raises ConfigError if it is not writable (host)."""
  if set("*?[]") & set(model_dir):
    raise ConfigError(
      f"model_dir is {model_dir!r}; TensorFlow reads *, ?, [ and ] as wildcards and does not find "
      "the files again: choose a name without them."
    )
  if any("\ud800" <= character <= "\udfff" for character in model_dir):  # bytes, for Python
    raise ConfigError(f"model_dir is {model_dir!r}; its name must be text in UTF-8.")
  up = re.match(rf"(.*{os.sep})?\.\.(?={os.sep}|$)", model_dir, re.DOTALL)
  if up and not _is_plain(up[0]):
    raise ConfigError(  # TensorFlow takes a/../b for b, the system does not
      f"model_dir is {model_dir!r}, in which '..' follows a link, or no folder; write "
      f"{os.path.normpath(model_dir)!r}."
    )
  bounded.require_plain(model_dir)
  probe = os.path.join(model_dir, layout.PROBE)
  try:
    layout.require_no_links(model_dir)
    tf.io.gfile.makedirs(model_dir)
    with tf.io.gfile.GFile(probe, "w") as file:
      file.write("")
    with contextlib.suppress(tf.errors.NotFoundError):  # another worker has removed it
      tf.io.gfile.remove(probe)
  except (OSError, tf.errors.OpError) as error:
    raise ConfigError(
      f"cannot write to model_dir {model_dir!r} ({type(error).__name__}); "
      "set --model_dir to a writable folder."
    ) from error


def _is_plain(folder: str) -> bool:
  """Whether a folder with ".." in its path is there, and is what the path says without links."""
  plain = os.path.normpath(folder)
  return os.path.isdir(folder) and os.path.isdir(plain) and os.path.samefile(folder, plain)
