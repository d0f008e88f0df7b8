"""Several processes that train one model together: who they are, and what they do together."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from framework.errors import ConfigError

ClusterResolver: TypeAlias = Any
"""A `tf.distribute.cluster_resolver.ClusterResolver`."""


class ClusterError(RuntimeError):
  """The cluster failed, not its user: a peer that is missing or lost, a taken port. One line."""


# ---- Who this process is ----


class Peer(NamedTuple):
  """One worker of a cluster."""

  job: str
  task: int
  address: str

  @property
  def device(self) -> str:
    """How TensorFlow's messages name it."""
    return f"/job:{self.job}/replica:0/task:{self.task}"

  def __str__(self) -> str:
    """Returns its name and address, "worker-1 (10.0.0.3:2222)"."""
    return f"{self.job}-{self.task} ({self.address})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
  """The workers of a synchronous training, and this process's place among them.

  Attributes:
    strategy: what they train under.
    index: this worker's number; worker 0 is the chief, the one that writes.
    peers: all workers, this one included; empty without a cluster.
  """

  strategy: tf.distribute.Strategy
  index: int = 0
  peers: tuple[Peer, ...] = ()

  @property
  def size(self) -> int:
    """How many workers there are."""
    return max(1, len(self.peers))

  @property
  def is_chief(self) -> bool:
    """Whether this process writes to the run folder."""
    return self.index == 0

  @property
  def is_local(self) -> bool:
    """Whether it is a cluster of processes on this machine, by the addresses of the loopback."""
    hosts = {peer.address.rpartition(":")[0] for peer in self.peers}
    return bool(hosts) and hosts <= {"127.0.0.1", "localhost", "[::1]"}

  def rows(self, padded_rows: int) -> range | None:
    """Returns this worker's rows of a global batch; None, for all, without a cluster.

    Args:
      padded_rows: a multiple of the number of replicas.
    """
    if self.size == 1:
      return None
    share = padded_rows // self.size
    return range(self.index * share, (self.index + 1) * share)

  def distribute(self, dataset: tf.data.Dataset) -> Any:
    """Returns the distributed dataset whose elements `strategy.run` takes (host).

    Args:
      dataset: this worker's `rows` of each padded global batch.

    Raises:
      ConfigError: in a cluster, batches whose rows do not divide by this worker's replicas.
    """
    if self.size == 1:
      return self.strategy.experimental_distribute_dataset(dataset)
    replicas = self.strategy.num_replicas_in_sync // self.size
    if replicas > 1:
      rows = tf.nest.flatten(dataset.element_spec)[0].shape[0]
      dataset = dataset.rebatch(rows // replicas, drop_remainder=True)
    return self.strategy.distribute_datasets_from_function(lambda _: dataset)

  def sum(self, value: int) -> int:
    """Returns the sum of one number a worker; all workers must call it, and wait (host)."""
    if self.size == 1:
      return value
    local = tf.constant(value, tf.int64)
    summed = _summed(self.strategy)(local)
    return int(summed) * self.size // self.strategy.num_replicas_in_sync

  def any(self, flag: bool) -> bool:
    """Whether the flag is set on any worker; all workers must call it (host)."""
    return self.sum(int(flag)) > 0

  def barrier(self) -> None:
    """Waits until all workers have come here (host)."""
    self.sum(0)

  def require_same(self, what: str, value: int) -> None:
    """Checks that all workers have the same number; all must call it (host).

    Raises:
      ClusterError: they do not.
    """
    differs = self.sum(value) != value * self.size
    if self.any(differs):
      raise ClusterError(
        f"the workers do not agree on the {what}, {value} on {self.peers[self.index]}; model_dir "
        "must be in a file system that all of them share."
      )

  @contextlib.contextmanager
  def blaming(self, step: Callable[[], int]) -> Iterator[None]:
    """Turns TensorFlow's account of a lost peer into one line that names it and the step.

    Args:
      step: gives the step that had been reached.
    """
    try:
      yield
    except _PEER_LOST as error:
      if self.size == 1:
        raise
      raise ClusterError(f"{self._lost(str(error))}, after step {step()}") from error

  def _lost(self, message: str) -> str:
    others = [peer for place, peer in enumerate(self.peers) if place != self.index]
    named = [peer for peer in others if re.search(rf"{peer.device}\b", message)]
    stopped = "unhealthy" in message or "Heartbeat" in message
    how = "does not answer any more" if stopped else "has gone"
    return f"lost {' or '.join(map(str, named or others))}, which {how}"


_PEER_LOST = (
  tf.errors.AbortedError,
  tf.errors.CancelledError,
  tf.errors.DeadlineExceededError,
  tf.errors.InternalError,
  tf.errors.UnavailableError,
)


def workers(resolver: ClusterResolver) -> tuple[list[Peer], int]:
  """Returns all workers, the chief first, and this process's place among them.

  Raises:
    ConfigError: this process is none of them.
  """
  spec = resolver.cluster_spec()
  peers = [
    Peer(job, task, spec.task_address(job, task))
    for job in ("chief", "worker")
    for task in (spec.task_indices(job) if job in spec.jobs else [])
  ]
  for place, peer in enumerate(peers):
    if (peer.job, peer.task) == (resolver.task_type, resolver.task_id):
      return peers, place
  raise ConfigError(
    f"this process is {resolver.task_type!r} {resolver.task_id} of a cluster of "
    f"{', '.join(sorted(spec.jobs))}; multi_worker_mirrored trains on 'chief' and 'worker'."
  )


_sums: dict[int, Any] = {}


def _summed(strategy: tf.distribute.Strategy) -> Any:
  """A compiled sum over replicas, made once a strategy."""
  if id(strategy) not in _sums:

    @tf.function(autograph=False)
    def summed(value: tf.Tensor) -> tf.Tensor:
      values = strategy.run(lambda: tf.identity(value))
      return strategy.reduce(tf.distribute.ReduceOp.SUM, values, axis=None)

    _sums[id(strategy)] = summed
  return _sums[id(strategy)]


# ---- Where the addresses come from ----
