"""The loop of a run: train, act, report, save, evaluate.

    while step < train_steps:
      output = trainer.train(steps up to the next boundary)
      actions, report
      a checkpoint, an evaluation, if due

A boundary is the end of `steps_per_loop` steps, or a step that an action, a checkpoint or an
evaluation asks for.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from loopwright.actions.base import Output, StopTraining
from loopwright.actions.calls import Actions
from loopwright.evaluator import Evaluator
from loopwright.flight import Flight
from loopwright.options import Cadence
from loopwright.reporting.reports import Reports
from loopwright.run_folder.checkpoints import CheckpointManager
from loopwright.run_folder.remote import Opened
from loopwright.run_folder.snapshots import Snapshots
from loopwright.stopping import Stopping
from loopwright.trainer import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
  """Trains and evaluates; the attributes are the parts of a `Session`."""

  trainer: Trainer
  evaluator: Evaluator | None
  cadence: Cadence
  actions: Actions
  reports: Reports
  manager: CheckpointManager
  snapshots: Snapshots | None
  place: Opened
  stopping: Stopping
  flight: Flight

  @property
  def step(self) -> int:
    """The current global step."""
    return int(self.trainer.global_step.numpy())

  def train(self, *, evaluating: bool) -> None:
    """Trains until `train_steps`; evaluates where that is due, if `evaluating` (host).

    Raises:
      StopTraining: an action ends training; its loop or evaluation is reported.
      Preempted, KeyboardInterrupt: a worker got a signal; the state is saved.
    """
    self.flight.begins(self.step)
    if evaluating and self._is_unevaluated():
      self.evaluate()  # the process may have died between a checkpoint and its evaluation
    end = self.cadence.train_steps
    while self.step < end:
      self._train_to(self.cadence.next_evaluation(self.step) if evaluating else end)
      if evaluating:
        self.evaluate()

  def _train_to(self, step: int) -> None:
    """Trains loop by loop; a signal ends the run after a whole one of `steps_per_loop`."""
    while self.step < step:
      whole = min(self.step + self.cadence.steps_per_loop, step)
      while (now := self.step) < whole:
        end = min(self.actions.loop_end(now, whole), self.cadence.next_save(now))
        self._train_steps(end - now)
      self._end_if_asked()
    if step >= self.cadence.train_steps:
      self._save()  # no training is lost if the last evaluation fails

  def _train_steps(self, steps: int) -> None:
    """Runs one compiled loop, with what follows it, unless an observer has undone all of it."""
    before = self.step
    self.flight.loop_begins(before)
    with tf.summary.record_if(False):  # as under Orbit's Controller: not in each step
      output = self.trainer.train(tf.constant(steps, tf.int32))
    self.flight.loop_ends(self.step, output, self.trainer.traces)
    if self.step == before:
      return
    self._act_and_report("train", output)
    if self.step % self.cadence.checkpoint_every_steps == 0:
      self._save()
    elif self.snapshots is not None:
      self.snapshots.take()

  def evaluate(self) -> None:
    """Evaluates, with what follows; if a signal ends it, the next process does it again (host)."""
    assert self.evaluator is not None
    with self.stopping.evaluates(self.evaluator, step=self.step):
      with self.reports.writer("eval").as_default():
        output = self.evaluator.evaluate(tf.constant(-1, tf.int32))
      self._act_and_report("eval", output)
    self.place.changed()
    self._end_if_asked()

  def _act_and_report(self, split: str, output: Output) -> None:
    """Calls the actions, then reports, also if an action stops the run."""
    stop = None
    try:
      self.actions.after(split, output)
    except StopTraining as asked:
      stop = asked
    self.reports.report(split, output)
    if stop is not None:
      raise stop

  def _is_unevaluated(self) -> bool:
    step = self.step
    if not self.cadence.evaluates_at(step):
      return False
    return all(record["step"] != step for record in self.reports.log.records("eval"))

  def _end_if_asked(self) -> None:
    """Ends the run, with its state saved, if a worker was asked to; raises a save's error."""
    self.place.require()
    self.manager.check()
    if self.stopping.asked():
      self.save()
      raise self.stopping.error(
        f"saved step {self.step} in {self.manager.directory}; start the same command again to "
        "continue"
      )

  def save(self) -> None:
    """Saves a checkpoint, which is complete on return."""
    self._save()
    self.manager.wait()

  def _save(self) -> None:
    if self.manager.save() is not None:
      self.flight.saved()
