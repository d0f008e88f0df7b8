"""Asynchronous training with parameter servers: the strategy, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator

import tensorflow as tf

from loopwright.distribution.placement import Placement, of, register
from loopwright.errors import ConfigError, require_integer, require_positive
from loopwright.graphs.aliases import PerReplica
from loopwright.strategies.parameter_server import servers
from loopwright.strategies.parameter_server.evaluator import ParameterServerEvaluator
from loopwright.strategies.parameter_server.trainer import ParameterServerTrainer
from loopwright.strategies.workers import rendezvous, resolvers
from loopwright.strategies.workers.identity import ClusterResolver

_ASYNCHRONOUS = "needs a synchronous strategy, but parameter_server is asynchronous; use "

_COMPILED = (
  "=True and run.strategy=@parameter_server, whose workers run compiled functions on remote "
  "variables; leave one out."
)


@register(tf.distribute.ParameterServerStrategy)
class ParameterServer(Placement):
  """Workers update variables on servers without waiting for each other; seen by the chief."""

  trainer = ParameterServerTrainer
  evaluator = ParameterServerEvaluator
  joins_processes = True
  replays = False
  on_gpus = False  # the chief, which asks, does not train
  name = "ParameterServerStrategy"
  refused = {  # noqa: RUF012
    "Trainer": f"Trainer {_ASYNCHRONOUS}{__package__}.trainer.ParameterServerTrainer.",
    "Evaluator": f"Evaluator {_ASYNCHRONOUS}{__package__}.evaluator.ParameterServerEvaluator.",
    "eager": f"received both run.eager{_COMPILED}",
    "jit_compile": f"received both Trainer.jit_compile{_COMPILED}",
    "step.perturbed": f"step.perturbed() {_ASYNCHRONOUS}mirrored or multi_worker_mirrored.",
    "run.ledger": "run.ledger is True, but under parameter_server the steps that a worker's "
    "batches become are not known, and a killed worker loses a batch; remove run.ledger.",
    "TensorBoard.histograms_every_steps": "TensorBoard.histograms_every_steps is set, but under "
    "parameter_server workers update independently of each other; leave it out.",
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
    """See `Placement`; this one is of a strategy that the user has made."""
    return _of(self.strategy.cluster_resolver)


def parameter_server(
  *,
  resolver: resolvers.ResolverFactory = resolvers.tf_config,
  start_timeout_s: float = 300.0,
  heartbeat_timeout_s: float = 30.0,
  min_shard_bytes: int | None = None,
  max_shards: int | None = None,
) -> tf.distribute.Strategy | servers.Server:
  """Asynchronous training: workers compute, servers store the variables, one chief coordinates.

  Needs a cluster of the jobs "chief" (one task), "worker" and "ps". See docs/multi-process.md.

  Args:
    resolver: the source of the addresses; see `multi_worker_mirrored`.
    start_timeout_s: seconds that the chief waits for workers and servers to start, a worker or
      server for the chief, and a run without any worker for one to come back.
    heartbeat_timeout_s: seconds that a connected worker or server may not answer before the run
      fails.
    min_shard_bytes: partition variables along their first axis into parts of at least this many
      bytes (float32); None keeps each variable whole. For tf.Module and tf_keras models.
    max_shards: the maximum number of parts; None uses the number of servers.

  Returns:
    The strategy on the chief; on a worker or server a `Server`, which serves the chief.

  Raises:
    ConfigError: no cluster, a cluster without the three jobs, or an option out of range.
    ClusterError: a worker or server does not answer.
  """
  found = resolver()
  for which, seconds in (("start", start_timeout_s), ("heartbeat", heartbeat_timeout_s)):
    require_positive(f"parameter_server.{which}_timeout_s", seconds, unit="seconds")
  for name, value in (("min_shard_bytes", min_shard_bytes), ("max_shards", max_shards)):
    if value is not None:
      require_integer(f"parameter_server.{name}", value, at_least=1)
  if max_shards is not None and min_shard_bytes is None:
    raise ConfigError(
      f"parameter_server.max_shards is {max_shards} without min_shard_bytes, so no variable is "
      "partitioned; set both, for example min_shard_bytes = 262144."
    )
  servers.check_jobs(found)
  rendezvous.avoid_proxies()
  if found.task_type != "chief":
    return servers.Server(found, start_timeout_s=start_timeout_s)
  cluster = _of(found, start_timeout_s, heartbeat_timeout_s)
  servers.require_answers([*cluster.servers, *cluster.workers], start_timeout_s)
  if min_shard_bytes is not None:
    most = max_shards or len(cluster.servers)
    partitioner = servers.Partitioner(min_shard_bytes=min_shard_bytes, max_shards=most)
    cluster = dataclasses.replace(cluster, partitioner=partitioner)
  os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")  # makes an exited peer an immediate error
  made = tf.distribute.ParameterServerStrategy(found, variable_partitioner=cluster.partitioner)
  of(made).cluster = cluster
  return made


def _of(
  resolver: ClusterResolver, start_timeout_s: float = 300.0, heartbeat_timeout_s: float = 30.0
) -> servers.ParameterServers:
  return servers.ParameterServers(
    workers=tuple(servers.peers_of(resolver, "worker")),
    servers=tuple(servers.peers_of(resolver, "ps")),
    start_timeout_s=start_timeout_s,
    heartbeat_timeout_s=heartbeat_timeout_s,
  )
