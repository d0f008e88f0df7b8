"""What TensorFlow's and XLA's C++ code writes to stderr, kept out of a report.

They write to descriptor 2 without Python, also in the middle of a table.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType

_FILTER = """
import re, sys
remark = re.compile(rb"WARNING: All log messages before absl|[IWE]\\d{4} |"
  rb"\\d{4}-\\d\\d-\\d\\d \\d\\d:\\d\\d:\\d\\d\\.\\d+: [IWE] |To enable the following instructions")
for line in sys.stdin.buffer:
  if not remark.match(line):
    sys.stderr.buffer.write(line)
    sys.stderr.buffer.flush()
"""
"""Drops information, warnings and errors of C++; what is fatal, and all else, passes."""


@contextlib.contextmanager
def without_remarks() -> Iterator[None]:
  """Leaves C++'s log lines out of stderr inside the context, except fatal ones (host).

  A process of its own filters them, so that what this one writes while it dies is shown too.
  TF_CPP_MIN_LOG_LEVEL=0 shows all.
  """
  if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0":
    yield
    return
  sys.stderr.flush()
  try:
    shown = os.dup(2)
  except OSError:  # closed
    yield
    return
  child = subprocess.Popen(
    [sys.executable, "-SEc", _FILTER], stdin=subprocess.PIPE, stderr=shown, start_new_session=True
  )
  assert child.stdin is not None
  os.dup2(child.stdin.fileno(), 2)
  child.stdin.close()
  try:
    yield
  finally:
    sys.stderr.flush()
    os.dup2(shown, 2)
    os.close(shown)
    with contextlib.suppress(subprocess.TimeoutExpired):  # another process holds the pipe open
      child.wait(timeout=5)


def import_without_remarks(name: str) -> None:
  """From now on the first `import name` leaves C++'s log lines out of stderr (host).

  TensorFlow 2.21 writes some while its libraries load, before it reads TF_CPP_MIN_LOG_LEVEL.
  """
  if name not in sys.modules:
    sys.meta_path.insert(0, _Finder(name))


class _Finder(importlib.abc.MetaPathFinder):
  """Finds one module as Python does, once, with a loader that executes it without remarks."""

  def __init__(self, name: str) -> None:
    self._name = name

  def find_spec(
    self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
  ) -> importlib.machinery.ModuleSpec | None:
    if fullname != self._name:
      return None
    sys.meta_path.remove(self)
    spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
    if spec is not None and spec.loader is not None:
      spec.loader.exec_module = without_remarks()(spec.loader.exec_module)  # type: ignore[method-assign]
    return spec
