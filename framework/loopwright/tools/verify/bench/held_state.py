"""State that a task holds outside of a checkpoint: variables, generators, metrics, Python values.

`held(task)` returns a snapshot, name -> state; two snapshots can be compared.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import operator
import random
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from loopwright.graphs.aliases import Model, Variable
from loopwright.host import lazy_keras
from loopwright.models import models
from loopwright.task import Task
from loopwright.tools.verify.bench import source_lines

Kind = Literal["variable", "random generator", "metric", "Python value"]
_CONTAINERS = (list, tuple, set, frozenset, collections.deque, Mapping)
_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)
OF_A_GRAPH = "a tensor of a graph"
"""The value of a tensor that the task kept while a step was traced."""
_DEEPEST = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
  """One item of a task's state.

  Attributes:
    kind: what it is.
    owner: the object that has the attribute.
    attribute: name of the attribute that is or contains the item.
    value: to be compared with the value in another snapshot.
    variable: the `tf.Variable`, if it is one.
  """

  kind: Kind
  owner: Any
  attribute: str
  value: Any
  variable: Variable = None


def held(task: Task) -> dict[str, Held]:
  """Returns the state of a task and of the model's parts of the user's own classes (host).

  Returns:
    A name such as "Mine.average" -> the state now. Functions, data sets and objects of libraries
    are left out.
  """
  found: dict[str, Held] = {}
  for owner, ignored in [(task, {"model"}), *own_parts(task.model)]:
    for attribute, value in vars(owner).items():
      if attribute not in ignored:
        for name, kind, content, variable in _walk(attribute, value, _DEEPEST):
          found[f"{type(owner).__name__}.{name}"] = Held(
            kind=kind, owner=owner, attribute=attribute, value=content, variable=variable
          )
  return found


def own_parts(model: Model) -> list[tuple[Any, set[str]]]:
  """Returns a model's parts of the user's own classes, each with Keras's own attributes."""
  bare = {name for each in lazy_keras.kerases() for name in vars(each.Model())}
  found = []
  for part in models.parts(model):
    if models.is_keras(part):
      inside = list(models.layers(part))
    else:
      inside = [part, *getattr(part, "submodules", ())]
    found += [(each, bare) for each in inside if source_lines.is_the_users(type(each))]
  return found


def _walk(name: str, value: Any, depth: int) -> Iterator[tuple[str, Kind, Any, Any]]:
  inner = models.raw(value)
  if isinstance(inner, (tf.Variable, tf.distribute.DistributedValues)):
    yield name, "variable", _content(inner), inner
  elif isinstance(value, tf.random.Generator):
    yield name, "random generator", _content(value.state), value.state
  elif isinstance(value, _of_kerases("metrics.Metric")):
    for variable in map(models.raw, value.variables):
      yield f"{name}.{variable.name}", "metric", _content(variable), variable
  elif isinstance(value, (tf.Module, *_of_kerases("layers.Layer", "optimizers.Optimizer"))):
    for number, variable in enumerate(map(models.raw, _variables(value))):
      yield f"{name}.{variable.name}.{number}", "variable", _content(variable), variable
  elif isinstance(value, _CONTAINERS):
    yield from _inside(name, value, depth)
  elif (plain := _plain(value)) is not None:
    yield name, "Python value", plain, None
  elif depth and source_lines.is_the_users(type(value)) and hasattr(value, "__dict__"):
    for attribute, part in vars(value).items():
      yield from _walk(f"{name}.{attribute}", part, depth - 1)


def _of_kerases(*paths: str) -> Any:
  """Returns classes of Keras 3, and of tf_keras if it has been executed."""
  return tuple(operator.attrgetter(path)(each) for each in lazy_keras.kerases() for path in paths)


def _inside(name: str, container: Any, depth: int) -> Iterator[tuple[str, Kind, Any, Any]]:
  """Yields tensors and objects one by one, and all plain values of a container as one item."""
  pairs = container.items() if isinstance(container, Mapping) else enumerate(container)
  plain: list[Any] = []
  for key, value in list(pairs):
    if (frozen := _plain(value)) is not None:
      plain.append((str(key), frozen))
    elif depth:
      yield from _walk(f"{name}[{key!r}]", value, depth - 1)
  if isinstance(container, (set, frozenset)):
    plain = sorted(repr(frozen) for _, frozen in plain)
  yield name, "Python value", (type(container).__name__, len(container), plain), None


def _variables(value: Any) -> list[Any]:
  variables = value.variables
  return list(variables() if callable(variables) else variables)


def _content(variable: Variable) -> Any:
  return np.array(tf.convert_to_tensor(variable)).tobytes()


def _plain(value: Any) -> Any:
  """Returns a value to compare with `==`, or None if the object has none."""
  if isinstance(value, _SCALARS):
    return type(value).__name__, repr(value)
  if isinstance(value, np.memmap):
    return None
  if isinstance(value, np.ndarray):
    return value.shape, value.dtype.str, _digest(value)
  if isinstance(value, np.random.Generator):
    return repr(value.bit_generator.state)
  if isinstance(value, np.random.RandomState):
    return repr(value.get_state(legacy=False))
  if isinstance(value, random.Random):
    return repr(value.getstate())
  if tf.is_tensor(value) and isinstance(value, tf.Tensor):
    return _digest(value.numpy()) if hasattr(value, "numpy") else OF_A_GRAPH
  return repr(value) if type(value).__module__ == "itertools" else None


def _digest(array: np.ndarray) -> str:
  if array.dtype.hasobject:
    return repr(array.tolist())
  return hashlib.blake2b(np.ascontiguousarray(array).tobytes()).hexdigest()


def numpy_and_python() -> tuple[str, str]:
  """Returns the state of NumPy's and Python's global generators, for comparison."""
  return repr(np.random.get_state(legacy=False)), repr(random.getstate())
