"""A task's evaluation on 1 to N logical CPUs, of prepared batches.

The weights are always the same, and not quite the initial ones: these often make all outputs equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.distribution import placement
from loopwright.engine.eval_step import EvalStep
from loopwright.evaluator import Evaluator
from loopwright.graphs import randomness
from loopwright.graphs.autograph import compiled, converted
from loopwright.metrics import Loss, Metric
from loopwright.models import models
from loopwright.tools.verify.bench import bench, row_influence, shared_noise, source_lines, survey
from loopwright.tools.verify.bench.bench import Bench, Rows, Subject, under

Values = dict[str, np.ndarray]
"""Name -> metric: a number, or an array of sorted numbers."""
TOLERANCE = 1e-4
"""A smaller relative difference of a metric is rounding."""
MOVED = 0.5
"""Noise on the weights, as a part of their standard deviation, or of 0.1 if they are all equal."""


class Evaluated:
  """The task under a strategy of some replicas, in float32.

  Attributes:
    gathers: whether the evaluation has called `step.all_gather`.
    changed: the names of variables of the model that an evaluation has changed.
  """

  def __init__(
    self, subject: Subject, replicas: int = 1, *, values: Sequence[np.ndarray] | None = None
  ) -> None:
    """Builds the model; `values` are those of `variables`, None makes them."""
    self.subject, self.strategy = subject, bench.strategy_of(replicas)
    self.task = subject.fresh_task()
    randomness.seed_everything(subject.seed)
    with under("float32"), self.strategy.scope():
      self.task.model = self.task.build_model()
    self.variables = [models.raw(v) for v in models.all_variables(self.task.model)]
    self.values = self.moved() if values is None else values
    self._derived = self.task.derived
    self.task.derived = self._derive  # type: ignore[method-assign]
    self.gathers, self.changed = False, list[str]()
    self._logged: dict[str, list[tf.Tensor]] = {}

  def __call__(
    self, sets: Mapping[str, Sequence[Rows]], values: Sequence[np.ndarray] | None = None
  ) -> dict[str, Values]:
    """Evaluates named sets; those of one shape share a trace (host).

    Args:
      sets: name -> batches of one shape, rows divisible by the replicas.
      values: of `variables`; None is `self.values`.
    """
    for variable, value in zip(self.variables, values or self.values, strict=True):
      variable.assign(value)
    with shared_noise.alike_for_all_rows():
      found = self._evaluator(sets).evaluate()
    names = [models.name(v) for v in models.all_variables(self.task.model)]
    for name, before, after in zip(names, values or self.values, self._read(), strict=True):
      if not survey.same(np.asarray(before), after) and name not in self.changed:
        self.changed.append(name)
    results: dict[str, Values] = {name: {} for name in sets}
    for name, number in found.items():
      of, _, metric = name.partition("/")
      results[of][metric] = np.sort(np.ravel(np.array(number, np.float64)))
    return results

  def meeting(self, rows: Rows) -> row_influence.Meeting:
    """Returns where rows meet in the evaluation of a batch (host)."""

    def run(batch: Rows) -> None:
      with shared_noise.alike_for_all_rows():
        self._evaluator({"rows": [batch]}, eager=True).evaluate()

    return row_influence.meeting(self.task, rows, run)

  def graph(self, rows: Rows) -> tuple[Any, dict[str, list[tf.Tensor]]]:
    """Returns the graph of the evaluation of one global batch, and what it logs (host)."""
    evaluator = self._evaluator({"rows": [rows]})
    with shared_noise.alike_for_all_rows():
      evaluator.metric_names()
      batch = placement.of(self.strategy).split(rows)
      graph = compiled(evaluator.packed_step).get_concrete_function(batch).graph
    return graph, dict(self._logged)

  def line(self, metric: str, rows: Rows) -> str:
    """Returns the user's line that makes a metric, or the loss; or the method that derives it."""
    logged = self.graph(rows)[1]
    methods = ("metrics", "eval_step", "loss") if metric in logged else ("derived",)
    made = source_lines.made_at(logged.get(metric, []), self.task)
    return made or source_lines.method(self.task, *methods)

  def _evaluator(self, sets: Mapping[str, Sequence[Rows]], *, eager: bool = False) -> Evaluator:
    datasets = {
      name: tf.data.Dataset.from_tensor_slices(
        {key: np.stack([rows[key] for rows in batches]) for key in batches[0]}
      )
      for name, batches in sets.items()
    }
    return Evaluator(
      task=self.task, strategy=self.strategy, dataset=datasets, step=self._watched(), eager=eager
    )  # fmt: skip

  def _watched(self) -> type[EvalStep]:
    outer = self

    class Watched(EvalStep):
      def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        outer.gathers = True
        return super().all_gather(tensor)

      def log(self, metrics: Mapping[str, Metric]) -> None:
        outer._logged |= {name: tf.nest.flatten(metric) for name, metric in metrics.items()}
        super().log(metrics)

    return Watched

  def _derive(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """As the task's; nothing if it cannot be computed from few examples, such as of one class."""
    try:
      return self._derived(values)
    except Exception:
      return {}

  def moved(self, seed: int = 0) -> list[np.ndarray]:
    """Returns the values of `variables` with noise on those that are trained (host)."""
    rng = np.random.default_rng(seed)
    trained = {id(models.raw(v)) for v in models.trainable_variables(self.task.model)}
    made: list[np.ndarray] = []
    for variable, value in zip(self.variables, self._read(), strict=True):
      if id(variable) in trained and np.issubdtype(value.dtype, np.floating):
        size = MOVED * (float(value.std()) or 0.1)
        made.append((value + size * rng.normal(size=value.shape)).astype(value.dtype))
      else:
        made.append(value)
    return made

  def _read(self) -> list[np.ndarray]:
    first = self.strategy.experimental_local_results
    return [np.array(first(tf.convert_to_tensor(v))[0]) for v in self.variables]


def placed(here: Bench | Evaluated, rows: Rows) -> Any:
  """Returns rows as forward() and loss() get them in step 0 (host)."""
  step = np.zeros(len(rows["weight"]), np.int64)
  return placement.of(here.strategy).split({**rows, "step": step})


def forward(here: Bench | Evaluated, rows: Rows) -> Any:
  """Returns what forward() does alone, in evaluation mode (host)."""
  batch, called = placed(here, rows), converted(here.task.forward)
  return here.strategy.run(lambda: called(batch, training=False))


def loss(here: Bench | Evaluated, outputs: Any, rows: Rows) -> Loss:
  """Returns what loss() does alone (host)."""
  batch, called = placed(here, rows), converted(here.task.loss)
  return here.strategy.run(lambda: Loss.checked(called(outputs, batch)))


def different(one: Values, other: Values) -> tuple[str, str] | None:
  """Returns the first metric that differs, and both values as a text; None if none does."""
  for name, value in other.items():
    mine = one.get(name)
    if mine is None:
      continue
    if mine.shape != value.shape:
      return name, f"{name} has {len(mine)} numbers, and {len(value)}"
    far = ~np.isclose(mine, value, rtol=TOLERANCE, atol=1e-5, equal_nan=True)
    if far.any():
      return name, f"{name} is {mine[far][0]:.6g}, and {value[far][0]:.6g}"
  return None
