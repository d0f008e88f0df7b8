"""What workers must have in common, and how TensorFlow connects them: within a time limit.

Its coordination service connects them and notices who stops answering. It does not compare what
they run: `facts` are what `WorkerCluster.require_alike` compares once they are connected.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import hashlib
import importlib.metadata
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

from loopwright.distribution.cluster import ClusterError, declared
from loopwright.errors import ConfigError, is_the_users
from loopwright.strategies.workers.identity import ClusterResolver

_PACKAGES = ("tensorflow", "keras", "tf_keras", "numpy")
_INSTALLED = {"site-packages", "dist-packages"}
_PROBE_S, _RETRY_S = 1.0, 0.2


def facts() -> dict[str, str]:
  """Returns name -> value: the declared facts, versions, digests of code, devices (host).

  Each loaded module of the user's own is a fact, so that a difference names it.
  """
  devices = collections.Counter(d.device_type for d in tf.config.get_visible_devices())
  versions = {f"version of {name}": importlib.metadata.version(name) for name in _PACKAGES}
  return {
    **versions,
    "version of python": platform.python_version(),
    "code of the framework": _digest(sorted(Path(__file__).parents[2].rglob("*.py"))),
    "devices": ", ".join(f"{count} {kind}" for kind, count in sorted(devices.items())),
    **_modules(),
    **declared,
  }


def _modules() -> dict[str, str]:
  # Not getattr: it would make a lazy module import itself.
  files = {name: getattr(m, "__dict__", {}).get("__file__") for name, m in [*sys.modules.items()]}
  return {
    f"code of module {name}": code_digest(file)
    for name, file in files.items()
    if isinstance(file, str) and is_the_users(file) and not _INSTALLED & {*Path(file).parts}
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


# ---- Waiting for an address ----


def answers(address: str, *, deadline: float = 0.0) -> bool:
  """Whether a process accepts connections at "host:port" (host).

  Args:
    deadline: on the clock of `time.monotonic`; until then the call retries. It tries at least once.
  """
  host, _, port = address.rpartition(":")
  while True:
    with contextlib.suppress(OSError):
      socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
      return True
    left = deadline - time.monotonic()
    if left <= 0:
      return False
    time.sleep(min(_RETRY_S, left))


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


# ---- TensorFlow's runtime ----


def avoid_proxies() -> None:
  """Keeps TensorFlow's gRPC from the proxies of `http_proxy`, behind which it waits in silence."""
  os.environ.setdefault("grpc_proxy", "")


def configure_runtime(
  resolver: ClusterResolver, *, heartbeat_timeout_s: float, start_timeout_s: float
) -> None:
  """Sets TensorFlow's time limits for a peer that does not answer; call before making the strategy.

  TensorFlow's own default is no limit. The coordination service is the one that
  MultiWorkerMirroredStrategy would configure, but for the barrier: without it nothing ends the wait
  for a worker that does not come.
  """
  avoid_proxies()
  spec = resolver.cluster_spec()
  jobs = [job for job in ("chief", "worker") if job in spec.jobs]
  runtime = context.context()
  runtime.configure_coordination_service(
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
  runtime.coordination_service.cluster_register_with_barrier = True


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
