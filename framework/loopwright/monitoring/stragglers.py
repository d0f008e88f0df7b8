"""Says in one line which worker the others have been waiting for.

The thread of the flight record (flight.py) calls `Stragglers.beat` twice a second on the chief,
which compares the paces in the records of all workers (flights.py).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping

from loopwright.host import output
from loopwright.monitoring import flights
from loopwright.monitoring.record import Leg
from loopwright.run_folder import layout

EVERY_BEATS = 10
WHILE_S, LOOPS = 30.0, 5
"""A worker must have been slow for so long, and in so many loops."""
_OVER = 1.15
"""Below this ratio a worker that was slow is slow no more."""


class Stragglers:
  """Compares the workers of one start of a run."""

  def __init__(
    self, model_dir: str, workers: int, *, clock: Callable[[], float] = time.monotonic
  ) -> None:
    self._model_dir, self._workers, self._clock = model_dir, workers, clock
    self._beats = 0
    self._slow: int | None = None
    self._since, self._loops = 0.0, 0
    self._told = False

  def beat(self) -> None:
    """Now and then compares the workers, and says who is slow (the thread of the record)."""
    self._beats += 1
    if self._beats % EVERY_BEATS or self._workers < 2:
      return
    found: dict[int, Leg] = {}
    with contextlib.suppress(Exception):  # what only watches must not end a run
      found = flights.last(self._model_dir)
    if line := self.judged({w: leg for w, leg in found.items() if w < self._workers}):
      output.put_now(2, f"WARNING: slow worker: {line}\n".encode())

  def table(self) -> str:
    """Returns the times of all workers and phases so far, as lines; "" without another worker."""
    if self._workers > 1:
      with contextlib.suppress(Exception):
        return flights.table(flights.read(self._model_dir))
    return ""

  def judged(self, found: Mapping[int, Leg]) -> str:
    """Returns a line if a worker has been slow for long enough, and was not told; else "".

    Args:
      found: worker -> its last leg.
    """
    told = {w: leg.pace for w, leg in found.items() if not leg.ended}
    known = self._workers == len(told)
    slow = flights.slow(told, ratio=_OVER if self._told else flights.RATIO) if known else None
    now = self._clock()
    if slow is None or slow.worker != self._slow:
      self._slow, self._told = (slow.worker if slow else None), False
      self._since, self._loops = now, found[slow.worker].loops if slow else 0
      return ""
    leg = found[slow.worker]
    if self._told or now - self._since < WHILE_S or leg.loops - self._loops < LOOPS:
      return ""
    self._told = True
    return line(slow, leg.host, now - self._since, self._model_dir)


def line(slow: flights.Slow, host: str, seconds: float, model_dir: str) -> str:
  """Returns what is known of a slow worker, on a host, since so many seconds."""
  ratio = f"{slow.own_s / slow.usual_s:.1f} times" if slow.usual_s else "above"
  less = 100 * (1 - slow.better_s / slow.step_s)
  return (
    f"worker {slow.worker} on {host} is slow, mostly in {slow.phase}: for {seconds:.0f} s a step "
    f"of it has taken {1e3 * slow.own_s:.3g} ms before the collective, {ratio} the others' "
    f"{1e3 * slow.usual_s:.3g} ms; all wait for it, and without that would take {less:.0f} % less; "
    f"see {os.path.join(model_dir, layout.FLIGHT)}/ and docs/goodput.md"
  )
