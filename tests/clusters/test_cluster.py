"""Workers that meet before TensorFlow connects them: threads in the place of processes."""

import concurrent.futures
import importlib
import itertools
import json
import re
import socket
import sys
import threading
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from loopwright.distribution import placement
from loopwright.distribution.cluster import ClusterError, Peer, declare, declared
from loopwright.errors import ConfigError
from loopwright.runs import builder
from loopwright.strategies import factories
from loopwright.strategies.workers import identity as cluster
from loopwright.strategies.workers import rendezvous, resolvers
from loopwright.tools.local_cluster import free_ports


def resolver(addresses, index, job="worker"):
  return tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec({"worker": addresses}), task_type=job, task_id=index
  )


@pytest.fixture
def addresses():
  return [f"127.0.0.1:{port}" for port in free_ports(3)]


def meet(monkeypatch, addresses, facts, *, timeout_s=10.0, come=None):
  """Returns what each worker that comes raises, or None; a thread for each."""
  thread_facts = threading.local()
  monkeypatch.setattr(rendezvous, "facts", lambda: thread_facts.value)

  def one(index):
    thread_facts.value = facts[index]
    try:
      rendezvous.preflight(resolver(addresses, index), timeout_s=timeout_s)
    except Exception as error:
      return error
    return None

  come = range(len(addresses)) if come is None else come
  with concurrent.futures.ThreadPoolExecutor(len(addresses)) as pool:
    return list(pool.map(one, come))


ALIKE = {"run.seed": "1", "version of keras": "3.15.1"}


@pytest.fixture
def secret(monkeypatch):
  monkeypatch.setenv("LOOPWRIGHT_CLUSTER_SECRET", "a secret of the cluster")


@pytest.mark.usefixtures("secret")
@pytest.mark.parametrize("odd", [1, 2])
def test_one_that_differs_is_named_on_all(odd, monkeypatch, addresses):
  facts = [dict(ALIKE), dict(ALIKE), dict(ALIKE)]
  facts[odd]["run.seed"] = "2"
  errors = meet(monkeypatch, addresses, facts)
  lines = [
    f"worker-{odd} ({addresses[odd]}) differs from worker-0 ({addresses[0]}) in its run.seed, "
    f"which is {2 if index == odd else 1} here; start all workers with the same command."
    for index in range(3)
  ]
  assert [(type(error), str(error)) for error in errors] == [(ConfigError, line) for line in lines]


@pytest.mark.usefixtures("secret")
def test_a_fact_that_only_one_has_differs_too(monkeypatch, addresses):
  errors = meet(monkeypatch, addresses, [ALIKE, {**ALIKE, "a": "b", "c": "d"}, ALIKE])
  for error, value in zip(errors, ["missing", "b", "missing"], strict=True):
    assert f"in its a, which is {value} here (and 1 more);" in str(error)


def test_one_that_never_comes_is_named_on_those_that_did(monkeypatch, addresses):
  errors = meet(monkeypatch, addresses, [ALIKE] * 3, timeout_s=1.5, come=[0, 1])
  line = f"worker-2 ({addresses[2]}) did not connect within 1.5 s"
  assert [(type(error), str(error)) for error in errors] == [(ClusterError, line)] * 2


def test_a_chief_that_never_comes_is_named(monkeypatch, addresses):
  errors = meet(monkeypatch, addresses, [ALIKE] * 3, timeout_s=0.5, come=[1])
  line = f"worker-0 ({addresses[0]}) did not answer within 0.5 s"
  assert [(type(error), str(error)) for error in errors] == [(ClusterError, line)]


@pytest.mark.parametrize("index", [0, 2])
def test_a_taken_port_is_told_at_once(index, addresses):
  host, port = addresses[index].split(":")
  with socket.create_server((host, int(port))), pytest.raises(ClusterError) as caught:
    rendezvous.preflight(resolver(addresses, index), timeout_s=30.0)
  assert str(caught.value) == (
    f"cannot listen on {addresses[index]}, this worker's own address: another process uses the port"
  )


def test_a_cluster_of_one_meets_nobody():
  [port] = free_ports(1)
  rendezvous.preflight(resolver([f"127.0.0.1:{port}"], 0), timeout_s=0.1)


def test_the_facts_are_those_of_this_process(monkeypatch):
  monkeypatch.delitem(declared, "run.seed", raising=False)
  declare({"run.seed": 7})
  facts = rendezvous.facts()
  assert facts["run.seed"] == "7"
  assert facts["version of tensorflow"] == tf.__version__
  assert facts["devices"] == "1 CPU"
  assert re.fullmatch(r"[0-9a-f]{12}", facts["code of the framework"])


def test_each_loaded_module_of_the_users_own_is_a_fact(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / "a_helper.py").write_text("SCALE = 1\n")
  monkeypatch.setitem(sys.modules, "a_helper", importlib.import_module("a_helper"))
  first = rendezvous.facts()
  (tmp_path / "a_helper.py").write_text("SCALE = 10\n")
  second = rendezvous.facts()
  differing = {name for name in first if first[name] != second[name]}
  assert differing == {"code of module a_helper"}
  modules = {name.rpartition(" ")[2] for name in first if name.startswith("code of module")}
  assert "test_cluster" in modules
  assert not {"numpy", "json", "tensorflow", "loopwright.runs.runner", "pytest"} & modules


def test_the_digest_of_code_tells_files_apart(tmp_path):
  for name, text in (("a.py", "x = 1\n"), ("b.py", "x = 1\n"), ("c.py", "x = 2\n")):
    (tmp_path / name).write_text(text)
  digests = {rendezvous.code_digest(str(tmp_path / name)) for name in ("a.py", "b.py", "c.py")}
  assert len(digests) == 3
  assert rendezvous.code_digest(None) == ""


# ---- Who and where ----


def test_the_chief_comes_first():
  spec = tf.train.ClusterSpec({"worker": ["w0:1", "w1:1"], "chief": ["c:1"]})
  simple = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type="worker", task_id=1)
  peers, place = cluster.workers(simple)
  assert [str(peer) for peer in peers] == ["chief-0 (c:1)", "worker-0 (w0:1)", "worker-1 (w1:1)"]
  assert place == 2


def test_another_kind_of_task_is_refused():
  with pytest.raises(ConfigError, match="this process is 'ps' 0 of a cluster of worker"):
    cluster.workers(resolver(["a:1"], 0, job="ps"))


def make_cluster(size, index=0):
  peers = tuple(Peer("worker", i, f"10.0.0.{i}:1") for i in range(size))
  return cluster.WorkerCluster(strategy=tf.distribute.get_strategy(), index=index, peers=peers)


@pytest.mark.parametrize(("size", "rows"), [(2, 12), (3, 12), (4, 8)])
def test_the_shares_of_all_workers_are_the_batch(size, rows):
  shares = [list(make_cluster(size, index).rows(rows)) for index in range(size)]
  assert [row for share in shares for row in share] == list(range(rows))
  assert {len(share) for share in shares} == {rows // size}


@pytest.mark.parametrize("stopped", [0, 1])
def test_workers_that_ask_seldom_get_the_same_answer_at_each_call(stopped, monkeypatch):
  """A call takes 0.01 s, so they ask every 100 calls for 1 s: less often is not noticed in time."""
  meeting, told, asked, clock = threading.Barrier(2), [0, 0], [[], []], [0.0]
  here = threading.local()

  def together(self, value):
    told[self.index] = value
    asked[self.index].append(here.call)
    meeting.wait(10)
    total = sum(told)
    meeting.wait(10)
    return total

  def work(index):
    here.index = index
    ask, answers = make_cluster(2, index).asking(1.0), []
    for here.call in range(1, 1000):
      clock[0] += 0.01 * (index == 0)
      answers.append(ask(index == stopped and here.call >= 500))
      if answers[-1]:
        break
    return answers

  monkeypatch.setattr(cluster.WorkerCluster, "sum", together)
  # The clock of the second worker must not count.
  monkeypatch.setattr(cluster.time, "monotonic", lambda: clock[0] if here.index == 0 else 1e9)
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    first, second = pool.map(work, range(2))
  assert asked[0] == asked[1]
  assert asked[0][:7] == [1, 3, 7, 15, 31, 63, 127]
  assert all(95 <= later - earlier <= 105 for earlier, later in itertools.pairwise(asked[0][7:]))
  assert first == second == [False] * (asked[0][-1] - 1) + [True]
  assert 500 <= asked[0][-1] <= 605


def test_without_a_cluster_there_is_one_worker(mirrored):
  alone = placement.of(mirrored(2)).cluster
  assert (alone.size, alone.index, alone.is_chief, alone.rows(8)) == (1, 0, True, None)
  assert (alone.sum(7), alone.any(True), alone.any(False)) == (7, True, False)
  ask = alone.asking(1.0)
  assert [ask(flag) for flag in (False, True, False)] == [False, True, False]
  alone.require_same("step", 3)
  with pytest.raises(tf.errors.UnavailableError), alone.blaming(lambda: 5):
    raise tf.errors.UnavailableError(None, None, "a disk")


@pytest.mark.parametrize("rows", [4, 3])
def test_a_single_worker_gets_whole_batches(rows, mirrored):
  """Replicas on CPUs split them; of a number of rows that does not divide, TensorFlow does."""
  dataset = tf.data.Dataset.from_tensors({"x": np.arange(rows)}).repeat(2)
  strategy = mirrored(2)
  where, seen = placement.of(strategy), []
  for batch in where.distribute(dataset):
    parts = strategy.experimental_local_results(where.per_replica(batch)["x"])
    seen.append([part.numpy().tolist() for part in parts])
  assert seen == [[[0, 1], [2, 3][: rows - 2]]] * 2


LOST = [
  (
    "from remote target /job:worker/replica:0/task:1 while",
    "lost worker-1 (10.0.0.1:1), which exited",
  ),
  (
    "tasks are unhealthy:\n/job:worker/replica:0/task:2\n",
    "lost worker-2 (10.0.0.2:1), which stopped",
  ),
  ("Socket closed", "lost worker-1 (10.0.0.1:1) or worker-2 (10.0.0.2:1), which exited"),
]


@pytest.mark.parametrize(("message", "line"), LOST)
def test_a_lost_worker_is_blamed(message, line):
  with pytest.raises(ClusterError) as caught, make_cluster(3).blaming(lambda: 17):
    raise tf.errors.UnavailableError(None, None, message)
  assert str(caught.value).startswith(line)
  assert str(caught.value).endswith(", after step 17")


def test_a_worker_lost_while_variables_are_made_is_blamed(monkeypatch):
  def lost(**_):
    raise tf.errors.UnavailableError(None, None, LOST[0][0])

  where = types.SimpleNamespace(cluster=make_cluster(3), trainer=lost)
  monkeypatch.setattr(builder.placement, "of", lambda _: where)
  monkeypatch.setattr(builder.configurables, "options", lambda _: {})
  recipe = builder.Recipe(optimizer=keras.optimizers.SGD, global_batch_size=6)
  with pytest.raises(ClusterError, match=r"lost worker-1 .* which exited, after step 0"):
    recipe.trainer(None, tf.distribute.get_strategy())


def test_a_worker_lost_while_tensorflow_connects_is_blamed(monkeypatch, addresses):
  def lost(*_):
    raise tf.errors.DeadlineExceededError(None, None, LOST[1][0])

  found = resolver(addresses, 0)
  monkeypatch.setattr(rendezvous, "preflight", lambda *_, **__: None)
  monkeypatch.setattr(rendezvous, "configure_runtime", lambda *_, **__: None)
  monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", lost)
  with pytest.raises(ClusterError, match=r"lost worker-2 .* which stopped answering, after step 0"):
    factories.multi_worker_mirrored(resolver=lambda: found)


# ---- Where the addresses come from ----


def test_leaving_a_chief_that_is_stopped_comes_to_an_end(monkeypatch):
  """Its process accepts the call and never answers."""
  stopped = threading.Event()
  runtime = types.SimpleNamespace(
    set_config_key_value=lambda *_: stopped.wait(), get_config_key_value=lambda *_, **__: ""
  )
  monkeypatch.setattr(cluster.context, "context", lambda: runtime)
  monkeypatch.setattr(cluster, "_LEAVE_S", 0.1)
  peers = (Peer("worker", 0, "a:1"), Peer("worker", 1, "b:2"))
  cluster.WorkerCluster(strategy=tf.distribute.get_strategy(), index=1, peers=peers).leave()
  assert not stopped.is_set()
  stopped.set()


WORKERS = {"worker": ["a:1", "b:2"]}
FIRST = {"type": "worker", "index": 0}
PORT = "it must be 'host:port' with a port from 1 to 65535"
WRONG = [
  (None, "names no cluster"),
  ("{}", "names no cluster"),
  ('{"cluster": {"worker": []}}', "names no cluster"),
  ("", "TF_CONFIG is not JSON (Expecting value"),
  ("{", "TF_CONFIG is not JSON"),
  ("[" * 100_000, "TF_CONFIG is not JSON (maximum recursion depth"),
  ("9" * 5000, "TF_CONFIG is not JSON (Exceeds the limit"),
  *((text, f"TF_CONFIG is {text}; it must be an object") for text in ("null", "1", "[]", "true")),
]
WRONG += [
  (json.dumps({"cluster": cluster, "task": FIRST}), line)
  for cluster, line in [
    *((each, "TF_CONFIG has cluster = ") for each in (None, [], ["a:1"], "a:1", 3)),
    *(({"worker": each}, "it must be a list") for each in (None, "a:1", 3, {"0": "a:1"})),
    *(({"worker": [each]}, PORT) for each in (1, None, True, ["a:1"], "", "a", "a:", ":1", "a:0")),
    *(
      ({"worker": [each]}, PORT)
      for each in ("a:99999", "a:-1", "a:x", "a:1.5", "a:\uff11", "a b:1")
    ),
    *(({"worker": [each]}, PORT) for each in ("::1:22", "[::1:22", "http://a:1", "a:1\n", "[]:1")),
    ({"worker": ["a:1", "a:1"]}, "TF_CONFIG has the address a:1 twice"),
    ({"worker": ["a:1"], "chief": ["a:1"]}, "TF_CONFIG has the address a:1 twice"),
    ({"chief": ["c:1", "d:1"], **WORKERS}, "TF_CONFIG has cluster.chief = "),
    ({"": ["a:1"]}, "must be the name of a job"),
    ({"x" * 500: 3}, "must be the name of a job"),
  ]
]
WRONG += [
  (json.dumps({"cluster": WORKERS, "task": task}), f"TF_CONFIG has {line}")
  for task, line in [
    *((each, "task = ") for each in (None, [], "worker", 3)),
    *(({"index": 0, **each}, "task.type = ") for each in ({}, {"type": 3}, {"type": ["worker"]})),
    ({"type": "worker"}, "task.index = null; it must be an integer from 0 to 1"),
    *(
      ({"type": "worker", "index": each}, "task.index = ")
      for each in (2, -1, True, "x", "", "-1", 0.0, 0.5, None, 10**30, [0])
    ),
  ]
]
WRONG += [(json.dumps({"cluster": WORKERS, "task": FIRST, "rpc_layer": 3}), "rpc_layer = 3")]


def test_a_tf_config_that_is_no_cluster_is_one_line(monkeypatch):
  assert len(WRONG) > 51
  for text, line in WRONG:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if text is not None:
      monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ConfigError) as caught:
      resolvers.tf_config()
    assert line in str(caught.value), text
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
  ("cluster", "task"),
  [
    ({"worker": ["[::1]:22", "10.0.0.2:65535"]}, FIRST),
    ({"worker": ["a-b.c_d.svc:2222"], "ps": []}, FIRST),
    (WORKERS, {"type": "worker", "index": "1"}),
    ({"chief": ["c:1"], **WORKERS}, {"type": "chief", "index": 0}),
  ],
)
def test_a_tf_config_that_is_a_cluster(cluster, task, monkeypatch):
  monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
  resolver = resolvers.tf_config()
  assert (resolver.task_type, resolver.task_id) == (task["type"], int(task["index"]))
  assert resolver.cluster_spec().as_dict() == {job: of or {} for job, of in cluster.items()}


def test_a_worker_finds_its_place_among_all(monkeypatch):
  config = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}
  monkeypatch.setenv("TF_CONFIG", json.dumps(config))
  peers, place = cluster.workers(resolvers.tf_config())
  assert ([str(peer) for peer in peers], place) == (["worker-0 (a:1)", "worker-1 (b:2)"], 1)


def test_a_strategy_of_one_process_is_not_one_task_of_several(mirrored):
  several = {"TF_CONFIG": json.dumps({"cluster": WORKERS, "task": FIRST})}
  line = (
    r"TF_CONFIG names 2 processes, but run.strategy makes MirroredStrategy, which trains in one"
  )
  with pytest.raises(ConfigError, match=line):
    placement.of(mirrored(2)).require_alone(several)
  single = {
    "TF_CONFIG": json.dumps({"cluster": {"chief": ["a:1"]}, "task": {"type": "chief", "index": 0}})
  }
  for environ in ({}, single, {"TF_CONFIG": "{"}):
    placement.of(mirrored(2)).require_alone(environ)


SLURM = {
  "SLURM_PROCID": "3",
  "SLURM_STEP_NUM_TASKS": "4",
  "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
  "SLURM_STEP_NODELIST": "node[1-2]",
  "CUDA_VISIBLE_DEVICES": "",
}


def test_slurm_is_read(monkeypatch):
  for name, value in SLURM.items():
    monkeypatch.setenv(name, value)
  resolver = resolvers.slurm(port_base=9000)
  peers, place = cluster.workers(resolver)
  nodes = [f"node{node}:{port}" for node in (1, 2) for port in (9000, 9001)]
  assert ([peer.address for peer in peers], place) == (nodes, 3)
  assert resolver.num_accelerators() == {"GPU": 0}


def test_no_slurm_step(monkeypatch):
  for name in SLURM:
    monkeypatch.delenv(name, raising=False)
  with pytest.raises(ConfigError, match="this process is not in a Slurm step"):
    resolvers.slurm()


# ---- The strategy ----


MISTAKES = [
  ({"communication": "mpi"}, "unknown multi_worker_mirrored.communication 'mpi'"),
  ({"communication": "nccl"}, "communication is 'nccl', but this worker has no GPU"),
  ({"start_timeout_s": 0.0}, "start_timeout_s is 0.0; it must be above 0 seconds"),
  ({"heartbeat_timeout_s": -1.0}, "heartbeat_timeout_s is -1.0; it must be above 0 seconds"),
]


@pytest.mark.parametrize(("options", "says"), MISTAKES)
def test_mistakes(options, says, monkeypatch):
  monkeypatch.delenv("TF_CONFIG", raising=False)
  with pytest.raises(ConfigError, match=re.escape(says)):
    factories.multi_worker_mirrored(**options)


@pytest.mark.parametrize(
  ("address", "says"),
  [
    (
      "local",
      "there is no TPU at tpu.address 'local' (TPUs not found in the cluster.); give 'local'",
    ),
    ("grpc://somewhere", "the address 'somewhere' is not host:port, such as '10.0.0.2:8470'."),
  ],
)
@pytest.mark.fast(address=["grpc://somewhere"])
def test_no_tpu(address, says):
  with pytest.raises(ConfigError, match=re.escape(says)):
    factories.tpu(address=address)


def test_a_tpu_that_does_not_answer():
  [port] = free_ports(1)
  with pytest.raises(ClusterError, match=f"nothing answered at 127.0.0.1:{port} within 0.3 s"):
    factories.tpu(address=f"grpc://127.0.0.1:{port}", start_timeout_s=0.3)
