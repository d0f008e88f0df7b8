"""The path of a batch: compiled loop, step, replica. Read it top to bottom.

train          host           steps_per_loop steps in one call
  loop         compiled       a tf.while_loop over
    train_step cross-replica  the next global batch -> strategy.run -> counters
      replica_step  replica   Task.train_step(step, batch); its verbs: loopwright/step.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import tensorflow as tf

from loopwright.distribution import placement
from loopwright.distribution.reduction import Reduction
from loopwright.engine import host_changes, step_parts, step_record, trainer_checks
from loopwright.engine.counters import Counters
from loopwright.engine.iteration import Iterated
from loopwright.graphs import grappler, xla
from loopwright.graphs.aliases import AnySource, Batch, DatasetFn, PerReplica, Unpack
from loopwright.host import timing
from loopwright.inputs import datasets, plan
from loopwright.metrics.sums import MetricSums
from loopwright.models import models, replica_state
from loopwright.models.orbit import AbstractTrainer
from loopwright.models.task_state import TaskState
from loopwright.observers import Observer, may_undo
from loopwright.optimizers import adapters
from loopwright.optimizers.loss_scale import LossScaleFactory, usual_loss_scale
from loopwright.optimizers.schedule import EmaDecay
from loopwright.options.declaration import COMPUTES, COUNT, COUNTS, Instead, asked, free
from loopwright.step import Step, StepFactory
from loopwright.task import Task, derived_metrics

if TYPE_CHECKING:
  from loopwright.options.groups import Cadence

_COMPUTES = asked(COMPUTES)
_MICRO_BATCHES = asked(f"{COMPUTES}, except what looks at a micro-batch")
_FITS_LAYOUT = asked("does not fit a checkpoint if it has fused variables")
_VERBS = Instead("override train_step() of the task, which calls the step's verbs")


class Trainer(Iterated, AbstractTrainer):
  """Trains one task under one strategy; `orbit.Controller` or your own loop calls `train`.

  For parameter servers: `loopwright.strategies.parameter_server.trainer.ParameterServerTrainer`.

  Attributes:
    parts: what each replica's step works with; `use` replaces them.
    batch_multiple: padded batch sizes are multiples of it.
    metrics: the sums of the loop that runs.
    assigned: the variables that `Step.assign` sets, by name, once the step has been traced.
    gradient_dtypes: in which its backward passes compute, likewise.
    is_penalised: whether its loss has penalties of layers, likewise.
    state: what the loop reads and assigns, and the part of it that only the task has.
    planned: how far it is to train, if that is known before; "auto" of an option may need it.
  """

  may_change = COUNTS
  _sums: type[MetricSums] = MetricSums

  def __init__(
    self,
    *,
    task: Annotated[Task, Instead("set run.task")],
    strategy: Annotated[tf.distribute.Strategy, Instead("set run.strategy")],
    dataset_fn: Annotated[DatasetFn, Instead("set run.task, whose source() it reads")],
    global_batch_size: Annotated[int, Instead("set run.global_batch_size")],
    optimizer: Annotated[adapters.Optimizers, Instead("set run.optimizer")],
    loss_scale: LossScaleFactory = None,
    reduction: Annotated[Callable[[], Reduction] | Reduction, Reduction.may_change] = Reduction,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    accumulation_steps: Annotated[int, _MICRO_BATCHES, COUNT] = 1,
    ema_decay: EmaDecay = None,
    fuse_updates: Annotated[bool, _FITS_LAYOUT] = True,
    shard_optimizer_state: Annotated[bool, _COMPUTES] = False,
    recompute: Annotated[Sequence[str], _COMPUTES] = (),
    jit_compile: Annotated[step_parts.JitCompile, _COMPUTES] = "auto",
    steps_per_program: Annotated[step_parts.StepsPerProgram, free(COMPUTES)] = "auto",
    eager: Annotated[bool, Instead("set run.eager")] = False,
    seed: Annotated[int, Instead("set run.seed")] = 0,
    observers: Annotated[Sequence[Observer], Instead("set run.ledger or run.actions")] = (),
    step: Annotated[StepFactory, _VERBS] = Step,
  ) -> None:
    """Makes the model (unless `task.model` is set), the optimizers and the counters (host).

    Args:
      task: what to learn.
      strategy: any synchronous strategy.
      dataset_fn: makes the input from a position; see `datasets.train_dataset`.
      global_batch_size: examples per update, over all replicas and micro-batches.
      optimizer: a factory, or name -> factory for several; called in the strategy's scope.
      loss_scale: a factory: `loss_scale.none`, `fixed` or `dynamic`; None uses dynamic if a
        layer, or the backward pass that is traced, computes in float16, else none.
      reduction: how gradients are summed over replicas: a `Reduction`, or a factory of one.
      clip_norm: clip reduced gradients to this global norm.
      clip_value: clip each reduced gradient element to [-clip_value, clip_value].
      accumulation_steps: the number of micro-batches in each replica's part of the batch.
      ema_decay: keep a moving average of the trainable variables with this decay, a number or
        `ema_warmup`; or `weight_averaging`, their mean from a step on.
      fuse_updates: if the optimizer's rule allows it, update by fused kernels, small variables
        together: faster, equal up to rounding; another layout of the optimizer in checkpoints.
      shard_optimizer_state: each replica keeps and updates 1/N of the optimizers' state, then
        gathers the weights; equal up to rounding, with checkpoints that fit any number of replicas.
        For optimizers that treat all elements alike, on several replicas of a mirrored strategy.
      recompute: patterns for the names of Keras layers whose activations the backward pass computes
        again, to save memory, such as `block_.*`; see `loopwright.recompute`.
      jit_compile: XLA compiles the step: on one replica as one program, if it can, else each
        replica's passes, and on GPUs mean, check and update. "auto": on GPUs, what it can.
      steps_per_program: so many steps of one replica, on batches that are read at once, are one
        program of XLA; see `loopwright.engine.several_steps`. 1: none. "auto": 16 on CPUs, where
        they are faster and the run is long enough to gain by it, if jit_compile is not False.
      eager: use no tf.function: print and breakpoints in a task see every step.
      seed: for dropout and other random layers, combined with step and replica.
      observers: see loopwright/observers.py.
      step: makes each replica's step, such as a subclass of `Step` with a verb of its own.

    Raises:
      ConfigError: a value is out of range, or two options contradict.
    """
    super().__init__()
    self.placement = placement.of(strategy)
    steps_per_program = trainer_checks.steps_per_program(steps_per_program, eager, jit_compile)
    if jit_compile == "auto" and (eager or not self.placement.compiles):
      jit_compile = False
    self.placement.require_options(
      jit_compile=bool(jit_compile), shard_optimizer_state=shard_optimizer_state, eager=eager
    )
    self._check_strategy(strategy)
    trainer_checks.check_options(clip_norm, clip_value, accumulation_steps, eager, jit_compile)
    trainer_checks.check_batch_size(global_batch_size, strategy.num_replicas_in_sync)
    self.batch_multiple = self.placement.row_shares * accumulation_steps
    self.padded_batch_size = plan.padded_batch_size(global_batch_size, self.batch_multiple)
    self.task, self.strategy, self.eager = task, strategy, eager
    self.cluster = self.placement.cluster
    self.global_batch_size, self.dataset_fn = global_batch_size, dataset_fn
    self.source: Callable[[], AnySource] | None = None
    self.planned: Cadence | None = None
    self._iterator: Iterator[PerReplica] | None = None
    self._read_to: int | None = None  # where the iterator is
    self._checks, self._examined = trainer_checks.LoopChecks(), None
    self.assigned: dict[str, tf.Variable] = {}
    self.gradient_dtypes: set[str] = set()
    self.is_penalised, self._usual_scale = False, loss_scale is None
    self._input_wait = step_parts.InputWait(self.placement)
    with strategy.scope():
      if task.model is None:
        with self.placement.building():
          task.model = task.build_model()
      models.require_in_scope(models.trainable_variables(task.model), strategy)
      if recompute:
        from loopwright.models.recomputation import recompute_layers

        recompute_layers(task.model, recompute)
      self._make_counters()
      built = adapters.build(optimizer, task.variables_of, self.global_step, fuse=fuse_updates,
                             shard=shard_optimizer_state)  # fmt: skip
      ema = adapters.averages(task.model, built, decay=ema_decay, step=self.global_step)
      self.metrics = self._sums()
      padded = trainer_checks.why_padded(self, accumulation_steps)
      parts = step_parts.StepParts(
        optimizers=built, ema=ema, padded=padded,
        loss_scale=(loss_scale or usual_loss_scale(models.compute_dtypes(task.model)))(),
        reduction=reduction() if callable(reduction) else reduction,
        global_step=self.global_step, seed=seed, global_batch_size=global_batch_size,
        clip_norm=clip_norm, clip_value=clip_value, accumulation_steps=accumulation_steps,
        jit_compile=jit_compile, steps_per_program=steps_per_program, replica_id=self.replica_id,
        observers=tuple(observers),
      )  # fmt: skip
    self.state = task.loop_state = TaskState(task, self.placement.replicas)
    self._set(parts, step)
    parts.reduction.prove(strategy, parts.dtypes)

  @timing.timed("training")
  def train(self, num_steps: tf.Tensor) -> dict[str, float]:
    """Runs `num_steps` steps and returns their metrics (host).

    Args:
      num_steps: int32 scalar.

    Returns:
      Means over the loop (loss, gradient_norm, the task's metrics), what the task derives, the
      loop's examples/s and its seconds of input wait. At the end of the loop: learning rate, loss
      scale and skipped steps so far.
      `nonfinite_step`, the first step whose loss was not finite, from 1, if there was one.

    Raises:
      ConfigError: all examples so far have weight 0.
    """
    if not (steps := int(num_steps)):
      return self.state_metrics()
    self.examine()
    position, self._read_to = self._placed(), None
    self.metrics.reset()  # an earlier loop may have failed midway
    self._input_wait.reset()
    before, clock = int(self.global_step.numpy()), timing.LoopClock()
    for observer in self.parts.observers:
      observer.loop_begins(after_step=before, steps=steps)
    try:
      self._run_loop(num_steps)
    finally:
      done = int(self.global_step.numpy()) - before
      self.position.assign(position + done * self.global_batch_size)
    undone = done < steps  # true if an observer undid the last step; only the metrics include it
    ran = done + undone
    results = self.metrics.result()  # waits for the device
    seconds = clock.seconds()
    self._checks.warn_of_retracing(self.traces)
    self._checks.require_weight(self.metrics, self.parts.optimizers, before + done)
    self.counters.skip(round(results.pop("skipped") * ran) - undone)
    self._read_to = position + ran * self.global_batch_size
    results["input_wait_s"] = clock.corrected(self._input_wait.seconds(results, ran))
    results["examples_per_second"] = ran * self.global_batch_size / seconds
    for observer in self.parts.observers:
      observer.loop_ends(results, done=done, ran=ran)
    results |= derived_metrics(self.task, results, self.metrics.sums,
                               only_evaluated=self.metrics.only_evaluated)  # fmt: skip
    return {**self.state_metrics(), **results}

  def examine(self) -> None:
    """Traces the loop, once, and finds the state of the task that checkpoints must have (host).

    `train` calls it; earlier, it restores what a checkpoint has of that state.
    """
    trainer_checks.require_used(vars(self), vars(self.parts), step_parts.Replaced.__annotations__)
    if parts := self._watch.followed(self.task, self.parts, traced=bool(self.traces)):
      self._set(parts, self._make_step)
    self._placed()
    if self._examined is self._compiled_loop:
      return
    from loopwright.engine import examination

    examination.examine(self, self._trace, self._iterator, self._input_wait, self._usual_scale)
    self._examined = self._compiled_loop

  def loop(self, iterator: Iterator[PerReplica], num_steps: tf.Tensor) -> None:
    """Runs `num_steps` steps, or until an observer undoes one (cross-replica)."""
    for observer in self.parts.observers:
      observer.loop_starts()
    numbers = step_parts.StepNumbers(self.parts, num_steps, place=self.placement)

    def step(done: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
      with tf.name_scope(""), numbers.of(done) as number:  # without the loop's prefix in all names
        return done + 1, self.train_step(iterator, number)

    if may_undo(self.parts.observers):
      start = (tf.constant(0), tf.constant(True))
      tf.while_loop(lambda n, stands: (n < num_steps) & stands, lambda n, _: step(n), start)
    elif not numbers.run_ahead(self.train_step, iterator, num_steps, self._input_wait):
      tf.while_loop(lambda n: n < num_steps, lambda n: step(n)[:1], (tf.constant(0),))
    self.average_state()

  def average_state(self) -> None:
    """Averages state that differs between replicas, at the end of a loop (cross-replica)."""
    replica_state.average(self.strategy, self.task.model, equal=self.assigned)

  def train_step(self, iterator: Iterator[PerReplica], step: tf.Tensor | None = None) -> tf.Tensor:
    """Runs one step on one global batch; returns a bool scalar, False if undone (cross-replica).

    `step` is its number, an int64 scalar, where the host counts; None where `global_step` does.
    """
    for observer in self.parts.observers:
      observer.step_begins()
    batch, input_wait_s = self.next_batch(iterator)
    for observer in self.parts.observers:
      observer.batch_taken(batch, self.global_step.read_value())

    def rest() -> tf.Tensor:
      outcome = self.strategy.run(self.replica_step, args=(batch, input_wait_s, step))
      self._watch.traced(self.task)
      first = self.strategy.experimental_local_results
      return self.finish_step(*(first(flag)[0] for flag in outcome))

    alone = self.strategy.num_replicas_in_sync == 1  # else the replicas communicate
    stands = (self.parts.program("step", rest, given=iterator) if alone else rest)()
    self._checks.say_compiled(self.compiled)
    return stands

  def replica_step(
    self, batch: Batch, input_wait_s: tf.Tensor, number: tf.Tensor | None = None
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Runs the task's step and sums its metrics; returns `StepRecord.outcome` (replica context)."""
    step = self._make_step(self.parts.at(number))
    step_record.run(step, self.task.train_step, batch)
    record = step.record
    finite, loss_finite = record.outcome()
    self.gradient_dtypes |= record.gradient_dtypes
    self.is_penalised |= record.is_penalised
    self.assigned |= record.assignments.variables
    models.require_in_scope(self.assigned.values(), self.strategy)
    self._checks.weight_seen |= record.is_conditional
    trainer_checks.warn_of_unreached(type(self.task).__name__, tuple(record.unreached))
    record.assignments.make(finite & loss_finite)
    own = {"skipped": (tf.cast(~finite, tf.float32), 1.0)}
    self.metrics.only_evaluated |= record.only_evaluated
    record.close(self.metrics, own | self._input_wait.metrics(input_wait_s))
    return finite, loss_finite

  def finish_step(self, finite: tf.Tensor, loss_finite: tf.Tensor) -> tf.Tensor:
    """Updates counters and loss scale; returns a bool scalar, False if undone (cross-replica).

    Both arguments are bool scalars, equal on all replicas.
    """
    self.parts.loss_scale.update(finite)
    self.counters.count(finite, loss_finite)
    stands = tf.constant(True)
    for observer in self.parts.observers:
      stands &= observer.step_ends(finite, loss_finite)
    return stands

  def next_batch(self, iterator: Iterator[PerReplica]) -> tuple[PerReplica, tf.Tensor]:
    """Returns the next global batch and the input wait, float32 seconds (cross-replica)."""
    return self._input_wait.timed(iterator)

  def checkpoint_items(self) -> dict[str, Any]:
    """Returns name -> object: all state that an exact restart needs (host)."""
    more = {"untracked": held} if (held := models.untracked(self.task.model)) else {}
    own = {"model": self.task.model, "state": self.state, **more}
    return {**own, **self.parts.saved(), **vars(self.counters)}

  def state_metrics(self) -> dict[str, float]:
    """Returns metrics of the trainer's state, read once at the end of a loop (host)."""
    return {**self.parts.metrics(), **self.counters.metrics(), **self.placement.usage}

  def replica_id(self) -> tf.Tensor:
    """Returns this replica's index among all that train, an int32 scalar (replica context)."""
    return step_parts.replica_id()

  def observe(self, observer: Observer) -> None:
    """Adds an observer; the next `train` traces the loop again (host)."""
    self.use(observers=(*self.parts.observers, observer))

  def use(self, *, step: StepFactory | None = None, **parts: Unpack[step_parts.Replaced]) -> None:
    """Replaces the step, or some of its `parts`; the next `train` traces the loop again (host).

    trainer.use(clip_norm=0.5)
    """
    self._set(dataclasses.replace(self.parts, **parts), step or self._make_step)

  def make_iterator(self) -> Iterator[PerReplica]:
    """Returns an iterator over distributed global batches, starting at `position` (host)."""

    def iterate(dataset: tf.data.Dataset) -> Iterator[PerReplica]:
      return datasets.iterate(self.placement.distribute(dataset))

    dataset = self.dataset_fn(int(self.position.numpy()))
    if isinstance(dataset, datasets.Scheduled):
      self.placement.require("Buckets")
      self._checks.traces = max(self._checks.traces, len(dataset.datasets))  # a shape each
      return dataset.iterate(iterate)
    return iterate(dataset)

  def reset_input(self) -> None:
    """Drops the iterator, as after a restore; the next `train` starts at `position` (host)."""
    self._iterator = None

  @property
  def compiled(self) -> str:
    """What XLA compiles of the step, once it has been traced, and what it cannot; else ""."""
    compiles = self.parts.jit_compile or self.parts.steps_per_program not in ("auto", 1)
    return xla.told(self.parts.left_out) if compiles else ""

  @property
  def traces(self) -> int:
    """The number of traces of the loop; 0 in eager mode."""
    return 0 if self.eager else self._compiled_loop.experimental_get_tracing_count()

  def graph(self) -> tf.Graph:
    """Returns the graph of the loop once `train` has run, if one graph is all of it (host)."""
    return self._compiled_loop.get_concrete_function(self._iterator, tf.constant(1)).graph

  def _trace(self) -> tf.Graph | None:
    """Returns the graph of the loop, which the first call then has; None where that is not all."""
    if self.eager:
      return None
    iterator, steps = next(datasets.runs(self._iterator, tf.constant(1)))
    self._compiled_loop(iterator, tf.zeros_like(steps))  # a call, for variables that the step makes
    graph: tf.Graph = self._compiled_loop.get_concrete_function(iterator, steps).graph
    trainer_checks.require_initialized(graph)
    return graph

  def _check_strategy(self, strategy: tf.distribute.Strategy) -> None:
    self.placement.require("Trainer")

  def _set(self, parts: step_parts.StepParts, step: StepFactory) -> None:
    self.parts, self._make_step = parts, step
    self._watch = host_changes.Watch(parts.optimizers)
    self._compiled_loop: Any = self._compiled()

  def _placed(self) -> int:
    """Returns the position, where the iterator is from here on: made if it is somewhere else."""
    place = int(self.position.numpy())
    if self._iterator is None or self._read_to != place:  # it is new, restored or behind
      self._iterator, self._read_to = self.make_iterator(), place
    return place

  def _compiled(self) -> Any:
    return self.loop if self.eager else grappler.Compiled(self.loop)

  def _make_counters(self) -> None:
    self.counters = made = Counters()
    self.global_step, self.position = made.global_step, made.position
    self.skipped_steps, self.nonfinite_step = made.skipped_steps, made.nonfinite_step

  def _run_loop(self, num_steps: tf.Tensor) -> None:
    from loopwright.engine import examination

    examination.or_without_xla(self, lambda: self._run_loops(num_steps))

  def _run_loops(self, num_steps: tf.Tensor) -> None:
    self._iterator = self.make_iterator() if self._iterator is None else self._iterator
    end = int(self.global_step.numpy()) if may_undo(self.parts.observers) else 0
    for iterator, steps in datasets.runs(self._iterator, num_steps):
      self._compiled_loop(iterator, steps)
      end += int(steps)
      if may_undo(self.parts.observers) and int(self.global_step.numpy()) < end:
        return  # an observer has undone a step
