"""Random numbers of preprocess(), a part of the group "randomness".

It runs on the same rows with the seeds of two epochs, on equal rows, and in evaluation without
seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
ONE_SEED = "one seed for the whole batch"
EACH = (
  "draw for each row with its own seed: loopwright.graphs.randomness.draw_each, or tf.map_fn "
  "over batch['seed']; then a row is the same whatever its batch, its place and its worker"
)


class Augmentation:
  """preprocess() on the same rows, with the seeds of two epochs and without seeds."""

  def __init__(self, subject: Subject, task: Task) -> None:
    self.subject, self.task = subject, task

  def results(self) -> Iterator[Result]:
    """Checks that augmentation repeats with its seed, differs between epochs, not in evaluation."""
    names = (
      "augmentation repeats with the seed",
      "augmentation differs between epochs",
      "augmentation differs between examples",
      "no augmentation in evaluation",
    )
    if type(self.task).preprocess is Task.preprocess:
      for name in names:
        yield GROUP.skipped(name, "no preprocess()")
      return
    yield from self._training(names)
    yield self._evaluation(names[3])

  def _training(self, names: tuple[str, ...]) -> Iterator[Result]:
    rows, position = seeded_rows.of_training(self.subject, self.task)
    first, second = (
      seeded_rows.seeded(rows, self.subject, position=each) for each in (0, position)
    )
    renumbered = {**first, "example_id": first["example_id"] + 1}
    with random_draws.watch(self.task) as watched:
      once, again, later, others = self._preprocessed([first, first, second, renumbered])
    [afresh] = self._preprocessed([first])
    stateful, frozen = survey.apart(once, again), survey.apart(once, afresh)
    changed = survey.apart(once, later)
    if stateful:
      yield self._stateful(names[0], stateful, watched)
      yield from self._skipped(names[1:3], names[0])
    elif frozen or (watched.in_python and not changed):
      yield GROUP.skipped(names[0], f"{names[1]!r} fails")
      yield self._frozen(names[1], watched)
      yield GROUP.skipped(names[2], f"{names[1]!r} fails")
    elif changed:
      yield GROUP.passed(names[0], "bit for bit, also when traced again")
      yield GROUP.passed(names[1], f"{changed!r} of the same examples differs")
      yield self._of_each(names[2], first, watched)
    elif watched.draws and not survey.apart(once, others) and watched.fixed(len(first["weight"])):
      yield GROUP.skipped(names[0], f"{names[1]!r} fails")
      yield self._fixed(names[1], watched.fixed(len(first["weight"])))
      yield GROUP.skipped(names[2], f"{names[1]!r} fails")
    else:
      why = "preprocess() adds nothing random when training"
      if watched.draws:
        why = "what preprocess() draws is the same for an example in all epochs"
      yield GROUP.skipped(names[0], why)
      yield GROUP.skipped(names[1], why)
      yield (
        self._of_each(names[2], first, watched) if watched.draws else GROUP.skipped(names[2], why)
      )

  def _skipped(self, names: Sequence[str], failed: str) -> Iterator[Result]:
    for name in names:
      yield GROUP.skipped(name, f"{failed!r} fails")

  def _of_each(self, name: str, rows: Rows, watched: Watched) -> Result:
    """Checks that equal examples of a batch come out different, if those of other batches do."""
    equal = {
      key: value[np.zeros(len(value), np.int64)] if seeded_rows.is_data(key) else value
      for key, value in rows.items()
    }
    batches = [
      seeded_rows.seeded(equal, self.subject, position=1000 * each, step=each)
      for each in range(BATCHES)
    ]
    made = self._preprocessed(batches)
    alike = [not survey.apart(_turned(each), each) for each in made]
    if not all(alike) or len(rows["weight"]) < 2:
      return GROUP.passed(name, "equal examples of a batch come out different")
    if not any(survey.apart(each, made[0]) for each in made[1:]):
      return GROUP.skipped(name, "equal examples come out the same in all batches")
    return GROUP.failed(
      name, f"equal examples of a batch come out equal{listed(watched.draws)}, and "
      "different in another batch", ONE_SEED, EACH,
      self._place(watched.draws, ('"seed"][0]', "'seed'][0]", "seed", "step")),
    )  # fmt: skip

  def _stateful(self, name: str, feature: str, watched: Watched) -> Result:
    return GROUP.failed(
      name,
      f"{feature!r} differs for the same examples with the same seeds{listed(watched.stateful)}",
      STATEFUL,
      f"{BY_SEED}: ops with their own state give other numbers after a restart",
      self._place(
        watched.stateful or watched.draws, ("tf.random.", "random_", "np.random", "random.")
      ),
    )

  def _frozen(self, name: str, watched: Watched) -> Result:
    return GROUP.failed(
      name, "numbers are drawn in Python while preprocess() is traced: all examples get the same "
      "ones, in all epochs", FROZEN, ONCE + BY_SEED,
      self._place([], ("np.random", "default_rng", "random.")),
    )  # fmt: skip

  def _fixed(self, name: str, fixed: list[Draw]) -> Result:
    return GROUP.failed(
      name, f"the same numbers are drawn in all batches{listed(fixed)}", FIXED, BY_SEED,
      self._place(fixed, ("seed=", "stateless_")),
    )  # fmt: skip

  def _evaluation(self, name: str) -> Result:
    source, why = survey.eval_source(self.task)
    if source is None:
      return GROUP.skipped(name, why)
    count = min(16, source.num_examples or 16)
    batches = datasets.eval_dataset(source, global_batch_size=count, steps=self.subject.eval_steps)
    rows = next(batches.as_numpy_iterator())
    backwards = {key: value[::-1] for key, value in rows.items()}
    place = ("random", "augment", "flip", "noise", "seed")
    try:
      with random_draws.watch(self.task) as watched:
        once, again, turned = seeded_rows.preprocessed(self.task, [rows, rows, backwards], False)
      [afresh] = seeded_rows.preprocessed(self.task, [rows], False)
    except Exception as error:
      return of_training_alone(GROUP, name, self.task, error)
    turned = {key: value[::-1] for key, value in turned.items()}
    by_place = survey.apart(once, turned) if watched.fixed(count) else ""
    different = survey.apart(once, again) or survey.apart(once, afresh) or by_place
    if not different:
      return GROUP.passed(name, f"{count} examples, bit for bit")
    how = "depends on its place in the batch" if by_place else "differs each time"
    return GROUP.failed(
      name, f"{different!r} of the same example {how}{listed(watched.draws)}",
      "augmentation in evaluation", "augment only `if training:`",
      self._place(watched.draws, place),
    )  # fmt: skip

  def _preprocessed(self, batches: list[Rows]) -> list[Rows]:
    return seeded_rows.preprocessed(self.task, batches, True)

  def _place(self, found: list[Draw], words: tuple[str, ...]) -> str:
    return random_draws.place(self.task, found, ("preprocess",), words)


def of_training_alone(group: Group, check: str, task: Task, error: Exception) -> Result:
  """Returns the finding for a preprocess() that reads in evaluation what only training has.

  Raises:
    Exception: `error`, if it is another one.
  """
  if not (feature := survey.of_training(error)):
    raise error
  return group.failed(
    check, f"preprocess(batch, training=False) reads batch['{feature}'], which only training has",
    "augmentation in evaluation", f"augment, and use batch['{feature}'], only `if training:`",
    source_lines.find(task, "preprocess", containing=(f'"{feature}"', f"'{feature}'")),
  )  # fmt: skip


def _turned(rows: Rows) -> Rows:
  """Returns the rows, each in the place of the next."""
  return {name: np.roll(value, 1, axis=0) for name, value in rows.items()}
