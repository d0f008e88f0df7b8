"""Random numbers of preprocess(), a part of the group "randomness".

It runs on the same rows with the seeds of two epochs, on equal rows, and in evaluation without
seeds.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from loopwright.graphs.autograph import as_written, converted
from loopwright.host import failures
from loopwright.inputs import datasets, ordering
from loopwright.inputs.parts import prefixes
from loopwright.inputs.sources import main_source, of_one_shape
from loopwright.task import Task
from loopwright.tools.verify.bench import random_draws, source_lines, survey
from loopwright.tools.verify.bench.bench import Rows, Subject
from loopwright.tools.verify.bench.random_draws import Draw, listed
from loopwright.tools.verify.report import Group, Result

GROUP = Group("randomness")
BATCHES = 8
"""Batches of equal examples: an augmentation may leave most examples as they are."""
ANOTHER_EPOCH = 1_000_000
IN_EVALUATION, ONE_SEED = "augmentation in evaluation", "one seed for the whole batch"
NAMES = (
  "augmentation repeats with the seed", "augmentation differs between epochs",
  "augmentation differs between examples", "no augmentation in evaluation",
)  # fmt: skip
REPEATS, EPOCHS, EXAMPLES, EVALUATION = NAMES


def results(subject: Subject, task: Task) -> Iterator[Result]:
  """Checks that augmentation repeats with its seed, differs between epochs, not in evaluation."""
  if type(task).preprocess is Task.preprocess:
    yield from (GROUP.skipped(name, "no preprocess()") for name in NAMES)
    return
  yield from _training(subject, task)
  yield _evaluation(subject, task)


def _training(subject: Subject, task: Task) -> Iterator[Result]:
  rows, position = rows_of_training(subject, task)
  first, second = (seeded(rows, subject, position=each) for each in (0, position))
  renumbered = {**first, "example_id": first["example_id"] + 1}
  with random_draws.watch(task) as watched:
    made = preprocessed(task, [first, first, second, renumbered], True)
  once, again, later, others = made
  [afresh] = preprocessed(task, [first], True)
  changed, drawn = survey.apart(once, later), watched.draws
  in_python = survey.apart(once, afresh) or (watched.in_python and not changed)
  same = drawn and not changed and not survey.apart(once, others)
  fixed = watched.fixed(len(first["weight"])) if same else []
  if stateful := survey.apart(once, again):
    of = watched.stateful or drawn
    told = f"{stateful!r} differs for the same examples with the same seeds"
    place = _place(subject, task, of, stateful)
    yield GROUP.failed(REPEATS, told + listed(watched.stateful), random_draws.STATEFUL, place)
    yield from (GROUP.skipped(name, f"{REPEATS!r} fails") for name in (EPOCHS, EXAMPLES))
  elif in_python or fixed:
    yield GROUP.skipped(REPEATS, f"{EPOCHS!r} fails")
    if in_python:
      told = "numbers drawn in Python while preprocess() is traced are the same for all examples"
      cause = random_draws.FROZEN
      place = watched.python_place or source_lines.method(task, "preprocess")
    else:
      told = f"the same numbers are drawn in all batches{listed(fixed)}"
      cause, place = random_draws.FIXED, fixed[0].place
    yield GROUP.failed(EPOCHS, told, cause, place)
    yield GROUP.skipped(EXAMPLES, f"{EPOCHS!r} fails")
  elif changed:
    yield GROUP.passed(REPEATS, "bit for bit, also when traced again")
    yield GROUP.passed(EPOCHS, f"{changed!r} of the same examples differs")
    yield _of_each(subject, task, first, drawn)
  else:
    why = "preprocess() adds nothing random when training"
    if drawn:
      why = "what preprocess() draws is the same for an example in all epochs"
    yield from (GROUP.skipped(name, why) for name in (REPEATS, EPOCHS))
    yield _of_each(subject, task, first, drawn) if drawn else GROUP.skipped(EXAMPLES, why)


def _of_each(subject: Subject, task: Task, rows: Rows, drawn: list[Draw]) -> Result:
  """Checks that equal examples of a batch come out different, if those of other batches do."""
  equal = _alike(rows)
  batches = [seeded(equal, subject, position=1000 * each, step=each) for each in range(BATCHES)]
  made = preprocessed(task, batches, True)
  turned = ({name: np.roll(value, 1, axis=0) for name, value in each.items()} for each in made)
  apart = [survey.apart(*pair) for pair in zip(made, turned, strict=True)]
  if any(apart) or len(rows["weight"]) < 2:
    return GROUP.passed(EXAMPLES, "equal examples of a batch come out different")
  feature = next(filter(None, (survey.apart(each, made[0]) for each in made)), "")
  if not feature:
    return GROUP.skipped(EXAMPLES, "equal examples come out the same in all batches")
  told = f"equal examples of a batch come out equal{listed(drawn)}, and different in another batch"
  return GROUP.failed(EXAMPLES, told, ONE_SEED, _place(subject, task, drawn, feature))


def _evaluation(subject: Subject, task: Task) -> Result:
  source, why = survey.eval_source(task)
  if source is None:
    return GROUP.skipped(EVALUATION, why)
  count = min(16, source.num_examples or 16)
  batches = datasets.eval_dataset(source, global_batch_size=count, steps=subject.eval_steps)
  rows = next(batches.as_numpy_iterator())
  backwards = {key: value[::-1] for key, value in rows.items()}
  try:
    with random_draws.watch(task) as watched:
      once, again, turned = preprocessed(task, [rows, rows, backwards], False)
    [afresh] = preprocessed(task, [rows], False)
  except Exception as error:
    if not (feature := survey.of_training(error)):
      raise
    told = f"preprocess(batch, training=False) reads batch['{feature}'], which only training has"
    place = source_lines.qualified(failures.place_of(error), task)
    return GROUP.failed(EVALUATION, told, IN_EVALUATION, place)
  turned = {key: value[::-1] for key, value in turned.items()}
  by_place = survey.apart(once, turned) if watched.fixed(count) else ""
  different = survey.apart(once, again) or survey.apart(once, afresh) or by_place
  if not different:
    return GROUP.passed(EVALUATION, f"{count} examples, bit for bit")
  how = "depends on its place in the batch" if by_place else "differs each time"
  told = f"{different!r} of the same example {how}{listed(watched.draws)}"
  place = _place(subject, task, watched.draws, different, training=False)
  return GROUP.failed(EVALUATION, told, IN_EVALUATION, place)


def _place(
  subject: Subject, task: Task, drawn: list[Draw], feature: str, *, training: bool = True
) -> str:
  return drawn[0].place if drawn else line(subject, task, feature, training=training)


def line(subject: Subject, task: Task, feature: str, *, training: bool = True) -> str:
  """Returns the user's line in preprocess() that makes a feature; source() if that does."""
  made: dict[str, tf.Tensor] = {}

  @as_written
  def traced(batch: dict[str, tf.Tensor]) -> int:
    made.update(converted(task.preprocess)(dict(batch), training))
    return 0

  with contextlib.suppress(Exception):  # without preprocess(), or without what training has
    rows = seeded(rows_of_training(subject, task)[0], subject)
    tf.data.Dataset.from_tensors(rows).map(traced)
  place = source_lines.made_at(made.get(feature, []), task)
  return place or source_lines.method(task, "source")


# ---- Rows as preprocess() gets them ----


def rows_of_training(subject: Subject, task: Task, *, most: int = 16) -> tuple[Rows, int]:
  """Returns the first rows of training, without seeds, and the position of the next epoch."""
  source = of_one_shape(task.source("train"))
  examples = main_source(source).num_examples
  count = min(most, examples or most)
  batches = datasets.train_dataset(source, global_batch_size=count, seed=subject.seed)
  return next(batches.as_numpy_iterator()), examples or ANOTHER_EPOCH


def seeded(rows: Rows, subject: Subject, *, position: int = 0, step: int = 0) -> Rows:
  """Returns the rows with the seeds that they have at a position, and the number of a step."""
  made: Rows = {**rows, "step": np.full(len(rows["weight"]), step, np.int64)}
  for prefix in prefixes(rows):
    shape, seed = rows[f"{prefix}example_id"].shape, subject.seed
    if prefix:
      seed = ordering.seed_of_part(seed, prefix[:-1])
    first = position * math.prod(shape[1:])
    seeds = ordering.seeds_at(first + tf.range(math.prod(shape), dtype=tf.int64), seed=seed)
    made[f"{prefix}seed"] = seeds.numpy().reshape([*shape, 2])
  return made


def preprocessed(task: Task, batches: list[Rows], training: bool) -> list[Rows]:
  """Returns what preprocess() makes of the examples of some batches of one shape."""
  made = survey.preprocessed(task.preprocess, batches, training)
  return [{key: value for key, value in rows.items() if _is_data(key)} for rows in made]


def mixed(task: Task, rows: Rows) -> str:
  """Returns a feature of the first row that depends on the contents of others; "" if none does."""
  once, again, alike = preprocessed(task, [rows, rows, _alike(rows)], True)
  once, again, alike = ({n: v[:1] for n, v in each.items()} for each in (once, again, alike))
  return "" if survey.apart(once, again) else survey.apart(once, alike, tolerance=1e-5)


def _alike(rows: Rows) -> Rows:
  """Returns the rows with the contents of the first in all, and the seed of each."""
  return {n: v[np.zeros(len(v), np.int64)] if _is_data(n) else v for n, v in rows.items()}


def _is_data(name: str) -> bool:
  """Whether a feature belongs to the example, rather than to its place in training."""
  return name.rpartition("/")[2] not in ("seed", "step", "example_id")
