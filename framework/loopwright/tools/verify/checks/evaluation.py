"""The same evaluation whatever the replicas, the batch size, the remainder and the order.

Eighteen evaluation examples are evaluated with the task's eval_step(), metrics() and derived(): on
one replica in batches of 12, where the last one is half padding, and in batches of 6; on 2 and on 3
replicas in batches of 12; in another order. Every metric must be the same each time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.models import models
from loopwright.tools.verify.bench import bench, random_draws, row_influence, source_lines, survey
from loopwright.tools.verify.bench.bench import PLAIN, Bench, Rows, Subject
from loopwright.tools.verify.bench.evaluated import Evaluated, Values, different
from loopwright.tools.verify.bench.explanations import COUPLED, MEAN_OF_MEANS, SHIFTED
from loopwright.tools.verify.report import Group, Result

GROUP = Group("evaluation")
SMALL = 6
"""Rows of the small batches; divisible by 2 and 3."""
LARGER = 5
"""How much larger the batches are if the task cannot evaluate so few rows."""
REPLICAS = (2, 3)
MODE, PADDED, REVERSED, SMALLER = (
  "no layer in training mode", "same evaluation with padding", "same evaluation in another order",
  "same evaluation in smaller batches",
)  # fmt: skip
ON_SEVERAL = {f"same evaluation on {replicas} replicas": replicas for replicas in REPLICAS}
STATISTICS = ("moving_mean", "moving_variance")
"""Variables of batch normalisation."""
MIXED = COUPLED.cause
MEANS = "metric read in replica context"
COUNT = "metric divided by a local count"
PADDING = "padding counts"
ORDER = "metric depends on the order"
METHODS = ("metrics", "eval_step", "derived", "loss", "forward")
WORDS = ("reduce_", "result(", "top_k", "argsort", "len(", "shape", "return")


Sets = Mapping[str, Values]


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  source, why = survey.eval_source(subject.fresh_task())
  if source is None:
    return [GROUP.skipped(name, why) for name in (MODE, PADDED, REVERSED, SMALLER, *ON_SEVERAL)]
  try:
    return list(Comparison(subject, SMALL).results())
  except (ConfigError, ValueError, tf.errors.InvalidArgumentError):
    return list(Comparison(subject, SMALL * LARGER).results())


class Comparison:
  """Evaluations of the same examples."""

  def __init__(self, subject: Subject, small: int) -> None:
    """Evaluates on one replica.

    Args:
      subject: what to verify.
      small: the rows of a small batch; a large one has twice as many, and all are three times.
    """
    self.subject, self.small = subject, small
    self.alone = Evaluated(subject)
    self.rows = _examples(subject, self.alone, 3 * small)
    self.in_large = self.alone(self._in_large())
    all_rows = np.arange(3 * small)
    self.in_small = self.alone(
      {"all": self._cut(all_rows, small), "full": self._cut(all_rows[: 2 * small], small),
       "rest": self._cut(all_rows[2 * small :], small),
       "mixed": self._cut(all_rows.reshape([-1, 3]).T.ravel(), small)}
    )  # fmt: skip

  def _in_large(self) -> dict[str, list[Rows]]:
    small, all_rows = self.small, np.arange(3 * self.small)
    rest = all_rows[2 * small :]
    others = self._take(np.concatenate([rest, all_rows[:small]]))
    turned = np.concatenate([all_rows[: 2 * small][::-1], rest[::-1]])
    return {
      **self._same(), "rest": self._cut(rest, 2 * small),
      "others": [bench.masked(others, np.arange(2 * small) < small)],
      "turned": self._cut(turned, 2 * small),
    }  # fmt: skip

  def _same(self) -> dict[str, list[Rows]]:
    """Returns all examples, and those of the full batch alone, in large batches."""
    all_rows = range(3 * self.small)
    large = 2 * self.small
    return {"all": self._cut(all_rows, large), "full": self._cut(all_rows[:large], large)}

  def _cut(self, order: Sequence[int] | np.ndarray, size: int) -> list[Rows]:
    """Returns rows in this order in batches of `size`, the last one padded as the input does."""
    parts = [np.asarray(order)[begin : begin + size] for begin in range(0, len(order), size)]
    return [bench.padded(self._take(np.resize(part, size)), len(part)) for part in parts]

  def _take(self, indices: np.ndarray) -> Rows:
    return {name: value[indices] for name, value in self.rows.items()}

  # ---- Results ----

  def results(self) -> Iterator[Result]:
    """Yields all results."""
    mode = self._mode()
    yield mode
    if mode.status == "failed":
      for name in (PADDED, REVERSED, SMALLER, *ON_SEVERAL):
        yield GROUP.skipped(name, f"{MODE!r} fails")
      return
    padding = self._padding()
    yield padding
    self.padding_counts = padding.status == "failed"
    yield self._order()
    yield self._sizes()
    yield from (self._replicas(name, replicas) for name, replicas in ON_SEVERAL.items())

  def _mode(self) -> Result:
    task = self.alone.task
    kept = models.all_variables(task.model)
    counts = {models.name(v) for v in kept if not models.raw(v).dtype.is_floating}
    changed = [each for each in self.alone.changed if each not in counts]
    changed = changed or [each for each in self.alone.changed if self._trains(each)]
    if not changed:  # seeds, counts of calls
      others = ", ".join(self.alone.changed)
      return GROUP.passed(MODE, f"evaluation changes {others}" if others else "no variable changes")
    statistics = [each for each in changed if each.endswith(STATISTICS)]
    told = f"an evaluation changes {[*statistics, *changed][0]}, as only training should"
    if statistics:
      place = source_lines.mention(task, "training=True")
      place = place or source_lines.find(task, "forward", "eval_step", containing=("self.model",))
      return GROUP.failed(MODE, told, "evaluation in training mode", place)
    place = self.alone.assigns(bench.padded(self._take(np.arange(self.small)), self.small))
    place = place or source_lines.mention(task, ".assign")
    return GROUP.failed(MODE, told, "evaluation changes the model", place)

  def _trains(self, variable: str) -> bool:
    """Whether a training step is another one if a variable has another value."""
    here = Bench(self.subject, rows=2 * self.small, **PLAIN)
    if variable not in here.names or random_draws.is_generator(variable):
      return False
    start, batch = here.read(), self.subject.rows(here.task, 2 * self.small)
    other = [v + (name == variable) for name, v in zip(here.names, start, strict=True)]
    one, two = (here.steps_from(values, batch).update() for values in (start, other))
    return any(not np.array_equal(*pair, equal_nan=True) for pair in zip(one, two, strict=True))

  def _padding(self) -> Result:
    alone, count = self.in_small["rest"], f"{self.small} examples"
    for values, told in (
      (self.in_large["rest"], f"{count} with as many rows of padding"),
      (self.in_large["others"], f"{count}, with other contents in padded rows"),
    ):
      if wrong := different(values, alone):
        return self._failed(PADDED, f"{told}: {wrong[1]} without padding", PADDING, wrong[0])
    return GROUP.passed(PADDED, ", ".join(alone) or "no metric")

  def _order(self) -> Result:
    if wrong := different(self.in_large["turned"], self.in_large["all"]):
      cause = MIXED if different(self.in_small["full"], self.in_large["full"]) else ORDER
      if cause == ORDER and self.padding_counts:
        return GROUP.skipped(REVERSED, "padding counts, see above")
      told = f"rows of each batch reversed: {wrong[1]} before"
      return self._failed(REVERSED, told, cause, wrong[0])
    if wrong := different(self.in_small["mixed"], self.in_small["all"]):
      return self._in_other_batches(REVERSED, f"in other batches: {wrong[1]} before", wrong[0])
    told = f"{3 * self.small} examples in batches of other examples, and reversed"
    return GROUP.passed(REVERSED, told)

  def _sizes(self) -> Result:
    sizes = f"batches of {self.small} and of {2 * self.small}"
    if wrong := self._apart(self.in_small, self.in_large):
      return self._in_other_batches(SMALLER, f"in {sizes}: {wrong[1]}", wrong[0])
    return GROUP.passed(SMALLER, f"{sizes} are the same")

  def _in_other_batches(self, name: str, told: str, metric: str) -> Result:
    """Rows that are compared with the others of the batch of all replicas may depend on it."""
    if self.alone.gathers:
      told += "; step.all_gather collects a whole batch, so keep run.eval_batch_size as it is"
      return GROUP.passed(name, told)
    return self._failed(name, told, self._cause(self.in_small, metric), metric)

  def _replicas(self, name: str, replicas: int) -> Result:
    there = Evaluated(self.subject, replicas, values=self.alone.values)(self._same())
    if wrong := self._apart(there, self.in_large):
      return self._failed(name, f"{wrong[1]} on one", self._cause(there, wrong[0]), wrong[0])
    return GROUP.passed(name, ", ".join(there["all"]) or "no metric")

  def _apart(self, one: Sets, other: Sets) -> tuple[str, str] | None:
    """Returns the metric that differs; full batches alone count if padding does anyway."""
    sets = ("full",) if self.padding_counts else ("full", "all")
    return next((wrong for of in sets if (wrong := different(one[of], other[of]))), None)

  def _cause(self, other: Mapping[str, Values], metric: str) -> str:
    """Means of parts of equal size are right; comparisons of rows are not."""
    if not different(other["full"], self.in_large["full"]):
      return MEANS
    shares = [self._share(metric, seed) for seed in (1, 2, 3)]
    return COUNT if min(shares) > 0 and max(shares) < 1 and np.ptp(shares) < 1e-3 else MIXED

  def _share(self, metric: str, seed: int) -> float:
    """Returns the share of the first half in a metric of two halves, with some weights.

    Whatever the weights, it is the same if it is that of tokens or labels.
    """
    there, small = self.alone.with_noise(seed), self.small
    halves = {n: self._cut(range(n * small, (n + 1) * small), small) for n in (0, 1)}
    whole = there({"full": self._cut(range(2 * small), 2 * small)})["full"]
    first, second = there({str(n): half for n, half in halves.items()}).values()
    numbers = [each.get(metric, np.zeros(0)) for each in (whole, first, second)]
    if any(number.size != 1 for number in numbers) or numbers[1] == numbers[2]:
      return 0.0
    return ((numbers[0] - numbers[2]) / (numbers[1] - numbers[2])).item()

  def _failed(self, name: str, detail: str, cause: str, metric: str) -> Result:
    task, place = self.alone.task, ""
    if cause == MIXED:
      place, shifted = self._meeting
      cause = SHIFTED.cause if shifted else cause
    if metric == "loss" and cause == PADDING:
      place, _ = self._meeting
    if metric == "loss" and cause in (MEANS, COUNT):
      cause = MEAN_OF_MEANS.cause if cause == MEANS else cause
      place = source_lines.find(task, "loss", "eval_step", containing=MEAN_OF_MEANS.containing)
    place = place or source_lines.mention(task, f'"{metric}"', f"'{metric}'")
    place = place or source_lines.find(task, *METHODS, containing=WORDS)
    return GROUP.failed(name, detail, cause, place)

  @functools.cached_property
  def _meeting(self) -> row_influence.Meeting:
    """Where rows meet."""
    return self.alone.meeting(self.rows)


def _examples(subject: Subject, alone: Evaluated, count: int) -> Rows:
  """Returns the first evaluation examples; if there are fewer, some of them again."""
  rows = subject.rows(alone.task, count, training=False)
  real = np.flatnonzero(rows["example_id"] >= 0)
  return {name: value[np.resize(real, count)] for name, value in rows.items()}
