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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from loopwright.tools.verify.bench import (
  bench,
  loss_graph,
  recorded_step,
  source_lines,
)
from loopwright.tools.verify.bench.bench import Bench, Rows, Subject, under
from loopwright.tools.verify.bench.finite_differences import TOLERANCE, compare
from loopwright.tools.verify.bench.loss_graph import Calls, LossGraph
from loopwright.tools.verify.checks import moves
from loopwright.tools.verify.checks.moves import Moves
from loopwright.tools.verify.report import Explanation, Group, Result

GROUP = Group("gradients")
STEPS_BEFORE = 3
MORE = 16
"""Times as many rows are in a batch of another step: a few may miss an expert of a mixture."""
MOST_VARIABLES = 12
"""At most this many variables, the largest first, are compared with finite differences."""
METHODS = ("loss", "forward", "train_step", "build_model")
NOT_OWNED = Explanation("variable that no optimizer updates")
HELD = Explanation(
  "frozen variable that moves",
  ("zeros_like", "tf.zeros(", "* 0.0", "0.0 *", "* 0", "mask", "apply("),
)
MISSING = Explanation(
  "variable without gradient", ("argmax", "round", "numpy", "stop_gradient", "tf.cast")
)
ZERO = Explanation("zero gradient", ("relu", "clip_by_value", "* 0", "maximum", "minimum", "round"))
NOT_FINITE = Explanation("non-finite gradient", ("tf.math.log", "tf.sqrt", "tf.norm", "/ ", "log("))
WRONG = Explanation("wrong gradient", ("custom_gradient", "py_function"))


@dataclasses.dataclass
class GradientNotes:
  """What all calls of `step.gradients` in one step returned."""

  norms: dict[str, float] = dataclasses.field(default_factory=dict)
  """Largest L2 norm of each variable's gradient; -1 if it has none."""
  not_finite: set[str] = dataclasses.field(default_factory=set)
  cancelled: set[str] = dataclasses.field(default_factory=set)
  """Variables of which the gradients of several rows or calls add up to zero."""
  sparse: dict[str, int] = dataclasses.field(default_factory=dict)
  """Bytes of the dense gradient that each sparse one becomes."""
  wrong: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
  """(gradient, finite difference) along the direction."""
  compared: int = 0
  precision: str = "float32"
  stops: bool = False
  on_purpose: str = ""
  """The first line with a custom gradient that is meant to differ from the function's."""
  replaced: str = ""
  """The first line with any other custom gradient."""
  outside: dict[str, str] = dataclasses.field(default_factory=dict)
  """Trainable variables that the step reads and the model does not have -> the line."""
  applied: set[str] = dataclasses.field(default_factory=set)
  """Variables for which `step.apply` has had a gradient that is not all zero."""
  dragged: list[str] = dataclasses.field(default_factory=list)
  """Those that an update has moved although it had only zeros for them, in place of a gradient."""
  noisy: dict[str, str] = dataclasses.field(default_factory=dict)
  """Parts of the model that draw random numbers for the loss alone -> the line of the call."""
  ends: dict[str, str] = dataclasses.field(default_factory=dict)
  """Variables without a gradient -> the line of what passes none, if the loss uses them."""
  twice: str = ""
  """The line that adds penalties of layers, which are also added by `Task.regularization`."""
  moves: Moves = dataclasses.field(default_factory=Moves)
  masks: tuple[str, str, str] | None = None
  """A layer that loses a mask, one that would have used it, and the line."""
  unused: str = ""
  """The first line with a custom gradient whose result is thrown away."""
  changed: set[str] = dataclasses.field(default_factory=set)
  """Variables that the first steps have changed."""
  calls: dict[str, dict[str, Calls]] = dataclasses.field(default_factory=dict)
  """Optimizer -> part of the model -> how the optimizer's loss uses it."""

  @property
  def complete(self) -> bool:
    """Whether each variable has had a gradient, or one that is not finite."""
    return bool(self.not_finite) or (all(n > 0 for n in self.norms.values()) and not self.held)

  @property
  def held(self) -> list[str]:
    """The variables that move although no step has a gradient for them."""
    return [name for name in self.dragged if name not in self.applied]


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  seen, here = look(subject)
  task = here.task
  missing = [name for name, norm in seen.norms.items() if norm < 0]
  still = [n for n, norm in seen.norms.items() if norm == 0 and n not in seen.not_finite]
  zero = [name for name in still if name not in seen.cancelled]
  count = _variables(len(seen.norms))
  note = f"; that of {moves.named(still)} cancels, as in a loss of differences" if still else ""
  end = next((seen.ends[name] for name in missing if name in seen.ends), "")
  results = [
    _in_model(task, seen.outside),
    _owned(here),
    _frozen(task, seen.held, count),
    _verdict(task, "every variable has a gradient", missing, count, MISSING, end),
    _verdict(task, "no gradient is zero", zero, f"{count}, after {STEPS_BEFORE} steps{note}", ZERO),
    _verdict(task, "gradients are finite", sorted(seen.not_finite), count, NOT_FINITE),
    moves.still(here, seen.noisy, seen.changed),
    moves.follow(here, seen.changed),
    *seen.moves.results(),
    *moves.masks(seen.masks),
    _differences(task, seen),
  ]
  if seen.twice:
    told = "the loss has the losses of the model's layers twice"
    results.append(GROUP.failed("penalties count once", told, "penalty counted twice", seen.twice))
  results += _calls(seen)
  if seen.sparse:
    most = max(seen.sparse, key=lambda name: seen.sparse[name])
    detail = f"{sum(seen.sparse.values()):,} bytes made dense and reduced each step; largest {most}"
    results.append(GROUP.passed("sparse gradients", detail))
  return results


def look(subject: Subject) -> tuple[GradientNotes, Bench]:
  """Runs one step eagerly; returns notes on its gradients, and the bench of the steps before it."""
  rows = 4 * subject.accumulation_steps
  with recorded_step.variables_made() as made:
    compiled = Bench(subject, rows=rows, always=True)
    built = len(made)
    # With equal weights, losses such as |x| can have a gradient of exactly 0.
    batch = bench.weighted(subject.rows(compiled.task, rows))
    start = compiled.read()
    for _ in range(STEPS_BEFORE):
      compiled.step(batch)
  outside = recorded_step.outside_of_model(made, compiled)
  if outside and outside[-1] < built and not recorded_step.read_by_step(subject, outside, rows):
    outside = []  # made for something else, such as a larger model that this one is a part of
  values = compiled.read()
  more = functools.cache(lambda: bench.weighted(subject.rows(compiled.task, MORE * rows)))

  def step(
    seen: GradientNotes, batch: Rows, differences: str | None, others: Sequence[int] = ()
  ) -> None:
    here = Bench(subject, rows=rows, eager=True)
    for number in (0, *others):
      here.assign(values)
      here.trainer.global_step.assign(number)
      here.trainer.use(step=_looking(seen, here.task, differences))
      here.step(more() if number else batch)
      if seen.complete:
        break
      differences = None

  exact = GradientNotes()
  with contextlib.suppress(Exception), in_float64():  # not every task can
    step(exact, {name: _widened(value) for name, value in batch.items()}, "float64")
  seen = GradientNotes()
  step(seen, batch, None if exact.compared else "float32", bench.OTHER_STEPS)
  if exact.compared:
    found = {name: getattr(exact, name) for name in ("wrong", "compared", "precision")}
    seen = dataclasses.replace(seen, **found)
  seen.outside = {models.name(made[number].variable): made[number].place for number in outside}
  seen.unused = loss_graph.unused(compiled.graph(batch), compiled.task)
  now = zip(compiled.names, start, values, strict=True)
  seen.changed = {name for name, before, after in now if not np.array_equal(before, after)}
  return seen, compiled


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
  """Makes models that are built inside of the context, and casts to float32, use float64."""
  cast = tf.cast

  def wide(x: Any, dtype: Any, name: str | None = None) -> Any:
    narrow = tf.as_dtype(dtype) in (tf.float32, tf.float16, tf.bfloat16)
    return cast(x, tf.float64 if narrow else dtype, name)

  with under("float64"), mock.patch.object(tf, "cast", wide):
    yield


def _widened(value: np.ndarray) -> np.ndarray:
  return value.astype(np.float64) if np.issubdtype(value.dtype, np.floating) else value


def _looking(seen: GradientNotes, task: Any, differences: str | None) -> type[Step]:
  class Looking(Step):
    def gradients(
      self, loss_fn: Any, batch: Any, variables: Sequence[Variable], *, when: Any = None
    ) -> Any:
      seen.moves.sometimes |= when is not None  # but look at the update as if it were due
      try:
        gradients, loss = super().gradients(loss_fn, batch, variables)
      except ConfigError as error:
        if "depends on none" not in str(error):
          raise
        return _zeros(seen, variables)  # the other branch of a tf.cond, perhaps
      factor = 1.0 if self.scaling.factor is None else float(self.scaling.factor)

      def total() -> tf.Tensor:
        with self.record.collected(), randomness.random_streams(tf.constant([3, 5])):
          return Loss.checked(loss_fn(batch)).total

      with self.record.collected():  # tensors of the graph among them
        graph = LossGraph(loss_fn, batch)
      _note(seen, list(gradients), variables)
      still = [v for v in variables if seen.norms[models.name(v)] == 0]
      with contextlib.suppress(Exception), self.record.collected():  # not every loss is traced
        found = loss_graph.cancels(loss_fn, batch, still) if still else []
        seen.cancelled.update(models.name(v) for v, yes in zip(still, found, strict=True) if yes)
      _note_sparse(seen, total, variables)
      alone = differences is not None and self.parts.accumulation_steps == 1
      if alone and (differences != "float64" or graph.is_exact):
        seen.precision = str(differences)
        _note_differences(seen, autograph.compiled(total), list(gradients), variables, factor)
      _note_graph(seen, graph, task, _trained(self))
      without = [v for g, v in zip(gradients, variables, strict=True) if g is None]
      seen.ends |= {models.name(v): end for v in without if (end := graph.end(v, task))}
      seen.calls.setdefault(_owner(self, variables), graph.calls(task.model))
      with contextlib.suppress(Exception), self.record.collected():
        if graph.loses_masks and seen.masks is None:
          seen.masks = loss_graph.lost_masks(loss_fn, batch, task)
      return gradients, loss

    def gradients_of(self, tape: tf.GradientTape, loss: Loss, variables: Sequence[Variable]) -> Any:
      gradients = super().gradients_of(tape, loss, variables)
      _note(seen, list(gradients), variables)
      return gradients

    def apply(
      self, gradients: Sequence[Gradient], finite: tf.Tensor, optimizer: str = "default"
    ) -> None:
      pairs = [*zip(self.variables(optimizer), gradients, strict=True)]
      if finite and not int(self.number):
        seen.moves.update(optimizer, pairs)
      with _applied(seen, pairs, first=not int(self.number)):
        super().apply(gradients, finite, optimizer)

    def assign(self, variable: Variable, value: Any, *, when: Any = None) -> None:
      if when is None and not int(self.number):
        place = source_lines.of_frames(source_lines.frames(but=__file__), task)
        seen.moves.assign(variable, value, _trained(self), place)
      super().assign(variable, value, when=when)

  return Looking


def _zeros(seen: GradientNotes, variables: Sequence[Variable]) -> tuple[list[tf.Tensor], Loss]:
  """Returns what a loss without these variables gives; notes that they were asked for."""
  for variable in variables:
    seen.norms.setdefault(models.name(variable), -1.0)
  zeros = [tf.zeros_like(models.raw(variable)) for variable in variables]
  return zeros, Loss(tf.constant(0.0), tf.constant(0.0))


def _trained(step: Step) -> list[Variable]:
  return [v for one in step.parts.optimizers.values() for v in one.variables]


def _owner(step: Step, variables: Sequence[Variable]) -> str:
  """Returns the name of the optimizer that has one of these variables."""
  wanted = {id(models.raw(v)) for v in variables}
  for name, one in step.parts.optimizers.items():
    if wanted & {id(models.raw(v)) for v in one.variables}:
      return name
  return "default"


@contextlib.contextmanager
def _applied(
  seen: GradientNotes, pairs: Sequence[tuple[Variable, Gradient]], *, first: bool
) -> Iterator[None]:
  """Notes what an update moves inside the context although it gets zeros in place of a gradient."""
  given = [(models.name(v), models.raw(v), g) for v, g in pairs if g is not None]
  some = {name for name, _, gradient in given if np.any(tf.convert_to_tensor(gradient))}
  before = {name: np.array(variable) for name, variable, _ in given}
  yield
  seen.applied |= some
  seen.dragged += [
    name for name, variable, _ in given
    if first and name not in some and seen.norms.get(name, 0) > 0
    and np.any(before[name] != np.array(variable))
  ]  # fmt: skip


def _note_graph(
  seen: GradientNotes, graph: LossGraph, task: Any, trained: Sequence[Variable]
) -> None:
  seen.stops = seen.stops or graph.stops
  seen.on_purpose = seen.on_purpose or graph.replaced(task, on_purpose=True)
  seen.replaced = seen.replaced or graph.replaced(task, on_purpose=False)
  seen.twice = seen.twice or graph.counted_twice(task)
  seen.noisy |= graph.noisy(task.model, trained, task)


def _note(
  seen: GradientNotes, gradients: Sequence[Gradient], variables: Sequence[Variable]
) -> None:
  for gradient, variable in zip(gradients, variables, strict=True):
    name = models.name(variable)
    if gradient is None:
      seen.norms.setdefault(name, -1.0)
      continue
    norm = float(tf.norm(tf.cast(gradient, tf.float32)))
    if not np.isfinite(norm):
      seen.not_finite.add(name)
      norm = 0.0
    seen.norms[name] = max(norm, seen.norms.get(name, 0.0))


def _note_sparse(
  seen: GradientNotes, total: Callable[[], tf.Tensor], variables: Sequence[Variable]
) -> None:
  raw = [models.raw(variable) for variable in variables]
  with tf.GradientTape() as tape:
    loss = total()
  for gradient in tape.gradient(loss, raw):
    if isinstance(gradient, tf.IndexedSlices):
      dense = tf.convert_to_tensor(gradient)
      seen.sparse[f"{tuple(dense.shape)}"] = int(tf.size(dense)) * dense.dtype.size


def _note_differences(
  seen: GradientNotes, total: Callable[[], tf.Tensor], gradients: Sequence[Gradient],
  variables: Sequence[Variable], factor: float,
) -> None:  # fmt: skip
  there = [
    (g, v) for g, v in zip(gradients, variables, strict=True)
    if g is not None and np.isfinite(np.asarray(g, np.float64)).all() and np.any(np.asarray(g))
  ]  # fmt: skip
  there.sort(key=lambda pair: -np.asarray(pair[0]).size)
  rng = np.random.default_rng(0)
  for gradient, variable in there[:MOST_VARIABLES]:
    told = np.asarray(gradient, np.float64) / factor
    compared = compare(total, told, variable, rng, seen.precision)
    if compared is not None:
      seen.compared += 1
      if compared[0] != compared[1]:
        seen.wrong[models.name(variable)] = compared


def _differences(task: Any, seen: GradientNotes) -> Result:
  name = "finite differences"
  if seen.unused:
    told = "a function with a gradient of its own is called, and nothing uses its result"
    return GROUP.failed("custom gradients run", told, "gradient that never runs", seen.unused)
  if seen.wrong and (seen.stops or seen.on_purpose):
    how = "stops gradients" if seen.stops else f"replaces a gradient ({seen.on_purpose})"
    return GROUP.skipped(name, f"{next(iter(seen.wrong))} differs, and the loss {how} on purpose")
  if seen.wrong:
    variable, (gradient, true) = next(iter(seen.wrong.items()))
    detail = f"along one direction in {variable} the gradient is {gradient:.4g}, not {true:.4g}"
    place = seen.replaced or _find(task, WRONG.containing)
    return GROUP.explained(name, detail, WRONG, place)
  if not seen.compared:
    return GROUP.skipped(name, "the loss changes too little, or not smoothly enough, to measure")
  within = f"{TOLERANCE[seen.precision]:.1%} in {seen.precision}".replace(".0%", "%")
  return GROUP.passed(name, f"agree within {within} in {_variables(seen.compared)}")


def _in_model(task: Any, outside: Mapping[str, str]) -> Result:
  """Checks that the step reads no trainable variable that the model does not have."""
  name = "every variable is in the model"
  if not outside:
    return GROUP.passed(name, "no other is made")
  told = f"{moves.named(list(outside))}: read by the step, not trained and not saved"
  place = source_lines.qualified(next(iter(outside.values())), task)
  return GROUP.failed(name, told, "variable outside the model", place)


def _owned(here: Bench) -> Result:
  """Checks that each trainable variable has an optimizer, or is set by `step.assign`."""
  owned = moves.owned_ids(here) | {id(variable) for variable in here.trainer.assigned.values()}
  trainable = models.trainable_variables(here.task.model)
  names = [models.name(v) for v in trainable if id(models.raw(v)) not in owned]
  parts = here.task.model.items() if isinstance(here.task.model, Mapping) else ()
  without = [
    f'"{key}"' for key, part in parts
    if any(models.name(v) in names for v in models.trainable_variables(part))
  ]  # fmt: skip
  words, methods = (*without, *_layers(names)), ("variables_of", "build_model")
  return _verdict(
    here.task, "every variable has an optimizer", names, _variables(len(trainable)), NOT_OWNED,
    source_lines.find(here.task, *methods, containing=words, anywhere=True),
  )  # fmt: skip


def _frozen(task: Any, held: Sequence[str], count: str) -> Result:
  name = "what is frozen stays as it is"
  if not held:
    return GROUP.passed(name, count)
  told = f"{moves.named(held)} moves, but step.apply() always gets zeros in place of its gradient"
  return GROUP.explained(name, told, HELD, source_lines.mention(task, *HELD.containing))


def _calls(seen: GradientNotes) -> list[Result]:
  """Returns a note of what the losses depend on; it cannot fail."""
  if not seen.calls:
    return []
  told = []
  for optimizer, parts in seen.calls.items():
    by_calls: dict[Calls, list[str]] = {}
    for name, calls in parts.items():
      by_calls.setdefault(calls, []).append(name)
    each = "; ".join(f"{', '.join(names)}: {calls}" for calls, names in by_calls.items())
    told.append(f"loss of {optimizer!r}: {each}" if len(seen.calls) > 1 else each)
  twice = any(calls.passing > 1 for parts in seen.calls.values() for calls in parts.values())
  hint = "; a target needs tf.stop_gradient, if one of the calls computes one" if twice else ""
  detail = "; ".join(told) + hint
  return [GROUP.passed("what the loss depends on", detail)]


def _variables(count: int) -> str:
  return f"{count} variable" if count == 1 else f"{count} variables"


def _layers(names: Sequence[str]) -> list[str]:
  """Returns the names of the layers of variables, in quotes."""
  return [f'"{part}"' for name in names for part in name.split("/")[:-1]]


def _find(task: Any, words: Sequence[str]) -> str:
  return source_lines.find(task, *METHODS, containing=words, anywhere=True)


def _verdict(
  task: Any, name: str, wrong: Sequence[str], detail: str, why: Explanation, place: str = ""
) -> Result:
  """Returns the result for variables of which some are `wrong`."""
  if not wrong:
    return GROUP.passed(name, detail)
  words = (*(_layers(wrong) if why is MISSING else ()), *why.containing)
  return GROUP.explained(name, moves.named(wrong), why, place or _find(task, words))
