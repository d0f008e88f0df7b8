"""Standard streams whose reader may be gone, as after `| head`, or a lost terminal."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
from collections.abc import Iterator
from typing import Any, TextIO


def open_standard_streams() -> None:
  """Opens those of stdin, stdout and stderr that are closed, as nowhere; makes outputs `Lasting`.

  Else the next file that is opened would get their descriptor, and TensorFlow's log.
  """
  for descriptor in range(3):
    try:
      os.fstat(descriptor)
    except OSError:
      os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, this one
  sys.stdin = sys.stdin or os.fdopen(os.open(os.devnull, os.O_RDONLY))
  for name in ("stdout", "stderr"):
    stream = getattr(sys, name) or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    setattr(sys, name, Lasting(stream))


@contextlib.contextmanager
def outlasting(stream: TextIO) -> Iterator[None]:
  """Drops what the `with` writes to a stream that cannot take it, and all later output of it."""
  try:
    yield
  except OSError as error:
    if error.errno in (errno.EPIPE, errno.EIO):
      nowhere = os.open(os.devnull, os.O_WRONLY)
      os.dup2(nowhere, stream.fileno())
      os.close(nowhere)


def put_now(descriptor: int, line: bytes) -> None:
  """Writes a short line if that needs no waiting; for handlers of signals."""
  poll = select.poll()
  poll.register(descriptor, select.POLLOUT)
  with contextlib.suppress(OSError):
    if poll.poll(0):
      os.write(descriptor, line)


class Lasting:
  """A text stream whose writes never fail; everything else is the wrapped stream's."""

  def __init__(self, stream: TextIO) -> None:
    stream.reconfigure(errors="backslashreplace")  # type: ignore[attr-defined]
    self._stream = stream

  def write(self, text: str) -> int:
    """Writes the text, or drops it."""
    with outlasting(self._stream):
      self._stream.write(text)
    return len(text)

  def flush(self) -> None:
    """Writes what is buffered, or drops it."""
    with outlasting(self._stream):
      self._stream.flush()

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)
