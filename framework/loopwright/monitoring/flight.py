"""The flight record of a process: where its time goes, kept for `loopwright goodput`.

The parts come from the functions that `loopwright.host.timing.timed` decorates. A thread writes the
record twice a second; nothing of it is in the compiled step.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from loopwright.errors import Preempted
from loopwright.hooks import Hook
from loopwright.host import signals
from loopwright.host.timing import HOST, Stopwatch
from loopwright.monitoring import record

BEAT_S = 0.5
"""Seconds between two writes of the record."""
SETUP, TRAINING, TRACING, INPUT = "setup", "training", "tracing", "input wait"


class Flight(Hook):
  """The record of this process; without `recorded` it keeps and writes nothing.

  Attributes:
    watch: counts the time of each part.
    leg: what is written now.
  """

  _of_process = True
  """Whether no run of this process has counted the time since its start yet."""

  def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
    """Takes the time; the first one of a command's process also has that of its imports."""
    self.watch, self.leg, self._clock = Stopwatch(clock=clock), record.Leg(), clock
    self.leg.process, self.leg.host, self.leg.first = os.getpid(), os.uname().nodename, True
    self._noted, self._began = clock(), time.time()
    self._before: dict[str, float] = {}
    self._traces = 0
    self._recent: dict[str, collections.deque[float]] = collections.defaultdict(
      lambda: collections.deque(maxlen=9)
    )
    self._writer: record.Writer | None = None
    self._lock = threading.RLock()
    self._over = threading.Event()
    if signals.owns_process and Flight._of_process:
      Flight._of_process = False
      self.watch.seconds["imports"] = imports_s = record.age_s()
      self._began -= imports_s

  def note(self, part: str) -> None:
    """Counts the time since the last note, or since the start, for a part; before `recorded`."""
    now = self._clock()
    self.watch.seconds[part] += now - self._noted
    self._noted = now

  @contextlib.contextmanager
  def recorded(
    self, model_dir: str, worker: int, *, beat: Callable[[], None] = lambda: None
  ) -> Iterator[None]:
    """Writes the record in the `with` (host).

    Args:
      worker: the number of this process.
      beat: called in the thread after each write.
    """
    self.note(SETUP)
    self.leg.began = self._began
    self._writer = record.Writer(model_dir, worker)
    self.watch.start(SETUP)
    self._write()
    name = "loopwright-flight"
    thread = threading.Thread(target=self._keep, args=(beat,), name=name, daemon=True)
    thread.start()
    ended = "failed"
    try:
      yield
      ended = "done"
    except (Preempted, KeyboardInterrupt):
      ended = "preempted"
      raise
    finally:
      self._over.set()
      thread.join()
      self.leg.ended = ended
      self.watch.stop()
      self._write()
      self._writer.close()
      self._writer = None

  def begins(self, step: int) -> None:
    """The setup is over: the run goes on from `step`."""
    self.leg.from_step = self.leg.step = step
    if self._writer:
      self.watch.goes_on(HOST)

  def goes_on(self) -> None:
    """Tells that the phase makes progress."""
    if self._writer:
      self.watch.goes_on()

  def loop_begins(self, step: int) -> None:
    """A loop is called after so many steps."""
    self.leg.step, self.leg.loops = step, self.leg.loops + 1
    self._training_s = self.watch.seconds[TRAINING]
    self._write(TRAINING)  # for the other workers, if this one stops in it at once

  def loop_ends(self, step: int, output: Mapping[str, Any], traces: int) -> None:
    """It has returned, after so many steps.

    Args:
      output: its values.
      traces: how often it has been traced so far.
    """
    if self._writer is None:
      return
    seconds = self.watch.seconds[TRAINING] - self._training_s
    steps, self.leg.step = step - self.leg.step, step
    if traces > self._traces:
      self._traces, self.leg.traced = traces, self.leg.traced + steps
      self.watch.move(seconds, TRAINING, TRACING)
    else:
      input_s = min(float(output.get("input_wait_s", 0.0)), seconds)
      self.watch.move(input_s, TRAINING, INPUT)
      if steps > 0:
        self._count(steps, seconds, input_s, output.get("communication_s"))
    self._write()  # so that a kill leaves the number of steps

  def _count(self, steps: int, seconds: float, input_s: float, wait_s: float | None) -> None:
    """Counts a loop for `Leg.pace`; a wait in collectives that is not measured is computing."""
    phases = {record.INPUT: input_s, record.COMPUTE: max(0.0, seconds - input_s - (wait_s or 0.0))}
    if wait_s is not None:
      phases[record.COLLECTIVE] = wait_s
    with self._lock:
      for phase, value in phases.items():
        self._recent[phase].append(value / steps)
        self.leg.pace[phase] = round(statistics.median(self._recent[phase]), 9)

  def saved(self) -> None:
    """A save of this step has begun: another leg begins."""
    if self._writer is None:
      return
    with self._lock:
      self.leg.saved = True
      self._before = self._write()
      self._writer.next()
      self.leg = dataclasses.replace(
        self.leg, began=self.leg.end, parts={}, first=False, from_step=self.leg.step,
        traced=0, saved=False,
      )  # fmt: skip

  def _keep(self, beat: Callable[[], None]) -> None:
    while not self._over.wait(BEAT_S):
      self.leg.beat += 1
      self._write()
      beat()

  def _write(self, *follows: str) -> dict[str, float]:
    """Writes the leg, and what `follows` at once; returns the seconds of all parts so far."""
    with self._lock:
      phase, self.leg.unchanged_s, seconds = self.watch.now()
      self.leg.phase = [*phase, *follows]
      self.leg.parts = {
        name: round(value - self._before.get(name, 0.0), 6)
        for name, value in seconds.items()
        if value != self._before.get(name, 0.0)
      }
      if self._writer:
        self._writer.write(self.leg)
      return seconds
