"""Output that outlasts its reader: a closed pipe or a lost terminal must not end a run."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any, TextIO


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


class Lasting:
  """A text stream whose writes never fail; everything else is the wrapped stream's."""

  def __init__(self, stream: TextIO) -> None:
    """Wraps a stream that has a descriptor."""
    self._stream = stream

  def write(self, text: str) -> int:
    """Writes the text, or drops it."""
    with outlasting(self._stream):
      self._stream.write(text)
    return len(text)

  def flush(self) -> None:
    """Flushes what can be written."""
    with outlasting(self._stream):
      self._stream.flush()

  def __getattr__(self, name: str) -> Any:
    """Returns the wrapped stream's attribute."""
    return getattr(self._stream, name)
