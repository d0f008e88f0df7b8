"""The same update on 1 and on N replicas; if it differs, which known mistake explains it.

One step of plain gradient descent, whose update is the gradient, runs from the same weights on 1, 2
and 3 logical CPUs: with a full batch, one that does not divide (the last replica has only padding)
and unequal weights. Then several steps run with the config's own optimizer, clipping,
micro-batches, loss scaling, and an infinity in the last replica's last example.

From the gradients of each replica's rows alone, each known mistake predicts another update. The one
whose prediction fits all cases is reported. padding.py has the checks on one replica,
own_optimizer.py those with the config's own optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from loopwright.models import models
from loopwright.tools.verify.bench import held_state, source_lines
from loopwright.tools.verify.bench.bench import PLAIN, Bench, Outcome, Subject
from loopwright.tools.verify.bench.comparison import (
  LEAST,
  METHODS,
  Comparison,
  Difference,
  normalisations,
  synchronised,
)
from loopwright.tools.verify.bench.explanations import (
  BATCH_NORM,
  LOCAL_BATCH,
  LOCAL_OFFSETS,
  LOCAL_STATE,
  LOCAL_WEIGHT,
  MICRO_BATCH_NORM,
  NEVER_REDUCED,
  PADDING,
  PREDICTIONS,
  PYTHON_VALUE,
  RANKED,
  REGULARISATION,
  REPLICA_FACTOR,
  STATEFUL,
  TRACED_VALUE,
  TWICE,
  UNKNOWN,
  Explanation,
  fits,
  weighted_mean,
)
from loopwright.tools.verify.bench.held_state import Held
from loopwright.tools.verify.checks import order
from loopwright.tools.verify.checks.own_optimizer import OwnOptimizer
from loopwright.tools.verify.checks.padding import Rowwise
from loopwright.tools.verify.report import Group, Result

GROUP = Group("replicas")
RESULTS = ("result(", "reduce_mean", "log(")


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  compared = Comparison(subject, rows=subject.divisible_rows)
  rowwise, several = Rowwise(compared), Several(compared)
  results = [rowwise.repeatable()]
  if results[0].status == "failed":
    return results  # steps that do not repeat cannot be compared
  results += rowwise.padding()
  results.append(rowwise.weights(known=results[-1].cause == PADDING))
  updates = [result for n in (2, 3) for result in several.same_update(n)]
  alike = not any(result.status == "failed" and "metrics" not in result.check for result in updates)
  if any(result.cause == NEVER_REDUCED.cause for result in updates):
    return [*results, *updates]  # what follows repeats it in other words
  return [*results, *updates, *OwnOptimizer(compared).same_with_options(alike=alike)]


class Several:
  """The same step on several replicas, and why it differs."""

  def __init__(self, compared: Comparison) -> None:
    self.compared, self.task = compared, compared.task
    self.counted = ""

  def same_update(self, replicas: int) -> Iterator[Result]:
    """Compares each case on N replicas with one replica."""
    name = f"same update on {replicas} replicas"
    here = Bench(self.compared.subject, replicas, rows=self.compared.rows, **PLAIN)
    held = held_state.held(here.task)
    outcomes = self.compared.outcomes(here)
    self.counted = _counted(held, held_state.held(here.task))
    found = self.compared.differences(outcomes, self.compared.state)
    worst = max(found, key=lambda case: found[case].worst)
    drift = max(_drift(outcome, here.trainable) for outcome in outcomes.values())
    values = {case: difference.worst for case, difference in found.items()}
    if found[worst].worst > self.compared.tolerance or drift > 0:
      yield self._diverged(name, replicas, outcomes, found, drift, values)
      return
    yield GROUP.passed(
      name, values=values,
      detail=f"full, uneven and weighted batch: relative difference {found[worst].worst:.1e} "
      f"(rounding: up to {self.compared.tolerance:.0e})",
    )  # fmt: skip
    if self.compared.state:
      yield self._same_state(f"same state on {replicas} replicas", outcomes)
    wrong = {case: difference.metrics for case, difference in found.items() if difference.metrics}
    yield self._metrics(f"same metrics on {replicas} replicas", wrong)

  def _same_state(self, name: str, outcomes: Mapping[str, Outcome]) -> Result:
    """Compares the model's other variables, on each replica."""
    replicas = range(len(outcomes["full batch"].after[0]))
    of_each = (
      self.compared.differences(outcomes, self.compared.updated, each) for each in replicas
    )
    found = [pair for of_one in of_each for pair in of_one.items()]
    case, worst = max(found, key=lambda pair: pair[1].worst)
    if worst.worst <= self.compared.tolerance:
      told = f"{len(self.compared.state)} variables that no optimizer updates"
      return GROUP.passed(name, told)
    variable = self.compared.alone.variables[worst.first]
    local = [v for layer in normalisations(self.task.model) for v in layer.variables]
    if id(variable) in {id(models.raw(v)) for v in local}:
      why, place = BATCH_NORM, self.compared.find(BATCH_NORM)
    else:
      why, place = LOCAL_STATE, self._assigned(self.compared.alone.names[worst.first])
    return GROUP.failed(name, f"{case}: {worst.detail}", why.cause, why.remedy, place)

  def _assigned(self, variable: str) -> str:
    """Returns the line that assigns to a variable."""
    made = [
      call.place for call in self.compared.calls if (call.verb, call.what) == ("assign", variable)
    ]
    texts = (".assign",)
    return next(iter(made), source_lines.find(self.task, *METHODS, containing=texts, anywhere=True))

  def _metrics(self, name: str, wrong: Mapping[str, str]) -> Result:
    if not wrong:
      logged = ", ".join(sorted(self.compared.reference["full batch"].metrics))
      return GROUP.passed(name, logged)
    case, detail = next(iter(wrong.items()))
    if place := self._ranked(wrong):
      return GROUP.failed(name, f"{case}: {detail}", RANKED.cause, RANKED.remedy, place)
    return GROUP.failed(
      name, detail=f"{case}: {detail}",
      cause="metric read in replica context",
      remedy="return sums over this replica's examples, (total, weight), as weighted_sum does; the "
      "framework computes results and means over all replicas",
      place=source_lines.find(self.task, "metrics", "train_step", containing=RESULTS),
    )  # fmt: skip

  def _ranked(self, wrong: Mapping[str, str]) -> str:
    """Returns the line where a metric compares rows; "" if it is a mean of means, or read there.

    A mean of the means of equal parts is right.
    """
    weights = set(self.compared.batch["weight"].tolist())
    if "full batch" not in wrong or len(weights) > 1 or source_lines.mention(self.task, "result("):
      return ""
    return self.compared.meeting.place

  def _diverged(
    self, name: str, replicas: int, outcomes: Mapping[str, Outcome],
    found: Mapping[str, Difference], drift: float, values: dict[str, Any],
  ) -> Result:  # fmt: skip
    case = max(found, key=lambda case: found[case].worst)
    wrong = self._wrong(found.values())
    explanation, place = self._explain(replicas, outcomes, wrong, drift)
    owners = dict.fromkeys(
      o for o, w in zip(self.compared.alone.by_optimizer, wrong, strict=True) if w
    )
    several = len(self.compared.alone.trainer.parts.optimizers) > 1
    return GROUP.failed(
      name, values=values,
      detail=f"{case}: {found[case].detail}"
      + (f"; replicas differ by {drift:.1e}" if drift else "")
      + (f"; optimizer: {', '.join(owners)}" if several else ""),
      cause=explanation.cause, remedy=explanation.remedy,
      place=place or self.compared.find(explanation),
    )  # fmt: skip

  def _wrong(self, found: Iterable[Difference]) -> list[bool]:
    """Returns whether each variable belongs to an optimizer whose update differs."""
    owners = self.compared.alone.by_optimizer
    wrong = {
      owners[index]
      for difference in found
      for index, relative in enumerate(difference.relative)
      if relative > self.compared.tolerance
    }
    return [owner in wrong if wrong else owner != "" for owner in owners]

  def _explain(
    self, replicas: int, outcomes: Mapping[str, Outcome], wrong: Sequence[bool], drift: float
  ) -> tuple[Explanation, str]:
    """Returns why the update differs, in the `wrong` variables, and the line if it is known."""
    if (
      self.compared.difference(self.compared.again, self.compared.reference["full batch"]).worst
      > LEAST
    ):
      return STATEFUL, ""
    if self.compared.retraced().worst > self.compared.tolerance:
      return TRACED_VALUE, ""
    mistake = order.wrong_update(self.compared.calls)
    if mistake and mistake[0] in (NEVER_REDUCED, LOCAL_OFFSETS, LOCAL_WEIGHT):
      return mistake[0], mistake[1].place
    parts = self.compared.parts_of_cases(replicas, wrong)
    seen = self.compared.updates(outcomes, wrong)
    whole = self.compared.updates(self.compared.reference, wrong)
    if drift and all(
      fits(self.compared.flat(outcomes[case], wrong, replica), part)
      for case in outcomes
      for replica, (part, weight) in enumerate(parts[case])
      if weight
    ):
      return NEVER_REDUCED, ""
    if any(not synchronised(layer) for layer in normalisations(self.task.model)):
      return BATCH_NORM, ""
    if self.compared.subject.accumulation_steps > 1 and normalisations(self.task.model):
      return MICRO_BATCH_NORM, ""
    for explanation, predict in PREDICTIONS:
      if all(fits(seen[case], predict(whole[case], parts[case])) for case in seen):
        by_factor = explanation in (TWICE, LOCAL_BATCH) and not mistake
        place = source_lines.mention(self.task, "num_replicas") if by_factor else ""
        return (REPLICA_FACTOR, place) if place else (explanation, "")
    if self.compared.has_penalty(seen, whole):
      return REGULARISATION, ""
    if mistake:
      return mistake[0], mistake[1].place
    additive = all(fits(whole[case], weighted_mean(parts[case])) for case in whole)
    if self.compared.known is not None:
      return self.compared.known, ""
    if not additive or self.compared.meeting.place:
      return self.compared.coupling(), ""
    if self.counted:
      return PYTHON_VALUE, source_lines.change(self.task, self.counted)
    return UNKNOWN, ""


def _drift(outcome: Outcome, trainable: Sequence[bool]) -> float:
  """Returns how far trained variables differ between replicas, as an absolute value."""
  apart = [
    np.abs(copy.astype(np.float64) - copies[0]).max(initial=0.0)
    for copies, trained in zip(outcome.after, trainable, strict=True)
    if trained
    for copy in copies[1:]
  ]
  return float(max(apart, default=0.0))


def _counted(before: Mapping[str, Held], after: Mapping[str, Held]) -> str:
  """Returns an attribute of the task that held another Python value before; "" if none did."""
  for name, now in after.items():
    then = before.get(name)
    if now.kind == "Python value" and (then is None or then.value != now.value):
      return now.attribute
  return ""
