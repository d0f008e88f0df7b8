"""Part of the group "replicas": several steps with the config's own optimizer and all options."""

from __future__ import annotations

import contextlib
import dataclasses
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
from loopwright.tools.verify.bench.comparison import AFTER_STEPS, LOSS, Comparison, Difference
from loopwright.tools.verify.checks import order
from loopwright.tools.verify.checks.moves import averages
from loopwright.tools.verify.report import Group, Result

GROUP = Group("replicas")
SAME, OVERFLOW = "same weights after 4 steps", "overflow on one replica"
LATER = "same updates later on"
LOCAL_EPOCHS = "epochs counted in local batches"
KEPT_STATE = "state changed by a skipped step"
NUMBERS = (5, 6, 7, *(2**k for k in range(3, 20)))
"""Numbers of the steps that run later on: whatever changes at step n on one replica and at 2n on
two, such as a rate that is counted in epochs of a replica's own rows, differs at one of them."""
_TENSORFLOW = tf.__file__.rpartition("/")[0]


class Steps(NamedTuple):
  """Several steps on 1 and 2 replicas, then one in which a replica overflows.

  Attributes:
    apart: how they differ.
    later: how steps of larger numbers differ, or "".
    overflow: the result for the last one.
  """

  apart: Difference
  later: str
  overflow: Result


def same_with_options(of: Comparison, *, alike: bool) -> Iterator[Result]:
  """Checks several steps with all options on; only the overflow if bare updates are not alike."""
  steps, names = _run_without_some(of, _options(of))
  if not alike:
    yield GROUP.skipped(SAME, "a single step differs; fix that first")
  elif steps.apart.worst > AFTER_STEPS:
    local = [call for call in of.calls if call.local and call.verb == "gradients"]
    found = (known.LOCAL_CONDITION, local[0].place) if local else order.wrong_update(of.calls)
    told = f"with {', '.join(names)}: {steps.apart.detail}"
    yield GROUP.failed(SAME, told, *(found or (known.UNKNOWN, "")))
    if local:
      return
  else:
    told = f"own optimizer, {', '.join(names)}: relative difference {steps.apart.worst:.1e}"
    yield GROUP.passed(SAME, told)
    if steps.later:
      place = reads_replicas(of) or source_lines.method(of.task, "train_step", *LOSS)
      yield GROUP.failed(LATER, steps.later, LOCAL_EPOCHS, place)
    else:
      yield GROUP.passed(LATER, f"{len(NUMBERS)} steps up to number {NUMBERS[-1]:,}")
  yield steps.overflow


def _options(of: Comparison) -> dict[str, Any]:
  norm = of.reference["full batch"].metrics.get("gradient_norm", 0.0)
  options: dict[str, Any] = {"loss_scale": dynamic}
  by_value = "Trainer.clip_value" in configurables.bindings() or "clip_value" in of.subject.options
  if norm > 0 and not by_value:
    options["clip_norm"] = norm / 2
  micro = of.subject.accumulation_steps
  if micro > 1 or not of.coupled():
    options["accumulation_steps"] = max(micro, 2)
  return options


def _run_without_some(of: Comparison, options: Mapping[str, Any]) -> tuple[Steps, list[str]]:
  """Returns the steps, and the options that they have had: without those that the task refuses.

  Those of the config stay, and their refusal is raised.
  """
  wanted = {
    "accumulation_steps": of.subject.accumulation_steps > 1,  # the task splits the batch itself
    "loss_scale": of.alone.trainer.parts.loss_scale.factor() is not None,  # of its own gradients
  }
  free = [name for name in wanted if name in options and not wanted[name]]
  for left_out in ((), *((name,) for name in free)):
    given = {name: value for name, value in options.items() if name not in left_out}
    with contextlib.suppress(ValueError):
      return run(of, given), [*given]
  given = {name: value for name, value in options.items() if name not in free}
  return run(of, given), [*given]


def run(of: Comparison, options: Mapping[str, Any]) -> Steps:
  """Takes the steps on 1 and 2 replicas."""
  benches = [Bench(of.subject, replicas, rows=of.rows, **options) for replicas in (1, 2)]
  ends = []
  for here in benches:
    here.assign(of.start)
    outcomes = [here.step(rows) for rows in (of.batch, *of.cases.values())]
    ends.append(dataclasses.replace(outcomes[-1], before=of.start))
  later = [_numbered(of, benches, number) for number in NUMBERS]
  found = (
    f"at step {number:,} on 2 replicas {apart.detail}"
    for number, apart in zip(NUMBERS, later, strict=True)
    if apart.worst > AFTER_STEPS
  )
  apart = of.difference(ends[1], ends[0], without=of.noisy)
  return Steps(apart, next(found, ""), _overflow(of, benches))


def _numbered(of: Comparison, benches: Sequence[Bench], number: int) -> Difference:
  """Compares the step of a number on both benches, from the initial weights."""
  outcomes = []
  for here in benches:
    here.assign(of.start)
    here.trainer.global_step.assign(number)
    outcomes.append(here.step(of.batch))
  return of.difference(outcomes[1], outcomes[0], without=of.noisy)


def _overflow(of: Comparison, benches: Sequence[Bench]) -> Result:
  planted, why = _with_infinity(of.batch), "no float feature can be set to infinity"
  if planted is None:
    return GROUP.skipped(OVERFLOW, why)
  try:
    one, two = (here.step(planted) for here in benches)
  except tf.errors.InvalidArgumentError:  # such as an index that is computed of a feature
    return GROUP.skipped(OVERFLOW, why)
  moves, moves_on_two = (_moved(outcome, of.trained) for outcome in (one, two))
  if moves and not np.isfinite(of.flat(one, of.trained)).all():
    why = "the task applies non-finite gradients, on one replica too"
    return GROUP.skipped(OVERFLOW, why)
  if moves:  # it skipped only some of its updates, or none
    apart = of.apart(two, one)
    wrong = not apart <= AFTER_STEPS
    right = f"the step is the same on every replica: relative difference {apart:.1e}"
  else:
    wrong, right = moves_on_two, "the step is skipped on every replica, no weight moves"
    if not wrong and (spoiled := _spoiled(of, (one, two))):
      told, index = spoiled
      return GROUP.failed(OVERFLOW, told, KEPT_STATE, of.assigned_at(index))
  if not wrong:
    return GROUP.passed(OVERFLOW, right)
  told = "if one of two replicas overflows, the step is not that of one"
  mistake = order.first_mistake(of.calls)
  found = mistake or (known.CHECKED_FIRST, of.verb_place("check finite"))
  return GROUP.failed(OVERFLOW, told, *found)


def _spoiled(of: Comparison, outcomes: Sequence[Outcome]) -> tuple[str, int] | None:
  """Returns what an overflow has done to a variable that no optimizer updates, and its index."""
  layers = layer_calls.normalisations(of.task.model)  # Keras updates their statistics in each step
  own = {id(models.raw(v)) for layer in layers for v in layer.variables}
  kept = [i for i in sorted(of.state) if id(of.alone.variables[i]) not in own]
  for outcome in outcomes:
    trained = [outcome.before[i] for i in sorted(of.updated)]
    for index in kept:
      name, before, copies = of.alone.names[index], outcome.before[index], outcome.after[index]
      if np.isfinite(before).all() and not all(np.isfinite(copy).all() for copy in copies):
        return f"the step is skipped, but {name} is not finite after it", index
      if any(averages(before, copies[0], each) for each in trained):
        return f"the step is skipped, but {name}, an average of weights, moves in it", index
  return None


def _moved(outcome: Outcome, trainable: Sequence[bool]) -> bool:
  return any(
    trained and not np.array_equal(copy, before, equal_nan=True)
    for before, copies, trained in zip(outcome.before, outcome.after, trainable, strict=True)
    for copy in copies
  )


def _with_infinity(batch: Rows) -> Rows | None:
  """Returns the batch with every float feature infinite in the last row; None if it has none."""
  weights = {f"{prefix}weight" for prefix in prefixes(batch)}
  floats = [n for n, v in batch.items() if n not in weights and np.issubdtype(v.dtype, np.floating)]
  planted = {**batch, **{name: batch[name].copy() for name in floats}}
  for name in floats:
    planted[name][-1] = np.inf
  return planted if floats else None


def reads_replicas(of: Comparison) -> str:
  """Returns the first line of the user's that reads the number of replicas, or ""."""
  places: list[str] = []

  class Noting(tf.distribute.MirroredStrategy):
    @property
    def num_replicas_in_sync(self) -> int:
      frames = source_lines.frames(but=__file__)
      outside = [frame for frame in frames if not frame[0].startswith(_TENSORFLOW)]
      if outside and errors.is_the_users(outside[-1][0]):
        places.append(source_lines.of_frames(outside, of.task))
      return super().num_replicas_in_sync

  here = Bench(of.subject, 2, rows=of.rows, strategy=strategy_of(2, kind=Noting))
  here.step(of.batch)
  return next(iter(places), "")
