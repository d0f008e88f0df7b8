"""What a task has from the evaluation set: its statistics, its words, its numbers.

Means, deviations and extremes are looked for in the task's attributes and assets, in what its
preprocess() computes with and in what its model keeps: those of the evaluation set, or of both sets
together, where those of the training set belong. Words and numbers that only evaluation examples
have are looked for in vocabularies, and in what a layer is adapted to.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import tf_keras

from loopwright.graphs.aliases import AnySource, Model
from loopwright.graphs.autograph import as_written, converted
from loopwright.models import models
from loopwright.task import Task, preprocess_of
from loopwright.tools.verify.bench import source_lines, survey
from loopwright.tools.verify.bench.bench import Rows

LARGEST = 2**20
"""Elements of a constant to compare."""
FEW = 3
"""A constant of fewer elements may be equal by chance, so mean and deviation must both be there."""
SCALES = (1.0, 1 / 255)
MOST_VALUES = 2**20
WORDS = re.compile(r"\w[\w'-]*")
LAYERS = ("Normalization", "Discretization", "TextVectorization", "StringLookup", "IntegerLookup")
ADAPTED = [getattr(each.layers, name) for each in (keras, tf_keras) for name in LAYERS]


class Moments(NamedTuple):
  """Number of examples; over them, sums of a feature and of its squares, and its extremes."""

  rows: int
  total: np.ndarray
  squares: np.ndarray
  low: np.ndarray
  high: np.ndarray


class Read(NamedTuple):
  """What a source holds: moments and values of features, and which are of several words."""

  moments: dict[str, Moments]
  values: dict[str, set[Any]]
  texts: set[str]


class Constant(NamedTuple):
  """A constant of the task, and the line of the user's code that uses it."""

  value: np.ndarray
  place: str


class Vocabulary(NamedTuple):
  """Words or numbers that a task keeps: what it is, such as a layer, and its line."""

  values: set[Any]
  told: str
  place: str


@contextlib.contextmanager
def adaptations(task: Any) -> Iterator[list[Vocabulary]]:
  """Notes what layers are adapted to inside the context, with the layer and the line (host)."""
  found: list[Vocabulary] = []

  def noted(adapt: Callable[..., Any]) -> Callable[..., Any]:
    def noting(layer: Any, data: Any, *args: Any, **options: Any) -> Any:
      place = source_lines.of_frames(source_lines.frames(but=__file__), task)
      given = data.unbatch().take(MOST_VALUES).batch(256) if hasattr(data, "unbatch") else [data]
      with contextlib.suppress(Exception):  # the layer says what is wrong with it
        values = set().union(*(_values(np.asarray(each)) for each in given))
        found.append(Vocabulary(values, f"{type(layer).__name__} {layer.name!r}", place))
      return adapt(layer, data, *args, **options)

    return noting

  with contextlib.ExitStack() as stack:
    for kind in ADAPTED:
      stack.enter_context(mock.patch.object(kind, "adapt", noted(kind.adapt)))
    yield found


def reads_evaluation(task: Task) -> str:
  """Returns the line of fit(), or of an adapt() in build_model(), that reads the evaluation set."""
  texts = ('source("eval")', "source('eval')")
  for method in source_lines.own_methods(task):
    code = inspect.getsource(method)
    fits = method.__name__ == "fit" or (method.__name__ == "build_model" and "adapt(" in code)
    if fits and any(text in code for text in texts):
      return source_lines.find(task, method.__name__, containing=texts)
  return ""


def find(
  task: Task, train: Any, held_out: Any, *, seconds: float, kept: Sequence[Vocabulary] = (),
  assets: Mapping[str, bytes] = MappingProxyType({}),
) -> tuple[str, str] | None:  # fmt: skip
  """Returns (what was found, its line) of what is from the evaluation set; None for nothing.

  Args:
    task: with its model.
    train: the source of training examples.
    held_out: that of evaluation examples.
    seconds: to read each.
    kept: what layers were adapted to.
    assets: what the task's fit() returned.
  """
  constants = [*_constants(task, held_out), *_in_assets(task, assets)]
  words = [*kept, *_words(task, assets), *_vocabularies(task)]
  if not constants and not words:
    return None
  ours, theirs = (_read(source, seconds) for source in (train, held_out))
  return _word(words, ours, theirs) or _moment(constants, ours.moments, theirs.moments)


def _word(kept: Sequence[Vocabulary], ours: Read, theirs: Read) -> tuple[str, str] | None:
  for name in ours.values.keys() & theirs.values.keys():
    only = theirs.values[name] - ours.values[name]
    for of in kept:
      shared = of.values & only
      known = len(of.values & (ours.values[name] | only))
      if of.told.startswith("self.") and name not in ours.texts:
        continue  # the names of all classes, perhaps
      words = all(isinstance(value, str) for value in shared)
      enough = len(shared) > 1 and (words or len(shared) >= len(only) / 2)
      if enough and known > 0.9 * len(of.values):
        told = f"{len(shared)} values of {name!r} that only the evaluation set has"
        return f"{told}, such as {min(shared)!r} ({of.told})", of.place
  return None


def _moment(
  constants: Sequence[Constant], ours: Mapping[str, Moments], theirs: Mapping[str, Moments]
) -> tuple[str, str] | None:
  for name in ours.keys() & theirs.keys():
    right = list(_statistics(ours[name]).values())
    both = _together(ours[name], theirs[name])
    for of, moments in (("the evaluation set", theirs[name]), ("both sets", both)):
      found = {
        kind: constant
        for kind, value in _statistics(moments).items()
        for constant in constants
        if _equal(constant.value, value) and not any(_equal(constant.value, r) for r in right)
      }
      sure = any(constant.value.size >= FEW for constant in found.values())
      if found and (sure or len({kind[0] for kind in found}) > 1):
        kinds = " and ".join(dict.fromkeys(kind[0] for kind in found))
        return f"{kinds} of {name!r} over {of}", next(iter(found.values())).place
  return None


def _read(source: AnySource, seconds: float) -> Read:
  """Reads all of a source; returns nothing if there is no time for it."""
  timed, began = survey.Timed(survey.batches(source), seconds), time.perf_counter()
  moments: dict[str, Moments] = {}
  values: dict[str, set[Any]] = {}
  seen, texts = set[int](), set[str]()
  for batch in timed:
    share = len(seen) / (source.num_examples or 1)
    if seen and source.num_examples and time.perf_counter() - began > 2 * seconds * share:
      return Read({}, {}, set())  # it would not be ready in time
    new = [row for row, i in enumerate(batch["example_id"].tolist()) if i not in seen]
    seen.update(batch["example_id"][new].tolist())
    for name, value in batch.items():
      if name in ("example_id", "weight"):
        continue
      rows = value[new]
      if len(there := values.setdefault(name, set())) < MOST_VALUES:
        there |= _values(rows)
      if value.dtype == object and any(len(str(text).split()) > 1 for text in rows.flat):
        texts.add(name)
      if value.dtype.kind in "iuf" and len(rows):
        squares = np.einsum("i...,i...->...", rows, rows, dtype=np.float64, casting="unsafe")
        total = rows.sum(axis=0, dtype=np.float64)
        made = Moments(len(new), total, squares, rows.min(axis=0), rows.max(axis=0))
        moments[name] = _together(moments[name], made) if name in moments else made
    if len(seen) == source.num_examples:
      return Read(moments, values, texts)
  return Read({}, {}, set()) if timed.late or source.num_examples else Read(moments, values, texts)


def _values(rows: np.ndarray) -> set[Any]:
  """Returns the numbers of an array, or its words in small letters."""
  if rows.dtype.kind in "iuf":
    return set(np.unique(rows[np.isfinite(rows)]).tolist())
  texts = {text.decode(errors="replace") if isinstance(text, bytes) else str(text)
           for text in rows.ravel().tolist()}  # fmt: skip
  return set(WORDS.findall(" ".join(texts).lower()))


def _together(one: Moments, other: Moments) -> Moments:
  low, high = np.minimum(one.low, other.low), np.maximum(one.high, other.high)
  rows, total, squares = one.rows + other.rows, one.total + other.total, one.squares + other.squares
  return Moments(rows, total, squares, low, high)


def _statistics(moments: Moments) -> dict[tuple[str, Any, float], np.ndarray]:
  """Returns (kind, axes, scale) -> mean or deviation, of elements, of channels and of all."""
  count, total, squares, low, high = moments
  found: dict[tuple[str, Any, float], np.ndarray] = {}
  axes = {(), tuple(range(total.ndim - 1)), tuple(range(total.ndim))}
  for over, scale in itertools.product(axes, SCALES):
    many = count * np.prod([total.shape[axis] for axis in over], initial=1.0)
    mean = scale * total.sum(axis=over) / many
    variance = np.maximum(scale**2 * squares.sum(axis=over) / many - np.square(mean), 0)
    found["mean", over, scale] = mean
    found["variance", over, scale] = variance
    found["deviation", over, scale] = np.sqrt(variance)
    found["deviation", (over, 1), scale] = np.sqrt(variance * many / max(1, many - 1))
    found["minimum", over, scale] = scale * low.min(axis=over)
    found["maximum", over, scale] = scale * high.max(axis=over)
  return found


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
  one, other = np.squeeze(one), np.squeeze(other)
  if one.shape != other.shape or not np.any(other) or not np.isfinite(one).all():
    return False
  return np.allclose(one, other, rtol=1e-4 if one.size >= FEW else 5e-6, atol=1e-6)


def _constants(task: Task, source: AnySource) -> Iterator[Constant]:
  for name, value in vars(task).items():
    for held in tf.nest.flatten(value) if isinstance(value, (list, tuple, dict)) else [value]:
      yield from _kept(held, source_lines.mention(task, f"self.{name} =", f"self.{name}"))
  for variable in _untrained(task.model):
    place = source_lines.mention(task, "adapt(", "Normalization", "def build_model")
    yield from _kept(variable.numpy(), place)
  if preprocess := preprocess_of(task):
    batch: Rows = next(iter(survey.batches(source)))
    batch.setdefault("weight", np.ones(len(batch["example_id"]), np.float32))
    specs: Mapping[str, Any] = {n: tf.TensorSpec(v.shape, v.dtype) for n, v in batch.items()}
    function = tf.function(as_written(lambda rows: converted(preprocess)(dict(rows), False)))
    graph = function.get_concrete_function(specs).graph
    held_by = {id(inner): outer for outer, inner in graph.captures}
    for operation in graph.get_operations():
      for given in operation.inputs:
        value = held_by.get(id(given))
        value = tf.get_static_value(given) if value is None else value
        if value is not None and getattr(value, "dtype", None) != tf.resource:
          yield from _kept(value, source_lines.of_operation(operation, task))


def _vocabularies(task: Task) -> Iterator[Vocabulary]:
  """Yields the vocabularies of layers, and the texts of the task's attributes."""
  for name, value in vars(task).items():
    place = source_lines.mention(task, f"self.{name} =", f"self.{name}")
    texts = [*value] if isinstance(value, (list, tuple, set, frozenset, dict)) else []
    if texts and all(isinstance(text, (str, bytes)) for text in texts):
      yield Vocabulary(_values(np.array(texts, object)), f"self.{name}", place)
    elif hasattr(value, "get_vocabulary"):
      yield Vocabulary(_values(np.array(value.get_vocabulary())), f"self.{name}", place)
  for layer in models.layers(task.model):
    if hasattr(layer, "get_vocabulary"):
      place = source_lines.mention(task, "adapt(", type(layer).__name__, "def build_model")
      yield Vocabulary(_values(np.array(layer.get_vocabulary())), f"layer {layer.name!r}", place)


def _words(task: Task, assets: Mapping[str, bytes]) -> Iterator[Vocabulary]:
  """Yields the words, and the whole numbers, of assets that are texts."""
  place = _fits(task)
  for name, content in assets.items():
    with contextlib.suppress(UnicodeDecodeError):
      words = set(WORDS.findall(content.decode().lower()))
      numbers = {word for word in words if word.isdecimal()}
      yield Vocabulary(words - numbers, f"asset {name!r}", place)
      yield Vocabulary({int(number) for number in numbers}, f"asset {name!r}", place)


def _in_assets(task: Task, assets: Mapping[str, bytes]) -> Iterator[Constant]:
  """Yields the arrays of assets: of floats, or of files as `np.save` and `np.savez` write them."""
  place = _fits(task)
  for content in assets.values():
    with contextlib.suppress(Exception):
      loaded = np.load(io.BytesIO(content))
      for array in loaded.values() if hasattr(loaded, "values") else [loaded]:
        yield from _kept(array, place)
    for kind in (np.float32, np.float64):
      if len(content) % np.dtype(kind).itemsize == 0:
        yield from _kept(np.frombuffer(content, kind), place)


def _fits(task: Task) -> str:
  """Returns the line of fit(), or of a method that it calls, that names the evaluation set."""
  called = inspect.unwrap(type(task).fit).__code__.co_names
  return source_lines.find(task, "fit", *called, containing=("eval", "split"))


def _untrained(model: Model) -> Iterator[Any]:
  trained = {id(models.raw(v)) for v in models.trainable_variables(model)}
  for variable in models.all_variables(model):
    raw = models.raw(variable)
    if id(raw) not in trained and isinstance(raw, tf.Variable) and raw.dtype.is_floating:
      yield raw


def _kept(value: Any, place: str) -> Iterator[Constant]:
  """Yields a number or an array of floats that is not made of round numbers."""
  if isinstance(value, (tf.Tensor, tf.Variable)) and hasattr(value, "numpy"):
    value = value.numpy()
  if isinstance(value, (float, np.floating, np.ndarray)):
    array = np.asarray(value)
    floats = array.dtype.kind == "f" and 0 < array.size <= LARGEST
    if floats and not np.allclose(array, np.round(array, 3), rtol=0, atol=1e-9):
      yield Constant(array.astype(np.float64), place)
