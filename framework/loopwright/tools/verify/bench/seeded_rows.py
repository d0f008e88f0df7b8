"""Rows as preprocess() gets them in training, with the seeds of one epoch or another."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from loopwright.inputs import datasets, ordering
from loopwright.inputs.parts import prefixes
from loopwright.inputs.sources import main_source, of_one_shape
from loopwright.task import Task
from loopwright.tools.verify.bench import survey
from loopwright.tools.verify.bench.bench import Rows, Subject

ANOTHER_EPOCH = 1_000_000
OTHERS = 7
"""Examples to put in the place of the first: some may be of the same class."""


def of_training(subject: Subject, task: Task, *, most: int = 16) -> tuple[Rows, int]:
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
