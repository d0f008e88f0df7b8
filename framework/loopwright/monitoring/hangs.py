"""Notices that a run hangs, and says in one line which worker is behind, and in what.

The thread of the flight record (flight.py) calls `Watchdog.beat` twice a second. A phase hangs if
it shows no progress for `run.hang_timeout_s`, or without that for ten times its usual time and at
least a minute. Then every worker writes the stacks of its Python threads, finds out more about its
phase, and the lowest worker that answers compares their records (hang_report.py). The request is a
file in the run folder. docs/goodput.md has what is found.
"""

from __future__ import annotations

import collections
import contextlib
import os
import statistics
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from loopwright import registry
from loopwright.host import output, signals, stacks
from loopwright.monitoring import record
from loopwright.monitoring.flight import TRAINING, Flight
from loopwright.options import Hangs
from loopwright.run_folder import layout

if TYPE_CHECKING:
  from loopwright.monitoring.hang_report import Inquiry
  from loopwright.trainer import Trainer

FACTOR, FLOOR_S = 10.0, 60.0
"""Without a timeout: a phase of ten times its usual time, and at least a minute, hangs."""
_LATER_S = 20.0
"""So much later a process whose threads do not get Python's lock writes its stacks, or ends."""
READ_S = 2.0


class Watchdog:
  """Watches the phases of one process; see the module."""

  def __init__(
    self, flight: Flight, trainer: Trainer, model_dir: str, *, timeout_s: float | None, ends: bool
  ) -> None:
    """Watches nothing yet (host).

    Args:
      timeout_s: seconds without progress that are a hang; None for a multiple of the usual time.
      ends: whether the processes of a run that hangs then end, with status 1.
    """
    self._flight, self._trainer, self._model_dir = flight, trainer, model_dir
    self._worker = trainer.cluster.index
    self._timeout_s, self._ends = timeout_s, ends
    self._stacks = os.path.join(model_dir, layout.stacks(self._worker))
    self._usual: dict[str, collections.deque[float]] = collections.defaultdict(
      lambda: collections.deque(maxlen=9)
    )
    self._phase, self._unchanged_s, self._step_s, self._step = "", 0.0, 0.0, -1
    self._told, self._beat, self._judges_at = False, 0, 0
    self._inquiry: Inquiry | None = None
    self._asked = record.asked(model_dir)
    self._clock: stacks.Signalled | None = None

  @contextlib.contextmanager
  def watching(self) -> Any:
    """Registers what works without Python's lock, in a process of the command line (host)."""
    if signals.owns_process and threading.current_thread() is threading.main_thread():
      after_s = self._timeout_s or FLOOR_S
      self._clock = stacks.Signalled(self._stacks, after_s=after_s + _LATER_S, ends=self._ends)
    try:
      yield
    finally:
      if self._clock:
        self._clock.close()
        self._clock = None

  def beat(self) -> None:
    """Looks at this process, and for what another asks (the thread of the record)."""
    self._beat += 1
    if self._clock and self._beat % 4 == 1:
      self._clock.wind()
    asked = record.asked(self._model_dir)
    if asked != self._asked:
      self._asked = asked
      if self._inquiry is None:
        self._inquiry = registry.load("part", "Inquiry")(
          self._flight, self._trainer, self._model_dir, ends=self._ends
        )
      self._judges_at = self._beat + self._inquiry.answer()
    elif self._judges_at == self._beat and self._inquiry is not None:
      self._told = True
      self._inquiry.judge()
    self._look()

  def _look(self) -> None:
    """Asks all workers for their stacks if this one has shown no progress for too long."""
    leg = self._flight.leg
    if leg.unchanged_s < self._unchanged_s:  # it has gone on
      self._usual[self._phase].append(self._unchanged_s)
      if self._told:
        warn(f"goes on: worker {self._worker} has left {leg.doing or self._phase}")
      self._told, self._step_s, leg.doing = False, 0.0, ""
    self._phase, self._unchanged_s = leg.path, leg.unchanged_s
    usual = self._usual.get(self._phase)
    limit_s = self._timeout_s or (usual and max(FLOOR_S, FACTOR * statistics.median(usual)))
    if not limit_s or self._told:
      return
    stalled_s = leg.unchanged_s - self._step_s
    if stalled_s > limit_s / 4 and leg.phase[-1:] == [TRAINING] and self._has_stepped():
      self._step_s = leg.unchanged_s
    elif stalled_s > limit_s:
      self._told = True
      with contextlib.suppress(OSError):
        record.ask(self._model_dir)

  def _has_stepped(self) -> bool:
    """Whether the loop has done steps since this was last asked."""
    step = within(READ_S, lambda: int(self._trainer.global_step.numpy()))
    before, self._step = self._step, self._flight.leg.step if step is None else step
    return self._step > max(before, self._flight.leg.step)


@contextlib.contextmanager
def watched(
  flight: Flight, trainer: Trainer, folder: str, options: Hangs, *, say: Callable[[str], object]
) -> Iterator[None]:
  """Keeps the flight record and watches for hangs and slow workers while it runs (host).

  Args:
    folder: of the run.
    say: gets the table of the workers' times in the end, if there are several workers.
  """
  cluster = trainer.cluster
  watchdog = Watchdog(
    flight, trainer, folder, timeout_s=options.hang_timeout_s, ends=options.end_if_hung
  )
  stragglers = None
  if cluster.is_chief and cluster.size > 1:
    stragglers = registry.load("part", "Stragglers")(folder, cluster.size)

  def beat() -> None:
    watchdog.beat()
    if stragglers is not None:
      stragglers.beat()

  with flight.recorded(folder, cluster.index, beat=beat), watchdog.watching():
    yield
  if stragglers is not None and (said := stragglers.table()):
    say(said)


def within(seconds: float, function: Callable[[], Any]) -> Any:
  """Returns what a function returns; None if it fails, or takes longer: it is left to itself."""
  results: list[Any] = []

  def call() -> None:
    with contextlib.suppress(Exception):
      results.append(function())

  thread = threading.Thread(target=call, name="loopwright-asks", daemon=True)
  thread.start()
  thread.join(seconds)
  return results[0] if results else None


def warn(line: str) -> None:
  """Writes a line to stderr, if that needs no waiting."""
  output.put_now(2, f"WARNING: hang: {line}\n".encode())
