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
from loopwright.tools.verify.bench import held_state, layer_calls, source_lines
from loopwright.tools.verify.bench.bench import PLAIN, Bench, Outcome, Subject
from loopwright.tools.verify.bench.comparison import LEAST, METHODS, Comparison, Difference
from loopwright.tools.verify.bench.explanations import PREDICTIONS, fits, weighted_mean
from loopwright.tools.verify.bench.held_state import Held
from loopwright.tools.verify.checks import order, own_optimizer, padding
from loopwright.tools.verify.report import Explanation, Group, Result

GROUP = Group("replicas")
RESULTS = ("result(", "reduce_mean", "log(")


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  compared = Comparison(subject, rows=subject.divisible_rows)
  results = list(padding.on_one(compared))
  if results[0].status == "failed":
    return results  # steps that do not repeat cannot be compared
  updates = [result for n in (2, 3) for result in same_update(compared, n)]
  results += updates
  if any(result.cause == known.NEVER_REDUCED.cause for result in updates):
    return results  # what follows repeats it in other words
  alike = not any(result.status == "failed" and "metrics" not in result.check for result in updates)
  return [*results, *own_optimizer.same_with_options(compared, alike=alike)]


def same_update(of: Comparison, replicas: int) -> Iterator[Result]:
  """Compares each case on N replicas with one replica; yields what differs first."""
  name = f"same update on {replicas} replicas"
  here = Bench(of.subject, replicas, rows=of.rows, **PLAIN)
  held = held_state.held(here.task)
  outcomes = of.outcomes(here)
  counted = _counted(held, held_state.held(here.task))
  found = of.differences(outcomes, of.state)
  case = max(found, key=lambda case: found[case].worst)
  drift = max(_drift(outcome, here.trainable) for outcome in outcomes.values())
  values = {case: difference.worst for case, difference in found.items()}
  if found[case].worst > of.tolerance or drift > 0:
    wrong = _wrong(of, found.values())
    why, place = _explain(of, replicas, outcomes, wrong, drift, counted)
    owners = dict.fromkeys(o for o, w in zip(of.alone.by_optimizer, wrong, strict=True) if w)
    several = len(of.alone.trainer.parts.optimizers) > 1
    told = f"{case}: {found[case].detail}"
    told += f"; replicas differ by {drift:.1e}" if drift else ""
    told += f"; optimizer: {', '.join(owners)}" if several else ""
    yield GROUP.explained(name, told, why, place or of.find(why), values=values)
    return
  told = f"full, uneven and weighted batch: relative difference {found[case].worst:.1e} "
  yield GROUP.passed(name, f"{told}(rounding: up to {of.tolerance:.0e})", values=values)
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
    return GROUP.explained(name, told, known.BATCH_NORM, of.find(known.BATCH_NORM))
  assigned = ("assign", of.alone.names[worst.first])
  made = [call.place for call in of.calls if (call.verb, call.what) == assigned]
  other = source_lines.find(of.task, *METHODS, containing=(".assign",), anywhere=True)
  return GROUP.explained(name, told, known.LOCAL_STATE, next(iter(made), other))


def _metrics(of: Comparison, name: str, wrong: Mapping[str, str]) -> Result:
  if not wrong:
    return GROUP.passed(name, ", ".join(sorted(of.reference["full batch"].metrics)))
  case, detail = next(iter(wrong.items()))
  if place := _ranked(of, wrong):
    return GROUP.explained(name, f"{case}: {detail}", known.COUPLED, place)
  place = source_lines.find(of.task, "metrics", "train_step", containing=RESULTS)
  return GROUP.failed(name, f"{case}: {detail}", "metric read in replica context", place)


def _ranked(of: Comparison, wrong: Mapping[str, str]) -> str:
  """Returns the line where a metric compares rows; "" if it is a mean of means, or read there.

  A mean of the means of equal parts is right.
  """
  weights = set(of.batch["weight"].tolist())
  if "full batch" not in wrong or len(weights) > 1 or source_lines.mention(of.task, "result("):
    return ""
  return of.meeting.place


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
  drift: float, counted: str,
) -> tuple[Explanation, str]:  # fmt: skip
  """Returns why the update differs, in the `wrong` variables, and the line if it is known."""
  if of.difference(of.again, of.reference["full batch"]).worst > LEAST:
    return known.STATEFUL, ""
  if of.retraced().worst > of.tolerance:
    return known.TRACED_VALUE, ""
  mistake = order.wrong_update(of.calls)
  if mistake and mistake[0] in (known.NEVER_REDUCED, known.LOCAL_OFFSETS, known.LOCAL_WEIGHT):
    return mistake[0], mistake[1].place
  parts = of.parts_of_cases(replicas, wrong)
  seen, whole = of.updates(outcomes, wrong), of.updates(of.reference, wrong)
  if drift and all(
    fits(of.flat(outcomes[case], wrong, replica), part)
    for case in outcomes
    for replica, (part, weight) in enumerate(parts[case])
    if weight
  ):
    return known.NEVER_REDUCED, ""
  micro_batches = of.subject.accumulation_steps > 1
  if any(models.locally_normalised(of.task.model)) or (
    micro_batches and layer_calls.normalisations(of.task.model)
  ):
    return known.BATCH_NORM, ""
  for explanation, predict in PREDICTIONS:
    if all(fits(seen[case], predict(whole[case], parts[case])) for case in seen):
      by_factor = explanation in (known.TWICE, known.LOCAL_BATCH) and not mistake
      place = source_lines.mention(of.task, "num_replicas") if by_factor else ""
      return (known.REPLICA_FACTOR, place) if place else (explanation, "")
  if of.has_penalty(seen, whole):
    return known.REGULARISATION, ""
  if mistake:
    return mistake[0], mistake[1].place
  additive = all(fits(whole[case], weighted_mean(parts[case])) for case in whole)
  if of.blamed is not None:
    return of.blamed, ""
  if not additive or of.meeting.place:
    return of.coupling(), ""
  if counted:
    return known.PYTHON_VALUE, source_lines.change(of.task, counted)
  return known.UNKNOWN, ""


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
