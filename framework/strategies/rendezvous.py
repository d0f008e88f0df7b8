"""Connects the processes of a synchronous cluster after checking that they agree.

TensorFlow connects processes without a time limit and does not compare what they run. So the
processes first exchange messages over plain TCP, on the same addresses that training uses later:

    every worker    listens on its own address, so a port in use is an immediate error
    worker 1 ...    connect to worker 0 and send their facts: versions, code, config, devices
    worker 0        waits for all facts, compares them and sends one verdict to all workers

docs/multi-process.md lists what the processes say.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import faulthandler
import hashlib
import importlib.metadata
import json
import platform
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

from framework.errors import ConfigError
from framework.strategies.cluster import ClusterError, ClusterResolver, Peer, workers

_PACKAGES = ("tensorflow", "keras", "tf_keras", "numpy")
_RETRY_S = 0.2
_PROBE_S = 1.0
_ANSWER_S = 5.0
_LARGEST_MESSAGE = 2**24
_facts: dict[str, str] = {}


def declare(facts: Mapping[str, Any]) -> None:
  """Adds facts about this process; `preflight` checks that they are equal on all workers (host)."""
  _facts.update({name: str(value) for name, value in facts.items()})


def facts() -> dict[str, str]:
  """Returns name -> value: the declared facts, versions, digest of the code, devices (host)."""
  devices = collections.Counter(d.device_type for d in tf.config.list_physical_devices())
  versions = {f"version of {name}": importlib.metadata.version(name) for name in _PACKAGES}
  return {
    **versions,
    "version of python": platform.python_version(),
    "code of the framework": _digest(sorted(Path(__file__).parents[1].rglob("*.py"))),
    "devices": ", ".join(f"{count} {kind}" for kind, count in sorted(devices.items())),
    **_facts,
  }


def code_digest(module_file: str | None) -> str:
  """Returns a 12-character digest of a source file; "" if there is no file, as in a notebook."""
  path = Path(module_file or "")
  return _digest([path]) if path.is_file() else ""


def _digest(files: Sequence[Path]) -> str:
  content = hashlib.sha256()
  for file in files:
    content.update(file.name.encode() + b"\0" + file.read_bytes())
  return content.hexdigest()[:12]


def preflight(resolver: ClusterResolver, *, timeout_s: float) -> None:
  """Connects to the other workers and compares facts, before TensorFlow connects them (host).

  Raises:
    ClusterError: a worker does not connect or does not answer, or this worker's port is in use.
    ConfigError: the facts differ; all workers raise the same line.
  """
  peers, index = workers(resolver)
  if len(peers) == 1:
    return
  deadline = time.monotonic() + timeout_s
  with _bound(peers[index].address) as own:
    if index == 0:
      meet = _lead(own, peers, deadline)
    else:
      meet = _report(peers, index, deadline, verdict_s=timeout_s + _ANSWER_S)
  if differs := meet.get("differs"):
    raise ConfigError(differs)
  if missing := meet.get("missing"):
    raise ClusterError(f"{missing} within {timeout_s:g} s")


def _bound(address: str) -> socket.socket:
  """Returns a socket that listens on this process's address."""
  host, port = _host_and_port(address)
  loopback = host in ("localhost", "::1") or host.startswith("127.")
  listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
  listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  try:
    listener.bind((host if loopback else "", port))
  except OSError as error:
    listener.close()
    taken = error.errno == errno.EADDRINUSE
    reason = "another process uses the port" if taken else error.strerror
    raise ClusterError(f"cannot listen on {address}, this worker's own address: {reason}") from None
  listener.listen()
  return listener


def _host_and_port(address: str) -> tuple[str, int]:
  host, _, port = address.rpartition(":")
  return host.strip("[]"), int(port)


def _lead(listener: socket.socket, peers: Sequence[Peer], deadline: float) -> dict[str, str]:
  """On worker 0: receives the facts of all workers and sends each the same verdict."""
  heard: dict[int, dict[str, str]] = {0: facts()}
  with contextlib.ExitStack() as opened:
    streams = []
    while len(heard) < len(peers) and (left := deadline - time.monotonic()) > 0:
      listener.settimeout(min(left, 1.0))
      try:
        connection = opened.enter_context(listener.accept()[0])
        connection.settimeout(_ANSWER_S)
        message = _received(connection)
      except (OSError, ValueError):  # no connection yet, or not from a worker
        continue
      if message.get("cluster") == [str(peer) for peer in peers]:
        heard[message["index"]] = message["facts"]
        streams.append(connection)
    verdict = _verdict(heard, peers)
    for connection in streams:
      with contextlib.suppress(OSError):
        _send(connection, verdict)
  return verdict


def _report(
  peers: Sequence[Peer], index: int, deadline: float, *, verdict_s: float
) -> dict[str, str]:
  """On another worker: sends the facts to worker 0 and returns its verdict.

  Worker 0 may start later, and then waits longer than `deadline` for the others. Therefore, once
  connected, this worker waits `verdict_s` seconds for the verdict.
  """
  message = {"cluster": [str(peer) for peer in peers], "index": index, "facts": facts()}
  while chief := _connected(peers[0].address, deadline):
    with contextlib.suppress(OSError, ValueError), chief:
      chief.settimeout(verdict_s)
      _send(chief, message)
      return _received(chief)
    if time.monotonic() > deadline:
      break
    time.sleep(_RETRY_S)
  return {"missing": f"{peers[0]} did not answer"}


def _verdict(heard: Mapping[int, Mapping[str, str]], peers: Sequence[Peer]) -> dict[str, str]:
  missing = [str(peer) for place, peer in enumerate(peers) if place not in heard]
  if missing:
    return {"missing": f"{', '.join(missing)} did not connect"}
  for place in sorted(heard):
    names = sorted(heard[0].keys() | heard[place].keys())
    differing = [name for name in names if heard[0].get(name) != heard[place].get(name)]
    if differing:
      here, there = (heard[i].get(differing[0], "missing") for i in (0, place))
      more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
      return {
        "differs": f"{peers[place]} differs from {peers[0]} in its {differing[0]}: {there}, not "
        f"{here}{more}; start all workers with the same command."
      }
  return {}


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
  connection.sendall(json.dumps(message).encode() + b"\n")


def _received(connection: socket.socket) -> dict[str, Any]:
  with connection.makefile("rb") as lines:
    line = lines.readline(_LARGEST_MESSAGE)
  if not line.endswith(b"\n"):
    raise ValueError("the line ended early")
  message = json.loads(line)
  if not isinstance(message, dict):
    raise ValueError("not a message")
  return message


# ---- Waiting for an address ----


def answers(address: str, *, deadline: float = 0.0) -> bool:
  """Whether a process accepts connections at "host:port" (host).

  Args:
    deadline: on the clock of `time.monotonic`; until then the call retries. It tries at least once.
  """
  connection = _connected(address, deadline)
  if connection is not None:
    connection.close()
  return connection is not None


def require_answer(address: str, *, timeout_s: float) -> None:
  """Waits until a process accepts connections at "host:port"; TensorFlow has no time limit (host).

  Raises:
    ClusterError: no process did within `timeout_s`.
    ConfigError: `address` is not "host:port".
  """
  if not re.fullmatch(r".+:\d+", address):
    raise ConfigError(f"the address {address!r} is not host:port, such as '10.0.0.2:8470'.")
  if not answers(address, deadline=time.monotonic() + timeout_s):
    raise ClusterError(f"nothing answered at {address} within {timeout_s:g} s")


def _connected(address: str, deadline: float) -> socket.socket | None:
  """Returns a connection to "host:port"; None if there is none by `deadline`."""
  while True:
    with contextlib.suppress(OSError):
      return socket.create_connection(_host_and_port(address), timeout=_PROBE_S)
    left = deadline - time.monotonic()
    if left <= 0:
      return None
    time.sleep(min(_RETRY_S, left))


# ---- TensorFlow's runtime ----


def configure_runtime(
  resolver: ClusterResolver, *, heartbeat_timeout_s: float, start_timeout_s: float
) -> None:
  """Sets TensorFlow's time limits for a peer that does not answer; call before making the strategy.

  TensorFlow's own default is no limit. The coordination service is the one that
  MultiWorkerMirroredStrategy would configure.
  """
  spec = resolver.cluster_spec()
  jobs = [job for job in ("chief", "worker") if job in spec.jobs]
  context.context().configure_coordination_service(
    service_type="standalone",
    service_leader=f"/job:{jobs[0]}/replica:0/task:0",
    cluster_register_timeout_in_ms=int(1000 * start_timeout_s),
    heartbeat_timeout_in_ms=int(1000 * heartbeat_timeout_s),
    shutdown_barrier_timeout_in_ms=int(1000 * heartbeat_timeout_s),
    coordinated_jobs=[
      coordination_config_pb2.CoordinatedJob(name=job, num_tasks=spec.num_tasks(job))
      for job in jobs
    ],
  )


@contextlib.contextmanager
def ending_after(timeout_s: float) -> Iterator[None]:
  """Ends the process with a traceback if the body takes longer than `timeout_s` (host).

  For TensorFlow's connection setup, which no signal or exception can interrupt.
  """
  faulthandler.dump_traceback_later(timeout_s, exit=True)
  try:
    yield
  finally:
    faulthandler.cancel_dump_traceback_later()
