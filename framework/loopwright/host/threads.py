"""What the threads of this process do: their places, TensorFlow's host functions, blocked files.

For a process that hangs. Nothing here waits for Python's main thread, or for TensorFlow.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_OF_FILES = {
  0: "read",
  1: "write",
  2: "open",
  17: "pread",
  18: "pwrite",
  74: "fsync",
  257: "openat",
}
"""System calls of x86-64 whose first argument is a descriptor, or of "open" a path."""
_PATH = {2: 1, 257: 2}
"""The argument with the path."""
_LIBRARY = os.path.dirname(os.__file__)


def host_functions() -> Iterator[tuple[str, str]]:
  """Yields (token, place) of each `tf.numpy_function` or `tf.py_function` that runs now.

  The token is the attribute of its operation; the place is such as "preprocess, task.py:12".
  """
  for frame in sys._current_frames().values():  # noqa: SLF001 (documented)
    for each in _outwards(frame):
      in_registry = each.f_code.co_filename.endswith("script_ops.py")
      token = each.f_locals.get("token") if in_registry else None
      if token and each.f_code.co_name == "__call__":
        yield token.decode() if isinstance(token, bytes) else str(token), place(frame)
        break


def main_place() -> str:
  """Returns where the main thread is."""
  frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
  return place(frame) if frame else ""


def place(frame: FrameType) -> str:
  """Returns the innermost function of a stack that is neither TensorFlow's nor Python's own."""
  stack = list(_outwards(frame))
  own = next((each for each in stack if not _is_foreign(each.f_code.co_filename)), stack[0])
  code = own.f_code
  return f"{code.co_name}, {os.path.basename(code.co_filename)}:{own.f_lineno}"


def _is_foreign(file: str) -> bool:
  packages = ("tensorflow", "keras", "tf_keras")
  if any(f"{os.sep}{package}{os.sep}" in file for package in packages):
    return True
  return file.startswith((_LIBRARY, "<")) and "site-packages" not in file


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
  while frame is not None:
    yield frame
    frame = frame.f_back


def blocked_files() -> list[str]:
  """Returns phrases such as "read of /data/x" for the threads that wait for a file (Linux, x86-64).

  Those that wait now and a tenth of a second later.
  """
  if platform.machine() != "x86_64":
    return []
  first = dict(_calls())
  time.sleep(0.1)
  return [said for each, said in _calls() if first.get(each) == said]


def _calls() -> Iterator[tuple[str, str]]:
  own = str(threading.get_native_id())
  for thread in os.listdir("/proc/self/task"):
    with contextlib.suppress(OSError, ValueError, IndexError):
      words = Path(f"/proc/self/task/{thread}/syscall").read_text().split()
      number = int(words[0]) if words[0].isdecimal() else -1
      if thread != own and number in _OF_FILES:
        path = _text(words[_PATH[number]]) if number in _PATH else _file(words[1])
        if path.startswith("/") and not path.startswith(("/dev/null", "/proc/")):
          yield thread, f"{_OF_FILES[number]} of {path}"


def _file(descriptor: str) -> str:
  return os.readlink(f"/proc/self/fd/{int(descriptor, 16)}")


def _text(address: str) -> str:
  """Returns the text at an address of this process."""
  memory = os.open("/proc/self/mem", os.O_RDONLY)
  try:
    return os.pread(memory, 1024, int(address, 16)).split(b"\0")[0].decode(errors="replace")
  finally:
    os.close(memory)
