"""What can be checked of deploy/ without a cluster.

The scripts run with an srun and a launch.py of our own; of the manifests, the framework must accept
the commands and the clusters.
"""

import configparser
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath

import gin
import pydantic
import pytest
import yaml
from kubeflow_trainer_api import models as schemas

import launch
from loopwright import configurables
from loopwright.strategies import factories
from loopwright.strategies.parameter_server import servers
from loopwright.strategies.workers import identity as cluster
from loopwright.strategies.workers import resolvers
from loopwright.tools.local_cluster import MISTAKE, SAVED, LocalCluster

ROOT = Path(launch.__file__).parent
DEPLOY = ROOT / "deploy"
SCRIPT = DEPLOY / "slurm.sh"
JOBS = {
  "job-multi-worker.yaml": "multi_worker_mirrored",
  "trainjob-multi-worker.yaml": "multi_worker_mirrored",
  "tfjob-multi-worker.yaml": "multi_worker_mirrored",
  "tfjob-parameter-server.yaml": "parameter_server",
}
TFJOBS = {
  "tfjob-multi-worker.yaml": {"Worker"},
  "tfjob-parameter-server.yaml": {"Chief", "Worker", "PS"},
}
INDEXED = {"job-multi-worker.yaml": "Job", "trainjob-multi-worker.yaml": "TrainJob"}
LONGEST_BACKOFF_S = {True: 600, False: 300}  # of an Indexed Job's new pods, of a container
KILLED = 128 + signal.SIGKILL


@pytest.fixture
def script(tmp_path):
  """Runs the script with programs of our own, in bash, in place of Slurm's; returns the status."""

  def run(programs, **variables):
    for name, body in programs.items():
      (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
      (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "4321", **variables}
    command = ["bash", str(SCRIPT), "--gin_file=my config.gin"]
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

  return run


@pytest.fixture
def slurm(script, tmp_path):
  """Runs the script where each srun ends with the next of the given statuses."""

  def run(*statuses, restarts=3):
    (tmp_path / "next").write_text("".join(f"{status}\n" for status in statuses))
    train = 'echo "$@" >> srun.txt; status=$(head -1 next); sed -i 1d next; exit "$status"'
    programs = {"srun": train, "scontrol": 'echo "$@" >> scontrol.txt'}
    done = script(programs, MAX_RESTARTS=str(restarts))
    requeued = tmp_path / "scontrol.txt"
    calls = (tmp_path / "srun.txt").read_text().splitlines()
    return done.returncode, calls, requeued.read_text() if requeued.exists() else ""

  return run


def test_it_trains_with_the_slurm_resolver(slurm):
  status, [call], requeued = slurm(0)
  assert (status, requeued) == (0, "")
  assert "python launch.py --gin_file=my config.gin" in call
  assert "--gin_param=multi_worker_mirrored.resolver = @slurm" in call
  assert call.endswith(f"--gin_param=slurm.port_base = {10000 + 321 * 16}")


@pytest.mark.parametrize(
  ("statuses", "restarts", "status", "tries", "queued"),
  [
    ([75], 3, 75, 1, "requeue 4321\n"),
    ([2], 3, 2, 1, ""),
    ([1, 1, 0], 3, 0, 3, ""),
    ([1, 1, 1], 2, 1, 3, ""),
  ],
  ids=["saved", "a mistake", "failures are tried again", "but not for ever"],
)
def test_what_the_job_does_with_a_status(slurm, statuses, restarts, status, tries, queued):
  ended, calls, requeued = slurm(*statuses, restarts=restarts)
  assert (ended, len(calls), requeued) == (status, tries, queued)


LOOKS = {
  "srun": """
until [[ -e term ]] || (($(wc -l <looks.txt) > 7)); do sleep 0.02; done
[[ ! -e term ]] || exit 75
""",
  "sinfo": """
echo "$@" >>looks.txt
nodes=$(printf '%s\\n' "$@" | sed -n 's/^--nodes=//p')
if [[ $nodes == "$SLURM_JOB_NODELIST" ]]; then printf '%s\\n' $OWN; else printf '%s\\n' $HAD; fi
""",
  "scancel": '[[ $* == "--signal=TERM 4321" ]] && touch term',
  "scontrol": "",
}


@pytest.mark.parametrize(
  ("sizes", "tasks", "own", "had", "asked"),
  [
    ("2:4", 1, "mixed allocated draining", "", True),
    ("2:4", 1, "allocated draining* drained", "", False),  # fewer than the least would be left
    ("4:8", 2, "mixed allocated draining", "", True),
    ("5:8", 2, "mixed allocated draining", "", False),
    ("2:4", 1, "mixed mixed mixed", "mixed mixed mixed idle", True),
    ("2:4", 1, "mixed mixed mixed", "mixed mixed mixed idle* down drained", False),
    ("2:3", 1, "mixed mixed mixed", "mixed mixed mixed idle", False),
    ("4:8", 2, "mixed mixed mixed", "mixed mixed mixed idle", True),
    ("4:6", 2, "mixed mixed mixed", "mixed mixed mixed idle", False),
  ],
)
def test_it_asks_for_other_nodes(script, tmp_path, sizes, tasks, own, had, asked):
  variables = {
    "LOOPWRIGHT_WORKERS": sizes, "LOOK_S": "0.01", "OWN": own, "HAD": had or own,
    "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_PARTITION": "all",
    "SLURM_NTASKS_PER_NODE": str(tasks),
  }  # fmt: skip
  (tmp_path / "looks.txt").touch()
  (tmp_path / "runs").mkdir()
  nodes = tmp_path / "runs" / ".nodes--4321"
  nodes.write_text("n[2-5]\n")  # of the start before
  done = script(LOOKS, **variables)
  assert (done.returncode, (tmp_path / "term").exists()) == (75 if asked else 0, asked)
  looks = (tmp_path / "looks.txt").read_text().splitlines()
  asked_for = {word for look in looks for word in look.split() if word.startswith("--nodes=")}
  assert asked_for <= {"--nodes=n[1-3]", "--nodes=n[2-5],n[1-3]"}
  assert all("--partition=all" in look for look in looks)
  assert (nodes.read_text() if nodes.exists() else "") == ("n[2-5]\nn[1-3]\n" if asked else "")


def test_a_wrong_number_of_workers_is_one_line(script, tmp_path):
  done = script({"srun": "touch trained"}, LOOPWRIGHT_WORKERS="2-4")
  line = "LOOPWRIGHT_WORKERS is 2-4; it must be LEAST:MOST, such as 2:4\n"
  assert (done.returncode, done.stderr) == (MISTAKE, line)
  assert not (tmp_path / "trained").exists()


def test_shellcheck_finds_nothing():
  shellcheck = shutil.which(
    "shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
  )
  assert shellcheck, "no shellcheck; it comes with the group dev of pyproject.toml"
  done = subprocess.run([shellcheck, str(SCRIPT)], capture_output=True, text=True)
  assert (done.returncode, done.stdout) == (0, "")


# ---- Kubernetes ----


# Published models: fields that they do not know are lost, other types raise an error.
MODELS = {
  ("v1", "PersistentVolumeClaim"): schemas.IoK8sApiCoreV1PersistentVolumeClaim,
  ("v1", "Service"): schemas.IoK8sApiCoreV1Service,
  ("batch/v1", "Job"): schemas.IoK8sApiBatchV1Job,
  ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): schemas.TrainerV1alpha1TrainingRuntime,
  ("trainer.kubeflow.org/v1alpha1", "TrainJob"): schemas.TrainerV1alpha1TrainJob,
}
# The others. Field -> its fields; a set where they are not read further, a model where there is
# one, [...] for a list. kubeflow.org/v1 and Kubernetes have more; a field that is not here is a
# typo or wants a line here.
METADATA = schemas.IoK8sApimachineryPkgApisMetaV1ObjectMeta
SELECTOR = schemas.IoK8sApimachineryPkgApisMetaV1LabelSelector
REPLICA = {
  "replicas": int,
  "restartPolicy": {"Always", "OnFailure", "ExitCode", "Never"},
  "template": schemas.IoK8sApiCoreV1PodTemplateSpec,
}
KINDS = {
  ("kubeflow.org/v1", "TFJob"): {
    "successPolicy": {"", "AllWorkers"},
    "runPolicy": {"cleanPodPolicy": {"All", "Running", "None"}, "backoffLimit": int},
    "tfReplicaSpecs": {"Chief": REPLICA, "Worker": REPLICA, "PS": REPLICA},
  },
  ("networking.k8s.io/v1", "NetworkPolicy"): {
    "podSelector": SELECTOR,
    "policyTypes": [{"Ingress", "Egress"}],
    "ingress": [{"from": [{"podSelector": SELECTOR}]}],
  },
}


def misfits(value, shape, place=""):
  """Lists the places of a document that its shape does not have."""
  if hasattr(shape, "from_dict"):
    try:
      return lost(value, shape.from_dict(value).to_dict(), place)
    except pydantic.ValidationError as error:
      return [".".join([place, *map(str, each["loc"])]) for each in error.errors()]
  if isinstance(shape, dict) and isinstance(value, dict):
    found = []
    for name, inner in value.items():
      known = shape.get(name)
      found += misfits(inner, known, f"{place}.{name}") if known else [f"{place}.{name}"]
    return found
  if isinstance(shape, list) and isinstance(value, list):
    return [m for i, item in enumerate(value) for m in misfits(item, shape[0], f"{place}[{i}]")]
  fits = value in shape if isinstance(shape, set) else type(value) is shape
  return [] if fits else [f"{place} = {value!r}"]


def lost(value, kept, place):
  """Lists the fields of a document that a model has not kept."""
  if isinstance(value, dict):
    inner = [(f"{place}.{name}", each, kept.get(name)) for name, each in value.items()]
  elif isinstance(value, list):
    inner = [(f"{place}[{i}]", *both) for i, both in enumerate(zip(value, kept, strict=True))]
  else:
    return [] if value == kept else [f"{place} = {value!r}"]
  return [m for name, *both in inner for m in ([name] if both[1] is None else lost(*both, name))]


def documents(name):
  return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def of_kind(name, kind):
  [found] = [document for document in documents(name) if document["kind"] == kind]
  return found


def replica_specs(name):
  return of_kind(name, "TFJob")["spec"]["tfReplicaSpecs"]


def job_spec(name):
  """The spec of the Indexed Job that a manifest has, or that Kubeflow Trainer makes of it."""
  if INDEXED[name] == "Job":
    return of_kind(name, "Job")["spec"]
  runtime, job = of_kind(name, "TrainingRuntime"), of_kind(name, "TrainJob")
  assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
  [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
  ancestor = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
  assert (replicated["replicas"], replicated["template"]["metadata"]["labels"]) == (1, ancestor)
  spec, trainer = replicated["template"]["spec"], dict(job["spec"]["trainer"])
  workers = trainer.pop("numNodes")
  container = container_of(spec["template"])
  assert replicated["name"] == container["name"] == "node"  # where Trainer puts the rest
  container.update(trainer)
  return {**spec, "completions": workers, "parallelism": workers}


def job_name(name):
  kind = INDEXED.get(name, "TFJob")
  return of_kind(name, kind)["metadata"]["name"]


def pods(name):
  """The pod template of each kind of replica."""
  if name in INDEXED:
    return {"Worker": job_spec(name)["template"]}
  return {kind: spec["template"] for kind, spec in replica_specs(name).items()}


def container_of(pod):
  [container] = pod["spec"]["containers"]
  return container


def ran(pod, folder, index=0):
  """What `python` gets from the command of pod `index`: its arguments and TF_CONFIG."""
  container = container_of(pod)
  if "command" not in container:
    return ["launch.py", *container["args"]], None
  (folder / "python").write_text('#!/bin/sh\nprintf "%s\\0" "$TF_CONFIG" "$@"\n')
  (folder / "python").chmod(0o755)
  assert container["command"][:2] == ["tini", "--"]
  environ = {"PATH": f"{folder}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": str(index)}
  sh = [*container["command"][2:], *container["args"]]
  done = subprocess.run(sh, env=environ, capture_output=True, text=True, check=True)
  config, *arguments = done.stdout.split("\0")[:-1]
  return arguments, config


def flags_of(pod, folder):
  return launch.parse_flags(ran(pod, folder)[0])


def starts_again(policy, status):
  """Whether a pod that ended with `status` does, as the Training Operator documents it."""
  return {
    "Always": True,
    "OnFailure": status != 0,
    "ExitCode": status >= 128,
    "Never": False,
  }[policy]


def tf_configs(name):
  """What the Training Operator puts into TF_CONFIG: (kind, index) -> JSON."""
  job = of_kind(name, "TFJob")["metadata"]["name"]
  addresses = {}
  for kind, spec in replica_specs(name).items():
    [port] = container_of(spec["template"])["ports"]
    addresses[kind.lower()] = [
      f"{job}-{kind.lower()}-{index}.default.svc:{port['containerPort']}"
      for index in range(spec["replicas"])
    ]
  return {
    (kind, index): json.dumps(
      {"cluster": addresses, "task": {"type": kind, "index": index}, "environment": "cloud"}
    )
    for kind, hosts in addresses.items()
    for index in range(len(hosts))
  }


@pytest.mark.parametrize("name", sorted(path.name for path in DEPLOY.glob("*.yaml")))
def test_a_manifest_has_the_shape_of_its_kind(name):
  for document in documents(name):
    kind = document["apiVersion"], document["kind"]
    envelope = {"apiVersion": str, "kind": str, "metadata": METADATA, "spec": KINDS.get(kind)}
    assert misfits(document, MODELS.get(kind, envelope)) == []
    assert set(document) == set(envelope)


def test_a_typo_does_not_fit():
  job = of_kind("tfjob-multi-worker.yaml", "TFJob")["spec"]
  job["tfReplicaSpecs"]["Worker"].update(restartPolicy="OnFailures", replica=2)
  container_of(job["tfReplicaSpecs"]["Worker"]["template"])["ports"][0]["containerPort"] = "2222"
  assert misfits(job, KINDS["kubeflow.org/v1", "TFJob"]) == [
    ".tfReplicaSpecs.Worker.restartPolicy = 'OnFailures'",
    ".tfReplicaSpecs.Worker.template.containerPort",
    ".tfReplicaSpecs.Worker.replica",
  ]
  job = of_kind("job-multi-worker.yaml", "Job")
  job["spec"]["podFailurePolicy"]["rules"][1]["onExitCode"] = {}
  container_of(job["spec"]["template"])["volumeMounts"][0]["mountpath"] = "/runs"
  assert misfits(job, MODELS["batch/v1", "Job"]) == [
    ".spec.podFailurePolicy.rules[1].onExitCode",
    ".spec.template.spec.containers[0].volumeMounts[0].mountpath",
  ]


@pytest.mark.parametrize("name", JOBS)
class TestJob:
  def test_launch_takes_its_command(self, name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # the image's WORKDIR is the repository, see below
    for pod in pods(name).values():
      values = flags_of(pod, tmp_path)
      assert values.mode in ("train", "train_and_evaluate")
      configurables.parse(values.gin_file, values.gin_param)
      strategy = gin.query_parameter("run.strategy")
      assert strategy.configurable.wrapped.__name__ == JOBS[name]
      timeout_s = gin.query_parameter(f"{JOBS[name]}.start_timeout_s")
      assert timeout_s > LONGEST_BACKOFF_S[name in INDEXED]

  def test_the_run_folder_is_on_the_shared_volume(self, name, tmp_path):
    claim = of_kind("runs-volume.yaml", "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    folders = set()
    for pod in pods(name).values():
      volume, mount = pod["spec"]["volumes"][0], container_of(pod)["volumeMounts"][0]
      assert mount["name"] == volume["name"]
      assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
      folder = flags_of(pod, tmp_path).model_dir
      assert PurePosixPath(mount["mountPath"]) in PurePosixPath(folder).parents
      folders.add(folder)
    assert len(folders) == 1

  def test_there_is_time_to_save(self, name):
    for pod in pods(name).values():
      assert pod["spec"]["terminationGracePeriodSeconds"] >= LocalCluster.grace_s

  def test_only_its_own_pods_reach_its_ports(self, name):
    labels = of_kind(name, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"]
    assert labels == {"loopwright-job": job_name(name)}
    for pod in pods(name).values():
      assert labels.items() <= pod["metadata"]["labels"].items()
    spec = of_kind(name, "NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress"]
    assert spec["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]


@pytest.mark.parametrize("name", TFJOBS)
class TestTFJob:
  def test_it_has_the_replicas_of_its_strategy(self, name):
    assert replica_specs(name).keys() == TFJOBS[name]

  def test_the_operator_finds_container_and_port(self, name):
    for pod in pods(name).values():
      container = container_of(pod)
      assert container["name"] == "tensorflow"
      assert [port["name"] for port in container["ports"]] == ["tfjob-port"]

  def test_what_can_go_on_starts_again(self, name):
    for kind, spec in replica_specs(name).items():
      policy = spec["restartPolicy"]
      assert all(starts_again(policy, status) for status in (SAVED, 1, KILLED)), kind
      # A worker or server beside a chief ends with 0 whenever that is gone, for good or not.
      serves = "Chief" in replica_specs(name) and kind != "Chief"
      assert starts_again(policy, 0) == serves

  def test_a_mistake_is_not_tried_for_ever(self, name):
    specs = replica_specs(name).values()
    assert all(starts_again(spec["restartPolicy"], MISTAKE) for spec in specs)
    limit = of_kind(name, "TFJob")["spec"]["runPolicy"]["backoffLimit"]
    assert limit == 4 * sum(spec["replicas"] for spec in specs)


@pytest.mark.parametrize("name", INDEXED)
class TestIndexedJob:
  def test_what_can_go_on_starts_again_and_a_mistake_does_not(self, name):
    spec = job_spec(name)
    assert (spec["completionMode"], spec["template"]["spec"]["restartPolicy"]) == (
      "Indexed",
      "Never",
    )
    mistake, saved, disrupted = spec["podFailurePolicy"]["rules"]
    assert mistake == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [MISTAKE]}}
    assert saved == {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [SAVED]}}
    condition = {"type": "DisruptionTarget", "status": "True"}
    assert disrupted == {"action": "Ignore", "onPodConditions": [condition]}
    assert spec["backoffLimit"] == 4 * spec["completions"]
    assert spec["completions"] == spec["parallelism"]

  def test_the_workers_find_each_other(self, name, tmp_path, monkeypatch):
    spec, found = job_spec(name), []
    for index in range(spec["completions"]):
      monkeypatch.setenv("TF_CONFIG", ran(spec["template"], tmp_path, index)[1])
      peers, place = cluster.workers(resolvers.tf_config())
      assert place == index
      found.append([peer.address for peer in peers])
    assert found == 2 * [[f"{host}:2222" for host in self.hosts(name)]]

  def hosts(self, name):
    """The pods' names as Kubernetes and JobSet document them."""
    job = job_name(name)
    if INDEXED[name] == "TrainJob":
      return [f"{job}-node-0-{index}.{job}" for index in range(2)]
    service, pod = of_kind(name, "Service"), job_spec(name)["template"]
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert service["spec"]["clusterIP"] == "None"
    return [f"{job}-{index}.{service['metadata']['name']}" for index in range(2)]


def test_workers_of_a_tfjob_find_each_other(monkeypatch):
  found = []
  for (_, index), config in tf_configs("tfjob-multi-worker.yaml").items():
    monkeypatch.setenv("TF_CONFIG", config)
    peers, place = cluster.workers(resolvers.tf_config())
    assert place == index
    found.append([peer.address for peer in peers])
  assert found == 2 * [
    [f"digits-multi-worker-worker-{index}.default.svc:2222" for index in range(2)]
  ]


def test_workers_and_servers_of_a_tfjob_find_the_chief(monkeypatch):
  configs = tf_configs("tfjob-parameter-server.yaml")
  assert sorted(configs) == [("chief", 0), ("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1)]
  for (kind, _), config in configs.items():
    if kind != "chief":  # which would wait for the others
      monkeypatch.setenv("TF_CONFIG", config)
      joined = factories.parameter_server()
      assert isinstance(joined, servers.Server)
      assert joined.chief.address == "digits-parameter-server-chief-0.default.svc:2222"


# ---- The image ----


def instructions(name):
  """The Dockerfile's arguments of one instruction, a list of words each."""
  text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
  lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
  return [words for word, *words in lines if word == name]


def test_the_image_gets_what_it_installs_and_runs(tmp_path):
  copied = {PurePosixPath(source) for *sources, _ in instructions("COPY") for source in sources}
  assert all((ROOT / source).exists() for source in copied)
  setup = configparser.ConfigParser()
  setup.read(ROOT / "setup.cfg")
  metadata = setup["metadata"]
  package = ROOT / "framework" / "loopwright"
  needed = {
    *("pyproject.toml", "setup.cfg"),
    *(metadata["long_description"].removeprefix("file:").split()),
    *metadata["license_files"].split(),
    setup["options.packages.find"]["where"],
    *(link.resolve().name for link in package.iterdir() if link.is_symlink()),
  }
  assert {"PACKAGE.md", "framework", "tasks", "configs"} < needed
  assert needed <= {str(source) for source in copied}
  for name in JOBS:
    for pod in pods(name).values():
      for file in flags_of(pod, tmp_path).gin_file:
        assert copied & {PurePosixPath(file), *PurePosixPath(file).parents}


def test_the_image_runs_launch_under_an_init_without_a_shell_between():
  [entry] = instructions("ENTRYPOINT")
  assert json.loads(" ".join(entry)) == ["tini", "--", "python", "launch.py"]
  installed = [words for words in instructions("RUN") if "apt-get" in words]
  assert all({"tini", "stunnel4"} <= set(words) for words in installed)
  assert installed


def test_the_image_is_the_one_of_the_jobs():
  assert instructions("USER") == [["1000"]]
  for name in JOBS:
    for pod in pods(name).values():
      assert pod["spec"]["securityContext"]["runAsUser"] == 1000
      image = container_of(pod)["image"]
      assert f"docker build -f deploy/Dockerfile -t {image} ." in (
        (DEPLOY / "Dockerfile").read_text()
      )


def test_a_restricted_namespace_takes_the_pods():
  """The Pod Security Standard: kubernetes.io/docs/concepts/security/pod-security-standards."""
  for name in JOBS:
    for pod in pods(name).values():
      whole, own = pod["spec"]["securityContext"], container_of(pod)["securityContext"]
      assert (whole["runAsNonRoot"], whole["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
      assert own == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
      assert {kind for volume in pod["spec"]["volumes"] for kind in volume} <= {
        *("name", "persistentVolumeClaim")
      }


# ---- TLS ----


@pytest.fixture(scope="module")
def tls():
  """deploy/tls.py as a module."""
  spec = importlib.util.spec_from_file_location("tls", DEPLOY / "tls.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_all_workers_get_the_same_addresses_on_loopback(tls):
  for (_, index), config in tf_configs("tfjob-multi-worker.yaml").items():
    config = json.loads(config)
    local = tls.on_loopback(config, 20000)
    assert local["cluster"] == {"worker": ["127.0.0.1:20000", "127.0.0.1:20001"]}
    assert local["task"] == config["task"]
    own, other = f"worker-{index}", f"worker-{1 - index}"
    sections = configparser.ConfigParser(strict=False)
    sections.read_string("[all]\n" + tls.stunnel_conf(config, "/tls", 20000))
    assert dict(sections[own]) == {"accept": ":::2222", "connect": f"127.0.0.1:{20000 + index}"}
    assert dict(sections[other]) == {
      "client": "yes",
      "accept": f"127.0.0.1:{20001 - index}",
      "connect": f"digits-multi-worker-{other}.default.svc:2222",
    }
    everywhere = sections["all"]
    assert (everywhere["verifyChain"], everywhere["sslVersionMin"]) == ("yes", "TLSv1.3")
    assert (everywhere["cert"], everywhere["CAfile"]) == ("/tls/tls.crt", "/tls/ca.crt")


STUNNEL = """#!{python}
import re, socket, sys, time
time.sleep({seconds})
text = open(sys.argv[1]).read()
ports = [int(port) for port in re.findall(r"accept = .*:(\\d+)", text)][: {listens}]
sockets = [socket.create_server(("127.0.0.1", port)) for port in ports]
time.sleep(30)
"""


@pytest.mark.parametrize(
  ("seconds", "listens", "says"),
  [(1.5, 2, ""), (0, 1, r"stunnel does not listen at [\d, ]+ after 1 s; training has not started")],
)
def test_training_waits_for_the_tunnel(tls, tmp_path, monkeypatch, seconds, listens, says):
  """A slow stunnel found its configuration gone, and training began all the same."""
  program = tmp_path / "stunnel4"
  text = STUNNEL.format(python=sys.executable, seconds=seconds, listens=listens)
  program.write_text(text)
  program.chmod(0o755)
  monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
  monkeypatch.setattr(tls, "LIMIT_S", 15.0 if not says else 1.0)
  with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as two:
    ports = [one.getsockname()[1], two.getsockname()[1]]
    conf = "".join(f"accept = 127.0.0.1:{port}\n" for port in ports)
    assert tls.start_stunnel(conf, tls.ports_of(conf)).startswith("another program listens at ")
  begin = time.monotonic()
  assert re.fullmatch(says, tls.start_stunnel(conf, tls.ports_of(conf)))
  assert time.monotonic() - begin >= seconds


def test_tls_refuses_what_it_cannot_do(tls, tmp_path, monkeypatch, capsys):
  command = [f"--certificates={tmp_path}", "--", "true"]
  lines = []
  for config in ("{}", "[", next(iter(tf_configs("tfjob-parameter-server.yaml").values()))):
    monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(SystemExit, match="2"):
      tls.main(command)
    lines.append(capsys.readouterr().err.splitlines()[-1])
    for name in ("tls.crt", "tls.key", "ca.crt"):
      (tmp_path / name).touch()
  assert f"cannot read tls.crt in --certificates={tmp_path}" in lines[0]
  assert "TF_CONFIG is not a cluster with a task" in lines[1]
  assert "parameter servers are not supported" in lines[2]


# ---- Ray ----


@pytest.fixture(scope="module")
def ray_train():
  """The script as a module: without Ray, which it imports only when it runs."""
  spec = importlib.util.spec_from_file_location("ray_train", DEPLOY / "ray_train.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_ray_gets_its_flags_and_launch_the_others(ray_train):
  own = ["ray_train.py", "--workers=3", "--gpus=1", "--max_restarts=2", "--model_dir=/shared/m"]
  options, arguments = ray_train.parse([*own, "--mode=train", "--gin_file=configs/digits_cnn.gin"])
  assert vars(options) == {
    "workers": (3, 3), "look_s": 60, "cpus": 1, "gpus": 1, "max_restarts": 2,
    "model_dir": "/shared/m",
  }  # fmt: skip
  values = launch.parse_flags(["launch.py", *arguments])
  assert (values.mode, values.model_dir) == ("train", "/shared/m")
  assert values.gin_file == ["configs/digits_cnn.gin"]
  assert values.gin_param == ["run.strategy = @multi_worker_mirrored"]
  assert (values.local_workers, values.max_restarts) == (0, 0)


def test_a_binding_of_ones_own_comes_later(ray_train):
  own = "--gin_param=run.strategy = @mine"
  _, arguments = ray_train.parse(["ray_train.py", "--workers=1", "--model_dir=m", own])
  assert arguments == ["--gin_param=run.strategy = @multi_worker_mirrored", own, arguments[-1]]
  assert arguments[-1] == f"--model_dir={ROOT / 'm'}"


@pytest.mark.parametrize(
  "wrong", [[], *([f"--workers={text}"] for text in ("0", "two", "3:2", "2:"))]
)
def test_a_wrong_flag_ends_before_ray_starts(ray_train, wrong, capsys):
  with pytest.raises(SystemExit) as ended:
    ray_train.main(["ray_train.py", "--model_dir=m", *wrong])
  assert ended.value.code == MISTAKE
  assert "--workers" in capsys.readouterr().err


def test_a_ray_worker_runs_launch(ray_train, tmp_path, monkeypatch):
  (tmp_path / "launch.py").write_text(
    "import json, os, sys\n"
    "legacy = 'TF_USE_LEGACY_KERAS' in os.environ\n"
    "seen = [sys.argv[1:], os.getcwd(), os.environ['TF_CONFIG'], legacy]\n"
    "seen.append(os.environ.get('LOOPWRIGHT_WORKERS'))\n"
    "open('seen', 'w').write(json.dumps(seen))\n"
    "sys.exit('--fail' in sys.argv and 75)\n"
  )
  monkeypatch.setenv("TF_CONFIG", "{}")
  monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
  config = {"root": str(tmp_path), "arguments": ["--gin_param=a.b = 1"], "workers": (2, 2)}
  for workers, varies in (((2, 2), None), ((2, 4), "2:4")):
    ray_train.work({**config, "workers": workers})
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen == [["--gin_param=a.b = 1"], str(tmp_path), "{}", False, varies]
  with pytest.raises(RuntimeError, match="ended with status 75"):
    ray_train.work({**config, "arguments": ["--fail"]})


def test_launch_dies_with_its_ray_worker(ray_train, tmp_path):
  (tmp_path / "launch.py").write_text(
    "import os, time\n"
    "open('new', 'w').write(str(os.getpid()))\n"
    "os.rename('new', 'pid')\n"
    "time.sleep(60)\n"
  )
  rest = "rest = {'arguments': [], 'workers': (1, 1)}"
  code = f"{rest}; import ray_train; ray_train.work({{'root': {str(tmp_path)!r}, **rest}})"
  worker = subprocess.Popen([sys.executable, "-c", code], cwd=DEPLOY)
  try:
    wait_until((tmp_path / "pid").exists)
    launched = int((tmp_path / "pid").read_text())
  finally:
    worker.kill()
    worker.wait()
  wait_until(lambda: not running(launched))


def running(pid):
  try:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
  except OSError:
    return False


def wait_until(true, timeout_s=20):
  deadline = time.monotonic() + timeout_s
  while not true():
    assert time.monotonic() < deadline
    time.sleep(0.02)
