"""Runs groups of checks side by side, in forks of a process that has not started TensorFlow yet.

Most of their time is Python that traces, which uses one core. A fork has imported everything.
"""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.process
import ctypes
import gc
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tensorflow.python.eager import context

from loopwright.tools.verify.report import Result

MOST = 4
"""Processes at a time: more would wait for the longest group anyway."""
_FIRST = (("replicas", "order"), ("restore",), ("learning",), ("gradients",))
"""What begins first, as it takes longest; groups of one process share a traced step."""
_PR_SET_PDEATHSIG = 1
_in_fork: list[Callable[[str], Ran]] = []
"""How this process runs a group, if it is a fork."""


class Ran(NamedTuple):
  """A group that is done: its name, its results, and how long it took."""

  group: str
  results: list[Result]
  seconds: float


def ran(
  groups: Sequence[str],
  run: Callable[[str], list[Result]],
  begin: Callable[[], None],
  *,
  most: int,
) -> Iterator[Ran]:
  """Yields each group, in order; they run one after another where a fork could not go on (host).

  Args:
    groups: their names.
    run: runs one.
    begin: called once in each process that runs some.
    most: processes at a time, if there are as many cores.
  """

  def timed(group: str) -> Ran:
    began = time.monotonic()
    return Ran(group, run(group), time.monotonic() - began)

  processes = min(most, _cores(), len(groups))
  if processes > 1 and may_fork():
    for done in _forked(groups, processes, timed, begin):
      yield done
      groups = groups[1:]
  if groups:
    begin()
  yield from map(timed, groups)


def _cores() -> int:
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def may_fork() -> bool:
  """Whether a fork of this process could go on: it has neither threads nor devices so far."""
  used = context.context_safe()
  with_devices = used is not None and used._context_handle is not None  # noqa: SLF001
  return sys.platform == "linux" and threading.active_count() == 1 and not with_devices


def _forked(
  groups: Sequence[str],
  processes: int,
  timed: Callable[[str], Ran],
  begin: Callable[[], None],
) -> Iterator[Ran]:
  """Yields groups in order, up to the first that a process was ended in, as for its memory."""
  others = multiprocessing.active_children()
  sys.stdout.flush()  # else each process writes what is in the buffer
  gc.freeze()  # else the first collection of a fork copies all that was imported
  try:
    fork = multiprocessing.get_context("fork")
    pool = concurrent.futures.ProcessPoolExecutor(processes, fork, _begin_fork, (timed, begin))
    jobs = [[group for group in job if group in groups] for job in _FIRST]
    jobs += [[group] for group in groups if group not in itertools.chain(*jobs)]
    waiting = {
      group: future for job in jobs for future in [pool.submit(_run_in_fork, job)] for group in job
    }
    for group in groups:
      yield waiting[group].result()[group]
  except concurrent.futures.process.BrokenProcessPool:
    return
  finally:
    for child in set(multiprocessing.active_children()).difference(others):
      child.kill()
    gc.unfreeze()


def _begin_fork(timed: Callable[[str], Ran], begin: Callable[[], None]) -> None:
  """Begins in a fork, which ends with its parent, whatever ends that."""
  ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
  _in_fork.append(timed)
  begin()


def _run_in_fork(groups: Sequence[str]) -> dict[str, Ran]:
  return {group: _in_fork[0](group) for group in groups}
