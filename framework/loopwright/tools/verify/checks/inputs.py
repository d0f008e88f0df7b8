"""What the step reads: each example once, none in both splits, valid numbers.

Sources and the training pipeline are read for a few seconds each; larger ones are sampled, and the
result says so. Where possible, the task itself decides whether a number is a mistake: a label is
out of range if the loss cannot use it, a feature is not scaled if the first loss shows it.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.graphs import randomness
from loopwright.inputs import datasets
from loopwright.inputs.buckets import Buckets
from loopwright.inputs.plan import padded_batch_size
from loopwright.inputs.sources import main_source, of_one_shape
from loopwright.inputs.streams import StreamSource
from loopwright.task import preprocess_of
from loopwright.tools.verify.bench import random_draws, source_lines, survey
from loopwright.tools.verify.bench.bench import Bench, Rows, Subject
from loopwright.tools.verify.bench.survey import Survey
from loopwright.tools.verify.checks import augmentation
from loopwright.tools.verify.checks.contents import GROUP, Contents
from loopwright.tools.verify.report import Result

READ_S = 3.0
"""Seconds to read each source, and the pipeline."""
LEAKED = 0.01
"""A smaller share of evaluation examples that are also in training counts as chance."""
COPIED = 0.2
"""So many equal examples are no chance if their numbers are measured; some data have copies."""
NUMBERS = "preprocess() numbers examples itself"
MIXES = "preprocess() mixes rows"
DROPS = "preprocess() repeats or drops examples"


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  reading = Reading(subject)
  return [
    reading.repeats(),
    *reading.each_set(reading.overlap),
    *reading.pipeline(),
    *reading.each_set(reading.any_batch_size),
    *Contents(reading).results(),
  ]


class Reading:
  """A task's sources and pipelines, and what was read from them."""

  def __init__(self, subject: Subject) -> None:
    """Makes the task and both sources, in the same order as a run."""
    self.subject = subject
    self.bench_rows = padded_batch_size(subject.global_batch_size, subject.accumulation_steps)
    self.bench = Bench(subject, rows=self.bench_rows, quiet=False)
    self.task = self.bench.task
    randomness.seed_everything(subject.seed)
    self.eval_sources, self.no_eval = survey.evaluation_sources(self.task)
    given = self.task.source("train")
    self.sources_read = of_one_shape(given)
    self.source = main_source(self.sources_read)
    self.preprocess = preprocess_of(self.task)
    self.train = survey.digests(self.source, seconds=READ_S)
    self._read_contents(given)
    self.batch_size = min(subject.global_batch_size, self.train.total or survey.AT_ONCE)

  def batches(self, *, afresh: bool = False, **options: Any) -> tf.data.Dataset:
    """Returns training batches as the run reads them, except `options`; `afresh`: a new source."""
    arguments = {
      "global_batch_size": self.batch_size, "seed": self.subject.seed,
      "preprocess": self.preprocess, "shuffle": self.subject.shuffle, **options,
    }  # fmt: skip
    stream = afresh and isinstance(self.source, StreamSource)
    source = of_one_shape(self.task.source("train")) if stream else self.sources_read
    return datasets.train_dataset(source, **arguments)

  def each_set(self, check: Callable[[str], Result]) -> Iterator[Result]:
    """Yields the result of a check of each evaluation set, named by the set if it has a name."""
    for set_name in self.eval_sources or [""]:
      result = check(set_name)
      suffix = f" ({set_name})" if set_name else ""
      yield dataclasses.replace(result, check=f"{result.check}{suffix}")

  def _read_contents(self, given: Any) -> None:
    """Reads examples of all lengths, without what only numbers them."""
    train = survey.of_all_lengths(given) if isinstance(given, Buckets) else self.source
    sets, _ = survey.evaluation_sources(self.task, survey.of_all_lengths)
    self.numbers = survey.numbering(train).union(*map(survey.numbering, sets.values()))
    reads: dict[str, Any] = {"seconds": READ_S, "without": self.numbers}
    again = self.numbers or isinstance(given, Buckets)
    self.train_data = survey.digests(train, **reads) if again else self.train
    self.eval_data = {name: survey.digests(each, **reads) for name, each in sets.items()}

  def _failed(self, name: str, told: str, cause: str, feature: str = "example_id") -> Result:
    place = augmentation.line(self.subject, self.task, feature)
    return GROUP.failed(name, told, cause, place)

  # ---- Sources ----

  def repeats(self) -> Result:
    """Checks that each call of source() and of fetch() gives the same examples."""
    name = "source() repeats"
    again = main_source(self.task.source("train"))
    if isinstance(self.source, StreamSource) or isinstance(again, StreamSource):
      return GROUP.skipped(name, "a stream has its own order")
    ids = list(self.train.by_id)[:16]
    fetched, first = survey.fetched_alone(again, ids), {i: self.train.by_id[i] for i in ids}
    if fetched == first and again.num_examples == self.source.num_examples:
      return GROUP.passed(name, f"{self.source.num_examples} examples, the same when asked again")
    alone = survey.fetched_alone(self.source, ids)
    if alone == first:
      told = "a second call of source('train') gives other examples"
      place = source_lines.method(self.task, "source")
      return GROUP.failed(name, told, "source() is random", place)
    repeated = survey.fetched_alone(self.source, ids) == alone
    told = f"{type(self.source).__name__}.fetch gives another example {ids[0]}"
    told += " alone than among others" if repeated else " each time"
    cause = "fetch() mixes up its rows" if repeated else "fetch() is random"
    return GROUP.failed(name, told, cause, source_lines.method(self.source, "fetch"))

  def overlap(self, of: str) -> Result:
    """Finds evaluation examples that are also in training, by content."""
    name = "train and eval apart"
    train, held_out = self.train_data, self.eval_data.get(of, survey.NO_DIGESTS)
    if not held_out.by_id:
      told = f"examples are only numbers ({', '.join(sorted(self.numbers))})"
      why = self.no_eval or (told if self.numbers else "source('eval') has no examples")
      return GROUP.skipped(name, why)
    train_ids = {content: i for i, content in reversed(train.by_id.items())}
    both = [(train_ids[c], i) for i, c in held_out.by_id.items() if c in train_ids]
    shared, repeated = len(both), len(train.by_id) - len(train_ids)
    told = f"{len(held_out.by_id)} eval in {len(train.by_id)} train examples"
    told += "" if train.complete and held_out.complete else " (a sample)"
    told += f"; {repeated} repeated inside train" if repeated else ""
    if not shared:
      return GROUP.passed(name, f"none of {told}")
    first = f"eval {both[0][1]} is train {both[0][0]}"
    part = min(1.0, shared / (len(held_out.by_id) * train.share))
    copied = train.measured and part > COPIED
    if not copied and not _leaked(shared, part, survey.chance(train, held_out)):
      told = f"{shared} of {told}, too few to be more than chance: {first}"
      return GROUP.passed(name, told)
    cause = "source() ignores the split" if part > 0.95 else "train and eval overlap"
    place = source_lines.method(self.task, "source")
    return GROUP.failed(name, f"{shared} of {told}; {first}", cause, place)

  # ---- Pipelines ----

  def pipeline(self) -> Iterator[Result]:
    """Checks that preprocess() keeps all examples of an epoch, also on several workers."""
    batches: Any = self.batches()
    if total := self.train.total:
      batches = batches.take(-(-total // self.batch_size))
    self.survey = Survey().read(batches.as_numpy_iterator(), seconds=READ_S)
    once = self._once()
    yield once
    if once.status == "passed":
      yield self._workers()

  def _once(self) -> Result:
    name, counts = "each example once", self.survey.counts
    plain = self.batches(preprocess=None).take(self.survey.batches).as_numpy_iterator()
    ids = [batch["example_id"].tolist() for batch in plain]
    given = collections.Counter(i for batch in ids for i in batch if i >= 0)
    if counts == given:
      whole = self.train.complete and given.keys() >= self.train.by_id.keys()
      told = f"{'an epoch' if whole else 'a sample'} of {len(given)} examples"
      return GROUP.passed(name, told)
    worst = max(counts, key=lambda each: counts[each] - given[each])
    missing = sorted(given.keys() - counts.keys())
    told = f"example {worst} comes {counts[worst]} times"
    told += f", {len(missing)} of {len(given)} never come, such as {missing[0]}" if missing else ""
    others = set(self.survey.first["example_id"].tolist()) - {*ids[0]}
    return self._failed(name, told, NUMBERS if others else DROPS)

  def _workers(self) -> Result:
    name, rows = "shared out to 2 workers", padded_batch_size(self.batch_size, 2)
    shares = (range(rows), range(rows // 2), range(rows // 2, rows))
    whole, *parts = (self._made_by(share, rows) for share in shares)
    joined = {key: np.concatenate([part[key] for part in parts]) for key in whole}
    if not np.array_equal(joined["example_id"], whole["example_id"]):
      told = f"of a batch of examples {_some(whole['example_id'])}, 2 workers make "
      told += " and ".join(_some(part["example_id"]) for part in parts)
      return self._failed(name, told, NUMBERS)
    mixed = survey.apart(joined, whole, tolerance=1e-5)
    if not mixed:
      return GROUP.passed(name, "each example once, the same as on one")
    if isinstance(self.source, StreamSource):
      told = f"{mixed!r} depends on the other rows of a worker: each reads the stream in another "
      return GROUP.passed(name, f"{told}order. Before using several, give dataset.shuffle a seed")
    return self._not_apart(name, mixed)

  def _not_apart(self, name: str, mixed: str) -> Result:
    """Says why a worker makes other rows than the whole batch has."""
    rows, _ = augmentation.rows_of_training(self.subject, self.task)
    with random_draws.watch(self.task) as watched:
      of_contents = augmentation.mixed(self.task, augmentation.seeded(rows, self.subject))
    if watched.stateful or watched.in_python:
      return GROUP.passed(name, f"each example id once; {mixed!r} is random")
    if of_contents:
      told = f"{of_contents!r} of an example depends on the other examples of its worker's rows"
      return self._failed(name, told, MIXES, of_contents)
    if watched.draws:
      told = f"{mixed!r} of an example depends on its place among its worker's rows"
      place = watched.draws[0].place
      return GROUP.failed(name, told, augmentation.ONE_SEED, place)
    told = f"each example id once; {mixed!r} depends on the other rows of a worker"
    return GROUP.passed(name, told)

  def _made_by(self, share: range, rows: int) -> Rows:
    """Returns the rows of the first batch, padded to `rows`, that a worker of this share makes."""
    made = self.batches(afresh=True, pad_multiple=rows, rows=share)
    return next(made.as_numpy_iterator())

  def any_batch_size(self, of: str) -> Result:
    """Checks that preprocess(batch, False) gives the same rows in any batch size."""
    name = "evaluation in batches of any size"
    if self.preprocess is None or of not in self.eval_sources:
      return GROUP.skipped(name, self.no_eval or "no preprocess()")
    source, most = self.eval_sources[of], self.subject.eval_batch_size or self.batch_size
    size = min(most, source.num_examples or most)
    batches = datasets.eval_dataset(source, global_batch_size=size, steps=self.subject.eval_steps)
    rows, half = next(batches.as_numpy_iterator()), size // 2
    if not half:
      return GROUP.skipped(name, "only one example")
    few = {key: value[:half] for key, value in rows.items()}
    try:
      once, again = survey.preprocessed(self.preprocess, [rows, rows], False)
      [smaller] = survey.preprocessed(self.preprocess, [few], False)
    except Exception as error:
      if not survey.of_training(error):
        raise
      return GROUP.skipped(name, "preprocess() fails in evaluation, see randomness")
    if random := survey.apart(once, again):
      return GROUP.skipped(name, f"{random!r} is random, see randomness")
    first = {key: value[:half] for key, value in once.items()}
    different = survey.apart(smaller, first, tolerance=1e-4)
    if not different:
      return GROUP.passed(name, f"the same in batches of {half} and {size}")
    told = f"{different!r} of the same examples differs in batches of {half} and of {size}"
    return self._failed(name, told, MIXES, different)


def _leaked(shared: int, part: float, chance: float) -> bool:
  """Whether `shared`, a `part` of all, are more than the part to expect by `chance`."""
  if shared < 2 or part < LEAKED:
    return False
  expected = chance * shared / part
  surely = shared - expected > 3 * math.sqrt(expected * (1 - chance) + 1)
  return part > 3 * chance or (surely and part - chance > 0.5 * (1 - chance))


def _some(ids: np.ndarray) -> str:
  listed = ", ".join(map(str, ids[:3].tolist()))
  return f"[{listed}, ...]" if len(ids) > 3 else f"[{listed}]"
