"""Starts, monitors and ends the processes of a training with parameter servers.

Workers and servers run only `Server.serve`; the chief sends them everything that they compute.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import tensorflow as tf
from absl import logging

from loopwright.distribution import placement
from loopwright.distribution.cluster import Cluster, ClusterError, Peer
from loopwright.errors import ConfigError, Preempted
from loopwright.host.children import module
from loopwright.strategies.workers import heartbeat, rendezvous
from loopwright.strategies.workers.identity import ClusterResolver

JOBS = ("chief", "worker", "ps")
_HEARTBEAT = module(heartbeat.__name__)

_POLL_S = 2.0
_GONE_AFTER = 3
"""A server ends after this many failed probes of the chief in a row."""
_THREADS = 4
"""The minimum: servers block threads while they wait for each other, and deadlock on 2 cores."""


class Server(placement.Server):
  """A worker or parameter server: it serves the chief until the chief exits."""

  def __init__(self, resolver: ClusterResolver, *, start_timeout_s: float) -> None:
    self._resolver, self._start_timeout_s = resolver, start_timeout_s
    self.chief = peers_of(resolver, "chief")[0]

  def serve(self) -> None:
    """Serves until the chief exits (host).

    SIGTERM, which a scheduler sends to all processes at once, does not end it earlier: the chief
    needs the workers to finish its loop and the servers to save.

    Raises:
      ClusterError: the chief did not start within `start_timeout_s`.
      Preempted: this process received SIGTERM, and the chief has exited.
    """
    resolver, terminated = self._resolver, threading.Event()
    if threading.current_thread() is threading.main_thread():
      signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    threads = max(_THREADS, os.cpu_count() or 1)
    server = tf.distribute.Server(
      resolver.cluster_spec(),
      job_name=resolver.task_type,
      task_index=resolver.task_id,
      protocol=resolver.rpc_layer or "grpc",
      config=tf.compat.v1.ConfigProto(inter_op_parallelism_threads=threads),
    )
    logging.info("%s %d serves %s", resolver.task_type, resolver.task_id, server.target)
    require_answers([self.chief], self._start_timeout_s)
    failures = 0
    while failures < _GONE_AFTER:
      time.sleep(_POLL_S)
      failures = 0 if answers(self.chief) else failures + 1
    if terminated.is_set():
      raise Preempted("SIGTERM: ended after the chief")


class Pulse:
  """Detects a process that accepts connections but does not answer (host).

  TensorFlow has no time limit here: while the connection is open, a closure sent over it counts as
  running. A separate process sends the probes; see loopwright/strategies/workers/heartbeat.py.
  """

  def __init__(self, peers: Sequence[Peer], *, timeout_s: float, grace_s: float = 10.0) -> None:
    """Starts the process that sends probes.

    Args:
      grace_s: seconds that this process has to end by itself after a peer has been reported, before
        it is killed.
    """
    self._timeout_s = timeout_s
    addresses = json.dumps({str(peer): peer.address for peer in peers})
    heartbeat.endable()
    self._process = subprocess.Popen(
      [*_HEARTBEAT, str(timeout_s), str(grace_s), addresses],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
    )
    os.set_blocking(self._process.stdout.fileno(), False)  # type: ignore[union-attr]
    # A copy of its standard input that Python's shutdown does not close: during shutdown TensorFlow
    # frees remote resources and can still block on a peer that does not answer.
    self._input = os.dup(self._process.stdin.fileno())  # type: ignore[union-attr]

  def close(self) -> None:
    """Stops the probes; otherwise they stop when this process exits."""
    os.close(self._input)
    self._process.communicate()

  def check(self) -> None:
    """Raises if a probe has failed since the last call; does not wait (host).

    Raises:
      ClusterError: a peer has not answered for `timeout_s`.
    """
    silent = self._process.stdout.readline()  # type: ignore[union-attr]
    if silent:
      raise ClusterError(
        f"lost {silent.decode().strip()}, which has not answered for {self._timeout_s:g} s; start "
        "again to continue from the newest checkpoint"
      )


class Partitioner:
  """Partitions the variables made while it is `active` over the servers."""

  def __init__(self, *, min_shard_bytes: int, max_shards: int) -> None:
    """Starts inactive; see `parameter_server` in strategy.py for the arguments."""
    partitioners = tf.distribute.experimental.partitioners
    self._split = partitioners.MinSizePartitioner(min_shard_bytes, max_shards)
    self.active = False

  def __call__(self, shape: tf.TensorShape, dtype: tf.DType, **options: Any) -> Sequence[int]:
    """Returns the number of partitions along each axis; TensorFlow calls it for each variable."""
    return self._split(shape, dtype, **options) if self.active else [1] * shape.rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterServers(Cluster):
  """The cluster as its chief sees it; the session treats it as a single process, which writes.

  Attributes:
    workers: the processes that compute.
    servers: the processes that store the variables.
    start_timeout_s: seconds that training waits while no worker is connected.
    heartbeat_timeout_s: seconds that a worker or server may not answer.
    partitioner: None keeps variables whole.
  """

  workers: tuple[Peer, ...]
  servers: tuple[Peer, ...]
  start_timeout_s: float
  heartbeat_timeout_s: float
  partitioner: Partitioner | None = None

  @property
  def devices(self) -> list[str]:
    """Counts of workers and servers, for the description of a run."""
    return [f"{len(self.workers)} workers", f"{len(self.servers)} servers"]

  @functools.cached_property
  def pulse(self) -> Pulse:
    """Probes all workers and servers, from the first access until this process exits."""
    return Pulse([*self.workers, *self.servers], timeout_s=self.heartbeat_timeout_s)

  @contextlib.contextmanager
  def blaming(self, step: Callable[[], int]) -> Iterator[None]:
    """Replaces TensorFlow's error about a lost server by a ClusterError that names it (host)."""
    del step  # the step counter is stored on a server
    try:
      yield
    except tf.errors.OpError as error:
      lost = [peer for peer in self.servers if not answers(peer)] or [
        peer
        for peer in self.servers
        if f"Additional GRPC error information from remote target {peer.device}" in str(error)
      ]
      if not lost:
        raise
      raise ClusterError(
        f"lost {', '.join(map(str, lost))} and the variables stored there; start again to "
        "continue from the newest checkpoint"
      ) from error


def parameter_servers_of(strategy: tf.distribute.Strategy) -> ParameterServers:
  """Returns the cluster of a strategy."""
  return cast(ParameterServers, placement.of(strategy).cluster)


def answers(peer: Peer) -> bool:
  """Whether a process accepts connections at a peer's address now (host)."""
  return rendezvous.answers(peer.address)


def require_answers(peers: Sequence[Peer], timeout_s: float) -> None:
  """Waits until all peers accept connections; ClusterError if one does not within `timeout_s`."""
  deadline = time.monotonic() + timeout_s
  missing = [peer for peer in peers if not rendezvous.answers(peer.address, deadline=deadline)]
  if missing:
    raise ClusterError(f"{', '.join(map(str, missing))} did not answer within {timeout_s:g} s")


def peers_of(resolver: ClusterResolver, job: str) -> list[Peer]:
  """Returns the tasks of a job."""
  spec = resolver.cluster_spec()
  return [Peer(job, task, spec.task_address(job, task)) for task in spec.task_indices(job)]


def check_jobs(resolver: ClusterResolver) -> None:
  """Raises a ConfigError unless a cluster has one chief, workers and servers."""
  spec = resolver.cluster_spec()
  jobs = {job: spec.num_tasks(job) for job in spec.jobs}
  if not all(jobs.get(job) for job in JOBS) or jobs["chief"] != 1 or resolver.task_type not in JOBS:
    found = ", ".join(f"{count} {job}" for job, count in sorted(jobs.items())) or "nothing"
    raise ConfigError(
      f"parameter_server needs a cluster of one chief, workers and ps, but this process is "
      f"{resolver.task_type!r} of {found}; to try it on this machine, add --local_workers=2 "
      "--local_ps=1."
    )
