"""Writes the stacks of this process's threads when it hangs; threads.py finds what they do."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from typing import IO

SIGNAL = signal.SIGUSR2
"""Writes the stacks, also while a thread keeps Python's lock; see `Signalled`."""
_MOST_BYTES = 2**22


def write(path: str, why: str) -> None:
  """Appends the stacks of all Python threads to a file, below a line of `why`; from any thread."""
  with contextlib.suppress(OSError), _opened(path) as file:
    file.write(f"\n=== {time.strftime('%Y-%m-%d %H:%M:%S')} {why}\n".encode())
    faulthandler.dump_traceback(file, all_threads=True)


class Signalled:
  """Lets `SIGNAL`, and a clock that is not wound up, write the stacks without Python's lock."""

  def __init__(self, path: str, *, after_s: float, ends: bool) -> None:
    """Registers the signal, unless something else has it.

    Args:
      after_s: seconds without `wind` after which the stacks are written.
      ends: whether the process then ends, with status 1.
    """
    self._file, self._after_s, self._ends = _opened(path), after_s, ends
    self._registered = signal.getsignal(SIGNAL) == signal.SIG_DFL
    if self._registered:
      faulthandler.register(SIGNAL, file=self._file, all_threads=True)

  def wind(self) -> None:
    """Records that Python runs; call it again and again."""
    faulthandler.dump_traceback_later(self._after_s, file=self._file, exit=self._ends)

  def close(self) -> None:
    """Takes both back."""
    faulthandler.cancel_dump_traceback_later()
    if self._registered:
      faulthandler.unregister(SIGNAL)
    self._file.close()


def _opened(path: str) -> IO[bytes]:
  flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
  file = os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0)
  if file.tell() > _MOST_BYTES:
    file.truncate(0)
  return file
