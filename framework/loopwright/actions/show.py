"""`Show`: pictures, distributions and texts of a task, from time to time."""

from __future__ import annotations

from typing import Annotated, Literal

from loopwright.actions.base import Action, Output, Run
from loopwright.errors import ConfigError, require_integer
from loopwright.options.declaration import COUNT
from loopwright.run_folder.metrics_log import flatten
from loopwright.task import Task


class Show(Action):
  """Calls `Task.show` with the weights that evaluations use; see loopwright/reporting/board.py."""

  def __init__(self, *, every_steps: Annotated[int | None, COUNT] = None) -> None:
    """Sets when.

    Args:
      every_steps: after these steps and their multiples, where a training loop then ends, whatever
        `run.steps_per_loop`; None for after each evaluation.

    Raises:
      ConfigError: not a whole number of at least 1.
    """
    if every_steps is not None:
      require_integer("Show.every_steps", every_steps, at_least=1)
    self.on: Literal["train", "eval"] = "eval" if every_steps is None else "train"
    self.every_steps = every_steps

  def bind(self, run: Run) -> None:
    """Checks the task.

    Raises:
      ConfigError: the task has nothing to show.
    """
    super().bind(run)
    if type(run.task).show is Task.show:
      name = type(run.task).__name__
      raise ConfigError(f"run.actions has @Show(), but {name} does not define show(board).")

  def __call__(self, output: Output) -> None:
    """Shows."""
    self.run.board.metrics = flatten(output)
    with self.run.evaluated_weights():
      self.run.task.show(self.run.board)
