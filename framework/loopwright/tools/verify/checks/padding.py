"""Part of the group "replicas": what one replica makes of padding and of weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.tools.verify.bench import bench, source_lines
from loopwright.tools.verify.bench.bench import PLAIN, Bench, Rows
from loopwright.tools.verify.bench.comparison import LEAST, Comparison, Difference, normalisations
from loopwright.tools.verify.bench.explanations import (
  COUNTS,
  COUPLED,
  PADDED,
  PADDING,
  STATEFUL,
  SUMS,
  TRACED_VALUE,
)
from loopwright.tools.verify.report import Group, Result

GROUP = Group("replicas")
OTHER_CONTENTS = "other contents of the padded rows"


class Rowwise:
  """Steps on one replica whose padded rows and weights differ."""

  def __init__(self, compared: Comparison) -> None:
    self.compared, self.task = compared, compared.task

  def repeatable(self) -> Result:
    """Checks that the same step repeats; if not, it draws random numbers without a seed."""
    found = self.compared.difference(self.compared.again, self.compared.reference["full batch"])
    if found.worst <= LEAST:
      return GROUP.passed("same step twice", found.detail)
    (why, place), *others = self.compared.unsteady()
    also = "".join(f"; or {other.cause} ({line})" for other, line in others)
    place = place or self.compared.find(STATEFUL)
    return GROUP.failed("same step twice", f"{found.detail}{also}", why.cause, why.remedy, place)

  def padding(self) -> Iterator[Result]:
    """Checks that the contents and the number of rows of weight 0 change nothing."""
    found, what = self._padded()
    if found.worst <= self.compared.tolerance and not found.metrics:
      yield GROUP.passed("padding changes nothing", found.detail)
    elif (again := self.compared.retraced()).worst > self.compared.tolerance:
      self.compared.known = TRACED_VALUE
      yield GROUP.failed(
        "padding changes nothing", f"the same step, traced again: {again.detail}",
        TRACED_VALUE.cause, TRACED_VALUE.remedy, self.compared.find(TRACED_VALUE),
      )  # fmt: skip
    elif normalised := [layer.name for layer in normalisations(self.task.model)]:
      why = f"{normalised[0]} normalises over all rows of a batch, padding included"
      yield GROUP.skipped("padding changes nothing", why)
    elif found.worst > self.compared.tolerance and what == OTHER_CONTENTS and self._mixes():
      gathers = any(call.verb == "all_gather" for call in self.compared.calls)
      explanation = PADDED if gathers else self.compared.coupling()
      self.compared.known = COUPLED if gathers else explanation
      yield GROUP.failed(
        "padding changes nothing", detail=f"with {what}: {found.detail}", cause=explanation.cause,
        remedy=explanation.remedy, place=self.compared.find(explanation),
      )  # fmt: skip
    else:
      yield self._padding_counts(found, what)

  def _mixes(self) -> bool:
    """Whether rows change the part of others in the update, rather than add an own part.

    Then the update depends on which rows have which weights, but not on the size of all weights.
    """
    rows = self.compared.cases["batch that does not divide"]
    smaller = {**rows, "weight": rows["weight"] / 16}
    found = self.compared.difference(
      self.compared.on_one(smaller), self.compared.on_one(rows), without=self.compared.state
    )
    return found.worst <= self.compared.tolerance and self._weights_count() is not None

  def _weights_count(self) -> Difference | None:
    """Returns how the update changes when rows exchange their weights; None if it does not."""
    rows = self.compared.cases["unequal weights"]
    turned = self.compared.on_one({**rows, "weight": rows["weight"][::-1]})
    found = self.compared.difference(
      turned, self.compared.reference["unequal weights"], without=self.compared.state
    )
    return found if found.worst > self.compared.tolerance else None

  def _padded(self) -> tuple[Difference, str]:
    """Returns the first difference that padding makes, and how it was made; else a small one."""
    real = np.arange(self.compared.rows) < self.compared.real
    padded = self.compared.cases["batch that does not divide"]
    other = self._one_after(bench.masked(self.compared.batch, real), padded)
    if (
      other.worst <= self.compared.tolerance
      and not other.metrics
      and (fewer := self._without_padding())
    ):
      return fewer, f"{self.compared.rows // 2} rows and no padding"
    return other, OTHER_CONTENTS

  def _one_after(self, batch: Rows, other: Rows) -> Difference:
    """Compares the steps on two batches, and those after them, which may use kept state."""
    outcomes = [self.compared.on_one(each) for each in (batch, other)]
    found = self.compared.difference(*outcomes, without=self.compared.state)
    if found.worst > self.compared.tolerance or found.metrics or not self.compared.state:
      return found
    after = [
      self.compared.alone.steps_from(
        [
          b if used else a[0]
          for a, b, used in zip(o.after, self.compared.start, self.compared.trained, strict=True)
        ],
        self.compared.batch,
      )
      for o in outcomes
    ]
    return self.compared.difference(*after, without=self.compared.state)

  def _without_padding(self) -> Difference | None:
    """Compares half the rows with the same rows padded; None if the task needs its row count."""
    half = self.compared.rows // 2
    padded = self.compared.on_one(bench.padded(self.compared.batch, half))
    try:
      here = Bench(self.compared.subject, rows=half, eager=True, **PLAIN)
      here.first_number = self.compared.alone.first_number
      short = {name: value[:half] for name, value in self.compared.batch.items()}
      return self.compared.difference(
        here.steps_from(self.compared.start, short), padded, without=self.compared.state
      )
    except (ConfigError, ValueError, tf.errors.InvalidArgumentError):
      return None

  def _padding_counts(self, found: Difference, what: str) -> Result:
    in_update = found.worst > self.compared.tolerance
    methods = ("loss", "train_step", "training_loss") if in_update else ("metrics",)
    self.compared.known = COUNTS if in_update else None
    return GROUP.failed(
      "padding changes nothing", detail=f"with {what}: {found.detail}",
      cause=PADDING, remedy=COUNTS.remedy,
      place=source_lines.find(self.task, *methods, containing=SUMS),
    )  # fmt: skip

  def weights(self, *, known: bool) -> Result:
    """Checks that the update depends on which rows have which weights.

    Args:
      known: whether another check has found that padding counts.
    """
    name = "weights count"
    if found := self._weights_count():
      return GROUP.passed(
        name, f"other weights change the update, by {min(found.worst, 9.99):.2g}",
      )  # fmt: skip
    half = self.compared.rows // 2
    alone = [
      self.compared.on_one(
        {n: np.concatenate([v[rows]] * 2) for n, v in self.compared.batch.items()}
      )
      for rows in (slice(0, half), slice(half, 2 * half))
    ]
    same = (
      self.compared.difference(*alone, without=self.compared.state).worst <= self.compared.tolerance
    )
    if same or known:
      why = "all rows of the batch give the same update" if same else "padding counts, see above"
      return GROUP.skipped(name, why)
    return GROUP.failed(
      name, detail="the update stays the same when the rows exchange their weights",
      cause="weights are ignored",
      remedy="weight each example, as Loss.from_examples(per_example, batch['weight']) does: "
      "padded rows have weight 0",
      place=source_lines.find(self.task, "loss", "train_step", "training_loss", containing=SUMS),
    )  # fmt: skip
