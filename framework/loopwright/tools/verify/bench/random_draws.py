"""Which random numbers some code draws while it is traced, and where."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

from loopwright.errors import is_the_frameworks
from loopwright.tools.verify.bench import recorded_step, source_lines

_RANDOM = re.compile(
  r"Random|Multinomial|TruncatedNormal|SampleDistortedBoundingBox|RngReadAndSkip"
  r"|Stateful(Uniform|StandardNormal|Truncated|Binomial)"
)
_NONE = re.compile(r"RandomIndexShuffle|Dataset|Generate|GetKey|GetAlg|GetCounter")
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_MADE = re.compile(r"^<|__autograph_generated_file")
_KERAS = re.compile(r"/(tf_)?keras/src/")


STATEFUL = "stateful random op"
"""The cause of numbers that do not follow the run's seed."""
FROZEN = "np.random while tracing"
FIXED = "a fixed seed"
CHANGING = {
  "Timestamp": "clock", "PyFunc": "python", "PyFuncStateless": "python", "EagerPyFunc": "python",
}  # fmt: skip
"""Types of operations, other than random ones, that may differ each time that a graph runs."""


def changing(operations: Iterable[tf.Operation], owner: Any) -> dict[str, str]:
  """Returns what may differ each time that operations run -> the first line of the user's."""
  found: dict[str, str] = {}
  for operation in operations:
    kind = "random" if is_stateful(operation.type) else CHANGING.get(operation.type, "")
    if kind and kind not in found and (line := source_lines.of_operation(operation, owner)):
      found[kind] = line
  return {kind: found[kind] for kind in ("random", "clock", "python") if kind in found}


def is_generator(variable: str) -> bool:
  """Whether a variable of this name is the state of a random layer of Keras 3."""
  return "seed_generator_state" in variable


def is_random(operation: str) -> bool:
  """Whether an operation of this type draws random numbers."""
  return bool(_RANDOM.search(operation) and not _NONE.search(operation))


def is_stateful(operation: str) -> bool:
  """Whether an operation of this type draws numbers that depend on how often it has run."""
  return is_random(operation) and not operation.startswith("Stateless")


def outside(task: Any) -> tuple[str, str]:
  """Returns (cause, place) for layers that draw from their own generator in a step."""
  if place := source_lines.mention(task, "recompute_grad"):
    return "other dropout in the backward pass", place
  place = source_lines.mention(task, "custom_gradient", "tf.function", "def forward")
  return "random layer outside the step", place


@dataclasses.dataclass(frozen=True)
class Draw:
  """One random op, and the line of the user's code behind it.

  Attributes:
    op: its type, such as "StatelessRandomUniformV2".
    shape: of its output, as far as known.
    fixed: whether its seed is a constant.
    by_keras: whether Keras made it, for a layer.
    place: "file.py:31, in Mine.loss", if the owner has a method of this name.
  """

  op: str
  shape: tuple[int | None, ...]
  fixed: bool
  by_keras: bool
  place: str

  @property
  def stateful(self) -> bool:
    """Whether it has its own state, independent of the run's seed."""
    return is_stateful(self.op)


@dataclasses.dataclass
class Watched:
  """The random numbers drawn inside a `watch`.

  Attributes:
    draws: random ops of the user and of Keras's layers.
    in_python: whether Python's or NumPy's generators were used; a graph keeps such numbers as
      constants.
  """

  draws: list[Draw] = dataclasses.field(default_factory=list)
  in_python: bool = False

  @property
  def stateful(self) -> list[Draw]:
    """Draws with their own state."""
    return [draw for draw in self.draws if draw.stateful]

  @property
  def all_fixed(self) -> bool:
    """Whether everything is drawn from constant seeds."""
    return not self.in_python and all(draw.fixed for draw in self.draws)

  def fixed(self, rows: int) -> list[Draw]:
    """Draws with one number (or more) for each of `rows` rows, from a constant seed."""
    return [draw for draw in self.draws if draw.fixed and draw.shape[:1] == (rows,)]


@contextlib.contextmanager
def watch(owner: Any) -> Iterator[Watched]:
  """Watches what is traced inside the context, in all threads (host).

  Args:
    owner: its NumPy and Python generators are watched too, with the global ones.
  """
  watched, before = Watched(), _states(owner)
  default_rng = np.random.default_rng

  def unseeded(*args: Any, **options: Any) -> np.random.Generator:
    watched.in_python |= not args and not options
    return default_rng(*args, **options)

  with (
    recorded_step.traced(is_random) as seen,
    mock.patch.object(np.random, "default_rng", unseeded),
  ):
    yield watched
  watched.draws = [draw for operation in seen for draw in _draw(operation, owner)]
  watched.in_python |= _states(owner) != before


def place(owner: Any, found: list[Draw], methods: Sequence[str], words: Sequence[str]) -> str:
  """Returns the line of the first draw, or if there is none, one with some words."""
  return found[0].place if found else source_lines.find(owner, *methods, containing=words)


def listed(found: list[Draw]) -> str:
  """Returns the types of the operations in brackets, or ""."""
  return f" ({', '.join(dict.fromkeys(draw.op for draw in found))})" if found else ""


def _draw(op: tf.Operation, owner: Any) -> list[Draw]:
  frames = [f for f in op.traceback if f.filename != __file__]
  own = [f for f in frames if not _is_foreign(f.filename, f.name)]
  keras = any(_KERAS.search(f.filename) for f in frames)
  if not own or (is_the_frameworks(own[-1].filename) and not keras):
    return []  # a layer counts even if the framework calls it, as the task of from_keras does
  seeds = list(op.inputs)[1:3] if op.type.startswith("Stateless") else []
  fixed = bool(seeds) and all(map(_is_constant, seeds))
  shape = tuple(op.outputs[0].shape) if op.outputs and op.outputs[0].shape.rank else ()
  name = getattr(getattr(owner, own[-1].name, None), "__qualname__", own[-1].name)
  place = f"{Path(own[-1].filename).name}:{own[-1].lineno}, in {name}"
  return [Draw(op.type, shape, fixed, keras, place)]


def _is_foreign(file: str, function: str) -> bool:
  """Whether a frame belongs to a library, to generated code, or to a patched random op."""
  patched = is_the_frameworks(file) and function == "patched"
  return patched or file.startswith(_LIBRARIES) or bool(_MADE.search(file))


def _is_constant(tensor: tf.Tensor) -> bool:
  inputs = tensor.op.inputs
  return all(map(_is_constant, inputs)) if inputs else tensor.op.type == "Const"


def _states(owner: Any) -> list[bytes]:
  states: list[Any] = [np.random.get_state(), random.getstate()]
  for held in vars(owner).values():
    if isinstance(held, np.random.Generator):
      states.append(held.bit_generator.state)
    elif isinstance(held, np.random.RandomState):
      states.append(held.get_state())
    elif isinstance(held, random.Random):
      states.append(held.getstate())
  return [pickle.dumps(state) for state in states]
