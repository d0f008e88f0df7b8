"""Reads files that may be damaged, hostile or endless: bounded memory, and one line for the user.

size = require_file(path, "an .npz file")
with reading(path, "save it again with numpy"):
  array = np.load(path, allow_pickle=False)
"""

from __future__ import annotations

import contextlib
import gzip
import os
import stat
import zipfile
from collections.abc import Iterator
from typing import IO

from loopwright.errors import ConfigError, first_line, printable

MAX_BYTES = 2**30
"""Default of `max_bytes`: the memory that reading one file may take."""
_BLOCK = 2**20
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


@contextlib.contextmanager
def reading(path: str, remedy: str) -> Iterator[None]:
  """Turns any exception about a file's content into a ConfigError with its name (any context).

  Libraries raise whatever they stumble over: numpy's reader alone raises twelve classes. So wrap
  only the library's call, since an error of the code around it would be hidden.
  """
  try:
    yield
  except ConfigError:
    raise
  except Exception as error:
    raise unreadable(path, error, remedy) from error


def unreadable(path: str, error: Exception, remedy: str) -> ConfigError:
  """Returns the error for a file in which a library raised `error`."""
  strerror = getattr(error, "strerror", None) if isinstance(error, OSError) else None
  reason = printable(strerror or first_line(error))[:200].rstrip(".")
  return ConfigError(f"{path!r} cannot be read ({reason}); {remedy}.")


def require_file(path: str, what: str) -> int:
  """Returns the size of a regular file in bytes (any context).

  Args:
    path: local.
    what: the file that is needed, such as "an .npz file".

  Raises:
    ConfigError: there is no such file; or a folder, a device or a pipe, which may have no end.
  """
  try:
    found = os.stat(path)
  except FileNotFoundError:
    raise ConfigError(f"{path!r} does not exist; give the path of {what}.") from None
  except (OSError, ValueError) as error:  # ValueError: a name with a null character
    raise unreadable(path, error, f"give the path of {what}") from None
  if not stat.S_ISREG(found.st_mode):
    kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a device")
    raise ConfigError(f"{path!r} is {kind}, not a file; give the path of {what}.")
  return found.st_size


def require_plain(folder: str) -> None:
  """Raises a ConfigError if something in a folder is a pipe, a socket or a device (any context).

  A reader or a writer of it could wait without end.
  """
  with contextlib.suppress(OSError):  # it is not there yet
    for entry in os.scandir(folder):
      with contextlib.suppress(FileNotFoundError):  # removed meanwhile
        kind = stat.S_IFMT(os.stat(entry.path).st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFDIR):
          raise ConfigError(
            f"{entry.path!r} is {_KINDS.get(kind, 'a device')}, not a file; remove it."
          )


def require_bytes(path: str, needed: int, max_bytes: int) -> None:
  """Raises a ConfigError if reading a file would take more than `max_bytes` of memory."""
  if needed > max_bytes:
    raise ConfigError(
      f"{path!r} would take {needed:,} bytes of memory, but max_bytes is {max_bytes:,}; raise it "
      "if you trust the file."
    )


def require_archive(path: str, max_bytes: int, remedy: str) -> list[zipfile.ZipInfo]:
  """Returns the members of a zip file; Python's `zipfile` holds them to the sizes they declare.

  Raises:
    ConfigError: see `require_file` and `require_bytes`; or it is damaged.
  """
  require_file(path, "a zip file")
  with reading(path, remedy), zipfile.ZipFile(path) as archive:
    members = archive.infolist()
  require_bytes(path, sum(member.file_size for member in members), max_bytes)
  return members


class Reader:
  """A local file, read in blocks; any error in it is a ConfigError.

  Attributes:
    path: of the file.
    size: its length in bytes; None if it is being unpacked.
  """

  def __init__(self, path: str, what: str, remedy: str, *, unpack: bool = False) -> None:
    """Opens the file; use it in a `with`.

    Args:
      path: local.
      what: see `require_file`.
      remedy: what to do if it is damaged.
      unpack: whether to read the content of a gzipped file.

    Raises:
      ConfigError: see `require_file`; or it cannot be opened.
    """
    self.path, self._remedy = path, remedy
    size = require_file(path, what)
    with self._reading():
      self._raw = open(path, "rb")  # noqa: SIM115 (closed by __exit__)
      packed = unpack and self._raw.peek(2)[:2] == b"\x1f\x8b"
    self._file: IO[bytes] | gzip.GzipFile = (
      gzip.GzipFile(fileobj=self._raw) if packed else self._raw
    )
    self.size = None if packed else size

  def read(self, size: int) -> bytes:
    """Returns at most `size` bytes; fewer only at the end."""
    with self._reading():
      return self._file.read(size)

  def seek(self, position: int) -> None:
    """Continues at a byte of the file."""
    with self._reading():
      self._file.seek(position)

  def read_into(self, view: memoryview) -> int:
    """Fills a view of bytes; returns how many there were."""
    done = 0
    while done < len(view) and (block := self.read(min(_BLOCK, len(view) - done))):
      view[done : done + len(block)] = block
      done += len(block)
    return done

  def _reading(self) -> contextlib.AbstractContextManager[None]:
    return reading(self.path, self._remedy)

  def __enter__(self) -> Reader:
    return self

  def __exit__(self, *unused: object) -> None:
    self._raw.close()


def content(path: str, what: str, *, max_bytes: int, remedy: str) -> bytes:
  """Returns the bytes of a file (any context).

  Raises:
    ConfigError: see `require_file` and `require_bytes`; or it cannot be read.
  """
  with Reader(path, what, remedy) as file:
    require_bytes(path, file.size or 0, max_bytes)
    found = file.read(max_bytes + 1)  # it may have grown
  require_bytes(path, len(found), max_bytes)
  return found
