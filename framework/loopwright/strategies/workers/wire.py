"""Messages between processes of a cluster: limited in size and time, sealed with a shared secret.

A message is a head of fixed size and a body of JSON, which anyone can read. With a secret,
HMAC-SHA256 authenticates the body for one direction of one connection, with a random nonce of each
side: a stranger cannot write, change, repeat or return it. A value that nobody else must read is
sent as a digest (`Seal.digest`).

The standard library's `multiprocessing.connection` does not fit: it authenticates a connection, not
the messages, and waits without limit for a client that is silent.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from loopwright.errors import ConfigError

SECRET = "LOOPWRIGHT_CLUSTER_SECRET"
SECRET_FILE = f"{SECRET}_FILE"
NONCE_BYTES = 32
LARGEST_BODY = 2**20
_SHORTEST_SECRET = 16
_HEAD = struct.Struct(f"!8s?I{NONCE_BYTES}s32sI")
_MAGIC = b"LW-MEET2"
_RETRY_S = 0.2
_PROBE_S = 1.0


def secret(environ: Mapping[str, str] = os.environ) -> bytes | None:
  """Returns the cluster's secret from the environment or the file that it names; None without one.

  Raises:
    ConfigError: both are set, the file cannot be read, or the secret is too short.
  """
  text, file = environ.get(SECRET), environ.get(SECRET_FILE)
  if text is not None and file is not None:
    raise ConfigError(f"received both {SECRET} and {SECRET_FILE}; choose one.")
  if file is not None:
    try:
      text = Path(file).read_text().strip()
    except (OSError, ValueError) as error:
      reason = getattr(error, "strerror", None) or "not text"
      raise ConfigError(f"cannot read {SECRET_FILE}={file!r} ({reason}).") from None
  if text is None:
    return None
  if len(text) < _SHORTEST_SECRET:
    raise ConfigError(
      f"{SECRET_FILE if file else SECRET} has {len(text)} characters; a secret needs at least "
      f"{_SHORTEST_SECRET}, for example the output of: openssl rand -hex 32"
    )
  return text.encode()


# ---- Messages ----


class Message(NamedTuple):
  """One message; `keyed` says whether the sender has a secret, `worker` is its number."""

  keyed: bool
  worker: int
  nonce: bytes
  mac: bytes = bytes(32)
  body: bytes = b""


def send(connection: socket.socket, message: Message, *, deadline: float) -> None:
  """Sends a message until `deadline`, on the clock of `time.monotonic`; raises OSError."""
  connection.settimeout(max(deadline - time.monotonic(), 1e-3))
  connection.sendall(_HEAD.pack(_MAGIC, *message[:4], len(message.body)) + message.body)


def receive(connection: socket.socket, *, deadline: float) -> Message:
  """Returns the next message; raises OSError or ValueError if none is complete by `deadline`."""
  head = _HEAD.unpack(exactly(connection, _HEAD.size, deadline=deadline))
  magic, keyed, worker, nonce, mac, size = head
  if magic != _MAGIC or size > LARGEST_BODY:
    raise ValueError("not a message of a worker")
  return Message(keyed, worker, nonce, mac, exactly(connection, size, deadline=deadline))


def exactly(connection: socket.socket, count: int, *, deadline: float) -> bytes:
  """Returns `count` bytes; raises OSError or ValueError if they do not arrive by `deadline`."""
  data = bytearray()
  while len(data) < count:
    left = deadline - time.monotonic()
    if left <= 0:
      raise TimeoutError
    connection.settimeout(left)
    part = connection.recv(min(count - len(data), 2**16))
    if not part:
      raise ValueError("the connection ended early")
    data += part
  return bytes(data)


class Seal(NamedTuple):
  """Seals and opens the messages of one direction of one connection; without a secret anyone can.

  Attributes:
    secret: the cluster's secret, or None.
    direction: such as b"to worker 0".
    nonces: of both sides; a new one for each connection from at least one side.
  """

  secret: bytes | None
  direction: bytes
  nonces: bytes

  def close(self, worker: int, nonce: bytes, content: Mapping[str, Any]) -> Message:
    """Returns the sealed message of a worker.

    Raises:
      ConfigError: the body would exceed `LARGEST_BODY`.
    """
    text = json.dumps(content).encode()
    if len(text) > LARGEST_BODY:
      raise ConfigError(
        f"the config and the code have {len(text)} bytes of facts to compare between workers; the "
        f"limit is {LARGEST_BODY}: bind fewer options, or import fewer modules."
      )
    return Message(self.secret is not None, worker, nonce, self.mac(text), text)

  def fits(self, message: Message) -> bool:
    """Whether the message was closed by a process with this secret, for this direction."""
    return hmac.compare_digest(self.mac(message.body), message.mac)

  def open(self, message: Message) -> dict[str, Any]:
    """Returns the content; raises ValueError or RecursionError if it is not one."""
    if not self.fits(message):
      raise ValueError("not sealed for this connection")
    content = json.loads(message.body)
    if not isinstance(content, dict):
      raise ValueError("not a message")
    return content

  def digest(self, name: str, value: str) -> str:
    """Returns 16 characters to compare a value by; without the secret they tell nothing of it.

    Both directions of a connection give the same, another connection gives others.
    """
    return self._hmac(b"a value", name.encode(), value.encode()).hex()[:16]

  def mac(self, body: bytes) -> bytes:
    """Returns what proves that a message comes from who knows the secret."""
    return self._hmac(self.direction, body)

  def _hmac(self, purpose: bytes, *parts: bytes) -> bytes:
    return hmac.digest(self.secret or b"", b"\0".join([purpose, self.nonces, *parts]), "sha256")


# ---- Addresses ----


def host_and_port(address: str) -> tuple[str, int]:
  """Returns the parts of "host:port"; an IPv6 address is in brackets."""
  host, _, port = address.rpartition(":")
  return host.strip("[]"), int(port)


def connected(address: str, *, deadline: float) -> socket.socket | None:
  """Returns a connection to "host:port"; None if there is none by `deadline`. Tries at least once.

  Args:
    deadline: on the clock of `time.monotonic`.
  """
  while True:
    with contextlib.suppress(OSError):
      return socket.create_connection(host_and_port(address), timeout=_PROBE_S)
    left = deadline - time.monotonic()
    if left <= 0:
      return None
    time.sleep(min(_RETRY_S, left))
