"""The actions of a run: bound to it, called in their order; what they keep in checkpoints."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from loopwright.actions.base import Action, Output, Run
from loopwright.errors import ConfigError, first_line, kind, unknown
from loopwright.evaluator import Evaluator
from loopwright.hooks import Hook
from loopwright.host.timing import timed
from loopwright.reporting.board import Board
from loopwright.task import Task
from loopwright.trainer import Trainer


class Actions(Hook):
  """Calls the actions of a run: `bind`, then as a hook of its loop.

  Attributes:
    states: what the actions keep over a restart.
    saved: `states` for checkpoints; None if no action keeps anything.
    split: "train" or "eval": what the last action was called for.
  """

  def __init__(self, actions: Sequence[Action], *, require: Callable[[], None]) -> None:
    """Calls nothing yet.

    Args:
      actions: in the order in which they are called.
      require: raises unless the run folder is still the run's; called before each action.
    """
    self._actions, self._require = list(actions), require
    self.states, self.split = ActionStates(actions), "train"
    self.saved = self.states if self.states.values else None

  def bind(
    self,
    trainer: Trainer,
    evaluator: Evaluator | None,
    *,
    model_dir: str,
    message: Callable[[str], None],
    writer: Callable[[str], tf.summary.SummaryWriter],
    **more: Any,
  ) -> None:
    """Gives the actions the run, with `more` attributes of `Run` (host).

    Args:
      writer: returns TensorBoard's writer of "train" or "eval".

    Raises:
      ConfigError: an action cannot be used in this run.
    """
    ema = trainer.parts.ema
    self._step, is_chief = trainer.global_step, trainer.cluster.is_chief
    board = Board(
      model_dir if is_chief else None, step=lambda: int(self._step.numpy()), message=message,
      writer=lambda: writer(self.split),
    )  # fmt: skip
    run = Run(
      task=trainer.task, strategy=trainer.strategy, trainer=trainer, evaluator=evaluator,
      global_step=trainer.global_step, is_chief=is_chief, actions=self._actions, board=board,
      require=self._require, current_split=lambda: self.split, model_dir=model_dir, message=message,
      evaluated_weights=ema.in_place if ema else contextlib.nullcontext, **more,
    )  # fmt: skip
    for action in self._actions:
      action.bind(run)
      action.splits()  # raises unless it says after what it is called

  def require_metrics(self, evaluator: Evaluator) -> None:
    """Raises ConfigError if an action reads an evaluation metric that no evaluation has.

    A name that the trace does not have may be one that the task derives: an evaluation tells, of
    one batch, and of all before a name is refused. Under parameter servers the first one tells.
    """
    wanted = [(a, *item) for a in self._actions for item in a.reads().items()]
    names = evaluator.metric_names() if wanted else None
    derives = type(evaluator.task).derived is not Task.derived
    tries = (derives or evaluator.eager) and evaluator.placement.replays
    for batches in (1, -1) if tries else ():
      if not {name for *_, name in wanted} <= (names or set()):
        names = None
        with contextlib.suppress(Exception):  # told by the evaluation in training
          names = set(evaluator.evaluate(batches))
    for action, option, name in wanted:
      if names is not None and name not in names and (tries or not derives):
        raise unknown(f"{type(action).__name__}.{option}", name, names)

  def begins(self, step: int) -> None:
    """Gives back what the checkpoint has of the actions, and begins each (host)."""
    self.states.give_back()
    for action in self._actions:
      action.begin()
    self.states.serialize()  # raises for a state that JSON does not have

  def loop_end(self, step: int, end: int) -> int:
    """Returns the first step after `step` at which an action wants a loop to end, or `end`."""
    wanted = (one for action in self._actions for one in action.loop_ends())
    return min([end, *(one for one in wanted if one > step)])

  def after(self, split: str, output: Output) -> None:
    """Calls the actions of a split with the values of a loop or an evaluation (host)."""
    self._require()
    step = int(self._step.numpy())
    for action in self._actions:
      if split not in action.splits():
        continue
      if split == "train" and action.every_steps and step % action.every_steps:
        continue  # the loop ended for something else
      self.split = split
      if split == "eval":
        self.states.evaluated = step
      self._require()
      timed(f"action {type(action).__name__}")(action)(output)

  def ends(self) -> None:
    """Ends each action, in order, whatever the others raise (host)."""
    with contextlib.ExitStack() as ends:
      for action in reversed(self._actions):
        ends.callback(action.end)

  def results(self) -> list[str]:
    """Returns what the last line of the run says of each action (host; after `end`)."""
    return [action.result() for action in self._actions]


class ActionStates(tf.train.experimental.PythonState):
  """Saves what `Action.state` returns, and gives it back to `Action.restore` in a new process."""

  def __init__(self, actions: Sequence[Action]) -> None:
    """Names the actions that have a state by their class; a second one of a class is Name.2."""
    super().__init__()
    self._actions: dict[str, Action] = {}
    for action in actions:
      if type(action).state is not Action.state:
        name, others = type(action).__name__, sum(type(action) is type(a) for a in self.values)
        self._actions[f"{name}.{others + 1}" if others else name] = action
    self._restored: dict[str, Any] = {}
    self.evaluated: int | None = None
    """The step of the last evaluation after which actions were called."""

  @property
  def values(self) -> list[Action]:
    """The actions that have a state."""
    return list(self._actions.values())

  def serialize(self) -> str:
    """Returns the state of all actions; called when a checkpoint is written."""
    states = {name: action.state() for name, action in self._actions.items()}
    try:
      return json.dumps({"evaluated": self.evaluated, "states": states})
    except (TypeError, ValueError) as error:
      raise ConfigError(
        f"state() of the actions {', '.join(states)} must consist of dicts, lists, texts, numbers "
        f"and None: {first_line(error)}."
      ) from error

  def deserialize(self, text: bytes | str) -> None:
    """Keeps the states of a restored checkpoint; "" means that it has none."""
    self._restored = json.loads(text) if text else {}
    self.evaluated = self._restored.get("evaluated")

  def give_back(self) -> None:
    """Calls `restore` of the actions whose state the restored checkpoint has."""
    states = self._restored.get("states", {})
    for name, action in self._actions.items():
      if name in states:
        action.restore(states[name])

  def missed(self, step: int) -> bool:
    """Whether an action with a state has yet to see the evaluation of this step."""
    return self.evaluated != step and any("eval" in one.splits() for one in self.values)


def require_actions(given: Any) -> None:
  """Raises a ConfigError unless it is a list of actions, as `run` takes it."""
  if not isinstance(given, Sequence):
    raise ConfigError(f"run.actions is {kind(given)}; it must be a list of actions: [...].")
  for each in given:
    if not isinstance(each, Action):
      of_keras = hasattr(each, "on_epoch_end")
      remedy = "lw.KerasCallback(...)" if of_keras else f"{getattr(each, '__name__', 'X')}()"
      raise ConfigError(f"run.actions has {kind(each)}; each must be an Action: {remedy}.")
