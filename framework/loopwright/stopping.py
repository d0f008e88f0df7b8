"""Ends a run early, with its state saved, when a process of it is asked to by a signal."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

from loopwright.errors import Preempted
from loopwright.evaluator import Evaluator
from loopwright.flight import Flight
from loopwright.host import signals
from loopwright.reporting.progress import Progress
from loopwright.strategies.cluster.identity import Cluster

_NOTICE_S = 1.0
"""About how often the workers of a cluster ask each other about signals while they evaluate."""


class _AskedToStop(Exception):  # noqa: N818 (it is not an error)
  """A worker got a signal while all evaluate."""


class Stopping:
  """Notices signals on any worker, between loops and between the batches of an evaluation."""

  def __init__(self, cluster: Cluster, progress: Progress, flight: Flight) -> None:
    """Notices nothing yet; see `noticed`."""
    self._cluster, self._progress, self._flight = cluster, progress, flight
    self._signals = signals.StopSignals()
    self._step = 0

  def noticed(self) -> AbstractContextManager[None]:
    """Notices signals in the `with`, if this is the main thread (host)."""
    return self._signals.noticed(self._progress.message)

  def asked(self) -> bool:
    """Whether any worker was; a collective: every worker must call it (host)."""
    return self._cluster.any(self._signals.number is not None)

  def error(self, text: str) -> BaseException:
    """Returns what ends this process, with a line of `text` for the user."""
    line = f"{self._signals.name}: {text}"
    return KeyboardInterrupt(line) if self._signals.name == "Ctrl-C" else Preempted(line)

  def evaluates(self, evaluator: Evaluator, *, step: int) -> AbstractContextManager[None]:
    """Ends an evaluation at `step` in the `with` early, without an error outside it (host)."""
    self._step = step
    self._any_asked = self._cluster.asking(_NOTICE_S)
    evaluator.between_batches = self._between_batches
    return contextlib.suppress(_AskedToStop)

  def _between_batches(self, name: str, done: int, total: int | None) -> None:
    self._flight.goes_on()
    self._progress.evaluating(self._step, name, done, total)
    if done <= 1:  # another set may have slower batches
      self._any_asked = self._cluster.asking(_NOTICE_S)
    if self._any_asked(self._signals.number is not None):
      raise _AskedToStop
