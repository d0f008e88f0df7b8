"""What the step reads: each example once, none in both splits, valid numbers.

Sources and the training pipeline are read for a few seconds each; larger ones are sampled, and the
result says so. Where possible, the task itself decides whether a number is a mistake: a label is
out of range if the loss cannot use it, a feature is not scaled if the first loss shows it.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.graphs import randomness
from loopwright.inputs import datasets
from loopwright.inputs.buckets import Buckets
from loopwright.inputs.mixture import Mixture
from loopwright.inputs.plan import Preprocess, padded_batch_size
from loopwright.inputs.sources import Source, main_source, of_one_shape
from loopwright.inputs.streams import StreamSource
from loopwright.task import preprocess_of
from loopwright.tools.verify.bench import random_draws, source_lines, survey
from loopwright.tools.verify.bench.bench import Bench, Rows, Subject
from loopwright.tools.verify.bench.survey import Survey
from loopwright.tools.verify.checks import augmentation
from loopwright.tools.verify.checks.contents import GROUP, PREPROCESS, SOURCE, Contents
from loopwright.tools.verify.report import Explanation, Result

READ_S = 3.0
"""Seconds to read each source, and the pipeline."""
LEAKED = 0.01
"""A smaller share of evaluation examples that are also in training counts as chance."""
COPIED = 0.2
"""So many equal examples are no chance if their numbers are measured; some data have copies."""
NUMBERS = "preprocess() numbers examples itself"
RANDOM = Explanation("source() is random", ("random", "shuffle", "_split("))
OVERLAP = Explanation("train and eval overlap", ("split ==", "_split(", "random", "shuffle"))
IGNORED = dataclasses.replace(OVERLAP, cause="source() ignores the split")
MIXES = Explanation("preprocess() mixes rows", (
    "shuffle", "tf.gather(", "roll", "reverse", "[::-1]", "moments", "unique", "bincount", "sort",
    "reduce_", "tf.size", "[None, :]",
  ))  # fmt: skip
BY_BATCH = Explanation(MIXES.cause, ("reduce_", "moments", "norm", "shuffle"))
SEEDS = ('["seed"][0]', "['seed'][0]", '["seed"][:1]', '["seed"], axis=0')


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  reading = Reading(subject)
  return [
    *reading.sources(),
    *reading.each_set(lambda: [reading.overlap()]),
    *reading.pipeline(),
    *reading.each_set(reading.evaluation),
    *Contents(reading).results(),
  ]


class Reading:
  """A task's sources and pipelines, and what was read from them."""

  def __init__(self, subject: Subject) -> None:
    """Makes the task and both sources, in the same order as a run."""
    self.subject = subject
    rows = padded_batch_size(subject.global_batch_size, subject.accumulation_steps)
    self.bench = Bench(subject, rows=rows, quiet=False)
    self.task = self.bench.task
    randomness.seed_everything(subject.seed)
    self.eval_sources, self.no_eval = survey.evaluation_sources(self.task)
    given = self.task.source("train")
    self.sources_read = of_one_shape(given)
    self.source = main_source(self.sources_read)
    self.preprocess = preprocess_of(self.task)
    self.train = survey.digests(self.source, seconds=READ_S)
    self.evals = {
      name: survey.digests(source, seconds=READ_S) for name, source in self.eval_sources.items()
    }
    self._read_contents(given)
    self._use("")
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

  def each_set(self, check: Callable[[], Iterable[Result]]) -> Iterator[Result]:
    """Yields the results of a check of each evaluation set, named by the set if it has a name."""
    for set_name in self.eval_sources or [""]:
      self._use(set_name)
      for result in check():
        suffix = f" ({set_name})" if set_name else ""
        yield dataclasses.replace(result, check=f"{result.check}{suffix}")

  def _use(self, set_name: str) -> None:
    self.eval_source = self.eval_sources.get(set_name)
    self.eval = self.evals.get(set_name, survey.NO_DIGESTS)
    self.held_out = self.eval_data.get(set_name, survey.NO_DIGESTS)

  def _read_contents(self, given: Any) -> None:
    """Reads examples of all lengths, without what only numbers them; often, that is done."""
    train = survey.of_all_lengths(given) if isinstance(given, Buckets) else self.source
    sets, _ = survey.evaluation_sources(self.task, survey.of_all_lengths)
    self.numbers = survey.numbering(train).union(*map(survey.numbering, sets.values()))
    self.train_data, self.eval_data = self.train, self.evals
    if self.numbers or isinstance(given, Buckets):
      reads: dict[str, Any] = {"seconds": READ_S, "without": self.numbers}
      self.train_data = survey.digests(train, **reads)
      self.eval_data = {name: survey.digests(each, **reads) for name, each in sets.items()}

  # ---- Sources ----

  def sources(self) -> Iterator[Result]:
    """Checks that each call of source() and of fetch() gives the same examples."""
    name = "source() repeats"
    again = main_source(self.task.source("train"))
    if isinstance(self.source, StreamSource) or isinstance(again, StreamSource):
      yield GROUP.skipped(name, "a stream has its own order")
      return
    ids = list(self.train.by_id)[:16]
    fetched = survey.fetched_alone(again, ids)
    wrong = [i for i in ids if fetched[i] != self.train.by_id[i]]
    if not wrong and again.num_examples == self.source.num_examples:
      yield GROUP.passed(name, f"{self.source.num_examples} examples, the same when asked again")
      return
    alone = survey.fetched_alone(self.source, ids)
    if [i for i in ids if alone[i] != self.train.by_id[i]]:
      yield self._fetch_is_wrong(name, self.source, ids[0], alone)
      return
    told = f"a second call of source('train') gives other examples: {len(wrong)} of {len(ids)} "
    place = source_lines.find(self.task, *SOURCE, containing=RANDOM.containing)
    yield GROUP.explained(name, f"{told}differ", RANDOM, place)

  def _fetch_is_wrong(
    self, name: str, source: Source, example: int, alone: Mapping[int, bytes]
  ) -> Result:
    repeated = survey.fetched_alone(source, alone) == alone
    told = f"{type(source).__name__}.fetch gives another example {example}"
    told += " alone than among others" if repeated else " each time"
    cause = "fetch() mixes up its rows" if repeated else "fetch() is random"
    place = source_lines.find(source, "fetch", containing=("sort", "random", "unique"))
    return GROUP.failed(name, told, cause, place)

  def overlap(self) -> Result:
    """Finds evaluation examples that are also in training, by content."""
    name = "train and eval apart"
    train, held_out = self.train_data, self.held_out
    if not self.eval.by_id:
      return GROUP.skipped(name, self.no_eval or "source('eval') has no examples")
    if not held_out.by_id:
      why = f"examples are only numbers ({', '.join(sorted(self.numbers))})"
      return GROUP.skipped(name, f"{why}; what they stand for is unknown")
    train_ids = {content: i for i, content in reversed(train.by_id.items())}
    both = [(train_ids[c], i) for i, c in held_out.by_id.items() if c in train_ids]
    shared, repeated = len(both), len(train.by_id) - len(train_ids)
    told = f"{len(held_out.by_id)} eval in {len(train.by_id)} train examples"
    told += "" if train.complete and held_out.complete else " (a sample)"
    told += f"; {repeated} repeated inside train" if repeated else ""
    values = {"shared": shared, "repeated": repeated}
    if not shared:
      return GROUP.passed(name, f"none of {told}", values=values)
    first = f"eval {both[0][1]} is train {both[0][0]}"
    part = min(1.0, shared / (len(held_out.by_id) * train.share))
    copied = train.measured and part > COPIED
    if not copied and not _leaked(shared, part, survey.chance(train, held_out)):
      told = f"{shared} of {told}, too few to be more than chance: {first}"
      return GROUP.passed(name, told, values=values)
    mistake = IGNORED if part > 0.95 else OVERLAP
    place = source_lines.find(self.task, *SOURCE, containing=mistake.containing)
    return GROUP.explained(name, f"{shared} of {told}; {first}", mistake, place, values=values)

  # ---- Pipelines ----

  def pipeline(self) -> Iterator[Result]:
    """Checks that an epoch has each example once, also on several workers."""
    total = self.train.total
    batches: Any = self.batches()
    if total:
      batches = batches.take(-(-total // self.batch_size))
    self.survey = Survey().read(batches.as_numpy_iterator(), seconds=READ_S)
    once = self._once(total)
    yield once
    if once.status == "passed":
      yield self._workers()

  def _once(self, total: int | None) -> Result:
    name, survey = "each example once", self.survey
    if isinstance(self.source, Mixture) and (result := self._as_shared_out(name, self.source)):
      return result
    epoch = bool(total) and survey.examples >= (total or 0)
    spare = survey.examples - (total or 0) if epoch else 0
    often = {i: n for i, n in survey.counts.items() if n > 1}
    missing = [i for i in range(total or 0) if i not in survey.counts] if epoch else []
    if not missing and sum(often.values()) - len(often) <= spare:
      what = "an epoch of" if epoch else "no example twice in the first"
      return GROUP.passed(name, f"{what} {survey.examples - spare} examples")
    worst = max(often, key=often.__getitem__, default=None)
    told = [f"example {worst} comes {often[worst]} times"] if worst is not None else []
    told += [f"{len(missing)} of {total} never come, such as {missing[0]}"] if missing else []
    before = next(self.batches(preprocess=None).as_numpy_iterator())["example_id"]
    others = set(survey.first["example_id"].tolist()) - set(before.tolist())
    cause = NUMBERS if others else "preprocess() repeats or drops examples"
    words = ("gather", "shuffle", "range(", "choice")
    place = source_lines.find(self.task, *PREPROCESS, containing=words)
    found = f"in an epoch, {', '.join(told)}" if epoch else ", ".join(told)
    return GROUP.failed(name, found, cause, place)

  def _as_shared_out(self, name: str, mixture: Mixture) -> Result | None:
    """Returns that a mixture's examples are those of the first positions; None if they are not."""
    read: dict[str, Any] = {"seed": self.subject.seed, "shuffle": self.subject.shuffle}
    ids = mixture.shares.ids(tf.range(self.survey.examples, dtype=tf.int64), **read).numpy()
    if collections.Counter(ids.tolist()) != self.survey.counts:
      return None
    before = mixture.shares.before(len(ids))
    told = ", ".join(f"{count} of {part!r}" for part, count in before.items())
    return GROUP.passed(name, f"the first {len(ids)} examples are {told}, as the weights say")

  def _workers(self) -> Result:
    name = "shared out to 2 and 3 workers"
    rows = padded_batch_size(self.batch_size, 6)
    whole = self._made_by(range(rows), rows)
    mixed = ""
    for workers in (2, 3):
      share = rows // workers
      parts = [self._made_by(range(i, i + share), rows) for i in range(0, rows, share)]
      ids = [part["example_id"] for part in parts]
      if not np.array_equal(np.concatenate(ids), whole["example_id"]):
        told = f"of a batch of examples {_some(whole['example_id'])}, {workers} workers make "
        told += " and ".join(_some(each) for each in ids)
        words = ("example_id", "range(", "gather")
        place = source_lines.find(self.task, *PREPROCESS, containing=words)
        return GROUP.failed(name, told, NUMBERS, place)
      joined = {key: np.concatenate([part[key] for part in parts]) for key in whole}
      mixed = mixed or survey.apart(joined, whole, tolerance=1e-5)
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
      found = augmentation.dependence(self.task, augmentation.seeded(rows, self.subject))
    if watched.stateful or watched.in_python:
      return GROUP.passed(name, f"each example id once; {mixed!r} is random")
    if found and found[1] == "contents":
      told = f"{found[0]!r} of an example depends on the other examples of its worker's rows"
      place = source_lines.find(self.task, "preprocess", containing=MIXES.containing)
      return GROUP.explained(name, told, MIXES, place)
    if found or watched.draws:
      of = "the seed of another example" if found else "its place among its worker's rows"
      told = f"{found[0] if found else mixed!r} of an example depends on {of}"
      place = source_lines.mention(self.task, *SEEDS)
      place = place or random_draws.place(self.task, watched.draws, PREPROCESS, ("seed",))
      return GROUP.failed(name, told, augmentation.ONE_SEED, place)
    told = f"each example id once; {mixed!r} depends on the other rows of a worker"
    return GROUP.passed(name, told)

  def _made_by(self, share: range, rows: int) -> Rows:
    """Returns the rows of the first batch, padded to `rows`, that a worker of this share makes."""
    made = self.batches(afresh=True, pad_multiple=rows, rows=share)
    return next(made.as_numpy_iterator())

  def evaluation(self) -> Iterator[Result]:
    """Checks that preprocess(batch, False) gives the same rows each time, in any batch size."""
    name = "evaluation repeats"
    if self.preprocess is None or self.eval_source is None:
      yield GROUP.skipped(name, self.no_eval or "no preprocess()")
      return
    size = min(self.subject.eval_batch_size or self.batch_size, len(self.eval.by_id))
    batches = datasets.eval_dataset(
      self.eval_source, global_batch_size=size, steps=self.subject.eval_steps
    )
    rows = next(batches.as_numpy_iterator())
    try:
      once, twice = survey.preprocessed(self.preprocess, [rows, rows], False)
      [later] = survey.preprocessed(self.preprocess, [rows], False)
    except Exception as error:
      yield augmentation.of_training_alone(GROUP, name, self.task, error)
      return
    if different := survey.apart(once, twice) or survey.apart(once, later):
      told = f"{different!r} differs when the same {size} examples are read again"
      words = ("random", "augment", "flip", "noise")
      place = source_lines.find(self.task, "preprocess", containing=words)
      yield GROUP.failed(name, told, augmentation.IN_EVALUATION, place)
      return
    yield GROUP.passed(name, f"{size} examples, bit for bit")
    yield self._any_batch_size(self.preprocess, rows, once)

  def _any_batch_size(self, preprocess: Preprocess, rows: Rows, once: Rows) -> Result:
    name, size = "evaluation in batches of any size", len(rows["weight"])
    half = size // 2
    if not half:
      return GROUP.skipped(name, "only one example")
    few = {key: value[:half] for key, value in rows.items()}
    [smaller] = survey.preprocessed(preprocess, [few], False)
    first = {key: value[:half] for key, value in once.items()}
    different = survey.apart(smaller, first, tolerance=1e-4)
    if not different:
      return GROUP.passed(name, f"the same in batches of {half} and {size}")
    told = f"{different!r} of the same examples differs in batches of {half} and of {size}"
    place = source_lines.find(self.task, "preprocess", containing=BY_BATCH.containing)
    return GROUP.explained(name, told, BY_BATCH, place)

  @property
  def bench_rows(self) -> int:
    """Rows of a batch on the bench."""
    return padded_batch_size(self.subject.global_batch_size, self.subject.accumulation_steps)


def _leaked(shared: int, part: float, chance: float) -> bool:
  """Whether more evaluation examples are in training than equal ones by chance.

  Args:
    shared: how many.
    part: the share of all that were read.
    chance: the share to expect.
  """
  if shared < 2 or part < LEAKED:
    return False
  expected = chance * shared / part
  surely = shared - expected > 3 * math.sqrt(expected * (1 - chance) + 1)
  return part > 3 * chance or (surely and part - chance > 0.5 * (1 - chance))


def _some(ids: np.ndarray) -> str:
  listed = ", ".join(map(str, ids[:3].tolist()))
  return f"[{listed}, ...]" if len(ids) > 3 else f"[{listed}]"
