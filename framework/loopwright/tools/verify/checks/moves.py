"""Part of the group "gradients": what moves a variable more than once in a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.graphs.aliases import Gradient, Variable
from loopwright.models import models
from loopwright.tools.verify.bench import layer_calls, loss_graph, source_lines
from loopwright.tools.verify.bench.bench import Bench
from loopwright.tools.verify.report import Group, Result

GROUP = Group("gradients")


class Moves:
  """What one step moves, and by what.

  Attributes:
    sometimes: whether an update is made in some steps only.
  """

  def __init__(self) -> None:
    self.sometimes = False
    self._by: dict[str, list[str]] = {}
    self._follows: dict[str, dict[str, str]] = {}

  def update(self, optimizer: str, pairs: Sequence[tuple[Variable, Gradient]]) -> None:
    """Notes the variables for which an optimizer gets a gradient that is not all zero (host)."""
    for variable, gradient in pairs:
      if gradient is not None and np.any(tf.convert_to_tensor(gradient)):
        owners = self._by.setdefault(models.name(variable), [])
        owners += [optimizer] if optimizer not in owners else []

  def assign(self, variable: Variable, value: Any, trained: Sequence[Variable], place: str) -> None:
    """Notes which trained variables a value goes a part of the way to (host)."""
    before, after = np.array(models.raw(variable)), np.array(value)
    for other in trained:
      if averages(before, after, np.array(models.raw(other))):
        self._follows.setdefault(models.name(variable), {})[models.name(other)] = place

  def results(self) -> Iterator[Result]:
    """Yields what is wrong; what a step moves only sometimes is not judged."""
    if self.sometimes:
      return
    for name, owners in self._by.items():
      if len(owners) > 1:
        told = f"{name} has a gradient in each step of {' and of '.join(map(repr, owners))}"
        yield GROUP.failed(
          "one optimizer moves a variable", told, "variable that two optimizers move"
        )
        break
    for slow, fast in ((s, f) for s, others in self._follows.items() for f in others):
      mutual = slow in self._follows.get(fast, {})
      if slow in self._by and fast in self._by and not mutual:
        told = f"{slow} follows {fast}, and an optimizer moves it too, by the gradient of a loss"
        place = self._follows[slow][fast]
        yield GROUP.failed("averages are not trained", told, "average that is trained too", place)
        break


def averages(before: np.ndarray, after: np.ndarray, weights: np.ndarray) -> bool:
  """Whether a variable has moved a part of the way to some weights, the same for each element."""
  if before.shape != weights.shape or before.dtype.kind != "f" or np.array_equal(before, after):
    return False
  way, moved = (each.astype(np.float64).ravel() - before.ravel() for each in (weights, after))
  part = float(way @ moved / (way @ way or 1.0))
  rest = np.linalg.norm(moved - part * way)
  return 0 < part < 0.999 and way.size > 1 and bool(rest < 0.01 * np.linalg.norm(moved))


def still(here: Bench, noisy: Mapping[str, str], changed: Set[str]) -> Result:
  """Checks that what never changes, such as a teacher, is not called as in training."""
  name = "what is never trained draws nothing"
  for part, model in loss_graph.parts_by_name(here.task.model):
    weights = {models.name(v) for v in models.weights(model)}
    layers = layer_calls.random_layers(model, frozen=True)
    if part in noisy and weights and layers and not weights & changed:
      return GROUP.failed(
        name, f"no step changes {part}, but its {', '.join(layers)} draws for each loss",
        cause="training mode of what is never trained", place=noisy[part],
      )  # fmt: skip
  return GROUP.passed(name, "no part of the model that stays as it is draws for the loss")


def follow(here: Bench, changed: Set[str]) -> Result:
  """Checks that what follows another network follows all of it."""
  name, owned = "averages follow all of a network", owned_ids(here)
  parts = [[v for v in models.weights(p) if models.raw(v).dtype.is_floating]
           for _, p in loss_graph.parts_by_name(here.task.model)]  # fmt: skip
  for slow, fast in itertools.permutations(parts, 2):
    pairs = [*zip(slow, fast, strict=False)]
    alike = len(slow) == len(fast) and all(one.shape == other.shape for one, other in pairs)
    moves = [tuple(models.name(v) in changed for v in pair) for pair in pairs]
    if not alike or (True, True) not in moves or any(id(models.raw(v)) in owned for v in slow):
      continue
    lost = [move == (False, True) for move in moves]
    left = [models.name(one) for one, is_lost in zip(slow, lost, strict=True) if is_lost]
    if left:
      told = f"{named(left)} stays as it is, but a step sets the others"
      place = source_lines.method(here.task, "train_step")
      return GROUP.failed(name, told, "average that leaves out variables", place)
  return GROUP.passed(name, "no network follows a part of another")


def masks(lost: tuple[str, str, str] | None) -> list[Result]:
  """Returns that a layer loses a mask which a later one would have used; nothing if none does."""
  if lost is None:
    return []
  first, later, place = lost
  told = f"{first} gets a mask and passes none on; {later} gives another result with it"
  return [GROUP.failed("masks reach the layers that use them", told, "a mask that is lost", place)]


def owned_ids(here: Bench) -> set[int]:
  """Returns the ids of the variables that an optimizer updates."""
  optimizers = here.trainer.parts.optimizers.values()
  return {id(models.raw(v)) for optimizer in optimizers for v in optimizer.variables}


def named(names: Sequence[str]) -> str:
  """Returns the first names, and how many more there are."""
  more = f" and {len(names) - 3} more" if len(names) > 3 else ""
  return f"{', '.join(names[:3])}{more}"
