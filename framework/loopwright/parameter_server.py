"""Asynchronous training: the trainer's loop and the evaluator's batches as closures on workers.

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

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import sharded_variable
from tensorflow.python.framework import config as tf_config

from loopwright.aliases import Batch, Model, PerReplica
from loopwright.counters import NEVER
from loopwright.errors import ConfigError
from loopwright.evaluator import Batches, EvalSet, Evaluator
from loopwright.graphs.autograph import as_written, compiled
from loopwright.metrics import PerExample, Summed
from loopwright.metrics.checks import checked
from loopwright.metrics.rows import CollectedRows
from loopwright.metrics.sums import Layout, MetricSums
from loopwright.models import models
from loopwright.observers import Observer
from loopwright.optimizers.loss_scale import DynamicLossScale
from loopwright.strategies import placement, servers
from loopwright.strategies.cluster.identity import ClusterError
from loopwright.trainer import Trainer

PIECES_PER_WORKER = 4
"""Pieces per loop: more lose less work with a worker; fewer cost less overhead."""
_POLL_S = 0.002
_PROBE_EVERY_S = 5.0


class ReturnedSums(MetricSums):
  """Metric sums that a closure returns, instead of adding them to a variable.

  A loop of a worker carries them, so their size is fixed before its trace. A trace in which they
  do not fit fails; the next one gets more room: see `until_it_fits`.
  """

  def __init__(self) -> None:
    """Starts from zero; makes no variable."""
    super().__init__()
    self._layout = Layout()
    self._added: list[tf.Tensor] = []
    self._total = np.zeros([0])
    self.room = 128
    self.rows: dict[str, PerExample] = {}
    """The PerExample metrics of a step, as tensor specs; {} before a trace found any."""
    self.reset()

  @property
  def size(self) -> tuple[int, str]:
    """What a trace fixes; it changes only if a trace found it too small."""
    return self.room, repr(self.rows)

  def add(self, metrics: Mapping[str, Summed]) -> None:
    """Keeps this step's metrics for `taken`, in the graph under trace (worker)."""
    metrics = checked(metrics)
    self._layout.extend(metrics)
    if self._layout.size > self.room:
      self.room = max(2 * self.room, self._layout.size + 64)
      self._outgrown()
    if metrics:
      packed = self._layout.packed(metrics)
      self._added.append(tf.pad(packed, [[0, self.room - packed.shape[0]]]))

  def require_rows(self, rows: Mapping[str, PerExample]) -> None:
    """Ends a trace that expects other PerExample metrics (worker)."""
    found = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), dict(rows))
    if found != self.rows:
      self.rows = found
      self._outgrown()

  def _outgrown(self) -> None:
    self._added = []
    raise RuntimeError("the trace starts again, with room for all metrics")

  def taken(self) -> tf.Tensor:
    """Returns the sums added since the last call, float64 [room] (worker)."""
    added, self._added = self._added, []
    return tf.add_n(added) if added else self.empty()

  def empty(self) -> tf.Tensor:
    """Returns zero sums, float64 [room]."""
    return tf.zeros([self.room], tf.float64)

  def collect(self, sums: np.ndarray) -> None:
    """Adds the sums of a closure, float64 [room] (host)."""
    total = np.zeros([max(len(sums), len(self._total))])  # they grow if the loop is traced again
    total[: len(self._total)] += self._total
    total[: len(sums)] += sums
    self._total = total

  def result(self) -> dict[str, float]:
    """See `MetricSums.result` (host)."""
    total = np.pad(self._total, [0, max(0, self._layout.size - len(self._total))])
    self._totals = self._layout.unpacked(total)
    self.reset()
    return dict(self._totals.means)

  def reset(self) -> None:
    """Resets the sums to zero (host)."""
    self._total = np.zeros([0])


class Dispatcher:
  """Runs functions on the available workers (host)."""

  def __init__(self, strategy: tf.distribute.Strategy) -> None:
    """Gets the strategy's coordinator; TensorFlow makes one per strategy."""
    self._cluster = servers.parameter_servers_of(strategy)
    self._pulse = self._cluster.pulse
    self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

  @property
  def workers(self) -> int:
    """The number of workers in the cluster, including failed ones."""
    return len(self._cluster.workers)

  def datasets(self, make: Callable[[tf.Tensor], tf.data.Dataset]) -> Any:
    """Returns a per-worker dataset: each worker runs `make` with its index, an int64 scalar.

    Raises:
      ConfigError: the dataset runs Python, which workers cannot.
    """

    def made() -> tf.data.Dataset:
      worker = tf.distribute.coordinator.experimental_get_current_worker_index()
      return make(tf.cast(worker, tf.int64))

    function = tf.function(made, autograph=False)
    _refuse_what_stays_here(function.get_concrete_function())
    return self._coordinator.create_per_worker_dataset(function)

  def run(
    self,
    function: Any,
    pieces: Sequence[tuple[Any, ...]],
    *,
    meanwhile: Callable[[], None] = lambda: None,
  ) -> list[Any]:
    """Runs function(*piece) for each piece on any worker; reruns it if the worker fails.

    Args:
      function: compiled.
      pieces: its arguments.
      meanwhile: called several times a second; what it raises leaves the workers at work.

    Returns:
      The result of each piece as NumPy values; None if its worker failed before the fetch.

    Raises:
      ClusterError: all workers failed and none restarted in time, or one does not respond.
    """
    values = [self._coordinator.schedule(function, args=piece) for piece in pieces]
    self._wait(meanwhile)
    self._coordinator.join()  # raises the errors of the workers
    return [_fetched(value) for value in values]

  def _wait(self, meanwhile: Callable[[], None]) -> None:
    answered = probed = time.monotonic()
    while not self._coordinator.done():
      time.sleep(_POLL_S)
      meanwhile()
      self._pulse.check()
      now = time.monotonic()
      if now - probed > _PROBE_EVERY_S:
        probed = now
        if any(map(servers.answers, self._cluster.workers)):
          answered = now
      if now - answered > self._cluster.start_timeout_s + _PROBE_EVERY_S:
        raise ClusterError(
          f"lost all {self.workers} workers, and none restarted within "
          f"{self._cluster.start_timeout_s:g} s"
        )


def until_it_fits(sums: ReturnedSums, run: Callable[[], list[Any]]) -> list[Any]:
  """Returns `run()`; repeats it if its trace found more metrics than `sums` had room for."""
  while True:
    size = sums.size
    try:
      return run()
    except Exception:
      if sums.size == size:
        raise


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
  metrics: ReturnedSums
  _sums = ReturnedSums

  def __init__(self, *, fuse_updates: bool = True, **options: Any) -> None:
    """See `Trainer`; never fuses updates: fused copies would overwrite other workers' updates.

    Raises:
      ConfigError: an option needs a synchronous strategy, or a Keras 3 variable is partitioned.
    """
    del fuse_updates
    strategy = options["strategy"]
    if not issubclass(placement.of(strategy).trainer_class(), ParameterServerTrainer):
      raise ConfigError(
        f"{type(self).__name__} is for parameter_server, but the strategy is a "
        f"{placement.of(strategy).name}; use loopwright.Trainer."
      )
    self._worker: tf.Tensor | None = None
    partitioner = servers.parameter_servers_of(strategy).partitioner
    with partitioner or contextlib.nullcontext():
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

  def replica_step(self, batch: Batch, input_wait_s: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """See `Trainer.replica_step`; reads the global step before any weight, for the staleness."""
    with tf.control_dependencies([batch["weight"]]):
      self._began_step = self.global_step.read_value()
    with tf.control_dependencies([self._began_step]):
      return super().replica_step(batch, input_wait_s)

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
      self.cluster.partitioner.end()  # optimizer slots follow the parts of the built model
    super()._make_counters()
    self._claims = tf.Variable(0, dtype=tf.int64, trainable=False, name="claimed_steps")

  def make_iterator(self) -> Iterator[PerReplica]:
    """See `Trainer.make_iterator`; each worker makes its own batches."""
    position, workers = int(self.position.numpy()), self._dispatcher.workers
    return iter(self._dispatcher.datasets(lambda w: self.dataset_fn(position, shard=(workers, w))))

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


class ParameterServerEvaluator(Evaluator):
  """The evaluator under `tf.distribute.ParameterServerStrategy`."""

  _metrics: ReturnedSums

  def _prepare(self, given: Mapping[str, Batches]) -> None:
    self._dispatcher = Dispatcher(self.strategy)
    self._shards = self._dispatcher.workers * PIECES_PER_WORKER
    self._sets = []
    for name, dataset in given.items():
      if not callable(dataset):
        raise ConfigError(
          "Evaluator got a dataset, but under parameter_server each worker makes its own; pass a "
          "function: functools.partial(inputs.eval_dataset, source, global_batch_size=...)."
        )
      batches = self._dispatcher.datasets(functools.partial(self._of_shards, dataset)).build()
      step = tf.function(self.shard_sums)
      self._sets.append(EvalSet(name, [batches], [-1], ReturnedSums(), step))

  def metric_names(self) -> None:
    """See `Evaluator.metric_names`."""
    return

  def _of_shards(
    self, dataset: Callable[..., tf.data.Dataset], worker: tf.Tensor
  ) -> tf.data.Dataset:
    del worker
    numbers = tf.data.Dataset.range(self._shards)
    return numbers.map(as_written(lambda number: dataset(shard=(self._shards, number))))

  def shard_sums(
    self, shards: tf.data.Dataset, number: tf.Tensor, most: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor, dict[str, PerExample]]:
    """Evaluates one shard (worker).

    Args:
      shards: dataset of shards, each a dataset of batches.
      number: index of the shard, int64 scalar.
      most: the maximum number of batches, int64 scalar; -1 for all.

    Returns:
      Sums, float64 [room]; the number of batches, int64; PerExample metrics, [batches, ...] each.
    """
    sums, batches = as_written(self._metrics.empty)(), tf.constant(0, tf.int64)
    arrays = as_written(self._row_arrays)()
    for batch in iter(shards.skip(number).take(1).get_single_element().take(most)):
      rows = as_written(self.eval_step)(batch)
      arrays = as_written(self._written)(arrays, tf.cast(batches, tf.int32), rows)
      sums += as_written(self._metrics.taken)()
      batches += 1
    return sums, batches, as_written(self._stacked)(arrays)

  def _row_arrays(self) -> list[tf.TensorArray]:
    specs = tf.nest.flatten(self._metrics.rows)
    return [tf.TensorArray(s.dtype, 0, dynamic_size=True, element_shape=s.shape) for s in specs]

  def _written(
    self, arrays: Sequence[tf.TensorArray], index: tf.Tensor, rows: Mapping[str, PerExample]
  ) -> list[tf.TensorArray]:
    self._metrics.require_rows(rows)
    values = tf.nest.flatten(rows)
    return [array.write(index, value) for array, value in zip(arrays, values, strict=True)]

  def _stacked(self, arrays: Sequence[tf.TensorArray]) -> dict[str, PerExample]:
    return tf.nest.pack_sequence_as(self._metrics.rows, [array.stack() for array in arrays])

  def _run_batches(self, one: EvalSet, limit: int) -> tuple[int, CollectedRows]:
    """Runs every shard until it returns its sums; reruns the shards of failed workers."""
    found: dict[int, Mapping[str, PerExample]] = {}
    missing = list(range(self._shards))
    meanwhile = functools.partial(self.between_batches, one.name, 0, None)
    while missing:
      pieces = [(*one.shapes, *self._piece(number, limit)) for number in missing]
      run = functools.partial(self._dispatcher.run, one.step, pieces, meanwhile=meanwhile)
      results = until_it_fits(self._metrics, run)
      for number, result in zip(missing, results, strict=True):
        if result is not None:
          sums, count, rows = result
          self._metrics.collect(sums)
          found |= {number + self._shards * i: _row(rows, i) for i in range(int(count))}
      missing = [n for n, result in zip(missing, results, strict=True) if result is None]
    collected = CollectedRows()
    for number in sorted(found):  # batch `number` of the source
      collected.add(found[number])
    return len(found), collected

  def _piece(self, number: int, limit: int) -> tuple[Any, ...]:
    most = -1 if limit < 0 else max(0, -(-(limit - number) // self._shards))
    return tf.constant(number, tf.int64), tf.constant(most, tf.int64)


def _row(rows: Mapping[str, PerExample], index: int) -> dict[str, PerExample]:
  """Returns batch `index` of the stacked batches of a shard (host)."""
  return {n: PerExample(values[index], weight[index]) for n, (values, weight) in rows.items()}


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


def _refuse_what_stays_here(function: Any) -> None:
  """Raises ConfigError if an input pipeline needs this process, which its workers cannot reach."""
  if any(tensor.dtype == tf.variant for tensor in function.graph.external_captures):
    raise ConfigError(
      "the input is a StreamSource, whose tf.data.Dataset is made on the chief; the workers of "
      "parameter_server cannot read it: use an ArraySource or your own Source."
    )
  graph = function.graph.as_graph_def()
  nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
  if any(node.op in ("PyFunc", "PyFuncStateless", "EagerPyFunc") for node in nodes):
    raise ConfigError(
      "the input runs Python (tf.numpy_function, tf.py_function, a generator or a memory-mapped "
      "array), which parameter_server's workers cannot; use TensorFlow operations and arrays in "
      "memory."
    )
