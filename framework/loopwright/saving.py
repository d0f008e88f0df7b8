"""When a run saves: checkpoints at their steps, copies in memory between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from loopwright.hooks import Hook, Output
from loopwright.options import Cadence
from loopwright.run_folder.checkpoints import CheckpointManager
from loopwright.run_folder.places import Opened

if TYPE_CHECKING:
  from loopwright.run_folder.snapshots import Snapshots


class Saving(Hook):
  """Saves a run into its folder; raises where the folder is no longer the run's."""

  def __init__(
    self,
    *,
    manager: CheckpointManager,
    snapshots: Snapshots | None,
    place: Opened,
    cadence: Cadence,
    saved: Callable[[], None],
  ) -> None:
    """Saves nothing yet.

    Args:
      manager: of the checkpoints.
      snapshots: copies in memory, which nobody keeps if it is None.
      place: the run folder.
      cadence: the steps at which a checkpoint is due.
      saved: called after the values of a checkpoint are read.
    """
    self._manager, self._snapshots, self._place = manager, snapshots, place
    self._cadence, self._saved = cadence, saved

  def loop_end(self, step: int, end: int) -> int:
    """Returns the step of the next checkpoint, if it is before `end`."""
    return min(end, self._cadence.next_save(step))

  def after(self, split: str, output: Output) -> None:
    """Has an evaluation mirrored at once: the next checkpoint may be far."""
    if split == "eval":
      self._place.changed()

  def due(self, step: int) -> None:
    """Saves a checkpoint, or a copy in memory."""
    if step % self._cadence.checkpoint_every_steps == 0:
      self.saves()
    elif self._snapshots is not None:
      self._snapshots.take()

  def pauses(self, step: int) -> None:
    """Raises if the folder is gone or another's, or what a save raised in its thread."""
    self._place.require()
    self._manager.check()

  def saves(self) -> None:
    """Saves a checkpoint of this step, unless there is one; a thread completes it."""
    if self._manager.save() is not None:
      self._saved()

  def completes(self) -> str:
    """Saves a checkpoint, complete on return; returns the folder of checkpoints."""
    self.saves()
    self._manager.wait()
    return self._manager.directory

  def ends(self) -> None:
    """Waits for the last one."""
    self._manager.wait()
