"""The same evaluation whatever the replicas, the batch size, the remainder and the order.

Eighteen evaluation examples are evaluated with the task's eval_step(), metrics() and derived(): on
one replica in batches of 12, where the last one is half padding, and in batches of 6; on 2 replicas
in batches of 12; in another order. Every metric must be the same each time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.models import models
from loopwright.tools.verify.bench import bench, random_draws, source_lines, survey
from loopwright.tools.verify.bench.bench import PLAIN, Bench, Rows, Subject
from loopwright.tools.verify.bench.evaluated import Evaluated, Values, different
from loopwright.tools.verify.report import Group, Result

GROUP = Group("evaluation")
SMALL = 6
"""Rows of the small batches; divisible by 2 and 3."""
LARGER = 5
"""How much larger the batches are if the task cannot evaluate so few rows."""
NAMES = (
  "no layer in training mode", "same evaluation with padding", "same evaluation in another order",
  "same evaluation in smaller batches", "same evaluation on 2 replicas",
)  # fmt: skip
MODE, PADDED, REVERSED, SMALLER, ON_TWO = NAMES
STATISTICS = ("moving_mean", "moving_variance")
"""Variables of batch normalisation."""
MIXED, MEANS = "examples that depend on one another", "metric read in replica context"


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  source, why = survey.eval_source(subject.fresh_task())
  if source is None:
    return [GROUP.skipped(name, why) for name in NAMES]
  try:
    return list(Comparison(subject, SMALL).results())
  except (ConfigError, ValueError, tf.errors.InvalidArgumentError):
    return list(Comparison(subject, SMALL * LARGER).results())


class Comparison:
  """Evaluations of the same examples."""

  def __init__(self, subject: Subject, small: int) -> None:
    """Evaluates on one replica: three times `small` rows, in batches of `small` and of twice."""
    self.subject, self.small, self.alone = subject, small, Evaluated(subject)
    rows = subject.rows(self.alone.task, 3 * small, training=False)
    real = np.flatnonzero(rows["example_id"] >= 0)
    self.rows = {name: value[np.resize(real, 3 * small)] for name, value in rows.items()}
    order = np.arange(3 * small)
    first, rest = order[: 2 * small], order[2 * small :]
    others = self._take(np.concatenate([rest, order[:small]]))
    self.same = {"all": self._cut(order, 2 * small), "full": self._cut(first, 2 * small)}
    self.in_large = self.alone(
      {**self.same, "rest": self._cut(rest, 2 * small),
       "others": [bench.masked(others, np.arange(2 * small) < small)],
       "turned": self._cut(np.concatenate([first[::-1], rest[::-1]]), 2 * small)}
    )  # fmt: skip
    self.in_small = self.alone(
      {"all": self._cut(order, small), "full": self._cut(first, small),
       "rest": self._cut(rest, small),
       "mixed": self._cut(order.reshape([-1, 3]).T.ravel(), small)}
    )  # fmt: skip

  def _cut(self, order: np.ndarray, size: int) -> list[Rows]:
    """Returns rows in this order in batches of `size`, the last one padded as the input does."""
    parts = [order[begin : begin + size] for begin in range(0, len(order), size)]
    return [bench.padded(self._take(np.resize(part, size)), len(part)) for part in parts]

  def _take(self, indices: np.ndarray) -> Rows:
    return {name: value[indices] for name, value in self.rows.items()}

  def results(self) -> Iterator[Result]:
    """Yields all results."""
    mode = self._mode()
    yield mode
    if mode.status == "failed":
      yield from (GROUP.skipped(name, f"{MODE!r} fails") for name in NAMES[1:])
      return
    padding = self._padding()
    yield padding
    self.padding_counts = padding.status == "failed"
    yield self._order()
    yield self._sizes()
    there = Evaluated(self.subject, 2, values=self.alone.values)(self.same)
    if wrong := self._apart(there, self.in_large):
      yield self._failed(ON_TWO, f"{wrong[1]} on one", self._cause(there, wrong[0]), wrong[0])
    else:
      yield GROUP.passed(ON_TWO, ", ".join(there["all"]) or "no metric")

  def _mode(self) -> Result:
    task = self.alone.task
    kept = {models.name(v): models.raw(v) for v in models.all_variables(task.model)}
    counts = {name for name, variable in kept.items() if not variable.dtype.is_floating}
    changed = [each for each in self.alone.changed if each not in counts]
    changed = changed or [each for each in self.alone.changed if self._trains(each)]
    if not changed:  # seeds, counts of calls
      others = ", ".join(self.alone.changed)
      return GROUP.passed(MODE, f"evaluation changes {others}" if others else "no variable changes")
    statistics = [each for each in changed if each.endswith(STATISTICS)]
    name = [*statistics, *changed][0]
    told = f"an evaluation changes {name}, as only training should"
    graph, _ = self.alone.graph(self._cut(np.arange(self.small), self.small)[0])
    cause = "evaluation in training mode" if statistics else "evaluation changes the model"
    return GROUP.failed(MODE, told, cause, source_lines.assigned_at(graph, kept[name], task))

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
    for of, told in (("rest", "as many rows"), ("others", "other contents in rows")):
      if wrong := different(self.in_large[of], self.in_small["rest"]):
        told = f"{self.small} examples with {told} of padding: {wrong[1]} without"
        mixed = different(self.in_small["full"], self.in_large["full"])
        cause = MIXED if mixed and not self.alone.gathers else "padding counts"
        return self._failed(PADDED, told, cause, wrong[0])
    return GROUP.passed(PADDED, ", ".join(self.in_small["rest"]) or "no metric")

  def _order(self) -> Result:
    if wrong := different(self.in_large["turned"], self.in_large["all"]):
      mixed = different(self.in_small["full"], self.in_large["full"])
      if not mixed and self.padding_counts:
        return GROUP.skipped(REVERSED, "padding counts, see above")
      cause = MIXED if mixed else "metric depends on the order"
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

  def _apart(
    self, one: Mapping[str, Values], other: Mapping[str, Values]
  ) -> tuple[str, str] | None:
    """Returns the metric that differs; full batches alone count if padding does anyway."""
    sets = ("full",) if self.padding_counts else ("full", "all")
    return next((wrong for of in sets if (wrong := different(one[of], other[of]))), None)

  def _cause(self, other: Mapping[str, Values], metric: str) -> str:
    """Means of parts of equal size are right; comparisons of rows are not.

    Whatever the weights, the share of half a batch is the same if it is that of tokens or labels.
    """
    if not different(other["full"], self.in_large["full"]):
      return "mean of means" if metric == "loss" else MEANS
    shares = [self._share(metric, seed) for seed in (1, 2, 3)]
    counted = min(shares) > 0 and max(shares) < 1 and np.ptp(shares) < 1e-3
    return "metric divided by a local count" if counted else MIXED

  def _share(self, metric: str, seed: int) -> float:
    """Returns the share of the first half in a metric of two halves, with some weights."""
    small, values = self.small, self.alone.moved(seed)
    halves = {str(row): self._cut(np.arange(row, row + small), small) for row in (0, small)}
    found = [*self.alone({"full": self.same["full"]}, values).values()]
    found += self.alone(halves, values).values()
    whole, first, second = (each.get(metric, np.zeros(0)) for each in found)
    if any(each.size != 1 for each in (whole, first, second)) or first == second:
      return 0.0
    return ((whole - second) / (first - second)).item()

  def _failed(self, name: str, detail: str, cause: str, metric: str) -> Result:
    place = ""
    if cause == MIXED:
      place, shifted = self._meeting
      cause = "rows run into one another" if shifted else cause
    place = place or self.alone.line(metric, self._cut(np.arange(self.small), self.small)[0])
    return GROUP.failed(name, detail, cause, place)

  @functools.cached_property
  def _meeting(self) -> tuple[str, bool]:
    """Where rows meet, and whether they are shifted there."""
    return self.alone.meeting(self.rows)
