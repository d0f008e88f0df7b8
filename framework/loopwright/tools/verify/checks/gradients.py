"""Gradients that are missing, zero, not finite or wrong: checks each call of `step.gradients`.

The step runs eagerly on one replica, after a few compiled ones, because layers that begin at zero
give others no gradient in the first step. Finite differences are taken per variable, along its
gradient plus a random part, so that they are large compared with rounding. Two step lengths show
how curved the loss is. All of it runs in float64 if the task can: policy and batch are float64, and
casts to float32 become casts to float64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.graphs import autograph, randomness
from loopwright.graphs.aliases import Gradient, Variable
from loopwright.metrics import Loss
from loopwright.models import models
from loopwright.step import Step
from loopwright.tools.verify.bench import bench, loss_graph, recorded_step, source_lines
from loopwright.tools.verify.bench.bench import Bench, Rows, Subject, under
from loopwright.tools.verify.bench.loss_graph import LossGraph
from loopwright.tools.verify.checks import moves
from loopwright.tools.verify.checks.moves import Moves
from loopwright.tools.verify.report import Group, Result

GROUP = Group("gradients")
STEPS_BEFORE = 3
MORE = 16
"""Times as many rows are in a batch of another step: a few may miss an expert of a mixture."""
MOST_VARIABLES = 12
"""At most this many variables, the largest first, are compared with finite differences."""

TOLERANCE = {"float64": 1e-3, "float32": 0.1}
"""Largest relative difference between gradient and finite difference, by precision of the loss."""
ROUNDING = {"float64": 1e-14, "float32": 1e-6, "float16": 1e-2}
"""Relative rounding error of the loss."""


@dataclasses.dataclass
class GradientNotes:
  """What all calls of `step.gradients` in one step returned."""

  norms: dict[str, float] = dataclasses.field(default_factory=dict)
  """Largest L2 norm of each variable's gradient; -1 if it has none."""
  not_finite: dict[str, str] = dataclasses.field(default_factory=dict)
  """Variables with a gradient that is not finite -> the line that makes it so."""
  cancelled: set[str] = dataclasses.field(default_factory=set)
  """Variables of which the gradients of several rows or calls add up to zero."""
  wrong: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
  """(gradient, finite difference) along the direction."""
  compared: int = 0
  precision: str = "float32"
  graphs: list[LossGraph] = dataclasses.field(default_factory=list)
  """Those of all losses."""
  ends: dict[str, str] = dataclasses.field(default_factory=dict)
  """Variables without a gradient -> the line of what passes none, if the loss uses them."""
  noisy: dict[str, str] = dataclasses.field(default_factory=dict)
  """Parts of the model that draw random numbers for the loss alone -> the line of the call."""
  places: dict[str, str] = dataclasses.field(default_factory=dict)
  """Variables -> the line that makes them, if it is the user's."""
  masks: tuple[str, str, str] | None = None
  """A layer that loses a mask, one that would have used it, and the line."""
  moves: Moves = dataclasses.field(default_factory=Moves)
  applied: set[str] = dataclasses.field(default_factory=set)
  """Variables for which `step.apply` has had a gradient that is not all zero."""
  dragged: dict[str, str] = dataclasses.field(default_factory=dict)
  """Those that an update has moved although it had only zeros for them -> the line of it."""

  @property
  def held(self) -> dict[str, str]:
    """The variables that move although no step has a gradient for them -> the line."""
    return {name: place for name, place in self.dragged.items() if name not in self.applied}

  @property
  def complete(self) -> bool:
    """Whether each variable has had a gradient, or one that is not finite."""
    return bool(self.not_finite) or (all(n > 0 for n in self.norms.values()) and not self.held)


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  rows = 4 * subject.accumulation_steps
  with recorded_step.variables_made() as made:
    here = Bench(subject, rows=rows, always=True)
    built = len(made)
    # With equal weights, losses such as |x| can have a gradient of exactly 0.
    batch = bench.weighted(subject.rows(here.task, rows))
    start = here.read()
    for _ in range(STEPS_BEFORE):
      here.step(batch)
  outside = recorded_step.outside_of_model(made, here)
  if outside and outside[-1] < built and not recorded_step.read_by_step(subject, outside, rows):
    outside = []  # made for something else, such as a larger model that this one is a part of
  values = here.read()
  seen = look(subject, here, batch, values)
  now = zip(here.names, start, values, strict=True)
  changed = {name for name, before, after in now if not np.array_equal(before, after)}
  foreign = {models.name(made[n].variable): made[n].place for n in outside}
  seen.places |= _places(here, made)
  results = _verdicts(here, seen, foreign)
  results += [moves.still(here, seen.noisy, changed), moves.follow(here, changed)]
  results += [*seen.moves.results(), *moves.masks(seen.masks)]
  if unused := loss_graph.unused(here.graph(batch), here.task):
    told = "a function with a gradient of its own is called, and nothing uses its result"
    results.append(GROUP.failed("custom gradients run", told, "gradient that never runs", unused))
  else:
    results.append(_differences(seen))
  if twice := next(filter(None, (graph.counted_twice for graph in seen.graphs)), ""):
    told = "the loss has the losses of the model's layers twice"
    results.append(GROUP.failed("penalties count once", told, "penalty counted twice", twice))
  return results


def _verdicts(here: Bench, seen: GradientNotes, foreign: dict[str, str]) -> list[Result]:
  """Returns what is wrong with some variables, with a line of the first of them."""
  places = seen.places
  owners = source_lines.method(here.task, "variables_of", "build_model")
  without = [n for n, norm in seen.norms.items() if norm < 0 and not _moves_no_slope(n, seen)]
  without.sort(key=lambda name: name not in seen.ends)  # whose line is that of an operation
  still = [n for n, norm in seen.norms.items() if norm == 0 and n not in seen.not_finite]
  count = _variables(len(seen.norms))
  note = f"; that of {moves.named(still)} cancels, as in a loss of differences" if still else ""
  verdicts = (
    ("every variable is in the model", "variable outside the model", foreign, "no other is made"),
    ("every variable has an optimizer", "variable that no optimizer updates",
     dict.fromkeys(_unowned(here), owners), count),
    ("what is frozen stays as it is", "frozen variable that moves", seen.held, count),
    ("every variable has a gradient", "variable without gradient",
     {name: seen.ends.get(name) or places.get(name, "") for name in without}, count),
    ("no gradient is zero", "zero gradient",
     {name: places.get(name, "") for name in still if name not in seen.cancelled},
     f"{count}, after {STEPS_BEFORE} steps{note}"),
    ("gradients are finite", "non-finite gradient", seen.not_finite, count),
  )  # fmt: skip
  results = []
  for name, cause, wrong, detail in verdicts:
    place = source_lines.qualified(next(iter(wrong.values()), ""), here.task)
    told = moves.named(list(wrong))
    results.append(GROUP.failed(name, told, cause, place) if wrong else GROUP.passed(name, detail))
  return results


def _moves_no_slope(name: str, seen: GradientNotes) -> bool:
  """Whether it is a bias beside a kernel with a gradient: the loss has derivatives of outputs."""
  return name.endswith("/bias") and seen.norms.get(f"{name[:-4]}kernel", 0.0) > 0


def look(
  subject: Subject, compiled: Bench, batch: Rows, values: Sequence[np.ndarray]
) -> GradientNotes:
  """Runs one step eagerly from some values, or several; returns notes on its gradients."""
  rows = len(batch["weight"])
  more = functools.cache(lambda: bench.weighted(subject.rows(compiled.task, MORE * rows)))

  def step(batch: Rows, precision: str, numbers: Sequence[int], *, alone: bool) -> GradientNotes:
    seen = GradientNotes(precision=precision)
    with recorded_step.variables_made() as made:
      here = Bench(subject, rows=rows, eager=True)
    seen.places = _places(here, made)
    for number in (0, *numbers):
      here.assign(values)
      here.trainer.global_step.assign(number)
      looking = type("Of", (_Looking,), {"seen": seen, "task": here.task, "alone": alone})
      here.trainer.use(step=looking)
      here.step(more() if number else batch)
      if seen.complete:
        break
      alone = False
    return seen

  exact, alone = GradientNotes(), subject.accumulation_steps == 1
  with contextlib.suppress(Exception), in_float64():  # not every task can
    wide = {n: v.astype(np.float64) if v.dtype.kind == "f" else v for n, v in batch.items()}
    exact = step(wide, "float64", (), alone=True) if alone else exact
  seen = step(batch, "float32", bench.OTHER_STEPS, alone=alone and not exact.compared)
  if exact.compared:
    seen.wrong, seen.compared, seen.precision = exact.wrong, exact.compared, "float64"
  return seen


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
  """Makes models that are built inside of the context, and casts to float32, use float64."""
  cast = tf.cast

  def wide(x: Any, dtype: Any, name: str | None = None) -> Any:
    narrow = tf.as_dtype(dtype) in (tf.float32, tf.float16, tf.bfloat16)
    return cast(x, tf.float64 if narrow else dtype, name)

  with under("float64"), mock.patch.object(tf, "cast", wide):
    yield


class _Looking(Step):
  """Notes what `gradients` returns and what `apply` and `assign` do, in classes made of it.

  Attributes:
    seen: the notes.
    task: whose methods are named.
    alone: whether gradients are compared with finite differences.
  """

  seen: GradientNotes
  task: Any
  alone: bool

  def gradients(
    self, loss_fn: Any, batch: Any, variables: Sequence[Variable], *, when: Any = None
  ) -> Any:
    seen = self.seen
    seen.moves.sometimes |= when is not None  # but look at the update as if it were due
    try:
      gradients, loss = super().gradients(loss_fn, batch, variables)
    except ConfigError as error:
      if "depends on none" not in str(error):
        raise
      for variable in variables:  # the other branch of a tf.cond, perhaps
        seen.norms.setdefault(models.name(variable), -1.0)
      zeros = [tf.zeros_like(models.raw(variable)) for variable in variables]
      return zeros, Loss(tf.constant(0.0), tf.constant(0.0))
    _note(seen, gradients, variables)
    with self.record.collected():  # tensors of the graph among them
      graph = LossGraph(loss_fn, batch, self.task)
    if self.alone and (seen.precision != "float64" or graph.is_exact):
      self._compare(loss_fn, batch, gradients, variables)
    if seen.precision != "float64":
      self._look_into(graph, loss_fn, batch, gradients, variables)
    return gradients, loss

  def _compare(
    self, loss_fn: Any, batch: Any, gradients: Sequence[Gradient], variables: Sequence[Variable]
  ) -> None:
    """Compares the gradients with finite differences, those of the largest variables."""

    def total() -> tf.Tensor:
      with self.record.collected(), randomness.random_streams(tf.constant([3, 5])):
        return Loss.checked(loss_fn(batch)).total

    factor = 1.0 if self.scaling.factor is None else float(self.scaling.factor)
    given = zip(gradients, variables, strict=True)
    pairs = [(np.asarray(g, np.float64) / factor, v) for g, v in given if g is not None]
    pairs = [(told, v) for told, v in pairs if np.isfinite(told).all() and told.any()]
    pairs.sort(key=lambda pair: -pair[0].size)
    rng, compiled = np.random.default_rng(0), autograph.compiled(total)
    for told, variable in pairs[:MOST_VARIABLES]:
      compared = compare(compiled, told, variable, rng, self.seen.precision)
      self.seen.compared += compared is not None
      if compared is not None and compared[0] != compared[1]:
        self.seen.wrong[models.name(variable)] = compared

  def _look_into(
    self, graph: LossGraph, loss_fn: Any, batch: Any, gradients: Sequence[Gradient],
    variables: Sequence[Variable],
  ) -> None:  # fmt: skip
    """Notes what the loss's graph says."""
    seen = self.seen
    seen.graphs.append(graph)
    seen.noisy |= graph.noisy(_trained(self))
    without = [v for g, v in zip(gradients, variables, strict=True) if g is None]
    seen.ends |= {models.name(v): end for v in without if (end := graph.end(v))}
    with (
      contextlib.suppress(Exception),
      self.record.collected(),
    ):  # not every loss can be traced in another way
      if still := [v for v in variables if seen.norms.get(models.name(v)) == 0]:
        found = loss_graph.cancels(loss_fn, batch, still)
        seen.cancelled |= {models.name(v) for v, yes in zip(still, found, strict=True) if yes}
    with contextlib.suppress(Exception), self.record.collected():
      if seen.not_finite and not any(seen.not_finite.values()):
        place = loss_graph.not_finite(loss_fn, batch, self.task)
        seen.not_finite = dict.fromkeys(seen.not_finite, place)
    with contextlib.suppress(Exception), self.record.collected():
      if graph.loses_masks and seen.masks is None:
        seen.masks = loss_graph.lost_masks(loss_fn, batch, self.task)

  def gradients_of(self, tape: tf.GradientTape, loss: Loss, variables: Sequence[Variable]) -> Any:
    gradients = super().gradients_of(tape, loss, variables)
    _note(self.seen, gradients, variables)
    return gradients

  def apply(
    self, gradients: Sequence[Gradient], finite: tf.Tensor, optimizer: str = "default"
  ) -> None:
    pairs = [*zip(self.variables(optimizer), gradients, strict=True)]
    first = not int(self.number)
    if finite and first:
      self.seen.moves.update(optimizer, pairs)
    given = [(models.name(v), models.raw(v), g) for v, g in pairs if g is not None]
    some = {name for name, _, gradient in given if np.any(tf.convert_to_tensor(gradient))}
    before = {name: np.array(variable) for name, variable, _ in given}
    super().apply(gradients, finite, optimizer)
    self.seen.applied |= some
    for name, variable, _ in given if first else ():
      had_one = name in some or not self.seen.norms.get(name, 0) > 0
      if not had_one and np.any(before[name] != np.array(variable)):
        self.seen.dragged[name] = self._line()

  def assign(self, variable: Variable, value: Any, *, when: Any = None) -> None:
    if when is None and not int(self.number):
      self.seen.moves.assign(variable, value, _trained(self), self._line())
    super().assign(variable, value, when=when)

  def _line(self) -> str:
    return source_lines.of_frames(source_lines.frames(but=__file__), self.task)


def _trained(step: Step) -> list[Variable]:
  return [v for one in step.parts.optimizers.values() for v in one.variables]


def _note(
  seen: GradientNotes, gradients: Sequence[Gradient], variables: Sequence[Variable]
) -> None:
  for gradient, variable in zip(gradients, variables, strict=True):
    name = models.name(variable)
    norm = -1.0 if gradient is None else float(tf.norm(tf.cast(gradient, tf.float32)))
    if not np.isfinite(norm):
      seen.not_finite[name], norm = "", 0.0
    seen.norms[name] = max(norm, seen.norms.get(name, -1.0))


def _places(here: Bench, made: Sequence[recorded_step.Made]) -> dict[str, str]:
  """Returns the name of each variable -> the line that makes it, if it is the user's."""
  lines = {id(each.variable): each.place for each in made}
  copies = [here.strategy.experimental_local_results(variable)[0] for variable in here.variables]
  both = zip(here.names, here.variables, copies, strict=True)
  found = {name: lines.get(id(v)) or lines.get(id(copy)) for name, v, copy in both}
  return {name: place for name, place in found.items() if place}


def _unowned(here: Bench) -> list[str]:
  """Returns the trainable variables that no optimizer updates and no `step.assign` sets."""
  owned = moves.owned_ids(here) | {id(variable) for variable in here.trainer.assigned.values()}
  trainable = models.trainable_variables(here.task.model)
  return [models.name(v) for v in trainable if id(models.raw(v)) not in owned]


def _differences(seen: GradientNotes) -> Result:
  name = "finite differences"
  if not seen.compared:
    why = "the loss changes too little, or not smoothly enough, to measure"
    return GROUP.skipped(name, why)
  if not seen.wrong:
    within = f"{TOLERANCE[seen.precision]:.1%} in {seen.precision}".replace(".0%", "%")
    return GROUP.passed(name, f"agree within {within} in {_variables(seen.compared)}")
  variable, (gradient, true) = next(iter(seen.wrong.items()))
  places = [[graph.replaced(on_purpose=meant) for graph in seen.graphs] for meant in (True, False)]
  meant, replaced = (next(filter(None, each), "") for each in places)
  if meant or any(graph.stops for graph in seen.graphs):
    how = f"replaces a gradient ({meant})" if meant else "stops gradients"
    return GROUP.skipped(name, f"{variable} differs, and the loss {how} on purpose")
  told = f"along one direction in {variable} the gradient is {gradient:.4g}, not {true:.4g}"
  return GROUP.failed(name, told, "wrong gradient", replaced)


def compare(
  total: Callable[[], tf.Tensor], gradient: np.ndarray, variable: Variable,
  rng: np.random.Generator, precision: str,
) -> tuple[float, float] | None:  # fmt: skip
  """Returns (gradient, difference) along a direction; two equal numbers if they agree.

  None if the loss changes too little, or is too curved, to tell.
  """
  raw = models.raw(variable)
  start = raw.numpy()
  random = rng.normal(size=gradient.shape)
  direction = gradient / np.linalg.norm(gradient) + 0.5 * random / np.linalg.norm(random)
  told = float((gradient * direction).sum())
  here = float(total())
  precise = ROUNDING["float16" if raw.dtype.size < 4 else precision]
  moves = 1e-5 if precision == "float64" else 3e-3  # relative change of the loss
  length = moves * (abs(here) + 1e-3) / abs(told)
  length = min(length, 0.05 * (np.linalg.norm(start) + 0.1))

  def slope(length: float) -> float:
    ends = []
    for sign in (1, -1):
      raw.assign((start + sign * length * direction).astype(start.dtype))
      ends.append(float(total()))
    return (ends[0] - ends[1]) / (2 * length)

  try:
    coarse, fine = slope(length), slope(length / 2)
  finally:
    raw.assign(start)
  rounding = 8 * precise * abs(here) / length
  bent = abs(coarse - fine)
  if not np.isfinite(fine) or rounding + bent > 0.5 * max(abs(fine), abs(told)):
    return None
  allowed = TOLERANCE[precision] * max(abs(fine), abs(told)) + rounding + 2 * bent
  agrees = abs(fine - told) <= allowed
  return (told, told) if agrees else (told, fine)


def _variables(count: int) -> str:
  return f"{count} variable" if count == 1 else f"{count} variables"
