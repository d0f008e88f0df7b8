"""The base class of actions: what a run does after a training loop or an evaluation.

A run calls an action with the values of a loop (`on = "train"`), of an evaluation (`on = "eval"`)
or of both, before they are written to metrics.jsonl. See docs/actions.md.

The actions of `orbit.actions` do not fit: NewBestMetric keeps its own file, which a restart from an
earlier checkpoint does not correct, and ExportSavedModel can leave half an export.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import tensorflow as tf

from loopwright import registry
from loopwright.errors import ConfigError
from loopwright.hooks import Output as Output
from loopwright.hooks import StopTraining as StopTraining
from loopwright.options.declaration import free
from loopwright.run_folder.metrics_log import MetricsLog

if TYPE_CHECKING:
  from loopwright.evaluator import Evaluator
  from loopwright.reporting.board import Board
  from loopwright.task import Task
  from loopwright.trainer import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """What an action can use of its run.

  Attributes:
    trainer, evaluator: None if nothing is trained, or evaluated.
    checkpoint: everything that training needs to continue, already restored.
    metrics_log: the chief's metrics.jsonl. All workers read it, so that they decide alike; only the
      chief writes it.
    global_step: int64 scalar, training steps completed.
    config: name -> value of everything that the run can reach, as text: gin's, or the arguments of
      `loopwright.run`.
    replay_command: replays the step at which `StopOnNonFinite` stopped.
    is_chief: whether this process writes to the run folder.
    require: raises unless the run folder is still there, and this run's; called before each action.
      An action that takes long calls it again before it writes.
    message: prints lines for the user, above the progress line.
    board: shows pictures, distributions and texts; see loopwright/reporting/board.py.
    current_split: returns "train" or "eval": what the actions are now called for.
    actions: all actions of the run.
    evaluated_weights: a context in which the model holds the weights that evaluations use: the
      moving average, if there is one.
  """

  task: Task
  strategy: tf.distribute.Strategy
  trainer: Trainer | None
  evaluator: Evaluator | None
  checkpoint: tf.train.Checkpoint
  metrics_log: MetricsLog
  global_step: tf.Variable
  model_dir: str
  actions: Sequence[Action] = ()
  replay_command: str = ""
  config: Mapping[str, str] = dataclasses.field(default_factory=dict)
  is_chief: bool = True
  require: Callable[[], None] = lambda: None
  message: Callable[[str], None] = print
  board: Board = dataclasses.field(default_factory=lambda: registry.load("public", "Board")())
  current_split: Callable[[], str] = lambda: "train"
  evaluated_weights: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

  @property
  def step(self) -> int:
    """The number of completed training steps (host)."""
    return int(self.global_step.numpy())

  @property
  def split(self) -> str:
    """ "train" or "eval": which values the action is called with."""
    return self.current_split()


class Action:
  """Something to do after each training loop or evaluation; subclass it.

  Attributes:
    on: "train", "eval" or "both".
    every_steps: with a number, a training loop ends at each multiple of it, and the action is
      called after these loops alone, whatever `run.steps_per_loop`; None calls it after each.
    changes_training: whether it changes what the run learns, such as a rate. If True, its options
      and where loops end may change only with --accept_changes.
    may_change: whether options may change when a run goes on, unless it changes training.
    run: set by `bind`.
  """

  on: Literal["train", "eval", "both"]
  every_steps: int | None = None
  changes_training = False
  may_change = free("counts from there on, over all evaluations in metrics.jsonl")
  run: Run

  def splits(self) -> tuple[str, ...]:
    """Returns the splits of `on`.

    Raises:
      ConfigError: `on` is missing, or something else.
    """
    on = getattr(self, "on", None)
    if on not in ("train", "eval", "both"):
      raise ConfigError(
        f"{type(self).__name__}.on is {on!r}; it must be 'train', 'eval' or 'both'."
      )
    return ("train", "eval") if on == "both" else (on,)

  def bind(self, run: Run) -> None:
    """Called once, when the run is assembled (host)."""
    self.run = run

  def begin(self) -> None:
    """Called once before the first training step, after the restore (host).

    Raises:
      StopTraining: an earlier process already reached the end.
    """

  def reads(self) -> Mapping[str, str]:
    """Returns option -> name of the evaluation metrics that the action needs (host).

    A name that no evaluation can have is then refused before training. Without this hook it is
    found at the first evaluation.
    """
    return {}

  def state(self) -> Any:
    """Returns what a restart must give back, of dicts, lists, texts, numbers and None (host).

    Called whenever a checkpoint is written; define `restore` too.
    """

  def restore(self, state: Any) -> None:
    """Called with the `state` of the restored checkpoint, before `begin` (host).

    Not called in a new run, nor if the checkpoint has no state of this action.
    """

  def loop_ends(self) -> Sequence[int]:
    """Returns steps at which a loop must end, whatever `run.steps_per_loop` (host).

    The default is the next multiple of `every_steps`.
    """
    every = self.every_steps
    return (self.run.step // every * every + every,) if every else ()

  def result(self) -> str:
    """Returns what the last line of the run says of this action, or "" (host; after `end`)."""
    return ""

  def end(self) -> None:
    """Called once when training in this process is over and saved, or has failed (host).

    `begin` may not have been called, and other workers may be gone.
    """

  def __call__(self, output: Output) -> None:
    """Called with the values of the loop or evaluation: scalars or tensors, maybe nested (host)."""
    raise NotImplementedError
