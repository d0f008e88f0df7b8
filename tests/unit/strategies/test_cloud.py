"""Resolvers that ask an API: every process must find the same cluster, and its own place in it.

The clients are fakes that are as strict about names as the real ones. Neither a real Kubernetes API
nor Compute Engine has been asked.
"""

import http.server
import re
import sys
import threading
import types
from types import SimpleNamespace

import pytest
import tensorflow as tf

from framework.errors import ConfigError
from framework.strategies import cloud, cluster
from framework.strategies.cluster import ClusterError

TWO = {"worker": ("app=digits", 2)}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  monkeypatch.setattr(cloud, "_POLL_S", 0.001)


def module(monkeypatch, name, **contents):
  made = types.ModuleType(name)
  vars(made).update(contents)
  monkeypatch.setitem(sys.modules, name, made)


def places(resolver):
  """What a strategy reads off a resolver."""
  return (
    resolver.cluster_spec().as_dict(),
    resolver.task_type,
    resolver.task_id,
    resolver.rpc_layer,
  )


# ---- Kubernetes ----


class ApiException(Exception):  # noqa: N818  (as in the package)
  def __init__(self, status, reason):
    super().__init__(f"({status})\nReason: {reason}\n")
    self.status, self.reason = status, reason


class ConfigException(Exception):  # noqa: N818  (as in the package)
  pass


def pod(name, ip, *, phase="Running", namespace="ml", app="digits", leaving=False):
  return SimpleNamespace(
    metadata=SimpleNamespace(
      name=name, namespace=namespace, labels={"app": app}, deletion_timestamp=leaving or None
    ),
    status=SimpleNamespace(phase=phase, pod_ip=ip, host_ip="192.168.0.1"),
  )


class Pods:
  """An API server: `answers` holds what it has at each request, the last one for ever."""

  def __init__(self, *answers):
    self.answers, self.requests = list(answers), 0

  def list_namespaced_pod(self, namespace, *, label_selector=None, _request_timeout=None):
    del _request_timeout
    self.requests += 1
    answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
    if isinstance(answer, Exception):
      raise answer
    key, value = label_selector.split("=")
    return SimpleNamespace(
      items=[
        each
        for each in answer
        if each.metadata.namespace == namespace and each.metadata.labels.get(key) == value
      ]
    )


@pytest.fixture
def inside(monkeypatch, tmp_path):
  """Returns what puts this process into the pod `name` of a cluster with this API server."""

  def put(pods, name="digits-0"):
    (tmp_path / "namespace").write_text("ml\n")
    module(monkeypatch, "kubernetes")
    module(monkeypatch, "kubernetes.client", CoreV1Api=lambda: pods, ApiException=ApiException)
    module(
      monkeypatch,
      "kubernetes.config",
      load_incluster_config=lambda: None,
      ConfigException=ConfigException,
    )
    monkeypatch.setattr(cloud, "_NAMESPACE_FILE", str(tmp_path / "namespace"))
    monkeypatch.delenv("POD_NAME", raising=False)
    monkeypatch.setattr(cloud.socket, "gethostname", lambda: name)

  return put


RUNNING = [pod("digits-0", "10.0.0.7"), pod("digits-1", "10.0.0.3")]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("own", [0, 1])
def test_every_pod_finds_the_same_cluster_and_itself(own, order, inside):
  others = [
    pod("digits-2", "10.0.0.8", phase="Failed"),
    pod("digits-3", "10.0.0.9", phase="Succeeded"),
    pod("digits-4", "10.0.0.10", leaving=True),
    pod("digits-5", "10.0.0.11", namespace="another"),
    pod("server-0", "10.0.0.12", app="server"),
  ]
  inside(Pods([*RUNNING, *others][::order]), f"digits-{own}")
  found = cloud.kubernetes(jobs=TWO, port=2222)
  assert places(found) == (
    {"worker": ["10.0.0.7:2222", "10.0.0.3:2222"]},
    "worker",
    own,
    "grpc",
  )
  assert cluster.workers(found)[1] == own


def test_the_jobs_of_parameter_servers(inside):
  pods = [
    pod("server-1", "10.0.0.5", app="server"),
    pod("server-0", "10.0.0.6", app="server"),
    pod("boss", "10.0.0.9", app="boss"),
    *RUNNING,
  ]
  inside(Pods(pods), "server-1")
  jobs = {"chief": ("app=boss", 1), **TWO, "ps": ("app=server", 2)}
  assert places(cloud.kubernetes(jobs=jobs)) == (
    {
      "chief": ["10.0.0.9:8470"],
      "worker": ["10.0.0.7:8470", "10.0.0.3:8470"],
      "ps": ["10.0.0.6:8470", "10.0.0.5:8470"],
    },
    "ps",
    1,
    "grpc",
  )


def test_the_pods_name_by_variable_and_by_option(inside, monkeypatch):
  inside(Pods(RUNNING), "another-hostname")
  monkeypatch.setenv("POD_NAME", "digits-1")
  assert cloud.kubernetes(jobs=TWO).task_id == 1
  assert cloud.kubernetes(jobs=TWO, pod="digits-0").task_id == 0


def test_another_namespace(inside):
  inside(Pods([pod("digits-0", "10.0.0.1", namespace="another"), *RUNNING]))
  found = cloud.kubernetes(jobs={"worker": ("app=digits", 1)}, namespace="another")
  assert found.cluster_spec().as_dict() == {"worker": ["10.0.0.1:8470"]}


def test_addresses_of_ipv6(inside):
  inside(Pods([pod("digits-0", "fd00::1"), pod("digits-1", "fd00::2")]))
  peers, _ = cluster.workers(cloud.kubernetes(jobs=TWO))
  assert [peer.address for peer in peers] == ["[fd00::1]:8470", "[fd00::2]:8470"]


@pytest.mark.parametrize(
  "early",
  [
    pytest.param([pod("digits-0", None, phase="Pending")], id="this one pending"),
    pytest.param(RUNNING[:1], id="one to come"),
    pytest.param([RUNNING[0], pod("digits-1", "10.0.0.3", phase="Pending")], id="another pending"),
    pytest.param([*RUNNING, pod("digits-2", "10.0.0.9")], id="an old one to go"),
    pytest.param(ApiException(503, "Service Unavailable"), id="the API is down"),
    pytest.param(ApiException(0, "Handshake status"), id="the API is not reached"),
  ],
)
def test_it_waits(early, inside):
  pods = Pods(early, early, RUNNING)
  inside(pods)
  assert places(cloud.kubernetes(jobs=TWO))[0] == {"worker": ["10.0.0.7:8470", "10.0.0.3:8470"]}
  assert pods.requests == 3


def test_the_cluster_stays_what_it_was(inside):
  pods = Pods(RUNNING, [pod("digits-0", "10.0.0.99")])
  inside(pods)
  found = cloud.kubernetes(jobs=TWO)
  specs = [places(found)[0] for _ in range(2)]
  assert specs == [{"worker": ["10.0.0.7:8470", "10.0.0.3:8470"]}] * 2
  assert pods.requests == 1


def test_gpus_are_counted(inside, monkeypatch):
  inside(Pods(RUNNING))
  monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [kind] * 3)
  found = cloud.kubernetes(jobs=TWO)
  assert found.num_accelerators() == {"GPU": 3}
  assert type(found)(found.cluster_spec()).num_accelerators() == {}  # unless it is told


KUBERNETES_MISTAKES = [
  (
    Pods(RUNNING),
    {"jobs": None},
    "kubernetes.jobs is None; it must give each job a place and a number of 1 or more, such as "
    "{'worker': ('app=digits', 2)}.",
  ),
  (
    Pods(RUNNING),
    {"jobs": {"worker": ("app=digits", 0)}},
    "kubernetes.jobs is {'worker': ('app=digits', 0)}; it must give each job a place and a number "
    "of 1 or more, such as {'worker': ('app=digits', 2)}.",
  ),
  (Pods(RUNNING), {"port": 0}, "kubernetes.port is 0; it must be from 1 to 65535."),
  (
    Pods(RUNNING),
    {"start_timeout_s": 0.0},
    "kubernetes.start_timeout_s is 0.0; it must be above 0 seconds.",
  ),
  (
    Pods(RUNNING),
    {"pod": "other-0"},
    "this pod, 'other-0', is not among those that kubernetes.jobs finds in the namespace 'ml': "
    "digits-0, digits-1; give it a label that is selected, or, if its name is another, set "
    "POD_NAME to its field metadata.name.",
  ),
  (
    Pods(RUNNING),
    {"namespace": "another"},
    "this pod, 'digits-0', is not among those that kubernetes.jobs finds in the namespace "
    "'another': none; give it a label that is selected, or, if its name is another, set POD_NAME "
    "to its field metadata.name.",
  ),
  (
    Pods(RUNNING),
    {"jobs": {**TWO, "chief": ("app=digits", 1)}},
    "kubernetes.jobs finds 10.0.0.7:8470 as chief-0 and worker-0; each pod must match one "
    "selector, and pods with hostNetwork must not share a node.",
  ),
  (
    Pods([pod("digits-0", "10.0.0.7"), pod("digits-1", "10.0.0.7")]),
    {},
    "kubernetes.jobs finds 10.0.0.7:8470 as worker-0 and worker-1; each pod must match one "
    "selector, and pods with hostNetwork must not share a node.",
  ),
  (
    Pods([*RUNNING, pod("digits-2", "10.0.0.9")]),
    {"start_timeout_s": 0.01},
    "kubernetes.jobs finds 3 of 2 worker within 0.01 s; make 'app=digits' stand for just those "
    "that train, or give the right number.",
  ),
  (
    Pods(ApiException(403, "Forbidden")),
    {},
    "kubernetes.jobs is {'worker': ('app=digits', 2)}, but the API refuses to look (403: "
    "Forbidden); check the selectors, and give the pods' service account a Role with the verb "
    "'list' on pods in the namespace 'ml'.",
  ),
]


@pytest.mark.parametrize(("pods", "options", "line"), KUBERNETES_MISTAKES)
def test_mistakes_with_kubernetes(pods, options, line, inside):
  inside(pods)
  with pytest.raises(ConfigError) as caught:
    cloud.kubernetes(**{"jobs": TWO, **options})
  assert str(caught.value) == line


LATE = [
  ([RUNNING[0]], "finds 1 of 2 worker within 0.01 s"),
  (
    [RUNNING[0], pod("digits-1", None, phase="Failed")],
    "finds 1 of 2 worker within 0.01 s",
  ),
  (
    [RUNNING[0], pod("digits-1", None, phase="Pending")],
    "finds 1 of 2 worker (digits-1 not running yet) within 0.01 s",
  ),
  (
    [pod("digits-0", None, phase="Pending"), *[pod(f"x-{i}", f"10.0.1.{i}") for i in range(2)]],
    "finds all but this process (digits-0 not running yet) within 0.01 s",
  ),
  (ApiException(503, "Service Unavailable"), "gets no answer (Service Unavailable) within 0.01 s"),
  (ApiException(0, "SSLError"), "gets no answer (SSLError) within 0.01 s"),
]


@pytest.mark.parametrize(("answer", "line"), LATE)
def test_pods_that_do_not_come(answer, line, inside):
  inside(Pods(answer))
  with pytest.raises(ClusterError) as caught:
    cloud.kubernetes(jobs=TWO, start_timeout_s=0.01)
  assert str(caught.value) == f"kubernetes.jobs {line}"


def test_a_pod_that_has_gone_is_not_waited_for(inside):
  inside(Pods([RUNNING[0], pod("digits-1", None, phase="Pending")], [RUNNING[0]]))
  with pytest.raises(ClusterError, match=r"finds 1 of 2 worker within 0\.05 s$"):
    cloud.kubernetes(jobs=TWO, start_timeout_s=0.05)


def test_the_package_kubernetes_is_missing(monkeypatch):
  monkeypatch.setitem(sys.modules, "kubernetes", None)
  with pytest.raises(ConfigError) as caught:
    cloud.kubernetes(jobs=TWO)
  assert re.fullmatch(
    r"@kubernetes needs the package kubernetes, which cannot be imported \(.+\); start with "
    r"`uv run --extra kubernetes launch\.py`, or `pip install -e '\.\[kubernetes\]'` first\.",
    str(caught.value),
  )


def test_this_is_no_pod(inside):
  inside(Pods(RUNNING))

  def refuse():
    raise ConfigException("Service host/port is not set.")

  sys.modules["kubernetes.config"].load_incluster_config = refuse
  with pytest.raises(ConfigError) as caught:
    cloud.kubernetes(jobs=TWO)
  assert str(caught.value) == (
    "this is no pod of Kubernetes, or one without a service account's token (Service host/port is "
    "not set.); start the processes as pods, with automountServiceAccountToken, or use @tf_config."
  )


def test_a_namespace_that_cannot_be_read(inside, monkeypatch):
  inside(Pods(RUNNING))
  monkeypatch.setattr(cloud, "_NAMESPACE_FILE", "/nonexistent/namespace")
  with pytest.raises(ConfigError, match=r"cannot be read \(.+\); set kubernetes\.namespace\.$"):
    cloud.kubernetes(jobs=TWO)
  assert cloud.kubernetes(jobs=TWO, namespace="ml").task_id == 0


class AllPods:
  """What TensorFlow's resolver asks when nobody stands between."""

  def __init__(self, pods):
    self.pods = pods

  def list_pod_for_all_namespaces(self, label_selector):
    del label_selector
    return SimpleNamespace(items=self.pods)


def test_what_tensorflows_own_resolver_makes_of_pods():
  """The address of the node, no task; and a pod that has ended is an error."""
  make = tf.distribute.cluster_resolver.KubernetesClusterResolver
  own = make({"worker": ["app=digits"]}, override_client=AllPods(RUNNING))
  assert places(own)[:3] == ({"worker": ["192.168.0.1:8470"] * 2}, None, None)
  ended = AllPods([*RUNNING, pod("digits-2", "10.0.0.8", phase="Succeeded")])
  with pytest.raises(RuntimeError, match="is not running"):
    make({"worker": ["app=digits"]}, override_client=ended).cluster_spec()


def test_what_tensorflows_own_resolver_asks_for_inside_a_pod(inside):
  """A kubeconfig, which pods do not have; all it did well before was in vain."""
  inside(Pods(RUNNING))

  def no_file():
    raise ConfigException("Invalid kube-config file. No configuration found.")

  for name in ("client", "config"):
    setattr(sys.modules["kubernetes"], name, sys.modules[f"kubernetes.{name}"])
  sys.modules["kubernetes"].config.load_kube_config = no_file
  own = tf.distribute.cluster_resolver.KubernetesClusterResolver({"worker": ["app=digits"]})
  with pytest.raises(ConfigException, match="kube-config"):
    own.cluster_spec()


# ---- Google Compute Engine ----


class HttpError(Exception):
  def __init__(self, status_code, reason):
    super().__init__(f"<HttpError {status_code} when requesting ...>\nDetails")
    self.status_code, self.reason = status_code, reason


class GoogleAuthError(Exception):
  pass


class DefaultCredentialsError(GoogleAuthError):
  pass


class HttpLib2Error(Exception):
  pass


GROUPS = {"digits": {"vm-b": "10.0.0.2", "vm-a": "10.0.0.10"}}
GCE_TWO = {"worker": ("digits", 2)}


class Compute:
  """An API with pages of one machine each; `answers` as in `Pods`."""

  def __init__(self, *answers):
    self.answers, self.pages = list(answers), 0

  def instanceGroups(self):  # noqa: N802
    return self

  def instances(self):
    return self

  def listInstances(self, *, project, zone, instanceGroup, body=None, orderBy=None):  # noqa: N802, N803
    assert (project, zone, orderBy) == ("my-project", "my-zone", "name")
    assert body == {"instanceState": "RUNNING"}
    self.answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
    return self.page(instanceGroup, 0)

  def listInstances_next(self, *, previous_request, previous_response):  # noqa: N802
    if "nextPageToken" not in previous_response:
      return None
    return self.page(previous_request.group, previous_response["nextPageToken"])

  def page(self, group, number):
    return SimpleNamespace(group=group, execute=lambda: self.listed(group, number))

  def listed(self, group, number):
    self.pages += 1
    if isinstance(self.answer, Exception):
      raise self.answer
    if group not in self.answer:
      raise HttpError(404, f"The resource {group!r} was not found")
    names = sorted(self.answer[group])
    if not names:
      return {"kind": "compute#instanceGroupsListInstances"}
    url = f"https://compute/projects/my-project/zones/my-zone/instances/{names[number]}"
    more = {"nextPageToken": number + 1} if number + 1 < len(names) else {}
    return {"items": [{"instance": url, "status": "RUNNING"}], **more}

  def get(self, *, project, zone, instance):
    assert (project, zone) == ("my-project", "my-zone")
    addresses = {name: ip for group in self.answer.values() for name, ip in group.items()}
    found = {"networkInterfaces": [{"networkIP": addresses[instance]}]}
    return SimpleNamespace(execute=lambda: found)


@pytest.fixture
def machine(monkeypatch):
  """Returns what makes this process's machine one with this address, and gives it this API."""
  metadata = {
    "/computeMetadata/v1/project/project-id": "my-project",
    "/computeMetadata/v1/instance/zone": "projects/123/zones/my-zone",
  }

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      known = self.path in metadata and self.headers["Metadata-Flavor"] == "Google"
      self.send_response(200 if known else 403)
      self.end_headers()
      self.wfile.write(metadata.get(self.path, "").encode())

    def log_message(self, *unused):
      pass

  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()

  def make(compute, ip="10.0.0.2"):
    metadata["/computeMetadata/v1/instance/network-interfaces/0/ip"] = ip
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    fake_google(monkeypatch, compute)

  yield make
  server.shutdown()
  server.server_close()


def fake_google(monkeypatch, compute):
  def build(name, version, *, credentials, cache_discovery):
    assert (name, version, credentials, cache_discovery) == ("compute", "v1", "a key", False)
    return compute

  module(monkeypatch, "googleapiclient")
  module(monkeypatch, "googleapiclient.discovery", build=build)
  module(monkeypatch, "googleapiclient.errors", HttpError=HttpError)
  module(monkeypatch, "google.auth", default=lambda scopes: ("a key", None))
  module(
    monkeypatch,
    "google.auth.exceptions",
    GoogleAuthError=GoogleAuthError,
    DefaultCredentialsError=DefaultCredentialsError,
  )
  module(monkeypatch, "httplib2", HttpLib2Error=HttpLib2Error)


@pytest.mark.parametrize(("ip", "place"), [("10.0.0.10", 0), ("10.0.0.2", 1)])
def test_every_machine_finds_the_same_cluster_and_itself(ip, place, machine):
  machine(Compute(GROUPS), ip)
  found = cloud.gce(jobs=GCE_TWO, port=2222)
  assert places(found) == (
    {"worker": ["10.0.0.10:2222", "10.0.0.2:2222"]},
    "worker",
    place,
    "grpc",
  )


def test_a_group_a_job(machine):
  machine(Compute({**GROUPS, "boss": {"vm-c": "10.0.0.3"}, "ps": {"vm-d": "10.0.0.4"}}), "10.0.0.3")
  found = cloud.gce(jobs={"chief": ("boss", 1), **GCE_TWO, "ps": ("ps", 1)})
  assert places(found) == (
    {
      "chief": ["10.0.0.3:8470"],
      "worker": ["10.0.0.10:8470", "10.0.0.2:8470"],
      "ps": ["10.0.0.4:8470"],
    },
    "chief",
    0,
    "grpc",
  )


@pytest.mark.parametrize(
  "early",
  [
    {"digits": {"vm-b": "10.0.0.2"}},
    HttpError(503, "Backend Error"),
    HttpLib2Error("Unable to find the server"),
    GoogleAuthError("Connection aborted"),
    TimeoutError("timed out"),
  ],
)
def test_it_waits_for_machines(early, machine):
  machine(Compute(early, early, GROUPS))
  assert places(cloud.gce(jobs=GCE_TWO))[0] == {"worker": ["10.0.0.10:8470", "10.0.0.2:8470"]}


def test_the_machines_stay_what_they_were(machine):
  compute = Compute(GROUPS, {"digits": {}})
  machine(compute)
  found = cloud.gce(jobs=GCE_TWO)
  assert [places(found)[2] for _ in range(2)] == [1, 1]
  assert compute.pages == 2


GCE_MISTAKES = [
  (
    GROUPS,
    {"jobs": {}},
    "gce.jobs is {}; it must give each job a place and a number of 1 or more, such as {'worker': "
    "('digits', 2)}.",
  ),
  (
    {"digits": {}},
    {},
    "this machine, 10.0.0.2:8470, is not among those that gce.jobs finds in zone 'my-zone' of "
    "project 'my-project': none; add it to a group that gce.jobs names, or its group to gce.jobs.",
  ),
  (
    GROUPS,
    {"jobs": {"worker": ("digitz", 2)}},
    "gce.jobs is {'worker': ('digitz', 2)}, but the API refuses to look (404: The resource "
    "'digitz' was not found); check that these groups are in zone 'my-zone' of project "
    "'my-project', and that the machines' service account has roles/compute.viewer and the scope "
    "compute.readonly.",
  ),
  (
    GROUPS,
    {"jobs": {**GCE_TWO, "ps": ("digits", 2)}},
    "gce.jobs finds 10.0.0.10:8470 as ps-0 and worker-0; each machine must be in one group.",
  ),
  (
    GROUPS,
    {"jobs": {"worker": ("digits", 1)}, "start_timeout_s": 0.01},
    "gce.jobs finds 2 of 1 worker within 0.01 s; make 'digits' stand for just those that train, or "
    "give the right number.",
  ),
]


@pytest.mark.parametrize(("answer", "options", "line"), GCE_MISTAKES)
def test_mistakes_with_gce(answer, options, line, machine):
  machine(Compute(answer))
  with pytest.raises(ConfigError) as caught:
    cloud.gce(**{"jobs": GCE_TWO, **options})
  assert str(caught.value) == line


def test_machines_that_do_not_come(machine):
  machine(Compute({"digits": {"vm-b": "10.0.0.2"}}))
  with pytest.raises(ClusterError) as caught:
    cloud.gce(jobs=GCE_TWO, start_timeout_s=0.01)
  assert str(caught.value) == "gce.jobs finds 1 of 2 worker within 0.01 s"


def test_this_is_no_machine_of_compute_engine(machine, monkeypatch):
  machine(Compute(GROUPS))
  monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
  with pytest.raises(ConfigError) as caught:
    cloud.gce(jobs=GCE_TWO)
  assert re.fullmatch(
    r"this is no machine of Google Compute Engine: 127\.0\.0\.1:9 does not answer \(.+\); start "
    r"the processes on machines of an instance group, or use @tf_config\.",
    str(caught.value),
  )


def test_there_are_no_credentials(machine):
  machine(Compute(GROUPS))

  def none(scopes):
    raise DefaultCredentialsError("Your default credentials were not found. To set up, see there.")

  sys.modules["google.auth"].default = none
  with pytest.raises(ConfigError) as caught:
    cloud.gce(jobs=GCE_TWO)
  assert str(caught.value) == (
    "there are no application-default credentials (Your default credentials were not found); give "
    "the machine a service account, or put the path of a key file into "
    "GOOGLE_APPLICATION_CREDENTIALS."
  )


def test_the_package_of_google_is_missing(monkeypatch):
  monkeypatch.setitem(sys.modules, "googleapiclient", None)
  with pytest.raises(ConfigError) as caught:
    cloud.gce(jobs=GCE_TWO)
  assert re.fullmatch(
    r"@gce needs the package google-api-python-client, which cannot be imported \(.+\); start with "
    r"`uv run --extra gce launch\.py`, or `pip install -e '\.\[gce\]'` first\.",
    str(caught.value),
  )


def test_what_tensorflows_own_resolver_asks_of_compute_engine():
  """A parameter that the API does not have, and "items" of a group without any."""
  own = tf.distribute.cluster_resolver.GCEClusterResolver(
    "my-project", "my-zone", "digits", 8470, credentials=None, service=Compute(GROUPS)
  )
  with pytest.raises(TypeError, match="instanceGroups"):
    own.cluster_spec()
  assert own.task_id == 0  # on every machine
