"""How other Python processes start, so that no file of the user's replaces a module of Python's.

Python searches the working directory first, or the folder of a script. A child does neither. So a
user's `signal.py` does not replace Python's module, and neither does a module of ours.
"""

import os
import signal
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
"""The folder that holds the package: framework/ in a clone, or where packages are installed."""

_RUN_MODULE = (
  "import sys; del sys.path[0]; import runpy; "
  "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""For Python 3.10, which has no option -P; `sys` is built in."""

_WITH_PARENT = """
import ctypes, os, sys
PR_SET_PDEATHSIG = 1
parent, number = map(int, sys.argv[1:3])
getattr(ctypes.CDLL(None), "prctl", lambda *_: 0)(PR_SET_PDEATHSIG, number, 0, 0, 0)
if os.getppid() == parent:  # else the parent died before prctl
  os.execvp(sys.argv[3], sys.argv[3:])
"""


def module(name: str) -> list[str]:
  """Returns the command that runs a module in another process, without the working directory."""
  if sys.version_info >= (3, 11):
    return [sys.executable, "-P", "-m", name]
  return [sys.executable, "-c", _RUN_MODULE, name]


PROGRAM = tuple(module("loopwright"))
"""What starts a command in another process."""


def with_parent(number: int = signal.SIGKILL) -> list[str]:
  """Returns what starts a command that gets a signal when this process ends, on Linux."""
  return [sys.executable, "-I", "-S", "-c", _WITH_PARENT, str(os.getpid()), str(int(number))]
