"""The evaluator: structured like the trainer, without gradients; counts every example once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

import tensorflow as tf

from loopwright.distribution import placement
from loopwright.engine import step_record
from loopwright.engine.eval_step import EvalStep
from loopwright.engine.step_record import Sums
from loopwright.errors import ConfigError
from loopwright.graphs import grappler, operations, randomness
from loopwright.graphs.aliases import AnySource, Batch, PerReplica
from loopwright.graphs.autograph import compiled
from loopwright.host.timing import timed
from loopwright.inputs import datasets
from loopwright.metrics import PerExample
from loopwright.metrics.rows import CollectedRows
from loopwright.metrics.sums import MetricSums, PackedSums
from loopwright.models import models, task_state
from loopwright.models.orbit import AbstractEvaluator
from loopwright.options.declaration import Instead
from loopwright.task import Task, derived_metrics

if TYPE_CHECKING:
  from loopwright.optimizers.ema import Ema
else:
  Ema = Any  # the module is loaded if there are averages

Batches: TypeAlias = tf.data.Dataset | Callable[..., tf.data.Dataset]
"""The padded global batches of one evaluation set, or a function that returns them.

The function may return a list, of a data set for each of several shapes."""


_CALL_S, _CALL_BATCHES = 0.2, 100
"""A call of the compiled loop takes about so long, and at most so many batches."""
_AT_ONCE = 2
"""Batches whose operations may run at the same time: more take more memory."""


@dataclasses.dataclass
class EvalSet:
  """One evaluation set; `name` is "" if there is only one.

  Attributes:
    shapes: the distributed batches of each shape.
    lengths: the number of batches of each shape; negative if it is not known.
    sums: of the metrics.
    step: runs one batch: `packed_step` if there is a loop, else `eval_step`. Under parameter
      servers, runs one shard.
    loop: the compiled `eval_loop`; None runs each batch from the host.
    at_once: the number of batches in the next call of the loop.
  """

  name: str
  shapes: list[Any]
  lengths: list[int]
  sums: MetricSums
  step: Callable[..., Any]
  loop: Callable[..., Any] | None = None
  at_once: int = 1

  @property
  def total(self) -> int | None:
    """The number of batches, if it is known."""
    return sum(self.lengths) if min(self.lengths) >= 0 else None

  @property
  def where(self) -> str:
    """What an error calls it."""
    return f"source('eval')[{self.name!r}]" if self.name else "source('eval')"


class Evaluator(AbstractEvaluator):
  """Evaluates a task on finite data sets; `orbit.Controller` or your own loop calls `evaluate`.

  For parameter servers: `ParameterServerEvaluator` in strategies/parameter_server/evaluator.py.

  Attributes:
    sources: name -> source of each set, if a `Recipe` made this evaluator.
    weightless: of several sets, the metrics whose weights sum to 0 in the last evaluation.
    between_batches: called several times a second, and not more often than after each batch, with
      the set's name, its batches so far and its batches in all, None if unknown (host); it may
      raise, to end the evaluation. On every worker of a cluster, it is called equally often, after
      each batch. Parameter servers call it with 0 batches.
  """

  def __init__(
    self,
    *,
    task: Annotated[Task, Instead("set run.task")],
    strategy: Annotated[tf.distribute.Strategy, Instead("set run.strategy")],
    dataset: Annotated[
      Batches | Mapping[str, Batches], Instead("set run.task, whose source() it reads")
    ],
    ema: Annotated[Ema | None, Instead("set Trainer.ema_decay")] = None,
    global_step: Annotated[tf.Variable | None, Instead("it is the trainer's")] = None,
    eager: Annotated[bool, Instead("set run.eager")] = False,
    step: Annotated[
      Callable[..., EvalStep], Instead("override eval_step() of the task")
    ] = EvalStep,
  ) -> None:
    """Prepares dataset and metrics (host); raises ConfigError for an asynchronous strategy.

    Args:
      task: the task to evaluate; `task.model` must be built.
      strategy: the strategy of the model.
      dataset: finite, of padded global batches (in a cluster: this worker's rows); see
        `datasets.eval_dataset`. Or a function that returns it; parameter servers require one and
        call it with `shard=`. Or name -> one of these, for several sets.
      ema: evaluate with these averages instead of the variables.
      global_step: int64 scalar, what `EvalStep.number` reads; None is 0.
      eager: use no tf.function.
      step: makes each replica's step, with the arguments of `EvalStep`.
    """
    super().__init__()
    self.task, self.strategy, self.eager, self._ema = task, strategy, eager, ema
    self._global_step, self._make_step = global_step, step
    self._assigned: set[int] = set()  # handles
    self.placement = placement.of(strategy)
    self.sources: Mapping[str, AnySource] = {}
    self.weightless: set[str] = set()
    self.between_batches: Callable[[str, int, int | None], None] = lambda *_: None
    self._given = dataset if isinstance(dataset, Mapping) else {"": dataset}
    self._prepare(self._given)

  @timed("evaluation")
  def evaluate(self, num_steps: tf.Tensor | int = -1) -> dict[str, float]:
    """Evaluates the first `num_steps` batches of each set, or all for -1 (host).

    Returns:
      name -> total / weight summed over all examples, and the metrics that the task derives. Of
      several sets, the names are "<set>/<metric>".

    Raises:
      ConfigError: a set has no examples, or all have weight 0; or the step assigns what training
        uses, other than the states of recurrent layers and of metrics.
    """
    self._require_unassigned()
    results: dict[str, float] = {}
    self.weightless.clear()
    averages = self._ema.in_place() if self._ema else contextlib.nullcontext()
    with task_state.given_back(models.passing_states(self.task.model)), averages:
      for one in self._sets:
        prefix = f"{one.name}/" if one.name else ""
        found = self._evaluate(one, int(num_steps))
        results |= {f"{prefix}{name}": value for name, value in found.items()}
        self.weightless |= {f"{prefix}{name}" for name in self._metrics.weightless if prefix}
    return results

  def trace_again(self) -> None:
    """Has the next `evaluate` trace the step again, with what Python has by now (host)."""
    self._prepare(self._given)

  def _require_unassigned(self) -> None:
    """Raises a ConfigError if an evaluation assigns what training uses."""
    state = self.task.loop_state
    used = state.used if state else {}
    for handle in self._assigned & used.keys():
      name = (getattr(used[handle], "name", "") or type(used[handle]).__name__).partition(":")[0]
      raise ConfigError(
        f"evaluation assigns {name!r}, which training uses, so training would depend on how often "
        "it is evaluated; assign it only if `training` is True, and pass `training` to the layers."
      )

  def metric_names(self) -> set[str] | None:
    """Returns the names of the logged means, from the trace that `evaluate` uses (host).

    Executes nothing. What the task derives is not among them. None in eager mode, under parameter
    servers and for batches whose shapes are not static, which trace later, otherwise or never.
    """
    traced = [(one, shape.element_spec) for one in self._sets for shape in one.shapes]
    if self.eager or not _is_static([spec for _, spec in traced]):
      return None
    names: set[str] = set()
    for one, spec in traced:
      self._metrics, step = one.sums, cast(Any, one.step)
      step.get_concrete_function(spec)
      names |= {f"{one.name}/{name}" if one.name else name for name in one.sums.names}
    return names

  def _evaluate(self, one: EvalSet, limit: int) -> dict[str, float]:
    self._metrics = one.sums
    self._metrics.reset()  # an earlier evaluation may have failed midway
    batches, rows = self._run_batches(one, limit)
    results = self._metrics.result()
    if limit:
      self._require_examples(one, results, batches)
    arrays = {**self._metrics.sums, **rows.result()}
    return results | derived_metrics(self.task, results, arrays)

  def _prepare(self, given: Mapping[str, Batches]) -> None:
    self.placement.require("Evaluator")
    # Sets of the same features share a trace, and so the names of the metrics.
    shared: dict[str, tuple[Any, ...]] = {}
    self._sets: list[EvalSet] = []
    for name, dataset in given.items():
      made = dataset() if callable(dataset) else dataset
      shapes = made if isinstance(made, list) else [made]
      looped = all(map(self._may_loop, shapes))
      features = f"{looped} {[whole.element_spec for whole in shapes]}"
      if features not in shared:
        with self.strategy.scope():
          sums = MetricSums()
        shared[features] = (sums, *self._functions(looped))
      distributed = [self.placement.distribute(whole) for whole in shapes]
      lengths = [int(batches.cardinality()) for batches in shapes]
      self._sets.append(EvalSet(name, distributed, lengths, *shared[features]))

  def _may_loop(self, batches: tf.data.Dataset) -> bool:
    """Whether a compiled loop may take several batches: their number and shape are known."""
    tried = self.placement.loops_evaluation and not self.eager
    return tried and batches.cardinality() >= 0 and _is_static(batches.element_spec)

  def _functions(self, looped: bool) -> tuple[Any, ...]:
    """Returns `EvalSet.step`, and `EvalSet.loop` if there is one."""
    if not looped:
      return (self.eval_step if self.eager else compiled(self.eval_step),)
    step = compiled(self.packed_step)
    return step, grappler.Compiled(functools.partial(self.eval_loop, step))

  def _run_batches(self, one: EvalSet, limit: int) -> tuple[int, CollectedRows]:
    """Evaluates the first `limit` batches, or all if negative; returns how many, and their rows."""
    done, rows = 0, CollectedRows()
    total = one.total if limit < 0 else min(limit, one.total or limit)
    for batches, length in zip(one.shapes, one.lengths, strict=True):
      left = limit - done if limit >= 0 else length
      run = _singly(one.step, batches, left)
      if one.loop:
        run = _in_loops(one, batches, min(left, length))
      for number, found in run:
        rows.add(found, number)
        done += number
        self.between_batches(one.name, done, total)
    return done, rows

  def eval_loop(
    self,
    step: tf.types.experimental.PolymorphicFunction,
    iterator: tf.data.Iterator,
    number: tf.Tensor,
  ) -> tuple[list[tf.Tensor], dict[str, PerExample]]:
    """Evaluates the next `number` batches, an int32 scalar (cross-replica).

    The loop carries the sums: if each step added to a variable, the next one would wait for it.

    Args:
      step: the compiled `packed_step`.
      iterator: has as many batches.
      number: at least 1.

    Returns:
      The sums that were added, and the PerExample metrics, [number, ...] each.
    """
    with tf.init_scope():  # where no gradient tape works, so that it must have been traced
      step = step.get_concrete_function(iterator.element_spec)
    kinds = step.structured_outputs
    sums = [tf.zeros(spec.shape, spec.dtype) for spec in tf.nest.flatten(kinds[0])]
    rows = [
      tf.TensorArray(spec.dtype, number, element_shape=spec.shape)
      for spec in tf.nest.flatten(kinds[1])
    ]

    def body(done: tf.Tensor, sums: Any, rows: Any) -> tuple[Any, ...]:
      added, values = map(tf.nest.flatten, step(self.placement.read(iterator)))
      sums = [one + other for one, other in zip(sums, added, strict=True)]
      return done + 1, sums, [a.write(done, v) for a, v in zip(rows, values, strict=True)]

    _, sums, rows = tf.while_loop(
      lambda done, *_: done < number,
      body,
      (tf.constant(0), sums, rows),
      parallel_iterations=_AT_ONCE,
    )
    packed = self.placement.of_replicas(tf.nest.pack_sequence_as(kinds[0], sums))
    self.strategy.run(self._metrics.add_packed, args=(packed,))
    return sums, tf.nest.pack_sequence_as(kinds[1], [array.stack() for array in rows])

  def packed_step(
    self, batch: Mapping[str, PerReplica]
  ) -> tuple[list[dict[int, tf.Tensor]], dict[str, PerExample]]:
    """Evaluates one global batch; adds nothing (cross-replica).

    Returns:
      For each replica what `MetricSums.add_packed` takes, and the PerExample metrics.
    """

    def run(batch: Batch) -> Any:
      packed = PackedSums(self._metrics)
      rows = self.replica_step(batch, packed)
      return packed.vectors, rows

    vectors, rows = self._traced(run, batch)
    first = self.strategy.experimental_local_results
    count = self.strategy.num_replicas_in_sync
    parts = [{name: first(part)[i] for name, part in vectors.items()} for i in range(count)]
    return parts, self._of_first(rows)

  def eval_step(self, batch: Mapping[str, PerReplica]) -> dict[str, PerExample]:
    """Evaluates one global batch; returns its PerExample metrics (cross-replica)."""
    return self._of_first(self._traced(self.replica_step, batch))

  def _traced(self, step: Callable[[Batch], Any], batch: Mapping[str, PerReplica]) -> Any:
    """Runs a function on each replica; notices what its trace assigns (cross-replica)."""
    outcome = self.strategy.run(step, args=(self.placement.per_replica(batch),))
    if graph := randomness.current_graph():
      self._assigned |= operations.assigned(graph)
      self._assigned -= task_state.by_handle(models.passing_states(self.task.model)).keys()
      self._require_unassigned()
    return outcome

  def _of_first(self, rows: Mapping[str, PerReplica]) -> dict[str, PerExample]:
    """Returns the metrics that all replicas have alike."""
    first = self.strategy.experimental_local_results
    return {name: PerExample(*(first(part)[0] for part in rows[name])) for name in rows}

  def replica_step(self, batch: Batch, sums: Sums | None = None) -> dict[str, PerExample]:
    """Runs the task's step and adds its metrics; see `StepRecord.close` (replica context)."""
    number = None if self._global_step is None else self._global_step.read_value()
    step = self._make_step(number=number)
    step_record.run(step, self.task.eval_step, batch)
    return step.record.close(sums or self._metrics)

  def _require_examples(self, one: EvalSet, results: Mapping[str, float], batches: int) -> None:
    if batches == 0:
      raise ConfigError(
        f"{type(self.task).__name__}.{one.where} has no examples; it must have at least one."
      )
    if results and self._metrics.weightless >= set(results):
      raise ConfigError(
        f"all examples of {batches} evaluation batches have weight 0; batch['weight'], from "
        f"{one.where} or preprocess(), must be above 0 for some."
      )


Calls: TypeAlias = Iterator[tuple[int, Mapping[str, PerExample]]]
"""The number of batches of each call, and their PerExample metrics."""


def _singly(step: Callable[..., Any], batches: Iterable[PerReplica], most: int) -> Calls:
  """Runs at most `most` batches one by one, all if negative."""
  for batch in itertools.islice(datasets.iterate(batches), most if most >= 0 else None):
    yield 1, step(batch)


def _in_loops(one: EvalSet, batches: Iterable[PerReplica], left: int) -> Calls:
  """Runs `left` batches, as many in a call as take about `_CALL_S`."""
  loop, step, iterator = cast(Any, (one.loop, one.step, datasets.iterate(batches)))
  if left:
    step.get_concrete_function(iterator.element_spec)  # `loop` cannot trace it
  while left:
    number, started = min(one.at_once, left), time.monotonic()
    sums, rows = loop(iterator, tf.constant(number))
    for each in sums:
      each.numpy()  # waits for the devices, so that the time is that of the batches
    yield number, rows
    left -= number
    pace = number / max(time.monotonic() - started, 1e-6)
    one.at_once = max(1, min(8 * number, int(_CALL_S * pace), _CALL_BATCHES))


def _is_static(specs: Any) -> bool:
  parts = tf.nest.flatten(specs, expand_composites=True)
  return all(part.shape.is_fully_defined() for part in parts)
