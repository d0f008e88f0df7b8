"""What the host changes between two loops, which a compiled loop does not see by itself.

A loop has in its graph what it has read while it was traced. So a `Watch` keeps what that was:

    with watch.trace(task):             the step is traced
      task.train_step(...)
    watch.followed(task, parts, ...)    before the next loop: with what to trace it again

Of the user's own objects, those attributes count that the trace has read, also in objects that it
finds in them; counters and lists that only the host reads may change. Of Keras's layers, all public
attributes count. What the trace itself changes, such as a count of its calls, does not.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from loopwright.engine.step_parts import StepParts
from loopwright.errors import ConfigError, shown
from loopwright.graphs.aliases import Variable
from loopwright.host import lazy_keras
from loopwright.models import models
from loopwright.optimizers.adapters import Optimizer
from loopwright.task import Task

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_NUMBERS = (bool, int, float, type(None))  # options of optimizers
_MOST, _FEW, _SHOWN = 10_000, 100, 3
"""Elements of a list or an array that are compared; parts in which objects are looked for."""
_LIBRARIES = {"absl", "keras", "tf_keras", "tensorflow", "numpy", "wrapt", *sys.stdlib_module_names}
_HEAP_TYPE = 1 << 9
_ABSENT = "no attribute"
_OF_UPDATES = ("_learning_rate", "_exclude_from_weight_decay")


class Read(NamedTuple):
  """An attribute: what it was, and what is equal to it as long as it is the same."""

  holder: Any
  name: str
  value: Any
  same: Any

  @classmethod
  def of(cls, holder: Any, name: str) -> Read:
    """Returns what an attribute is now."""
    value = _held(holder, name)
    return cls(holder, name, value, _same(value))

  def changed(self) -> str:
    """Returns a phrase if it is another now, else ""."""
    now = _held(self.holder, self.name)
    if _same(now) == self.same:
      return ""
    owner = getattr(self.holder, "path", None) or type(self.holder).__name__
    was = "changed in place" if now is self.value else f"which was {_said(self.value)}"
    return f"{owner}.{self.name.lstrip('_')} is {_said(now)}, {was}"


Reads = dict[tuple[int, str], Read | None]
"""(id of the object, name) -> what a trace has read; None for what it has changed."""


class Watch:
  """What the traces of one loop have read (host)."""

  def __init__(self, optimizers: Mapping[str, Optimizer] | None = None) -> None:
    """Keeps the options with which optimizers were built; an evaluation has none."""
    self._names = {id(one.optimizer): name for name, one in (optimizers or {}).items()}
    self._read: Reads = {}
    for each in (optimizers or {}).values():
      for name, value in vars(each.optimizer).items():
        option = type(value) in _NUMBERS and not name.startswith("_")
        if option or (name.startswith(_OF_UPDATES) and not name.endswith("_cache")):
          self._read[id(each.optimizer), name] = Read.of(each.optimizer, name)
    self._told: set[str] = set()
    self._layers: list[Any] = []
    self._variables: list[tuple[Variable, bool]] = []
    self._sort()

  @property
  def has_traced(self) -> bool:
    """Whether it knows of a trace."""
    return bool(self._layers or self._variables)

  @contextlib.contextmanager
  def trace(self, task: Any) -> Iterator[None]:
    """Keeps what is read inside `with`; nothing in eager mode, which reads it in each step."""
    if tf.executing_eagerly():
      yield
      return
    layers, of_keras, before = list(models.layers(task.model)), _names_of_keras(), dict(vars(task))
    with _reading([task, *models.parts(task.model), *layers], self._read, of_keras):
      yield
    for layer in layers:
      for name, value in vars(layer).items():
        own = name.startswith("_") or name in of_keras or type(value) not in _PLAIN
        if not own or (name == "_trainable" and self._names):
          self._read.setdefault((id(layer), name), Read.of(layer, name))
    made = {(id(task), n) for n, v in vars(task).items() if before.get(n, _ABSENT) is not v}
    self._tell_numbers(task, {n: before[n] for _, n in made & self._read.keys() if n in before})
    for key, each in self._read.items():
      self._read[key] = None if each is None or key in made or each.changed() else each
    self._layers = layers
    if self._names:
      self._variables = [(each, each.trainable) for each in models.all_variables(task.model)]
    self._sort()

  def _tell_numbers(self, task: Any, before: Mapping[str, Any]) -> None:
    """Says once of each number that the trace has read and changed: a step does not change it."""
    for name in before.keys() - self._told:
      was, now = before[name], getattr(task, name, None)
      if type(was) in (int, float) and type(now) in (int, float):
        self._told.add(name)
        logging.warning(
          "%s.%s went from %s to %s while the step was traced, once, and not in each step: use "
          "step.number, or a tf.Variable of the model with step.assign "
          "(docs/cadence-and-state.md).", type(task).__name__, name, was, now,
        )  # fmt: skip

  def _sort(self) -> None:
    """Keeps apart what is fast to compare: there are thousands."""
    self._plain: list[tuple[dict[str, Any], str, Any, Read]] = []
    self._others: list[Read] = []
    for each in filter(None, self._read.values()):
      own = getattr(each.holder, "__dict__", {})
      if each.name in own and type(each.value) in _PLAIN:
        self._plain.append((own, each.name, each.value, each))
      else:
        self._others.append(each)

  def changes(self, task: Any) -> list[str]:
    """Returns what differs from what the traces have read, a phrase for each.

    Raises:
      ConfigError: an optimizer has an option with which it would have other state, or another rule.
    """
    found = []
    moved = [each for own, name, value, each in self._plain if own.get(name, _ABSENT) is not value]
    for each in moved + self._others:
      if says := each.changed():
        self._require_followed(each, says)
        found.append(says)
    for variable, before in self._variables:
      if variable.trainable is not before:
        found.append(f"{models.name(variable)}.trainable is {not before}, which was {before}")
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

  def _require_followed(self, read: Read, says: str) -> None:
    """Raises ConfigError for an option of an optimizer on which its state or its rule depends."""
    name, now = self._names.get(id(read.holder)), _held(read.holder, read.name)
    if name is not None and (type(now) not in _NUMBERS or bool(now) != bool(read.value)):
      raise ConfigError(
        f"{says} when optimizer {name!r} was built: what it keeps and how it updates follow from "
        "that; set it back, and give it from the start."
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


@contextlib.contextmanager
def _reading(holders: Iterable[Any], into: Reads, of_keras: set[str]) -> Iterator[None]:
  """Records which attributes are read inside `with`, of these objects and of those in them."""
  watched: dict[type, Any] = {}

  def watch(holder: Any, depth: int = 0) -> None:
    kind = type(holder)
    if isinstance(holder, (list, tuple, dict)) and len(holder) <= _FEW and not depth:
      for each in holder.values() if isinstance(holder, dict) else holder:
        watch(each, depth + 1)
    known = kind in watched or kind.__module__.partition(".")[0] in _LIBRARIES
    if known or issubclass(kind, type) or not kind.__flags__ & _HEAP_TYPE:
      return
    usual: Any = kind.__getattribute__

    def read(self: Any, name: str) -> Any:
      own = name.startswith("__") or (name in of_keras and models.is_keras(self))
      if not own and (id(self), name) not in into and not tf.executing_eagerly():
        into[id(self), name] = Read.of(self, name)
      value = usual(self, name)
      if not isinstance(value, _PLAIN):
        watch(value)
      return value

    with contextlib.suppress(AttributeError, TypeError):  # where its class forbids it
      own = vars(kind).get("__getattribute__")
      kind.__getattribute__ = read  # type: ignore[assignment]
      watched[kind] = own

  try:
    for holder in holders:
      watch(holder)
    yield
  finally:
    for kind, own in watched.items():
      if own is None:
        del kind.__getattribute__
      else:
        kind.__getattribute__ = own  # type: ignore[method-assign]


def _names_of_keras() -> set[str]:
  """Returns the attributes that every model of Keras has, which are its own."""
  return {name for library in lazy_keras.kerases() for name in vars(library.Model())}


def _held(holder: Any, name: str) -> Any:
  """Returns an attribute as the object or its class has it: a property is not called."""
  try:
    own = object.__getattribute__(holder, "__dict__")
  except AttributeError:
    own = {}
  for kept in (own, *map(vars, type(holder).__mro__)):
    if name in kept:
      value = kept[name]
      slot = isinstance(value, types.MemberDescriptorType)
      return object.__getattribute__(holder, name) if slot else value
  return _ABSENT


def _same(value: Any, depth: int = 0) -> Any:
  """Returns what is equal as long as a value is: of containers their content, else the object."""
  if isinstance(value, _PLAIN):
    return type(value), value
  if isinstance(value, np.ndarray) and value.size <= _MOST and not value.dtype.hasobject:
    return value.dtype.str, value.shape, value.tobytes()
  if tf.is_symbolic_tensor(value):
    return (
      tf.Tensor
    )  # what a trace kept, such as attention weights to look at: no change of the host
  if isinstance(value, (types.SimpleNamespace, argparse.Namespace)):
    value = vars(value)
  if isinstance(value, (list, tuple, dict)) and len(value) <= _MOST and depth < 3:
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    return type(value), [_same(part, depth + 1) for part in parts]
  return id(value), value  # only the same object is compared with itself


def _said(value: Any) -> str:
  return value if value is _ABSENT else shown(value, most=60)
