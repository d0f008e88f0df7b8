"""Parameter servers: exact counts and sums although workers run side by side, die and come back.

One process (ps_cluster.py) forks 2 servers and 3 workers, runs all cases and writes what came
out; the tests compare that with NumPy.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import tiers

from loopwright.distribution.cluster import ClusterError
from loopwright.errors import ConfigError
from loopwright.inputs import datasets
from loopwright.inputs.sources import ArraySource, Source
from loopwright.inputs.streams import StreamSource
from loopwright.strategies import factories
from loopwright.strategies.parameter_server import servers
from loopwright.tools import local_cluster

HERE = Path(__file__).parents[1] / "support"
EXAMPLES, REPEATS = 203, 100


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
  """Of all cases, in their order, or of those that the fast tier looks at."""
  here = [item for item in request.session.items if item.path == request.path]
  fast = all(tiers.tier(item) == "fast" for item in here)
  output = tmp_path_factory.mktemp("ps") / "results.json"
  command = ["timeout", "-s", "KILL", "300", sys.executable, HERE / "ps_cluster.py", output]
  command += ["keras", "killed_in_training"] if fast else []
  environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
  done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads(output.read_text())


@pytest.fixture
def case(results):
  """Returns what a case of tests/support/ps_cluster.py has left."""

  def of(name):
    failed = isinstance(results[name], dict) and results[name].get("failed")
    assert not failed, failed
    return results[name]

  return of


def data():
  """As tests/support/ps_cluster.py makes it."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=[EXAMPLES, 3]).astype(np.float32)
  y = (x @ [1.5, -0.5, 0.25] + 0.1 * rng.normal(size=EXAMPLES)).astype(np.float32)
  weight = rng.uniform(0.5, 2.0, EXAMPLES).astype(np.float32)
  return x.astype(np.float64), y.astype(np.float64), weight.astype(np.float64)


def evaluated(kernel):
  x, y, weight = data()
  error = x @ kernel - y
  return np.average(error**2, weights=weight), np.average(np.abs(error), weights=weight)


def closed_form():
  x, y, weight = data()
  return np.linalg.solve(x.T @ (weight[:, None] * x), x.T @ (weight * y))


KINDS = pytest.mark.parametrize("kind", ["keras", "tf_keras", "module"])


@pytest.mark.fast(kind=["keras"])
@KINDS
def test_a_regression_comes_near_its_solution(case, kind):
  np.testing.assert_allclose(case(kind)["kernel"], closed_form(), atol=0.03)


@pytest.mark.fast(kind=["keras"])
@KINDS
def test_every_step_is_counted_and_the_loop_is_traced_once(case, kind):
  result, steps = case(kind), 100 + 1 + 7 + 292
  assert (result["step"], result["iterations"], result["position"]) == (steps, steps, 8 * steps)
  assert result["traces"] == 1


@pytest.mark.fast(kind=["keras"])
@KINDS
def test_an_evaluation_counts_every_example_once(case, kind):
  loss, mae = evaluated(np.array(case(kind)["kernel"]))
  evaluation = case(kind)["eval"]
  assert evaluation["examples"] == EXAMPLES
  np.testing.assert_allclose([evaluation["loss"], evaluation["mae"]], [loss, mae], rtol=1e-5)


def test_metrics_that_are_no_means_hold_every_example_once(case):
  """More metrics than a loop has room for at first; the examples come in the source's order."""
  x, y, _ = data()
  detailed = case("keras")["detailed"]
  assert detailed["seen"] == [1.0] * EXAMPLES
  assert detailed["ids"] == list(range(EXAMPLES))
  errors = x @ np.array(case("keras")["kernel"]) - y
  np.testing.assert_allclose(detailed["errors"], errors, rtol=1e-4, atol=1e-5)
  assert detailed["59"] == pytest.approx([59.0, 59.0], rel=1e-6)
  assert detailed["trained on"] == 4 * 8


@pytest.mark.whole
def test_ten_runs_end_at_their_very_last_step(case):
  wanted = [11 + run + 1 + 20 for run in range(10)]
  assert [run["step"] for run in case("exact")] == wanted
  assert [run["iterations"] for run in case("exact")] == wanted


@pytest.mark.whole
def test_cadence_and_kept_state_are_those_of_one_process(case):
  fast, rare, slow, losses = 1.0, 1.0, 1.0, []
  for step in range(7):
    gradient = slow * (step + 1)
    losses.append(gradient * rare if step % 3 == 1 else np.nan)
    fast, rare = fast - 0.125 * gradient, rare - 0.125 * gradient * (step % 3 == 1)
    slow = 0.75 * slow + 0.25 * fast
  got = case("kept")
  assert [got[name] for name in ("fast", "rare", "slow")] == pytest.approx([fast, rare, slow])
  assert (got["count"], got["rare_losses"]) == (4 * 8, pytest.approx(losses, nan_ok=True))


@pytest.mark.whole
def test_staleness_is_the_number_of_updates_that_came_between(case):
  several = [run["staleness"] for run in case("exact")]
  assert case("keras")["logs"][1]["staleness"] == 0  # a loop of one step
  assert case("alone")["staleness"] == 0  # 500 steps of a single worker
  assert max(several) > 0


@pytest.mark.whole
def test_workers_draw_different_random_numbers(case):
  pairs = case("identities")
  assert all(worker == replica for worker, replica in pairs)
  assert len({worker for worker, _ in pairs}) > 1


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["tf_keras", "module"])
def test_partitioned_variables_lie_on_all_servers_and_learn(case, kind):
  result = case(f"partitioned_{kind}")
  assert result["shapes"] == [[32, 4], [32, 4]]
  assert len(set(result["devices"])) == 2
  # Each of 64 one-hot examples has 4 weights of 1 and so a loss of 16, which a step on it lowers;
  # the first 64, in whatever order two workers read, may all be different ones.
  assert 16 >= result["losses"][0] > result["losses"][1]
  assert result["step"] == 16


@pytest.mark.whole
@pytest.mark.parametrize(
  ("what", "message"),
  [
    ("keras", r"min_shard_bytes partitions 'sequential\w*/dense\w*/kernel', .* Keras 3 model"),
    ("eager", "received both run.eager=True and run.strategy=@parameter_server"),
    ("jit_compile", "received both Trainer.jit_compile=True and run.strategy=@parameter_server"),
    ("loss_scale", "Trainer.loss_scale is @dynamic, but under parameter_server"),
    ("plain trainer", "Trainer needs a synchronous strategy, but parameter_server is"),
    ("plain evaluator", "Evaluator needs a synchronous strategy, but parameter_server is"),
    ("observer", "Observer observes steps of all replicas together, but parameter_server is"),
    ("dataset", "Evaluator got a dataset, but under parameter_server each worker makes its own"),
    ("perturbed", r"step.perturbed\(\) needs a synchronous strategy, but parameter_server is"),
    ("python", r"the input runs Python \(tf.numpy_function"),
    (
      "stream",
      "the input is a StreamSource, whose tf.data.Dataset is made on the chief; the workers",
    ),
  ],
)
def test_what_cannot_work_is_refused(case, what, message):
  line = case("refused")[what]
  assert re.search(message, line)
  assert "\n" not in line


@pytest.mark.whole
def test_a_run_goes_on_from_its_checkpoint(case):
  result = case("resumes")
  trained = [line["step"] for line in result["lines"] if line["split"] == "train"]
  assert trained == [10, 20, 30, 40, 45]
  assert [line["step"] for line in result["lines"] if line["split"] == "eval"] == [20, 45]
  assert result["checkpoints"] == ["ckpt-20.index", "ckpt-45.index"]
  first, second = (run["loss"] for run in result["results"])
  assert second < first
  assert all(run["examples"] == EXAMPLES for run in result["results"])


@pytest.mark.whole
def test_nobody_waits_for_a_stopped_worker_but_for_its_own_step(case):
  """It holds at most the one step that it had claimed of the loop from step 10 to 310."""
  result = case("stopped")
  assert result["without"] in (309, 310)
  assert result["was_waiting"]
  assert result["step"] == 310


@pytest.mark.whole
def test_a_worker_that_stays_stopped_is_named_in_time(case):
  result = case("stopped")
  assert result["line"].startswith("lost worker-2 (127.0.0.1:")
  assert "has not answered for 1 s" in result["line"]
  assert 0.5 < result["seconds"] < 30


def test_a_worker_killed_in_training_changes_no_count(case):
  result = case("killed_in_training")
  assert result["alive"] == [0, 1]
  assert result["step"] == 1010
  assert result["logs"][0]["loss"] < 0.1


@pytest.mark.whole
def test_a_worker_killed_in_evaluation_changes_no_sum(case):
  result = case("killed_in_evaluation")
  whole, over = result["seconds"]
  assert result["alive"] == [0]
  assert over > whole / 3, "the evaluation was over before the worker was killed"
  loss, mae = evaluated(np.zeros(3))
  evaluation = result["eval"]
  assert evaluation["examples"] == EXAMPLES * REPEATS
  np.testing.assert_allclose([evaluation["loss"], evaluation["mae"]], [loss, mae], rtol=1e-5)


@pytest.mark.whole
def test_workers_that_come_back_work_on(case):
  """They do the rest: the one that had stayed was killed on the way."""
  result = case("comes_back")
  assert result["alive"] == [1, 2]
  assert result["step"] == result["before"] + 500


@pytest.mark.whole
def test_a_lost_server_is_named_in_one_line(case):
  line = case("killed_server")
  assert line.startswith("lost ps-1 (127.0.0.1:")
  assert line.endswith("start again to continue from the newest checkpoint")


# ---- Without a cluster ----


class Recording(Source):
  """Notes which examples are asked for."""

  num_examples = 20

  def __init__(self):
    self.fetched = []

  def fetch(self, indices):
    def note(indices):
      self.fetched += indices.tolist()
      return indices

    noted = tf.ensure_shape(tf.numpy_function(note, [indices], tf.int64), indices.shape)
    return {"x": noted}


def ids(dataset, batches):
  return [batch["example_id"].tolist() for batch in dataset.take(batches).as_numpy_iterator()]


def test_shards_take_the_batches_in_turn():
  source = ArraySource(features={"x": np.arange(20)})
  options = {"global_batch_size": 4, "seed": 3, "position": 8}
  whole = ids(datasets.train_dataset(source, **options), 9)
  for worker in range(3):
    shard = datasets.train_dataset(source, shard=(3, tf.constant(worker, tf.int64)), **options)
    assert ids(shard, 3) == whole[worker::3]


def test_shards_of_a_stream_take_the_batches_in_turn():
  stream = tf.data.Dataset.from_tensor_slices({"x": np.arange(20)})
  source = StreamSource(dataset=stream)
  whole = ids(datasets.train_dataset(source, global_batch_size=4), 8)
  for worker in range(2):
    shard = datasets.train_dataset(source, global_batch_size=4, shard=(2, worker))
    assert ids(shard, 4) == whole[worker::2]


def test_a_shard_does_not_fetch_the_batches_of_others():
  source = Recording()
  dataset = datasets.eval_dataset(source, global_batch_size=4, shard=(2, 1))
  assert ids(dataset, -1) == [[4, 5, 6, 7], [12, 13, 14, 15]]
  assert sorted(source.fetched) == [4, 5, 6, 7, 12, 13, 14, 15]


def resolver(task_type="chief", **jobs):
  return tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec(jobs), task_type=task_type, task_id=0, rpc_layer="grpc"
  )


def whole_cluster(task_type):
  return resolver(task_type, **local_cluster.make_cluster(workers=2, ps=1))


def test_workers_that_do_not_come_are_named():
  with pytest.raises(
    ClusterError, match=r"^ps-0 .*, worker-0 .*, worker-1 .* did not answer within 0.3 s$"
  ):
    factories.parameter_server(resolver=lambda: whole_cluster("chief"), start_timeout_s=0.3)


@pytest.mark.parametrize("job", ["worker", "ps"])
def test_a_worker_or_server_serves_and_does_not_train(job):
  made = factories.parameter_server(resolver=lambda: whole_cluster(job))
  assert isinstance(made, servers.Server)


@pytest.mark.parametrize(
  "jobs",
  [
    {"worker": ["a:1", "b:1"]},
    {"chief": ["a:1"], "worker": ["b:1"]},
    {"chief": ["a:1", "c:1"], "worker": ["b:1"], "ps": ["d:1"]},
  ],
)
def test_a_cluster_without_the_three_jobs_is_refused(jobs):
  with pytest.raises(ConfigError, match="needs a cluster of one chief, workers and ps"):
    factories.parameter_server(resolver=lambda: resolver(next(iter(jobs)), **jobs))


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"start_timeout_s": 0}, "start_timeout_s is 0; it must be above 0 seconds"),
    ({"heartbeat_timeout_s": -1}, "heartbeat_timeout_s is -1; it must be above 0 seconds"),
    ({"min_shard_bytes": 0}, "min_shard_bytes is 0; it must be a whole number of at least 1"),
    ({"max_shards": 2}, "max_shards is 2 without min_shard_bytes"),
  ],
)
def test_options_out_of_range_are_refused(options, message):
  with pytest.raises(ConfigError, match=message):
    factories.parameter_server(resolver=lambda: whole_cluster("chief"), **options)
