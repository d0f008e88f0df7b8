"""Asynchronous training: the trainer's loop and the evaluator's batches as closures on workers.

train          chief    steps_per_loop steps as pieces, closures that any worker may run
  piece        worker   a tf.while_loop: claim a step, run it, until the loop's steps are claimed
    train_step worker   as ever: framework/trainer.py; its updates go to the servers at once

What must be exact although workers run side by side and may die:

- the step count. `ResourceCountUpTo` is TensorFlow's one atomic fetch-and-add. A step is claimed by
  it before it is run, so that there are never too many; a step that died with its worker is missing
  from `global_step` after the loop and is claimed once more.
- sums. A piece returns its sums. One that died with its worker has returned none, is run again by
  TensorFlow's coordinator, and counts once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import sharded_variable
from tensorflow.python.framework import config as tf_config

from framework.backend import models
from framework.backend.autograph import as_written, compiled
from framework.errors import ConfigError
from framework.evaluator import Evaluator
from framework.inputs.datasets import Batch
from framework.metrics import CAPACITY, MetricSums
from framework.observers import Observer
from framework.optimizers.loss_scale import DynamicLossScale
from framework.strategies import servers, traits
from framework.strategies.cluster import ClusterError
from framework.trainer import Trainer

PIECES_PER_WORKER = 4
"""Into how many pieces a loop is cut: with more, less is lost with a worker; fewer cost less."""
_NEVER = tf.int64.max
_POLL_S = 0.002
_PROBE_EVERY_S = 5.0


class ReturnedSums(MetricSums):
  """Sums that a closure returns, in place of a variable that it adds to."""

  def __init__(self) -> None:
    """Starts from zero; makes no variable."""
    self._rows: dict[str, int] = {}
    self._weightless: frozenset[str] = frozenset()
    self._added: list[tf.Tensor] = []
    self._total = np.zeros([CAPACITY, 2])

  def add(self, metrics: Mapping[str, tuple[Any, Any]]) -> None:
    """Keeps this step's pairs for `taken`, in the graph that is being traced."""
    sums = self._packed(metrics)
    if sums is not None:
      self._added.append(sums)

  def taken(self) -> tf.Tensor:
    """Returns the sum of what was added since the last call, float64 [CAPACITY, 2]."""
    added, self._added = self._added, []
    return tf.add_n(added) if added else empty_sums()

  def collect(self, sums: np.ndarray) -> None:
    """Adds what a closure has returned (host)."""
    self._total += sums

  def result(self) -> dict[str, float]:
    """See `MetricSums.result` (host)."""
    total = self._total
    self.reset()
    return self._means(total)

  def reset(self) -> None:
    """Starts again from zero (host)."""
    self._total = np.zeros([CAPACITY, 2])


def empty_sums() -> tf.Tensor:
  """Returns the sums of nothing, float64 [CAPACITY, 2]."""
  return tf.zeros([CAPACITY, 2], tf.float64)


class Dispatcher:
  """Has functions run on whatever workers there are (host)."""

  def __init__(self, strategy: tf.distribute.Strategy) -> None:
    """Takes the strategy's coordinator; TensorFlow makes one a strategy."""
    self._cluster = servers.parameter_servers_of(strategy)
    self._pulse = self._cluster.pulse
    self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

  @property
  def workers(self) -> int:
    """How many workers there are, or should be."""
    return len(self._cluster.workers)

  def datasets(self, make: Callable[[tf.Tensor], tf.data.Dataset]) -> Any:
    """Returns one dataset a worker, which `make(worker's index)` gives, made there.

    Raises:
      ConfigError: it runs Python, which is here and not there.
    """

    def made() -> tf.data.Dataset:
      worker = tf.distribute.coordinator.experimental_get_current_worker_index()
      return make(tf.cast(worker, tf.int64))

    function = tf.function(made, autograph=False)
    _refuse_python(function.get_concrete_function())
    return self._coordinator.create_per_worker_dataset(function)

  def run(self, function: Any, pieces: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Runs function(*piece) for each piece, each on any worker, again if that one dies.

    Returns:
      What each piece returned, as NumPy values; None where the worker died with it in its hands.

    Raises:
      ClusterError: all workers are gone and none comes back in time, or one does not answer.
    """
    values = [self._coordinator.schedule(function, args=piece) for piece in pieces]
    self._wait()
    self._coordinator.join()  # raises what the workers raised
    return [_fetched(value) for value in values]

  def _wait(self) -> None:
    answered = probed = time.monotonic()
    while not self._coordinator.done():
      time.sleep(_POLL_S)
      self._pulse.check()
      now = time.monotonic()
      if now - probed > _PROBE_EVERY_S:
        probed = now
        if any(map(servers.answers, self._cluster.workers)):
          answered = now
      if now - answered > self._cluster.start_timeout_s + _PROBE_EVERY_S:
        raise ClusterError(
          f"lost all {self.workers} workers, and none has come back within "
          f"{self._cluster.start_timeout_s:g} s"
        )


def _fetched(value: Any) -> Any:
  try:
    return value.fetch()
  except tf.errors.OpError as error:
    if "/job:worker" not in str(error):
      raise
    return None


class ParameterServerTrainer(Trainer):
  """The trainer under `tf.distribute.ParameterServerStrategy`."""

  cluster: servers.ParameterServers
  _metrics: ReturnedSums

  def __init__(
    self,
    *,
    fuse_updates: bool = True,
    eager: bool = False,
    jit_compile: bool = False,
    **options: Any,
  ) -> None:
    """See `Trainer`; updates are never fused: the copies would undo those of other workers.

    Raises:
      ConfigError: an option that needs replicas in step, or a Keras 3 variable to be partitioned.
    """
    del fuse_updates
    strategy = options["strategy"]
    _refuse_options(strategy, eager=eager, jit_compile=jit_compile)
    self._dispatcher = Dispatcher(strategy)
    self._worker: tf.Tensor | None = None
    partitioner = servers.parameter_servers_of(strategy).partitioner
    with partitioner or contextlib.nullcontext():
      super().__init__(fuse_updates=False, **options)
    if isinstance(self.parts.loss_scale, DynamicLossScale):
      raise ConfigError(
        "Trainer.loss_scale is @dynamic, but under parameter_server another worker may change it "
        "in the middle of a step; use @fixed, or bfloat16, which needs none."
      )
    for optimizer in self.parts.optimizers.values():
      _count_atomically(optimizer.optimizer)

  def piece(
    self, iterator: Iterator[Batch], most_steps: tf.Tensor, end: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Up to `most_steps` steps, as far as there are any to claim before `end` (worker).

    Args:
      iterator: of this worker's batches.
      most_steps: int64 scalar, at least 1.
      end: int64 scalar, the global step at which the loop ends.

    Returns:
      The metrics' sums, float64 [CAPACITY, 2], and the first step whose loss was not finite, or
      the largest int64.
    """
    self._worker = tf.distribute.coordinator.experimental_get_current_worker_index()

    def one(
      done: tf.Tensor, claim: tf.Tensor, sums: tf.Tensor, bad_step: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
      with tf.control_dependencies([claim]):
        self.train_step(iterator)
      with tf.control_dependencies([self._applied_step]):
        claim = tf.cond(done + 1 < most_steps, self._claim, lambda: tf.constant(_NEVER))
      bad_step = tf.minimum(bad_step, self._bad_step)
      return done + 1, claim, sums + self._metrics.taken(), bad_step

    start = (tf.constant(0, tf.int64), self._claim(), empty_sums(), tf.constant(_NEVER))
    *_, sums, bad_step = tf.while_loop(
      lambda done, claim, *_: claim < end, one, start, parallel_iterations=1
    )
    return sums, bad_step

  def replica_step(self, batch: Batch, input_wait_s: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """See `Trainer.replica_step`; notes the global step before it reads any weight."""
    with tf.control_dependencies([batch["weight"]]):
      self._began_step = self.global_step.read_value()
    with tf.control_dependencies([self._began_step]):
      return super().replica_step(batch, input_wait_s)

  def finish_step(self, finite: tf.Tensor, loss_finite: tf.Tensor) -> tf.Tensor:
    """Counts the step, and how many updates of others came since it read the weights."""
    with tf.control_dependencies([finite]):
      before = _fetch_and_add(self.global_step)
    staleness = tf.cast(before - self._began_step, tf.float32)
    self._metrics.add({"staleness": (staleness, 1.0)})
    self._applied_step = before + 1
    self._bad_step = tf.where(loss_finite, _NEVER, self._applied_step)
    return tf.constant(True)

  def replica_id(self) -> tf.Tensor:
    """See `Trainer.replica_id`: replicas of all workers, each of which counts its own from 0."""
    worker = tf.cast(self._worker, tf.int32)
    return worker * self.strategy.num_replicas_in_sync + super().replica_id()

  def observe(self, observer: Observer) -> None:
    """Refuses: no step of one worker is the whole step.

    Raises:
      ConfigError: always.
    """
    raise ConfigError(
      f"a {type(observer).__name__} observes steps of all replicas together, but under "
      "parameter_server each worker makes its own; use another run.strategy."
    )

  def _check_strategy(self, strategy: tf.distribute.Strategy) -> None:
    if not traits.is_asynchronous(strategy):
      raise ConfigError(
        f"{type(self).__name__} is for parameter_server, but the strategy is a "
        f"{type(strategy).__name__}; use framework.Trainer."
      )

  def _compiled(self) -> Any:
    return compiled(self.piece)

  def _make_sums(self) -> ReturnedSums:
    return ReturnedSums()

  def _make_counters(self) -> None:
    _refuse_partitioned(self.task.model)
    if self.cluster.partitioner is not None:
      self.cluster.partitioner.end()  # the model is built; an optimizer's slots follow its parts
    super()._make_counters()
    self._claims = tf.Variable(0, dtype=tf.int64, trainable=False, name="claimed_steps")

  def make_iterator(self) -> Any:
    """See `Trainer.make_iterator`; each worker makes its own batches."""
    position, workers = int(self.position.numpy()), self._dispatcher.workers
    return iter(self._dispatcher.datasets(lambda w: self._dataset_fn(position, shard=(workers, w))))

  def _run_loop(self, num_steps: tf.Tensor) -> None:
    """Has pieces run until just `num_steps` more steps are counted, then collects their sums.

    There is a piece more for every other worker, so that all but the slowest could take all steps:
    a loop ends no later than a step of the slowest worker after the last was claimed.
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
      for result in self._dispatcher.run(self._compiled_loop, [piece] * count):
        if result is not None:
          self._collect(*result)
      step = int(self.global_step.numpy())

  def _collect(self, sums: np.ndarray, bad_step: np.ndarray) -> None:
    self._metrics.collect(sums)
    if bad_step < self.nonfinite_step.numpy():
      self.nonfinite_step.assign(bad_step)

  def _claim(self) -> tf.Tensor:
    return _fetch_and_add(self._claims)


class ParameterServerEvaluator(Evaluator):
  """The evaluator under `tf.distribute.ParameterServerStrategy`."""

  _metrics: ReturnedSums

  def _prepare(self, dataset: tf.data.Dataset | Callable[..., tf.data.Dataset]) -> None:
    if not callable(dataset):
      raise ConfigError(
        "Evaluator got a dataset, but under parameter_server each worker makes its own; give a "
        "function: functools.partial(inputs.eval_dataset, source, global_batch_size=...)."
      )
    self._dispatcher = Dispatcher(self.strategy)
    self._shards = self._dispatcher.workers * PIECES_PER_WORKER
    self._metrics = ReturnedSums()
    self._compiled_shard = tf.function(self.shard_sums)

    def of_shards(worker: tf.Tensor) -> tf.data.Dataset:
      del worker
      numbers = tf.data.Dataset.range(self._shards)
      return numbers.map(as_written(lambda number: dataset(shard=(self._shards, number))))

    self._datasets = self._dispatcher.datasets(of_shards).build()

  def shard_sums(
    self, shards: tf.data.Dataset, number: tf.Tensor, most: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """The sums over one shard of the batches, and how many batches it has (worker).

    Args:
      shards: dataset of shards, each a dataset of batches.
      number: which shard, int64 scalar.
      most: how many of its batches, int64 scalar; -1 for all.
    """
    sums, batches = as_written(empty_sums)(), tf.constant(0, tf.int64)
    for batch in iter(shards.skip(number).take(1).get_single_element().take(most)):
      as_written(self.eval_step)(batch)
      sums += as_written(self._metrics.taken)()
      batches += 1
    return sums, batches

  def _run_batches(self, limit: int) -> int:
    """Runs every shard until its sums are here; those of a worker that died are run again."""
    batches, missing = 0, list(range(self._shards))
    while missing:
      results = self._dispatcher.run(self._compiled_shard, [self._piece(n, limit) for n in missing])
      for sums, count in filter(None, results):
        self._metrics.collect(sums)
        batches += int(count)
      missing = [n for n, result in zip(missing, results, strict=True) if result is None]
    return batches

  def _piece(self, number: int, limit: int) -> tuple[Any, ...]:
    most = -1 if limit < 0 else max(0, -(-(limit - number) // self._shards))
    return self._datasets, tf.constant(number, tf.int64), tf.constant(most, tf.int64)


def _fetch_and_add(counter: tf.Variable) -> tf.Tensor:
  """Adds 1 to an int64 counter and returns what it was, in one operation of its server."""
  return tf.raw_ops.ResourceCountUpTo(resource=counter.handle, limit=_NEVER, T=tf.int64)


def _count_atomically(optimizer: Any) -> None:
  """Keras 3 reads its count of updates, adds 1 and assigns: of two at a time, one would be lost."""
  if isinstance(optimizer, keras.optimizers.Optimizer):
    count = models.raw(optimizer.iterations)
    optimizer.iterations.assign_add = lambda value: count.assign_add(value, read_value=False)


def _refuse_options(strategy: tf.distribute.Strategy, *, eager: bool, jit_compile: bool) -> None:
  for name, value in (("run.eager", eager), ("Trainer.jit_compile", jit_compile)):
    if value:
      raise ConfigError(
        f"received both {name}=True and run.strategy=@parameter_server, whose workers run compiled "
        "functions on variables elsewhere; leave one out."
      )
  if tf_config.is_op_determinism_enabled():
    raise ConfigError(
      "received both run.deterministic=True and run.strategy=@parameter_server, whose workers "
      "update in the order in which they happen to come; leave one out."
    )
  if strategy.num_replicas_in_sync > 1:
    raise ConfigError(
      f"each worker has {strategy.num_replicas_in_sync} GPUs; under parameter_server start one "
      "worker a GPU, each with its own CUDA_VISIBLE_DEVICES."
    )


def _refuse_partitioned(model: Any) -> None:
  """Keras 3 knows a `ShardedVariable` for no variable: training would fail at its `handle`."""
  for variable in models.all_variables(model):
    if isinstance(models.raw(variable), sharded_variable.ShardedVariable):
      raise ConfigError(
        f"parameter_server.min_shard_bytes partitions {models.name(variable)!r}, a variable of a "
        "Keras 3 model, which Keras 3 cannot use; leave min_shard_bytes out, or make the model of "
        "tf_keras or tf.Module."
      )


def _refuse_python(function: Any) -> None:
  graph = function.graph.as_graph_def()
  nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
  if any(node.op in ("PyFunc", "PyFuncStateless", "EagerPyFunc") for node in nodes):
    raise ConfigError(
      "the input runs Python (tf.numpy_function, tf.py_function, a generator or a memory-mapped "
      "array), which parameter_server's workers do not have; use TensorFlow operations, and arrays "
      "in memory."
    )
