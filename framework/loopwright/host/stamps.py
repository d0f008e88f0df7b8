"""Lines of output with their time."""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO


class Stamped:
  """A text stream whose lines have their time; everything else is the wrapped stream's.

  A line is written when it ends. It is no terminal, so nothing redraws its lines.
  """

  def __init__(self, stream: TextIO, kind: str, name: str) -> None:
    """Wraps a stream.

    Args:
      stream: it gets the lines.
      kind: "time" puts the time before each line, "json" makes it an object of JSON.
      name: of the stream, for JSON.
    """
    self._stream, self._kind, self._name = stream, kind, name
    self._begun, self._lock = "", threading.Lock()

  def write(self, text: str) -> int:
    """Writes the lines that end in the text."""
    with self._lock:
      *lines, self._begun = f"{self._begun}{text}".split("\n")
      self._stream.write("".join(f"{self._of(line)}\n" for line in lines))
    return len(text)

  def close(self) -> None:
    """Writes a line that has not ended; the wrapped stream stays open (absl's logging closes)."""
    if self._begun:
      self.write("\n")
    self._stream.flush()

  def isatty(self) -> bool:
    """Returns False."""
    return False

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)

  def _of(self, line: str) -> str:
    now = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
    if self._kind == "time":
      return f"{now} {line}"
    return json.dumps({"time": now, "stream": self._name, "text": line})


@contextlib.contextmanager
def stamped(kind: str) -> Iterator[None]:
  """Gives Python's lines on stdout and stderr their time in the `with`; "plain" changes nothing."""
  if kind == "plain":
    yield
    return
  before = sys.stdout, sys.stderr
  ours = Stamped(sys.stdout, kind, "stdout"), Stamped(sys.stderr, kind, "stderr")
  sys.stdout, sys.stderr = ours
  try:
    yield
  finally:
    for each in ours:
      each.close()
    sys.stdout, sys.stderr = before
