"""What may happen after a loop or an evaluation: keep the best, stop early or on NaN, export.

An action is called by Orbit's Controller with the values of a loop (`on = "train"`) or of an
evaluation (`on = "eval"`), before these are written to metrics.jsonl. To write one's own:

    class Beep(Action):
      on = "eval"

      def __call__(self, output):
        print("\\a", output["accuracy"])

None of `orbit.actions` does for the ones below: NewBestMetric keeps a file of its own, which knows
nothing of a restart from an earlier checkpoint, and ExportSavedModel can leave half an export.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import orbit
import tensorflow as tf

from framework.reporting.metrics_log import MetricsLog

if TYPE_CHECKING:
  from framework.task import Task


Output = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """What an action may use of the run it belongs to.

  Attributes:
    task: its model is built.
    strategy: the strategy in use.
    trainer: None where nothing is trained.
    evaluator: None where nothing is evaluated.
    checkpoint: everything that training needs to go on, already restored.
    metrics_log: the log on disk. Workers other than the chief only read it, so that all decide
      alike: it must be the chief's file.
    global_step: int64 scalar, training steps completed.
    model_dir: the run folder.
    replay_command: what shows the step again at which `StopOnNonFinite` has stopped.
    is_chief: whether this process writes to the run folder.
    message: tells the user some lines, above the line of progress.
    evaluated_weights: makes a context in which the model holds the weights that evaluations use:
      the moving average, if there is one.
  """

  task: Task
  strategy: tf.distribute.Strategy
  trainer: orbit.AbstractTrainer | None
  evaluator: orbit.AbstractEvaluator | None
  checkpoint: tf.train.Checkpoint
  metrics_log: MetricsLog
  global_step: tf.Variable
  model_dir: str
  replay_command: str = ""
  is_chief: bool = True
  message: Callable[[str], None] = print
  evaluated_weights: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

  @property
  def step(self) -> int:
    """How many training steps are completed (host)."""
    return int(self.global_step.numpy())


class StopTraining(Exception):  # noqa: N818 (it is no error)
  """Raised by an action to end training in good order; the run succeeds.

  Attributes:
    reason: one line for the user.
    output: the values the action was called with. Orbit writes them after its actions, so whoever
      catches this still has to.
  """

  def __init__(self, reason: str, output: Output | None = None) -> None:
    """Keeps both."""
    super().__init__(reason)
    self.reason = reason
    self.output = dict(output or {})


class Action:
  """Something to do after each training loop or each evaluation; subclass it.

  Attributes:
    on: "train" or "eval".
    run: set by `bind`.
  """

  on: ClassVar[Literal["train", "eval"]]
  run: Run

  def bind(self, run: Run) -> None:
    """Called once by the framework, when the run is assembled (host)."""
    self.run = run

  def begin(self) -> None:
    """Called once before the first training step, all being restored (host).

    Raises:
      StopTraining: an earlier process had already come to the end.
    """

  def loop_ends(self) -> Sequence[int]:
    """Returns steps at which a training loop must end, whatever `run.steps_per_loop` (host)."""
    return ()

  def end(self) -> None:
    """Called once when training is over and saved, or has failed, in this process (host).

    `begin` may not have been called; other workers may be gone.
    """

  def __call__(self, output: Output) -> None:
    """Called with the loop's or the evaluation's values, which may be tensors or nested (host)."""
    raise NotImplementedError
