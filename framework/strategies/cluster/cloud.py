"""Clusters whose addresses an API knows: pods of Kubernetes, instance groups of Compute Engine.

docs/multi-process.md shows their use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import tensorflow as tf
from absl import logging

from framework.errors import ConfigError
from framework.strategies.cluster.identity import ClusterError, ClusterResolver

Jobs: TypeAlias = Mapping[str, tuple[str, int]]
"""Job -> where its tasks are found, and how many there are."""

_POLL_S, _REQUEST_S = 2.0, 10.0
_NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


def kubernetes(
  *,
  jobs: Jobs | None = None,
  port: int = 8470,
  namespace: str | None = None,
  pod: str | None = None,
  start_timeout_s: float = 300.0,
) -> ClusterResolver:
  """The pods that label selectors find in a Kubernetes namespace; needs the extra "kubernetes".

  Pods that ended or are being deleted do not count. The pods' service account needs a Role with the
  verb "list" on pods; where its token is not mounted, the client reads a kubeconfig.

  Args:
    jobs: required: job -> (label selector, how many pods), such as {"worker": ("app=digits", 2)}.
    port: the one that every pod listens on.
    namespace: of all pods; None takes this pod's.
    pod: this pod's name; None takes the environment variable POD_NAME, else the host's name.
    start_timeout_s: how long to wait until all pods run.

  Raises:
    ConfigError: a wrong option, no access to the API, this pod is not found, or too many run.
    ClusterError: too few pods run in time, or the API does not answer.
  """
  with _usable("kubernetes", jobs, port, start_timeout_s):
    from kubernetes import client, config
    from urllib3.exceptions import HTTPError

    inside = os.path.exists(config.incluster_config.SERVICE_TOKEN_FILENAME)
    (config.load_incluster_config if inside else config.load_kube_config)()
    space = namespace or Path(_NAMESPACE_FILE).read_text().strip()
    api: Any = client.CoreV1Api()

  def ask(selector: str) -> dict[str, str]:
    pods = api.list_namespaced_pod(space, label_selector=selector, _request_timeout=_REQUEST_S)
    return {
      each.metadata.name: _address(each.status.phase == "Running" and each.status.pod_ip, port)
      for each in sorted(pods.items, key=lambda each: each.metadata.name)
      if not each.metadata.deletion_timestamp and each.status.phase not in ("Succeeded", "Failed")
    }

  return _Search(
    "kubernetes.jobs", jobs, ask, errors=(client.ApiException, HTTPError),
    own=pod or os.environ.get("POD_NAME") or socket.gethostname(),
    check=f"labels in the namespace {space!r}, POD_NAME, and the Role with the verb 'list' on pods",
  ).settled(start_timeout_s)  # fmt: skip


def gce(
  *,
  jobs: Jobs | None = None,
  port: int = 8470,
  project: str | None = None,
  zone: str | None = None,
  start_timeout_s: float = 300.0,
) -> ClusterResolver:
  """The machines in zonal instance groups of Google Compute Engine; needs the extra "gce".

  The machines' service account must be allowed to read Compute Engine (roles/compute.viewer).

  Args:
    jobs: required: job -> (instance group, how many machines), such as {"worker": ("digits", 2)}.
    port: the one that every machine listens on.
    project: of the groups; None takes this machine's.
    zone: of the groups; None takes this machine's.
    start_timeout_s: how long to wait until all machines run.

  Raises:
    ConfigError: a wrong option, no access to the API, this machine is not found, or too many run.
    ClusterError: too few machines run in time, or the API does not answer.
  """
  with _usable("gce", jobs, port, start_timeout_s):
    import google.auth
    from googleapiclient import discovery, errors
    from httplib2 import HttpLib2Error

    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/?recursive=true"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    with urllib.request.urlopen(request, timeout=_REQUEST_S) as answer:
      me = json.load(answer)
    credentials, _ = google.auth.default(["https://www.googleapis.com/auth/compute.readonly"])
    api = discovery.build("compute", "v1", credentials=credentials, cache_discovery=False)
    at = {
      "project": project or me["project"]["projectId"],
      "zone": zone or me["instance"]["zone"].rpartition("/")[2],
    }

  def ask(group: str) -> dict[str, str]:
    running = {"instanceGroup": group, "body": {"instanceState": "RUNNING"}}
    members = _items(api.instanceGroups(), "listInstances", **running, **at)
    names = {each["instance"].rpartition("/")[2] for each in members}
    found = {
      each["name"]: _address(each["networkInterfaces"][0].get("networkIP"), port)
      for each in _items(api.instances(), "list", **at)
      if each["name"] in names
    }
    return dict(sorted(found.items(), key=lambda each: each[1]))

  failures = (errors.HttpError, google.auth.exceptions.GoogleAuthError, HttpLib2Error, OSError)
  return _Search(
    "gce.jobs", jobs, ask, errors=failures, own=me["instance"]["name"],
    check=f"the groups in {at}, and the service account's role roles/compute.viewer",
  ).settled(start_timeout_s)  # fmt: skip


def _items(resource: Any, method: str, **parameters: Any) -> Iterator[dict[str, Any]]:
  request = getattr(resource, method)(**parameters)
  while request:
    page = request.execute()
    yield from page.get("items", ())
    request = getattr(resource, f"{method}_next")(request, page)


@contextlib.contextmanager
def _usable(name: str, jobs: Jobs | None, port: int, timeout_s: float) -> Iterator[None]:
  """Checks the options; what fails while a client is made becomes one line."""
  if not jobs or min(count for _, count in jobs.values()) < 1:
    raise ConfigError(f"{name}.jobs is {jobs}; give each job a place and a count of 1 or more.")
  if not 0 < port < 2**16:
    raise ConfigError(f"{name}.port is {port}; it must be from 1 to 65535.")
  if not timeout_s > 0:
    raise ConfigError(f"{name}.start_timeout_s is {timeout_s}; it must be above 0 seconds.")
  try:
    yield
  except Exception as error:  # of classes that are not there where the package is missing
    raise ConfigError(
      f"@{name} has no access to an API ({_reason(error)}); start with `uv run --extra {name} "
      "launch.py`, in a pod or on a machine with a service account, or use @tf_config."
    ) from error


@dataclasses.dataclass(frozen=True)
class _Search:
  """`ask` gives name -> address of a job's tasks, in order; "" of one that does not run yet."""

  option: str
  jobs: Any
  ask: Callable[[str], dict[str, str]]
  errors: tuple[type[Exception], ...]
  own: str
  check: str

  def settled(self, timeout_s: float) -> ClusterResolver:
    """Returns the first whole cluster."""
    deadline = time.monotonic() + timeout_s
    while isinstance(found := self._look(), tuple):
      kind, line, more = found
      if time.monotonic() >= deadline:
        raise kind(f"{line} after {timeout_s:g} s{more}")
      logging.log_every_n_seconds(logging.INFO, "%s%s; waiting %g s", 30, line, more, timeout_s)
      time.sleep(_POLL_S)
    return found

  def _look(self) -> Any:
    """Returns a resolver of the cluster, or, while it is not whole, the error to end with."""
    try:
      found = {job: self.ask(place) for job, (place, _) in self.jobs.items()}
    except self.errors as error:
      status = getattr(error, "status", None) or getattr(error, "status_code", None)
      if status not in (400, 401, 403, 404):
        return ClusterError, f"{self.option} gets no answer ({_reason(error)})", ""
      raise ConfigError(
        f"{self.option} is {self.jobs}, but the API refuses ({status}: {_reason(error)}); check "
        f"{self.check}."
      ) from error
    names = {name: address for tasks in found.values() for name, address in tasks.items()}
    if self.own not in names:
      raise ConfigError(
        f"this process, {self.own!r}, is not among those that {self.option} finds "
        f"({', '.join(names) or 'none'}); check {self.check}."
      )
    spec = {job: [address for address in found[job].values() if address] for job in found}
    tasks = {address: (job, i) for job in spec for i, address in enumerate(spec[job])}
    if len(tasks) < sum(map(len, spec.values())):
      raise ConfigError(f"{self.option} finds an address twice ({spec}); check {self.check}.")
    if names[self.own] and all(len(spec[job]) == n for job, (_, n) in self.jobs.items()):
      job, task = tasks[names[self.own]]
      gpus = {"GPU": len(tf.config.get_visible_devices("GPU"))}  # TensorFlow would say none
      return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(spec), "", job, task, num_accelerators=gpus, rpc_layer="grpc"
      )
    counts = ", ".join(f"{len(spec[job])} of {n} {job}" for job, (_, n) in self.jobs.items())
    line = f"{self.option} finds {counts} running"
    if any(len(spec[job]) > n for job, (_, n) in self.jobs.items()):
      return ConfigError, line, "; select fewer or correct the number."
    waiting = ", ".join(name for name, address in names.items() if not address)
    return ClusterError, line, f"; not running: {waiting}" if waiting else ""


def _reason(error: Exception) -> str:
  return " ".join(str(getattr(error, "reason", None) or error or type(error).__name__).split())


def _address(ip: Any, port: int) -> str:
  """Returns "host:port"; "" without an address."""
  return (ip and (f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}")) or ""
