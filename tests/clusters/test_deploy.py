"""What can be checked of deploy/ without a cluster.

The scripts run with an srun and a launch.py of our own; of the manifests, the framework must accept
the commands and the clusters.
"""

import configparser
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath

import gin
import pytest
import yaml

import launch
from framework import configurables
from framework.strategies import factories, servers
from framework.strategies.cluster import identity as cluster
from framework.strategies.cluster import resolvers, wire
from framework.tools.local_cluster import GRACE_S, MISTAKE, SAVED

ROOT = Path(launch.__file__).parent
DEPLOY = ROOT / "deploy"
SCRIPT = DEPLOY / "slurm.sh"
JOBS = {
  "tfjob-multi-worker.yaml": {"strategy": "multi_worker_mirrored", "replicas": {"Worker"}},
  "tfjob-parameter-server.yaml": {
    "strategy": "parameter_server",
    "replicas": {"Chief", "Worker", "PS"},
  },
}
LONGEST_BACKOFF_S = 300
KILLED = 128 + signal.SIGKILL


@pytest.fixture
def slurm(tmp_path):
  """Runs the script where each srun ends with the next of the given statuses."""

  def run(*statuses, restarts=3):
    for name, body in (
      ("srun", 'echo "$@" >> srun.txt; status=$(head -1 next); sed -i 1d next; exit "$status"'),
      ("scontrol", 'echo "$@" >> scontrol.txt'),
    ):
      (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
      (tmp_path / name).chmod(0o755)
    (tmp_path / "next").write_text("".join(f"{status}\n" for status in statuses))
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "4321"}
    done = subprocess.run(
      ["bash", str(SCRIPT), "--gin_file=my config.gin"],
      cwd=tmp_path, env={**env, "MAX_RESTARTS": str(restarts)}, capture_output=True, text=True,
    )  # fmt: skip
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


def test_a_saved_run_goes_back_into_the_queue(slurm):
  status, calls, requeued = slurm(75)
  assert (status, len(calls), requeued) == (75, 1, "requeue 4321\n")


def test_a_mistake_ends_the_job(slurm):
  status, calls, _ = slurm(2)
  assert (status, len(calls)) == (2, 1)


def test_a_failure_is_tried_again(slurm):
  assert len(slurm(1, 1, 0)[1]) == 3


def test_but_not_for_ever(slurm):
  status, calls, _ = slurm(1, 1, 1, restarts=2)
  assert (status, len(calls)) == (1, 3)


def test_shellcheck_finds_nothing():
  shellcheck = shutil.which(
    "shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
  )
  assert shellcheck, "no shellcheck; it comes with the group dev of pyproject.toml"
  done = subprocess.run([shellcheck, str(SCRIPT)], capture_output=True, text=True)
  assert (done.returncode, done.stdout) == (0, "")


# ---- Kubernetes ----


# Field -> its fields; a set where they are not read further. "*" stands for names of one's own,
# [...] for a list. kubeflow.org/v1 and Kubernetes have more; a field that is not here is a typo or
# wants a line here.
METADATA = {"name": str, "labels": {"*": str}, "annotations": {"*": str}}
SELECTOR = {"matchLabels": {"*": str}}
RESOURCES = {"cpu": str, "memory": str}
POD = {
  "terminationGracePeriodSeconds": int,
  "automountServiceAccountToken": bool,
  "securityContext": {
    "runAsNonRoot": bool,
    "seccompProfile": {"type": {"RuntimeDefault", "Unconfined", "Localhost"}},
    "runAsUser": int,
    "fsGroup": int,
  },
  "containers": [
    {
      "name": str,
      "image": str,
      "securityContext": {"allowPrivilegeEscalation": bool, "capabilities": {"drop": [str]}},
      "args": [str],
      "env": [{"name": str, "value": str}],
      "ports": [{"name": str, "containerPort": int}],
      "resources": {"requests": RESOURCES, "limits": RESOURCES},
      "volumeMounts": [{"name": str, "mountPath": str}],
    }
  ],
  "volumes": [
    {"name": str, "persistentVolumeClaim": {"claimName": str}, "secret": {"secretName": str}}
  ],
}
REPLICA = {
  "replicas": int,
  "restartPolicy": {"Always", "OnFailure", "ExitCode", "Never"},
  "template": {"metadata": METADATA, "spec": POD},
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
  ("v1", "PersistentVolumeClaim"): {
    "accessModes": [{"ReadWriteOnce", "ReadWriteMany"}],
    "resources": {"requests": {"storage": str}},
  },
}


def misfits(value, shape, place=""):
  """Lists the places of a document that its shape does not have."""
  if isinstance(shape, dict) and isinstance(value, dict):
    found = []
    for name, inner in value.items():
      known = shape.get(name, shape.get("*"))
      found += misfits(inner, known, f"{place}.{name}") if known else [f"{place}.{name}"]
    return found
  if isinstance(shape, list) and isinstance(value, list):
    return [m for i, item in enumerate(value) for m in misfits(item, shape[0], f"{place}[{i}]")]
  fits = value in shape if isinstance(shape, set) else type(value) is shape
  return [] if fits else [f"{place} = {value!r}"]


def documents(name):
  return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def of_kind(name, kind):
  [found] = [document for document in documents(name) if document["kind"] == kind]
  return found


def replica_specs(name):
  return of_kind(name, "TFJob")["spec"]["tfReplicaSpecs"]


def pods(name):
  """The pod template of each kind of replica."""
  return {kind: spec["template"] for kind, spec in replica_specs(name).items()}


def container_of(pod):
  [container] = pod["spec"]["containers"]
  return container


def flags_of(pod):
  return launch.parse_flags(["launch.py", *container_of(pod)["args"]])


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
    spec = KINDS[document["apiVersion"], document["kind"]]
    envelope = {"apiVersion": str, "kind": str, "metadata": METADATA, "spec": spec}
    assert misfits(document, envelope) == []
    assert set(document) == set(envelope)


def test_a_typo_does_not_fit():
  job = of_kind("tfjob-multi-worker.yaml", "TFJob")["spec"]
  job["tfReplicaSpecs"]["Worker"].update(restartPolicy="OnFailures", replica=2)
  container_of(job["tfReplicaSpecs"]["Worker"]["template"])["ports"][0]["containerPort"] = "2222"
  assert misfits(job, KINDS["kubeflow.org/v1", "TFJob"]) == [
    ".tfReplicaSpecs.Worker.restartPolicy = 'OnFailures'",
    ".tfReplicaSpecs.Worker.template.spec.containers[0].ports[0].containerPort = '2222'",
    ".tfReplicaSpecs.Worker.replica",
  ]


@pytest.mark.parametrize("name", JOBS)
class TestTFJob:
  @pytest.fixture(autouse=True)
  def _clean(self):
    yield
    gin.clear_config()

  def test_it_has_the_replicas_of_its_strategy(self, name):
    assert replica_specs(name).keys() == JOBS[name]["replicas"]

  def test_the_operator_finds_container_and_port(self, name):
    for pod in pods(name).values():
      container = container_of(pod)
      assert container["name"] == "tensorflow"
      assert [port["name"] for port in container["ports"]] == ["tfjob-port"]

  def test_launch_takes_its_command(self, name, monkeypatch):
    monkeypatch.chdir(ROOT)  # the image's WORKDIR is the repository, see below
    for pod in pods(name).values():
      values = flags_of(pod)
      assert values.mode in ("train", "train_and_evaluate")
      configurables.parse(values.gin_file, values.gin_param)
      strategy = gin.query_parameter("run.strategy")
      assert strategy.configurable.wrapped.__name__ == JOBS[name]["strategy"]

  def test_a_restart_is_waited_for(self, name, monkeypatch):
    monkeypatch.chdir(ROOT)
    for pod in pods(name).values():
      values = flags_of(pod)
      configurables.parse(values.gin_file, values.gin_param)
      timeout_s = gin.query_parameter(f"{JOBS[name]['strategy']}.start_timeout_s")
      assert timeout_s > LONGEST_BACKOFF_S

  def test_the_run_folder_is_on_the_shared_volume(self, name):
    claim = of_kind("runs-volume.yaml", "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    folders = set()
    for pod in pods(name).values():
      volume, mount = pod["spec"]["volumes"][0], container_of(pod)["volumeMounts"][0]
      assert mount["name"] == volume["name"]
      assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
      folder = flags_of(pod).model_dir
      assert PurePosixPath(mount["mountPath"]) in PurePosixPath(folder).parents
      folders.add(folder)
    assert len(folders) == 1

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

  def test_there_is_time_to_save(self, name):
    for pod in pods(name).values():
      assert pod["spec"]["terminationGracePeriodSeconds"] >= GRACE_S

  def test_only_its_own_pods_reach_its_ports(self, name):
    labels = of_kind(name, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"]
    assert labels == {"loopwright-job": of_kind(name, "TFJob")["metadata"]["name"]}
    for pod in pods(name).values():
      assert labels.items() <= pod["metadata"]["labels"].items()
    spec = of_kind(name, "NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress"]
    assert spec["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]


def test_workers_of_a_tfjob_read_the_secret_that_the_first_line_makes():
  [pod] = pods("tfjob-multi-worker.yaml").values()
  container, volume = container_of(pod), pod["spec"]["volumes"][1]
  mount = container["volumeMounts"][1]
  assert mount["name"] == volume["name"]
  name = volume["secret"]["secretName"]
  made = f"kubectl create secret generic {name} --from-literal=secret="
  assert made in (DEPLOY / "tfjob-multi-worker.yaml").read_text()
  assert container["env"] == [{"name": wire.SECRET_FILE, "value": f"{mount['mountPath']}/secret"}]


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


def test_the_command_of_an_indexed_job_sets_tf_config(tmp_path, monkeypatch):
  """The recipe of docs/multi-process.md, run by sh with a `python` of our own."""
  text = (ROOT / "docs" / "multi-process.md").read_text()
  recipe = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
  (tmp_path / "python").write_text('#!/bin/sh\nprintf %s "$TF_CONFIG"\n')
  (tmp_path / "python").chmod(0o755)
  environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "1"}
  sh = [*recipe["command"][2:], *recipe["args"]]
  done = subprocess.run(sh, env=environ, capture_output=True, text=True, check=True)
  monkeypatch.setenv("TF_CONFIG", done.stdout)
  peers, place = cluster.workers(resolvers.tf_config())
  assert place == 1
  assert [peer.address for peer in peers] == ["digits-0.digits:2222", "digits-1.digits:2222"]


# ---- The image ----


def instructions(name):
  """The Dockerfile's arguments of one instruction, a list of words each."""
  text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
  lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
  return [words for word, *words in lines if word == name]


def test_the_image_gets_what_it_installs_and_runs():
  copied = {PurePosixPath(source) for *sources, _ in instructions("COPY") for source in sources}
  assert all((ROOT / source).exists() for source in copied)
  setup = configparser.ConfigParser()
  setup.read(ROOT / "setup.cfg")
  metadata = setup["metadata"]
  packages = setup["options.packages.find"]["include"].split()
  needed = {
    *("pyproject.toml", "setup.cfg"),
    *(metadata["long_description"].removeprefix("file:").split()),
    *metadata["license_files"].split(),
    *(package for package in packages if not package.endswith(".*")),
    *(link.resolve().name for link in (ROOT / "framework").iterdir() if link.is_symlink()),
  }
  assert {"PACKAGE.md", "framework", "tasks", "configs"} < needed
  assert needed <= {str(source) for source in copied}
  for name in JOBS:
    for pod in pods(name).values():
      for file in flags_of(pod).gin_file:
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
        *("name", "persistentVolumeClaim", "secret")
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
    "workers": 3, "cpus": 1, "gpus": 1, "max_restarts": 2, "model_dir": "/shared/m",
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


@pytest.mark.parametrize("wrong", [[], ["--workers=0"], ["--workers=two"]])
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
    "open('seen', 'w').write(json.dumps(seen))\n"
    "sys.exit('--fail' in sys.argv and 75)\n"
  )
  monkeypatch.setenv("TF_CONFIG", "{}")
  monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
  ray_train.work({"root": str(tmp_path), "arguments": ["--gin_param=a.b = 1"]})
  seen = json.loads((tmp_path / "seen").read_text())
  assert seen == [["--gin_param=a.b = 1"], str(tmp_path), "{}", False]
  with pytest.raises(RuntimeError, match="ended with status 75"):
    ray_train.work({"root": str(tmp_path), "arguments": ["--fail"]})


def test_launch_dies_with_its_ray_worker(ray_train, tmp_path):
  (tmp_path / "launch.py").write_text(
    "import os, time\n"
    "open('new', 'w').write(str(os.getpid()))\n"
    "os.rename('new', 'pid')\n"
    "time.sleep(60)\n"
  )
  code = f"import ray_train; ray_train.work({{'root': {str(tmp_path)!r}, 'arguments': []}})"
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
