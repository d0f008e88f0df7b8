"""Properties of an existing `tf.distribute` strategy that the framework depends on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

import tensorflow as tf

from framework.errors import ConfigError
from framework.strategies import model_parallel, servers
from framework.strategies.cluster import resolvers
from framework.strategies.cluster.identity import Cluster, workers


def is_asynchronous(strategy: tf.distribute.Strategy) -> bool:
  """Whether workers update the variables without waiting for each other (parameter servers)."""
  return isinstance(strategy, tf.distribute.ParameterServerStrategy)


def check_xla(strategy: tf.distribute.Strategy) -> None:
  """Rejects XLA if replicas read variables on another device, which XLA cannot access.

  Raises:
    ConfigError: central storage with several replicas.
  """
  if shares_variables(strategy):
    raise ConfigError(
      "received both Trainer.jit_compile=True and run.strategy=@central_storage; XLA cannot access "
      "variables on another device: use mirrored, or jit_compile=False."
    )


def shares_variables(strategy: tf.distribute.Strategy) -> bool:
  """Whether several replicas share one copy of each variable (central storage)."""
  central = isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy)
  return central and strategy.num_replicas_in_sync > 1


def is_on_mesh(strategy: tf.distribute.Strategy) -> bool:
  """Whether the model is split over a mesh of devices."""
  return model_parallel.is_model_parallel(strategy)


def replays(strategy: tf.distribute.Strategy) -> bool:
  """Whether a step can be undone and replayed eagerly."""
  return not is_on_mesh(strategy) and not is_asynchronous(strategy)


def loops_over_evaluation(strategy: tf.distribute.Strategy) -> bool:
  """Whether a compiled loop may evaluate several batches; the others take them from the host.

  In a cluster, all workers must agree after each batch; TPU and meshes have not been tried.
  """
  tried = tf.distribute.MirroredStrategy | tf.distribute.OneDeviceStrategy
  return strategy is tf.distribute.get_strategy() or isinstance(strategy, tried)


def row_shares(strategy: tf.distribute.Strategy) -> int:
  """Returns into how many parts of equal size the rows of a global batch are split."""
  if isinstance(strategy, model_parallel.ModelParallelStrategy):
    return strategy.row_shares
  return strategy.num_replicas_in_sync


@contextlib.contextmanager
def building(strategy: tf.distribute.Strategy) -> Iterator[None]:
  """Explains errors of a model that is built in the scope of this strategy (host)."""
  if not isinstance(strategy, model_parallel.ModelParallelStrategy):
    yield
    return
  with model_parallel.building():
    yield
  strategy.require_all_match()


def describe(strategy: tf.distribute.Strategy) -> tuple[str, list[str]]:
  """Returns the strategy's name and the devices of its replicas, such as ["GPU:0", "GPU:1"]."""
  if strategy is tf.distribute.get_strategy():
    return "default", []
  if is_asynchronous(strategy):
    return "ParameterServerStrategy", servers.parameter_servers_of(strategy).devices
  devices = [name.rpartition("/device:")[2] for name in strategy.extended.worker_devices]
  return type(strategy).__name__.removesuffix("V1"), devices


def cluster_of(strategy: tf.distribute.Strategy) -> Cluster:
  """Returns the cluster of a strategy, and this process's place in it."""
  if is_asynchronous(strategy):
    return servers.parameter_servers_of(strategy)
  if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
    return Cluster(strategy=strategy)
  resolver = strategy.cluster_resolver
  if resolver is None or not resolver.cluster_spec().jobs:
    return Cluster(strategy=strategy)
  peers, index = workers(resolver)
  return Cluster(strategy=strategy, index=index, peers=tuple(peers))


def require_alone(
  strategy: tf.distribute.Strategy | servers.Server, environ: Mapping[str, str] = os.environ
) -> None:
  """Checks that a strategy of one process is not started as one task of several (host).

  Otherwise each process trains the whole task by itself, in the same run folder.

  Args:
    strategy: what a strategy's factory returns.
    environ: with TF_CONFIG, if any.

  Raises:
    ConfigError: TF_CONFIG names several tasks, but the strategy trains in this process alone.
  """
  clustered = tf.distribute.ParameterServerStrategy | tf.distribute.TPUStrategy | servers.Server
  if isinstance(strategy, clustered):
    return
  try:
    tasks = sum(map(len, resolvers.addresses_in(environ).values()))
  except ConfigError:
    return  # of no interest here
  if tasks > 1 and cluster_of(strategy).size == 1:
    raise ConfigError(
      f"TF_CONFIG names {tasks} processes, but run.strategy makes {describe(strategy)[0]}, which "
      "trains in one; set run.strategy = @multi_worker_mirrored or @parameter_server, or remove "
      "TF_CONFIG (--local_workers sets it)."
    )
