"""Asynchronous training: the trainer's loop as closures on workers.

train          chief    schedules steps_per_loop steps as pieces, closures for any worker
  piece        worker   a tf.while_loop: claim a step, run it, until all steps are claimed
    train_step worker   loopwright/trainer.py; updates go to the servers immediately

Two results stay exact when workers run concurrently and fail:

- the step count. A worker claims a step before it runs it, with `ResourceCountUpTo`, TensorFlow's
  only atomic fetch-and-add, so there are never too many. A step lost with its worker is missing
  from `global_step` after the loop and is claimed again.
- the metric sums. A piece returns its sums; a piece lost with its worker returns none, is run
  again by TensorFlow's coordinator, and counts once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import sharded_variable
from tensorflow.python.framework import config as tf_config

from loopwright.distribution import placement
from loopwright.engine.counters import NEVER
from loopwright.errors import ConfigError
from loopwright.graphs.aliases import Batch, Model, PerReplica
from loopwright.graphs.autograph import compiled
from loopwright.models import models
from loopwright.observers import Observer
from loopwright.optimizers.loss_scale import DynamicLossScale
from loopwright.strategies.parameter_server import servers
from loopwright.strategies.parameter_server.dispatch import (
  PIECES_PER_WORKER,
  Dispatcher,
  ReturnedSums,
  until_it_fits,
)
from loopwright.trainer import Trainer


class ParameterServerTrainer(Trainer):
  """The trainer under `tf.distribute.ParameterServerStrategy`."""

  cluster: servers.ParameterServers
  metrics: ReturnedSums
  _sums = ReturnedSums

  def __init__(self, *, fuse_updates: bool = True, **options: Any) -> None:
    """See `Trainer`; never fuses updates: fused copies would overwrite other workers' updates.

    Raises:
      ConfigError: an option needs a synchronous strategy, or a Keras 3 variable is partitioned.
    """
    del fuse_updates
    strategy = options["strategy"]
    if not issubclass(placement.of(strategy).trainer or Trainer, ParameterServerTrainer):
      raise ConfigError(
        f"{type(self).__name__} is for parameter_server, but the strategy is a "
        f"{placement.of(strategy).name}; use loopwright.Trainer."
      )
    self._worker: tf.Tensor | None = None
    partitioner = servers.parameter_servers_of(strategy).partitioner
    if partitioner is not None:
      partitioner.active = True  # until the model is built
    super().__init__(fuse_updates=False, **options)
    if isinstance(self.parts.loss_scale, DynamicLossScale):
      raise ConfigError(
        "Trainer.loss_scale is @dynamic, but under parameter_server another worker may change it "
        "during a step; use @fixed, or bfloat16, which needs no loss scale."
      )
    for optimizer in self.parts.optimizers.values():
      _count_atomically(optimizer.optimizer)

  def piece(
    self, iterator: Iterator[PerReplica], most_steps: tf.Tensor, end: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Claims and runs up to `most_steps` steps before `end` (worker).

    Args:
      iterator: this worker's batches.
      most_steps: int64 scalar, at least 1.
      end: int64 scalar, the global step at which the loop ends.

    Returns:
      Metric sums, float64 [room], and the first step whose loss is not finite, an int64 scalar
      (the largest int64 if all are finite).
    """
    self._worker = tf.distribute.coordinator.experimental_get_current_worker_index()

    def one(
      done: tf.Tensor, claim: tf.Tensor, sums: tf.Tensor, bad_step: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
      with tf.control_dependencies([claim]):
        self.train_step(iterator)
      with tf.control_dependencies([self._applied_step]):
        claim = tf.cond(done + 1 < most_steps, self._claim, lambda: tf.constant(NEVER))
      bad_step = tf.minimum(bad_step, self._bad_step)
      return done + 1, claim, sums + self.metrics.taken(), bad_step

    start = (tf.constant(0, tf.int64), self._claim(), self.metrics.empty(), tf.constant(NEVER))
    *_, sums, bad_step = tf.while_loop(
      lambda done, claim, *_: claim < end, one, start, parallel_iterations=1
    )
    return sums, bad_step

  def replica_step(
    self, batch: Batch, input_wait_s: tf.Tensor, number: tf.Tensor | None = None
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """See `Trainer.replica_step`; reads the global step before any weight, for the staleness."""
    with tf.control_dependencies([batch["weight"]]):
      self._began_step = self.global_step.read_value()
    with tf.control_dependencies([self._began_step]):
      return super().replica_step(batch, input_wait_s, number)

  def finish_step(self, finite: tf.Tensor, loss_finite: tf.Tensor) -> tf.Tensor:
    """Counts the step; logs its staleness: other workers' updates since it read the weights."""
    with tf.control_dependencies([finite]):
      before = _fetch_and_add(self.global_step)
    staleness = tf.cast(before - self._began_step, tf.float32)
    self.metrics.add({"staleness": (staleness, 1.0)})
    self._applied_step = before + 1
    self._bad_step = tf.where(loss_finite, NEVER, self._applied_step)
    return tf.constant(True)

  def replica_id(self) -> tf.Tensor:
    """See `Trainer.replica_id`: unique over all workers; TensorFlow's index starts at 0 on each."""
    worker = tf.cast(self._worker, tf.int32)
    return worker * self.strategy.num_replicas_in_sync + super().replica_id()

  def observe(self, observer: Observer) -> None:
    """Raises ConfigError: an observer needs steps of all replicas together."""
    raise ConfigError(
      f"{type(observer).__name__} observes steps of all replicas together, but parameter_server is "
      "asynchronous; use another run.strategy."
    )

  def _check_strategy(self, strategy: tf.distribute.Strategy) -> None:
    _refuse_runtime(strategy)
    self._dispatcher = Dispatcher(strategy)

  def _compiled(self) -> Any:
    return compiled(self.piece)

  def _make_counters(self) -> None:
    _refuse_partitioned(self.task.model)
    if self.cluster.partitioner is not None:
      self.cluster.partitioner.active = False  # optimizer slots follow the parts of the built model
    super()._make_counters()
    self._claims = tf.Variable(0, dtype=tf.int64, trainable=False, name="claimed_steps")

  def make_iterator(self) -> Iterator[PerReplica]:
    """See `Trainer.make_iterator`; each worker makes its own batches."""
    position, workers = int(self.position.numpy()), self._dispatcher.workers
    return iter(self._dispatcher.datasets(lambda w: self.dataset_fn(position, shard=(workers, w))))

  def _trace(self) -> None:
    """The workers trace it."""

  def _run_loop(self, num_steps: tf.Tensor) -> None:
    """Runs pieces until exactly `num_steps` more steps are counted, and collects their sums.

    Schedules workers - 1 extra pieces, so that a slow worker does not hold steps that others could
    run: the loop ends at most one step of the slowest worker after the last claim.
    """
    step = int(self.global_step.numpy())
    end = step + int(num_steps)
    while step < end:
      self._claims.assign(step)
      count = min(end - step, self._dispatcher.workers * PIECES_PER_WORKER)
      most = -(-(end - step) // count)
      if count > 1:
        count += self._dispatcher.workers - 1
      piece = (self._iterator, tf.constant(most, tf.int64), tf.constant(end, tf.int64))
      run = functools.partial(self._dispatcher.run, self._compiled_loop, [piece] * count)
      results = until_it_fits(self.metrics, run)
      for result in results:
        if result is not None:
          self._collect(*result)
      step = int(self.global_step.numpy())

  def _collect(self, sums: np.ndarray, bad_step: np.ndarray) -> None:
    self.metrics.collect(sums)
    if bad_step < self.nonfinite_step.numpy():
      self.nonfinite_step.assign(bad_step)

  def _claim(self) -> tf.Tensor:
    return _fetch_and_add(self._claims)


def _fetch_and_add(counter: tf.Variable) -> tf.Tensor:
  """Adds 1 to an int64 counter and returns its old value, atomically on its server."""
  return tf.raw_ops.ResourceCountUpTo(resource=counter.handle, limit=NEVER, T=tf.int64)


def _count_atomically(optimizer: Any) -> None:
  """Makes Keras 3 count updates atomically: its read, add and assign lose concurrent counts."""
  if isinstance(optimizer, keras.optimizers.Optimizer):
    count = models.raw(optimizer.iterations)
    optimizer.iterations.assign_add = lambda value: count.assign_add(value, read_value=False)


def _refuse_runtime(strategy: tf.distribute.Strategy) -> None:
  if tf_config.is_op_determinism_enabled():
    raise ConfigError(
      "received both run.deterministic=True and run.strategy=@parameter_server, whose workers "
      "update in nondeterministic order; leave one out."
    )
  if strategy.num_replicas_in_sync > 1:
    raise ConfigError(
      f"each worker has {strategy.num_replicas_in_sync} GPUs; parameter_server supports one; start "
      "one worker per GPU, each with its own CUDA_VISIBLE_DEVICES."
    )


def _refuse_partitioned(model: Model) -> None:
  """Raises ConfigError: Keras 3 does not support `ShardedVariable`, which has no `handle`."""
  for variable in models.all_variables(model):
    if isinstance(models.raw(variable), sharded_variable.ShardedVariable):
      raise ConfigError(
        f"parameter_server.min_shard_bytes partitions {models.name(variable)!r}, a variable of a "
        "Keras 3 model, which Keras 3 does not support; leave min_shard_bytes out, or use tf_keras "
        "or tf.Module."
      )
