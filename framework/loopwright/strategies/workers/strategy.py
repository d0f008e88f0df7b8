"""Several workers that train in step: one process each, with a copy of each variable per device."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal, get_args

import tensorflow as tf
from absl import logging

from loopwright.distribution.cluster import ClusterError
from loopwright.distribution.placement import Placement, register
from loopwright.errors import ConfigError, require_positive, unknown
from loopwright.host import signals
from loopwright.models.task_state import Replicas
from loopwright.strategies.workers import rendezvous, resolvers
from loopwright.strategies.workers.identity import ClusterResolver, WorkerCluster, workers

Communication = Literal["auto", "ring", "nccl"]
_GRACE_S = 60.0
"""TensorFlow ends a wait for a chief that does not come some seconds after the limit."""


@register(tf.distribute.MultiWorkerMirroredStrategy)
class Workers(Placement):
  """One process per worker, and in each one replica per device."""

  reads_all_copies = False
  refused: Mapping[str, str] = {}

  @functools.cached_property
  def cluster(self) -> WorkerCluster:
    """See `Placement`."""
    resolver = self.strategy.cluster_resolver
    if resolver is None or not resolver.cluster_spec().jobs:
      return WorkerCluster(strategy=self.strategy)
    peers, index = workers(resolver)
    return WorkerCluster(strategy=self.strategy, index=index, peers=tuple(peers))

  @property
  def replicas(self) -> Replicas | None:
    """See `Placement`."""
    if self.cluster.size == 1:
      return None
    total = self.strategy.num_replicas_in_sync

    def gather(variable: tf.Variable) -> tf.Tensor:
      values = self.strategy.run(lambda: variable.read_value()[tf.newaxis])
      return self.strategy.gather(values, axis=0)

    return Replicas(total, self.cluster.index * total // self.cluster.size, gather)

  def distribute(self, dataset: tf.data.Dataset) -> tf.distribute.DistributedDataset:
    """See `Placement`; of a dataset with this worker's rows alone."""
    if self.cluster.size == 1:
      return super().distribute(dataset)
    replicas = self.strategy.num_replicas_in_sync // self.cluster.size
    if replicas > 1:
      rows = tf.nest.flatten(dataset.element_spec)[0].shape[0]
      dataset = dataset.rebatch(rows // replicas, drop_remainder=True)
    return self.strategy.distribute_datasets_from_function(lambda _: dataset)


def multi_worker_mirrored(
  *,
  resolver: resolvers.ResolverFactory = resolvers.tf_config,
  communication: Communication = "auto",
  start_timeout_s: float = 300.0,
  heartbeat_timeout_s: float = 30.0,
) -> tf.distribute.Strategy:
  """One process per worker, one replica per GPU (or the CPU); sums gradients over all workers.

  Once TensorFlow has connected the processes, they compare versions, code and config.

  Args:
    resolver: the source of the addresses: @tf_config, @slurm, or your own
      factory of a `tf.distribute.cluster_resolver.ClusterResolver`.
    communication: "ring" over gRPC, "nccl" between GPUs, or "auto": "nccl" if the workers have
      GPUs, else "ring".
    start_timeout_s: seconds to wait for the other workers to connect.
    heartbeat_timeout_s: seconds that a worker may not answer before the others fail.

  Raises:
    ConfigError: no cluster, an unknown communication, or workers with different facts.
    ClusterError: a worker does not connect, or this worker's port is in use.
  """
  if communication not in (choices := get_args(Communication)):
    raise unknown("multi_worker_mirrored.communication", communication, choices)
  if communication == "nccl" and not tf.config.get_visible_devices("GPU"):
    raise ConfigError(
      "multi_worker_mirrored.communication is 'nccl', but this worker has no GPU; set it to 'ring' "
      "or 'auto'."
    )
  for name, seconds in (("start", start_timeout_s), ("heartbeat", heartbeat_timeout_s)):
    require_positive(f"multi_worker_mirrored.{name}_timeout_s", seconds, unit="seconds")
  found = resolver()
  peers, index = workers(found)
  rendezvous.configure_runtime(
    found, start_timeout_s=start_timeout_s, heartbeat_timeout_s=heartbeat_timeout_s
  )
  if communication == "auto":
    communication, reason = _automatic_communication()
    logging.info("communication of workers auto: %s, %s", communication, reason)
  cluster = WorkerCluster(strategy=tf.distribute.get_strategy(), index=index, peers=tuple(peers))
  kinds = tf.distribute.experimental.CommunicationImplementation
  options = tf.distribute.experimental.CommunicationOptions(
    implementation=kinds[communication.upper()]
  )
  facts = {"cluster": ", ".join(map(str, peers)), **rendezvous.facts()}
  made = _connected(found, options, cluster, start_timeout_s)
  with cluster.blaming(lambda: 0):
    cluster.require_alike(facts, timeout_s=heartbeat_timeout_s)
  return made


def _connected(
  resolver: ClusterResolver,
  options: tf.distribute.experimental.CommunicationOptions,
  cluster: WorkerCluster,
  timeout_s: float,
) -> tf.distribute.Strategy:
  """Returns the strategy, once TensorFlow has connected the workers; its errors become one line."""
  ends = rendezvous.ending_after(timeout_s + _GRACE_S)
  # Threads that TensorFlow starts here leave SIGTERM to this one.
  with signals.kept(), cluster.blaming(lambda: 0), ends:
    try:
      return tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
    except tf.errors.DeadlineExceededError as error:
      if "unhealthy" in str(error):
        raise  # a worker that had connected is lost
      line = f"{cluster.not_connected(str(error))} within {timeout_s:g} s"
      raise ClusterError(line) from error
    except tf.errors.UnknownError as error:
      if "Could not start gRPC server" not in str(error):
        raise
      raise ClusterError(
        f"cannot listen on {cluster.peers[cluster.index].address}, this worker's own address: "
        "another process uses the port"
      ) from error


def _automatic_communication() -> tuple[Literal["ring", "nccl"], str]:
  """TensorFlow's own AUTO uses the ring, through the host, between GPUs too."""
  if gpus := tf.config.get_visible_devices("GPU"):
    return "nccl", f"each worker has {len(gpus)} GPU(s)"  # workers compare devices
  return "ring", "no worker has a GPU that TensorFlow sees"
