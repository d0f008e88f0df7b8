"""The action `Export`: a SavedModel of the best evaluation."""

from __future__ import annotations

import os

from loopwright.actions.base import Run
from loopwright.actions.best import Mode, OnBest, require_own_directory
from loopwright.run_folder import layout
from loopwright.tools.exports.export import export, mend, require_replaceable


class Export(OnBest):
  """Exports a SavedModel of the best evaluation so far; see `export`."""

  def __init__(
    self, *, metric: str = "loss", mode: Mode | None = None, directory: str | None = None
  ) -> None:
    """Sets the metric to compare and where to export.

    Args:
      metric: its name among the evaluation's values ("a/b" if nested).
      mode: "max" if more is better, "min" if less is; None: less of a loss, more of an accuracy.
      directory: each export replaces the one before; None for <model_dir>/export.

    Raises:
      ConfigError: an unknown mode, or none for a metric of another name.
    """
    super().__init__(metric=metric, mode=mode)
    self.directory = directory

  def bind(self, run: Run) -> None:
    """Checks the directory before training.

    Raises:
      ConfigError: another Export has the same directory, or one would replace something that is not
        an export.
    """
    super().bind(run)
    require_own_directory(self)
    self.directory = self.directory or os.path.join(run.model_dir, layout.EXPORT)
    require_replaceable(self.directory)

  def begin(self) -> None:
    """Reads the earlier evaluations; removes what a killed export left."""
    super().begin()
    if self.run.is_chief:
      mend(str(self.directory))

  def on_best(self, value: float) -> None:
    """Exports the weights that were evaluated."""
    with self.run.evaluated_weights():
      export(self.run.task, str(self.directory), is_chief=self.run.is_chief)
