"""Reads files that may be damaged, or none at all: one line for the user.

size = require_file(path, "an .npz file")
with reading(path, "save it again with numpy"):
  array = np.load(path, allow_pickle=False)
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

from loopwright.errors import ConfigError, first_line, printable

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


def content(path: str, what: str, *, remedy: str, max_bytes: int | None = None) -> bytes:
  """Returns the bytes of a file (any context).

  Raises:
    ConfigError: see `require_file`; it cannot be read, or has more than `max_bytes`.
  """
  size = require_file(path, what)
  if max_bytes is not None and size > max_bytes:
    raise ConfigError(f"{path!r} has {size:,} bytes, more than {max_bytes:,}; {remedy}.")
  with reading(path, remedy), open(path, "rb") as file:
    return file.read()
