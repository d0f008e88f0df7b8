"""The loop of a run: train, act, report, save, evaluate.

    while step < train_steps:
      output = trainer.train(steps up to the next boundary)
      the hooks: actions, reports, a checkpoint if due
      an evaluation, if due

A boundary is the end of `steps_per_loop` steps, or a step that a hook or an evaluation asks for.
"""

from __future__ import annotations

import contextlib
import dataclasses

import tensorflow as tf

from loopwright.evaluator import Evaluator
from loopwright.hooks import Hooks, Interrupted
from loopwright.options.groups import Cadence
from loopwright.trainer import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
  """Trains and evaluates (host); a `Session` makes it."""

  trainer: Trainer
  evaluator: Evaluator | None
  cadence: Cadence
  hooks: Hooks

  @property
  def step(self) -> int:
    """The current global step."""
    return int(self.trainer.global_step.numpy())

  def train(self, *, evaluating: bool) -> None:
    """Trains until `train_steps`; evaluates where that is due, if `evaluating`.

    Raises:
      StopTraining: an action ends training; its loop or evaluation is reported.
      Preempted, KeyboardInterrupt: a worker got a signal; the state is saved.
    """
    end = self.cadence.train_steps
    while self.step < end:
      self._train_to(self.cadence.next_evaluation(self.step) if evaluating else end)
      if evaluating:
        self.evaluate()

  def _train_to(self, step: int) -> None:
    """Trains loop by loop; the run may end after a whole one of `steps_per_loop`."""
    while self.step < step:
      whole = min(self.step + self.cadence.steps_per_loop, step)
      while (now := self.step) < whole:
        self._train_steps(self.hooks.loop_end(now, whole) - now)
      self.hooks.pauses(self.step)
    if step >= self.cadence.train_steps:
      self.hooks.saves()  # no training is lost if the last evaluation fails

  def _train_steps(self, steps: int) -> None:
    """Runs one compiled loop, with what follows it, unless an observer has undone all of it."""
    before = self.step
    self.hooks.loop_begins(before)
    with tf.summary.record_if(False):  # as under Orbit's Controller: not in each step
      output = self.trainer.train(tf.constant(steps, tf.int32))
    self.hooks.loop_ends(self.step, output, self.trainer.traces)
    if self.step > before:
      self.hooks.after("train", output)
      self.hooks.due(self.step)

  def evaluate(self) -> None:
    """Evaluates, with what follows; if a signal ends it, the next process does it again."""
    assert self.evaluator is not None
    with contextlib.suppress(Interrupted):
      with self.hooks.evaluates(self.evaluator, self.step):
        output = self.evaluator.evaluate(tf.constant(-1, tf.int32))
      self.hooks.after("eval", output)
    self.hooks.pauses(self.step)
