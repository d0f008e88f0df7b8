"""State that a task holds outside of a checkpoint: variables, generators, metrics, Python values.

`held(task)` returns a snapshot, name -> state; two snapshots can be compared.
"""

from __future__ import annotations

import collections
import hashlib
import operator
import pickle
import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from loopwright.host import lazy_keras
from loopwright.models import models
from loopwright.task import Task
from loopwright.tools.verify.bench import source_lines

OF_A_GRAPH = "a tensor of a graph"
"""The value of a tensor that the task kept while a step was traced."""
_CONTAINERS = (list, tuple, set, frozenset, collections.deque, Mapping)
_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_WITH_VARIABLES = ("layers.Layer", "optimizers.Optimizer", "metrics.Metric")
_DEEPEST = 4


class Held(NamedTuple):
  """One item of a task's state.

  Attributes:
    owner: the object that has the attribute.
    value: to be compared with the value in another snapshot.
    variable: the `tf.Variable`, if it is one.
    tensor: the tensor, if its value is `OF_A_GRAPH`.
  """

  owner: Any
  value: Any
  variable: Any = None
  tensor: Any = None

  @property
  def kind(self) -> str:
    """What it is: a "variable" or a "Python value"."""
    return "Python value" if self.variable is None else "variable"


def held(task: Task) -> dict[str, Held]:
  """Returns the state of a task and of the model's parts of the user's own classes (host).

  Returns:
    A name such as "Mine.average" -> the state now. Functions, data sets and objects of libraries
    are left out.
  """
  found: dict[str, Held] = {}
  of_keras = {name for each in lazy_keras.kerases() for name in vars(each.Model())}
  owners: list[tuple[Any, set[str]]] = [(task, {"model"})]
  for part in models.parts(task.model):
    modules = [part, *getattr(part, "submodules", ())]
    inside = models.layers(part) if models.is_keras(part) else modules
    owners += [(each, of_keras) for each in inside if source_lines.is_the_users(type(each))]
  for owner, ignored in owners:
    for attribute in vars(owner).keys() - ignored:
      name = f"{type(owner).__name__}.{attribute}"
      for each, *item in _walk(name, vars(owner)[attribute], _DEEPEST):
        found[each] = Held(owner, *item)
  return dict(sorted(found.items()))


def _walk(name: str, value: Any, depth: int) -> Iterator[tuple[Any, ...]]:
  """Yields (name, value, variable, tensor) of what a value holds."""
  inner, modules = models.raw(value), (tf.Module, tf.random.Generator)
  kerases = lazy_keras.kerases()
  modules += tuple(operator.attrgetter(p)(each) for each in kerases for p in _WITH_VARIABLES)
  if isinstance(inner, (tf.Variable, tf.distribute.DistributedValues)):
    yield name, np.array(tf.convert_to_tensor(inner)).tobytes(), inner
  elif isinstance(value, modules):
    variables = [value.state] if isinstance(value, tf.random.Generator) else value.variables
    for number, variable in enumerate(variables() if callable(variables) else variables):
      yield from _walk(f"{name}.{variable.name}.{number}", variable, depth)
  elif isinstance(value, _CONTAINERS):
    yield from _inside(name, value, depth)
  elif (plain := _plain(value)) is not None:
    yield name, plain, None, value if plain == OF_A_GRAPH else None
  elif depth and source_lines.is_the_users(type(value)) and hasattr(value, "__dict__"):
    for attribute, part in vars(value).items():
      yield from _walk(f"{name}.{attribute}", part, depth - 1)


def _inside(name: str, container: Any, depth: int) -> Iterator[tuple[Any, ...]]:
  """Yields tensors and objects one by one, and all plain values of a container as one item."""
  plain: list[Any] = []
  for key, value in list(
    container.items() if isinstance(container, Mapping) else enumerate(container)
  ):
    frozen = _plain(value)
    if frozen is not None and frozen != OF_A_GRAPH:
      plain.append((str(key), frozen))
    elif depth:
      yield from _walk(f"{name}[{key!r}]", value, depth - 1)
  if isinstance(container, (set, frozenset)):
    plain = sorted(repr(frozen) for _, frozen in plain)
  yield name, (type(container).__name__, len(container), plain)


def _plain(value: Any) -> Any:
  """Returns a value to compare with `==`, or None if the object has none."""
  if isinstance(value, _SCALARS) or type(value).__module__ == "itertools":
    return type(value).__name__, repr(value)
  if isinstance(value, _GENERATORS):
    return pickle.dumps(value)
  if isinstance(value, tf.Tensor):
    return _plain(value.numpy()) if hasattr(value, "numpy") else OF_A_GRAPH
  if not isinstance(value, np.ndarray) or isinstance(value, np.memmap):
    return None
  content = repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
  return value.shape, value.dtype.str, hashlib.blake2b(content).hexdigest()


def numpy_and_python() -> tuple[str, str]:
  """Returns the state of NumPy's and Python's global generators, for comparison."""
  return repr(np.random.get_state(legacy=False)), repr(random.getstate())
