"""Steps of plain gradient descent on one replica, and comparisons of others with them.

The reference of the groups "replicas" and "mesh". The update of gradient descent is the gradient.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from loopwright.graphs import operations as graphs
from loopwright.tools.verify.bench import (
  bench,
  random_draws,
  recorded_step,
  row_influence,
  source_lines,
)
from loopwright.tools.verify.bench import explanations as known
from loopwright.tools.verify.bench.bench import PLAIN, Bench, Outcome, Rows, Subject
from loopwright.tools.verify.bench.explanations import FITS, Part, fits, weighted_mean
from loopwright.tools.verify.bench.layer_calls import normalisations
from loopwright.tools.verify.bench.loss_graph import behind

LEAST = 5e-5
"""A smaller relative difference is always rounding."""
MOST = 1e-3
"""A larger relative difference is never rounding."""
NEGLIGIBLE = 1e-5
"""State that differs by a smaller part of the largest update follows a gradient of rounding."""
AFTER_STEPS = 2e-2
"""Tolerance after several steps, relative to the change: Adam at first amplifies roundings."""
LOSS = ("loss", "training_loss", "train_step")
"""Methods that make the loss, if its line is not known."""


class Comparison:
  """The step on one replica, and comparisons of others with it.

  Attributes:
    blamed: the cause and the place that padding has shown, if any.
  """

  def __init__(self, subject: Subject, *, rows: int) -> None:
    self.subject, self.rows = subject, rows
    self.alone = Bench(subject, rows=rows, **PLAIN)
    self.task = self.alone.task
    self.batch = subject.rows(self.task, rows)
    self.real = rows * 7 // 12
    self.start = self.alone.read()
    self._fill_state()
    self._choose_number()
    self.trained = self.alone.trainable
    self.state = frozenset(i for i, trained in enumerate(self.trained) if not trained)
    self.updated = frozenset(range(len(self.trained))) - self.state
    self.cases: dict[str, Rows] = {
      "full batch": self.batch,
      "batch that does not divide": bench.padded(self.batch, self.real),
      "unequal weights": bench.weighted(self.batch),
    }
    self.reference = {name: self.on_one(case) for name, case in self.cases.items()}
    self.again = self.on_one(self.batch)
    backwards = {name: self.on_one(_backwards(case)) for name, case in self.cases.items()}
    differences = [self.difference(backwards[name], self.reference[name]) for name in self.cases]
    rounding = max(difference.worst for difference in differences)
    self.tolerance = min(MOST, max(LEAST, 20 * rounding))
    self.blamed: tuple[str, str] | None = None
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

  def _choose_number(self) -> None:
    """Compares the step of the lowest number that updates most: a loss may have parts at times."""
    seen: dict[int, int] = {}
    trained = self.alone.trainable
    for self.alone.first_number in (0, *bench.OTHER_STEPS):
      pairs = zip(self.on_one(self.batch).update(), trained, strict=True)
      seen[self.alone.first_number] = sum(bool(update.any()) for update, used in pairs if used)
      if seen[self.alone.first_number] == sum(trained):
        break
    self.alone.first_number = max(seen, key=lambda number: seen[number])

  def on_one(self, batch: Rows) -> Outcome:
    """Runs one step from the initial weights on one replica."""
    return self.alone.steps_from(self.start, batch)

  def loss_place(self) -> str:
    """Returns the user's line that makes the loss, if it is one; else the method."""
    recorded = recorded_step.record(self.subject)[0]
    if sum(call.verb == "gradients" for call in recorded.calls) > 1:
      return source_lines.method(self.task, "train_step")
    totals = [loss.total for loss in recorded.losses]
    return source_lines.made_at(totals, self.task) or source_lines.method(self.task, *LOSS)

  def metric_place(self, told: str) -> str:
    """Returns the user's line that makes the first metric which is named in a text."""
    logged = recorded_step.record(self.subject)[0].metrics
    words = told.replace("[", " ").split()  # "mae is 1 and 2", "signs[0] is 3 and 4"
    named = [value for name, value in logged.items() if name in words][:1]
    place = source_lines.made_at(named, self.task)
    return place or source_lines.method(self.task, "metrics", "train_step")

  def verb_place(self, *verbs: str) -> str:
    """Returns the user's line that last calls one of some verbs."""
    places = [call.place for call in self.calls if call.verb in verbs and call.place]
    return places[-1] if places else source_lines.method(self.task, "train_step")

  def assigned_at(self, index: int) -> str:
    """Returns the user's line that assigns to a variable, by a verb or by itself."""
    assigned = ("assign", self.alone.names[index])
    places = [call.place for call in self.calls if (call.verb, call.what) == assigned]
    graph, variable = self.alone.graph(self.batch), self.alone.variables[index]
    return next(iter(places), "") or source_lines.assigned_at(graph, variable, self.task)

  def constant_place(self) -> str:
    """Returns the user's line whose constant is another one when the step is traced again."""
    both = (self.alone.graph(self.batch), self._traced_again().graph(self.batch))
    for one, other in zip(*map(graphs.operations, both), strict=False):
      values = [op.get_attr("value") if op.type == "Const" else op.type for op in (one, other)]
      if values[0] != values[1] and (place := source_lines.made_at(one.outputs, self.task)):
        return place
    return source_lines.method(self.task, *LOSS)

  def unsteady(self) -> dict[str, str]:
    """Returns causes why the same step may be another one each time -> the line of each."""
    return random_draws.changing(graphs.operations(self.alone.graph(self.batch)), self.task)

  @functools.cached_property
  def meeting(self) -> row_influence.Meeting:
    """Where one row changes what is computed for another."""
    return row_influence.of_step(self.subject)

  @functools.cached_property
  def calls(self) -> Sequence[recorded_step.Call]:
    """The verbs that a traced step calls."""
    return recorded_step.record(self.subject)[0].calls

  def coupled(self) -> bool:
    """Whether the update of an example depends on others, so that micro-batches change it."""
    if normalisations(self.task.model) or any(c.verb == "all_gather" for c in self.calls):
      return True  # also where it shows too little in one update
    parts = self.parts(self.batch, 2, self.trained)
    whole = self.flat(self.reference["full batch"], self.trained)
    return not fits(whole, weighted_mean(parts))

  def parts(self, rows: Rows, replicas: int, used: Sequence[bool]) -> list[Part]:
    """Returns, per replica, the update of its rows alone (on one replica) and their weight."""
    owner = np.arange(self.rows) * replicas // self.rows
    alone = [bench.masked(rows, owner == replica) for replica in range(replicas)]
    return [
      (np.nan_to_num(self.flat(self.on_one(each), used)), each["weight"].sum()) for each in alone
    ]

  def flat(self, outcome: Outcome, used: Sequence[bool], replica: int = 0) -> np.ndarray:
    """Returns the update of the variables in use, as one vector."""
    pairs = zip(outcome.update(replica), used, strict=True)
    return np.concatenate([update.ravel() for update, wanted in pairs if wanted])

  def outcomes(self, here: Bench) -> dict[str, Outcome]:
    """Runs the step of each case on another bench, from the same weights (host)."""
    here.first_number = self.alone.first_number
    return {case: here.steps_from(self.start, rows) for case, rows in self.cases.items()}

  def differences(
    self, outcomes: Mapping[str, Outcome], without: frozenset[int], replica: int = 0
  ) -> dict[str, Difference]:
    """Compares the step of each case with the reference; see `difference`."""
    return {
      case: self.difference(outcome, self.reference[case], without=without, replica=replica)
      for case, outcome in outcomes.items()
    }

  def predicted(
    self, outcomes: Mapping[str, Outcome], replicas: int, used: Sequence[bool]
  ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, list[Part]]]:
    """Returns the update of each case: of the outcomes, of one replica, of each one's own rows."""
    seen, whole = (
      {case: self.flat(outcome, used) for case, outcome in made.items()}
      for made in (outcomes, self.reference)
    )
    parts = {case: self.parts(rows, replicas, used) for case, rows in self.cases.items()}
    return seen, whole, parts

  def _traced_again(self) -> Bench:
    again = copy.copy(self.alone)
    again.run = bench.stepper(again.trainer)
    return again

  def retraced(self) -> Difference:
    """Compares the reference with the same step, traced anew."""
    again = self._traced_again().steps_from(self.start, self.batch)
    return self.difference(again, self.reference["full batch"], without=self.state)

  def coupling(self) -> tuple[str, str]:
    """Returns (cause, place) of examples that depend on one another.

    What divides by one sum, which no variable changes, is a count.
    """
    place = self.meeting.place or self.loss_place()
    if self.meeting.shifted:
      return "rows run into one another", place
    if any(call.verb == "all_gather" for call in self.calls):
      return known.COUPLED, place
    if self._adds():
      return known.PADDING, place
    for operation in graphs.operations(self.alone.graph(self.batch)):
      if operation.type in ("RealDiv", "DivNoNan") and operation.inputs[1].shape.rank == 0:
        kinds = {each.type for each in behind([operation.inputs[1]]).values()}
        divides = source_lines.of_operation(operation, self.task)
        if divides and kinds & {"Sum", "Where", "Size"} and "ReadVariableOp" not in kinds:
          return "loss divided by a local count", divides
    return known.COUPLED, place

  def _adds(self) -> bool:
    """Whether a row without weight changes the update, alike whichever row has the weight."""
    rows = np.arange(self.rows)
    other = {name: value[np.where(rows == 5, 4, rows)] for name, value in self.batch.items()}
    one, two = (
      np.subtract(*(
        self.flat(self.on_one(bench.masked(each, rows == row)), self.trained)
        for each in (self.batch, other)
      ))
      for row in (0, 1)
    )  # fmt: skip
    return fits(one, two)

  def has_penalty(self, seen: Mapping[str, np.ndarray], whole: Mapping[str, np.ndarray]) -> bool:
    """Whether updates have one excess in all cases, or one in proportion to the batch's weight."""
    excess = [seen[case] - whole[case] for case in seen]
    weights = [float(self.cases[case]["weight"].sum()) for case in seen]
    for scales in ([1.0] * len(excess), weights):
      scaled = [scale * each for scale, each in zip(scales, excess, strict=True)]
      if all(fits(each, scaled[0]) for each in scaled[1:]):
        return True
    return False

  def apart(self, several: Outcome, one: Outcome) -> float:
    """Returns the largest difference of a replica of a step from another step."""
    replicas = range(len(several.after[0]))
    found = [self.difference(several, one, without=self.noisy, replica=each) for each in replicas]
    return max(each.worst for each in found)

  def moved(self, one: Outcome, other: Outcome) -> Difference | None:
    """Compares the updates of what is trained; None if they differ by rounding alone."""
    found = self.difference(one, other, without=self.state)
    return found if found.worst > self.tolerance else None

  def difference(
    self, one: Outcome, other: Outcome, *, without: frozenset[int] = frozenset(), replica: int = 0
  ) -> Difference:
    """Compares one replica of a step with another step, per variable, except those in `without`."""
    updates = list(zip(one.update(replica), other.update(), strict=True))
    norms = [np.linalg.norm(u) for i, (_, u) in enumerate(updates) if i not in without]
    of_state = self.updated <= without
    scale = 0.0 if of_state else max(norms, default=0.0)
    least = NEGLIGIBLE * max(np.linalg.norm(u) for _, u in updates) if of_state else 0.0
    relative = []
    for index, (mine, yours) in enumerate(updates):
      if index in without:
        relative.append(0.0)
        continue
      rounding = 3e-7 * np.linalg.norm(other.before[index]) + least
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
