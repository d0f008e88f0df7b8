"""Notices that a run hangs, and says in one line which worker is behind, and in what.

The thread of the flight record (flight.py) calls `Watchdog.beat` twice a second. A phase hangs if
it shows no progress for `run.hang_timeout_s`, or without that for ten times its usual time and at
least a minute. Then every worker writes the stacks of its Python threads, finds out more about its
phase, and the lowest worker that answers compares their records. The request is a file in the run
folder, which `loopwright stacks` writes too. docs/goodput.md has what is found.
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

from loopwright import registry
from loopwright.flight import BEAT_S, TRAINING, Flight
from loopwright.graphs.operations import operations
from loopwright.host import output, signals, stacks
from loopwright.options import Hangs
from loopwright.run_folder import layout, legs
from loopwright.run_folder.legs import Leg

if TYPE_CHECKING:
  from loopwright.trainer import Trainer

FACTOR, FLOOR_S = 10.0, 60.0
"""Without a timeout: a phase of ten times its usual time, and at least a minute, hangs."""
_ANSWERS_S = 3.0
"""Time for the workers to answer, before their records are compared."""
_LATER_S = 20.0
"""So much later a process whose threads do not get Python's lock writes its stacks, or ends."""
_READ_S = 2.0
_WAITING, _WORKERS = "step or collective", "waiting for workers"
_HOST_OPERATIONS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
_BATCHES = (TRAINING, "evaluation")


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
    self._worker, self._size = trainer.cluster.index, trainer.cluster.size
    self._timeout_s, self._ends = timeout_s, ends
    self._stacks = os.path.join(model_dir, layout.stacks(self._worker))
    self._usual: dict[str, collections.deque[float]] = collections.defaultdict(
      lambda: collections.deque(maxlen=9)
    )
    self._phase, self._unchanged_s, self._step_s, self._step = "", 0.0, 0.0, -1
    self._told, self._beat = False, 0
    self._judges_at: int | None = None
    self._beats: Mapping[int, int] = {}
    self._asked = legs.asked(model_dir)
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
    asked = legs.asked(self._model_dir)
    if asked != self._asked:
      self._asked = asked
      self._answer(asked.partition(" ")[0])
    elif self._judges_at == self._beat:
      self._judge()
    self._look()

  def _look(self) -> None:
    """Asks all workers for their stacks if this one has shown no progress for too long."""
    leg = self._flight.leg
    if leg.unchanged_s < self._unchanged_s:  # it has gone on
      self._usual[self._phase].append(self._unchanged_s)
      if self._told:
        _say(f"goes on: worker {self._worker} has left {leg.doing or self._phase}")
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
        legs.ask(self._model_dir, legs.HANG)

  def _has_stepped(self) -> bool:
    """Whether the loop has done steps since this was last asked."""
    step = within(_READ_S, lambda: int(self._trainer.global_step.numpy()))
    before, self._step = self._step, self._flight.leg.step if step is None else step
    return self._step > max(before, self._flight.leg.step)

  def _answer(self, why: str) -> None:
    """Writes the stacks; for a hang, remembers the others' beats."""
    leg = self._flight.leg
    if leg.phase[-1:] == [TRAINING]:
      leg.step = within(_READ_S, lambda: int(self._trainer.global_step.numpy())) or leg.step
    leg.doing = self._doing(leg)
    who = f"worker {self._worker}, process {leg.process}"
    stacks.write(self._stacks, f"{who}, step {leg.step}, {leg.doing}, {leg.unchanged_s:.1f} s")
    if why == legs.HANG:
      self._beats = {worker: each.beat for worker, each in self._others().items()}
      self._judges_at = self._beat + round(_ANSWERS_S / BEAT_S)

  def _doing(self, leg: Leg) -> str:
    """Returns what this process does, as far as it can be had."""
    phase = leg.path
    files = stacks.blocked_files()
    if leg.phase[-1:] == [_WORKERS]:
      return phase
    if leg.phase[-1:] not in ([each] for each in _BATCHES):
      return f"{phase} ({'; '.join([stacks.main_place(), *files])})"
    if running := dict(stacks.host_functions()):
      return f"{phase}: {self._kind(running, phase)} ({'; '.join(running.values())})"
    return f"{phase}: input ({'; '.join(files)})" if files else f"{phase}: {_WAITING}"

  def _kind(self, running: Mapping[str, str], phase: str) -> str:
    """Returns whether host functions, by their tokens, belong to the step or to the input."""
    if phase != TRAINING:
      return "input or host function"
    tokens = within(_READ_S, lambda: _tokens(self._trainer))
    if tokens is None:
      return "input or host function"
    return "host function" if tokens & running.keys() else "input"

  def _others(self) -> dict[int, Leg]:
    """Returns the last leg of each worker of this cluster that has not ended."""
    found = {}
    with contextlib.suppress(Exception):  # it must say what it knows
      found = legs.last(self._model_dir)
    return {w: leg for w, leg in found.items() if w < self._size and not leg.ended}

  def _judge(self) -> None:
    """Says who is behind, if this is the lowest worker that answers; ends the process if asked."""
    found = {**self._others(), self._worker: self._flight.leg}
    silent = {w for w, leg in found.items() if leg.beat == self._beats.get(w) and w != self._worker}
    self._told, ends = True, self._ends and signals.owns_process
    if self._worker == min(found.keys() - silent):
      then = "it ends" if ends else "it goes on waiting"
      _say(f"{verdict(found, silent)}; {then}; stacks: {self._model_dir}/{layout.FLIGHT}/")
    elif ends:
      time.sleep(_ANSWERS_S)  # what supervises the workers ends all of them after the first
    if ends:
      os._exit(1)


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


def verdict(found: Mapping[int, Leg], silent: set[int]) -> str:
  """Returns who is behind, and in what.

  Args:
    found: worker -> its last leg.
    silent: workers whose record has not changed any more.
  """

  def order(worker: int) -> tuple[bool, int, bool, int, int, int]:
    leg = found[worker]
    in_loop, waits = TRAINING in leg.phase, leg.doing.endswith(_WAITING) or _WORKERS in leg.phase
    return worker not in silent, leg.loops, not in_loop, leg.step, int(waits), worker

  behind = min(found, key=order)
  leg = found[behind]
  what = f"for {leg.unchanged_s:.0f} s in {leg.doing or leg.path}"
  if behind in silent:
    what = f"and does not answer: stopped, or a thread keeps Python's lock; last seen in {leg.path}"
  others = [
    f"worker {worker} is in {each.doing or each.path}"
    for worker, each in found.items()
    if worker != behind
  ]
  said = f"worker {behind} is behind, at step {leg.step}, {what}"
  return "; ".join([said, *others[:3], *([f"and {len(others) - 3} more"] * (len(others) > 3))])


def _tokens(trainer: Trainer) -> set[str]:
  """Returns the tokens of the host functions in the compiled loop."""
  found = (each for each in operations(trainer.graph()) if each.type in _HOST_OPERATIONS)
  return {each.get_attr("token").decode() for each in found}


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


def _say(line: str) -> None:
  output.put_now(2, f"WARNING: hang: {line}\n".encode())
