"""Resolvers that ask an API: every process must find the same cluster, and its own place in it.

The clients are the real ones; servers on loopback answer them as Kubernetes and Compute Engine do.
"""

import functools
import http.server
import importlib
import json
import ssl
import sys
import threading
from urllib.parse import parse_qsl, urlsplit

import pytest
import tensorflow as tf
import trustme
from google.auth.compute_engine import _metadata
from googleapiclient import discovery
from kubernetes.config import incluster_config, kube_config

from framework.errors import ConfigError
from framework.strategies.cluster import cloud
from framework.strategies.cluster import identity as cluster
from framework.strategies.cluster.identity import ClusterError

TWO = {"worker": ("app=digits", 2)}
GROUP = {"worker": ("digits", 2)}


@pytest.fixture
def serve(monkeypatch):
  """Returns what starts a server: `answer(path, query, headers, body)` is a status and JSON."""
  monkeypatch.setattr(cloud, "_POLL_S", 0.001)
  monkeypatch.setenv("no_proxy", "127.0.0.1")
  servers = []

  def start(answer, tls=None):
    class Handler(http.server.BaseHTTPRequestHandler):
      def do_GET(self):
        url, length = urlsplit(self.path), int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length) or "{}")
        status, found = answer(url.path, dict(parse_qsl(url.query)), self.headers, body)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Metadata-Flavor", "Google")
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

      do_POST = do_GET  # noqa: N815
      log_message = print

    servers.append(server := http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
    if tls:
      server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    return f"127.0.0.1:{server.server_port}"

  yield start
  for server in servers:
    server.shutdown()
    server.server_close()


def now(states):
  """The state that an API is in when it is asked: each in turn, the last one from then on."""
  return states.pop(0) if len(states) > 1 else states[0]


def places(resolver):
  """What a strategy reads from a resolver."""
  spec = resolver.cluster_spec().as_dict()
  return spec, resolver.task_type, resolver.task_id, resolver.rpc_layer


# ---- Kubernetes ----


def pod(name, ip=None, phase="Running", *, namespace="ml", app="digits", leaving=None):
  labels = {"namespace": namespace, "labels": {"app": app}, "deletionTimestamp": leaving}
  return {"metadata": {"name": name, **labels}, "status": {"phase": phase, "podIP": ip}}


RUNNING = [pod("digits-0", "10.0.0.7"), pod("digits-1", "10.0.0.3")]
FOUND = {"worker": ["10.0.0.7:8470", "10.0.0.3:8470"]}
PENDING = pod("digits-1", phase="Pending")
ENDED = [pod("digits-3", "10.0.0.8", "Failed"), pod("digits-4", "10.0.0.9", "Succeeded")]
MANY = [*RUNNING, pod("digits-2", "10.0.0.9")]


def pods_of(states):
  def answer(path, query, headers, body):
    del body
    state = now(states) if headers["Authorization"].lower() == "bearer a token" else 401
    if isinstance(state, int):
      return state, {"kind": "Status", "code": state}
    items = [
      each
      for each in state
      if path == f"/api/v1/namespaces/{each['metadata']['namespace']}/pods"
      and query == {"labelSelector": f"app={each['metadata']['labels']['app']}"}
    ]
    return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}

  return answer


@pytest.fixture
def inside(monkeypatch, tmp_path, serve):
  """Returns what puts this process into the pod `name` of a cluster whose API has these states."""

  def put(*states, name="digits-0"):
    authority, tls = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    (tmp_path / "token").write_text("a token")
    (tmp_path / "namespace").write_text("ml\n")
    host, port = serve(pods_of(list(states)), tls).split(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr(cloud, "_NAMESPACE_FILE", str(tmp_path / "namespace"))
    monkeypatch.delenv("POD_NAME", raising=False)
    monkeypatch.setattr(cloud.socket, "gethostname", lambda: name)

  return put


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("own", "place"), [("digits-0", 0), ("digits-10", 1), ("digits-2", 2)])
def test_every_pod_finds_the_same_cluster_and_itself(own, place, order, inside):
  pods = [
    pod("digits-0", "10.0.0.7"),
    pod("digits-2", "10.0.0.2"),
    pod("digits-10", "10.0.0.3"),
    *ENDED,
    pod("digits-5", "10.0.0.10", leaving="2024-01-01T00:00:00Z"),
    pod("digits-6", "10.0.0.11", namespace="another"),
    pod("server-0", "10.0.0.12", app="server"),
  ]
  inside(pods[::order], name=own)
  found = cloud.kubernetes(jobs={"worker": ("app=digits", 3)}, port=2222)
  addresses = ["10.0.0.7:2222", "10.0.0.3:2222", "10.0.0.2:2222"]
  assert places(found) == ({"worker": addresses}, "worker", place, "grpc")
  assert cluster.workers(found)[1] == place


def test_the_jobs_of_parameter_servers(inside):
  servers = [pod("server-1", "10.0.0.5", app="ps"), pod("server-0", "10.0.0.6", app="ps")]
  inside([*servers, pod("boss", "10.0.0.9", app="boss"), *RUNNING], name="server-1")
  found = cloud.kubernetes(jobs={"chief": ("app=boss", 1), **TWO, "ps": ("app=ps", 2)})
  spec = {"chief": ["10.0.0.9:8470"], **FOUND, "ps": ["10.0.0.6:8470", "10.0.0.5:8470"]}
  assert places(found) == (spec, "ps", 1, "grpc")


def test_names_and_addresses(inside, monkeypatch):
  inside([pod("digits-0", "fd00::1", namespace="v6"), *RUNNING], name="another-hostname")
  monkeypatch.setenv("POD_NAME", "digits-1")
  assert cloud.kubernetes(jobs=TWO).task_id == 1
  assert cloud.kubernetes(jobs=TWO, pod="digits-0").task_id == 0
  found = cloud.kubernetes(jobs={"worker": ("app=digits", 1)}, namespace="v6", pod="digits-0")
  assert places(found)[0] == {"worker": ["[fd00::1]:8470"]}


def test_a_kubeconfig_in_place_of_a_service_account(serve, monkeypatch, tmp_path):
  config = {
    "clusters": [{"name": "c", "cluster": {"server": f"http://{serve(pods_of([RUNNING]))}"}}],
    "users": [{"name": "u", "user": {"token": "a token"}}],
    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    "current-context": "x",
  }
  (tmp_path / "config").write_text(json.dumps(config))
  monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
  monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
  found = cloud.kubernetes(jobs=TWO, namespace="ml", pod="digits-1")
  assert places(found) == (FOUND, "worker", 1, "grpc")


OWN_PENDING = [pod("digits-0", phase="Pending"), *(pod(f"x-{i}", f"10.0.1.{i}") for i in range(2))]


@pytest.mark.parametrize("early", [OWN_PENDING[:1], OWN_PENDING, [RUNNING[0], PENDING], MANY, 503])
def test_it_waits_and_keeps_what_it_finds(early, inside, monkeypatch):
  inside(early, early, RUNNING, RUNNING[:1])
  monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [kind] * 3)
  found = cloud.kubernetes(jobs=TWO)
  assert [places(found)[0], places(found)[0]] == [FOUND, FOUND]
  assert found.num_accelerators() == {"GPU": 3}


CHECK = "check labels in the namespace 'ml', POD_NAME, and the Role with the verb 'list' on pods."
COUNT = "give each job a place and a count of 1 or more."
TWICE = {"worker": ["10.0.0.7:8470"] * 2}


@pytest.mark.parametrize(
  ("state", "options", "line"),
  [
    ([], {"jobs": None}, f"kubernetes.jobs is None; {COUNT}"),
    ([], {"jobs": {"ps": ("a", 0)}}, f"kubernetes.jobs is {{'ps': ('a', 0)}}; {COUNT}"),
    ([], {"port": 0}, "kubernetes.port is 0; it must be from 1 to 65535."),
    ([], {"start_timeout_s": 0}, "kubernetes.start_timeout_s is 0; it must be above 0 seconds."),
    (403, {}, f"kubernetes.jobs is {TWO}, but the API refuses (403: Forbidden); {CHECK}"),
    (RUNNING, {"pod": "x"}, "this process, 'x', is not among those that kubernetes.jobs finds "
     f"(digits-0, digits-1); {CHECK}"),
    ([RUNNING[0], pod("digits-1", "10.0.0.7")], {},
     f"kubernetes.jobs finds an address twice ({TWICE}); {CHECK}"),
    (MANY, {"start_timeout_s": 0.01}, "kubernetes.jobs finds 3 of 2 worker running after 0.01 s; "
     "select fewer or correct the number."),
  ],
)  # fmt: skip
def test_mistakes(state, options, line, inside):
  inside(state)
  with pytest.raises(ConfigError) as caught:
    cloud.kubernetes(**{"jobs": TWO, **options})
  assert str(caught.value) == line


MISSING = [
  ([RUNNING[0], *ENDED], "finds 1 of 2 worker running after 0.01 s"),
  ([RUNNING[0], PENDING], "finds 1 of 2 worker running after 0.01 s; not running: digits-1"),
  (503, "gets no answer (Service Unavailable) after 0.01 s"),
]


@pytest.mark.parametrize(("state", "line"), MISSING)
def test_pods_that_are_missing(state, line, inside):
  inside(state)
  with pytest.raises(ClusterError) as caught:
    cloud.kubernetes(jobs=TWO, start_timeout_s=0.01)
  assert str(caught.value) == f"kubernetes.jobs {line}"


# ---- Compute Engine ----


MACHINES = {"digits": {"vm-b": "10.0.0.2", "vm-a": "10.0.0.10"}, "boss": {"vm-c": "10.0.0.3"}}
ZONE = "/compute/v1/projects/my-project/zones/my-zone/"
METADATA = "/computeMetadata/v1/"
ACCOUNT = f"{METADATA}instance/service-accounts/default/"


def compute_of(states, own, home):
  """Compute Engine with pages of one item, and the metadata server of the machine `own`."""
  instance = {"name": own, "zone": f"projects/123/zones/{home}-zone"}
  known = {
    METADATA: {"instance": instance, "project": {"projectId": f"{home}-project"}},
    ACCOUNT: {"email": "me", "scopes": []},
    f"{ACCOUNT}token": {"access_token": "a key", "expires_in": 3600, "token_type": "Bearer"},
    "/": {},
  }

  groups = None

  def answer(path, query, headers, body):
    nonlocal groups
    if headers["Metadata-Flavor"] == "Google":
      return (200, known[path]) if path in known else (404, {})
    if not path.startswith(ZONE) or headers["Authorization"] != "Bearer a key":
      return 401, {}
    if path == f"{ZONE}instances":
      found = {name: ip for group in groups.values() for name, ip in group.items()}
      items = [
        {"name": name, "networkInterfaces": [{"networkIP": ip}]}
        for name, ip in {"vm-0": "10.0.0.1", **found}.items()
      ]
    else:
      assert body == {"instanceState": "RUNNING"}
      groups = groups if "pageToken" in query else now(states)
      group = path.removeprefix(f"{ZONE}instanceGroups/").removesuffix("/listInstances")
      if isinstance(groups, int) or group not in groups:
        return groups if isinstance(groups, int) else 404, {"error": {"message": "no group"}}
      items = [{"instance": f"https://x/instances/{name}"} for name in groups[group]]
    page = int(query.get("pageToken", 0))
    more = {"nextPageToken": str(page + 1)} if page + 1 < len(items) else {}
    return 200, {**({"items": items[page : page + 1]} if items else {}), **more}

  return answer


@pytest.fixture
def machine(monkeypatch, serve):
  """Returns what makes this process's machine the one of this name, and gives it this API."""
  build = discovery.build

  def put(*states, name="vm-b", home="my"):
    address = serve(compute_of(list(states), name, home))
    endpoint = {"api_endpoint": f"http://{address}/compute/v1/"}
    monkeypatch.setattr(discovery, "build", functools.partial(build, client_options=endpoint))
    monkeypatch.setenv("GCE_METADATA_HOST", address)
    monkeypatch.setenv("GCE_METADATA_IP", address)
    importlib.reload(_metadata)

  yield put
  monkeypatch.undo()
  importlib.reload(_metadata)


@pytest.mark.parametrize(("name", "place"), [("vm-a", 0), ("vm-b", 1)])
@pytest.mark.parametrize("early", [MACHINES, {"digits": {"vm-a": "1", "vm-b": "2", "x": "3"}}, 503])
def test_every_machine_finds_the_same_cluster_and_itself(name, place, early, machine):
  machine(early, MACHINES, name=name)
  found = cloud.gce(jobs=GROUP, port=2222, start_timeout_s=60.0)
  assert places(found) == (
    {"worker": ["10.0.0.10:2222", "10.0.0.2:2222"]}, "worker", place, "grpc",
  )  # fmt: skip


def test_a_group_a_job_in_another_project_and_zone(machine):
  machine(MACHINES, name="vm-c", home="another")
  jobs = {"chief": ("boss", 1), **GROUP}
  found = cloud.gce(jobs=jobs, project="my-project", zone="my-zone", start_timeout_s=60.0)
  spec = {"chief": ["10.0.0.3:8470"], "worker": ["10.0.0.10:8470", "10.0.0.2:8470"]}
  assert places(found) == (spec, "chief", 0, "grpc")


GCE_CHECK = (
  "check the groups in {'project': 'my-project', 'zone': 'my-zone'}, and the service account's "
  "role roles/compute.viewer."
)


@pytest.mark.parametrize(
  ("state", "kind", "line"),
  [
    ({}, ConfigError, f"gce.jobs is {GROUP}, but the API refuses (404: no group); {GCE_CHECK}"),
    ({"digits": {}}, ConfigError,
     f"this process, 'vm-b', is not among those that gce.jobs finds (none); {GCE_CHECK}"),
    ({"digits": {"vm-b": "10.0.0.2"}}, ClusterError,
     "gce.jobs finds 1 of 2 worker running after 0.01 s"),
  ],
)  # fmt: skip
def test_machines_that_are_not_there(state, kind, line, machine):
  machine(state)
  with pytest.raises(kind) as caught:
    cloud.gce(jobs=GROUP, start_timeout_s=0.01)
  assert str(caught.value) == line


@pytest.mark.parametrize(
  ("resolver", "env", "reason"),
  [
    (cloud.kubernetes, {}, "Invalid kube-config file. No configuration found."),
    (cloud.gce, {"GCE_METADATA_HOST": "127.0.0.1:9"}, "[Errno 111] Connection refused"),
    (cloud.gce, {"GOOGLE_APPLICATION_CREDENTIALS": "/none"}, "File /none was not found."),
  ],
)  # fmt: skip
def test_there_is_no_access(resolver, env, reason, inside, machine, monkeypatch):
  inside(RUNNING)
  machine(MACHINES)
  monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", "/nonexistent")
  monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", "/nonexistent")
  for name, value in env.items():
    monkeypatch.setenv(name, value)
  with pytest.raises(ConfigError) as caught:
    resolver(jobs=TWO)
  assert str(caught.value) == (
    f"@{resolver.__name__} has no access to an API ({reason}); start with `uv run --extra "
    f"{resolver.__name__} launch.py`, in a pod or on a machine with a service account, or use "
    "@tf_config."
  )


@pytest.mark.parametrize(
  ("resolver", "package"), [(cloud.kubernetes, "kubernetes"), (cloud.gce, "googleapiclient")]
)
def test_the_package_is_missing(resolver, package, monkeypatch):
  monkeypatch.setitem(sys.modules, package, None)
  with pytest.raises(ConfigError, match=rf"\(.*{package}.*\); start with `uv run --extra "):
    resolver(jobs=TWO)
