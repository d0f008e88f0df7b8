"""Runs of launch.py in forked processes: TensorFlow is imported once, and no device is used before.

  forks.warm_up()
  reference = forks.whole(base)
  run = forks.small(base / "trial")  # benchmarks/trials.gin; its log is trial.txt
  status = run.wait(30)  # negative: the signal; None: it still runs

A fork ends as `python launch.py` does, by the interpreter's own teardown.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import runpy
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIG = "benchmarks/trials.gin"
WARM = (
  "loopwright.runs.runner",
  "orbit",
  "tensorflow",
  "keras",
  "tf_keras",
  "benchmarks.trials_task",
)


def warm_up() -> None:
  """Imports what a run imports; raises if that used a device."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
  sys.path[:0] = [str(REPOSITORY)]
  for name in WARM:
    importlib.import_module(name)
  check_cold()
  gc.freeze()  # else the first collection of each fork copies all that was imported


def check_cold() -> None:
  """Raises RuntimeError if this process has used TensorFlow's runtime: its forks would hang."""
  from tensorflow.python.eager import context

  if context.context()._initialized:  # noqa: SLF001
    raise RuntimeError("TensorFlow's runtime was used before a fork; use it in a fork only")


def tasks_in(folder: Path) -> None:
  """Makes `--local_workers` write the process id of each task, such as worker-1, to a folder."""
  from loopwright.tools.local_cluster import Process

  start = Process.__init__
  folder.mkdir(parents=True, exist_ok=True)

  def noted(self: Process, name: str, *more: Any, **options: Any) -> None:
    start(self, name, *more, **options)
    (folder / name).write_text(str(self._popen.pid))

  Process.__init__ = noted  # type: ignore[method-assign]


class Fork:
  """One process of launch.py in a session of its own."""

  def __init__(
    self,
    arguments: Sequence[str],
    log: Path | None,
    *,
    before: Callable[[], object] = lambda: None,
    environment: Mapping[str, str] | None = None,
    stdout: int | None = None,
  ) -> None:
    """Starts it.

    Args:
      arguments: the command line after launch.py.
      log: where its output goes, at the end; None for nowhere.
      before: called in the process before launch.py, to plant a fault.
      environment: variables to set.
      stdout: a file descriptor for its output, in place of `log`.
    """
    self.log, self.started = log, time.monotonic()
    self.status: int | None = None
    sys.stdout.flush()
    self.pid = os.fork()
    if self.pid == 0:
      _run(arguments, log, before, environment or {}, stdout)
    self._pidfd = os.pidfd_open(self.pid)

  def poll(self) -> int | None:
    """Returns the status, or None while it runs."""
    return self.wait(0)

  def wait(self, timeout_s: float) -> int | None:
    """Waits for the end; returns the status, negative for a signal, or None after `timeout_s`."""
    if self.status is None and select.select([self._pidfd], [], [], timeout_s)[0]:
      self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
      os.close(self._pidfd)
    return self.status

  def send(self, number: int) -> None:
    """Sends a signal, unless it has ended."""
    if self.poll() is None:
      os.kill(self.pid, number)

  def kill(self) -> None:
    """Ends it and the processes that it started."""
    if self.poll() is None:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self.pid, signal.SIGKILL)
      self.wait(60)

  def last_line(self) -> str:
    """Returns the last line of its output, "" if there is none."""
    text = self.log.read_text(errors="replace") if self.log and self.log.exists() else ""
    return (text.strip().splitlines() or [""])[-1]


def small(
  folder: Path, *bindings: str, flags: Sequence[str] = (), config: str = CONFIG, **options: Any
) -> Fork:
  """Starts a run of the small config in a folder; `options` as of `Fork`."""
  log = folder.with_name(f"{folder.name}.txt")
  params = [f"--gin_param={binding}" for binding in bindings]
  return Fork([f"--gin_file={config}", f"--model_dir={folder}", *flags, *params], log, **options)


def whole(base: Path, *bindings: str, name: str = "reference", **options: Any) -> Path:
  """Returns the folder of a run that nothing interrupted.

  Raises:
    SystemExit: it failed.
  """
  run = small(base / name, *bindings, **options)
  if (status := run.wait(300)) != 0:
    raise SystemExit(f"the uninterrupted run ended with {status}: {run.last_line()}")
  return base / name


def _run(
  arguments: Sequence[str],
  log: Path | None,
  before: Callable[[], object],
  environment: Mapping[str, str],
  stdout: int | None,
) -> None:
  """Becomes `python launch.py`; never returns."""
  status = 1
  try:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it
    os.environ.update(environment)
    _redirect(log, stdout)
    sys.argv = ["launch.py", *arguments]
    os.chdir(REPOSITORY)
    before()
    runpy.run_path("launch.py", run_name="__main__")
    status = 0
  except SystemExit as end:
    status = end.code if isinstance(end.code, int) else int(end.code is not None)
  except BaseException:
    traceback.print_exc()
  finally:
    # Not through the caller's frames, whose `finally` would run a second time.
    ctypes.pythonapi.Py_Exit(status)


def _redirect(log: Path | None, stdout: int | None) -> None:
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  if stdout is None:
    path = os.devnull if log is None else log
    stdout = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
  os.dup2(stdout, 1)
  os.dup2(stdout, 2)
