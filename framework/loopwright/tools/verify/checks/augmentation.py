"""Random numbers of preprocess(), a part of the group "randomness".

It runs on the same rows with the seeds of two epochs, on equal rows, and in evaluation without
seeds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from loopwright.inputs import datasets
from loopwright.task import Task
from loopwright.tools.verify.bench import random_draws, seeded_rows, source_lines, survey
from loopwright.tools.verify.bench.bench import Rows, Subject
from loopwright.tools.verify.bench.random_draws import (
  FIXED,
  FROZEN,
  ONCE,
  STATEFUL,
  Draw,
  Watched,
  listed,
)
from loopwright.tools.verify.report import Group, Result

GROUP = Group("randomness")
BY_SEED = "use tf.random.stateless_* and tf.image.stateless_* with batch['seed']"
BATCHES = 8
"""Batches of equal examples: an augmentation may leave most examples as they are."""
IN_EVALUATION = "augmentation in evaluation"
ONE_SEED = "one seed for the whole batch"
EACH = (
  "draw for each row with its own seed: loopwright.graphs.randomness.draw_each, or tf.map_fn "
  "over batch['seed']; then a row is the same whatever its batch, its place and its worker"
)


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
  rows, position = seeded_rows.of_training(subject, task)
  first, second = (seeded_rows.seeded(rows, subject, position=each) for each in (0, position))
  renumbered = {**first, "example_id": first["example_id"] + 1}
  batches = [first, first, second, renumbered]
  with random_draws.watch(task) as watched:
    once, again, later, others = seeded_rows.preprocessed(task, batches, True)
  [afresh] = seeded_rows.preprocessed(task, [first], True)
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
    key: value[np.zeros(len(value), np.int64)] if seeded_rows.is_data(key) else value
    for key, value in rows.items()
  }
  batches = [
    seeded_rows.seeded(equal, subject, position=1000 * each, step=each) for each in range(BATCHES)
  ]
  made = seeded_rows.preprocessed(task, batches, True)
  alike = [not survey.apart(_turned(each), each) for each in made]
  if not all(alike) or len(rows["weight"]) < 2:
    return GROUP.passed(EXAMPLES, "equal examples of a batch come out different")
  if not any(survey.apart(each, made[0]) for each in made[1:]):
    return GROUP.skipped(EXAMPLES, "equal examples come out the same in all batches")
  told = f"equal examples of a batch come out equal{listed(watched.draws)}, and different in "
  words = ('"seed"][0]', "'seed'][0]", "seed", "step")
  place = _place(task, watched.draws, *words)
  return GROUP.failed(EXAMPLES, f"{told}another batch", ONE_SEED, EACH, place)


def _stateful(task: Task, feature: str, watched: Watched) -> Result:
  told = f"{feature!r} differs for the same examples with the same seeds{listed(watched.stateful)}"
  remedy = f"{BY_SEED}: ops with their own state give other numbers after a restart"
  words = ("tf.random.", "random_", "np.random", "random.")
  place = _place(task, watched.stateful or watched.draws, *words)
  return GROUP.failed(REPEATS, told, STATEFUL, remedy, place)


def _frozen(task: Task) -> Result:
  told = (
    "numbers are drawn in Python while preprocess() is traced: all examples get the same ones, "
  )
  place = _place(task, [], "np.random", "default_rng", "random.")
  return GROUP.failed(EPOCHS, f"{told}in all epochs", FROZEN, ONCE + BY_SEED, place)


def _fixed(task: Task, fixed: list[Draw]) -> Result:
  told = f"the same numbers are drawn in all batches{listed(fixed)}"
  return GROUP.failed(EPOCHS, told, FIXED, BY_SEED, _place(task, fixed, "seed=", "stateless_"))


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
      once, again, turned = seeded_rows.preprocessed(task, [rows, rows, backwards], False)
    [afresh] = seeded_rows.preprocessed(task, [rows], False)
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
  return GROUP.failed(EVALUATION, told, IN_EVALUATION, "augment only `if training:`", place)


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
  remedy = f"augment, and use batch['{feature}'], only `if training:`"
  place = source_lines.find(task, "preprocess", containing=(f'"{feature}"', f"'{feature}'"))
  return group.failed(check, told, IN_EVALUATION, remedy, place)


def _turned(rows: Rows) -> Rows:
  """Returns the rows, each in the place of the next."""
  return {name: np.roll(value, 1, axis=0) for name, value in rows.items()}
