"""Finds out what a worker does when a run hangs, and which one is behind; see hangs.py."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from loopwright.graphs.operations import operations
from loopwright.host import signals, stacks, threads
from loopwright.monitoring import flights
from loopwright.monitoring.flight import BEAT_S, TRAINING, Flight
from loopwright.monitoring.hangs import READ_S, warn, within
from loopwright.monitoring.record import Leg
from loopwright.run_folder import layout

if TYPE_CHECKING:
  from loopwright.trainer import Trainer

_ANSWERS_S = 3.0
"""Time for the workers to answer, before their records are compared."""
_WAITING, _WORKERS = "step or collective", "waiting for workers"
_HOST_OPERATIONS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
_BATCHES = (TRAINING, "evaluation")


class Inquiry:
  """Answers for one worker, and judges if it is the lowest that does."""

  def __init__(self, flight: Flight, trainer: Trainer, model_dir: str, *, ends: bool) -> None:
    self._flight, self._trainer, self._model_dir, self._ends = flight, trainer, model_dir, ends
    self._worker, self._size = trainer.cluster.index, trainer.cluster.size
    self._beats: Mapping[int, int] = {}

  def answer(self) -> int:
    """Writes the stacks; returns after how many beats to `judge` (host)."""
    leg = self._flight.leg
    if leg.phase[-1:] == [TRAINING]:
      leg.step = within(READ_S, lambda: int(self._trainer.global_step.numpy())) or leg.step
    leg.doing = self._doing(leg)
    who = f"worker {self._worker}, process {leg.process}"
    path = os.path.join(self._model_dir, layout.stacks(self._worker))
    stacks.write(path, f"{who}, step {leg.step}, {leg.doing}, {leg.unchanged_s:.1f} s")
    self._beats = {worker: each.beat for worker, each in self._others().items()}
    return round(_ANSWERS_S / BEAT_S)

  def _doing(self, leg: Leg) -> str:
    """Returns what this process does, as far as it can be had."""
    phase = leg.path
    files = threads.blocked_files()
    if leg.phase[-1:] == [_WORKERS]:
      return phase
    if leg.phase[-1:] not in ([each] for each in _BATCHES):
      return f"{phase} ({'; '.join([threads.main_place(), *files])})"
    if running := dict(threads.host_functions()):
      return f"{phase}: {self._kind(running, phase)} ({'; '.join(running.values())})"
    return f"{phase}: input ({'; '.join(files)})" if files else f"{phase}: {_WAITING}"

  def _kind(self, running: Mapping[str, str], phase: str) -> str:
    """Returns whether host functions, by their tokens, belong to the step or to the input."""
    if phase != TRAINING:
      return "input or host function"
    tokens = within(READ_S, lambda: _tokens(self._trainer))
    if tokens is None:
      return "input or host function"
    return "host function" if tokens & running.keys() else "input"

  def _others(self) -> dict[int, Leg]:
    """Returns the last leg of each worker of this cluster that has not ended."""
    found = {}
    with contextlib.suppress(Exception):  # it must say what it knows
      found = flights.last(self._model_dir)
    return {w: leg for w, leg in found.items() if w < self._size and not leg.ended}

  def judge(self) -> None:
    """Says who is behind, if this is the lowest worker that answers; ends the process if asked."""
    found = {**self._others(), self._worker: self._flight.leg}
    silent = {w for w, leg in found.items() if leg.beat == self._beats.get(w) and w != self._worker}
    ends = self._ends and signals.owns_process
    if self._worker == min(found.keys() - silent):
      then = "it ends" if ends else "it goes on waiting"
      warn(f"{verdict(found, silent)}; {then}; stacks: {self._model_dir}/{layout.FLIGHT}/")
    elif ends:
      time.sleep(_ANSWERS_S)  # what supervises the workers ends all of them after the first
    if ends:
      os._exit(1)


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
