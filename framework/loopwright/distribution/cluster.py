"""The processes that train together, as the core sees them: mostly this one alone.

Kinds of several processes have a class of their own; see loopwright/strategies/workers/identity.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from loopwright.errors import Failed

WORKERS = "LOOPWRIGHT_WORKERS"
"""The variable that tells processes the least and most workers of their run, such as "2:4"."""

declared: dict[str, str] = {}
"""Facts about this process, which must be equal on all workers; see `declare`."""


def declare(facts: Mapping[str, Any]) -> None:
  """Adds facts about this process, which workers compare once they are connected (host)."""
  declared.update({name: str(value) for name, value in facts.items()})


class ClusterError(Failed):
  """A failure of the cluster, not a mistake of the user: a peer missing or lost, or a port in use.

  The message is one line.
  """


class Peer(NamedTuple):
  """One task of a cluster; `address` is "host:port"."""

  job: str
  task: int
  address: str

  @property
  def device(self) -> str:
    """The name of its device in TensorFlow's messages."""
    return f"/job:{self.job}/replica:0/task:{self.task}"

  def __str__(self) -> str:
    """Returns name and address, such as "worker-1 (10.0.0.3:2222)"."""
    return f"{self.job}-{self.task} ({self.address})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
  """The workers of a synchronous training, and this process's place among them.

  This class asks no other worker. Where there are several, a subclass does.

  Attributes:
    index: this worker's number; worker 0 is the chief, which writes the run folder.
    peers: all workers, including this one; empty without a cluster.
  """

  index: int = 0
  peers: tuple[Peer, ...] = ()

  @property
  def size(self) -> int:
    """The number of workers; 1 without a cluster."""
    return max(1, len(self.peers))

  @property
  def is_chief(self) -> bool:
    """Whether this process writes to the run folder."""
    return self.index == 0

  @property
  def is_local(self) -> bool:
    """Whether all processes run on this machine, judged by loopback addresses."""
    hosts = {peer.address.rpartition(":")[0] for peer in self.peers}
    return bool(hosts) and hosts <= {"127.0.0.1", "localhost", "[::1]"}

  def rows(self, padded_rows: int) -> range | None:
    """Returns this worker's rows of a padded global batch; None, meaning all, without a cluster."""
    if self.size == 1:
      return None
    share = padded_rows // self.size
    return range(self.index * share, (self.index + 1) * share)

  def sum(self, value: int) -> int:
    """Returns the sum of one int64 per worker; a collective: every worker must call it (host)."""
    return value

  def any(self, flag: bool) -> bool:
    """Whether the flag is set on any worker; a collective: every worker must call it (host)."""
    return self.sum(int(flag)) > 0

  def asking(self, every_s: float) -> Callable[[bool], bool]:
    """Returns `any`, called as often as you like, that costs little: it asks the others seldom.

    Every worker must call it equally often (host); then all get the same answer from each call.

    Args:
      every_s: about the seconds between two questions.
    """
    del every_s
    return self.any

  def barrier(self) -> None:
    """Waits until all workers have reached this call (host)."""
    self.sum(0)

  def require_same(self, what: str, value: int, remedy: str = "") -> None:
    """Checks that all workers have the same number; a collective: every worker must call it (host).

    Raises:
      ClusterError: the numbers differ.
    """

  def leave(self) -> None:
    """Returns when every worker has come here, so that none exits while another still needs it."""

  @contextlib.contextmanager
  def blaming(self, step: Callable[[], int]) -> Iterator[None]:
    """Replaces TensorFlow's error about a lost peer by a ClusterError with peer and `step`."""
    del step
    yield
