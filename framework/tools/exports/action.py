"""The action `Export`: a SavedModel of the best evaluation, and its other formats."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence

import tensorflow as tf

from framework.actions.base import Run
from framework.actions.best import Mode, OnBest, require_own_directory
from framework.errors import ConfigError
from framework.run_folder import layout
from framework.tools.exports import formats
from framework.tools.exports.export import export, mend, require_replaceable


class Export(OnBest):
  """Exports a SavedModel of the best evaluation so far; see `export`.

  With `formats`, the export proves itself before the first step, in a folder that is then removed,
  and when training is over: each format is made, loaded again in a fresh process, and compared with
  the model on a batch of the evaluation data.
  """

  def __init__(
    self,
    *,
    metric: str = "accuracy",
    mode: Mode = "max",
    directory: str | None = None,
    formats: Sequence[str] = (),
  ) -> None:
    """Sets the metric to compare and where to export.

    Args:
      metric: its name among the evaluation's values ("a/b" if nested).
      mode: "max" if more is better, "min" if less is.
      directory: each export replaces the one before; None for <model_dir>/export.
      formats: of "saved_model", "keras", "onnx", "litert": what to make and compare when training
        is over. The SavedModel is always written; named here, it is compared too.

    Raises:
      ConfigError: an unknown mode.
    """
    super().__init__(metric=metric, mode=mode)
    self.directory, self._formats = directory, formats

  def bind(self, run: Run) -> None:
    """Checks the directory and the formats before training.

    Raises:
      ConfigError: another Export has the same directory, one would replace something that is not
        an export, or a format cannot be made.
    """
    super().bind(run)
    require_own_directory(self)
    self.directory = self.directory or os.path.join(run.model_dir, layout.EXPORT)
    require_replaceable(self.directory)
    formats.require(run.task, self._formats, self.directory)

  def begin(self) -> None:
    """Reads the earlier evaluations; removes what a killed export left.

    Raises:
      ConfigError: there is no batch to compare the formats on; or, before the first step, one of
        them cannot be made.
    """
    super().begin()
    if self.run.is_chief:
      mend(str(self.directory))
    if self._formats and self.run.step == 0:
      self._try_formats()

  def _try_formats(self) -> None:
    """Exports the initial weights, so that what cannot be converted fails before training."""
    with tempfile.TemporaryDirectory() as folder:
      trial = os.path.join(folder, "export")
      self._export(trial)
      if self.run.is_chief:
        try:
          formats.prove(self.run.task, trial, self._formats)
        except ConfigError as error:
          what = str(error).partition(" is refused ")[2] or str(error)
          raise ConfigError(
            f"Export.formats, tried on the initial weights, is refused {what}; take the format "
            "out, or change the model or its export_signature()."
          ) from error

  def _export(self, directory: str) -> None:
    is_chief = self.run.is_chief
    export(self.run.task, directory, is_chief=is_chief, formats=self._formats)

  def on_best(self, value: float) -> None:
    """Exports the weights that were evaluated."""
    with self.run.evaluated_weights():
      self._export(str(self.directory))

  def end(self) -> None:
    """Makes and compares the formats, unless the run failed or a signal ended it.

    Raises:
      ConfigError: one differs, or cannot be made.
    """
    path = os.path.join(str(self.directory), formats.EXAMPLES)
    over = sys.exc_info()[0] is None and self.run.is_chief and self._formats
    if over and tf.io.gfile.exists(path):
      outcomes = formats.prove(self.run.task, str(self.directory), self._formats)
      self.run.message(formats.told(str(self.directory), outcomes))
