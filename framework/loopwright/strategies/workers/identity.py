"""The processes of a synchronous cluster: this process's place, and operations over all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf
from tensorflow.python.eager import context

from loopwright.distribution.cluster import Cluster, ClusterError, Peer
from loopwright.errors import ConfigError
from loopwright.host.timing import timed

ClusterResolver: TypeAlias = Any
"""A `tf.distribute.cluster_resolver.ClusterResolver`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerCluster(Cluster):
  """Several workers; those methods that are called collective wait for all of them.

  Attributes:
    strategy: the strategy of the training.
  """

  strategy: tf.distribute.Strategy

  def sum(self, value: int) -> int:
    """See `Cluster.sum`."""
    if self.size == 1:
      return value
    local = tf.constant(value, tf.int64)
    summed = timed("waiting for workers")(lambda: int(_summed(self.strategy)(local)))()
    return summed * self.size // self.strategy.num_replicas_in_sync

  def asking(self, every_s: float) -> Callable[[bool], bool]:
    """See `Cluster.asking`.

    The chief's clock decides how many calls from now they ask next; before that, the answer is
    False. With one worker, the answer is the flag.
    """
    if self.size == 1:
      return lambda flag: flag
    return _Asking(self, every_s).any

  def require_same(self, what: str, value: int, remedy: str = "") -> None:
    """See `Cluster.require_same`."""
    differs = self.sum(value) != value * self.size
    if self.any(differs):
      raise ClusterError(
        f"the workers have different values of the {what}, {value} on {self.peers[self.index]}; "
        f"{remedy or 'model_dir must be on a file system that all workers share.'}"
      )

  def require_alike(self, facts: Mapping[str, str], *, timeout_s: float) -> None:
    """Checks that all workers have the same facts, by TensorFlow's coordination service (host).

    Every worker must call it; it needs no collective, as devices are among the facts.

    Raises:
      ConfigError: they differ; the same line on all workers.
      ClusterError: a worker has not told its own within `timeout_s`; nothing else notices it there.
    """
    if self.size == 1:
      return
    call, own = next(_calls), json.dumps(facts, sort_keys=True)
    exchange = _Exchange(f"loopwright/{call}", timeout_s)
    exchange.put(f"facts/{self.index}", own)
    exchange.put(f"digest/{self.index}", hashlib.sha256(own.encode()).hexdigest())
    digests = []
    for index, peer in enumerate(self.peers):
      try:
        digests.append(exchange.get(f"digest/{index}"))
      except tf.errors.DeadlineExceededError as error:
        line = f"lost {peer}, which stopped answering, before the first step"
        raise ClusterError(line) from error
    other = next((i for i, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
      first, second = (json.loads(exchange.get(f"facts/{index}")) for index in (0, other))
      self.leave()  # the chief has the facts
      raise ConfigError(
        f"{self.peers[other]} differs from {self.peers[0]} in its {_difference(first, second)}; "
        "start all workers with the same command."
      )

  def leave(self) -> None:
    """See `Cluster.leave`.

    After a collective a worker may have its result while others still read from it. Call it on
    every worker as the last thing (host); a worker that does not come is waited for `_LEAVE_S`.
    """
    if self.size == 1:
      return
    # A thread, as a call to a chief that is stopped never returns.
    left = threading.Thread(target=self._leave, args=(next(_calls),), daemon=True)
    left.start()
    left.join(_LEAVE_S)

  def _leave(self, call: int) -> None:
    exchange = _Exchange(f"loopwright/{call}", _LEAVE_S)
    with contextlib.suppress(tf.errors.OpError):  # gone already, or not coming
      # The chief may read this and exit before its answer to this call arrives.
      exchange.put(str(self.index), "left")
      for index in range(self.size):
        exchange.get(str(index))

  @contextlib.contextmanager
  def blaming(self, step: Callable[[], int]) -> Iterator[None]:
    """See `Cluster.blaming`."""
    try:
      yield
    except _PEER_LOST as error:
      if self.size == 1:
        raise
      raise ClusterError(f"{self._lost(str(error))}, after step {step()}") from error

  @property
  def _others(self) -> list[Peer]:
    return [peer for place, peer in enumerate(self.peers) if place != self.index]

  def named(self, message: str) -> list[Peer]:
    """Returns the other workers that an error of TensorFlow names."""
    return [peer for peer in self._others if re.search(rf"{peer.device}\b", message)]

  def not_connected(self, message: str) -> str:
    """Returns which workers did not connect, from TensorFlow's error about its time limit."""
    names = message.partition("timed out task names:")[2].partition("\n\n")[0]
    missing, joint = self.named(names), ", "
    if not missing:  # the chief, which has the service, or nobody knows
      missing, joint = (self._others, " or ") if self.is_chief else ([self.peers[0]], ", ")
    return f"{joint.join(map(str, missing))} did not connect"

  def _lost(self, message: str) -> str:
    stopped = "unhealthy" in message or "Heartbeat" in message
    how = "stopped answering" if stopped else "exited"
    return f"lost {' or '.join(map(str, self.named(message) or self._others))}, which {how}"


class _Asking:
  def __init__(self, cluster: Cluster, every_s: float) -> None:
    self._cluster, self._every_s = cluster, every_s
    self._calls = self._left = 1
    self._asked_s = time.monotonic()

  def any(self, flag: bool) -> bool:
    self._left -= 1
    if self._left:
      return False
    now = time.monotonic()
    pace = self._every_s / max(now - self._asked_s, 1e-6)
    wanted = max(1, min(2 * self._calls, int(pace * self._calls)))  # calls may become slower
    told = wanted if self._cluster.is_chief else 0
    flags, self._calls = divmod(self._cluster.sum(_FLAG * flag + told), _FLAG)
    self._left, self._asked_s = self._calls, now
    return flags > 0


class _Exchange(NamedTuple):
  """Texts that all workers read, in TensorFlow's coordination service, below a name."""

  name: str
  timeout_s: float

  def put(self, key: str, text: str) -> None:
    context.context().set_config_key_value(f"{self.name}/{key}", text)

  def get(self, key: str) -> str:
    """Waits for it."""
    limit_ms = int(1000 * self.timeout_s)
    found: str = context.context().get_config_key_value(
      f"{self.name}/{key}", timeout_in_ms=limit_ms
    )
    return found


def _difference(first: Mapping[str, str], second: Mapping[str, str]) -> str:
  """Returns the first fact that differs, with the value of both, and the number of others."""
  names = [name for name in sorted({**first, **second}) if first.get(name) != second.get(name)]
  here, there = (_short(facts.get(names[0], "missing")) for facts in (first, second))
  more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
  return f"{names[0]}, {there} and not {here}{more}"


def _short(value: str) -> str:
  """Returns the value, or the beginning and a digest of a long one."""
  if len(value) <= _MOST_OF_A_VALUE:
    return value
  digest = hashlib.sha256(value.encode()).hexdigest()[:12]
  return f"{value[:_MOST_OF_A_VALUE]}... (digest {digest})"


_FLAG = 2**40
_LEAVE_S = 10
_MOST_OF_A_VALUE = 200
_calls = itertools.count()
_PEER_LOST = (
  tf.errors.AbortedError,
  tf.errors.CancelledError,
  tf.errors.DeadlineExceededError,
  tf.errors.InternalError,
  tf.errors.UnavailableError,
)


def workers(resolver: ClusterResolver) -> tuple[list[Peer], int]:
  """Returns all workers, the chief first, and the index of this process among them.

  Raises:
    ConfigError: this process is neither a chief nor a worker.
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


@functools.cache
def _summed(strategy: tf.distribute.Strategy) -> Any:
  """Returns a compiled sum over replicas, made once per strategy."""

  @tf.function(autograph=False)
  def summed(value: tf.Tensor) -> tf.Tensor:
    values = strategy.run(lambda: tf.identity(value))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, values, axis=None)

  return summed
