"""Random numbers: they differ between replicas and steps, and repeat with the seed.

Two replicas on logical CPUs take steps on the same rows from the same weights. The same step again
must be equal; the next step must differ, and so must a step in which both replicas draw the same.
Only the update and the logged values are compared, so any train_step() will do.

preprocess() runs on the same rows with the seeds of two epochs, and in evaluation without seeds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from framework import configurables
from framework.backend import models
from framework.evaluator import Evaluator
from framework.inputs import datasets, ordering
from framework.inputs.parts import main_source, of_one_shape, prefixes
from framework.metrics import numbers
from framework.task import Task
from framework.verify.bench import bench, random_draws, source_lines, survey
from framework.verify.bench.bench import Bench, Outcome, Rows, Subject
from framework.verify.bench.random_draws import STATEFUL, Draw, Watched
from framework.verify.report import Result, Status

GROUP = "randomness"
ROUNDING = 1e-5
"""A relative difference below this is rounding, not other random numbers."""
METHODS = ("train_step", "training_loss", "forward", "loss", "build_model")
LAYERS = ("Dropout", "GaussianNoise", "Random")
"""Parts of the names of layers that draw in training."""
FROZEN = "np.random while tracing"
FIXED = "a fixed seed"
STATELESS = (
  "use Keras layers, or tf.random.stateless_* with step.seed(): ops with their own state give "
  "other numbers after a restart"
)
BY_SEED = "use tf.random.stateless_* and tf.image.stateless_* with batch['seed']"
ONCE = (
  "Python and NumPy run only once, while TensorFlow traces, and their numbers become constants of "
  "the graph; "
)


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  steps = Steps(subject)
  return [
    *steps.training(),
    steps.active(),
    steps.evaluation(),
    *Augmentation(subject, steps.bench.task).results(),
  ]


# ---- Steps ----


class Steps:
  """Steps on two replicas with the same rows, with the same and with different seeds."""

  def __init__(self, subject: Subject) -> None:
    """Runs the steps."""
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
    with random_draws.watch(self.task) as self.watched:
      first = self._step(0)
    self._random_layers = random_layers(self.task.model)
    self._outside = self._layers_drew(first)
    self.repeats = self._same(first, self._step(0))
    self.by_step = not self._same(first, self._step(1))
    self.by_replica = not self._same(first, self._step(0, apart=False))
    self.by_example = not self._same(first, self._step(0, first_id=1000))

  def training(self) -> Iterator[Result]:
    """Checks that a step repeats with its seed and differs from other steps and replicas."""
    names = ("repeats with the seed", "differs between steps", "differs between replicas")
    if self._nothing_random:
      for name in names:
        yield _skipped(name, "the step draws no random numbers")
      return
    if not self.repeats:
      yield self._stateful(names[0])
      yield _skipped(names[1], f"{names[0]!r} fails")
      yield _skipped(names[2], f"{names[0]!r} fails")
      return
    if self._outside:
      yield _failed(
        names[0], f"{self._outside} changes in a step, so a layer drew without the step's seed",
        *random_draws.outside(self.task),
      )  # fmt: skip
    else:
      yield _passed(names[0], "the same step again gives the same update")
    yield self._between_steps(names[1])
    yield self._between_replicas(names[2])

  def _layers_drew(self, step: Outcome) -> str:
    """Returns the state of a layer's own generator that a step has changed; "" if none."""
    pairs = zip(self.bench.names, step.before, step.after, strict=True)
    return next(
      (
        name
        for name, before, after in pairs
        if random_draws.is_generator(name) and not np.array_equal(before, after[0])
      ),
      "",
    )

  @property
  def _nothing_random(self) -> bool:
    return self.repeats and not (self.watched.in_python or self.watched.draws)

  def _stateful(self, name: str) -> Result:
    return _failed(
      name, f"the same step again gives another update{_listed(self.watched.stateful)}",
      STATEFUL, STATELESS,
      self._place(self.watched.stateful, ("tf.random.", "tf.nn.dropout", "np.random", "random.")),
    )  # fmt: skip

  def _between_steps(self, name: str) -> Result:
    if self.watched.in_python:
      return _failed(
        name, "numbers were drawn in Python while the step was traced: they never change again",
        FROZEN, ONCE + "use tf.random.stateless_* with step.seed()",
        self._place([], ("np.random", "default_rng", "random.")),
      )  # fmt: skip
    fixed = self.watched.fixed(self.rows)
    if fixed and (not self.by_step or self.watched.all_fixed):
      return _failed(
        name, f"steps draw the same numbers{_listed(fixed)}", FIXED,
        "use Keras layers, or step.seed(), which is new in each step",
        self._place(fixed, ("seed=", "stateless_")),
      )  # fmt: skip
    if not self.by_step:
      return _skipped(name, "the random numbers do not change the update")
    return _passed(name, "the next step, from the same weights on the same rows, gives another")

  def _between_replicas(self, name: str) -> Result:
    if not self.by_step or self.watched.all_fixed:
      return _skipped(name, "steps draw no other numbers")
    if self.by_replica:
      return _passed(name, "two replicas draw different numbers for the same rows")
    if self.by_example:
      return _passed(name, "random numbers depend on the example's id, not on the replica")
    if not self._for_rows():
      return _skipped(name, "no numbers are drawn for each row")
    return _failed(
      name, "two replicas draw the same numbers on their rows", "a seed without the replica",
      "use Keras layers, or step.seed(), which also depends on the replica",
      self._place([d for d in self.watched.draws if not d.by_keras], ("seed", "stateless_")),
    )  # fmt: skip

  def _for_rows(self) -> bool:
    """Whether a draw, not from a constant seed, has numbers for each row."""
    rows = (self.rows, self.rows // self.bench.subject.accumulation_steps, None)
    return any(
      draw.by_keras or (draw.shape and draw.shape[0] in rows)
      for draw in self.watched.draws
      if not draw.fixed
    )

  def active(self) -> Result:
    """Checks that the random layers draw in a training step."""
    name, layers = "dropout is active", self._random_layers
    if not layers:
      return _skipped(name, "the model has no random layer")
    if any(draw.by_keras for draw in self.watched.draws):
      return _passed(name, ", ".join(layers))
    return _failed(
      name, f"no layer draws in a training step, although the model has {', '.join(layers)}",
      "layer called without training",
      "pass training on: self.model(x, training=training); without it, Keras layers behave as in "
      "evaluation",
      source_lines.find(
        self.task, *METHODS, containing=("self.model(", "self.model[", "training=False"),
      ),
    )  # fmt: skip

  def evaluation(self) -> Result:
    """Checks that the same batch gives the same metrics when evaluated twice."""
    name = "evaluation draws nothing"
    source, why = survey.eval_source(self.task)
    if source is None:
      return _skipped(name, why)
    try:
      rows = self.bench.subject.rows(self.task, 2 * self.rows, training=False)
    except Exception as error:
      if not survey.of_training(error):
        raise
      return _skipped(name, "preprocess() fails in evaluation")
    self.bench.assign(self._start)
    evaluator = configurables.configured(Evaluator)(
      task=self.task, strategy=self.bench.strategy, dataset=tf.data.Dataset.from_tensors(rows)
    )
    with random_draws.watch(self.task) as watched:
      once = numbers(evaluator.evaluate())
    twice = numbers(evaluator.evaluate())
    different = [key for key in once if not _close(once[key], twice[key])]
    if not different:
      return _passed(name, f"the same {', '.join(once)} again")
    key = different[0]
    stateful = [draw for draw in watched.stateful if not draw.by_keras]
    return _failed(
      name, f"{key} is {once[key]:.6g}, and {twice[key]:.6g} for the same batch again",
      *(
        (STATEFUL, STATELESS)
        if stateful and not self._random_layers
        else (
          "dropout active in evaluation",
          "pass training on, which is False in eval_step(): self.model(x, training=training)",
        )
      ),
      _place(
        self.task, stateful or watched.draws, ("forward", "eval_step"), ("training=True", "dropout")
      ),
    )  # fmt: skip

  def _step(self, step: int, *, apart: bool = True, first_id: int = 0) -> Outcome:
    self.bench.assign(self._start)
    self.bench.trainer.global_step.assign(step)
    self._apart.assign(int(apart))
    ids = self._batch["example_id"] + first_id
    return self.bench.step({**self._batch, "example_id": ids})

  def _same(self, one: Outcome, other: Outcome) -> bool:
    """Whether updates and logged values of two steps are equal except for rounding."""
    for replica in range(self.bench.replicas):
      for mine, yours in zip(one.update(replica), other.update(replica), strict=True):
        size = np.linalg.norm(np.nan_to_num(yours))
        if np.linalg.norm(np.nan_to_num(mine - yours)) > ROUNDING * size:
          return False
    return all(_close(value, other.metrics[key]) for key, value in one.metrics.items())

  def _place(self, found: list[Draw], words: tuple[str, ...]) -> str:
    return _place(self.task, found, METHODS, words)


def random_layers(model: Any) -> list[str]:
  """Returns the names of a model's layers that draw random numbers in training.

  A frozen model, such as a teacher, must behave as in evaluation, so its layers do not count.
  """
  found = []
  for part in models.parts(model):
    if not models.is_keras(part) or not part.trainable:
      continue
    for layer in part._flatten_layers():
      named = any(word in type(layer).__name__ for word in LAYERS)
      rates = ("rate", "stddev") if named else ("dropout", "recurrent_dropout")
      amounts = [getattr(layer, name, None) for name in rates]
      if any(isinstance(amount, (int, float)) and amount > 0 for amount in amounts):
        found.append(layer.name)
  return found


# ---- preprocess() ----


class Augmentation:
  """preprocess() on the same rows, with the seeds of two epochs and without seeds."""

  def __init__(self, subject: Subject, task: Task) -> None:
    """Keeps its arguments."""
    self.subject, self.task = subject, task

  def results(self) -> Iterator[Result]:
    """Checks that augmentation repeats with its seed, differs between epochs, not in evaluation."""
    names = (
      "augmentation repeats with the seed",
      "augmentation differs between epochs",
      "no augmentation in evaluation",
    )
    if type(self.task).preprocess is Task.preprocess:
      for name in names:
        yield _skipped(name, "no preprocess()")
      return
    yield from self._training(names)
    yield self._evaluation(names[2])

  def _training(self, names: tuple[str, ...]) -> Iterator[Result]:
    first, second = self._rows()
    renumbered = {**first, "example_id": first["example_id"] + 1}
    with random_draws.watch(self.task) as watched:
      once, again, later, others = self._preprocessed([first, first, second, renumbered], True)
    [afresh] = self._preprocessed([first], True)
    stateful, frozen = survey.apart(once, again), survey.apart(once, afresh)
    changed = survey.apart(once, later)
    if stateful:
      yield self._stateful(names[0], stateful, watched)
      yield _skipped(names[1], f"{names[0]!r} fails")
    elif frozen or (watched.in_python and not changed):
      yield _skipped(names[0], f"{names[1]!r} fails")
      yield self._frozen(names[1], watched)
    elif changed:
      yield _passed(names[0], "bit for bit, also when traced again")
      yield _passed(names[1], f"{changed!r} of the same examples differs")
    elif watched.draws and not survey.apart(once, others) and watched.fixed(len(first["weight"])):
      yield _skipped(names[0], f"{names[1]!r} fails")
      yield self._fixed(names[1], watched.fixed(len(first["weight"])))
    else:
      why = "preprocess() adds nothing random when training"
      if watched.draws:
        why = "what preprocess() draws is the same for an example in all epochs"
      yield _skipped(names[0], why)
      yield _skipped(names[1], why)

  def _stateful(self, name: str, feature: str, watched: Watched) -> Result:
    return _failed(
      name,
      f"{feature!r} differs for the same examples with the same seeds{_listed(watched.stateful)}",
      STATEFUL,
      f"{BY_SEED}: ops with their own state give other numbers after a restart",
      self._place(
        watched.stateful or watched.draws, ("tf.random.", "random_", "np.random", "random.")
      ),
    )

  def _frozen(self, name: str, watched: Watched) -> Result:
    return _failed(
      name, "numbers are drawn in Python while preprocess() is traced: all examples get the same "
      "ones, in all epochs", FROZEN, ONCE + BY_SEED,
      self._place([], ("np.random", "default_rng", "random.")),
    )  # fmt: skip

  def _fixed(self, name: str, fixed: list[Draw]) -> Result:
    return _failed(
      name, f"the same numbers are drawn in all batches{_listed(fixed)}", FIXED, BY_SEED,
      self._place(fixed, ("seed=", "stateless_")),
    )  # fmt: skip

  def _evaluation(self, name: str) -> Result:
    source, why = survey.eval_source(self.task)
    if source is None:
      return _skipped(name, why)
    count = min(16, source.num_examples or 16)
    batches = datasets.eval_dataset(source, global_batch_size=count, steps=self.subject.eval_steps)
    rows = next(batches.as_numpy_iterator())
    backwards = {key: value[::-1] for key, value in rows.items()}
    place = ("random", "augment", "flip", "noise", "seed")
    try:
      with random_draws.watch(self.task) as watched:
        once, again, turned = self._preprocessed([rows, rows, backwards], False)
      [afresh] = self._preprocessed([rows], False)
    except Exception as error:
      if not (feature := survey.of_training(error)):
        raise
      return _failed(
        name,
        f"preprocess(batch, training=False) reads batch['{feature}'], which only training has",
        "augmentation in evaluation", f"augment, and use batch['{feature}'], only `if training:`",
        self._place([], (f'"{feature}"', f"'{feature}'")),
      )  # fmt: skip
    turned = {key: value[::-1] for key, value in turned.items()}
    by_place = survey.apart(once, turned) if watched.fixed(count) else ""
    different = survey.apart(once, again) or survey.apart(once, afresh) or by_place
    if not different:
      return _passed(name, f"{count} examples, bit for bit")
    how = "depends on its place in the batch" if by_place else "differs each time"
    return _failed(
      name, f"{different!r} of the same example {how}{_listed(watched.draws)}",
      "augmentation in evaluation", "augment only `if training:`",
      self._place(watched.draws, place),
    )  # fmt: skip

  def _rows(self) -> tuple[Rows, Rows]:
    """Returns the same rows as two epochs have them, before preprocess()."""
    source = of_one_shape(self.task.source("train"))
    examples = main_source(source).num_examples
    count = min(16, examples or 16)
    batches = datasets.train_dataset(source, global_batch_size=count, seed=self.subject.seed)
    rows = next(batches.as_numpy_iterator())
    rows = {**rows, "step": np.zeros(count, np.int64)}
    return rows | self._seeds(rows, 0), rows | self._seeds(rows, examples or 1_000_000)

  def _seeds(self, rows: Rows, start: int) -> Rows:
    """Returns the seeds of these rows if their position is `start`."""
    made: Rows = {}
    for prefix in prefixes(rows):
      shape, seed = rows[f"{prefix}example_id"].shape, self.subject.seed
      if prefix:
        seed = ordering.seed_of_part(seed, prefix[:-1])
      first = start * math.prod(shape[1:])
      seeds = ordering.seeds_at(first + tf.range(math.prod(shape), dtype=tf.int64), seed=seed)
      made[f"{prefix}seed"] = seeds.numpy().reshape([*shape, 2])
    return made

  def _preprocessed(self, batches: list[Rows], training: bool) -> list[Rows]:
    made = survey.preprocessed(self.task.preprocess, batches, training)
    return [
      {
        key: value
        for key, value in rows.items()
        if key.rpartition("/")[2] not in ("seed", "step", "example_id")
      }
      for rows in made
    ]

  def _place(self, found: list[Draw], words: tuple[str, ...]) -> str:
    return _place(self.task, found, ("preprocess",), words)


def _place(task: Task, found: list[Draw], methods: tuple[str, ...], words: tuple[str, ...]) -> str:
  return found[0].place(task) if found else source_lines.find(task, *methods, containing=words)


def _listed(found: list[Draw]) -> str:
  return f" ({', '.join(dict.fromkeys(draw.op for draw in found))})" if found else ""


def _close(one: float, other: float) -> bool:
  return bool(np.isclose(one, other, rtol=ROUNDING, atol=0.0, equal_nan=True))


def _passed(check: str, detail: str) -> Result:
  return _result(check, "passed", detail)


def _skipped(check: str, why: str) -> Result:
  return _result(check, "not applicable", why)


def _failed(check: str, detail: str, cause: str, remedy: str, place: str) -> Result:
  return _result(check, "failed", detail, cause=cause, remedy=remedy, place=place)


def _result(check: str, status: Status, detail: str, **more: Any) -> Result:
  return Result(group=GROUP, check=check, status=status, detail=detail, **more)
