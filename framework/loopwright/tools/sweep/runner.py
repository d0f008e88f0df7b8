"""Starts, watches, prunes and ends trials; a stop or a kill loses none of them."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

from optuna.trial import TrialState

from loopwright.errors import ConfigError, Preempted
from loopwright.host import signals
from loopwright.run_folder import folders
from loopwright.tools.sweep.jobs import Command, Job, Slot
from loopwright.tools.sweep.results import told
from loopwright.tools.sweep.study import Study, Trial

POLL_S = 0.5
SAVED = 75


class Running(NamedTuple):
  """A trial and its process."""

  trial: Trial
  job: Job


class Runner:
  """Runs the trials of a sweep, one in each slot at a time."""

  def __init__(
    self, study: Study, command: Command, slots: Sequence[Slot], *, trials: int | None
  ) -> None:
    """Starts nothing yet; `trials` counts all of the study, None for the default."""
    self._study, self._command = study, command
    self._free, self._running = list(slots), list[Running]()
    self._total = study.total(trials)
    self._sizes: dict[str, int] = {}
    self._waits_for: set[int] = set()

  def run(self) -> None:
    """Returns when all trials of this folder have ended (main thread).

    Raises:
      ConfigError: the evaluations do not have the metric.
      Preempted: SIGTERM or SIGHUP came; the trials have saved.
      KeyboardInterrupt: Ctrl-C; likewise.
    """
    stop = signals.StopSignals()
    waiting = "Ctrl-C: the trials are saving; press it again to end at once"
    with stop.noticed(lambda _: _say(waiting)):
      try:
        while self._start() or self._running or self._others():
          for each in list(self._running):
            self._look_at(each)
          time.sleep(POLL_S)
          if stop.number == signal.SIGINT:
            raise KeyboardInterrupt
          if stop.number is not None:
            raise Preempted(f"{stop.name}: stopped, the trials are saved; the same command goes on")
      except BaseException:
        self._stop()
        raise

  def _start(self) -> bool:
    """Starts trials in the free slots: abandoned ones first; returns whether it did."""
    abandoned = self._study.abandoned({each.trial.number for each in self._running})
    before = len(self._running)
    while self._free:
      trial = next(abandoned, None)
      if trial is None and not self._study.is_full(self._total):
        trial = self._study.begun()
      if trial is None:
        break
      self._begin(trial)
    abandoned.close()
    return len(self._running) > before

  def _begin(self, trial: Trial) -> None:
    values = ", ".join(f"{name} = {value}" for name, value in trial.values.items())
    goes_on = "goes on" if folders.is_run(trial.folder) else "begins"
    _say(f"trial {trial.number} {goes_on}: {values}")
    slot = self._free.pop()
    job = Job(self._command.of(trial.values, trial.folder), trial.folder, slot, trial.lock)
    self._running.append(Running(trial, job))

  def _look_at(self, each: Running) -> None:
    status = each.job.status()  # first, so that the log is complete if the process has ended
    self._report(each)
    if status is not None:
      self._end(each, status)
    elif not each.job.stopped and each.trial.should_end():
      each.job.stop()

  def _report(self, each: Running) -> None:
    path = os.path.join(each.trial.folder, folders.METRICS)
    try:
      size = os.stat(path).st_size
      run = folders.Run(each.trial.folder) if size != self._sizes.get(path) else None
    except (OSError, ConfigError):  # not there yet, or damaged
      return
    if run:
      self._sizes[path] = size
      each.trial.report(run.evaluations)

  def _end(self, each: Running, status: int) -> None:
    trial, pruned = each.trial, each.job.stopped and status != 0
    if pruned:
      trial.end(TrialState.PRUNED)
    elif status == 0 and trial.value is not None and math.isfinite(trial.value):
      trial.end(TrialState.COMPLETE)
    elif status == 0:
      trial.end(TrialState.FAIL, f"{self._study.goal.metric} is {trial.value}")
    elif status != SAVED:  # else another has stopped it: it goes on
      trial.end(TrialState.FAIL, each.job.last_line() if status > 0 else f"signal {-status}")
    each.job.close()
    self._running.remove(each)
    self._free.append(each.job.slot)
    _say(told(self._study, trial.number))

  def _others(self) -> bool:
    """Whether processes that we did not start still run trials of this folder."""
    left = {trial.number for trial in self._study.in_this_folder()}
    if new := left - self._waits_for:
      _say(f"waiting for {len(new)} that another process runs: {', '.join(map(str, sorted(new)))}")
    self._waits_for |= left
    return bool(left)

  def _stop(self) -> None:
    """Ends the processes; their trials stay in the study as running, and go on later."""
    if self._running:
      _say(f"stopping {len(self._running)}: each saves first")
    for each in self._running:
      each.job.stop()
    for each in self._running:
      while each.job.status() is None:
        time.sleep(POLL_S / 5)
      each.job.close()


def _say(line: str) -> None:
  print(line, flush=True)
