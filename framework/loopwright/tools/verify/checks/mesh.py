"""The same update on the config's mesh and on one device; if it differs, which mistake explains it.

Only for `run.strategy = @model_parallel`. Layouts are the config's; the mesh is of logical CPUs. A
step sees the whole batch there, and the numbers are those of one device whatever the layouts. What
differs is code of the task that reckons with the parts, or an operation that DTensor gets wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.distribution import placement
from loopwright.errors import ConfigError
from loopwright.graphs import operations as graphs
from loopwright.host.failures import failure, place_of
from loopwright.tools.verify.bench import bench, random_draws, source_lines
from loopwright.tools.verify.bench import explanations as known
from loopwright.tools.verify.bench.bench import PLAIN, Bench, Outcome, Subject
from loopwright.tools.verify.bench.comparison import AFTER_STEPS, Comparison, Difference
from loopwright.tools.verify.bench.explanations import Part, fits, weighted_mean
from loopwright.tools.verify.report import Group, Result

GROUP = Group("mesh")
RUNS, UPDATE, STATE, METRICS, NOISE, OWN = (
  "runs on the mesh", "same update on the mesh", "same state on the mesh",
  "same metrics on the mesh", "same random numbers on the mesh", "same weights after 4 steps",
)  # fmt: skip
CRASH = "operation that ends the process on a mesh"
NO_RULE = "operation that cannot be split"
FACTOR = "scaled by the size of the mesh"
ONE_PART = "rows of one part only"
LOST = "update lost on the mesh"
OF_PARTS = "computed for each part alone"
PENALTY = "regularisation counted for each device"
NUMBERS = "random numbers that depend on the mesh"
PART_STATE = "state of one part only"
PART_METRIC = "metric of one part only"


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group; none without a mesh."""
  if subject.mesh is None:
    return []
  on_mesh = OnMesh(subject)
  if crash := on_mesh.crash():
    return [crash]
  try:
    return list(on_mesh.results())
  except ConfigError:
    raise  # a mistake in the layouts, told by itself
  except (tf.errors.OpError, TypeError, ValueError) as error:
    place = place_of(error) or on_mesh.named_in(error)
    return [GROUP.failed(RUNS, failure(error), NO_RULE, place)]


class OnMesh:
  """Steps on the mesh, beside the same steps on one device."""

  def __init__(self, subject: Subject) -> None:
    assert subject.mesh is not None
    self.subject, self.strategy = subject, subject.mesh()
    self.shares = placement.of(self.strategy).row_shares
    rows = int(np.lcm(subject.divisible_rows, self.shares))
    self._here = Bench(subject, rows=rows, strategy=self.strategy, **PLAIN)  # checks the layouts
    self.compared = Comparison(subject, rows=rows)
    self.task = self.compared.task

  def crash(self) -> Result | None:
    """Returns the finding for an operation that would end this process; None if there is none."""
    for operation in graphs.operations(self.compared.alone.graph(self.compared.batch)):
      place = source_lines.of_operation(operation, self.task) if _crashes(operation) else ""
      if place:  # else it is TensorFlow's or Keras's own, which may be none on a mesh
        return GROUP.failed(RUNS, f"{operation.type} of this kind crashes DTensor", CRASH, place)
    return None

  def named_in(self, error: Exception) -> str:
    """Returns the user's line with the operation that a message of DTensor names, or ""."""
    named = re.search(r"'tf\.(\w+)' op", str(error))
    graph = self.compared.alone.graph(self.compared.batch)
    same = [op for op in graphs.operations(graph) if named and op.type == named[1]]
    return next(filter(None, (source_lines.of_operation(op, self.task) for op in same)), "")

  def results(self) -> Iterator[Result]:
    """Yields the results; after an update that differs only those that say more."""
    of = self.compared
    outcomes = of.outcomes(self._here)
    yield GROUP.passed(RUNS, f"{self.strategy.mesh.size} devices, {self.shares} parts of the rows")
    found = of.differences(outcomes, of.state)
    worst = max(found.values(), key=lambda each: each.worst)
    if worst.worst > of.tolerance:
      yield self._update(outcomes, worst)
      return
    yield GROUP.passed(UPDATE, f"relative difference {worst.worst:.1e}")
    if of.state:
      worst = max(of.differences(outcomes, of.updated).values(), key=lambda each: each.worst)
      right = worst.worst <= of.tolerance
      place = "" if right else of.assigned_at(worst.first)
      yield _verdict(STATE, "" if right else worst.detail, PART_STATE, place)
    wrong = next((each.metrics for each in found.values() if each.metrics), "")
    yield _verdict(METRICS, wrong, PART_METRIC, of.metric_place(wrong) if wrong else "")
    with random_draws.watch(self.task) as watched:
      noisy = self._noise(metrics=not wrong)
    yield _verdict(NOISE, noisy, NUMBERS, next((draw.place for draw in watched.own), ""))
    if not noisy:
      yield self._several_steps()

  def _update(self, outcomes: Mapping[str, Outcome], worst: Difference) -> Result:
    """Returns the finding for an update that differs; if the loss is right, the step is not."""
    of = self.compared
    one, other = (
      self._here.loss_in(steps["full batch"].metrics) for steps in (outcomes, of.reference)
    )
    cause = self._explain(outcomes)
    right_loss = np.isclose(one, other, rtol=1e-4)
    place = source_lines.method(self.task, "train_step") if right_loss else ""
    if not place and cause != known.UNKNOWN:
      place = of.loss_place()
    return GROUP.failed(UPDATE, worst.detail, cause, place)

  def _both(self, **options: Any) -> list[Bench]:
    """Returns a bench on the mesh and one on one device."""
    common: dict[str, Any] = {"rows": self.compared.rows, "always": True, **options}
    return [Bench(self.subject, strategy=each, **common) for each in (self.strategy, None)]

  def _noise(self, *, metrics: bool) -> str:
    """Returns how a step with the task's own random numbers differs, or in `metrics`; or ""."""
    of = self.compared
    both = self._both(optimizer=bench.gradient_descent, quiet=False)
    found = of.difference(*(e.steps_from(of.start, of.batch) for e in both), without=of.state)
    if found.worst > of.tolerance:
      return found.detail
    return found.metrics if metrics else ""

  def _several_steps(self) -> Result:
    """Compares steps with the config's own optimizer and options."""
    of, ends = self.compared, []
    for here in self._both():
      here.assign(of.start)
      outcomes = [here.step(rows) for rows in (of.batch, *of.cases.values())]
      ends.append(Outcome(before=of.start, after=outcomes[-1].after, metrics={}))
    found = of.difference(ends[0], ends[1], without=of.noisy | of.state)
    if found.worst > AFTER_STEPS:
      return GROUP.failed(OWN, found.detail, known.UNKNOWN)
    return GROUP.passed(OWN, f"relative difference {found.worst:.1e}")

  def _explain(self, outcomes: Mapping[str, Outcome]) -> str:
    """Returns the mistake whose prediction fits the update in every case."""
    of, used = self.compared, self.compared.trained
    seen, whole, parts = of.predicted(outcomes, self.shares, used)
    factor = _factor(seen["full batch"], whole["full batch"])
    if all(fits(seen[case], factor * whole[case]) for case in seen):
      return FACTOR
    if self._lost(outcomes):
      return LOST
    if all(_of_one_part(seen[case], parts[case]) for case in seen):
      return ONE_PART
    for _, predict in known.PREDICTIONS:
      if all(fits(seen[case], predict(whole[case], parts[case])) for case in seen):
        return OF_PARTS
    if of.has_penalty(seen, whole):
      return PENALTY
    return OF_PARTS if fits(seen["full batch"], weighted_mean(self._alone())) else known.UNKNOWN

  def _alone(self) -> list[Part]:
    """Returns the update of each part's rows, without the other rows being there at all."""
    of, found = self.compared, []
    for rows in np.split(np.arange(of.rows), self.shares):
      batch = {name: np.concatenate([v[rows]] * self.shares) for name, v in of.batch.items()}
      found.append((of.flat(of.on_one(batch), of.trained), batch["weight"].sum()))
    return found

  def _lost(self, outcomes: Mapping[str, Outcome]) -> bool:
    """Whether a variable never moves that moves on one device."""
    of = self.compared
    pairs = [(outcome.update(), of.reference[case].update()) for case, outcome in outcomes.items()]
    return any(
      trained and all(there[i].any() and not here[i].any() for here, there in pairs)
      for i, trained in enumerate(of.trained)
    )


def _verdict(name: str, wrong: str, cause: str, place: str) -> Result:
  return GROUP.failed(name, wrong, cause, place) if wrong else GROUP.passed(name)


def _factor(seen: np.ndarray, whole: np.ndarray) -> float:
  """Returns the number by which `whole` must be multiplied to be nearest to `seen`."""
  size = float(whole @ whole)
  return float(seen @ whole) / size if size else 1.0


def _of_one_part(seen: np.ndarray, parts: Sequence[Part]) -> bool:
  return any(fits(seen, _factor(seen, part) * part) for part, _ in parts)


def _crashes(operation: tf.Operation) -> bool:
  if operation.type == "StridedSlice":
    return bool(operation.get_attr("new_axis_mask")) and (operation.inputs[0].shape.rank or 0) >= 3
  if operation.type == "SelectV2":
    return operation.inputs[0].shape.rank == 0 and operation.outputs[0].shape.rank != 0
  return False
