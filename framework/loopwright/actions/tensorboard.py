"""`TensorBoard`: the config, hyperparameters, and histograms of weights and gradients.

The scalars of every run are in TensorBoard without this action; see docs/results.md.
"""

from __future__ import annotations

import ast
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np
import tensorflow as tf

from loopwright.actions.base import Action, Output, Run
from loopwright.distribution import placement
from loopwright.errors import require_integer
from loopwright.graphs.aliases import Variable
from loopwright.models import models
from loopwright.observers import Observer, StepObserver
from loopwright.optimizers.adapters import Optimizer
from loopwright.optimizers.fusion import Gradients
from loopwright.options.declaration import COUNT
from loopwright.run_folder.metrics_log import flatten, scalars

if TYPE_CHECKING:
  from loopwright.trainer import Trainer

_BUCKETS = 30


class TensorBoard(Action):
  """Writes to TensorBoard what explains a run's curves: config, hyperparameters, histograms.

  "Text" has the config, "HParams" every option with the metrics of the newest evaluation, so that
  runs below one folder can be compared. Without histograms, nothing is added to a training step.
  """

  on = "both"

  def __init__(self, *, histograms_every_steps: Annotated[int | None, COUNT] = None) -> None:
    """Sets when.

    Args:
      histograms_every_steps: the weights after these steps and their multiples, and the gradients
        of these steps, averaged over the global batch and clipped as the optimizer gets them. A
        training loop then ends there, whatever `run.steps_per_loop`. This needs memory for one copy
        of the gradients on each device. None for no histograms.

    Raises:
      ConfigError: not a whole number of at least 1.
    """
    if histograms_every_steps is not None:
      name = "TensorBoard.histograms_every_steps"
      require_integer(name, histograms_every_steps, at_least=1)
    self.every_steps = histograms_every_steps
    self._gradients: GradientKeeper | None = None
    self._writer: Any = None
    self._listed = False

  def bind(self, run: Run) -> None:
    """Makes the trainer keep the gradients of the steps to show.

    Raises:
      ConfigError: histograms, but training is asynchronous.
    """
    super().bind(run)
    if self.every_steps is None:
      return
    placement.of(run.strategy).require("TensorBoard.histograms_every_steps")
    trainer = cast("Trainer", run.trainer)
    self._gradients = GradientKeeper(trainer, self.every_steps)
    trainer.observe(self._gradients)

  def begin(self) -> None:
    """Writes the config."""
    if not self.run.is_chief:
      return
    self._writer = tf.summary.create_file_writer(self.run.model_dir)
    rows = [f"| `{name}` | `{value}` |" for name, value in sorted(self.run.config.items())]
    with self._writer.as_default(step=np.int64(self.run.step)):
      tf.summary.text("config", np.array("\n".join(["| option | value |", "|---|---|", *rows])))
    self._writer.flush()

  def __call__(self, output: Output) -> None:
    """Writes histograms if this is the step for them, and hyperparameters at first."""
    if self._writer is None:
      return
    if self.run.split == "eval":
      self._write_hparams("eval", list(scalars(flatten(output))))
    elif self.every_steps:
      self._write_histograms()

  def end(self) -> None:
    """Writes that the run has ended, unless it failed or a signal ended it: it may go on."""
    if self._writer is None:
      return
    self._write_hparams("train", ["loss"])  # if there was no evaluation
    if sys.exc_info()[0] is None:
      from tensorboard.plugins.hparams import api_pb2, summary

      ended = summary.session_end_pb(api_pb2.STATUS_SUCCESS).SerializeToString()
      with self._writer.as_default():
        tf.summary.experimental.write_raw_pb(np.array(ended), step=np.int64(0))
    self._writer.close()

  def _write_hparams(self, group: str, metrics: Sequence[str]) -> None:
    """Writes the options, and the metrics whose values TensorBoard takes from the group's curves.

    Once: TensorBoard keeps the first.
    """
    from tensorboard.plugins.hparams import api

    if self._listed:
      return
    self._listed = True
    values = hyperparameters(self.run.config)
    name = os.path.basename(os.path.abspath(self.run.model_dir))
    with self._writer.as_default(step=np.int64(0)):
      api.hparams_config(
        hparams=[api.HParam(name) for name in values],
        metrics=[api.Metric(metric, group=group) for metric in metrics],
      )
      api.hparams(values, trial_id=name)
    self._writer.flush()

  def _write_histograms(self) -> None:
    weights = models.trainable_variables(self.run.task.model)
    values = {f"weights/{models.name(v)}": models.raw(v).numpy() for v in weights}
    values |= self._gradients.values() if self._gradients else {}
    with self._writer.as_default(step=np.int64(self.run.step)):
      for name, array in values.items():
        finite = np.asarray(array, np.float64)[np.isfinite(array)]
        if finite.size:
          tf.summary.histogram(name, finite, buckets=_BUCKETS)
    self._writer.flush()


class GradientKeeper(Observer):
  """Keeps the gradients that the optimizers got in the last step that is a multiple of `every`."""

  def __init__(self, trainer: Trainer, every: int) -> None:
    """Makes a variable on each device for every tensor of gradients (cross-replica)."""
    self.step, self.every, self._strategy = trainer.global_step, every, trainer.strategy
    self._optimizers = trainer.parts.optimizers
    with trainer.strategy.scope():
      self.kept = {
        name: [self._variable(v) for v in one.fusion.variables]
        for name, one in self._optimizers.items()
      }

  def of_replica(self) -> StepObserver:
    """Keeps what a replica's optimizers get."""
    return _GradientsOfReplica(self)

  def variables(self, optimizer: Optimizer) -> list[tf.Variable]:
    """Returns the variables for an optimizer's gradients."""
    return next(self.kept[name] for name, one in self._optimizers.items() if one is optimizer)

  def values(self) -> dict[str, np.ndarray]:
    """Returns "gradients/<variable>" -> the kept gradient, of the variable's shape (host)."""
    found = {}
    for name, optimizer in self._optimizers.items():
      pieces = [self._strategy.experimental_local_results(v)[0] for v in self.kept[name]]
      gradients = optimizer.fusion.unpack([tf.convert_to_tensor(piece) for piece in pieces])
      for variable, gradient in zip(optimizer.variables, gradients, strict=True):
        found[f"gradients/{models.name(variable)}"] = gradient.numpy()
    return found

  def _variable(self, like: Variable) -> tf.Variable:
    raw = models.raw(like)
    return tf.Variable(
      tf.zeros(raw.shape, raw.dtype), trainable=False,
      synchronization=tf.VariableSynchronization.ON_READ,
      aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )  # fmt: skip


class _GradientsOfReplica(StepObserver):
  """Keeps what one replica's optimizers get, which is the same on each."""

  def __init__(self, keeper: GradientKeeper) -> None:
    self._keeper = keeper

  def applies(self, optimizer: Optimizer, gradients: Gradients) -> None:
    keeper = self._keeper
    due = (keeper.step.read_value() + 1) % keeper.every == 0
    pairs = list(zip(keeper.variables(optimizer), gradients.pieces, strict=True))

    def keep() -> None:
      for variable, piece in pairs:
        variable.assign(tf.zeros_like(variable) if piece is None else piece)

    tf.cond(due, keep, lambda: None)


def hyperparameters(config: Mapping[str, str]) -> dict[str, bool | float | str]:
  """Returns the config with numbers and bools as such, and everything else as text."""
  values: dict[str, bool | float | str] = {}
  for name, text in config.items():
    try:
      value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
      value = text
    known = isinstance(value, bool | str) or (
      isinstance(value, int | float) and math.isfinite(value)
    )
    values[name] = value if known else text
  return values
