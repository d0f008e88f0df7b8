"""The path of a batch: the compiled loop, one step, one replica's work. Read it top to bottom.

train          host           steps_per_loop steps in one call
  loop         compiled       a tf.while_loop over
    train_step cross-replica  the next global batch -> strategy.run -> counters
      replica_step  replica   Task.train_step(step, batch); framework/step.py has its verbs
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import orbit
import tensorflow as tf
import tf_keras
from absl import logging

from framework.backend import models, replica_state, timing
from framework.backend.autograph import as_written, converted
from framework.backend.timing import timed
from framework.errors import ConfigError
from framework.inputs import datasets
from framework.inputs.datasets import Batch
from framework.ledger.recorder import Recorder
from framework.metrics import MetricSums
from framework.optimizers import adapters, rollback
from framework.optimizers import loss_scale as loss_scales
from framework.optimizers.ema import Ema
from framework.optimizers.loss_scale import LossScale
from framework.step import Step, StepParts, replica_id
from framework.strategies import factories, traits
from framework.strategies.reduction import Reduction
from framework.task import Task, derived_metrics

DatasetFn = Callable[..., tf.data.Dataset]
"""position (examples already consumed) -> infinite dataset of padded global batches.

In a cluster, of this worker's rows of them: `Cluster.rows`. Under parameter servers it is called
with `shard=` as well: of whole batches, in turn."""


_NEVER = tf.int64.max


class Trainer(factories.Asynchronous, orbit.AbstractTrainer):
  """Trains one task under one strategy; `orbit.Controller`, or your own loop, calls `train`."""

  ASYNCHRONOUS = "ParameterServerTrainer"
  watchable = True

  def __init__(
    self,
    *,
    task: Task,
    strategy: tf.distribute.Strategy,
    dataset_fn: DatasetFn,
    global_batch_size: int,
    optimizer: adapters.OptimizerFactory | Mapping[str, adapters.OptimizerFactory],
    loss_scale: Callable[[], LossScale] | None = None,
    reduction: Callable[[], Reduction] | Reduction = Reduction,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    accumulation_steps: int = 1,
    ema_decay: float | None = None,
    fuse_updates: bool = True,
    jit_compile: bool = False,
    eager: bool = False,
    seed: int = 0,
    recorder: Recorder | None = None,
  ) -> None:
    """Makes the model (unless `task.model` is set), the optimizers and the counters.

    Args:
      task: what to learn.
      strategy: where; the step never asks which kind it is.
      dataset_fn: makes the input from a position; see `datasets.train_dataset`.
      global_batch_size: examples an update, over all replicas and micro-batches.
      optimizer: a factory, or name -> factory for several; called in the strategy's scope.
      loss_scale: a factory, `loss_scale.none`, `fixed` or `dynamic`; None takes dynamic where the
        dtype policy is mixed_float16, else none.
      reduction: how gradients travel: a `Reduction`, or a factory of one.
      clip_norm: clip reduced gradients to this global norm.
      clip_value: clip each reduced gradient element to [-clip_value, clip_value].
      accumulation_steps: micro-batches each replica's part is split into.
      ema_decay: keep a moving average of the trainable variables with this decay.
      fuse_updates: update by fused kernels, and small variables as one, where the optimizer's
        rule allows it: the same numbers but for rounding, faster, and another layout of the
        optimizer's state in checkpoints.
      jit_compile: compile each replica's forward and backward pass with XLA.
      eager: no tf.function at all: print and breakpoints in a task see every step.
      seed: of dropout and other random layers; they also depend on step and replica.
      recorder: writes down which examples each step consumes.

    Raises:
      ConfigError: a value is out of its range, or two options contradict.
    """
    super().__init__()
    if jit_compile:
      traits.check_xla(strategy)
    _check_options(clip_norm, clip_value, accumulation_steps, eager, jit_compile)
    replicas = strategy.num_replicas_in_sync
    if global_batch_size < replicas:
      raise ConfigError(
        f"the global batch of {global_batch_size} is smaller than the {replicas} replicas; use at "
        f"least {replicas}, so that each has something to do."
      )
    self.batch_multiple = replicas * accumulation_steps  # what padded batches must divide by
    self.padded_batch_size = datasets.padded_batch_size(global_batch_size, self.batch_multiple)
    self.task, self.strategy, self.eager = task, strategy, eager
    self.cluster = traits.cluster_of(strategy)
    self.global_batch_size = global_batch_size
    self._dataset_fn = dataset_fn
    self._iterator: Iterator[Batch] | None = None
    self._weight_seen = False
    self._recorder = recorder
    reduction = reduction() if callable(reduction) else reduction
    with strategy.scope():
      if task.model is None:
        task.model = task.build_model()
      models.require_in_scope(task.model, strategy)
      self._make_counters()
      built = adapters.build(optimizer, task.variables_of, self.global_step, fuse=fuse_updates)
      ema = None
      if ema_decay is not None:
        trainable = models.trainable_variables(task.model)
        ema = Ema(decay=ema_decay, variables=trainable)
      self._metrics = self._make_sums()
      self.parts = StepParts(
        optimizers=built, reduction=reduction,
        loss_scale=(loss_scale or _usual_loss_scale())(),
        global_step=self.global_step, seed=seed, global_batch_size=global_batch_size,
        clip_norm=clip_norm, clip_value=clip_value,
        accumulation_steps=accumulation_steps, jit_compile=jit_compile, ema=ema,
        replica_id=self.replica_id,
      )  # fmt: skip
    dtypes = {models.raw(v).dtype for o in built.values() for v in o.variables}
    reduction.prove(strategy, sorted(dtypes, key=lambda d: d.name))
    self._loop_began: tf.Variable | None = None
    self._compiled_loop: Any = None
    self._change(self.parts)
    self._traces = 1

  @timed("training")
  def train(self, num_steps: tf.Tensor) -> dict[str, float]:
    """Runs `num_steps` steps and returns their metrics (host).

    Args:
      num_steps: int32 scalar.

    Returns:
      Means over the loop (loss, gradient_norm, the task's metrics) and examples/s and seconds of
      waiting for input in it; at its end the learning rate, the loss scale and all skipped steps
      so far; `nonfinite_step` only if a loss was not finite: the first such step, from 1. A
      watched loop (`watch_nonfinite`) ends before that step.

    Raises:
      ConfigError: no example of any step so far had a weight above 0.
    """
    steps = int(num_steps)
    if steps == 0:
      return self._state()
    if self._iterator is None:
      self._iterator = self.make_iterator()
    self._metrics.reset()  # of a loop that failed half way
    before, started, called = int(self.global_step.numpy()), time.perf_counter(), time.time()
    if self._recorder is not None:
      rows = self.padded_batch_size // self.strategy.num_replicas_in_sync
      self._recorder.begin_loop(after_step=before, steps=steps, rows=rows)
    try:
      self._run_loop(num_steps)
    finally:
      done = int(self.global_step.numpy()) - before
      self.position.assign_add(done * self.global_batch_size)
    watch, stopped = self.parts.watch, done < steps  # only a watched loop stops by itself
    steps = done + stopped
    results = self._metrics.result()  # waits for the device
    seconds = time.perf_counter() - started
    if self._recorder is not None:
      self._recorder.end_loop(steps=done)
    self._report_retracing()
    self._require_weight()
    skipped = round(results.pop("skipped") * steps)
    self.skipped_steps.assign_add(max(0, skipped - stopped))  # a step taken back is none
    results["input_wait_s"] = results.pop("input_wait") * steps
    if "communication" in results:
      results["communication_s"] = results.pop("communication") * steps
    if self._loop_began is not None:
      results["start_s"] = max(0.0, float(self._loop_began.numpy()) - called)
    results |= derived_metrics(self.task, results)
    results["examples_per_second"] = steps * self.global_batch_size / seconds
    if watch is not None and stopped:
      self.reset_input()  # the iterator is past the bad step, the position is not
      watch.on_stop()
      results["nonfinite_step"] = float(done + before + 1)
    return {**self._state(), **results}

  def loop(self, iterator: Iterator[Batch], num_steps: tf.Tensor) -> None:
    """`num_steps` steps in one call, or as many as stand: a while loop once compiled."""
    if self._loop_began is not None:
      self._loop_began.assign(timing.timestamp())
    step, stands = tf.constant(0), tf.constant(True)
    while (step < num_steps) & stands:
      with tf.name_scope(""):  # without the loop's prefix on every operation's name
        stands = self.train_step(iterator)
      step += 1
    replica_state.average(self.strategy, self.task.model)

  @as_written
  def train_step(self, iterator: Iterator[Batch]) -> tf.Tensor:
    """One step (cross-replica): a global batch in, one update out; whether to go on (bool)."""
    if self.parts.watch is not None:
      self.parts.watch.begin()
    batch, input_wait_s = self.next_batch(iterator)
    if self._recorder is not None:
      self._recorder.record(self._local(batch["example_id"]), self.global_step.read_value())
    replica_step = converted(self.replica_step)
    finite, loss_finite = self.strategy.run(replica_step, args=(batch, input_wait_s))
    return self.finish_step(self._first(finite), self._first(loss_finite))

  @as_written
  def replica_step(self, batch: Batch, input_wait_s: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """One replica's work: the task's step, then all that it logged into the running sums."""
    step = Step(self.parts)
    converted(self.task.train_step)(step, batch)
    finite, loss_finite = step.outcome()
    step.report({"skipped": (tf.cast(~finite, tf.float32), 1.0), "input_wait": (input_wait_s, 1.0)})
    if self.parts.time_reductions:
      step.report({"communication": (step.communication_s(), 1.0)})
    step.record(self._metrics)
    return finite, loss_finite

  @as_written
  def finish_step(self, finite: tf.Tensor, loss_finite: tf.Tensor) -> tf.Tensor:
    """Counters and loss scale (cross-replica), from what all replicas agree on.

    Returns:
      Whether the step stands, a bool scalar: False where it was watched, bad, and taken back.
    """
    self.parts.loss_scale.update(finite)
    if self.parts.watch is not None:
      stands = self.parts.watch.stands(finite, loss_finite)
      self.global_step.assign_add(tf.cast(stands, tf.int64), read_value=False)
      return stands
    with tf.control_dependencies([finite]):  # a step whose input fails does not count
      step = self.global_step.assign_add(1, read_value=True)
    bad_step = tf.maximum(step, _NEVER * tf.cast(loss_finite, tf.int64))  # tf.where takes 28 us
    self._nonfinite_step.assign(tf.minimum(self._nonfinite_step, bad_step), read_value=False)
    return tf.constant(True)

  @as_written
  def next_batch(self, iterator: Iterator[Batch]) -> tuple[Batch, tf.Tensor]:
    """Returns the next global batch and the seconds it was waited for (cross-replica)."""
    started = timing.timestamp()
    with tf.control_dependencies([started]):
      batch = next(iterator)
    with tf.control_dependencies([self._first(batch["weight"])]):
      return batch, tf.cast(timing.timestamp() - started, tf.float32)

  def checkpoint_items(self) -> dict[str, Any]:
    """Everything that a checkpoint must hold for an exact restart, by name."""
    items = {
      "model": self.task.model,
      "optimizers": {name: o.optimizer for name, o in self.parts.optimizers.items()},
      "loss_scale": self.parts.loss_scale,
      "global_step": self.global_step,
      "position": self.position,
      "skipped_steps": self.skipped_steps,
      "nonfinite_step": self._nonfinite_step,
    }
    if self.parts.ema is not None:
      items["ema"] = self.parts.ema.averages
    if untracked := models.untracked(self.task.model):
      items["untracked"] = untracked
    return items

  def replica_id(self) -> tf.Tensor:
    """Returns this replica's number among all that train, an int32 scalar (replica context)."""
    return replica_id()

  def watch_nonfinite(self, on_stop: Callable[[], None] = lambda: None) -> None:
    """From now on a loop stops before the first step that is not finite (host).

    That is a step with a loss or, without a loss scale that reacts to overflows, a reduced
    gradient that is not finite; see framework/forensics.py. The step is taken back: the trainer,
    its global step and its position are as they were before it, and `forensics.examine` tells
    where the value came from.

    Args:
      on_stop: called by `train` when the loop has stopped.

    Raises:
      ConfigError: under parameter servers.
    """
    refuse_parameter_server(self)
    watch = rollback.Watch(
      strategy=self.strategy, model=self.task.model, loss_scale=self.parts.loss_scale,
      ema=self.parts.ema, on_stop=on_stop,
    )  # fmt: skip
    self._change(dataclasses.replace(self.parts, watch=watch))

  def make_iterator(self) -> Iterator[Batch]:
    """Returns an iterator of the global batches from `position` on, distributed (host)."""
    dataset = self._dataset_fn(int(self.position.numpy()))
    return datasets.iterate(self.cluster.distribute(dataset))

  def time_parts(self, *, reductions: bool) -> None:
    """Has `train` return "start_s" too, and "communication_s" (host); see
    framework/actions/time_budget.py.

    Args:
      reductions: time them, if there are several replicas. The loop is traced once more.
    """
    self._loop_began = tf.Variable(0.0, dtype=tf.float64, trainable=False)
    several = self.strategy.num_replicas_in_sync > 1
    self._change(dataclasses.replace(self.parts, time_reductions=reductions and several))

  def reset_input(self) -> None:
    """Drops the iterator; the next `train` starts at `position` (after a restore)."""
    self._iterator = None

  @property
  def traces(self) -> int:
    """How many times the loop has been traced; 0 in eager mode."""
    return 0 if self.eager else self._compiled_loop.experimental_get_tracing_count()

  def _change(self, parts: StepParts) -> None:
    """Steps with these parts from now on; the loop is traced, or traced once more, at the next."""
    self.parts = parts
    self._compiled_loop = self.loop if self.eager else tf.function(self.loop)

  def _make_counters(self) -> None:
    """Plain variables with atomic increments: exact under every strategy."""
    self.global_step = _counter("global_step")
    self.skipped_steps = _counter("skipped_steps")
    self._nonfinite_step = _counter("nonfinite_step")
    self._nonfinite_step.assign(_NEVER)
    self.position = tf.Variable(0, dtype=tf.int64, trainable=False, name="position")

  def _make_sums(self) -> MetricSums:
    return MetricSums()

  def _run_loop(self, num_steps: tf.Tensor) -> None:
    self._compiled_loop(self._iterator, num_steps)

  def _local(self, per_replica: Any) -> tuple[tf.Tensor, ...]:
    return self.strategy.experimental_local_results(per_replica)

  def _first(self, per_replica: Any) -> tf.Tensor:
    return self._local(per_replica)[0]

  def _state(self) -> dict[str, float]:
    state = {
      "loss_scale": float(tf.convert_to_tensor(self.parts.loss_scale.value())),
      "skipped_steps": float(self.skipped_steps.numpy()),
    }
    for name, optimizer in self.parts.optimizers.items():
      state[f"{adapters.prefix(name)}learning_rate"] = float(optimizer.learning_rate())
    if self._nonfinite_step.numpy() != _NEVER:
      state["nonfinite_step"] = float(self._nonfinite_step.numpy())
    return state

  def _require_weight(self) -> None:
    """A batch without weight is passed over; a run without any has a mistake in its data."""
    losses = {f"{adapters.prefix(name)}loss" for name in self.parts.optimizers}
    self._weight_seen = self._weight_seen or not losses <= self._metrics.weightless
    if not self._weight_seen:
      raise ConfigError(
        f"all examples up to step {int(self.global_step.numpy())} have weight 0, so that nothing "
        "was trained; batch['weight'], from the source or preprocess(), must be above 0 for some."
      )

  def _report_retracing(self) -> None:
    if self.traces > self._traces:
      self._traces = self.traces
      logging.warning(
        "the training loop was traced again (%d times so far): a shape or a Python value that the "
        "step depends on changed; keep batches static and Python state out of train_step.",
        self.traces,
      )


def _counter(name: str) -> tf.Variable:
  first = tf.VariableAggregation.ONLY_FIRST_REPLICA
  return tf.Variable(0, dtype=tf.int64, trainable=False, aggregation=first, name=name)


def _usual_loss_scale() -> Callable[[], LossScale]:
  """Only float16 has too narrow a range to do without."""
  policies = {keras.config.dtype_policy().name, tf_keras.mixed_precision.global_policy().name}
  return loss_scales.dynamic if "mixed_float16" in policies else loss_scales.none


def _check_options(
  clip_norm: float | None,
  clip_value: float | None,
  accumulation_steps: int,
  eager: bool,
  jit_compile: bool,
) -> None:
  if clip_norm is not None and clip_value is not None:
    raise ConfigError(
      f"received both Trainer.clip_norm={clip_norm} and Trainer.clip_value={clip_value}; "
      "choose one."
    )
  for name, value in (("clip_norm", clip_norm), ("clip_value", clip_value)):
    if value is not None and not value > 0:
      raise ConfigError(f"Trainer.{name} is {value}; it must be above 0, or None for no clipping.")
  if accumulation_steps < 1:
    raise ConfigError(f"Trainer.accumulation_steps is {accumulation_steps}; it must be 1 or more.")
  if eager and jit_compile:
    raise ConfigError("received both eager=True and Trainer.jit_compile=True; choose one.")


def refuse_parameter_server(trainer: Trainer) -> None:
  """Raises ConfigError under parameter servers."""
  if not trainer.watchable:
    raise ConfigError(
      "a step cannot be replayed under parameter_server: other workers change the weights while it "
      "is made; use another run.strategy."
    )
