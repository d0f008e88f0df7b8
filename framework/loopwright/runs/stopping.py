"""Ends a run early, with its state saved, when a process of it is asked to by a signal."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from loopwright.distribution.cluster import Cluster
from loopwright.errors import Preempted
from loopwright.evaluator import Evaluator
from loopwright.hooks import Hook, Interrupted
from loopwright.host.signals import StopSignals
from loopwright.reporting.progress import Progress
from loopwright.runs.saving import Saving

_NOTICE_S = 1.0
"""About how often the workers of a cluster ask each other about signals while they evaluate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stopping(Hook):
  """Notices signals on any worker, between loops and between the batches of an evaluation.

  Attributes:
    progress: prints what is noticed, and how far an evaluation is.
    goes_on: called after each batch of an evaluation.
    saving: saves the state before the run ends.
  """

  cluster: Cluster
  progress: Progress
  goes_on: Callable[[], None]
  saving: Saving
  signals: StopSignals = dataclasses.field(default_factory=StopSignals)

  def pauses(self, step: int) -> None:
    """Ends the run, with its state saved, if any worker was asked to; a collective.

    Raises:
      Preempted: by SIGTERM or SIGHUP.
      KeyboardInterrupt: by Ctrl-C.
    """
    if not self.cluster.any(self.signals.number is not None):
      return
    folder, signal = self.saving.completes(), self.signals.name
    kind = KeyboardInterrupt if signal == "Ctrl-C" else Preempted
    raise kind(f"{signal}: saved step {step} in {folder}; start the same command again to continue")

  @contextlib.contextmanager
  def evaluates(self, evaluator: Evaluator, step: int) -> Iterator[None]:
    """Ends an evaluation early by Interrupted, if any worker was asked to end."""
    any_asked = self.cluster.asking(_NOTICE_S)

    def between_batches(name: str, done: int, total: int | None) -> None:
      nonlocal any_asked
      self.goes_on()
      self.progress.evaluating(step, name, done, total)
      if done <= 1:  # another set may have slower batches
        any_asked = self.cluster.asking(_NOTICE_S)
      if any_asked(self.signals.number is not None):
        raise Interrupted

    evaluator.between_batches = between_batches
    yield
