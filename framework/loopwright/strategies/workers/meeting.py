"""The meeting of a cluster's workers, in which worker 0 compares the facts of all.

    every worker    listens on its own address
    worker 1 ...    connect to worker 0, which sends a nonce, and send their facts
    worker 0        connects back to the worker's own address, where only that worker knows the
                    answer; compares the facts, and sends one verdict to all workers

A worker sends the names of its facts and salted digests of their values. The verdict names the fact
that differs, and each worker adds its own value. A secret keys digests and messages (wire.py).
Anyone may connect: a stranger gets a thread, `_ANSWER_S` seconds and `wire.LARGEST_BODY` bytes, and
changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import logging

from loopwright.distribution.cluster import ClusterError, Peer
from loopwright.errors import ConfigError
from loopwright.strategies.workers import wire

Facts = Mapping[str, str]

_ANSWER_S = 5.0
_POLL_S = 0.05
_RETRY_S = 0.2
_MOST_CONNECTIONS = 128
_MOST_OF_A_VALUE = 400
_TO_CHIEF, _TO_WORKER = b"to the chief", b"to the worker"
_SAME = f"set the same {wire.SECRET} on all workers."


def meet(
  peers: Sequence[Peer], index: int, facts: Facts, *, secret: bytes | None, timeout_s: float
) -> None:
  """Connects to the other workers and compares the facts of all (host).

  Raises:
    ClusterError: a worker does not connect or does not answer, or this worker's port is in use.
    ConfigError: the facts or the secrets differ.
  """
  deadline = time.monotonic() + timeout_s
  facts = {"cluster": ", ".join(map(str, peers)), **facts}
  with bound(peers[index].address) as listener:
    if index == 0:
      verdict = _Chief(peers, facts, secret, deadline).meet(listener)
    else:
      worker = _Worker(peers, index, facts, secret)
      verdict = worker.meet(listener, deadline, verdict_s=timeout_s + _ANSWER_S)
  if fact := verdict.get("fact"):
    here = f", which is {_short(facts.get(fact, 'missing'))} here{verdict['more']}"
    raise ConfigError(f"{verdict['line']}{here}; start all workers with the same command.")
  if differs := verdict.get("secret"):
    raise ConfigError(f"{differs}; {_SAME}")
  if missing := verdict.get("missing"):
    raise ClusterError(f"{missing} within {timeout_s:g} s")


# ---- This worker's own address ----


def bound(address: str) -> socket.socket:
  """Returns a socket that listens on this worker's own address, and on no other interface.

  Listens on all interfaces, with a warning, if no interface of this machine has that address, as
  behind NAT or the name of a service, or if a name means loopback on this machine alone.

  Raises:
    ClusterError: the port is in use, or the address cannot be bound.
  """
  host, port = wire.host_and_port(address)
  try:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
  except (OSError, UnicodeError):
    found = []
  for family, *_, place in found:
    if _is_loopback(str(place[0])) and not _is_loopback(host):
      continue  # Debian's /etc/hosts gives the machine's own name 127.0.1.1
    try:
      return _listening(family, place)
    except OSError as error:
      if error.errno != errno.EADDRNOTAVAIL:
        raise _cannot_listen(address, error) from None
  logging.warning(
    "no network interface of this machine has the address %s; until all workers have connected, "
    "this one listens on all interfaces",
    address,
  )
  try:
    return _listening(socket.AF_INET6 if ":" in host else socket.AF_INET, ("", port))
  except (OSError, OverflowError) as error:
    raise _cannot_listen(address, error) from None


def _is_loopback(host: str) -> bool:
  try:
    return host == "localhost" or ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False


def _listening(family: int, place: Any) -> socket.socket:
  listener = socket.socket(family, socket.SOCK_STREAM)
  try:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(place)
    listener.listen()
  except BaseException:
    listener.close()
    raise
  return listener


def _cannot_listen(address: str, error: Exception) -> ClusterError:
  taken = getattr(error, "errno", None) == errno.EADDRINUSE
  reason = "another process uses the port" if taken else getattr(error, "strerror", str(error))
  return ClusterError(f"cannot listen on {address}, this worker's own address: {reason}")


@contextlib.contextmanager
def _accepting(listener: socket.socket, serve: Callable[[socket.socket], None]) -> Iterator[None]:
  """Calls `serve` with each connection, in a thread, until the body ends (host)."""
  ended = threading.Event()
  open_now: dict[socket.socket, None] = {}  # the oldest first

  def one(connection: socket.socket) -> None:
    # A stranger may send anything; whatever it causes must end with its own connection.
    with contextlib.suppress(Exception):
      serve(connection)
    open_now.pop(connection, None)

  def accept() -> None:
    listener.settimeout(_POLL_S)
    while not ended.is_set():
      try:
        connection, _ = listener.accept()
      except OSError as error:
        if not isinstance(error, TimeoutError):
          time.sleep(_POLL_S)  # such as too many open files
        continue
      open_now[connection] = None
      if len(open_now) > _MOST_CONNECTIONS:
        oldest = list(open_now)[0]  # noqa: RUF015  (in one step; other threads change it)
        open_now.pop(oldest, None)  # now, as its thread may notice late, and another one comes
        _hang_up(oldest)
      try:
        threading.Thread(target=one, args=(connection,), daemon=True).start()
      except RuntimeError:  # too many threads
        open_now.pop(connection)
        connection.close()

  thread = threading.Thread(target=accept, daemon=True)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()
    for connection in list(open_now):
      _hang_up(connection)


def _hang_up(connection: socket.socket) -> None:
  with contextlib.suppress(OSError):
    connection.shutdown(socket.SHUT_RDWR)


# ---- Worker 0 ----


class _Arrival(NamedTuple):
  """A worker that connected: its connection, how to answer, and the verdict on it alone."""

  connection: socket.socket
  seal: wire.Seal
  verdict: Mapping[str, str]


class _Chief:
  """Worker 0: compares the facts of all workers and sends them the same verdict."""

  def __init__(
    self, peers: Sequence[Peer], facts: Facts, secret: bytes | None, deadline: float
  ) -> None:
    self._peers, self._facts, self._secret, self._deadline = peers, facts, secret, deadline
    self._arrived: dict[int, _Arrival] = {}
    self._not_there: dict[int, str] = {}
    self._changed, self._is_over = threading.Condition(), False

  def meet(self, listener: socket.socket) -> Mapping[str, str]:
    """Returns the verdict, after all workers have connected or time is over."""
    with _accepting(listener, self._serve), self._changed:
      complete = len(self._peers) - 1
      left = self._deadline - time.monotonic()
      self._changed.wait_for(lambda: len(self._arrived) == complete, timeout=left)
      verdict, self._is_over = self._verdict(), True
    for arrival in self._arrived.values():
      with contextlib.suppress(OSError), arrival.connection as connection:
        message = arrival.seal.close(0, bytes(wire.NONCE_BYTES), verdict)
        wire.send(connection, message, deadline=time.monotonic() + _ANSWER_S)
    return verdict

  def _serve(self, connection: socket.socket) -> None:
    """Serves one connection; it stays open for the verdict if it is a worker's."""
    index, arrival = 0, None
    try:
      index, arrival = self._arrival(connection)
    finally:
      with self._changed:
        if arrival is None or self._is_over:
          connection.close()
        else:
          if earlier := self._arrived.get(index):
            earlier.connection.close()
          self._arrived[index] = arrival
          self._changed.notify()

  def _arrival(self, connection: socket.socket) -> tuple[int, _Arrival | None]:
    deadline = min(self._deadline, time.monotonic() + _ANSWER_S)
    nonce = os.urandom(wire.NONCE_BYTES)
    keyed = self._secret is not None
    wire.send(connection, wire.Message(keyed, 0, nonce), deadline=deadline)
    claim = wire.receive(connection, deadline=deadline)
    if not 0 < claim.worker < len(self._peers):
      return 0, None
    seal = wire.Seal(self._secret, _TO_CHIEF, _context(nonce, claim.nonce, claim.worker))
    back = seal._replace(direction=_TO_WORKER)
    fits = seal.fits(claim)
    if not self._is_at_its_address(claim, deadline):
      if fits:
        self._not_there[claim.worker] = "connected, but does not answer at that address"
      return 0, None
    if fits:
      return claim.worker, _Arrival(connection, back, self._compared(seal, claim))
    who = (self._peers[claim.worker], claim.keyed), (self._peers[0], keyed)
    return claim.worker, _Arrival(connection, back, {"secret": _other_secret(*who)})

  def _is_at_its_address(self, claim: wire.Message, deadline: float) -> bool:
    address = self._peers[claim.worker].address
    left = max(deadline - time.monotonic(), 1e-3)
    try:
      with socket.create_connection(wire.host_and_port(address), timeout=left) as there:
        answer = wire.exactly(there, 32, deadline=deadline)
    except (OSError, ValueError):
      return False
    return hmac.compare_digest(answer, _proof(claim.nonce))

  def _compared(self, seal: wire.Seal, claim: wire.Message) -> dict[str, str]:
    here, there = _digests(self._facts, seal), seal.open(claim)["facts"]
    if not all(isinstance(text, str) for text in there.values()):
      raise ValueError("not facts")
    differing = [name for name in sorted({**here, **there}) if here.get(name) != there.get(name)]
    if not differing:
      return {}
    fact, more = differing[0], len(differing) - 1
    return {
      "fact": fact,
      "line": f"{self._peers[claim.worker]} differs from {self._peers[0]} in its {fact}",
      "more": f" (and {more} more)" if more else "",
    }

  def _verdict(self) -> Mapping[str, str]:
    own = [self._arrived[index].verdict for index in sorted(self._arrived)]
    missing = [
      f"{peer} {self._not_there.get(index, 'did not connect')}"
      for index, peer in enumerate(self._peers)
      if index and index not in self._arrived
    ]
    secrets = [verdict for verdict in own if "secret" in verdict]
    all_here = {"missing": ", ".join(missing)} if missing else {}
    return next(filter(None, [*secrets, all_here, *own]), {})


# ---- The other workers ----


class _Worker:
  """Another worker: sends its facts to worker 0 and returns the verdict."""

  def __init__(self, peers: Sequence[Peer], index: int, facts: Facts, secret: bytes | None) -> None:
    self._peers, self._index, self._facts, self._secret = peers, index, facts, secret
    self._nonce, self._reason = os.urandom(wire.NONCE_BYTES), "did not answer"

  def meet(self, listener: socket.socket, deadline: float, *, verdict_s: float) -> dict[str, str]:
    """Returns worker 0's verdict.

    Worker 0 may start later, and then waits longer than `deadline` for the others. Therefore, once
    connected, this worker waits `verdict_s` seconds for the verdict.
    """
    chief = self._peers[0]
    with _accepting(listener, self._prove):
      while connection := wire.connected(chief.address, deadline=deadline):
        with connection:
          try:
            return self._talk(connection, verdict_s)
          except ConfigError:
            raise
          except (OSError, ValueError, RecursionError):
            pass  # not worker 0, or it ended; it may start again
        if time.monotonic() > deadline:
          break
        time.sleep(_RETRY_S)
    return {"missing": f"{chief} {self._reason}"}

  def _prove(self, connection: socket.socket) -> None:
    """Answers at this worker's own address with what only this process can know."""
    with connection:
      connection.settimeout(_ANSWER_S)
      connection.sendall(_proof(self._nonce))

  def _talk(self, connection: socket.socket, verdict_s: float) -> dict[str, str]:
    soon = time.monotonic() + _ANSWER_S
    self._reason = "did not answer as a worker"
    chief = wire.receive(connection, deadline=soon)
    seal = wire.Seal(self._secret, _TO_CHIEF, _context(chief.nonce, self._nonce, self._index))
    claim = seal.close(self._index, self._nonce, {"facts": _digests(self._facts, seal)})
    wire.send(connection, claim, deadline=soon)
    own = self._peers[self._index].address
    self._reason = f"did not accept this worker, or cannot connect to {own}"
    answer = wire.receive(connection, deadline=time.monotonic() + verdict_s)
    back = seal._replace(direction=_TO_WORKER)
    if back.fits(answer):
      verdict = {"more": "", "line": "", **back.open(answer)}
      if not all(isinstance(text, str) for text in verdict.values()):
        raise ValueError("not a verdict")
      return verdict
    who = (self._peers[self._index], claim.keyed), (self._peers[0], answer.keyed)
    return {"secret": _other_secret(*who)}


def _context(of_chief: bytes, of_worker: bytes, index: int) -> bytes:
  return of_chief + of_worker + index.to_bytes(4, "big")


def _other_secret(worker: tuple[Peer, bool], chief: tuple[Peer, bool]) -> str:
  """Returns how the secrets differ; each is given as (peer, whether it has one)."""
  if worker[1] and chief[1]:
    return f"{worker[0]} has another cluster secret than {chief[0]}"
  (has, _), (lacks, _) = (worker, chief) if worker[1] else (chief, worker)
  return f"{has} has a cluster secret, but {lacks} has none"


def _proof(nonce: bytes) -> bytes:
  return hashlib.sha256(b"at its own address" + nonce).digest()


def _digests(facts: Facts, seal: wire.Seal) -> dict[str, str]:
  return {name: seal.digest(name, value) for name, value in facts.items()}


def _short(value: str) -> str:
  """Returns the value, or the beginning and a digest of a long one."""
  if len(value) <= _MOST_OF_A_VALUE:
    return value
  digest = hashlib.sha256(value.encode()).hexdigest()[:12]
  return f"{value[:_MOST_OF_A_VALUE]}... (digest {digest})"
