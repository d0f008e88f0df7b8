"""What the host changes between two loops of what a compiled loop has in its graph.

Options of optimizers, and what is trainable. As in Keras, whatever else Python has read while the
loop was traced stays in it, until `trainer.use()` has it traced again. A `Watch` keeps the former:

    watch.traced(task)                  the step has been traced
    watch.followed(task, parts, ...)    before the next loop: with what to trace it again
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from loopwright.engine.step_parts import StepParts
from loopwright.errors import ConfigError, shown
from loopwright.graphs.aliases import Variable
from loopwright.models import models
from loopwright.optimizers.adapters import Optimizer
from loopwright.task import Task

_NUMBERS = (bool, int, float, type(None))  # options of optimizers
_SHOWN = 3
_OF_UPDATES = ("_learning_rate", "_exclude_from_weight_decay")


class Option(NamedTuple):
  """An option of an optimizer: what it was when the optimizer was built."""

  optimizer: Any
  of: str
  name: str
  value: Any
  same: Any

  def changed(self) -> str:
    """Returns a phrase if it is another now, else ""."""
    now = getattr(self.optimizer, self.name, None)
    if _same(now) == self.same:
      return ""
    was = "changed in place" if now is self.value else f"which was {shown(self.value, most=60)}"
    name = f"{type(self.optimizer).__name__}.{self.name.lstrip('_')}"
    return f"{name} is {shown(now, most=60)}, {was}"


class Watch:
  """What the optimizers and the model were when a loop was traced (host)."""

  def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
    """Keeps the options with which optimizers were built."""
    self._options = [
      Option(each.optimizer, of, name, value, _same(value))
      for of, each in optimizers.items()
      for name, value in vars(each.optimizer).items()
      if (type(value) in _NUMBERS and not name.startswith("_"))
      or (name.startswith(_OF_UPDATES) and not name.endswith("_cache"))
    ]
    self._layers: list[Any] = []
    self._trainable: list[tuple[Any, bool]] = []

  @property
  def has_traced(self) -> bool:
    """Whether it knows of a trace."""
    return bool(self._trainable)

  def traced(self, task: Any) -> None:
    """Keeps what is trainable; nothing in eager mode, which reads it in each step."""
    if not tf.executing_eagerly():
      self._layers = list(models.layers(task.model))
      parts = [*self._layers, *models.all_variables(task.model)]
      self._trainable = [(part, part.trainable) for part in parts]

  def changes(self, task: Any) -> list[str]:
    """Returns what differs from what was traced, a phrase for each.

    Raises:
      ConfigError: an optimizer has an option with which it would have other state, or another rule.
    """
    found = []
    for option in self._options:
      if says := option.changed():
        _require_followed(option, says)
        found.append(says)
    for part, before in self._trainable:
      if part.trainable is not before:
        found.append(f"{models.name(part)}.trainable is {not before}, which was {before}")
    if self._layers and (now := list(models.layers(task.model))) != self._layers:
      found.append(f"the model has {len(now)} layers, which were {len(self._layers)}")
    return found[:_SHOWN] + ([f"{len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])

  def followed(self, task: Task, parts: StepParts, *, traced: bool) -> StepParts | None:
    """Returns the parts with which a loop must be traced again, if so, and says why.

    Args:
      task: the trainer's.
      parts: likewise.
      traced: whether the loop was traced before, so that there is something to say.

    Raises:
      ConfigError: something has changed that cannot be followed.
    """
    changes, optimizers = self.changes(task), parts.optimizers.items()
    if not changes and self.has_traced and type(task).variables_of is Task.variables_of:
      return None
    now = frozenset[int]().union(*(_frozen(k, one, task.variables_of(k)) for k, one in optimizers))
    if now != parts.frozen:
      changes.append(f"{len(now)} of the optimizers' variables are frozen")
    if changes and traced:
      logging.warning("%s: the training loop is traced again", "; ".join(changes))
    return dataclasses.replace(parts, frozen=now) if changes else None


def _require_followed(option: Option, says: str) -> None:
  """Raises ConfigError for an option on which an optimizer's state or its rule depends."""
  now = getattr(option.optimizer, option.name, None)
  if type(now) not in _NUMBERS or bool(now) != bool(option.value):
    raise ConfigError(
      f"{says} when optimizer {option.of!r} was built: what it keeps and how it updates follow "
      "from that; set it back, and give it from the start."
    )


def _frozen(name: str, optimizer: Optimizer, now: Sequence[Variable]) -> frozenset[int]:
  """Returns the ids of an optimizer's variables that are not among those to train now (host).

  Raises:
    ConfigError: it has none left, or another one is to be trained.
  """
  wanted = {id(models.raw(variable)): variable for variable in now}
  built = {id(models.raw(variable)) for variable in optimizer.variables}
  for key in wanted.keys() - built:
    raise ConfigError(
      f"{models.name(wanted[key])!r} is to be trained now, but optimizer {name!r} was built "
      "without it; make it in build_model(), trainable, and freeze it later, or use when=."
    )
  if not wanted:
    raise ConfigError(
      f"optimizer {name!r} has no trainable variable left; leave out its updates with when=."
    )
  return frozenset(built - wanted.keys())


def _same(value: Any) -> Any:
  """Returns what is equal as long as a value is."""
  if isinstance(value, (list, tuple, set)):
    return type(value), [*value]
  return (type(value), value) if type(value) in _NUMBERS else id(value)
