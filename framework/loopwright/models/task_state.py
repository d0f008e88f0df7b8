"""State that a task keeps beside its model: found in the traced loop, saved under its place.

A list such as Keras's `.variables` has what its author thought of. A traced loop captures whatever
it reads and assigns: a counter of the task, a number that an optimizer trains, the states of a
recurrent layer. What it assigns and nothing else saves, a checkpoint has as "state/<place>"; what
such a checkpoint is restored into finds it by following the place, without a trace. What has no
place is refused before the first step, and a value that nothing takes when it is restored.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import tensorflow as tf
from absl import logging
from tensorflow.python.trackable import base

from loopwright.errors import ConfigError
from loopwright.graphs import operations
from loopwright.graphs.aliases import Variable
from loopwright.models import models
from loopwright.models.models import TABLES, Hidden

if TYPE_CHECKING:
  from loopwright.models.reachable import Place

_COPIES = "COPIES"
_WORDS = {"Var": "a variable", "Look": "a table", "Queue": "a queue"}
_STATE = re.compile(r'name="(?!\d+", .*::Lookup).*type="tensorflow::(?:lookup::)?(Var|Look|Queue)')
"""The text of a resource that can be changed; a table whose name is a number is constant."""


class TaskState(tf.__internal__.tracking.TrackableDataStructure, Hidden):  # which may be empty
  """What a checkpoint has of a task beside its model: nothing of most.

  Attributes:
    used: id of a handle -> the variable, of one replica, that the training loop reads or assigns.
    kept: name of a place -> what is saved of it.
    untaken: name of a place, in the restored checkpoint -> why this task does not take its value.
    untrained: the names of places whose variables look like weights that no optimizer has.
  """

  def __init__(self, task: Any, replicas: Replicas | None = None) -> None:
    """Keeps nothing yet; `replicas` are those of several processes."""
    super().__init__()
    self._task, self._replicas = task, replicas
    self.used: dict[int, Variable] = {}
    self.kept: dict[str, Any] = {}
    self.untaken: dict[str, str] = {}
    self.untrained: list[str] = []
    self._ambiguous: set[str] = set()  # names of earlier versions, in the restored checkpoint
    self._names: dict[int, str] = {}  # id of a variable -> its name in the restored checkpoint
    self._shown: Mapping[str, Any] | None = None  # while one is restored, what is taken of it
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

    Raises:
      ConfigError: the loop assigns what has no place that the next process would find.
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
    left = changes.keys() - known.keys()
    if not (left or odd or graph is None):
      return
    from loopwright.models.reachable import reachable

    for place in reachable(self._task):
      raw, copies = models.raw(place.variable), by_handle([place.variable])
      whole_task = graph is None and not place.of_network and not known.keys() & copies.keys()
      if not (whole_task or left & copies.keys() or id(raw) in odd):
        continue
      left -= copies.keys()
      self.used |= {handle: copies[handle] for handle in copies if handle in changes}
      if is_changed(raw):
        whole = id(raw) in alike or (graph is None and copies_of(raw) == [raw])
        self._keep(place, equal=whole, optional=id(raw) in odd)
      elif self._was_meant_to_be_trained(place) and place.name not in self.untrained:
        self.untrained.append(place.name)
    for holder in transient if left else ():
      left -= by_handle(place.variable for place in reachable(holder, by_code=False)).keys()
    _require_places(graph, {handle for handle in left if changes[handle]})

  @contextlib.contextmanager
  def fitted(
    self, keys: Iterable[str], root: tf.train.Checkpoint, *, before: bool = False
  ) -> Iterator[None]:
    """Inside `with`, it has what a checkpoint has of it (host).

    Args:
      keys: of the checkpoint, below that of this object.
      root: what is restored, with this object.
      before: whether an earlier version has named the places.
    """
    layout = dict(key.split("/.ATTRIBUTES/", 1) for key in keys)
    self._shown, self._names, self.untaken, self._ambiguous = {}, {}, {}, set()
    known = {id(each) for each in tf.train.TrackableView(root).descendants()} if layout else set()
    named: dict[str, list[Place]] = {}
    if before and layout:
      from loopwright.models.reachable import named_before

      named = named_before(self._task)
    for key, attribute in layout.items():
      name = re.sub(r"\.(.)", lambda sign: "/" if sign[1] == "S" else sign[1], key)
      found = named.get(name, []) if before else self._followed(name)
      if len(found) != 1:
        self.untaken[name] = _why_not(found)
        self._ambiguous |= {name} if found else set()
      elif not known & {id(found[0].variable), id(models.raw(found[0].variable))}:
        if not before:
          self._names[id(models.raw(found[0].variable))] = name
        self._shown[name] = self._keep(found[0], equal=attribute != _COPIES)
    self._restored = {*self._shown, *self.untaken}
    try:
      yield
    finally:
      self._shown = None

  def require_taken(self, path: str, *, accept: bool = False, trains: bool = False) -> None:
    """Checks that the task has taken all that a restored checkpoint has of it (host).

    Args:
      path: of the checkpoint.
      accept: whether the user goes on without the rest.
      trains: whether the run trains, so that the user can accept that.

    Raises:
      ConfigError: it has not.
    """
    if not self.untaken:
      return
    first, why = next(iter(self.untaken.items()))
    more = f" (and {len(self.untaken) - 1} more)" if len(self.untaken) > 1 else ""
    if accept:
      logging.warning("%r%s of checkpoint %s is left out: %s", first, more, path, why)
      self.untaken = {}
      return
    remedy = "; put it there, or add --accept_changes to go on without its value" if trains else ""
    raise ConfigError(f"checkpoint {path} has {first!r}{more} of its task, but {why}{remedy}.")

  @property
  def changed(self) -> list[tf.Variable]:
    """The variables among what is kept."""
    items = [getattr(item, "variable", item) for item in self.kept.values()]
    return [item for item in items if not isinstance(item, TABLES)]

  def note(self) -> list[str]:
    """Returns a line if something looks like a weight and no optimizer has it."""
    if not self.untrained:
      return []
    return [
      f"no optimizer trains {', '.join(self.untrained)}, which the loop reads: return it from "
      "build_model(), or make it with add_weight() in a Keras layer; or with trainable=False, if "
      "it is no weight"
    ]

  def _followed(self, name: str) -> list[Place]:
    from loopwright.models.reachable import Place, follow

    variable = follow(self._task, name)
    return [] if variable is None else [Place(name, variable)]

  def _keep(self, place: Place, *, equal: bool, optional: bool = False) -> Any:
    """Returns what is saved of a place from now on."""
    raw = models.raw(place.variable)
    name = self._names.get(id(raw), place.name)
    before, whole = self.kept.get(name), equal or isinstance(raw, TABLES) or is_mirrored(raw)
    if before is not None and whole != isinstance(before, Copies):
      return before
    item = raw if whole else Copies(raw, name, self._replicas, optional=optional)
    self.kept[name] = item
    taken = None
    if before is None and name not in self._ambiguous:
      self._handle_deferred_dependencies(name, item)
      taken = self.untaken.pop(name, None)
    if taken or before is not None or self._restored is None or optional:
      return item
    if name not in self._restored:
      logging.warning(
        "the restored checkpoint has no %r, which the loop assigns: it begins at its first value",
        name,
      )
    return item

  def _was_meant_to_be_trained(self, place: Place) -> bool:
    """Whether what the loop only reads looks like a weight, of no network that may be frozen.

    Keras 3 does not see a `tf.Variable` of a layer, and a constant has no use for `trainable`.
    """
    of_keras = isinstance(place.holder, keras.Layer)
    known = place.bare or (of_keras and place.holder in models.layers(self._task.model))
    return known and _is_weight(place.variable)

  def _trackable_children(self, *_: Any, **__: Any) -> dict[str, Any]:
    return dict(self.kept if self._shown is None else self._shown)

  def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
    del cached_dependencies
    return self._trackable_children().get(name)

  @property
  def _values(self) -> list[Any]:
    return list(self.kept.values())


def _why_not(found: Sequence[Place]) -> str:
  if not found:
    return "this task has no variable or table there after build_model()"
  names = " and ".join(place.name for place in found[:2])
  return f"an earlier version gave that name to {len(found)} of its places, such as {names}"


def _require_places(graph: Any, handles: Collection[int]) -> None:
  """Raises ConfigError for state that a loop assigns and that is in no place."""
  names: dict[int, str] = {}
  for variable in graph.variables if handles else ():
    names |= dict.fromkeys(by_handle([variable]), variable.name.partition(":")[0])
  for outer, _ in graph.captures if handles else ():
    found = _STATE.search(repr(outer)) if id(outer) in handles else None
    if not found or (found[1] == "Look" and not operations.fills_a_table(graph)):
      continue
    what = f"the variable {names[id(outer)]!r}" if id(outer) in names else _WORDS[found[1]]
    raise ConfigError(
      f"the training loop assigns {what}, which could not be restored: no attribute, list, dict or "
      "function of the task leads to it; keep it in an attribute of the task, or in a list, or in "
      "a dict whose keys are texts."
    )


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


@contextlib.contextmanager
def given_back(variables: Iterable[Variable]) -> Iterator[None]:
  """Gives variables their values back at the end of `with`, on each replica (host)."""
  copies = [copy for variable in variables for copy in copies_of(variable)]
  values = [tf.identity(copy.read_value()) for copy in copies]
  try:
    yield
  finally:
    for copy, value in zip(copies, values, strict=True):
      copy.assign(value)


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
