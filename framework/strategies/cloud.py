"""Clusters whose addresses an API knows: pods of Kubernetes, instance groups of Compute Engine.

TensorFlow's own resolvers ask the API. What they leave to their user is settled here, before
anybody looks at the cluster:

    who comes     they take whoever runs just now, and would train on fewer: here all that are asked
                  for must have come
    who this is   they do not know it, or take every process for task 0: here its pod's name or its
                  machine's address tells
    for how long  they ask again at every look, while pods and machines come and go: here the first
                  whole answer is kept

All processes get the same order: that of the pods' names, or of the machines' addresses, as text.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import os
import socket
import time
import types
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import tensorflow as tf
from absl import logging

from framework.errors import ConfigError
from framework.strategies.cluster import ClusterError, ClusterResolver

Jobs: TypeAlias = Mapping[str, tuple[str, int]]
"""Job -> where its tasks are found, and how many there are."""

_POLL_S = 2.0
_REQUEST_S = 10.0
_REFUSALS = (400, 401, 403, 404)
"""Statuses of HTTP that asking again does not change."""
_ENDED = ("Succeeded", "Failed")
_NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
_SCOPE = "https://www.googleapis.com/auth/compute.readonly"


def kubernetes(
  *,
  jobs: Jobs | None = None,
  port: int = 8470,
  namespace: str | None = None,
  pod: str | None = None,
  start_timeout_s: float = 300.0,
) -> ClusterResolver:
  """The pods that label selectors find in a Kubernetes namespace; needs the extra "kubernetes".

  Pods that have ended, or are about to, do not count. The pods' service account must have a Role
  with the verb "list" on pods.

  Args:
    jobs: required: job -> (label selector, how many pods), such as {"worker": ("app=digits", 2)}.
    port: the one that every pod listens on.
    namespace: of all pods; None takes this pod's.
    pod: this pod's name; None takes the environment variable POD_NAME, else the host's name.
    start_timeout_s: how long to wait until all pods run.

  Raises:
    ConfigError: an option out of its range, the package `kubernetes` is missing, this is no pod or
      none of those found, the API refuses, or there are more pods than asked for.
    ClusterError: not all pods run in time.
  """
  jobs = _checked("kubernetes", jobs, port, start_timeout_s, example=("app=digits", 2))
  api, errors = _kubernetes_api()
  pods = _Pods(api, namespace or _own_namespace())
  resolver = tf.distribute.cluster_resolver.KubernetesClusterResolver(
    {job: [selector] for job, (selector, _) in jobs.items()},
    tf_server_port=port,
    override_client=pods,
  )
  name = pod or os.environ.get("POD_NAME") or socket.gethostname()
  query = _Query(
    option="kubernetes.jobs",
    jobs=jobs,
    ask=lambda: pods.afresh(resolver),
    own=lambda spec: _pod_address(pods, name, port),
    errors=errors,
    remedy="check the selectors, and give the pods' service account a Role with the verb 'list' on "
    f"pods in the namespace {pods.namespace!r}",
    alone="each pod must match one selector, and pods with hostNetwork must not share a node",
    note=pods.waiting,
  )
  return query.settled(start_timeout_s)


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
    ConfigError: an option out of its range, the package `google-api-python-client` or credentials
      are missing, this is no machine of Compute Engine or none of those found, the API refuses, or
      there are more machines than asked for.
    ClusterError: not all machines run in time.
  """
  jobs = _checked("gce", jobs, port, start_timeout_s, example=("digits", 2))
  api, errors = _compute_api()
  address = f"{_metadata('instance/network-interfaces/0/ip')}:{port}"
  project = project or _metadata("project/project-id")
  zone = zone or _metadata("instance/zone").rpartition("/")[2]
  where = f"zone {zone!r} of project {project!r}"
  groups = {
    job: tf.distribute.cluster_resolver.GCEClusterResolver(
      project, zone, group, port, task_type=job, credentials=None, service=_Compute(api)
    )
    for job, (group, _) in jobs.items()
  }
  query = _Query(
    option="gce.jobs",
    jobs=jobs,
    ask=lambda: _together(groups),
    own=lambda spec: _machine_address(spec, address, where),
    errors=errors,
    remedy=f"check that these groups are in {where}, and that the machines' service account has "
    "roles/compute.viewer and the scope compute.readonly",
    alone="each machine must be in one group",
  )
  return query.settled(start_timeout_s)


# ---- Who comes, who this is, for how long ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Query:
  """What is asked again and again until all have come.

  Attributes:
    option: which says who has to come.
    jobs: its value.
    ask: returns the cluster of this moment.
    own: returns this process's address, which may be nobody's yet, and raises if it is not found.
    errors: what `ask` raises if the API refuses or is not reached.
    remedy: for a refusal.
    alone: what to mind where an address is found twice.
    note: says who has been found and is not ready, if anybody.
  """

  option: str
  jobs: Jobs
  ask: Callable[[], tf.train.ClusterSpec]
  own: Callable[[tf.train.ClusterSpec], str]
  errors: tuple[type[Exception], ...]
  remedy: str
  alone: str
  note: Callable[[], str] = lambda: ""

  def settled(self, timeout_s: float) -> ClusterResolver:
    """Waits until all have come, and returns the cluster that they are from now on."""
    deadline, told = time.monotonic() + timeout_s, ""
    while True:
      spec, reason = self._answer()
      if spec is not None:
        self._require_distinct(spec)
        own, reason = self.own(spec), self._lack(spec)
        if not reason and own in _addresses(spec):
          return _fixed(spec, own)
        reason = f"finds {reason or 'all but this process'}{self.note()}"
      if reason != told:
        logging.info("%s %s; waiting for up to %g s", self.option, reason, timeout_s)
        told = reason
      if time.monotonic() >= deadline:
        raise self._late(spec, f"{self.option} {reason} within {timeout_s:g} s")
      time.sleep(_POLL_S)

  def _answer(self) -> tuple[tf.train.ClusterSpec | None, str]:
    """Returns the cluster of this moment, or why there is none."""
    try:
      return self.ask(), ""
    except self.errors as error:
      status = getattr(error, "status", None) or getattr(error, "status_code", None)
      reason = str(getattr(error, "reason", None) or error or type(error).__name__).splitlines()[0]
      if status in _REFUSALS:
        raise ConfigError(
          f"{self.option} is {dict(self.jobs)}, but the API refuses to look ({status}: {reason}); "
          f"{self.remedy}."
        ) from error
      return None, f"gets no answer ({reason})"

  def _lack(self, spec: tf.train.ClusterSpec) -> str:
    """Returns "1 of 2 worker" for each job of which there are too few or too many."""
    wrong = [
      f"{spec.num_tasks(job)} of {count} {job}"
      for job, (_, count) in self.jobs.items()
      if spec.num_tasks(job) != count
    ]
    return " and ".join(wrong)

  def _late(self, spec: tf.train.ClusterSpec | None, line: str) -> Exception:
    many = spec and [job for job, (_, n) in self.jobs.items() if spec.num_tasks(job) > n]
    if many:
      where = self.jobs[many[0]][0]
      return ConfigError(
        f"{line}; make {where!r} stand for just those that train, or give the right number."
      )
    return ClusterError(line)

  def _require_distinct(self, spec: tf.train.ClusterSpec) -> None:
    addresses = _addresses(spec)
    for address, count in collections.Counter(addresses).items():
      if count > 1:
        tasks = " and ".join(f"{job}-{task}" for job, task in _tasks_at(spec, address))
        raise ConfigError(f"{self.option} finds {address} as {tasks}; {self.alone}.")


def _fixed(spec: tf.train.ClusterSpec, address: str) -> ClusterResolver:
  """Returns a resolver of just this cluster, for the process at `address`.

  TensorFlow would see no GPU where it is not told how many there are.
  """
  [(job, task)] = _tasks_at(spec, address)
  return tf.distribute.cluster_resolver.SimpleClusterResolver(
    spec,
    task_type=job,
    task_id=task,
    num_accelerators={"GPU": len(tf.config.get_visible_devices("GPU"))},
    rpc_layer="grpc",
  )


def _addresses(spec: tf.train.ClusterSpec) -> list[str]:
  tasks = [(job, task) for job in sorted(spec.jobs) for task in spec.task_indices(job)]
  return [spec.task_address(*each) for each in tasks]


def _tasks_at(spec: tf.train.ClusterSpec, address: str) -> list[tuple[str, int]]:
  return [
    (job, task)
    for job in sorted(spec.jobs)
    for task in spec.task_indices(job)
    if spec.task_address(job, task) == address
  ]


def _checked(
  name: str, jobs: Jobs | None, port: int, start_timeout_s: float, *, example: tuple[str, int]
) -> Jobs:
  if not jobs or any(count < 1 for _, count in jobs.values()):
    raise ConfigError(
      f"{name}.jobs is {jobs}; it must give each job a place and a number of 1 or more, such as "
      f"{ {'worker': example} }."
    )
  if not 0 < port < 2**16:
    raise ConfigError(f"{name}.port is {port}; it must be from 1 to 65535.")
  if not start_timeout_s > 0:
    raise ConfigError(f"{name}.start_timeout_s is {start_timeout_s}; it must be above 0 seconds.")
  return jobs


def _imported(module: str, *, user: str, package: str) -> Any:
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ConfigError(
      f"@{user} needs the package {package}, which cannot be imported ({error}); start with "
      f"`uv run --extra {user} launch.py`, or `pip install -e '.[{user}]'` first."
    ) from error


# ---- Kubernetes ----


class _Pods:
  """As much of Kubernetes' client as TensorFlow's resolver uses, for one namespace's living pods.

  The resolver itself looks in all namespaces, stops at a pod that does not run, also at one that
  has ended, and takes the address of the pod's node.
  """

  def __init__(self, api: Any, namespace: str) -> None:
    """Asks nothing yet."""
    self._api, self.namespace = api, namespace
    self.addresses: dict[str, str] = {}
    """Of all living pods, by name; "" of one that does not run."""

  def afresh(self, resolver: ClusterResolver) -> tf.train.ClusterSpec:
    """Returns the cluster of this moment."""
    self.addresses.clear()
    return resolver.cluster_spec()

  def waiting(self) -> str:
    """Returns " (a, b not running yet)", or "" if all run."""
    names = sorted(name for name, address in self.addresses.items() if not address)
    return f" ({', '.join(names)} not running yet)" if names else ""

  def list_pod_for_all_namespaces(self, *, label_selector: str) -> types.SimpleNamespace:
    """Returns the running pods that a selector finds, each with its own address."""
    found = self._api.list_namespaced_pod(
      self.namespace, label_selector=label_selector, _request_timeout=_REQUEST_S
    )
    living = {
      pod.metadata.name: _ip(pod) if pod.status.phase == "Running" else ""
      for pod in found.items
      if pod.metadata.deletion_timestamp is None and pod.status.phase not in _ENDED
    }
    self.addresses.update(living)
    return types.SimpleNamespace(items=[_running(*each) for each in living.items() if each[1]])


def _ip(pod: Any) -> str:
  ip = pod.status.pod_ip or ""
  return f"[{ip}]" if ":" in ip else ip


def _running(name: str, ip: str) -> types.SimpleNamespace:
  return types.SimpleNamespace(
    metadata=types.SimpleNamespace(name=name),
    status=types.SimpleNamespace(phase="Running", host_ip=ip),
  )


def _pod_address(pods: _Pods, name: str, port: int) -> str:
  if name not in pods.addresses:
    raise ConfigError(
      f"this pod, {name!r}, is not among those that kubernetes.jobs finds in the namespace "
      f"{pods.namespace!r}: {', '.join(sorted(pods.addresses)) or 'none'}; give it a label that "
      "is selected, or, if its name is another, set POD_NAME to its field metadata.name."
    )
  return f"{pods.addresses[name]}:{port}"


def _kubernetes_api() -> tuple[Any, tuple[type[Exception], ...]]:
  client = _imported("kubernetes.client", user="kubernetes", package="kubernetes")
  config = importlib.import_module("kubernetes.config")
  http = importlib.import_module("urllib3.exceptions")
  try:
    config.load_incluster_config()
  except config.ConfigException as error:
    raise ConfigError(
      f"this is no pod of Kubernetes, or one without a service account's token ({error}); start "
      "the processes as pods, with automountServiceAccountToken, or use @tf_config."
    ) from error
  return client.CoreV1Api(), (client.ApiException, http.HTTPError)


def _own_namespace() -> str:
  try:
    return Path(_NAMESPACE_FILE).read_text().strip()
  except OSError as error:
    raise ConfigError(
      f"this pod's namespace cannot be read ({error}); set kubernetes.namespace."
    ) from error


# ---- Google Compute Engine ----


class _Compute:
  """As much of Compute Engine's client as TensorFlow's resolver uses, with what it gets wrong.

  The resolver gives a parameter a name that the API does not have, and fails at a group in which
  no machine runs.
  """

  def __init__(self, api: Any) -> None:
    """Asks nothing yet."""
    self._api = api

  def instances(self) -> Any:
    """Returns the API's own."""
    return self._api.instances()

  def instanceGroups(self) -> _Compute:  # noqa: N802
    """Returns what lists a group."""
    return self

  def listInstances(self, *, instanceGroups: str, **options: Any) -> _Page:  # noqa: N802, N803
    """Returns the request for the first page."""
    groups = self._api.instanceGroups()
    return _Page(groups.listInstances(instanceGroup=instanceGroups, **options))

  def listInstances_next(  # noqa: N802
    self, *, previous_request: _Page, previous_response: Any
  ) -> _Page | None:
    """Returns the request for the next page; None after the last."""
    groups = self._api.instanceGroups()
    request = groups.listInstances_next(
      previous_request=previous_request.request, previous_response=previous_response
    )
    return None if request is None else _Page(request)


class _Page:
  """A request whose answer always has "items"."""

  def __init__(self, request: Any) -> None:
    """Sends nothing yet."""
    self.request = request

  def execute(self) -> dict[str, Any]:
    """Sends it."""
    return {"items": [], **self.request.execute()}


def _together(groups: Mapping[str, ClusterResolver]) -> tf.train.ClusterSpec:
  """Returns the cluster of all groups; TensorFlow's UnionResolver would ask twice."""
  found = {job: resolver.cluster_spec() for job, resolver in groups.items()}
  return tf.train.ClusterSpec({job: _addresses(spec) for job, spec in found.items()})


def _machine_address(spec: tf.train.ClusterSpec, address: str, where: str) -> str:
  if address not in _addresses(spec):
    raise ConfigError(
      f"this machine, {address}, is not among those that gce.jobs finds in {where}: "
      f"{', '.join(_addresses(spec)) or 'none'}; add it to a group that gce.jobs names, or its "
      "group to gce.jobs."
    )
  return address


def _compute_api() -> tuple[Any, tuple[type[Exception], ...]]:
  # TensorFlow's resolver would make the client itself with oauth2client, which is abandoned and
  # does not come with this package.
  named = {"user": "gce", "package": "google-api-python-client"}
  discovery = _imported("googleapiclient.discovery", **named)
  errors = importlib.import_module("googleapiclient.errors")
  auth = importlib.import_module("google.auth")
  auth_errors = importlib.import_module("google.auth.exceptions")
  http = importlib.import_module("httplib2")
  try:
    credentials, _ = auth.default(scopes=[_SCOPE])
  except auth_errors.DefaultCredentialsError as error:
    reason = str(error).partition(". ")[0].rstrip(".")
    raise ConfigError(
      f"there are no application-default credentials ({reason}); give the machine a service "
      "account, or put the path of a key file into GOOGLE_APPLICATION_CREDENTIALS."
    ) from error
  api = discovery.build("compute", "v1", credentials=credentials, cache_discovery=False)
  return api, (errors.HttpError, auth_errors.GoogleAuthError, http.HttpLib2Error, OSError)


def _metadata(path: str) -> str:
  """Returns what Compute Engine tells each machine about itself.

  GCE_METADATA_HOST names another server, as it does for Google's own clients.
  """
  host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
  request = urllib.request.Request(
    f"http://{host}/computeMetadata/v1/{path}", headers={"Metadata-Flavor": "Google"}
  )
  direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
  try:
    with direct.open(request, timeout=_REQUEST_S) as answer:
      return answer.read().decode().strip()
  except (OSError, urllib.error.HTTPError) as error:
    raise ConfigError(
      f"this is no machine of Google Compute Engine: {host} does not answer ({error}); start the "
      "processes on machines of an instance group, or use @tf_config."
    ) from error
