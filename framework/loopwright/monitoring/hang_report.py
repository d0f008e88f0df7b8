"""Finds out what a worker does when a run hangs, and which one is behind; see hangs.py."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from loopwright.host import stacks, threads
from loopwright.monitoring.flight import TRAINING
from loopwright.monitoring.record import Leg
from loopwright.run_folder import layout

if TYPE_CHECKING:
  from loopwright.trainer import Trainer

READ_S = 2.0
_WAITING, _WORKERS = "step or collective", "waiting for workers"


def answer(leg: Leg, trainer: Trainer, model_dir: str) -> None:
  """Writes the stacks of this process, and what it does into its leg (host)."""
  if leg.phase[-1:] == [TRAINING]:
    leg.step = global_step(trainer) or leg.step
  leg.doing = _doing(leg)
  worker = trainer.cluster.index
  who = f"worker {worker}, process {leg.process}"
  path = os.path.join(model_dir, layout.stacks(worker))
  stacks.write(path, f"{who}, step {leg.step}, {leg.doing}, {leg.unchanged_s:.1f} s")


def _doing(leg: Leg) -> str:
  """Returns what this process does, as far as it can be had."""
  phase, files = leg.path, threads.blocked_files()
  if leg.phase[-1:] == [_WORKERS]:
    return phase
  if leg.phase[-1:] not in ([TRAINING], ["evaluation"]):
    return f"{phase} ({'; '.join([threads.main_place(), *files])})"
  if running := dict(threads.host_functions()):
    return f"{phase}: input or host function ({'; '.join(running.values())})"
  return f"{phase}: input ({'; '.join(files)})" if files else f"{phase}: {_WAITING}"


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
  others = [f"worker {w} is in {each.doing or each.path}" for w, each in found.items()]
  del others[list(found).index(behind)]
  said = f"worker {behind} is behind, at step {leg.step}, {what}"
  return "; ".join([said, *others[:3], *([f"and {len(others) - 3} more"] * (len(others) > 3))])


def global_step(trainer: Trainer) -> int | None:
  """Returns the steps so far, of a loop that runs; None if that takes too long."""
  return within(READ_S, lambda: int(trainer.global_step.numpy()))


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
