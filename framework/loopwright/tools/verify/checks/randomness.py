"""Random numbers: they differ between replicas and steps, and repeat with the seed.

Two replicas on logical CPUs take steps on the same rows from the same weights. The same step again
must be equal; the next step must differ, and so must a step in which both replicas draw the same.
Only the update and the logged values are compared, so any train_step() will do.

augmentation.py has the checks of preprocess().
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from loopwright import configurables
from loopwright.evaluator import Evaluator
from loopwright.graphs import operations as graphs
from loopwright.models import models
from loopwright.tools.verify.bench import (
  bench,
  layer_calls,
  random_draws,
  recorded_step,
  source_lines,
  survey,
)
from loopwright.tools.verify.bench.bench import Bench, Outcome, Rows, Subject, numbers
from loopwright.tools.verify.bench.explanations import fits
from loopwright.tools.verify.bench.random_draws import FIXED, FROZEN, STATEFUL, Draw
from loopwright.tools.verify.checks import augmentation
from loopwright.tools.verify.report import Group, Result

GROUP = Group("randomness")
ROUNDING = 1e-5
"""A relative difference below this is rounding, not other random numbers."""
REPEATS, STEPS, REPLICAS = (
  "repeats with the seed", "differs between steps", "differs between replicas",
)  # fmt: skip
TRAINING = "layer called without training"
DROPOUT = "dropout active in evaluation"
UNSTEADY = "evaluation depends on something else than its batch"


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  steps = Steps(subject)
  return [
    *steps.training(),
    steps.apart(),
    steps.active(),
    steps.normalises(),
    steps.evaluation(),
    *augmentation.results(subject, steps.bench.task),
  ]


class Steps:
  """Steps on two replicas with the same rows, with the same and with different seeds."""

  def __init__(self, subject: Subject) -> None:
    rows = 24 * subject.accumulation_steps
    self.bench = Bench(subject, 2, rows=rows, optimizer=bench.gradient_descent, quiet=False)
    self.task, self.rows = self.bench.task, rows // 2
    self._apart = tf.Variable(1, dtype=tf.int32, trainable=False)
    own = self.bench.trainer.parts.replica_id
    self.bench.trainer.parts = dataclasses.replace(
      self.bench.trainer.parts, replica_id=lambda: tf.cast(own(), tf.int32) * self._apart
    )
    half = subject.rows(self.task, self.rows)
    self._batch = {name: np.concatenate([value, value]) for name, value in half.items()}
    self._start = self.bench.read()
    with random_draws.watch(self.task) as self.watched, layer_calls.watch() as self._calls:
      first = self._step(0)
    self._normalised = self._still_statistics(first)
    self._random_layers = layer_calls.random_layers(self.task.model)
    self._outside = self._layers_drew(first)
    self.repeats = self._same(first, self._step(0))
    self.by_step = not self._same(first, self._step(1))
    self.by_replica = not self._same(first, self._step(0, apart=False))
    self.by_example = not self._same(first, self._step(0, moved=1))

  def training(self) -> Iterator[Result]:
    """Checks that a step repeats with its seed and differs from other steps and replicas."""
    if self._nothing_random or not self.repeats:
      why = "the step draws no random numbers" if self.repeats else f"{REPEATS!r} fails"
      yield GROUP.skipped(REPEATS, why) if self.repeats else self._stateful()
      yield from (GROUP.skipped(name, why) for name in (STEPS, REPLICAS))
      return
    if self._outside:
      told = f"{self._outside} changes in a step, so a layer drew without the step's seed"
      operations = graphs.operations(self.bench.graph(self._batch))
      yield GROUP.failed(REPEATS, told, *random_draws.outside(operations, self.task))
    else:
      yield GROUP.passed(REPEATS, "the same step again gives the same update")
    yield self._between_steps()
    yield self._between_replicas()

  def _layers_drew(self, step: Outcome) -> str:
    """Returns the state of a layer's own generator that a step has changed; "" if none."""
    pairs = zip(self.bench.names, step.before, step.after, strict=True)
    changed = (name for name, before, after in pairs if not np.array_equal(before, after[0]))
    return next(filter(random_draws.is_generator, changed), "")

  @property
  def _nothing_random(self) -> bool:
    return self.repeats and not (self.watched.in_python or self.watched.draws)

  def _stateful(self) -> Result:
    found = self.watched.stateful
    told = f"the same step again gives another update{random_draws.listed(found)}"
    return GROUP.failed(REPEATS, told, STATEFUL, self._place(found))

  def _between_steps(self) -> Result:
    if self.watched.in_python:
      told = "numbers were drawn in Python while the step was traced: they never change again"
      return GROUP.failed(STEPS, told, FROZEN, self.watched.python_place or self._place([]))
    fixed = self.watched.fixed(self.rows)
    if fixed and (not self.by_step or self.watched.all_fixed):
      told = f"steps draw the same numbers{random_draws.listed(fixed)}"
      return GROUP.failed(STEPS, told, FIXED, fixed[0].place)
    if not self.by_step:
      return GROUP.skipped(STEPS, "the random numbers do not change the update")
    return GROUP.passed(STEPS, "the next step, from the same weights on the same rows")

  def _between_replicas(self) -> Result:
    if not self.by_step or self.watched.all_fixed:
      return GROUP.skipped(REPLICAS, "steps draw no other numbers")
    if self.by_replica:
      return GROUP.passed(REPLICAS, "two replicas draw different numbers for the same rows")
    if self.by_example:
      told = "random numbers depend on the example's id, not on the replica"
      return GROUP.passed(REPLICAS, told)
    if not self._for_rows() or self._as_on_one():
      return GROUP.skipped(REPLICAS, "no numbers are drawn for each row")
    told = "two replicas draw the same numbers on their rows"
    place = self._place(self.watched.own)
    return GROUP.failed(REPLICAS, told, "a seed without the replica", place)

  def _as_on_one(self) -> bool:
    """Whether one replica, on the rows of both, makes the same update: what is drawn is shared."""
    one = Bench(
      self.bench.subject, rows=2 * self.rows, optimizer=bench.gradient_descent, quiet=False
    )
    mine, yours = (here.steps_from(self._start, self._batch).update() for here in (one, self.bench))
    pairs = zip(mine, yours, one.trainable, strict=True)
    return all(fits(a, b) or not (a - b).any() for a, b, used in pairs if used)

  def _for_rows(self) -> bool:
    """Whether a draw, not from a constant seed, has numbers for each row."""
    rows = (self.rows, self.rows // self.bench.subject.accumulation_steps, None)
    drawn = [draw for draw in self.watched.draws if not draw.fixed]
    return any(draw.by_keras or (draw.shape and draw.shape[0] in rows) for draw in drawn)

  def apart(self) -> Result:
    """Checks that random numbers mix no rows: then what rows of weight 0 hold counts."""
    name = "random numbers mix no rows"
    if self._nothing_random or not self.repeats:
      return GROUP.skipped(name, "the step draws nothing" if self.repeats else "it does not repeat")
    if layer_calls.normalisations(self.task.model):
      return GROUP.skipped(name, "batch normalisation mixes all rows")
    own, other = self._with_other_padding()
    if self._same(self._step(0, batch=own), self._step(0, batch=other)):
      return GROUP.passed(name, "what rows of weight 0 hold changes nothing, whatever is drawn")
    quiet = Bench(self.bench.subject, 2, rows=2 * self.rows, optimizer=bench.gradient_descent)
    if not self._same(*(quiet.steps_from(self._start, each) for each in (own, other))):
      return GROUP.skipped(name, "nor do rows without random numbers: see the group 'replicas'")
    told = f"rows of weight 0 change the step{random_draws.listed(self.watched.own)}"
    place = self._place(self.watched.own)
    return GROUP.failed(name, told, "examples that depend on one another", place)

  def _with_other_padding(self) -> tuple[Rows, Rows]:
    """Returns a batch with rows of weight 0 on each replica, and with other contents in them."""
    rows = np.arange(2 * self.rows)
    kept = rows % self.rows < self.rows * 2 // 3
    own = bench.masked(self._batch, kept)
    return own, {**own, **{
      name: value[np.where(kept, rows, 0)] for name, value in own.items()
      if name.rpartition("/")[2] not in ("weight", "example_id")
    }}  # fmt: skip

  def _still_statistics(self, step: Outcome) -> str:
    """Returns a trainable batch normalisation whose statistics a step does not move; or ""."""
    pairs = zip(self.bench.variables, step.before, step.after, strict=True)
    moved = {id(v) for v, before, after in pairs if not np.array_equal(before, after[0])}
    still = [
      layer.name
      for layer in layer_calls.normalisations(self.task.model, trainable=True)
      if not any(id(models.raw(v)) in moved for v in layer.non_trainable_variables)
    ]
    return still[0] if still and self._calls.none_in_training(self.task.model) else ""

  def normalises(self) -> Result:
    """Checks that batch normalisation uses the batch in a training step."""
    name = "batch norm is active"
    layers = layer_calls.normalisations(self.task.model, trainable=True)
    if not layers:
      return GROUP.skipped(name, "the model has no batch normalisation to train")
    if not self._normalised:
      return GROUP.passed(name, ", ".join(layer.name for layer in layers))
    told = f"a training step does not move the statistics of {self._normalised}"
    return self._without_training(name, told)

  def active(self) -> Result:
    """Checks that the random layers draw in a training step."""
    name, layers = "dropout is active", self._random_layers
    if not layers:
      return GROUP.skipped(name, "the model has no random layer")
    if any(draw.by_keras for draw in self.watched.draws):
      return GROUP.passed(name, ", ".join(layers))
    told = f"no layer draws in a training step, although the model has {', '.join(layers)}"
    return self._without_training(name, told)

  def _without_training(self, name: str, told: str) -> Result:
    calls = [call for part in models.parts(self.task.model) for call in self._calls.of(part)]
    places = (source_lines.of_frames(call.frames, self.task) for call in calls)
    return GROUP.failed(name, told, TRAINING, next(filter(None, places), ""))

  def evaluation(self) -> Result:
    """Checks that the same batch gives the same metrics when evaluated twice."""
    name = "evaluation draws nothing"
    source, why = survey.eval_source(self.task)
    if source is None:
      return GROUP.skipped(name, why)
    try:
      rows = self.bench.subject.rows(self.task, 2 * self.rows, training=False)
    except Exception as error:
      if not survey.of_training(error):
        raise
      return GROUP.skipped(name, "preprocess() fails in evaluation")
    self.bench.assign(self._start)
    evaluator = configurables.configured(Evaluator)(
      task=self.task, strategy=self.bench.strategy, dataset=tf.data.Dataset.from_tensors(rows)
    )
    with (
      random_draws.watch(self.task) as watched,
      recorded_step.traced(lambda kind: kind.startswith("Assign")) as assigned,
    ):
      once = numbers(evaluator.evaluate())
    twice = numbers(evaluator.evaluate())
    different = [key for key in once if not _close(once[key], twice[key])]
    if not different:
      return GROUP.passed(name, f"the same {', '.join(once)} again")
    key = different[0]
    told = f"{key} is {once[key]:.6g}, and {twice[key]:.6g} for the same batch again"
    stateful = [draw for draw in watched.stateful if not draw.by_keras]
    by_layer = any(draw.by_keras for draw in watched.draws)
    if by_layer or (self._random_layers and not stateful):
      return GROUP.failed(name, told, DROPOUT, self._place(stateful or watched.draws, "forward"))
    if watched.draws:
      return GROUP.failed(name, told, STATEFUL, self._place(stateful or watched.draws))
    places = (source_lines.of_operation(op, self.task) for op in assigned)
    place = next(filter(None, places), "") or self._place([], "forward", "eval_step")
    return GROUP.failed(name, told, UNSTEADY, place)

  def _step(
    self, step: int, *, apart: bool = True, moved: int = 0, batch: Rows | None = None
  ) -> Outcome:
    self.bench.assign(self._start)
    self.bench.trainer.global_step.assign(step)
    self._apart.assign(int(apart))
    batch = batch or self._batch
    return self.bench.step({**batch, "example_id": np.roll(batch["example_id"], moved)})

  def _same(self, one: Outcome, other: Outcome) -> bool:
    """Whether updates and logged values of two steps are equal except for rounding."""
    for replica in range(self.bench.replicas):
      for mine, yours in zip(one.update(replica), other.update(replica), strict=True):
        size = np.linalg.norm(np.nan_to_num(yours))
        if np.linalg.norm(np.nan_to_num(mine - yours)) > ROUNDING * size:
          return False
    return all(_close(value, other.metrics[key]) for key, value in one.metrics.items())

  def _place(self, found: list[Draw], *methods: str) -> str:
    """Returns the line of the first draw, or if there is none, that of a method."""
    known = (*methods, "train_step", "training_loss", "loss")
    return found[0].place if found else source_lines.method(self.task, *known)


def _close(one: float, other: float) -> bool:
  return bool(np.isclose(one, other, rtol=ROUNDING, atol=0.0, equal_nan=True))
