"""Several processes that train one model together: who they are, and what they must agree on.

Before TensorFlow connects them, which it does without a time limit and without a look at what the
others run, the processes meet once over plain TCP, on the very addresses that training will use:

    every worker    binds its own address, so that a port already taken shows at once
    worker 1 ...    connect to worker 0 and send their facts: versions, code, config, devices
    worker 0        waits for all, compares, and sends one verdict to all

So a worker that never comes, a taken port and a worker with another config are one clear line on
every process. Afterwards TensorFlow's own runtime takes over; it notices dead and stopped peers.
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
_ANSWER_S = 5.0
_LARGEST_MESSAGE = 2**24
_facts: dict[str, str] = {}


def declare(facts: Mapping[str, Any]) -> None:
  """Adds facts about this process that must be the same on all; compared when they meet."""
  _facts.update({name: str(value) for name, value in facts.items()})


def facts() -> dict[str, str]:
  """Returns what was declared, and this process's versions, code and device kinds."""
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
  """Returns a short digest of a source file; "" if there is none, as in a notebook."""
  path = Path(module_file or "")
  return _digest([path]) if path.is_file() else ""


def _digest(files: Sequence[Path]) -> str:
  content = hashlib.sha256()
  for file in files:
    content.update(file.name.encode() + b"\0" + file.read_bytes())
  return content.hexdigest()[:12]


def preflight(resolver: ClusterResolver, *, timeout_s: float) -> None:
  """Meets the other workers and compares facts, before TensorFlow connects them (host).

  Args:
    resolver: the cluster.
    timeout_s: how long to wait for the others.

  Raises:
    ClusterError: a worker does not come or does not answer, or this one's port is taken.
    ConfigError: the facts differ; the same line on all workers.
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
  """Returns a socket that listens on this process's own address."""
  host, port = _host_and_port(address)
  loopback = host in ("localhost", "::1") or host.startswith("127.")
  listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
  listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  try:
    listener.bind((host if loopback else "", port))
  except OSError as error:
    listener.close()
    taken = error.errno == errno.EADDRINUSE
    reason = "another process has taken it" if taken else error.strerror
    raise ClusterError(f"cannot listen on {address}, this worker's own address: {reason}") from None
  listener.listen()
  return listener


def _host_and_port(address: str) -> tuple[str, int]:
  host, _, port = address.rpartition(":")
  return host.strip("[]"), int(port)


def _lead(listener: socket.socket, peers: Sequence[Peer], deadline: float) -> dict[str, str]:
  """Worker 0: hears all others, and tells all of them the same."""
  heard: dict[int, dict[str, str]] = {0: facts()}
  with contextlib.ExitStack() as opened:
    streams = []
    while len(heard) < len(peers) and (left := deadline - time.monotonic()) > 0:
      listener.settimeout(min(left, 1.0))
      try:
        connection = opened.enter_context(listener.accept()[0])
        connection.settimeout(_ANSWER_S)
        message = _received(connection)
      except (OSError, ValueError):  # nobody yet, or not one of us
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
  """Another worker: tells worker 0, and hears the verdict.

  Worker 0 may have come later and so wait longer than until `deadline`; once it listens, this
  worker waits for what it has to say.
  """
  message = {"cluster": [str(peer) for peer in peers], "index": index, "facts": facts()}
  while (left := deadline - time.monotonic()) > 0:
    with contextlib.suppress(OSError, ValueError):
      chief = socket.create_connection(_host_and_port(peers[0].address), timeout=left)
      with chief:
        chief.settimeout(verdict_s)
        _send(chief, message)
        return _received(chief)
    time.sleep(_RETRY_S)
  return {"missing": f"{peers[0]} has not answered"}


def _verdict(heard: Mapping[int, Mapping[str, str]], peers: Sequence[Peer]) -> dict[str, str]:
  missing = [str(peer) for place, peer in enumerate(peers) if place not in heard]
  if missing:
    return {"missing": f"{', '.join(missing)} {'has' if len(missing) == 1 else 'have'} not come"}
  for place in sorted(heard):
    names = sorted(heard[0].keys() | heard[place].keys())
    differing = [name for name in names if heard[0].get(name) != heard[place].get(name)]
    if differing:
      here, there = (heard[i].get(differing[0], "missing") for i in (0, place))
      more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
      return {
        "differs": f"{peers[place]} differs from {peers[0]} in its {differing[0]}: {there}, not "
        f"{here}{more}; start all workers alike."
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


def require_answer(address: str, *, timeout_s: float) -> None:
  """Waits until something listens at "host:port", which TensorFlow would do for ever (host).

  Raises:
    ClusterError: nothing does.
    ConfigError: it is no "host:port".
  """
  if not re.fullmatch(r".+:\d+", address):
    raise ConfigError(f"the address {address!r} is not host:port, such as '10.0.0.2:8470'.")
  deadline = time.monotonic() + timeout_s
  while (left := deadline - time.monotonic()) > 0:
    with contextlib.suppress(OSError):
      socket.create_connection(_host_and_port(address), timeout=left).close()
      return
    time.sleep(min(_RETRY_S, max(left, 0.0)))
  raise ClusterError(f"nothing answers at {address} within {timeout_s:g} s")


# ---- TensorFlow's runtime ----


def configure_runtime(
  resolver: ClusterResolver, *, heartbeat_timeout_s: float, start_timeout_s: float
) -> None:
  """Sets how long the runtime waits for a silent peer; before the strategy is made (host).

  TensorFlow's default is no limit that a user can set. The service is the one that
  MultiWorkerMirroredStrategy would configure itself.
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
  """Ends the process, with a traceback, if what is inside takes longer (host).

  For TensorFlow's connecting, which no signal and no exception can interrupt.
  """
  faulthandler.dump_traceback_later(timeout_s, exit=True)
  try:
    yield
  finally:
    faulthandler.cancel_dump_traceback_later()
