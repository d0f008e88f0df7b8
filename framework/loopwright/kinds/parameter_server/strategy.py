"""Asynchronous training with parameter servers: the strategy, and what it refuses."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import tensorflow as tf

from loopwright.aliases import PerReplica
from loopwright.kinds.parameter_server import servers
from loopwright.kinds.parameter_server.evaluator import ParameterServerEvaluator
from loopwright.kinds.parameter_server.trainer import ParameterServerTrainer
from loopwright.kinds.workers import resolvers
from loopwright.strategies.placement import Placement, register

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
  return servers.join(
    resolver(),
    start_timeout_s=start_timeout_s,
    heartbeat_timeout_s=heartbeat_timeout_s,
    min_shard_bytes=min_shard_bytes,
    max_shards=max_shards,
  )
