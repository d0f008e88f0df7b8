"""`StopOnNonFinite`: fails a run at the first NaN or infinity."""

from __future__ import annotations

import os
import sys

import tensorflow as tf
from absl import logging

from loopwright.actions.base import Action, Output, Run
from loopwright.distribution import placement
from loopwright.errors import Failed
from loopwright.run_folder import nonfinite
from loopwright.tools.forensics import examine
from loopwright.trainer import Trainer


class NonFiniteLoss(Failed):
  """The loss or a gradient became NaN or infinite; one line: at which step, and what to try."""


class StopOnNonFinite(Action):
  """Fails the run at the first NaN or infinity and reports its source; deletes nothing.

  The loop stops at the first step whose loss is not finite, or, without dynamic loss scaling, whose
  reduced gradient is not. That step is undone. <model_dir>/nonfinite gets the state before it and a
  report of replicas, variables and examples; see examine.py.
  """

  on = "train"

  def __init__(self, *, forensics: bool = True) -> None:
    """Sets what to do.

    Args:
      forensics: False stops after the loop that has the bad step, and reports only the step. This
        is always so under parameter servers and model parallelism.
    """
    self._forensics = forensics

  def bind(self, run: Run) -> None:
    """Makes the trainer watch its steps."""
    super().bind(run)
    trainer = run.trainer
    if not self._forensics or not isinstance(trainer, Trainer):
      return
    place = placement.of(run.strategy)
    if place.replays:
      examine.watch(trainer, lambda: self._examine(trainer))
    else:
      logging.warning("StopOnNonFinite reports only the step under %s", place.name)

  def _examine(self, trainer: Trainer) -> None:
    """Saves the state before the bad step, reports on the step, and fails the run."""
    nonfinite.save(self.run.checkpoint, self.run.model_dir, is_chief=self.run.is_chief)
    try:
      report = examine.examine(trainer)
    except tf.errors.OpError as error:  # such as too little memory to run eagerly
      raise self._failure("loss or a gradient", self.run.step + 1) from error
    print(report, file=sys.stderr)
    if self.run.is_chief:
      nonfinite.save_report(report, self.run.model_dir)
    trainer.cluster.barrier()  # the first process that fails may end the others
    what = "loss" if any(f.is_loss for f in report.findings) else "gradients"
    raise self._failure(what, report.step, f"; replay the step: {self.run.replay_command}")

  def __call__(self, output: Output) -> None:
    """Checks "nonfinite_step" in the loop's values: the first bad step; -1 or absent if none.

    Raises:
      NonFiniteLoss: there is one.
    """
    step = int(output.get("nonfinite_step", -1))
    if step >= 0:
      raise self._failure("loss", step)

  def _failure(self, what: str, step: int, replay: str = "") -> NonFiniteLoss:
    return NonFiniteLoss(
      f"the {what} became NaN or infinite at step {step}. Try a lower learning rate or a warm-up, "
      "Trainer.clip_norm, float32 precision or Trainer.loss_scale; checkpoints of earlier steps "
      f"are in {os.path.join(self.run.model_dir, 'checkpoints')}{replay or '.'}"
    )
