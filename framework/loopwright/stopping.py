"""Ends a run early, with its state saved, when a process of it is asked to by a signal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from loopwright.errors import Preempted
from loopwright.evaluator import Evaluator
from loopwright.hooks import Hook, Interrupted
from loopwright.host import signals
from loopwright.reporting.progress import Progress
from loopwright.saving import Saving
from loopwright.strategies.cluster import Cluster

_NOTICE_S = 1.0
"""About how often the workers of a cluster ask each other about signals while they evaluate."""


class Stopping(Hook):
  """Notices signals on any worker, between loops and between the batches of an evaluation."""

  def __init__(
    self, cluster: Cluster, *, progress: Progress, goes_on: Callable[[], None], saving: Saving
  ) -> None:
    """Notices nothing yet; see `noticed`.

    Args:
      cluster: all processes of the run.
      progress: prints what is noticed, and how far an evaluation is.
      goes_on: called after each batch of an evaluation.
      saving: saves the state before the run ends.
    """
    self._cluster, self._progress = cluster, progress
    self._goes_on, self._saving = goes_on, saving
    self._signals = signals.StopSignals()

  def noticed(self) -> AbstractContextManager[None]:
    """Notices signals in the `with`, if this is the main thread (host)."""
    return self._signals.noticed(self._progress.message)

  def pauses(self, step: int) -> None:
    """Ends the run, with its state saved, if any worker was asked to; a collective.

    Raises:
      Preempted: by SIGTERM or SIGHUP.
      KeyboardInterrupt: by Ctrl-C.
    """
    if not self._cluster.any(self._signals.number is not None):
      return
    folder, signal = self._saving.completes(), self._signals.name
    kind = KeyboardInterrupt if signal == "Ctrl-C" else Preempted
    raise kind(f"{signal}: saved step {step} in {folder}; start the same command again to continue")

  @contextlib.contextmanager
  def evaluates(self, evaluator: Evaluator, step: int) -> Iterator[None]:
    """Ends an evaluation early by Interrupted, if any worker was asked to end."""
    any_asked = self._cluster.asking(_NOTICE_S)

    def between_batches(name: str, done: int, total: int | None) -> None:
      nonlocal any_asked
      self._goes_on()
      self._progress.evaluating(step, name, done, total)
      if done <= 1:  # another set may have slower batches
        any_asked = self._cluster.asking(_NOTICE_S)
      if any_asked(self._signals.number is not None):
        raise Interrupted

    evaluator.between_batches = between_batches
    yield
