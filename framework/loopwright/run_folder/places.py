"""Where a run's files are: a folder on disk, or behind a URL, for which remote.py is loaded.

folder = place("runs/digits")
with folder.opened(training=True, export=False):
  ...  # folder.path is local
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

import tensorflow as tf

from loopwright import registry
from loopwright.errors import ConfigError
from loopwright.host import bounded
from loopwright.host.urls import is_url
from loopwright.run_folder import layout, ownership
from loopwright.run_folder.checkpoint_files import list_checkpoints


class RunFolder:
  """A run folder, made in `run` and passed whole; of a URL, it is a `Remote`.

  Attributes:
    path: local.
    shown: what the user calls it: the path, or the URL of which it is a copy.
  """

  def __init__(self, path: str) -> None:
    """Touches nothing yet."""
    self.path = self.shown = path
    self._owner: ownership.Owner | None = None

  def file(self, name: str) -> str:
    """Returns the path of what has this name in it; the names are in layout.py."""
    return os.path.join(self.path, name)

  def require_one_process(self, workers: int) -> None:
    """Raises a ConfigError if so many workers cannot share the folder."""

  def has_checkpoints(self) -> bool:
    """Whether the run has a complete checkpoint."""
    return bool(list_checkpoints(self.file(layout.CHECKPOINTS)))

  @contextlib.contextmanager
  def opened(self, *, training: bool, export: bool) -> Iterator[None]:
    """In the `with` the folder is in use; while training, it is this process's alone (host).

    Raises:
      ConfigError: another process trains in it; or it was removed or moved in the middle, whatever
        error that has led to.
    """
    del export
    with contextlib.ExitStack() as stack:
      if training:
        self._owner = stack.enter_context(ownership.owned(self.path))
      with ownership.explained(self.require):
        yield

  def require(self) -> None:
    """Raises a ConfigError if it is gone, or no longer the run's; called before each write."""
    if self._owner is not None:
      self._owner.require()
    else:
      ownership.require_there(self.path)

  def send(self) -> object:
    """Called when a checkpoint is complete; see `Remote`."""


def path_of(model_dir: str | os.PathLike[str]) -> str:
  """Returns the path or the URL of a run folder as text; raises a ConfigError if it is neither."""
  if isinstance(model_dir, (str, os.PathLike)):
    return os.fspath(model_dir)
  raise ConfigError(f"model_dir is {model_dir!r}; it must be the path of a folder.")


def place(model_dir: str) -> RunFolder:
  """Returns a run folder; a URL that cannot be used is a ConfigError (host)."""
  if is_url(model_dir):
    remote: RunFolder = registry.load("part", "Remote")(model_dir)
    return remote
  return RunFolder(model_dir)


def local_copy(path: str) -> str:
  """Returns a path itself; of a URL, a local copy of the folder that it names (host).

  Raises:
    ConfigError: there is none, or the store cannot be read.
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
