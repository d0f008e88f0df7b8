"""State that a task keeps beside its model: found in the traced loop, saved under its place.

A list such as Keras's `.variables` has what its author thought of. A traced loop captures whatever
it reads and assigns: a counter of the task, a number that an optimizer trains, the states of a
recurrent layer. What it assigns and nothing else saves, a checkpoint has as "task/<place>".
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from absl import logging
from tensorflow.python.trackable import base, trackable_utils

from loopwright.errors import ConfigError
from loopwright.graphs import operations
from loopwright.graphs.aliases import Variable
from loopwright.models import models

_COPIES = "COPIES"
_MOST = 10_000
"""Of the elements of a list or dict, those in which variables are looked for."""
_OPAQUE = (
  type, types.ModuleType, types.FunctionType, tf.Tensor, tf.Graph, tf.data.Dataset,
  tf.types.experimental.PolymorphicFunction, tf.distribute.Strategy,
)  # fmt: skip
_TABLES = (tf.lookup.experimental.MutableHashTable, tf.lookup.experimental.DenseHashTable)


class Place(NamedTuple):
  """Where an object has a variable, or a table that can be changed.

  Attributes:
    name: the attributes and indices that lead to it, such as "memory.keys.0".
    holder: whose attribute or element it is.
    bare: whether only attributes of the object, lists and dicts lead to it.
  """

  name: str
  variable: Any
  holder: Any
  bare: bool


class TaskState(tf.__internal__.tracking.TrackableDataStructure):  # which may be empty
  """What a checkpoint has of a task beside its model: nothing of most.

  Attributes:
    used: id of a handle -> the variable, of one replica, that the training loop reads or assigns.
    kept: name of a place -> what is saved of it.
    untrained: the names of places whose variables look like weights that no optimizer has.
  """

  def __init__(self, task: Any, replicas: Replicas | None = None) -> None:
    """Keeps nothing yet; `replicas` are those of several processes."""
    super().__init__()
    self._task, self._replicas = task, replicas
    self.used: dict[int, Variable] = {}
    self.kept: dict[str, Any] = {}
    self.untrained: list[str] = []
    self._shown: Collection[str] | None = None  # while a checkpoint is restored, what it has
    self._restored: Collection[str] | None = None

  def examine(
    self,
    graph: Any,
    *,
    saved: Iterable[Variable],
    equal: Iterable[Variable],
    transient: Iterable[object],
  ) -> None:
    """Keeps what a traced loop assigns and nothing saves; restores what is restored (host).

    Args:
      graph: of the loop; None, if it is not known, keeps each variable of the task itself.
      saved: what checkpoints have anyway.
      equal: what is the same on all replicas when a checkpoint is written.
      transient: objects whose variables begin again in each loop.
    """
    changes = {} if graph is None else operations.resources(graph)
    raws = {id(raw): raw for raw in map(models.raw, saved)}
    known, alike = by_handle(raws.values()), {id(models.raw(variable)) for variable in equal}
    own = alike | {id(models.raw(v)) for v in models.all_variables(self._task.model)}
    self.used = {handle: known[handle] for handle in changes if handle in known}

    def is_changed(raw: Any) -> bool:
      return graph is None or any(changes.get(handle) for handle in by_handle([raw]))

    def is_odd(raw: Any) -> bool:
      if is_changed(raw):  # saved as one value
        return id(raw) not in alike and len(copies_of(raw)) > 1 and not is_mirrored(raw)
      read = by_handle([raw]).keys() & changes.keys()
      return bool(read) and id(raw) not in own and _is_weight(raw)  # TensorFlow alone sees it

    odd = {key for key, raw in raws.items() if is_odd(raw)}
    for place in self._places(graph, changes.keys() - known.keys(), known, transient, odd):
      raw, copies = models.raw(place.variable), by_handle([place.variable])
      self.used |= {handle: copies[handle] for handle in copies if handle in changes}
      if is_changed(raw):
        whole = id(raw) in alike or (graph is None and copies_of(raw) == [raw])
        self._keep(place, equal=whole, optional=id(raw) in odd)
      elif self._was_meant_to_be_trained(place) and place.name not in self.untrained:
        self.untrained.append(place.name)

  @contextlib.contextmanager
  def fitted(self, keys: Iterable[str], root: tf.train.Checkpoint) -> Iterator[None]:
    """Inside `with`, it has what a checkpoint has of it (host).

    Args:
      keys: of the checkpoint, below that of this object.
      root: what is restored, with this object.
    """
    layout = dict(key.split("/.ATTRIBUTES/", 1) for key in keys)
    known = {id(each) for each in tf.train.TrackableView(root).descendants()} if layout else set()
    for place in reachable(self._task) if layout else ():
      name = trackable_utils.escape_local_name(place.name)
      if name in layout and not known & {id(place.variable), id(models.raw(place.variable))}:
        self._keep(place, equal=layout[name] != _COPIES)
    self._shown = self._restored = layout.keys()
    try:
      yield
    finally:
      self._shown = None

  @property
  def changed(self) -> list[tf.Variable]:
    """The variables among what is kept."""
    items = [getattr(item, "variable", item) for item in self.kept.values()]
    return [item for item in items if not isinstance(item, _TABLES)]

  def note(self) -> list[str]:
    """Returns a line if something looks like a weight and no optimizer has it."""
    if not self.untrained:
      return []
    return [
      f"no optimizer trains {', '.join(self.untrained)}, which the loop reads: return it from "
      "build_model(), or make it with add_weight() in a Keras layer; or with trainable=False, if "
      "it is no weight"
    ]

  def _keep(self, place: Place, *, equal: bool, optional: bool = False) -> None:
    before, raw = self.kept.get(place.name), models.raw(place.variable)
    whole = equal or isinstance(raw, _TABLES) or is_mirrored(raw)
    if before is not None and whole != isinstance(before, Copies):
      return
    item = raw if whole else Copies(raw, place.name, self._replicas, optional=optional)
    self.kept[place.name] = item
    if before is None:
      self._handle_deferred_dependencies(place.name, item)
    if before is not None or self._restored is None or optional:
      return
    if trackable_utils.escape_local_name(place.name) not in self._restored:
      logging.warning(
        "the restored checkpoint has no %r, which the loop assigns: it begins at its first value",
        place.name,
      )

  def _places(
    self,
    graph: Any,
    missing: Collection[int],
    known: Mapping[int, Variable],
    transient: Iterable[object],
    odd: Collection[int],
  ) -> Iterator[Place]:
    """Yields the places of missing handles, and of odd variables; if there is no graph, all bare.

    What the task does not hold is named as TensorFlow does.
    """
    left = set(missing)
    for place in reachable(self._task) if left or odd or graph is None else ():
      handles = by_handle([place.variable]).keys()
      bare = graph is None and place.bare and not known.keys() & handles
      if bare or left & handles or id(models.raw(place.variable)) in odd:
        left -= handles
        yield place
    for holder in transient if left else ():
      left -= by_handle(place.variable for place in reachable(holder)).keys()
    for variable in graph.variables if left else ():
      whole = getattr(variable.handle, "_distributed_container", lambda: None)() or variable
      if left & by_handle([whole]).keys():
        left -= by_handle([whole]).keys()
        yield Place(f"other.{whole.name.partition(':')[0]}", whole, None, bare=False)

  def _was_meant_to_be_trained(self, place: Place) -> bool:
    """Whether what the loop only reads looks like a weight, of no network that may be frozen.

    Keras 3 does not see a `tf.Variable` of a layer, and a constant has no use for `trainable`.
    """
    of_keras = isinstance(place.holder, keras.Layer)
    known = place.bare or (of_keras and place.holder in models.layers(self._task.model))
    return known and _is_weight(place.variable)

  def _trackable_children(self, *_: Any, **__: Any) -> dict[str, Any]:
    shown = self._shown
    names = {name: trackable_utils.escape_local_name(name) for name in self.kept}
    return {n: item for n, item in self.kept.items() if shown is None or names[n] in shown}

  def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
    del cached_dependencies
    return self.kept.get(name)

  @property
  def _values(self) -> list[Any]:
    return list(self.kept.values())


class Replicas(NamedTuple):
  """How a process reads the values of all replicas, where some are in other processes.

  Attributes:
    total: the replicas of all processes.
    first: the number of the first one of this process.
    gather: returns the values of a variable on all of them, [total, ...]; every process calls it.
  """

  total: int
  first: int
  gather: Callable[[tf.Variable], tf.Tensor]


class Copies(base.Trackable):
  """A variable that may differ between replicas, with the value of each."""

  def __init__(
    self, variable: tf.Variable, name: str, replicas: Replicas | None, *, optional: bool = False
  ) -> None:
    """Stores its arguments; what does not fit on a restore is an error, unless `optional`."""
    self.variable, self._name, self._replicas = variable, name, replicas
    self._optional = optional

  def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
    if self._replicas:
      return {_COPIES: self._replicas.gather(self.variable)}
    with tf.device("CPU:0"):
      return {_COPIES: tf.stack([copy.read_value() for copy in copies_of(self.variable)])}

  def _restore_from_tensors(self, tensors: Mapping[str, tf.Tensor]) -> None:
    copies = copies_of(self.variable)
    total, first, _ = self._replicas or (len(copies), 0, None)
    values = self._shared(tensors[_COPIES], total)
    if values is not None:
      for number, copy in enumerate(copies):
        copy.assign(values[first + number])

  def _shared(self, saved: tf.Tensor, replicas: int) -> tf.Tensor | None:
    """Returns the values of so many replicas, [replicas, ...]; None to leave them."""
    if saved.shape[0] == replicas:
      return saved
    if self.variable.aggregation == tf.VariableAggregation.SUM:
      first = tf.reduce_sum(saved, 0, keepdims=True)
      return tf.concat([first, tf.repeat(tf.zeros_like(first), replicas - 1, 0)], 0)
    if self.variable.aggregation == tf.VariableAggregation.MEAN:
      return tf.repeat(tf.reduce_mean(saved, 0, keepdims=True), replicas, 0)
    if tf.reduce_all(saved == saved[:1]):
      return tf.repeat(saved[:1], replicas, 0)
    if self._optional:
      return None
    raise ConfigError(
      f"the checkpoint has the value of {self._name!r} on each of {saved.shape[0]} replicas, and "
      f"they differ, but this run has {replicas}; go on with as many replicas, or make the "
      "variable with an aggregation, such as tf.VariableAggregation.SUM."
    )


def reachable(root: object) -> Iterator[Place]:
  """Yields the variables that are attributes or elements of an object, or of those below it.

  Each once, by the shortest way. TensorFlow's and Keras's own lists of what is tracked do not
  matter.
  """
  waiting: list[tuple[str, Any, bool]] = [("", root, True)]
  seen = {id(root)}
  for name, holder, bare in waiting:  # grows
    for key, value in _members(holder):
      if id(value) in seen:
        continue
      place = f"{name}.{key}" if name else str(key)
      if models.is_variable(value) or isinstance(value, _TABLES):
        seen.add(id(value))
        yield Place(place, value, holder, bare)
      elif _may_hold(value):
        seen.add(id(value))
        waiting.append((place, value, bare and isinstance(value, (Mapping, list, tuple))))


def _members(holder: Any) -> Iterable[tuple[Any, Any]]:
  if isinstance(holder, (Mapping, list, tuple)) and len(holder) > _MOST:
    return ()
  if isinstance(holder, Mapping):
    return list(holder.items())
  if isinstance(holder, (list, tuple)):
    return enumerate(holder)
  return list(vars(holder).items())


def _may_hold(value: Any) -> bool:
  if isinstance(value, (Mapping, list, tuple, base.Trackable)):
    return not isinstance(value, (TaskState, *_OPAQUE))
  library = type(value).__module__.partition(".")[0] in ("tensorflow", "numpy", "builtins")
  return hasattr(value, "__dict__") and not library and not isinstance(value, _OPAQUE)


def copies_of(variable: Variable) -> list[Any]:
  """Returns the copies of a variable on the replicas of this process; itself without any."""
  raw = models.raw(variable)
  return list(raw.values) if isinstance(raw, tf.distribute.DistributedValues) else [raw]


def by_handle(variables: Iterable[Any]) -> dict[int, Any]:
  """Returns the id of the handle of each copy of variables and tables -> the copy."""
  copies = [copy for variable in variables for copy in copies_of(variable)]
  handles = [getattr(copy, "resource_handle", getattr(copy, "handle", None)) for copy in copies]
  return {id(handle): copy for handle, copy in zip(handles, copies, strict=True)}


def is_mirrored(variable: tf.Variable) -> bool:
  """Whether TensorFlow gives a variable the same value on all replicas at each assignment."""
  alone = variable.synchronization == tf.VariableSynchronization.ON_READ
  return not alone and variable.aggregation != tf.VariableAggregation.NONE


def _is_weight(variable: Any) -> bool:
  return isinstance(variable, tf.Variable) and variable.trainable and variable.dtype.is_floating
