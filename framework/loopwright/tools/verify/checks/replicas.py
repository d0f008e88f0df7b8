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

import numpy as np

from loopwright.models import models
from loopwright.tools.verify.bench import explanations as known
from loopwright.tools.verify.bench import layer_calls, random_draws, recorded_step, source_lines
from loopwright.tools.verify.bench.bench import PLAIN, Bench, Outcome, Subject
from loopwright.tools.verify.bench.comparison import LEAST, Comparison, Difference
from loopwright.tools.verify.bench.explanations import PREDICTIONS, fits, weighted_mean
from loopwright.tools.verify.checks import order, own_optimizer, padding
from loopwright.tools.verify.report import Group, Result

GROUP = Group("replicas")


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  compared = Comparison(subject, rows=subject.divisible_rows)
  results = list(padding.on_one(compared))
  if results[0].status == "failed":
    return results  # steps that do not repeat cannot be compared
  updates = [result for n in (2, 3) for result in same_update(compared, n)]
  results += updates
  if any(result.cause == known.NEVER_REDUCED for result in updates):
    return results  # what follows repeats it in other words
  alike = not any(result.status == "failed" and "metrics" not in result.check for result in updates)
  return [*results, *own_optimizer.same_with_options(compared, alike=alike)]


def same_update(of: Comparison, replicas: int) -> Iterator[Result]:
  """Compares each case on N replicas with one replica; yields what differs first."""
  name = f"same update on {replicas} replicas"
  here = Bench(of.subject, replicas, rows=of.rows, **PLAIN)
  outcomes = of.outcomes(here)
  found = of.differences(outcomes, of.state)
  case = max(found, key=lambda case: found[case].worst)
  drift = max(_drift(outcome, here.trainable) for outcome in outcomes.values())
  if found[case].worst > of.tolerance or drift > 0:
    wrong = _wrong(of, found.values())
    told = f"{case}: {found[case].detail}"
    yield GROUP.failed(name, told, *_explain(of, replicas, outcomes, wrong, drift))
    return
  yield GROUP.passed(name, f"relative difference {found[case].worst:.1e}, of {len(found)} batches")
  if of.state:
    yield _same_state(of, f"same state on {replicas} replicas", outcomes)
  metrics = {case: difference.metrics for case, difference in found.items() if difference.metrics}
  yield _metrics(of, f"same metrics on {replicas} replicas", metrics)


def _same_state(of: Comparison, name: str, outcomes: Mapping[str, Outcome]) -> Result:
  """Compares the model's other variables, on each replica."""
  replicas = range(len(outcomes["full batch"].after[0]))
  of_each = (of.differences(outcomes, of.updated, each) for each in replicas)
  found = [pair for of_one in of_each for pair in of_one.items()]
  case, worst = max(found, key=lambda pair: pair[1].worst)
  if worst.worst <= of.tolerance:
    return GROUP.passed(name, f"{len(of.state)} variables that no optimizer updates")
  told = f"{case}: {worst.detail}"
  local = [v for layer in layer_calls.normalisations(of.task.model) for v in layer.variables]
  if id(of.alone.variables[worst.first]) in {id(models.raw(v)) for v in local}:
    return GROUP.failed(name, told, *_normalised(of))
  return GROUP.failed(name, told, known.LOCAL_STATE, of.assigned_at(worst.first))


def _metrics(of: Comparison, name: str, wrong: Mapping[str, str]) -> Result:
  if not wrong:
    return GROUP.passed(name, ", ".join(sorted(of.reference["full batch"].metrics)))
  case, detail = next(iter(wrong.items()))
  # a mean of the means of equal parts is right, so in a full batch the metric compares rows
  equal = len(set(of.batch["weight"].tolist())) == 1
  if "full batch" in wrong and equal and of.meeting.place:
    return GROUP.failed(name, f"{case}: {detail}", known.COUPLED, of.meeting.place)
  place = of.metric_place(detail)
  return GROUP.failed(name, f"{case}: {detail}", "metric read in replica context", place)


def _wrong(of: Comparison, found: Iterable[Difference]) -> list[bool]:
  """Returns whether each variable belongs to an optimizer whose update differs."""
  owners = of.alone.by_optimizer
  wrong = {
    owners[index]
    for difference in found
    for index, relative in enumerate(difference.relative)
    if relative > of.tolerance
  }
  return [owner in wrong if wrong else owner != "" for owner in owners]


def _explain(
  of: Comparison, replicas: int, outcomes: Mapping[str, Outcome], wrong: Sequence[bool],
  drift: float,
) -> tuple[str, str]:  # fmt: skip
  """Returns the cause and the place of an update that differs, in the `wrong` variables."""
  if of.difference(of.again, of.reference["full batch"]).worst > LEAST:
    return random_draws.STATEFUL, of.unsteady().get(random_draws.STATEFUL, "")
  if of.retraced().worst > of.tolerance:
    return known.PYTHON_VALUE, of.constant_place()
  mistake = order.wrong_update(of.calls)
  if mistake and mistake[0] in (known.NEVER_REDUCED, known.LOCAL_OFFSETS, known.LOCAL_WEIGHT):
    return mistake
  seen, whole, parts = of.predicted(outcomes, replicas, wrong)
  if drift and all(
    fits(of.flat(outcomes[case], wrong, replica), part)
    for case in outcomes
    for replica, (part, weight) in enumerate(parts[case])
    if weight
  ):
    return known.NEVER_REDUCED, of.verb_place("apply")
  micro_batches = of.subject.accumulation_steps > 1
  if any(models.locally_normalised(of.task.model)) or (
    micro_batches and layer_calls.normalisations(of.task.model)
  ):
    return _normalised(of)
  for cause, predict in PREDICTIONS:
    if all(fits(seen[case], predict(whole[case], parts[case])) for case in seen):
      by_factor = cause in (known.TWICE, known.LOCAL_BATCH) and not mistake
      if place := own_optimizer.reads_replicas(of) if by_factor else "":
        return "loss scaled by the number of replicas", place
      twice = of.verb_place("all_reduce", recorded_step.OWN)
      return cause, twice if cause == known.TWICE else of.loss_place()
  if of.has_penalty(seen, whole):
    return "regularisation counted N times", of.loss_place()
  if mistake or of.blamed:
    return mistake or of.blamed or ("", "")
  if of.meeting.place or not all(fits(whole[c], weighted_mean(parts[c])) for c in whole):
    return of.coupling()
  return known.UNKNOWN, ""


def _normalised(of: Comparison) -> tuple[str, str]:
  return "batch-norm statistics", source_lines.method(of.task, "build_model")


def _drift(outcome: Outcome, trainable: Sequence[bool]) -> float:
  """Returns how far trained variables differ between replicas, as an absolute value."""
  apart = [
    np.abs(copy.astype(np.float64) - copies[0]).max(initial=0.0)
    for copies, trained in zip(outcome.after, trainable, strict=True)
    if trained
    for copy in copies[1:]
  ]
  return float(max(apart, default=0.0))
