"""Strangers that disturb the meeting of a cluster's workers: all workers must still meet.

Each kind of stranger connects again and again, from before the first worker starts until all have
met: to worker 0, and to the other workers. The last worker starts `LATE_S` seconds later, so
strangers come first. tests/clusters/test_meeting.py has all kinds, with and without a secret.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from loopwright.distribution.cluster import Peer
from loopwright.strategies.workers import meeting, wire
from loopwright.tools.local_cluster import free_ports

ALIKE = {"run.seed": "1", "version of keras": "3.15.1"}
SECRET = b"0123456789abcdef" * 2
TIMEOUT_S = 20.0
LATE_S = 1.0
BETWEEN_S = 0.02

Stranger = Callable[[socket.socket], None]


def says(*parts: bytes, pause_s: float = 0.0) -> Stranger:
  """A stranger that sends the parts, with a pause after each, then hangs up."""

  def talk(connection: socket.socket) -> None:
    for part in parts:
      connection.sendall(part)
      time.sleep(pause_s)

  return talk


def head(
  index: int = 1, *, size: int = 0, magic: bytes = b"LW-MEET2", keyed: bool = False
) -> bytes:
  return struct.pack("!8s?I32s32sI", magic, keyed, index, os.urandom(32), os.urandom(32), size)


def claims(
  content: object = None, *, index: int = 1, secret: bytes | None = None, body: bytes | None = None
) -> Stranger:
  """A stranger that speaks the protocol correctly, with a content of its own."""

  def talk(connection: socket.socket) -> None:
    deadline = time.monotonic() + 2
    nonce = os.urandom(32)
    hello = wire.receive(connection, deadline=deadline)
    seal = wire.Seal(secret, b"to the chief", hello.nonce + nonce + index.to_bytes(4, "big"))
    text = json.dumps(content).encode() if body is None else body
    claim = wire.Message(secret is not None, index, nonce, seal.mac(text), text)
    wire.send(connection, claim, deadline=deadline)
    connection.recv(1)

  return talk


def repeats(connection: socket.socket) -> None:
  """Returns what it received."""
  connection.settimeout(0.5)
  data = connection.recv(4096)
  connection.sendall(data)
  connection.recv(1)


class Replays:
  """Sends a worker's claim that was made for an earlier meeting, with the right secret."""

  def __init__(self) -> None:
    nonces = bytes(64) + (1).to_bytes(4, "big")
    seal = wire.Seal(SECRET, b"to the chief", nonces)
    self._claim = seal.close(1, bytes(32), {"facts": ALIKE})

  def __call__(self, connection: socket.socket) -> None:
    wire.send(connection, self._claim, deadline=time.monotonic() + 1)
    connection.recv(1)


def resets(connection: socket.socket) -> None:
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
  connection.sendall(b"x")


def stays(connection: socket.socket) -> None:
  connection.settimeout(30)
  with contextlib.suppress(OSError):
    connection.recv(1)


NESTED = b'{"facts": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
OLD = {"cluster": ["worker-0 (x:1)"], "index": True, "facts": {}}
FALSE = {"facts": {"run.seed": "9"}}

KINDS: dict[str, Stranger] = {
  "hangs up": says(),
  "resets": resets,
  "HTTP": says(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
  "TLS": says(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(508)),
  "gRPC": says(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)),
  "zeros": says(bytes(4096)),
  "random bytes": says(os.urandom(65536)),
  "16 MB of garbage": says(*[b"\xff" * 2**20] * 16),
  "JSON of an older version": says(json.dumps(OLD).encode() + b"\n"),
  "a byte every 2 s": says(*[bytes([b]) for b in head()], pause_s=2.0),
  "a byte every 0.2 s": says(*[bytes([b]) for b in head()], pause_s=0.2),
  "half a head": says(head()[:40]),
  "half a body": says(head(size=1000) + bytes(500), pause_s=30.0),
  "a body of 4 GB": says(head(size=2**32 - 1) + bytes(2**20), pause_s=1.0),
  "a body over the limit": says(head(size=2**20 + 1) + bytes(2**20 + 1)),
  "a body at the limit": says(head(size=2**20) + bytes(2**20), pause_s=1.0),
  "another magic": says(head(magic=b"LW-MEET0")),
  "index 0": claims(FALSE, index=0),
  "index 3 of 3": claims(FALSE, index=3),
  "index 2**32 - 1": claims(FALSE, index=2**32 - 1),
  "a false claim for worker 1": claims(FALSE, index=1),
  "a false claim for worker 2": claims(FALSE, index=2),
  "a true claim from elsewhere": claims({"facts": ALIKE}, index=2),
  "another secret": claims(FALSE, index=2, secret=b"x" * 32),
  "nested JSON": claims(index=2, body=NESTED),
  "a huge number": claims(index=2, body=b'{"facts": ' + b"9" * 500_000 + b"}"),
  "not UTF-8": claims(index=2, body=b"\xff\xfe\x00" * 1000),
  "NaN": claims(index=2, body=b"NaN"),
  "facts that are a list": claims({"facts": [1, 2]}, index=2),
  "facts that are numbers": claims({"facts": {"run.seed": 1}}, index=2),
  "no facts": claims({}, index=2),
  "its own words back": repeats,
  "a recorded claim": Replays(),
  "says nothing": stays,
  "hundreds that say nothing": stays,
}
MANY = 400


def flood(address: str, kind: str, stop: threading.Event) -> None:
  """Connects as the stranger until `stop`, in up to three connections at a time."""
  running: list[threading.Thread] = []
  most = MANY if kind == "hundreds that say nothing" else 3
  while not stop.is_set():
    running = [thread for thread in running if thread.is_alive()]
    if len(running) < most:
      thread = threading.Thread(target=visit, args=(address, KINDS[kind]), daemon=True)
      running.append(thread)
      thread.start()
    time.sleep(BETWEEN_S if most == 3 else 0.001)


def visit(address: str, stranger: Stranger) -> None:
  with (
    contextlib.suppress(OSError, ValueError),
    socket.create_connection(wire.host_and_port(address), timeout=1.0) as connection,
  ):
    stranger(connection)


@contextlib.contextmanager
def strangers(addresses: Sequence[str], kinds: Sequence[str]):
  stop = threading.Event()
  floods = [
    threading.Thread(target=flood, args=(address, kind, stop), daemon=True)
    for address in addresses
    for kind in kinds
  ]
  for thread in floods:
    thread.start()
  try:
    yield
  finally:
    stop.set()
    for thread in floods:
      thread.join()


def meeting_of(
  facts: Sequence[dict[str, str]],
  secrets: Sequence[bytes | None],
  *,
  kinds: Sequence[str] = (),
  timeout_s: float = TIMEOUT_S,
  late_s: float = LATE_S,
) -> tuple[list[Exception | None], float]:
  """Returns what each worker raises, or None, and the seconds from the last worker's start."""
  addresses = [f"127.0.0.1:{port}" for port in free_ports(len(facts))]
  peers = [Peer("worker", index, address) for index, address in enumerate(addresses)]
  last = len(peers) - 1

  def one(index: int) -> Exception | None:
    time.sleep(late_s if index == last else 0)
    try:
      meeting.meet(peers, index, facts[index], secret=secrets[index], timeout_s=timeout_s)
    except Exception as error:
      return error
    return None

  with strangers(addresses, kinds):
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(len(peers)) as pool:
      errors = list(pool.map(one, range(len(peers))))
    return errors, time.monotonic() - began - late_s
