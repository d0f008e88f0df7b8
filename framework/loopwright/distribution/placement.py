"""Where a model is trained: what the framework must know of each kind of `tf.distribute` strategy.

Only this package asks which kind a strategy is. The rest of the framework asks its placement:
`placement.of(strategy).row_shares`. A new kind is one class; see CONTRIBUTING.md.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import cross_device_ops

from loopwright import registry
from loopwright.distribution.cluster import Cluster
from loopwright.errors import ConfigError
from loopwright.graphs.aliases import PerReplica, Structure
from loopwright.models.task_state import Replicas

_KEPT = "_loopwright_placement"


class Placement:
  """One strategy. These answers fit a kind that nobody has registered: they assume little.

  Attributes:
    strategy: the strategy itself.
    trainer, evaluator: the classes that run a task under it; None for the usual ones.
    joins_processes: whether its factory connects the processes that TF_CONFIG names.
    loops_evaluation: whether one compiled loop may evaluate several batches; else the host takes
      each batch.
    replays: whether a step can be undone and run again eagerly.
    reads_all_copies: whether this process can read the copies of a variable on all replicas.
    make_optimizer: what takes the place of `adapters.made`; None if an optimizer may change
      variables in place.
  """

  trainer: type[Any] | None = None
  evaluator: type[Any] | None = None
  joins_processes = False
  loops_evaluation = False
  replays = True
  reads_all_copies = True
  make_optimizer: Callable[..., Any] | None = None

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
    return Cluster()

  @property
  def replicas(self) -> Replicas | None:
    """How to read the values of all replicas; None if they are in this process."""
    return None

  @property
  def on_gpus(self) -> bool:
    """Whether replicas are on GPUs, whose queue stops when the host waits for a value."""
    return any("GPU" in name for name in self.devices)

  @property
  def compiles(self) -> bool:
    """Whether XLA compiles what it can of a step, if nothing else is asked: on GPUs it wins."""
    return self.on_gpus and "jit_compile" not in self.refused

  @property
  def device_kind(self) -> str:
    """Of its replicas' devices: "GPU" or "CPU"."""
    return "GPU" if any("GPU" in name for name in self.devices) else "CPU"

  @property
  def usage(self) -> dict[str, float]:
    """Returns what is known of the GPUs of this process, {} without any.

    "gpu_memory_mib" is the most that one has used so far, "gpu_utilization" the share of the last
    second in which they computed.
    """
    if not any("GPU" in name for name in self.devices):
      return {}
    from loopwright.distribution import gpus

    found = {
      "gpu_memory_mib": gpus.peak_mib(self.devices),
      "gpu_utilization": gpus.utilization(self.devices),
    }
    return {name: value for name, value in found.items() if value is not None}

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

  def ordering_tokens(self) -> list[tf.Variable]:
    """Returns the variables by which TensorFlow orders collectives, which hold no state (host)."""
    kinds = ("_collective_ops", "_cross_device_ops", "_host_cross_device_ops")
    made = (getattr(self.strategy.extended, name, None) for name in kinds)
    launchers = (each for ops in made for each in getattr(ops, "_launchers", ()))
    tokens = (getattr(each, "_ordering_token", None) for each in launchers)
    return [token for token in tokens if token is not None]

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
    if (tasks := tasks_in(environ)) > 1:
      raise ConfigError(
        f"TF_CONFIG names {tasks} processes, but run.strategy makes {self.name}, which trains in "
        "one; set run.strategy = @multi_worker_mirrored or @parameter_server, or remove TF_CONFIG "
        "(--local_workers sets it)."
      )


class Server:
  """What a factory returns in a process that serves another one and trains nothing itself."""

  def serve(self) -> None:
    """Serves until the other process exits (host)."""
    raise NotImplementedError


Kind = TypeVar("Kind", bound=type[Placement])
_kinds: dict[type, type[Placement]] = {}


def register(kind: type[tf.distribute.Strategy]) -> Callable[[Kind], Kind]:
  """Registers a class of placements for the strategies of a class and of its subclasses."""

  def add(made: Kind) -> Kind:
    _kinds[kind] = made
    return made

  return add


def kind_of(strategy: type[tf.distribute.Strategy]) -> type[Placement]:
  """Returns the class of placements for a class of strategies."""
  shipped = {entry.name: entry for entry in registry.entries("placement")}
  for kind in strategy.__mro__:
    if kind not in _kinds and kind.__name__ in shipped:
      shipped[kind.__name__].load()  # registers itself
    if kind in _kinds:
      return _kinds[kind]
  return Placement


def of(strategy: tf.distribute.Strategy) -> Placement:
  """Returns the placement of a strategy, always the same object (any context)."""
  if _KEPT not in vars(strategy):
    # It lives as long as the strategy.
    setattr(strategy, _KEPT, kind_of(type(strategy))(strategy))
  return cast(Placement, vars(strategy)[_KEPT])


def here() -> Placement:
  """Returns the placement of the strategy in whose scope or replica this is called."""
  return of(tf.distribute.get_strategy())


def made(strategy: Any) -> tf.distribute.Strategy | Server:
  """Returns a strategy, or what its factory returns (host).

  Raises:
    ConfigError: it is not a strategy.
  """
  found = strategy() if callable(strategy) else strategy
  if not isinstance(found, tf.distribute.Strategy | Server):
    raise ConfigError(
      f"run.strategy makes a {type(found).__name__}; it must be a factory of a tf.distribute "
      "strategy, such as @auto, @one_device, @mirrored or @central_storage."
    )
  return found


def tasks_in(environ: Mapping[str, str]) -> int:
  """Returns the number of tasks of TF_CONFIG; 0 if it is missing or wrong."""
  try:
    config = json.loads(environ.get("TF_CONFIG", "{}"))
    return "task" in config and sum(map(len, config["cluster"].values()))
  except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
    return 0
