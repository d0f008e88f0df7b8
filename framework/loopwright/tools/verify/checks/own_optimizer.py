"""Part of the group "replicas": several steps with the config's own optimizer and all options."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from loopwright import configurables, errors
from loopwright.inputs.parts import prefixes
from loopwright.models import models
from loopwright.optimizers.loss_scale import dynamic
from loopwright.tools.verify.bench import explanations as known
from loopwright.tools.verify.bench import layer_calls, source_lines
from loopwright.tools.verify.bench.bench import Bench, Outcome, Rows, strategy_of
from loopwright.tools.verify.bench.comparison import AFTER_STEPS, METHODS, Comparison, Difference
from loopwright.tools.verify.checks import order
from loopwright.tools.verify.checks.moves import averages
from loopwright.tools.verify.report import Explanation, Group, Result

GROUP = Group("replicas")
SAME, OVERFLOW = "same weights after 4 steps", "overflow on one replica"
LATER = "same rates and updates later on"
NUMBERS = (5, 6, 7, *(2**k for k in range(3, 20)))
"""Numbers of the steps that run."""
RATE_NUMBERS = tuple(sorted({round(1.25**k) for k in range(62)}))
"""Numbers of steps whose learning rate is read."""
_TENSORFLOW = tf.__file__.rpartition("/")[0]
Rates = dict[str, list[float]]
LOCAL_EPOCHS = Explanation(
  "epochs counted in local batches",
  ("num_replicas", "per_replica", "].shape[0]", "len(batch", "tf.shape(batch", "epoch",
   "step.number", '"step"'),
)  # fmt: skip
Options = dict[str, dict[str, Any]]
"""What is switched on -> its options of `Trainer`."""


class Steps(NamedTuple):
  """Several steps on 1, 2 and 3 replicas, then one in which a replica overflows.

  Attributes:
    apart: how those on 2 and on 3 replicas differ.
    overflow: the result for the last one.
    later: what runs after these steps.
  """

  apart: dict[int, Difference]
  overflow: Result
  later: LaterSteps

  @property
  def worst(self) -> Difference:
    """The larger of the differences."""
    return max(self.apart.values(), key=lambda each: each.worst)


def same_with_options(of: Comparison, *, alike: bool) -> Iterator[Result]:
  """Checks several steps with all options on; if they differ, each option alone.

  Args:
    of: the step on one replica.
    alike: whether the bare updates agree; otherwise only the overflow is checked.
  """
  options = _options(of)
  try:
    steps = run(of, options)
  except ValueError:
    if of.subject.accumulation_steps > 1:
      raise
    options.pop("accumulation", None)  # the task splits the batch itself, so the config does not
    steps = run(of, options)
  worst = steps.worst
  if not alike:
    yield GROUP.skipped(SAME, "a single step differs; fix that first")
  elif worst.worst <= AFTER_STEPS:
    told = f"own optimizer, {', '.join(options)}: relative difference {worst.worst:.1e}"
    values = {str(replicas): each.worst for replicas, each in steps.apart.items()}
    yield GROUP.passed(SAME, told, values=values)
    yield steps.later.result()
  elif local := [call for call in of.calls if call.local and call.verb == "gradients"]:
    yield GROUP.explained(SAME, worst.detail, known.LOCAL_CONDITION, local[0].place)
    return
  else:
    alone = (
      option for option in options if run(of, {option: options[option]}).worst.worst > AFTER_STEPS
    )
    explanation = known.BY_OPTION.get(next(alone, ""), known.OPTIMIZER)
    yield GROUP.explained(SAME, worst.detail, explanation, of.find(explanation))
  yield steps.overflow


def _options(of: Comparison) -> Options:
  norm = of.reference["full batch"].metrics.get("gradient_norm", 0.0)
  options: Options = {}
  by_value = "Trainer.clip_value" in configurables.bindings() or "clip_value" in of.subject.options
  if norm > 0 and not by_value:
    options["clip_norm"] = {"clip_norm": norm / 2}
  micro = of.subject.accumulation_steps
  if micro > 1 or not of.coupled():
    options["accumulation"] = {"accumulation_steps": micro if micro > 1 else 2}
  options["loss scaling"] = {"loss_scale": dynamic}
  return options


def run(of: Comparison, options: Mapping[str, dict[str, Any]]) -> Steps:
  """Takes the steps on 1, 2 and 3 replicas."""
  arguments = {key: value for option in options.values() for key, value in option.items()}
  planted = _with_infinity(of.batch, np.arange(of.rows) == of.rows - 1)
  ends, skips, later = {}, {}, LaterSteps(of)
  for replicas in (1, 2, 3):
    here = Bench(of.subject, replicas, rows=of.rows, **arguments)
    here.assign(of.start)
    outcomes = [here.step(rows) for rows in (of.batch, *of.cases.values())]
    ends[replicas] = dataclasses.replace(outcomes[-1], before=of.start)
    later.take(replicas, here)
    try:
      if planted is not None:
        skips[replicas] = (here.step(planted), here.trainable)
    except tf.errors.InvalidArgumentError:  # such as an index that is computed of a feature
      planted = None
      skips.clear()
  apart = {n: of.difference(ends[n], ends[1], without=of.noisy) for n in (2, 3)}
  return Steps(apart, _overflow(of, skips), later)


def _overflow(of: Comparison, skips: Mapping[int, tuple[Outcome, list[bool]]]) -> Result:
  if not skips:
    return GROUP.skipped(OVERFLOW, "no float feature can be set to infinity")
  moved = {n: _moved(outcome, trainable) for n, (outcome, trainable) in skips.items()}
  outcomes = {n: outcome for n, (outcome, _) in skips.items()}
  if moved[1] and not np.isfinite(of.flat(outcomes[1], of.trained)).all():
    why = "the task applies non-finite gradients, on one replica too"
    return GROUP.skipped(OVERFLOW, why)
  if moved[1]:  # it skipped only some of its updates, or none
    apart = {n: of.apart(outcomes[n], outcomes[1]) for n in (2, 3)}
    wrong = [str(n) for n, difference in apart.items() if not difference <= AFTER_STEPS]
    right = "the step is the same on every replica: relative difference "
    right += f"{max(apart.values()):.1e}"
    bad = "the step differs from that of one replica if one of them overflows"
  else:
    wrong = [str(n) for n, there in moved.items() if there]
    right = "the step is skipped on every replica, no weight moves"
    bad = "weights move although one replica overflows"
  if not wrong and not moved[1] and (told := _spoiled(of, outcomes)):
    told, place = f"the step is skipped, but {told} it", of.find(known.KEPT_STATE)
    return GROUP.explained(OVERFLOW, told, known.KEPT_STATE, place)
  if not wrong:
    return GROUP.passed(OVERFLOW, right)
  told = f"on {' and '.join(wrong)} replicas, {bad}"
  mistake = order.first_mistake(of.calls)
  if mistake and mistake[0] is not known.CHECKED_FIRST:
    return GROUP.explained(OVERFLOW, told, mistake[0], mistake[1].place)
  words = ("is_finite", "check(", "apply(")
  return GROUP.explained(
    OVERFLOW, told, known.CHECKED_FIRST, source_lines.find(of.task, *METHODS, containing=words)
  )


def _spoiled(of: Comparison, outcomes: Mapping[int, Outcome]) -> str:
  """Returns what an overflow has done to a variable that no optimizer updates; "" if nothing."""
  layers = layer_calls.normalisations(of.task.model)  # Keras updates their statistics in each step
  own = {id(models.raw(v)) for layer in layers for v in layer.variables}
  kept = [i for i in sorted(of.state) if id(of.alone.variables[i]) not in own]
  for outcome in outcomes.values():
    trained = [outcome.before[i] for i in sorted(of.updated)]
    for index in kept:
      before, copies = outcome.before[index], outcome.after[index]
      if np.isfinite(before).all() and not all(np.isfinite(copy).all() for copy in copies):
        return f"{of.alone.names[index]} is not finite after"
      if any(averages(before, copies[0], each) for each in trained):
        return f"{of.alone.names[index]}, an average of weights, moves in"
  return ""


def _moved(outcome: Outcome, trainable: Sequence[bool]) -> bool:
  return any(
    trained and not np.array_equal(copy, before, equal_nan=True)
    for before, copies, trained in zip(outcome.before, outcome.after, trainable, strict=True)
    for copy in copies
  )


def _with_infinity(batch: Rows, where: np.ndarray) -> Rows | None:
  """Returns the batch with every float feature infinite in some rows; None if it has none."""
  weights = {f"{prefix}weight" for prefix in prefixes(batch)}
  floats = [n for n, v in batch.items() if n not in weights and np.issubdtype(v.dtype, np.floating)]
  planted = dict(batch)
  for name in floats:
    planted[name] = batch[name].copy()
    planted[name][where] = np.inf
  return planted if floats else None


class LaterSteps:
  """Rates and updates of the own optimizer, on each number of replicas that it is given.

  A rate that is counted in epochs of a replica's own rows is right in the first steps. So the step
  runs from the same weights at numbers that grow by powers of two: whatever changes at step n on
  one replica and at 2n on two differs at one of them.
  """

  def __init__(self, compared: Comparison) -> None:
    self.compared = compared
    self._rates: dict[int, Rates] = {}
    self._outcomes: dict[int, list[Outcome]] = {}

  def take(self, replicas: int, here: Bench) -> None:
    """Reads the rates and runs the steps of one bench, after its first steps (host)."""
    step = here.trainer.global_step
    rates: Rates = {name: [] for name in here.trainer.parts.optimizers}
    for name, number in itertools.product(rates, RATE_NUMBERS):
      step.assign(number)
      rates[name].append(float(here.trainer.parts.optimizers[name].learning_rate()))
    self._rates[replicas], self._outcomes[replicas] = rates, []
    for number in NUMBERS:
      here.assign(self.compared.start)
      step.assign(number)
      self._outcomes[replicas].append(here.step(self.compared.batch))

  def result(self) -> Result:
    """Compares two and three replicas with one."""
    if told := self._rate() or self._update():
      return GROUP.explained(LATER, told, LOCAL_EPOCHS, self._place())
    detail = f"{len(NUMBERS)} steps up to number {NUMBERS[-1]:,}, on 1, 2 and 3 replicas"
    return GROUP.passed(LATER, detail)

  def _rate(self) -> str:
    for replicas, name in itertools.product((2, 3), self._rates[1]):
      rates = (self._rates[n][name] for n in (1, replicas))
      for number, one, more in zip(RATE_NUMBERS, *rates, strict=True):
        if abs(one - more) > 1e-5 * abs(one):
          told = f"at step {number:,} the learning rate of {name!r} is {one:.4g} on one replica"
          return f"{told} and {more:.4g} on {replicas}"
    return ""

  def _update(self) -> str:
    for replicas in (2, 3):
      pairs = zip(NUMBERS, self._outcomes[1], self._outcomes[replicas], strict=True)
      for number, one, more in pairs:
        found = self.compared.difference(more, one, without=self.compared.noisy)
        if found.worst > AFTER_STEPS:
          told = f"at step {number:,} on {replicas} replicas {found.detail}, "
          return f"{told}in the first steps it does not"
    return ""

  def _place(self) -> str:
    """Returns the line that reads the number of replicas, otherwise one with a word for it."""
    task = self.compared.task
    places: list[str] = []
    kind = _noting(places)
    here = Bench(
      self.compared.subject, 2, rows=self.compared.rows, strategy=strategy_of(2, kind=kind)
    )
    here.step(self.compared.batch)
    if places:
      return source_lines.qualified(places[0], task)
    by_words = (source_lines.mention(task, word) for word in LOCAL_EPOCHS.containing)
    return next(filter(None, by_words), "") or source_lines.find(task, *METHODS)


def _noting(places: list[str]) -> type[tf.distribute.Strategy]:
  """Returns a strategy that notes each line of the user's that reads `num_replicas_in_sync`."""

  class Noting(tf.distribute.MirroredStrategy):
    @property
    def num_replicas_in_sync(self) -> int:
      frames = source_lines.frames(but=__file__)
      outside = [frame for frame in frames if not frame[0].startswith(_TENSORFLOW)]
      if outside and errors.is_the_users(outside[-1][0]):
        places.append(source_lines.of_frames(outside, None))
      return super().num_replicas_in_sync

  return Noting
