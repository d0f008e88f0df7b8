"""Notices that a run hangs, and says in one line which worker is behind, and in what.

The thread of the flight record (flight.py) calls `Watchdog.beat` twice a second. A phase hangs if
it shows no progress for `run.hang_timeout_s`, or without that for ten times its usual time and at
least a minute. Then every worker writes its stacks and what it does (hang_report.py), and the
lowest worker that answers compares their records. The request is a file in the run folder.
docs/goodput.md has what is found.
"""

from __future__ import annotations

import collections
import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from loopwright.host import output, signals, stacks
from loopwright.monitoring import record
from loopwright.monitoring.flight import BEAT_S, TRAINING, Flight
from loopwright.options.groups import Hangs
from loopwright.run_folder import layout

if TYPE_CHECKING:
  from loopwright.trainer import Trainer

FACTOR, FLOOR_S = 10.0, 60.0
"""Without a timeout: a phase of ten times its usual time, and at least a minute, hangs."""
_LATER_S = 20.0
"""So much later a process whose threads do not get Python's lock writes its stacks, or ends."""
_ANSWERS_S = 3.0
"""Time for the workers to answer, before their records are compared."""


class Watchdog:
  """Watches the phases of one process; see the module."""

  def __init__(self, flight: Flight, trainer: Trainer, model_dir: str, options: Hangs) -> None:
    """Watches nothing yet (host)."""
    self._flight, self._trainer, self._model_dir = flight, trainer, model_dir
    self._worker, self._size = trainer.cluster.index, trainer.cluster.size
    self._timeout_s, self._ends = options.hang_timeout_s, options.end_if_hung
    self._usual: dict[str, collections.deque[float]] = collections.defaultdict(
      lambda: collections.deque(maxlen=9)
    )
    self._phase, self._unchanged_s, self._step_s, self._step = "", 0.0, 0.0, -1
    self._told, self._beat, self._judges_at = False, 0, 0
    self._beats: Mapping[int, int] = {}
    self._asked = record.asked(model_dir)
    self._clock: stacks.Signalled | None = None

  @contextlib.contextmanager
  def watching(self) -> Any:
    """Registers what works without Python's lock, in a process of the command line (host)."""
    if signals.owns_process and threading.current_thread() is threading.main_thread():
      path = os.path.join(self._model_dir, layout.stacks(self._worker))
      after_s = (self._timeout_s or FLOOR_S) + _LATER_S
      self._clock = stacks.Signalled(path, after_s=after_s, ends=self._ends)
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
      from loopwright.monitoring import hang_report

      hang_report.answer(self._flight.leg, self._trainer, self._model_dir)
      self._beats = {worker: leg.beat for worker, leg in self._others().items()}
      self._judges_at = self._beat + round(_ANSWERS_S / BEAT_S)
    elif self._judges_at == self._beat:
      self._told = True
      self._judge()
    self._look()

  def _look(self) -> None:
    """Asks all workers for their stacks if this one has shown no progress for too long."""
    leg = self._flight.leg
    if leg.unchanged_s < self._unchanged_s:  # it has gone on
      self._usual[self._phase].append(self._unchanged_s)
      if self._told:
        _warn(f"goes on: worker {self._worker} has left {leg.doing or self._phase}")
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
    from loopwright.monitoring.hang_report import global_step

    step = global_step(self._trainer)
    before, self._step = self._step, self._flight.leg.step if step is None else step
    return self._step > max(before, self._flight.leg.step)

  def _others(self) -> dict[int, record.Leg]:
    """Returns the last leg of each worker of this cluster that has not ended."""
    found = {}
    with contextlib.suppress(Exception):  # it must say what it knows
      found = record.last(self._model_dir)
    return {w: leg for w, leg in found.items() if w < self._size and not leg.ended}

  def _judge(self) -> None:
    """Says who is behind, if this is the lowest worker that answers; ends the process if asked."""
    from loopwright.monitoring.hang_report import verdict

    found = {**self._others(), self._worker: self._flight.leg}
    silent = {w for w, leg in found.items() if leg.beat == self._beats.get(w) and w != self._worker}
    ends = self._ends and signals.owns_process
    if self._worker == min(found.keys() - silent):
      then = "it ends" if ends else "it goes on waiting"
      _warn(f"{verdict(found, silent)}; {then}; stacks: {self._model_dir}/{layout.FLIGHT}/")
    elif ends:
      time.sleep(_ANSWERS_S)  # what supervises the workers ends all of them after the first
    if ends:
      os._exit(1)


@contextlib.contextmanager
def watched(
  flight: Flight, trainer: Trainer, folder: str, options: Hangs, *, say: Callable[[str], object]
) -> Iterator[None]:
  """Keeps the flight record of a run folder and watches for hangs while it runs (host).

  Args:
    say: gets the table of the workers' times in the end, if there are several workers.
  """
  cluster = trainer.cluster
  watchdog = Watchdog(flight, trainer, folder, options)
  with flight.recorded(folder, cluster.index, beat=watchdog.beat), watchdog.watching():
    yield
  if cluster.is_chief and cluster.size > 1:
    from loopwright.monitoring import stragglers

    with contextlib.suppress(Exception):  # what only watches must not end a run
      if said := stragglers.table(stragglers.paces(folder)):
        say(said)


def _warn(line: str) -> None:
  """Writes a line to stderr, if that needs no waiting."""
  output.put_now(2, f"WARNING: hang: {line}\n".encode())
