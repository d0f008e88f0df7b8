"""The process of a command: its signals and its end."""

import atexit
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn


def say(line: str, status: int) -> int:
  """Prints a line to stderr and returns the status."""
  print(line, file=sys.stderr)
  return status


def run(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> NoReturn:
  """Runs `main` on a command line as a process of its own; ends it whatever its threads do."""
  if os.getpid() == 1:
    _leave_process_1()
  from loopwright.host import output, signals

  output.open_standard_streams()
  for number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) is not signal.SIG_IGN:
      signal.signal(number, end_at_once)
  signals.owns_process = True
  status = main(argv)
  # Python's own way out waits for its lock in destructors, such as a data iterator's: without
  # end, while a tf.numpy_function runs. Here everything is written, so nothing is left to wait for.
  for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
  atexit._run_exitfuncs()  # noqa: SLF001
  logging.shutdown()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


def end_at_once(number: int, _: object) -> None:
  """Handles a signal while there is nothing to save; during training, Session handles it."""
  from loopwright.host import output

  output.put_now(2, f"{signal.Signals(number).name}: exited, nothing to save\n".encode())
  os._exit(75)


def _leave_process_1() -> None:
  """Goes on in a child; the parent passes signals on, collects processes, and ends with the child.

  The kernel protects process 1 of a container from SIGKILL of processes in it, so that a run that
  hangs could not be ended.
  """
  child = os.fork()
  if child == 0:
    os.setpgid(0, 0)  # so that a terminal's signals come once, from the parent
    return
  for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, lambda number, _: os.kill(child, number))
  while True:
    process, status = os.wait()
    if process == child:
      code = os.waitstatus_to_exitcode(status)
      os._exit(code if code >= 0 else 128 - code)
