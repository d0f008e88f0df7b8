"""Output that never waits for its reader, which may be closed, gone or stalled."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

_PIECE = 4096
"""Bytes that a pipe takes at once, without waiting, if it takes any."""
_LOOK_S = 0.1
_PATIENCE_S = 1.0
"""How long output waits for a reader that takes nothing, once the process was asked to end."""

_hurried = threading.Event()


def hurry() -> None:
  """From now on no output waits long for its reader; for a process that was asked to end."""
  _hurried.set()


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
  """Drops what the `with` writes to a stream that cannot take it.

  If the reader or the terminal is gone, all later output of the stream's descriptor is dropped too,
  also that of TensorFlow's C++ code. After another error, such as a full disk, it is tried again.
  """
  try:
    yield
  except OSError as error:
    if error.errno in (errno.EPIPE, errno.EIO):
      nowhere = os.open(os.devnull, os.O_WRONLY)
      os.dup2(nowhere, stream.fileno())
      os.close(nowhere)


def put_now(descriptor: int, line: bytes) -> None:
  """Writes a short line if that needs no waiting; for handlers of signals."""
  with contextlib.suppress(OSError):
    if _takes(descriptor, 0.0):
      os.write(descriptor, line)


def _takes(descriptor: int, seconds: float) -> bool:
  """Whether a descriptor takes output, or an error, within some seconds."""
  poll = select.poll()
  poll.register(descriptor, select.POLLOUT)
  return bool(poll.poll(seconds * 1000))


class Lasting:
  """A text stream whose writes never fail; everything else is the wrapped stream's.

  A whole line is written at once. A reader that takes nothing, as a terminal after Ctrl-S, is
  waited for, until `hurry`. What the stream's encoding does not have is escaped.
  """

  def __init__(self, stream: TextIO) -> None:
    self._stream = stream
    self._lock = threading.RLock()
    self._rest, self._stalled = "", False

  def write(self, text: str) -> int:
    """Writes the text, its last line when it is whole or flushed; or drops it."""
    with self._lock:
      lines, newline, self._rest = f"{self._rest}{text}".rpartition("\n")
      if newline:
        self._put(f"{lines}{newline}")
    return len(text)

  def put(self, data: bytes) -> None:
    """Writes bytes, or drops them."""
    with self._lock, outlasting(self._stream):
      self._stream.flush()  # what was written before this wrapped it
      while data and self._is_ready():
        data = data[os.write(self._stream.fileno(), data[:_PIECE]) :]

  def flush(self) -> None:
    """Writes what has no line end yet."""
    with self._lock:
      rest, self._rest = self._rest, ""
      self._put(rest)

  def _put(self, text: str) -> None:
    self.put(text.encode(self._stream.encoding or "utf-8", "backslashreplace"))

  def _is_ready(self) -> bool:
    """Waits until the reader takes something; False if the process cannot wait for it."""
    began = time.monotonic()
    while not _takes(self._stream.fileno(), _LOOK_S):
      if _hurried.is_set() and (self._stalled or time.monotonic() - began > _PATIENCE_S):
        self._stalled = True
        return False
    self._stalled = False
    return True

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)
