"""The state of a run's actions, as one item of its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from loopwright.actions.base import Action
from loopwright.errors import ConfigError, first_line


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
