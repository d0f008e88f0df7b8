"""Workers that compare what they share: threads in the place of processes."""

import concurrent.futures
import contextlib
import importlib
import itertools
import json
import os
import re
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
from loopwright.runs import builder, resume_rules
from loopwright.strategies import factories
from loopwright.strategies.workers import identity as cluster
from loopwright.strategies.workers import rendezvous, resolvers
from loopwright.tools.local_cluster import make_cluster as local_addresses


def resolver(addresses, index, job="worker"):
  return tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec({"worker": addresses}), task_type=job, task_id=index
  )


class Service:
  """TensorFlow's coordination service, of threads that stand for workers."""

  def __init__(self):
    self._texts, self._changed = {}, threading.Condition()

  def set_config_key_value(self, key, text):
    with self._changed:
      self._texts[re.sub(r"/\d+/", "/", key, count=1)] = text  # without the number of the call
      self._changed.notify_all()

  def get_config_key_value(self, key, timeout_in_ms):
    key = re.sub(r"/\d+/", "/", key, count=1)
    with self._changed:
      if not self._changed.wait_for(lambda: key in self._texts, timeout_in_ms / 1000):
        raise tf.errors.DeadlineExceededError(None, None, key)
      return self._texts[key]


def compared(monkeypatch, facts, *, size=None, timeout_s=10.0):
  """Returns what each worker that comes raises, or None; a thread for each."""
  service = Service()
  monkeypatch.setattr(cluster.context, "context", lambda: service)

  def one(index):
    try:
      make_cluster(size or len(facts), index).require_alike(facts[index], timeout_s=timeout_s)
    except (ClusterError, ConfigError) as error:
      return str(error)
    return None

  with concurrent.futures.ThreadPoolExecutor(len(facts)) as pool:
    return list(pool.map(one, range(len(facts))))


ALIKE = {"run.seed": "1", "version of keras": "3.15.1"}


@pytest.mark.parametrize(
  ("odd", "other", "difference"),
  [
    (1, {"run.seed": "2"}, "run.seed, 2 and not 1"),
    (2, {"run.seed": "2", "version of keras": "4"}, "run.seed, 2 and not 1 (and 1 more)"),
    (2, {"a": "b"}, "a, b and not missing"),
    (0, {"a": "x" * 300}, f"a, missing and not {'x' * 200}... (digest "),
  ],
)
def test_one_that_differs_is_named_on_all(odd, other, difference, monkeypatch):
  facts = [ALIKE, ALIKE, ALIKE]
  facts[odd] = {**ALIKE, **other}
  first, *more = compared(monkeypatch, facts)
  assert more == [first, first]
  named = f"worker-{odd or 1} (10.0.0.{odd or 1}:1) differs from worker-0 (10.0.0.0:1) in its "
  assert first.startswith(f"{named}{difference}")
  assert first.endswith("; start all workers with the same command.")


def test_workers_that_are_alike_go_on(monkeypatch):
  assert compared(monkeypatch, [ALIKE] * 3) == [None] * 3
  assert compared(monkeypatch, [ALIKE]) == [None]


def test_one_that_ends_before_it_has_told_is_named(monkeypatch):
  line = "lost worker-2 (10.0.0.2:1), which stopped answering, before the first step"
  assert compared(monkeypatch, [ALIKE] * 2, size=3, timeout_s=0.2) == [line] * 2


BARRIER = (
  "Barrier timed out. # of tasks that reached the barrier: 1/3.\nThe first task at the barrier: "
  "/job:worker/replica:0/task:0. Some timed out task names:\n{}\n\nAdditional GRPC error "
  "information from remote target /job:worker/replica:0/task:0 while calling"
)
SILENT = "Deadline Exceeded\nAdditional GRPC error information from remote target"


@pytest.mark.parametrize(
  ("index", "message", "missing"),
  [
    (0, BARRIER.format("/job:worker/replica:0/task:2\n"), "worker-2 (10.0.0.2:1)"),
    (
      0, BARRIER.format("/job:worker/replica:0/task:1\n/job:worker/replica:0/task:2\n"),
      "worker-1 (10.0.0.1:1), worker-2 (10.0.0.2:1)",
    ),
    (1, BARRIER.format("/job:worker/replica:0/task:2\n"), "worker-2 (10.0.0.2:1)"),
    (1, f"{SILENT} /job:worker/replica:0/task:0", "worker-0 (10.0.0.0:1)"),
    (0, "Deadline Exceeded", "worker-1 (10.0.0.1:1) or worker-2 (10.0.0.2:1)"),
  ],
)  # fmt: skip
def test_who_does_not_come_is_named(index, message, missing, monkeypatch):
  def late(*_):
    raise tf.errors.DeadlineExceededError(None, None, message)

  found = resolver([f"10.0.0.{worker}:1" for worker in range(3)], index)
  monkeypatch.setattr(rendezvous, "configure_runtime", lambda *_, **__: None)
  monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", late)
  with pytest.raises(ClusterError) as caught:
    factories.multi_worker_mirrored(resolver=lambda: found, start_timeout_s=7.0)
  assert str(caught.value) == f"{missing} did not connect within 7 s"


def test_a_taken_port_is_told(monkeypatch):
  def taken(*_):
    raise tf.errors.UnknownError(None, None, "Could not start gRPC server")

  monkeypatch.setattr(rendezvous, "configure_runtime", lambda *_, **__: None)
  monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", taken)
  with pytest.raises(ClusterError) as caught:
    factories.multi_worker_mirrored(resolver=lambda: resolver(["a:1", "b:2"], 1))
  assert str(caught.value) == (
    "cannot listen on b:2, this worker's own address: another process uses the port"
  )


@pytest.mark.parametrize("own", ["", "x"])
def test_grpc_takes_no_proxy_unless_it_has_one_of_its_own(own, monkeypatch):
  name = "grpc_proxy"
  monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
  monkeypatch.setenv(name, own)
  if not own:
    monkeypatch.delenv(name)
  rendezvous.avoid_proxies()
  assert os.environ[name] == own


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


def test_a_worker_lost_while_tensorflow_connects_is_blamed(monkeypatch):
  def lost(*_):
    raise tf.errors.DeadlineExceededError(None, None, LOST[1][0])

  found = resolver(["a:1", "b:2", "c:3"], 0)
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
  [address] = local_addresses(workers=1)["worker"]
  with pytest.raises(ClusterError, match=f"nothing answered at {address} within 0.3 s"):
    factories.tpu(address=f"grpc://{address}", start_timeout_s=0.3)


@pytest.mark.parametrize(
  ("size", "layers", "line"),
  [
    (
      4, [], "run.per_replica_batch_size = 4 is part of the update, which would change with it: "
      "set run.global_batch_size instead",
    ),
    (
      None, [keras.layers.BatchNormalization(name="bn")], "the batch normalisation 'bn' averages "
      "over each replica's own rows, which would change with it: set its synchronized=True",
    ),
    (None, [keras.layers.BatchNormalization(synchronized=True)], ""),
  ],
)  # fmt: skip
def test_what_depends_on_the_number_of_workers_is_refused_if_it_varies(
  size, layers, line, monkeypatch
):
  monkeypatch.setenv("LOOPWRIGHT_WORKERS", "1:2")
  model = keras.Sequential([keras.Input([3]), *layers, keras.layers.Dense(1)])
  trainer = types.SimpleNamespace(task=types.SimpleNamespace(model=model))
  with pytest.raises(ConfigError) if line else contextlib.nullcontext() as caught:
    resume_rules.require_any_size(trainer, size)
  if line:
    assert str(caught.value) == (
      f"the number of workers may vary (1:2), but {line}, or give one number of workers."
    )
