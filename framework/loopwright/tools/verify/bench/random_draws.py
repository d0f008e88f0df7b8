"""Which random numbers some code draws while it is traced, and where."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator
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
OUTSIDE = "random layer outside the step"
CHANGING = {
  "Timestamp": "clock", "PyFunc": "python", "PyFuncStateless": "python", "EagerPyFunc": "python",
}  # fmt: skip
"""Types of operations, other than random ones, that may differ each time that a graph runs."""
CAUSES = {"random": STATEFUL, "clock": "a loss by the clock", "python": "Python in the step"}


def changing(operations: Iterable[tf.Operation], owner: Any) -> dict[str, str]:
  """Returns causes why operations may differ when they run again -> the first line of each."""
  found: dict[str, str] = {}
  for operation in operations:
    kind = "random" if is_stateful(operation.type) else CHANGING.get(operation.type, "")
    if kind and kind not in found and (line := source_lines.of_operation(operation, owner)):
      found[kind] = line
  return {cause: found[kind] for kind, cause in CAUSES.items() if kind in found}


def is_generator(variable: str) -> bool:
  """Whether a variable of this name is the state of a random layer of Keras 3."""
  return "seed_generator_state" in variable


def is_random(operation: str) -> bool:
  """Whether an operation of this type draws random numbers."""
  return bool(_RANDOM.search(operation) and not _NONE.search(operation))


def is_stateful(operation: str) -> bool:
  """Whether an operation of this type draws numbers that depend on how often it has run."""
  return is_random(operation) and not operation.startswith("Stateless")


def outside(operations: Iterable[tf.Operation], task: Any) -> tuple[str, str]:
  """Returns (cause, place) for layers that draw from their own generator in a traced step."""
  for operation in operations:
    files = [frame.filename for frame in operation.traceback or ()]
    if any(file.endswith("random/seed_generator.py") for file in files):
      again = any(file.endswith("ops/custom_gradient.py") for file in files)
      if place := source_lines.near(operation, task):
        return "other dropout in the backward pass" if again else OUTSIDE, place
  return OUTSIDE, ""


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


@dataclasses.dataclass
class Watched:
  """The random numbers drawn inside a `watch`.

  Attributes:
    draws: random ops of the user and of Keras's layers.
    in_python: whether Python's or NumPy's generators were used; a graph keeps such numbers as
      constants.
    python_place: the line that used one, or that of the first operation after it.
  """

  draws: list[Draw] = dataclasses.field(default_factory=list)
  in_python: bool = False
  python_place: str = ""

  @property
  def stateful(self) -> list[Draw]:
    """Draws with their own state."""
    return [draw for draw in self.draws if is_stateful(draw.op)]

  @property
  def own(self) -> list[Draw]:
    """Draws that no layer of Keras makes."""
    return [draw for draw in self.draws if not draw.by_keras]

  @property
  def all_fixed(self) -> bool:
    """Whether everything is drawn from constant seeds."""
    return not self.in_python and all(draw.fixed for draw in self.draws)

  def fixed(self, rows: int) -> list[Draw]:
    """Draws with one number (or more) for each of `rows` rows, from a constant seed."""
    return [draw for draw in self.draws if draw.fixed and draw.shape[:1] == (rows,)]


@contextlib.contextmanager
def watch(owner: Any) -> Iterator[Watched]:
  """Watches what is traced inside, in all threads, and the Python generators of an owner (host)."""
  watched, states = Watched(), [_states(owner)]
  default_rng = np.random.default_rng

  def unseeded(*args: Any, **options: Any) -> np.random.Generator:
    if not args and not options:
      watched.in_python = True
      watched.python_place = source_lines.of_frames(source_lines.frames(but=__file__), owner)
    return default_rng(*args, **options)

  def wanted(kind: str) -> bool:
    """Whether it is random, or the first operation after a draw in Python."""
    states.append(_states(owner))
    return states[-1] != states.pop(0) or is_random(kind)

  before = states[0]
  with recorded_step.traced(wanted) as seen, mock.patch.object(np.random, "default_rng", unseeded):
    yield watched
  watched.draws = [draw for op in seen if is_random(op.type) for draw in _draw(op, owner)]
  watched.in_python |= _states(owner) != before
  after = (source_lines.of_operation(op, owner) for op in seen if not is_random(op.type))
  watched.python_place = watched.python_place or next(filter(None, after), "")


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


def _states(owner: Any) -> list[str]:
  """Returns what changes with each number that is drawn in Python."""
  _, python, _ = random.getstate()
  _, keys, position, *_ = np.random.get_state()
  states = [f"{python[0]} {python[-1]} {keys[0]} {position}"]
  for held in vars(owner).values():
    if isinstance(held, np.random.Generator):
      states.append(repr(held.bit_generator.state))
    elif isinstance(held, np.random.RandomState):
      states.append(repr(held.get_state()))
    elif isinstance(held, random.Random):
      states.append(repr(held.getstate()))
  return states
