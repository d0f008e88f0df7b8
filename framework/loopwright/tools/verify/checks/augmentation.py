"""Random numbers of preprocess(), a part of the group "randomness".

It runs on the same rows with the seeds of two epochs, on equal rows, and in evaluation without
seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from loopwright.inputs import datasets, ordering
from loopwright.inputs.parts import prefixes
from loopwright.inputs.sources import main_source, of_one_shape
from loopwright.task import Task
from loopwright.tools.verify.bench import random_draws, source_lines, survey
from loopwright.tools.verify.bench.bench import Rows, Subject
from loopwright.tools.verify.bench.random_draws import Draw, Watched, listed
from loopwright.tools.verify.report import Group, Result

GROUP = Group("randomness")
BATCHES = 8
"""Batches of equal examples: an augmentation may leave most examples as they are."""
IN_EVALUATION = "augmentation in evaluation"
ONE_SEED = "one seed for the whole batch"
ANOTHER_EPOCH = 1_000_000
OTHERS = 7
"""Examples to put in the place of the first: some may be of the same class."""
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
  batches = [first, first, second, renumbered]
  with random_draws.watch(task) as watched:
    once, again, later, others = preprocessed(task, batches, True)
  [afresh] = preprocessed(task, [first], True)
  changed = survey.apart(once, later)
  frozen = survey.apart(once, afresh) or (watched.in_python and not changed)
  same = watched.draws and not changed and not survey.apart(once, others)
  fixed = watched.fixed(len(first["weight"])) if same else []
  if stateful := survey.apart(once, again):
    yield _stateful(task, stateful, watched)
    yield from (GROUP.skipped(name, f"{REPEATS!r} fails") for name in (EPOCHS, EXAMPLES))
  elif frozen or fixed:
    yield GROUP.skipped(REPEATS, f"{EPOCHS!r} fails")
    yield _frozen(task) if frozen else _fixed(task, fixed)
    yield GROUP.skipped(EXAMPLES, f"{EPOCHS!r} fails")
  elif changed:
    yield GROUP.passed(REPEATS, "bit for bit, also when traced again")
    yield GROUP.passed(EPOCHS, f"{changed!r} of the same examples differs")
    yield _of_each(subject, task, first, watched)
  else:
    why = "preprocess() adds nothing random when training"
    if watched.draws:
      why = "what preprocess() draws is the same for an example in all epochs"
    yield from (GROUP.skipped(name, why) for name in (REPEATS, EPOCHS))
    drawn = watched.draws
    yield _of_each(subject, task, first, watched) if drawn else GROUP.skipped(EXAMPLES, why)


def _of_each(subject: Subject, task: Task, rows: Rows, watched: Watched) -> Result:
  """Checks that equal examples of a batch come out different, if those of other batches do."""
  equal = {
    key: value[np.zeros(len(value), np.int64)] if is_data(key) else value
    for key, value in rows.items()
  }
  batches = [seeded(equal, subject, position=1000 * each, step=each) for each in range(BATCHES)]
  made = preprocessed(task, batches, True)
  alike = [not survey.apart(_turned(each), each) for each in made]
  if not all(alike) or len(rows["weight"]) < 2:
    return GROUP.passed(EXAMPLES, "equal examples of a batch come out different")
  if not any(survey.apart(each, made[0]) for each in made[1:]):
    return GROUP.skipped(EXAMPLES, "equal examples come out the same in all batches")
  told = f"equal examples of a batch come out equal{listed(watched.draws)}, and different in "
  words = ('"seed"][0]', "'seed'][0]", "seed", "step")
  place = _place(task, watched.draws, *words)
  return GROUP.failed(EXAMPLES, f"{told}another batch", ONE_SEED, place)


def _stateful(task: Task, feature: str, watched: Watched) -> Result:
  told = f"{feature!r} differs for the same examples with the same seeds{listed(watched.stateful)}"
  words = ("tf.random.", "random_", "np.random", "random.")
  place = _place(task, watched.stateful or watched.draws, *words)
  return GROUP.failed(REPEATS, told, random_draws.STATEFUL, place)


def _frozen(task: Task) -> Result:
  told = "numbers drawn in Python while preprocess() is traced are the same for all examples"
  place = _place(task, [], "np.random", "default_rng", "random.")
  return GROUP.failed(EPOCHS, told, random_draws.FROZEN, place)


def _fixed(task: Task, fixed: list[Draw]) -> Result:
  told = f"the same numbers are drawn in all batches{listed(fixed)}"
  return GROUP.failed(EPOCHS, told, random_draws.FIXED, _place(task, fixed, "seed=", "stateless_"))


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
    return of_training_alone(GROUP, EVALUATION, task, error)
  turned = {key: value[::-1] for key, value in turned.items()}
  by_place = survey.apart(once, turned) if watched.fixed(count) else ""
  different = survey.apart(once, again) or survey.apart(once, afresh) or by_place
  if not different:
    return GROUP.passed(EVALUATION, f"{count} examples, bit for bit")
  how = "depends on its place in the batch" if by_place else "differs each time"
  told = f"{different!r} of the same example {how}{listed(watched.draws)}"
  place = _place(task, watched.draws, "random", "augment", "flip", "noise", "seed")
  return GROUP.failed(EVALUATION, told, IN_EVALUATION, place)


def _place(task: Task, found: list[Draw], *words: str) -> str:
  return random_draws.place(task, found, ("preprocess",), words)


def of_training_alone(group: Group, check: str, task: Task, error: Exception) -> Result:
  """Returns the finding for a preprocess() that reads in evaluation what only training has.

  Raises:
    Exception: `error`, if it is another one.
  """
  if not (feature := survey.of_training(error)):
    raise error
  told = f"preprocess(batch, training=False) reads batch['{feature}'], which only training has"
  place = source_lines.find(task, "preprocess", containing=(f'"{feature}"', f"'{feature}'"))
  return group.failed(check, told, IN_EVALUATION, place)


def _turned(rows: Rows) -> Rows:
  """Returns the rows, each in the place of the next."""
  return {name: np.roll(value, 1, axis=0) for name, value in rows.items()}


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


def is_data(name: str) -> bool:
  """Whether a feature belongs to the example, rather than to its place in training."""
  return name.rpartition("/")[2] not in ("seed", "step", "example_id")


def preprocessed(task: Task, batches: list[Rows], training: bool) -> list[Rows]:
  """Returns what preprocess() makes of the examples of some batches of one shape."""
  made = survey.preprocessed(task.preprocess, batches, training)
  return [{key: value for key, value in rows.items() if is_data(key)} for rows in made]


def dependence(task: Task, rows: Rows) -> tuple[str, str] | None:
  """Returns a feature of an example that depends on another example, and on what of it.

  Args:
    task: with a preprocess().
    rows: seeded.

  Returns:
    (feature, "contents" or "seed"); None if only the example's own counts, or if it is random.
  """
  count = len(rows["weight"])
  if count < 2:
    return None

  def with_first(names: list[str], other: int, of: Rows) -> Rows:
    return {**rows, **{n: np.concatenate([of[n][other:][:1], rows[n][1:]]) for n in names}}

  contents = [name for name in rows if is_data(name) and name != "weight"]
  seeds = [name for name in rows if name.rpartition("/")[2] == "seed"]
  others = range(1, min(count, 1 + OTHERS))
  changed = [with_first(contents, other, rows) for other in others]
  by_seed = with_first(seeds, 0, {name: rows[name] + 1 for name in seeds})
  made = preprocessed(task, [rows, rows, by_seed, *changed], True)
  once, again, of_seed, *of_contents = [{n: v[1:] for n, v in each.items()} for each in made]
  if survey.apart(once, again):
    return None
  for each in of_contents:
    if feature := survey.apart(once, each, tolerance=1e-5):
      return feature, "contents"
  feature = survey.apart(once, of_seed, tolerance=1e-5)
  return (feature, "seed") if feature else None
