"""The processes of a training with parameter servers: who they are, how they start and end.

    chief     coordinates: runs the session, hands closures to the workers, writes the run folder
    worker N  runs closures: reads batches, computes gradients, updates the variables
    ps N      holds variables

Workers and servers run no code of ours but `Server.serve`; what they compute, the chief sends them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging

from framework.errors import ConfigError, Preempted
from framework.strategies.cluster import Cluster, ClusterError, ClusterResolver, Peer

JOBS = ("chief", "worker", "ps")
_HEARTBEAT = str(Path(__file__).with_name("heartbeat.py"))
_PROBE_S = 1.0
_POLL_S = 2.0
_GONE_AFTER = 3
"""So many probes of the chief in a row fail before a server takes it for gone."""
_THREADS = 4
"""At the least: servers block threads while they wait for one another, and hang on 2 cores."""


class Server:
  """This process's part as a worker or parameter server: it serves the chief to its end."""

  def __init__(self, resolver: ClusterResolver, *, start_timeout_s: float) -> None:
    """Starts nothing yet; see `strategies.parameter_server`."""
    self._resolver, self._start_timeout_s = resolver, start_timeout_s
    self.chief = _peers(resolver, "chief")[0]

  def serve(self) -> None:
    """Serves until the chief, which may take `start_timeout_s` to come, is gone (host).

    SIGTERM, which a scheduler sends to all at once, does not end it earlier: the chief needs the
    workers to finish its loop, and the servers to save.

    Raises:
      ClusterError: the chief does not come.
      Preempted: SIGTERM came, and the chief is gone.
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
    if missing := missing_after([self.chief], self._start_timeout_s):
      raise _absent(missing, self._start_timeout_s)
    failures = 0
    while failures < _GONE_AFTER:
      time.sleep(_POLL_S)
      failures = 0 if answers(self.chief) else failures + 1
    if terminated.is_set():
      raise Preempted("SIGTERM: ended after the chief")


class Pulse:
  """Notices a process that lives, and takes connections, but does not answer (host).

  TensorFlow itself would wait for it for ever: as long as a connection stands, a closure that was
  sent over it counts as running. A process of its own asks; see framework/strategies/heartbeat.py.
  """

  def __init__(self, peers: Sequence[Peer], *, timeout_s: float, grace_s: float = 10.0) -> None:
    """Starts to ask.

    Args:
      peers: whom to ask, with TensorFlow's own GetStatus.
      timeout_s: how long one may be silent.
      grace_s: how long this process, once it could know, may take to end before it is killed.
    """
    self._timeout_s = timeout_s
    addresses = json.dumps({str(peer): peer.address for peer in peers})
    self._process = subprocess.Popen(
      [sys.executable, _HEARTBEAT, str(timeout_s), str(grace_s), addresses],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
    )
    os.set_blocking(self._process.stdout.fileno(), False)  # type: ignore[union-attr]
    # Its standard input, which no end of a Python object closes: while Python takes itself down,
    # TensorFlow frees what is on other machines, and can wait for a silent one even then.
    self._input = os.dup(self._process.stdin.fileno())  # type: ignore[union-attr]

  def close(self) -> None:
    """Stops asking; without it the asking ends with this process."""
    os.close(self._input)
    self._process.communicate()

  def check(self) -> None:
    """Reads what was noticed since the last call; does not wait.

    Raises:
      ClusterError: a peer has been silent for `timeout_s`.
    """
    silent = self._process.stdout.readline()  # type: ignore[union-attr]
    if silent:
      raise ClusterError(
        f"lost {silent.decode().strip()}, which does not answer any more within "
        f"{self._timeout_s:g} s; start again to go on from the newest checkpoint"
      )


class Partitioner:
  """Splits the variables that are made inside a `with` of it, up to `end`, over the servers."""

  def __init__(self, *, min_shard_bytes: int, max_shards: int) -> None:
    """Splits nothing yet; see `strategies.parameter_server`."""
    partitioners = tf.distribute.experimental.partitioners
    self._split = partitioners.MinSizePartitioner(min_shard_bytes, max_shards)
    self._active = False

  def __call__(self, shape: tf.TensorShape, dtype: tf.DType, **options: Any) -> Sequence[int]:
    """Returns the number of parts along each axis; TensorFlow calls it for each variable."""
    return self._split(shape, dtype, **options) if self._active else [1] * shape.rank

  def __enter__(self) -> None:
    """Splits variables from here on."""
    self._active = True

  def __exit__(self, *unused: object) -> None:
    """Keeps later variables whole."""
    self.end()

  def end(self) -> None:
    """Keeps later variables whole."""
    self._active = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterServers(Cluster):
  """The cluster as its chief sees it; to the session a single process, which writes.

  Attributes:
    workers: which compute.
    servers: which hold the variables.
    start_timeout_s: how long training goes on waiting without any worker.
    heartbeat_timeout_s: how long a worker or server may be silent.
    partitioner: None keeps variables whole.
  """

  workers: tuple[Peer, ...]
  servers: tuple[Peer, ...]
  start_timeout_s: float
  heartbeat_timeout_s: float
  partitioner: Partitioner | None = None

  @property
  def devices(self) -> list[str]:
    """For the description of a run."""
    return [f"{len(self.workers)} workers", f"{len(self.servers)} servers"]

  @functools.cached_property
  def pulse(self) -> Pulse:
    """Of all workers and servers, from the first use to the end of this process."""
    return Pulse([*self.workers, *self.servers], timeout_s=self.heartbeat_timeout_s)

  @contextlib.contextmanager
  def blaming(self, step: Callable[[], int]) -> Iterator[None]:
    """Turns TensorFlow's account of a lost server into one line that names it."""
    del step  # it was on a server
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
        f"lost {_names(lost)}, and with it the variables there; start again to go on from the "
        "newest checkpoint"
      ) from error


_known: weakref.WeakKeyDictionary[tf.distribute.Strategy, ParameterServers] = (
  weakref.WeakKeyDictionary()
)


def parameter_servers_of(strategy: tf.distribute.Strategy) -> ParameterServers:
  """Returns the cluster of a strategy that `join` made, or that was made by hand."""
  if strategy not in _known:
    resolver = strategy.cluster_resolver
    _known[strategy] = ParameterServers(
      strategy=strategy,
      workers=tuple(_peers(resolver, "worker")),
      servers=tuple(_peers(resolver, "ps")),
      start_timeout_s=300.0,
      heartbeat_timeout_s=30.0,
    )
  return _known[strategy]


def join(
  resolver: ClusterResolver,
  *,
  start_timeout_s: float,
  heartbeat_timeout_s: float,
  min_shard_bytes: int | None,
  max_shards: int | None,
) -> tf.distribute.Strategy | Server:
  """Takes this process's place in the cluster; see `strategies.parameter_server`."""
  _check_options(start_timeout_s, heartbeat_timeout_s, min_shard_bytes, max_shards)
  _check_jobs(resolver)
  if resolver.task_type != "chief":
    return Server(resolver, start_timeout_s=start_timeout_s)
  workers, servers = _peers(resolver, "worker"), _peers(resolver, "ps")
  if missing := missing_after([*servers, *workers], start_timeout_s):
    raise _absent(missing, start_timeout_s)
  partitioner = None
  if min_shard_bytes is not None:
    partitioner = Partitioner(
      min_shard_bytes=min_shard_bytes, max_shards=max_shards or len(servers)
    )
  os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")  # a dead peer is an error at once
  made = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
  _known[made] = ParameterServers(
    strategy=made,
    workers=tuple(workers),
    servers=tuple(servers),
    start_timeout_s=start_timeout_s,
    heartbeat_timeout_s=heartbeat_timeout_s,
    partitioner=partitioner,
  )
  return made


def answers(peer: Peer) -> bool:
  """Whether something listens on a peer's address."""
  host, _, port = peer.address.rpartition(":")
  with contextlib.suppress(OSError):
    socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
    return True
  return False


def missing_after(peers: Sequence[Peer], timeout_s: float) -> list[Peer]:
  """Waits until all peers answer; returns those that have not after `timeout_s`."""
  deadline = time.monotonic() + timeout_s
  missing = [peer for peer in peers if not answers(peer)]
  while missing and time.monotonic() < deadline:
    time.sleep(0.2)
    missing = [peer for peer in missing if not answers(peer)]
  return missing


def _absent(missing: Sequence[Peer], timeout_s: float) -> ClusterError:
  have = "has" if len(missing) == 1 else "have"
  return ClusterError(f"{_names(missing)} {have} not come within {timeout_s:g} s")


def _names(peers: Sequence[Peer]) -> str:
  return ", ".join(map(str, peers))


def _peers(resolver: ClusterResolver, job: str) -> list[Peer]:
  spec = resolver.cluster_spec()
  return [Peer(job, task, spec.task_address(job, task)) for task in spec.task_indices(job)]


def _check_options(
  start_timeout_s: float,
  heartbeat_timeout_s: float,
  min_shard_bytes: int | None,
  max_shards: int | None,
) -> None:
  for which, seconds in (("start", start_timeout_s), ("heartbeat", heartbeat_timeout_s)):
    if not seconds > 0:
      raise ConfigError(
        f"parameter_server.{which}_timeout_s is {seconds}; it must be above 0 seconds."
      )
  for name, value in (("min_shard_bytes", min_shard_bytes), ("max_shards", max_shards)):
    if value is not None and value < 1:
      raise ConfigError(f"parameter_server.{name} is {value}; it must be 1 or more.")
  if max_shards is not None and min_shard_bytes is None:
    raise ConfigError(
      f"parameter_server.max_shards is {max_shards} without min_shard_bytes, so that nothing is "
      "partitioned; set both, for example min_shard_bytes = 262144."
    )


def _check_jobs(resolver: ClusterResolver) -> None:
  spec = resolver.cluster_spec()
  jobs = {job: spec.num_tasks(job) for job in spec.jobs}
  if not all(jobs.get(job) for job in JOBS) or jobs["chief"] != 1 or resolver.task_type not in JOBS:
    found = ", ".join(f"{count} {job}" for job, count in sorted(jobs.items())) or "nothing"
    raise ConfigError(
      f"parameter_server needs a cluster of one chief, workers and ps, but this process is "
      f"{resolver.task_type!r} of {found}; try it here with --local_workers=2 --local_ps=1."
    )
