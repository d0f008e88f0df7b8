"""When a run saves: checkpoints at their steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from loopwright.hooks import Hook
from loopwright.options.groups import Cadence
from loopwright.run_folder.checkpoints import CheckpointManager
from loopwright.run_folder.places import RunFolder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saving(Hook):
  """Saves a run into its folder; raises where the folder is no longer the run's.

  Attributes:
    cadence: the steps at which a checkpoint is due.
    saved: called after the values of a checkpoint are read.
  """

  manager: CheckpointManager
  folder: RunFolder
  cadence: Cadence
  saved: Callable[[], None]

  def loop_end(self, step: int, end: int) -> int:
    """Returns the step of the next checkpoint, if it is before `end`."""
    return min(end, self.cadence.next_save(step))

  def due(self, step: int) -> None:
    """Saves a checkpoint."""
    if step % self.cadence.checkpoint_every_steps == 0:
      self.saves()

  def pauses(self, step: int) -> None:
    """Raises if the folder is gone or another's, or what a save raised in its thread."""
    self.folder.require()
    self.manager.check()

  def saves(self) -> None:
    """Saves a checkpoint of this step, unless there is one; a thread completes it."""
    if self.manager.save() is not None:
      self.saved()

  def completes(self) -> str:
    """Saves a checkpoint, complete on return; returns the folder of checkpoints."""
    self.saves()
    self.manager.wait()
    return self.manager.directory

  def ends(self) -> None:
    """Waits for the last one."""
    self.manager.wait()
