"""The same update on 1 and on N replicas; if it differs, which known mistake explains it.

One step of plain gradient descent, whose update is the gradient, runs from the same weights on 1, 2
and 3 logical CPUs: with a full batch, one that does not divide (the last replica has only padding)
and unequal weights. Then several steps run with the config's own optimizer, clipping,
micro-batches, loss scaling, and an infinity in the last replica's last example.

From the gradients of each replica's rows alone, each known mistake predicts another update. The one
whose prediction fits all cases is reported.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from framework import configurables
from framework.backend import models
from framework.errors import ConfigError
from framework.inputs.parts import prefixes
from framework.optimizers.loss_scale import dynamic
from framework.verify.bench import (
  bench,
  held_state,
  random_draws,
  recording,
  source_lines,
)
from framework.verify.bench.bench import Bench, Outcome, Rows, Subject
from framework.verify.bench.held_state import Held
from framework.verify.checks import order
from framework.verify.checks.order import LOCAL_CONDITION, LOCAL_STATE
from framework.verify.report import Result

GROUP = "replicas"
LEAST = 5e-5
"""A smaller relative difference is always rounding."""
MOST = 1e-3
"""A larger relative difference is never rounding."""
AFTER_STEPS = 2e-2
"""Tolerance after several steps, relative to the change: Adam at first amplifies roundings."""
FITS = 0.02
PADDING = "padding counts"
OTHER_CONTENTS = "other contents of the padded rows"
RESULTS = ("result(", "reduce_mean", "log(")
SUMS = ("reduce_mean", "from_examples(", "weighted_sum(", "Loss(")
METHODS = ("train_step", "loss", "training_loss", "forward", "build_model")


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  comparison = Comparison(subject, rows=subject.divisible_rows)
  results = [comparison.repeatable()]
  if results[0].status == "failed":
    return results  # steps that do not repeat cannot be compared
  results += comparison.padding()
  results.append(comparison.weights(known=results[-1].cause == PADDING))
  updates = [result for n in (2, 3) for result in comparison.same_update(n)]
  alike = not any(result.status == "failed" and "metrics" not in result.check for result in updates)
  if any(result.cause == NEVER_REDUCED.cause for result in updates):
    return [*results, *updates]  # what follows repeats it in other words
  return [*results, *updates, *comparison.same_with_options(alike=alike)]


class Comparison:
  """The step on one replica, and comparisons of others with it."""

  def __init__(self, subject: Subject, *, rows: int) -> None:
    """Runs the reference steps."""
    self.subject, self.rows = subject, rows
    self.alone = Bench(subject, rows=rows, optimizer=bench.gradient_descent, always=True)
    self.task = self.alone.task
    self.batch = subject.rows(self.task, rows)
    self.real = rows * 7 // 12
    self.start = self.alone.read()
    self._fill_state()
    self.trained = self.alone.trainable
    self.state = frozenset(i for i, trained in enumerate(self.trained) if not trained)
    self.updated = frozenset(range(len(self.trained))) - self.state
    self.cases: dict[str, Rows] = {
      "full batch": self.batch,
      "batch that does not divide": bench.padded(self.batch, self.real),
      "unequal weights": bench.weighted(self.batch),
    }
    self.reference = {name: self.on_one(case) for name, case in self.cases.items()}
    self._again = self.on_one(self.batch)
    backwards = {name: self.on_one(_backwards(case)) for name, case in self.cases.items()}
    differences = [self.difference(backwards[name], self.reference[name]) for name in self.cases]
    rounding = max(difference.worst for difference in differences)
    self.tolerance = min(MOST, max(LEAST, 20 * rounding))

    self.known: Explanation | None = None  # what padding has shown
    self.counted = ""
    self.noisy = _noisy(backwards["full batch"], self.reference["full batch"])

  def _fill_state(self) -> None:
    """Begins after two steps if a step keeps state: the loss of an empty queue may be constant."""
    self.on_one(self.batch)
    if not self.alone.keeps_state:
      return
    self.alone.assign(self.start)
    for steps in (1, 2):
      self.alone.step(self.subject.rows(self.task, self.rows, position=steps * self.rows))
    self.start = self.alone.read()

  def on_one(self, batch: Rows) -> Outcome:
    """Runs one step from the initial weights on one replica."""
    return self.alone.steps_from(self.start, batch)

  # ---- On one replica ----

  def repeatable(self) -> Result:
    """Checks that the same step repeats; if not, it draws random numbers without a seed."""
    found = self.difference(self._again, self.reference["full batch"])
    if found.worst <= LEAST:
      return Result(group=GROUP, check="same step twice", status="passed", detail=found.detail)
    return Result(
      group=GROUP, check="same step twice", status="failed", detail=found.detail,
      cause=STATEFUL.cause, remedy=STATEFUL.remedy,
      place=self._find(STATEFUL),
    )  # fmt: skip

  def padding(self) -> Iterator[Result]:
    """Checks that the contents and the number of rows of weight 0 change nothing."""
    found, what = self._padded()
    if found.worst <= self.tolerance and not found.metrics:
      yield Result(
        group=GROUP, check="padding changes nothing", status="passed", detail=found.detail
      )
    elif normalised := [layer.name for layer in normalisations(self.task.model)]:
      why = f"{normalised[0]} normalises over all rows of a batch, padding included"
      yield Result(
        group=GROUP, check="padding changes nothing", status="not applicable", detail=why
      )
    elif found.worst > self.tolerance and what == OTHER_CONTENTS and self._mixes():
      self.known = COUPLED
      yield Result(
        group=GROUP, check="padding changes nothing", status="failed",
        detail=f"with {what}: {found.detail}", cause=COUPLED.cause, remedy=COUPLED.remedy,
        place=self._find(COUPLED),
      )  # fmt: skip
    else:
      yield self._padding_counts(found, what)

  def _mixes(self) -> bool:
    """Whether rows change the part of others in the update, rather than add an own part.

    Then the update depends on which rows have which weights, but not on the size of all weights.
    """
    rows = self.cases["batch that does not divide"]
    smaller = {**rows, "weight": rows["weight"] / 16}
    found = self.difference(self.on_one(smaller), self.on_one(rows), without=self.state)
    return found.worst <= self.tolerance and self._weights_count() is not None

  def _weights_count(self) -> Difference | None:
    """Returns how the update changes when rows exchange their weights; None if it does not."""
    rows = self.cases["unequal weights"]
    turned = self.on_one({**rows, "weight": rows["weight"][::-1]})
    found = self.difference(turned, self.reference["unequal weights"], without=self.state)
    return found if found.worst > self.tolerance else None

  def _padded(self) -> tuple[Difference, str]:
    """Returns the first difference that padding makes, and how it was made; else a small one."""
    real = np.arange(self.rows) < self.real
    padded = self.cases["batch that does not divide"]
    other = self._one_after(bench.masked(self.batch, real), padded)
    if other.worst <= self.tolerance and not other.metrics and (fewer := self._without_padding()):
      return fewer, f"{self.rows // 2} rows and no padding"
    return other, OTHER_CONTENTS

  def _one_after(self, batch: Rows, other: Rows) -> Difference:
    """Compares the steps on two batches, and those after them, which may use kept state."""
    outcomes = [self.on_one(each) for each in (batch, other)]
    found = self.difference(*outcomes, without=self.state)
    if found.worst > self.tolerance or found.metrics or not self.state:
      return found
    after = [
      self.alone.steps_from(
        [b if used else a[0] for a, b, used in zip(o.after, self.start, self.trained, strict=True)],
        self.batch,
      )
      for o in outcomes
    ]
    return self.difference(*after, without=self.state)

  def _without_padding(self) -> Difference | None:
    """Compares half the rows with the same rows padded; None if the task needs its row count."""
    half = self.rows // 2
    padded = self.on_one(bench.padded(self.batch, half))
    try:
      plain: dict[str, Any] = {"optimizer": bench.gradient_descent, "always": True}
      here = Bench(self.subject, rows=half, eager=True, **plain)
      short = {name: value[:half] for name, value in self.batch.items()}
      return self.difference(here.steps_from(self.start, short), padded, without=self.state)
    except (ConfigError, ValueError, tf.errors.InvalidArgumentError):
      return None

  def _padding_counts(self, found: Difference, what: str) -> Result:
    in_update = found.worst > self.tolerance
    methods = ("loss", "train_step", "training_loss") if in_update else ("metrics",)
    self.known = COUNTS if in_update else None
    return Result(
      group=GROUP, check="padding changes nothing", status="failed",
      detail=f"with {what}: {found.detail}",
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
      return Result(
        group=GROUP, check=name, status="passed",
        detail=f"other weights change the update, by {min(found.worst, 9.99):.2g}",
      )  # fmt: skip
    half = self.rows // 2
    alone = [
      self.on_one({n: np.concatenate([v[rows]] * 2) for n, v in self.batch.items()})
      for rows in (slice(0, half), slice(half, 2 * half))
    ]
    same = self.difference(*alone, without=self.state).worst <= self.tolerance
    if same or known:
      why = "all rows of the batch give the same update" if same else "padding counts, see above"
      return Result(group=GROUP, check=name, status="not applicable", detail=why)
    return Result(
      group=GROUP, check=name, status="failed",
      detail="the update stays the same when the rows exchange their weights",
      cause="weights are ignored",
      remedy="weight each example, as Loss.from_examples(per_example, batch['weight']) does: "
      "padded rows have weight 0",
      place=source_lines.find(self.task, "loss", "train_step", "training_loss", containing=SUMS),
    )  # fmt: skip

  # ---- On several ----

  def same_update(self, replicas: int) -> Iterator[Result]:
    """Compares each case on N replicas with one replica."""
    name = f"same update on {replicas} replicas"
    plain: dict[str, Any] = {"optimizer": bench.gradient_descent, "always": True}
    here = Bench(self.subject, replicas, rows=self.rows, **plain)
    held = held_state.held(here.task)
    outcomes = {case: here.steps_from(self.start, rows) for case, rows in self.cases.items()}
    self.counted = _counted(held, held_state.held(here.task))
    found = {
      case: self.difference(outcome, self.reference[case], without=self.state)
      for case, outcome in outcomes.items()
    }
    worst = max(found, key=lambda case: found[case].worst)
    drift = max(_drift(outcome, here.trainable) for outcome in outcomes.values())
    values = {case: difference.worst for case, difference in found.items()}
    if found[worst].worst > self.tolerance or drift > 0:
      yield self._diverged(name, replicas, outcomes, found, drift, values)
      return
    yield Result(
      group=GROUP, check=name, status="passed", values=values,
      detail=f"full, uneven and weighted batch: relative difference {found[worst].worst:.1e} "
      f"(rounding: up to {self.tolerance:.0e})",
    )  # fmt: skip
    if self.state:
      yield self._same_state(f"same state on {replicas} replicas", outcomes)
    wrong = {case: difference.metrics for case, difference in found.items() if difference.metrics}
    yield self._metrics(f"same metrics on {replicas} replicas", wrong)

  def _same_state(self, name: str, outcomes: Mapping[str, Outcome]) -> Result:
    """Compares the model's other variables, on each replica."""
    found = [
      (case, self.difference(outcome, self.reference[case], without=self.updated, replica=replica))
      for case, outcome in outcomes.items()
      for replica in range(len(outcome.after[0]))
    ]
    case, worst = max(found, key=lambda pair: pair[1].worst)
    if worst.worst <= self.tolerance:
      told = f"{len(self.state)} variables that no optimizer updates"
      return Result(group=GROUP, check=name, status="passed", detail=told)
    variable = self.alone.variables[worst.first]
    local = [v for layer in normalisations(self.task.model) for v in layer.variables]
    if id(variable) in {id(models.raw(v)) for v in local}:
      cause, remedy, place = BATCH_NORM.cause, BATCH_NORM.remedy, self._find(BATCH_NORM)
    else:
      cause, remedy = LOCAL_STATE
      place = self._assigned(self.alone.names[worst.first])
    return Result(
      group=GROUP, check=name, status="failed", detail=f"{case}: {worst.detail}",
      cause=cause, remedy=remedy, place=place,
    )  # fmt: skip

  def _assigned(self, variable: str) -> str:
    """Returns the line that assigns to a variable."""
    made = [call.place for call in self._calls if (call.verb, call.what) == ("assign", variable)]
    texts = (".assign",)
    return next(iter(made), source_lines.find(self.task, *METHODS, containing=texts, anywhere=True))

  def _find(self, explanation: Explanation) -> str:
    texts = explanation.containing
    return source_lines.find(self.task, *METHODS, containing=texts, anywhere=True)

  def _metrics(self, name: str, wrong: Mapping[str, str]) -> Result:
    if not wrong:
      logged = ", ".join(sorted(self.reference["full batch"].metrics))
      return Result(group=GROUP, check=name, status="passed", detail=logged)
    case, detail = next(iter(wrong.items()))
    return Result(
      group=GROUP, check=name, status="failed", detail=f"{case}: {detail}",
      cause="metric read in replica context",
      remedy="return sums over this replica's examples, (total, weight), as weighted_sum does; the "
      "framework computes results and means over all replicas",
      place=source_lines.find(self.task, "metrics", "train_step", containing=RESULTS),
    )  # fmt: skip

  def _diverged(
    self, name: str, replicas: int, outcomes: Mapping[str, Outcome],
    found: Mapping[str, Difference], drift: float, values: dict[str, Any],
  ) -> Result:  # fmt: skip
    case = max(found, key=lambda case: found[case].worst)
    wrong = self._wrong(found.values())
    explanation, place = self._explain(replicas, outcomes, wrong, drift)
    owners = dict.fromkeys(o for o, w in zip(self.alone.by_optimizer, wrong, strict=True) if w)
    several = len(self.alone.trainer.parts.optimizers) > 1
    return Result(
      group=GROUP, check=name, status="failed", values=values,
      detail=f"{case}: {found[case].detail}"
      + (f"; replicas differ by {drift:.1e}" if drift else "")
      + (f"; optimizer: {', '.join(owners)}" if several else ""),
      cause=explanation.cause, remedy=explanation.remedy,
      place=place or self._find(explanation),
    )  # fmt: skip

  def _wrong(self, found: Iterable[Difference]) -> list[bool]:
    """Returns whether each variable belongs to an optimizer whose update differs."""
    owners = self.alone.by_optimizer
    wrong = {
      owners[index]
      for difference in found
      for index, relative in enumerate(difference.relative)
      if relative > self.tolerance
    }
    return [owner in wrong if wrong else owner != "" for owner in owners]

  def _explain(
    self, replicas: int, outcomes: Mapping[str, Outcome], wrong: Sequence[bool], drift: float
  ) -> tuple[Explanation, str]:
    """Returns why the update differs, in the `wrong` variables, and the line if it is known."""
    if self.difference(self._again, self.reference["full batch"]).worst > LEAST:
      return STATEFUL, ""
    mistake = order.wrong_update(self._calls)
    if mistake and mistake[0] == NEVER_REDUCED.cause:
      return NEVER_REDUCED, mistake[2].place
    parts = {case: self._parts(rows, replicas, wrong) for case, rows in self.cases.items()}
    seen = {case: self.flat(outcome, wrong) for case, outcome in outcomes.items()}
    whole = {case: self.flat(outcome, wrong) for case, outcome in self.reference.items()}
    if drift and all(
      _fits(self.flat(outcomes[case], wrong, replica), part)
      for case in outcomes
      for replica, (part, weight) in enumerate(parts[case])
      if weight
    ):
      return NEVER_REDUCED, ""
    if any(not synchronised(layer) for layer in normalisations(self.task.model)):
      return BATCH_NORM, ""
    if self.subject.accumulation_steps > 1 and normalisations(self.task.model):
      return MICRO_BATCH_NORM, ""
    for explanation, predict in PREDICTIONS:
      if all(_fits(seen[case], predict(whole[case], parts[case])) for case in seen):
        by_factor = explanation in (TWICE, LOCAL_BATCH) and not mistake
        place = source_lines.mention(self.task, "num_replicas") if by_factor else ""
        return (REPLICA_FACTOR, place) if place else (explanation, "")
    excess = [(seen[case] - whole[case]) for case in seen]
    weights = [float(rows["weight"].sum()) for rows in self.cases.values()]
    for scales in ([1.0] * len(excess), weights):
      scaled = [scale * each for scale, each in zip(scales, excess, strict=True)]
      if all(_fits(each, scaled[0]) for each in scaled[1:]):
        return REGULARISATION, ""
    if mistake:
      cause, remedy, call = mistake
      return Explanation(cause=cause, remedy=remedy), call.place
    additive = all(_fits(whole[case], _weighted_mean(parts[case])) for case in whole)
    if self.known is not None:
      return self.known, ""
    if not additive:
      return COUPLED, ""
    if self.counted:
      return PYTHON_VALUE, source_lines.change(self.task, self.counted)
    return UNKNOWN, ""

  @functools.cached_property
  def _calls(self) -> Sequence[recording.Call]:
    return recording.record(self.subject)[0].calls

  def _coupled(self) -> bool:
    """Whether the update of an example depends on others, so that micro-batches change it."""
    if normalisations(self.task.model):
      return True
    parts = self._parts(self.batch, 2, self.trained)
    whole = self.flat(self.reference["full batch"], self.trained)
    return not _fits(whole, _weighted_mean(parts))

  def _parts(
    self, rows: Rows, replicas: int, used: Sequence[bool]
  ) -> list[tuple[np.ndarray, float]]:
    """Returns, per replica, the update of its rows alone (on one replica) and their weight."""
    owner = np.arange(self.rows) * replicas // self.rows
    alone = [bench.masked(rows, owner == replica) for replica in range(replicas)]
    return [
      (np.nan_to_num(self.flat(self.on_one(each), used)), each["weight"].sum()) for each in alone
    ]

  # ---- With the config's optimizer and every option ----

  def same_with_options(self, *, alike: bool) -> Iterator[Result]:
    """Checks several steps with all options on; if they differ, each option alone.

    Args:
      alike: whether the bare updates agree; otherwise only the overflow is checked.
    """
    name = "same weights after 4 steps"
    options = self._options()
    try:
      steps = self._run_options(options)
    except ValueError:
      if self.subject.accumulation_steps > 1:
        raise
      options.pop("accumulation", None)  # the task splits the batch itself, so the config does not
      steps = self._run_options(options)
    told = f"own optimizer, {', '.join(options)}"
    overflow = steps.pop("overflow")
    worst = max(steps.values(), key=lambda each: each.worst)
    if not alike:
      why = "a single step differs; fix that first"
      yield Result(group=GROUP, check=name, status="not applicable", detail=why)
    elif worst.worst <= AFTER_STEPS:
      yield Result(
        group=GROUP, check=name, status="passed",
        detail=f"{told}: relative difference {worst.worst:.1e}",
        values={str(replicas): each.worst for replicas, each in steps.items()},
      )  # fmt: skip
    elif condition := self._local_condition():
      cause, remedy = LOCAL_CONDITION
      yield Result(
        group=GROUP, check=name, status="failed", detail=worst.detail, cause=cause, remedy=remedy,
        place=condition.place,
      )  # fmt: skip
      return
    else:
      yield self._option_fails(name, options, worst)
    yield overflow

  def _local_condition(self) -> recording.Call | None:
    """Returns the call whose `when` depends on the rows of one replica."""
    return next((call for call in self._calls if call.local and call.verb == "gradients"), None)

  def _options(self) -> dict[str, dict[str, Any]]:
    norm = self.reference["full batch"].metrics.get("gradient_norm", 0.0)
    options: dict[str, dict[str, Any]] = {}
    clipped_by_value = (
      "Trainer.clip_value" in configurables.bindings() or "clip_value" in self.subject.options
    )
    if norm > 0 and not clipped_by_value:
      options["clip_norm"] = {"clip_norm": norm / 2}
    micro = self.subject.accumulation_steps
    if micro > 1 or not self._coupled():
      options["accumulation"] = {"accumulation_steps": micro if micro > 1 else 2}
    options["loss scaling"] = {"loss_scale": dynamic}
    return options

  def _run_options(self, options: Mapping[str, dict[str, Any]]) -> dict[Any, Any]:
    arguments = {key: value for option in options.values() for key, value in option.items()}
    last = np.arange(self.rows) == self.rows - 1
    planted = _with_infinity(self.batch, last)
    order = [self.cases["full batch"], *self.cases.values()]
    ends, skips = {}, {}
    for replicas in (1, 2, 3):
      here = Bench(self.subject, replicas, rows=self.rows, **arguments)
      here.assign(self.start)
      outcomes = [here.step(rows) for rows in order]
      ends[replicas] = dataclasses.replace(outcomes[-1], before=self.start)
      if planted is not None:
        skips[replicas] = (here.step(planted), here.trainable)
    found: dict[Any, Any] = {
      replicas: self.difference(ends[replicas], ends[1], without=self.noisy) for replicas in (2, 3)
    }
    return {**found, "overflow": self._overflow(skips)}

  def _overflow(self, skips: Mapping[int, tuple[Outcome, list[bool]]]) -> Result:
    name = "overflow on one replica"
    if not skips:
      why = "there is no float feature to set to infinity"
      return Result(group=GROUP, check=name, status="not applicable", detail=why)
    moved = {n: _moved(outcome, trainable) for n, (outcome, trainable) in skips.items()}
    outcomes = {n: outcome for n, (outcome, _) in skips.items()}
    if moved[1] and not np.isfinite(self.flat(outcomes[1], self.trained)).all():
      why = "the task applies non-finite gradients, on one replica too"
      return Result(group=GROUP, check=name, status="not applicable", detail=why)
    if moved[1]:  # it skipped only some of its updates, or none
      apart = {n: self._apart(outcomes[n], outcomes[1]) for n in (2, 3)}
      wrong = [str(n) for n, difference in apart.items() if not difference <= AFTER_STEPS]
      worst = max(apart.values())
      right = f"the step is the same on every replica: relative difference {worst:.1e}"
      bad = "the step differs from that of one replica if one of them overflows"
    else:
      wrong = [str(n) for n, there in moved.items() if there]
      right = "the step is skipped on every replica, no weight moves"
      bad = "weights move although one replica overflows"
    if not wrong and not moved[1] and (spoiled := self._spoiled(outcomes)):
      return Result(
        group=GROUP, check=name, status="failed",
        detail=f"the step is skipped, but {spoiled} is not finite after it",
        cause=KEPT_STATE.cause, remedy=KEPT_STATE.remedy, place=self._find(KEPT_STATE),
      )  # fmt: skip
    if not wrong:
      return Result(group=GROUP, check=name, status="passed", detail=right)
    return Result(
      group=GROUP, check=name, status="failed", detail=f"on {' and '.join(wrong)} replicas, {bad}",
      cause="finite check before the reduction",
      remedy="decide by step.check of the reduced gradients, which is the same on every replica",
      place=source_lines.find(self.task, *METHODS, containing=("is_finite", "check(", "apply(")),
    )  # fmt: skip

  def _spoiled(self, outcomes: Mapping[int, Outcome]) -> str:
    """Returns a variable that no optimizer updates and that an overflow makes infinite; or ""."""
    layers = normalisations(self.task.model)  # Keras updates their statistics in each step
    own = {id(models.raw(v)) for layer in layers for v in layer.variables}
    variables = self.alone.variables
    return next(
      (
        self.alone.names[index]
        for outcome in outcomes.values()
        for index in sorted(self.state)
        if id(variables[index]) not in own
        and np.isfinite(outcome.before[index]).all()
        and not all(np.isfinite(copy).all() for copy in outcome.after[index])
      ),
      "",
    )

  def _option_fails(
    self, name: str, options: Mapping[str, dict[str, Any]], worst: Difference
  ) -> Result:
    culprit = ""
    for option, arguments in options.items():
      alone = self._run_options({option: arguments})
      if max(alone[2].worst, alone[3].worst) > AFTER_STEPS:
        culprit = option
        break
    explanation = BY_OPTION.get(culprit, OPTIMIZER)
    return Result(
      group=GROUP, check=name, status="failed", detail=worst.detail,
      cause=explanation.cause, remedy=explanation.remedy,
      place=self._find(explanation),
    )  # fmt: skip

  # ---- Numbers ----

  def flat(self, outcome: Outcome, used: Sequence[bool], replica: int = 0) -> np.ndarray:
    """Returns the update of the variables in use, as one vector."""
    pairs = zip(outcome.update(replica), used, strict=True)
    return np.concatenate([update.ravel() for update, wanted in pairs if wanted])

  def _apart(self, several: Outcome, one: Outcome) -> float:
    replicas = range(len(several.after[0]))
    found = [self.difference(several, one, without=self.noisy, replica=each) for each in replicas]
    return max(each.worst for each in found)

  def difference(
    self,
    one: Outcome,
    other: Outcome,
    *,
    without: frozenset[int] = frozenset(),
    replica: int = 0,
  ) -> Difference:
    """Compares one replica of a step with another step, per variable, except those in `without`."""
    updates = list(zip(one.update(replica), other.update(), strict=True))
    norms = [np.linalg.norm(u) for i, (_, u) in enumerate(updates) if i not in without]
    scale = 0.0 if self.updated <= without else max(norms, default=0.0)
    relative = []
    for index, (mine, yours) in enumerate(updates):
      if index in without:
        relative.append(0.0)
        continue
      rounding = 3e-7 * np.linalg.norm(other.before[index])
      apart = np.linalg.norm(mine - yours)
      if not np.isfinite(apart):
        same = np.array_equal(np.isfinite(mine), np.isfinite(yours))
        relative.append(0.0 if same else np.inf)
        continue
      size = max(float(np.linalg.norm(yours)), 1e-3 * scale)
      relative.append(max(0.0, apart - rounding) / size if size else float(apart > rounding))
    worst = max(relative, default=0.0)
    first = next((i for i, r in enumerate(relative) if r > LEAST), None)
    if first is None:
      detail = f"relative difference {worst:.1e}"
    else:
      detail = f"{self.alone.names[first]} differs first, by {relative[first]:.2g} of its update"
    metrics = "; ".join(
      f"{name} is {one.metrics.get(name, np.nan):.6g} and {value:.6g}"
      for name, value in other.metrics.items()
      if not np.isclose(one.metrics.get(name, np.nan), value, rtol=1e-3, atol=1e-5, equal_nan=True)
    )
    if worst <= LEAST and metrics:
      detail = metrics
    return Difference(
      worst=float(worst), detail=detail, metrics=metrics, first=first or 0, relative=relative
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
  """How much two steps differ.

  Attributes:
    worst: the largest relative difference of a variable's update.
    detail: its description.
    metrics: the metrics that differ, with both values.
    first: the index of the first variable that differs.
    relative: the relative difference of each variable.
  """

  worst: float
  detail: str
  metrics: str
  first: int
  relative: Sequence[float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
  """A known mistake: name, remedy, and what its line of code may contain."""

  cause: str
  remedy: str
  containing: tuple[str, ...] = ()


STATEFUL = Explanation(
  cause=random_draws.STATEFUL,
  remedy="use Keras layers, or tf.random.stateless_* with step.seed()",
  containing=("tf.random.", "np.random", "random."),
)
NEVER_REDUCED = Explanation(
  cause="never reduced",
  remedy="call step.all_reduce(gradients, loss) before step.unscale and step.apply",
  containing=("apply(", "apply_gradients", "gradients("),
)
COUNTS = Explanation(
  cause=PADDING,
  remedy="weight each example, as Loss.from_examples(per_example, batch['weight']) and "
  "weighted_sum(per_example, batch['weight']) do, and never divide by a number of rows",
  containing=SUMS,
)
BATCH_NORM = Explanation(
  cause="batch-norm statistics",
  remedy="BatchNormalization(synchronized=True) normalises over the global batch; without it, each "
  "replica normalises by its own rows",
  containing=("BatchNormalization",),
)
MICRO_BATCH_NORM = Explanation(
  cause="batch-norm statistics",
  remedy="each micro-batch is normalised by its own rows, which are others on N replicas than on "
  "one: use accumulation_steps = 1, or normalise each row by itself, as LayerNormalization does",
  containing=("BatchNormalization",),
)
KEPT_STATE = Explanation(
  cause="state changed by a skipped step",
  remedy="use step.assign(variable, value), which assigns only if all updates are finite",
  containing=(".assign",),
)
TWICE = Explanation(
  cause="reduced twice",
  remedy="reduce once: step.all_reduce sums gradients and weight, and step.apply does not reduce; "
  "the apply() of your own optimizer must not either",
  containing=("all_reduce", "apply_gradients", ".apply("),
)
MEAN_OF_MEANS = Explanation(
  cause="mean of means",
  remedy="return sums, Loss.from_examples(per_example, batch['weight']); a mean per replica gives "
  "a replica with few examples the same weight as one with many",
  containing=("reduce_mean", "/ tf.reduce_sum", "divide_no_nan", "Loss("),
)
LOCAL_BATCH = Explanation(
  cause="loss divided by the local batch",
  remedy="return sums, Loss.from_examples(per_example, batch['weight']); the framework divides "
  "once, by the global weight",
  containing=("reduce_mean", "/ ", "divide_no_nan", "Loss("),
)
REGULARISATION = Explanation(
  cause="regularisation counted N times",
  remedy="return the penalty from Task.regularization(), or use loss.plus_regularization(penalty), "
  "which count it once",
  containing=("l2_loss", "losses", "regular", "penalty", "+ "),
)
REPLICA_FACTOR = Explanation(
  cause="loss scaled by the number of replicas",
  remedy="return this replica's sums as they are; the framework divides by the weight of all "
  "replicas",
)
PYTHON_VALUE = Explanation(
  cause="Python value that changes",
  remedy="compute it from step.number or the batch, or keep it in a tf.Variable of the model; each "
  "replica traces the step, and Python runs only then",
)
COUPLED = Explanation(
  cause="examples that depend on one another",
  remedy="code that compares the examples of a batch (negatives, statistics, ranks) sees only "
  "those of its own replica: collect the others with step.all_gather, in train_step",
  containing=(
    *("reduce_mean", "reduce_std", "matmul", "transpose", "top_k", "moments", "[None, :]"),
    "bincount",
  ),
)
UNKNOWN = Explanation(
  cause="unknown",
  remedy="no known mistake predicts this update; compare the verbs of your train_step with "
  "those of step.update",
)
OPTIMIZER = Explanation(
  cause="optimizer",
  remedy="gradient descent gives the same update and this optimizer does not: it reads something "
  "that differs between replicas",
)
BY_OPTION = {
  "clip_norm": Explanation(
    cause="clipped before the reduction",
    remedy="clip reduced gradients: step.clip after step.all_reduce and step.unscale",
    containing=("clip",),
  ),
  "accumulation": Explanation(
    cause="mean over micro-batches",
    remedy="add up the sums of the micro-batches and divide once, as step.gradients does",
    containing=("gradients(", "reduce_mean", "/ "),
  ),
  "loss scaling": Explanation(
    cause="loss scale",
    remedy="divide reduced gradients by the scale once, as step.unscale does",
    containing=("unscale", "scale"),
  ),
}


Part = tuple[np.ndarray, float]


def _mean_of_means(whole: np.ndarray, parts: Sequence[Part]) -> np.ndarray:
  return np.mean([part for part, _ in parts], axis=0)


def _sum_of_means(whole: np.ndarray, parts: Sequence[Part]) -> np.ndarray:
  return np.sum([part for part, _ in parts], axis=0)


def _weighted_mean(parts: Sequence[Part]) -> np.ndarray:
  total = sum(weight for _, weight in parts)
  return np.sum([part * (weight / total) for part, weight in parts], axis=0)


PREDICTIONS = (
  (TWICE, lambda whole, parts: whole * len(parts)),
  (MEAN_OF_MEANS, _mean_of_means),
  (LOCAL_BATCH, _sum_of_means),
  (LOCAL_BATCH, lambda whole, parts: whole / len(parts)),
)


def _fits(seen: np.ndarray, predicted: np.ndarray) -> bool:
  size = np.linalg.norm(predicted)
  return bool(size and np.linalg.norm(seen - predicted) <= FITS * size)


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


def _moved(outcome: Outcome, trainable: Sequence[bool]) -> bool:
  return any(
    trained and not np.array_equal(copy, before, equal_nan=True)
    for before, copies, trained in zip(outcome.before, outcome.after, trainable, strict=True)
    for copy in copies
  )


def _noisy(one: Outcome, other: Outcome) -> frozenset[int]:
  """Returns the variables whose gradient is only rounding, such as a bias under batch norm.

  It depends on the order of the rows. An optimizer like Adam moves them as far as all others.
  """
  pairs = enumerate(zip(one.update(), other.update(), strict=True))
  return frozenset(
    index
    for index, (mine, yours) in pairs
    if np.linalg.norm(mine - yours) > FITS * np.linalg.norm(yours)
  )


def _backwards(batch: Rows) -> Rows:
  return {name: value[::-1] for name, value in batch.items()}


def _with_infinity(batch: Rows, where: np.ndarray) -> Rows | None:
  """Returns the batch with every float feature infinite in some rows; None if it has none."""
  weights = {f"{prefix}weight" for prefix in prefixes(batch)}
  floats = [n for n, v in batch.items() if n not in weights and np.issubdtype(v.dtype, np.floating)]
  planted = dict(batch)
  for name in floats:
    planted[name] = np.where(
      where.reshape([-1] + [1] * (batch[name].ndim - 1)), np.inf, batch[name]
    ).astype(batch[name].dtype)
  return planted if floats else None


def normalisations(model: Any) -> list[Any]:
  """Returns the layers of a model that normalise over the batch."""
  layers = [
    layer
    for part in models.parts(model)
    if models.is_keras(part)
    for layer in part._flatten_layers()
  ]
  return [layer for layer in layers if "BatchNormalization" in type(layer).__name__]


def synchronised(layer: Any) -> bool:
  """Whether a batch normalisation computes its statistics over all replicas."""
  return bool(getattr(layer, "synchronized", False)) or "Sync" in type(layer).__name__
