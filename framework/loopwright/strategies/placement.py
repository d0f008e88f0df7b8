"""Where a model is trained: what the framework must know of each kind of `tf.distribute` strategy.

Only this package asks which kind a strategy is. The rest of the framework asks its placement:
`placement.of(strategy).row_shares`. A new kind is one class; see CONTRIBUTING.md.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor
from tensorflow.python.distribute import cross_device_ops, distribute_lib

from loopwright.aliases import PerReplica, Structure
from loopwright.errors import ConfigError
from loopwright.strategies import gpus, model_parallel, servers
from loopwright.strategies.cluster import resolvers
from loopwright.strategies.cluster.identity import Cluster, workers

_KEPT = "_loopwright_placement"


class Placement:
  """One strategy. These answers fit a kind that nobody has registered: they assume little.

  Attributes:
    strategy: the strategy itself.
    trainer, evaluator: "module:class" of what runs a task under it.
    joins_processes: whether its factory connects the processes that TF_CONFIG names.
    loops_evaluation: whether one compiled loop may evaluate several batches; else the host takes
      each batch.
    replays: whether a step can be undone and run again eagerly.
    reads_all_copies: whether this process can read the copies of a variable on all replicas.
    updates_in_place: whether an optimizer may change parts of variables in place.
  """

  trainer = "loopwright.trainer:Trainer"
  evaluator = "loopwright.evaluator:Evaluator"
  joins_processes = False
  loops_evaluation = False
  replays = True
  reads_all_copies = True
  updates_in_place = True

  def __init__(self, strategy: tf.distribute.Strategy) -> None:
    """Stores the strategy; `of` makes a placement once per strategy."""
    self.strategy = strategy

  @property
  def name(self) -> str:
    """What a run's description calls the strategy."""
    return type(self.strategy).__name__.removesuffix("V1")

  @property
  def devices(self) -> list[str]:
    """The devices of its replicas, such as ["GPU:0", "GPU:1"]."""
    return [name.rpartition("/device:")[2] for name in self.strategy.extended.worker_devices]

  @functools.cached_property
  def cluster(self) -> Cluster:
    """The processes that train, and this process's place among them."""
    return Cluster(strategy=self.strategy)

  @property
  def on_gpus(self) -> bool:
    """Whether replicas are on GPUs, whose queue stops when the host waits for a value."""
    return any("GPU" in name for name in self.devices)

  @property
  def memory(self) -> dict[str, float]:
    """Returns "gpu_memory_mib": the most that a GPU of this process has used so far; else {}."""
    peak_mib = gpus.peak_mib(self.devices)
    return {} if peak_mib is None else {"gpu_memory_mib": peak_mib}

  def on_host(self) -> contextlib.AbstractContextManager[None]:
    """What is made inside is on the host if replicas are on GPUs, else where it would be."""
    return tf.device("CPU:0") if self.on_gpus else contextlib.nullcontext()

  @property
  def cross_device_op(self) -> type | None:
    """The class of what sums gradients, if its factory lets the user choose it."""
    return None

  @property
  def sends_bfloat16(self) -> bool:
    """Whether replicas can sum bfloat16; TensorFlow's collectives cannot between GPUs."""
    op = getattr(self.strategy.extended, "_cross_device_ops", None)
    collective = cross_device_ops.CollectiveAllReduce | cross_device_ops.NcclAllReduce
    return not (self.on_gpus and isinstance(op, collective))

  @property
  def shares_variables(self) -> bool:
    """Whether several replicas share one copy of each variable."""
    return False

  @property
  def makes_variables(self) -> bool:
    """Whether a model's variables must be made in the strategy's scope."""
    return self.strategy.num_replicas_in_sync > 1

  @property
  def row_shares(self) -> int:
    """Into how many parts of equal size the rows of a global batch are split."""
    return self.strategy.num_replicas_in_sync

  @property
  def refused(self) -> Mapping[str, str]:
    """What cannot be used under this strategy: name -> the error's message."""
    if self.strategy.num_replicas_in_sync == 1:
      return {}
    return {
      "shard_optimizer_state": "received Trainer.shard_optimizer_state=True with "
      f"{self.name}; it needs mirrored or multi_worker_mirrored."
    }

  def require(self, name: str) -> None:
    """Checks that something can be used under this strategy.

    Raises:
      ConfigError: it is `refused`.
    """
    if name in self.refused:
      raise ConfigError(self.refused[name])

  def require_options(self, **used: bool) -> None:
    """Checks that each option of a `Trainer` that is used is not `refused` (ConfigError)."""
    for name in (name for name, value in used.items() if value):
      self.require(name)

  def trainer_class(self) -> type[Any]:
    """Returns the class that trains under this strategy, a `Trainer`."""
    return _loaded(self.trainer)

  def evaluator_class(self) -> type[Any]:
    """Returns the class that evaluates under this strategy, an `Evaluator`."""
    return _loaded(self.evaluator)

  @contextlib.contextmanager
  def building(self) -> Iterator[None]:
    """Explains errors of a model that is built in the strategy's scope (host)."""
    yield

  def distribute(self, dataset: tf.data.Dataset) -> tf.distribute.DistributedDataset:
    """Returns the distributed dataset; `strategy.run` takes `per_replica` of its elements (host).

    Raises:
      ConfigError: the rows do not divide by the replicas.
    """
    return self.strategy.experimental_distribute_dataset(dataset)

  def read(self, iterator: Iterator[PerReplica]) -> PerReplica:
    """Returns the next batch of `distribute`, in a graph without a change of threads (any context).

    TensorFlow hands the read of a dataset that is not distributed to another thread and back, which
    takes 20 to 40 us although the batch is there. This read stays in its thread. It waits there if
    the batch is not there; the dataset's stages have other threads, also where operations have one.
    """
    if tf.executing_eagerly() or not isinstance(iterator, tf.data.Iterator):
      return next(iterator)
    specs = tf.nest.flatten(iterator.element_spec)
    if not all(isinstance(spec, tf.TensorSpec) for spec in specs):
      return next(iterator)
    tensors = tf.raw_ops.IteratorGetNextSync(
      iterator=iterator._iterator_resource,  # noqa: SLF001
      output_types=[spec.dtype for spec in specs],
      output_shapes=[spec.shape for spec in specs],
    )
    return tf.nest.pack_sequence_as(iterator.element_spec, tensors)

  def per_replica(self, batch: Mapping[str, PerReplica]) -> Mapping[str, PerReplica]:
    """Returns a batch of `distribute` as `strategy.run` takes it (host, cross-replica)."""
    return self.sent(batch, self.devices[0]) if self.on_gpus else batch

  def sent(self, batch: Mapping[str, PerReplica], device: str) -> Mapping[str, PerReplica]:
    """Returns a batch that the host has read, with its floats on a GPU, if the step uses them.

    Weights that are all 1, as they mostly are, are made there and not copied. Without its own copy
    TensorFlow would send a float to each branch by itself, and each branch's condition to the host.
    """
    weight = batch.get("weight")
    if tf.executing_eagerly() or not isinstance(weight, tf.Tensor):
      return batch
    # A tf.cond would copy its condition to the GPU.
    with self.on_host():
      are_ones = tf.reduce_all(weight == 1)
      kept = tf.raw_ops.Switch(data=weight, pred=are_ones).output_false
    with tf.device(device):
      ones = tf.ones(weight.shape, weight.dtype)
      made = tf.raw_ops.Switch(data=ones, pred=are_ones).output_true
      merged = tf.raw_ops.Merge(inputs=[kept, made]).output
      floats = {
        name: tf.identity(value) for name, value in batch.items()
        if isinstance(value, tf.Tensor) and value.dtype.is_floating
      }  # fmt: skip
      return {**batch, **floats, "weight": tf.ensure_shape(merged, weight.shape)}

  def of_replicas(self, values: Sequence[Structure]) -> PerReplica:
    """Returns the values of all replicas of one process as `strategy.run` takes them."""
    return self.strategy.experimental_distribute_values_from_function(
      lambda context: values[context.replica_id_in_sync_group]
    )

  def shares(self, value: tf.Tensor) -> list[tf.Tensor]:
    """Returns the rows of each replica of a feature [n, ...]; n divides by `row_shares`."""
    return tf.split(value, self.strategy.num_replicas_in_sync)

  def split(self, batch: Mapping[str, tf.Tensor | np.ndarray]) -> Mapping[str, PerReplica]:
    """Returns a whole global batch as `strategy.run` takes it (host, cross-replica)."""
    with self.on_host():
      parts = {name: self.shares(value) for name, value in batch.items()}
    count = self.strategy.num_replicas_in_sync
    of = [{name: part[i] for name, part in parts.items()} for i in range(count)]
    if not self.on_gpus:
      return self.of_replicas(of)
    return self.of_replicas([*map(self.sent, of, self.devices)])

  def split_rows(self, value: tf.Tensor, count: int) -> list[tf.Tensor]:
    """Splits a feature [n, ...] into `count` micro-batches of n / count rows (replica)."""
    return tf.split(value, count)

  def update_if(self, condition: tf.Tensor, update: Callable[[], None]) -> None:
    """Makes the assignments of `update` if a bool scalar is True (cross-replica)."""
    tf.cond(condition, update, lambda: None)

  def require_alone(self, environ: Mapping[str, str] = os.environ) -> None:
    """Checks that a strategy of one process is not started as one task of several (host).

    Otherwise each process trains the whole task by itself, in the same run folder.

    Args:
      environ: with TF_CONFIG, if any.

    Raises:
      ConfigError: TF_CONFIG names several tasks, but the strategy trains in this process alone.
    """
    if self.joins_processes or self.cluster.size > 1:
      return
    try:
      tasks = sum(map(len, resolvers.addresses_in(environ).values()))
    except ConfigError:
      return  # of no interest here
    if tasks > 1:
      raise ConfigError(
        f"TF_CONFIG names {tasks} processes, but run.strategy makes {self.name}, which trains in "
        "one; set run.strategy = @multi_worker_mirrored or @parameter_server, or remove TF_CONFIG "
        "(--local_workers sets it)."
      )


Kind = TypeVar("Kind", bound=type[Placement])
_kinds: dict[type, type[Placement]] = {}


def register(kind: type[tf.distribute.Strategy]) -> Callable[[Kind], Kind]:
  """Registers a class of placements for the strategies of a class and of its subclasses."""

  def add(made: Kind) -> Kind:
    _kinds[kind] = made
    return made

  return add


def kinds() -> list[type[Placement]]:
  """Returns the classes that are registered, and the one for all other strategies."""
  return [Placement, *_kinds.values()]


def of(strategy: tf.distribute.Strategy) -> Placement:
  """Returns the placement of a strategy, always the same object (any context)."""
  if _KEPT not in vars(strategy):
    known = (_kinds[kind] for kind in type(strategy).__mro__ if kind in _kinds)
    setattr(strategy, _KEPT, next(known, Placement)(strategy))  # lives as long as the strategy
  return cast(Placement, vars(strategy)[_KEPT])


def here() -> Placement:
  """Returns the placement of the strategy in whose scope or replica this is called."""
  return of(tf.distribute.get_strategy())


def made(strategy: Any) -> tf.distribute.Strategy | servers.Server:
  """Returns a strategy, or what its factory returns (host).

  Raises:
    ConfigError: it is not a strategy.
  """
  found = strategy() if callable(strategy) else strategy
  if not isinstance(found, tf.distribute.Strategy | servers.Server):
    raise ConfigError(
      f"run.strategy makes a {type(found).__name__}; it must be a factory of a tf.distribute "
      "strategy, such as @auto, @one_device, @mirrored or @central_storage."
    )
  return found


# ---- One process, with a copy of each variable per replica ----


@register(distribute_lib._DefaultDistributionStrategy)  # noqa: SLF001
class Default(Placement):
  """TensorFlow's default strategy: the first device, without distribution."""

  name = "default"
  loops_evaluation = True

  @property
  def devices(self) -> list[str]:
    """See `Placement`; the first GPU, where TensorFlow has one."""
    return ["GPU:0"] if tf.config.list_logical_devices("GPU") else []


@register(tf.distribute.OneDeviceStrategy)
class OneDevice(Placement):
  """One replica on one device."""

  loops_evaluation = True

  def distribute(self, dataset: tf.data.Dataset) -> tf.distribute.DistributedDataset:
    """See `Placement`; the step copies what it uses to a GPU.

    TensorFlow's iterator of devices would cost 90 us a step on a CPU. To a GPU it copies every
    feature, and integers of 32 bits back again, because a function returns them to the host.
    """
    return dataset


@register(tf.distribute.MirroredStrategy)
class Mirrored(Placement):
  """One replica per device of this process."""

  loops_evaluation = True

  refused: Mapping[str, str] = {}

  @property
  def cross_device_op(self) -> type:
    """See `Placement`."""
    return type(self.strategy.extended._cross_device_ops)  # noqa: SLF001

  def distribute(self, dataset: tf.data.Dataset) -> tf.distribute.DistributedDataset:
    """See `Placement`; the step splits the rows of whole batches, see `per_replica`."""
    whole = self.splits_batches and self._divides(dataset.element_spec)
    return dataset if whole else super().distribute(dataset)

  def per_replica(self, batch: Mapping[str, PerReplica]) -> Mapping[str, PerReplica]:
    """See `Placement`.

    TensorFlow's iterator for several devices takes 100 ms to make and, on CPUs, 0.2 ms a batch. To
    GPUs it copies every feature, and integers of 32 bits back again.
    """
    whole = self.splits_batches and all(map(tf.is_tensor, tf.nest.flatten(batch)))
    return self.split(batch) if whole else batch

  @functools.cached_property
  def splits_batches(self) -> bool:
    """Whether the step splits whole batches by `shares`; else TensorFlow's iterator splits them."""
    return len(self.devices) > 1

  def _divides(self, specs: Any) -> bool:
    """Whether all replicas get as many rows of a batch."""
    replicas = self.strategy.num_replicas_in_sync
    rows = [spec.shape[:1].as_list() for spec in tf.nest.flatten(specs)]
    return isinstance(specs, dict) and all(r and r[0] and r[0] % replicas == 0 for r in rows)


# ---- One process, others ----


@register(tf.distribute.experimental.CentralStorageStrategy)
class CentralStorage(Placement):
  """One replica per device; several replicas share variables on a parameter device."""

  @property
  def shares_variables(self) -> bool:
    """See `Placement`."""
    return self.strategy.num_replicas_in_sync > 1

  @property
  def refused(self) -> Mapping[str, str]:
    """See `Placement`."""
    if not self.shares_variables:
      return {}
    return {
      **super().refused,
      "jit_compile": "received both Trainer.jit_compile=True and "
      "run.strategy=@central_storage; XLA cannot access variables on another device: use mirrored, "
      "or jit_compile=False.",
    }


@register(tf.distribute.TPUStrategy)
class Tpu(Placement):
  """One replica per core of a TPU."""

  joins_processes = True


_NOT_ON_A_MESH = "=True, which model_parallel does not have; set it to False."


@register(model_parallel.ModelParallelStrategy)
class Mesh(Placement):
  """One replica on a mesh of devices, over which its tensors are split."""

  strategy: model_parallel.ModelParallelStrategy
  trainer = "loopwright.model_parallel:ModelParallelTrainer"
  replays = False
  updates_in_place = False
  on_gpus = False  # DTensor places every operation
  makes_variables = True
  refused = {  # noqa: RUF012
    "run.ledger": "run.ledger is True, but under model_parallel TensorFlow cannot compile the "
    "recording of examples; remove run.ledger.",
    "jit_compile": f"received Trainer.jit_compile{_NOT_ON_A_MESH}",
    "shard_optimizer_state": f"received Trainer.shard_optimizer_state{_NOT_ON_A_MESH}",
    "eager": f"received eager{_NOT_ON_A_MESH}",
  }

  @property
  def row_shares(self) -> int:
    """See `Placement`."""
    return self.strategy.row_shares

  @contextlib.contextmanager
  def building(self) -> Iterator[None]:
    """See `Placement`; also checks that each layout is of some variable."""
    with model_parallel.building():
      yield
    self.strategy.require_all_match()

  def split(self, batch: Mapping[str, tf.Tensor | np.ndarray]) -> Mapping[str, PerReplica]:
    """See `Placement`."""
    of_rows, place = self.strategy.of_rows, model_parallel.place
    return {name: place(value, of_rows(value.ndim)) for name, value in batch.items()}

  def split_rows(self, value: tf.Tensor, count: int) -> list[tf.Tensor]:
    """See `Placement`; DTensor cannot split along an axis that is split over devices."""
    rank, rows = value.shape.rank, value.shape[0] // count
    unsplit = dtensor.relayout(value, self.strategy.replicated(rank))
    parts = [unsplit[rows * number : rows * (number + 1)] for number in range(count)]
    return [dtensor.relayout(part, self.strategy.of_rows(rank)) for part in parts]

  def update_if(self, condition: tf.Tensor, update: Callable[[], None]) -> None:
    """See `Placement`; makes them in any case, of the old values if the condition is False."""
    with model_parallel.assigning_if(condition):
      update()


# ---- Several processes ----


@register(tf.distribute.MultiWorkerMirroredStrategy)
class Workers(Placement):
  """One process per worker, and in each one replica per device."""

  reads_all_copies = False
  refused: Mapping[str, str] = {}

  @functools.cached_property
  def cluster(self) -> Cluster:
    """See `Placement`."""
    resolver = self.strategy.cluster_resolver
    if resolver is None or not resolver.cluster_spec().jobs:
      return Cluster(strategy=self.strategy)
    peers, index = workers(resolver)
    return Cluster(strategy=self.strategy, index=index, peers=tuple(peers))

  def distribute(self, dataset: tf.data.Dataset) -> tf.distribute.DistributedDataset:
    """See `Placement`; of a dataset with this worker's rows alone."""
    if self.cluster.size == 1:
      return super().distribute(dataset)
    replicas = self.strategy.num_replicas_in_sync // self.cluster.size
    if replicas > 1:
      rows = tf.nest.flatten(dataset.element_spec)[0].shape[0]
      dataset = dataset.rebatch(rows // replicas, drop_remainder=True)
    return self.strategy.distribute_datasets_from_function(lambda _: dataset)


_ASYNCHRONOUS = "needs a synchronous strategy, but parameter_server is asynchronous; use "

_COMPILED = (
  "=True and run.strategy=@parameter_server, whose workers run compiled functions on remote "
  "variables; leave one out."
)


@register(tf.distribute.ParameterServerStrategy)
class ParameterServer(Placement):
  """Workers update variables on servers without waiting for each other; seen by the chief."""

  trainer = "loopwright.parameter_server:ParameterServerTrainer"
  evaluator = "loopwright.parameter_server:ParameterServerEvaluator"
  joins_processes = True
  replays = False
  on_gpus = False  # the chief, which asks, does not train
  name = "ParameterServerStrategy"
  refused = {  # noqa: RUF012
    "Trainer": f"Trainer {_ASYNCHRONOUS}loopwright.parameter_server.ParameterServerTrainer.",
    "Evaluator": f"Evaluator {_ASYNCHRONOUS}loopwright.parameter_server.ParameterServerEvaluator.",
    "eager": f"received both run.eager{_COMPILED}",
    "jit_compile": f"received both Trainer.jit_compile{_COMPILED}",
    "step.perturbed": f"step.perturbed() {_ASYNCHRONOUS}mirrored or multi_worker_mirrored.",
    "run.ledger": "run.ledger is True, but under parameter_server the steps that a worker's "
    "batches become are not known, and a killed worker loses a batch; remove run.ledger.",
    "TensorBoard.histograms_every_steps": "TensorBoard.histograms_every_steps is set, but under "
    "parameter_server workers update independently of each other; leave it out.",
    "TimeBudget": "run.actions has @TimeBudget(), but under parameter_server the workers wait for "
    "input and servers independently of each other; remove it.",
  }

  @property
  def devices(self) -> list[str]:
    """Counts of workers and servers."""
    return self.cluster.devices

  def read(self, iterator: Iterator[PerReplica]) -> PerReplica:
    """See `Placement`; on other machines a read without a change of threads has not been tried."""
    return next(iterator)

  @functools.cached_property
  def cluster(self) -> servers.ParameterServers:
    """See `Placement`."""
    return servers.parameter_servers_of(self.strategy)


def _loaded(name: str) -> type[Any]:
  """Returns a class by "module:class"; this package lies below the trainers."""
  module, _, found = name.partition(":")
  return cast(type[Any], getattr(importlib.import_module(module), found))
