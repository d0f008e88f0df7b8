"""Notices the signals that ask a process to end, so that a run can save first."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

from loopwright.host import output

NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP", signal.SIGINT: "Ctrl-C"}
owns_process = False
"""Whether the process is a command's own, as launch.py's, and not a notebook's.

Then a second Ctrl-C may end it at once, and imports may turn off the search for garbage.
"""


@contextlib.contextmanager
def handled(handler: Callable[[int, object], None], *, wakes: socket.socket) -> Iterator[None]:
  """Handles the signals of `NAMES` in the `with`, except ignored ones (main thread).

  Args:
    handler: called by Python between two of its instructions.
    wakes: not blocking; gets the number of each signal at once, as one byte.
  """
  wakeup = signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
  heard = [number for number in NAMES if signal.getsignal(number) is not signal.SIG_IGN]
  before = {number: signal.signal(number, handler) for number in heard}
  try:
    yield
  finally:
    for number, earlier in before.items():
      signal.signal(number, earlier)
    signal.set_wakeup_fd(wakeup)


@contextlib.contextmanager
def kept() -> Iterator[None]:
  """Keeps the handler of SIGTERM in the `with` (host).

  TensorFlow's own handler, set when it connects workers, would drop the signal. One that comes
  meanwhile is handled at the end, unless a thread that is older than the `with` takes it.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopSignals:
  """Notices SIGTERM, SIGHUP (the terminal is lost) and Ctrl-C.

  Attributes:
    number: the first signal that came; None so far.
  """

  def __init__(self) -> None:
    self.number: signal.Signals | None = None
    self._presses = 0

  @property
  def name(self) -> str:
    """What users call the signal that came: "SIGTERM", "SIGHUP" or "Ctrl-C"."""
    return NAMES[self.number or signal.SIGTERM]

  @contextlib.contextmanager
  def noticed(self, say: Callable[[str], None]) -> Iterator[None]:
    """Notices signals in the `with`, if this is the main thread (host).

    A second Ctrl-C raises KeyboardInterrupt, or ends the process; after SIGTERM, too, it takes two.
    Signals that are ignored, as with
    nohup, stay ignored.

    Args:
      say: shows the user, at the first Ctrl-C, what happens next.
    """
    if threading.current_thread() is not threading.main_thread():
      yield
      return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    # Python's handlers wait for the end of a compiled loop; a thread reads of the signal at once.
    watcher = threading.Thread(target=self._watch, args=(ours, say), daemon=True)
    watcher.start()
    try:
      with handled(self._handle, wakes=theirs):
        yield
    finally:
      theirs.close()
      watcher.join()

  def _handle(self, number: int, _: object) -> None:
    self.number = self.number or signal.Signals(number)
    self._presses += number == signal.SIGINT
    if number == signal.SIGINT and self._presses > 1:
      raise KeyboardInterrupt

  def _watch(self, ours: socket.socket, say: Callable[[str], None]) -> None:
    interrupts = 0
    with ours:
      while received := ours.recv(1):
        if received[0] != signal.SIGINT:
          continue
        interrupts += 1
        if interrupts == 1:
          say(
            "Ctrl-C: saving after this loop of steps or evaluation batch; press it again to end at "
            "once"
          )
        elif owns_process:
          output.put_now(2, b"interrupted\n")
          os._exit(130)
