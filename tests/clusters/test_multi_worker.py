"""Real processes on loopback: several workers learn what one does, and go on after faults."""

import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import clustered
import numpy as np
import pytest
import runs
from input_cases import ledger_digest

import launch
from loopwright.monitoring import stragglers
from loopwright.tools.ledger import __main__
from loopwright.tools.local_cluster import make_cluster

ROOT = Path(launch.__file__).parent
SUPPORT = ROOT / "tests" / "support"
BATCH, STEPS, RATE = 8, 10, 0.05
CONFIG = """
import clustered

run.task = @Clustered()
Clustered.folder = '{folder}'
run.actions = [@Keeper()]
Keeper.folder = '{folder}'
run.strategy = @multi_worker_mirrored
run.optimizer = {{'default': @keras.SGD, 'rare': @keras.SGD}}
keras.SGD.learning_rate = {rate}
run.global_batch_size = {batch}
run.train_steps = {steps}
run.steps_per_loop = 1
run.checkpoint_every_steps = 2
"""


class Outcome:
  """What a run printed and left behind."""

  def __init__(self, folder, done):
    self.folder, self.status = folder, done.returncode
    self.out, self.err = done.stdout, done.stderr

  def records(self, split):
    return runs.records(self.folder / "m", split)

  def variables(self, worker):
    with np.load(self.folder / f"variables-{worker}.npz") as arrays:
      return [arrays[name] for name in arrays.files]

  def ids(self, worker):
    lines = (self.folder / f"ids-{worker}").read_text().splitlines()
    return np.array([list(map(int, line.split())) for line in lines])


def run(folder, workers, *params, flags=(), env=None, program=(str(ROOT / "launch.py"),)):
  folder.mkdir(exist_ok=True)
  config = folder / "config.gin"
  config.write_text(CONFIG.format(folder=folder, rate=RATE, batch=BATCH, steps=STEPS))
  command = [sys.executable, *program, f"--gin_file={config}"]
  command += [f"--gin_param={param}" for param in params]
  command += [f"--local_workers={workers}", f"--model_dir={folder / 'm'}", *flags]
  environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", **(env or {})}
  done = subprocess.run(
    command, cwd=SUPPORT, capture_output=True, text=True, env=environment, timeout=240
  )
  return Outcome(folder, done)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """Two workers (4 rows each) and three (3 rows each, one of the 9 is padding), as asked for."""
  return functools.cache(lambda n: run(tmp_path_factory.mktemp(f"workers{n}"), n))


def reference(order):
  """The same regression in float64, over the examples in the order in which they came."""
  kernel, losses = clustered.KERNEL[:, 0].astype(np.float64), []
  rare, slow = np.ones(3), np.zeros(3)
  for step, ids in enumerate(order):
    weight = clustered.WEIGHT[ids].astype(np.float64)
    error = clustered.X[ids].astype(np.float64) @ kernel - clustered.Y[ids]
    losses.append(weight @ error**2 / weight.sum())
    kernel = kernel - RATE * 2 * (weight * error) @ clustered.X[ids] / weight.sum()
    if step % 3 == 1:
      rare = rare - RATE * weight @ clustered.X[ids] / weight.sum()
    if step % 2 == 0:
      slow = 0.75 * slow + 0.25 * kernel
  return [kernel, rare, slow], losses


def order(outcome, workers):
  """The real examples of each step, all workers' together."""
  ids = np.concatenate([outcome.ids(worker) for worker in range(workers)], axis=1)
  return [row[row >= 0] for row in ids]


@pytest.mark.fast(workers=[2])
@pytest.mark.parametrize("workers", [2, 3])
def test_the_workers_read_disjoint_shares_of_the_same_batches(workers, trained):
  steps = order(trained(workers), workers)
  assert [len(ids) for ids in steps] == [BATCH] * STEPS
  stream = np.concatenate(steps)
  for epoch in range(STEPS * BATCH // clustered.EXAMPLES):
    first = epoch * clustered.EXAMPLES
    seen = stream[first : first + clustered.EXAMPLES]
    assert sorted(seen) == list(range(clustered.EXAMPLES))
  np.testing.assert_array_equal(stream, np.concatenate(order(trained(2), 2)))


@pytest.mark.fast(workers=[2])
@pytest.mark.parametrize("workers", [2, 3])
def test_they_learn_what_one_worker_would(workers, trained):
  outcome = trained(workers)
  assert (outcome.status, outcome.err.count("Traceback")) == (0, 0), outcome.err
  values, losses = reference(order(outcome, workers))
  got = [record["loss"] for record in outcome.records("train")]
  assert got == pytest.approx(losses, rel=1e-5)
  for worker in range(workers):
    for variable, value in zip(outcome.variables(worker), values, strict=True):
      np.testing.assert_allclose(variable.reshape([-1]), value, rtol=1e-5)


@pytest.mark.fast(workers=[2])
@pytest.mark.parametrize("workers", [2, 3])
def test_an_evaluation_counts_each_example_once(workers, trained):
  variable, *_ = trained(workers).variables(0)
  error = clustered.X.astype(np.float64) @ variable[:, 0] - clustered.Y
  [record] = trained(workers).records("eval")
  assert record["loss"] == pytest.approx(np.average(error**2, weights=clustered.WEIGHT), rel=1e-5)
  assert record["rows"] == 1.0
  assert record["halves"] == [15.0, 15.0]


def test_only_the_chief_writes(trained):
  model_dir = trained(2).folder / "m"
  assert [record["step"] for record in trained(2).records("train")] == list(range(1, STEPS + 1))
  names = sorted(path.name for path in (model_dir / "checkpoints").iterdir())
  saved = [f"ckpt-{step}" for step in (10, 6, 8)]
  kinds = ("data-00000-of-00001", "index")
  assert names == ["checkpoint", *(f"{ckpt}.{kind}" for ckpt in saved for kind in kinds)]
  assert trained(2).out.count("done: step 10") == 1
  assert len(list((model_dir / "train").iterdir())) == 1


def test_each_worker_records_its_own_times(trained):
  """Of all loops but the first, which is traced; the chief prints them at the end."""
  found = stragglers.paces(str(trained(2).folder / "m"))
  assert found.keys() == {0, 1}
  for pace in found.values():
    assert pace.keys() == {"input", "compute", "collective"}
    assert pace["compute"] > 0
  assert stragglers.table(found) in trained(2).err


@pytest.mark.whole
def test_an_infinite_loss_is_traced_to_its_worker_and_example(trained, tmp_path):
  """The target of the example that is read last; in `trained` two workers read the same ones."""
  ids = np.stack([trained(2).ids(worker) for worker in (0, 1)])  # [worker, step, row]
  first = {i: np.argwhere(ids == i)[:, 1].min() for i in range(clustered.EXAMPLES)}
  guilty = max(first, key=first.get)
  [[worker, _]] = np.argwhere(ids[:, first[guilty]] == guilty)
  spoiled = (f"Clustered.infinite = {guilty}", "run.actions = [@StopOnNonFinite()]")
  stopped = run(tmp_path, 2, *spoiled)
  message, _, replay = stopped.err.partition("; replay the step: ")
  assert f"failed: the loss became NaN or infinite at step {first[guilty] + 1}." in message

  _, *command = shlex.split(replay.splitlines()[0])
  again = subprocess.run(
    [sys.executable, "-m", "loopwright", *command],
    cwd=SUPPORT, capture_output=True, text=True, timeout=240,
  )  # fmt: skip
  assert (stopped.status, again.returncode) == (1, 0), again.stderr
  found = [str(worker), "loss", "inf", str(guilty)]
  for number in (0, 1):
    log = (tmp_path / "m" / "logs" / f"worker-{number}.log").read_text()
    rows = [re.split("  +", line)[1:] for line in log.splitlines() if "  loss  " in line]
    assert rows == ([found] * 2 if number == worker else [])  # once by the run, once by the replay


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
  """Batch normalisation: state of each replica's own, which all workers must help to save."""
  return run(tmp_path_factory.mktemp("unbroken"), 2, *STATEFUL)


STATEFUL = ("Clustered.batch_norm = True", "keras.SGD.momentum = 0.5")


SIGNALS = {
  "worker 1 step 3": int(signal.SIGTERM),
  "worker 1 step 5": int(signal.SIGKILL),
  "worker 0 step 7": int(signal.SIGKILL),
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
  """The same, stopped by SIGTERM and started again; then each worker is killed, and all restart.

  Each worker keeps half of the momenta.
  """
  folder = tmp_path_factory.mktemp("broken")
  params = (*STATEFUL, "run.ledger = True", f"Keeper.signals = {SIGNALS}")
  params += ("Trainer.shard_optimizer_state = True",)
  first = run(folder, 2, *params)
  saved = sorted(path.name for path in (folder / "m" / "checkpoints").glob("*.index"))
  return first, saved, run(folder, 2, *params, flags=["--max_restarts=2"])


@pytest.mark.whole
def test_sigterm_on_one_worker_saves_and_ends_all(broken):
  first, saved, _ = broken
  assert first.status == 75, first.err
  assert saved == ["ckpt-2.index", "ckpt-3.index"]


@pytest.mark.whole
@pytest.mark.parametrize("moment", ["connecting", "terminates"])
def test_sigterm_while_or_after_the_workers_connect_is_not_lost(tmp_path, moment):
  """TensorFlow sets a handler of its own as it connects, which any thread may run."""
  run(tmp_path, 2, f"Clustered.{moment} = 1")
  log = (tmp_path / "m" / "logs" / "worker-1.log").read_text()
  assert "SIGTERM: exited, nothing to save" in log


@pytest.mark.whole
def test_a_killed_worker_is_named_and_costs_nothing(broken, unbroken):
  *_, outcome = broken
  assert outcome.status == 0, outcome.err
  assert outcome.err.count("worker-1 was killed by SIGKILL") == 1
  assert outcome.err.count("worker-0 was killed by SIGKILL") == 1
  for worker in (0, 1):
    for got, wanted in zip(outcome.variables(worker), unbroken.variables(worker), strict=True):
      np.testing.assert_array_equal(got, wanted)
  assert [r["step"] for r in outcome.records("train")] == list(range(1, STEPS + 1))


@pytest.mark.whole
def test_the_ledger_proves_that_nothing_was_skipped_or_repeated(broken, unbroken, capsys):
  *_, outcome = broken
  assert __main__.main([str(outcome.folder / "m")]) == 0
  told = f"steps 1 to {STEPS}: each consumed exactly once (2 workers, 4 starts"
  assert told in capsys.readouterr().out
  for worker in (0, 1):
    lines = (outcome.folder / "m" / f"ledger-{worker}.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines if "hashes" in line]
    seen = unbroken.ids(worker)
    for entry in entries:  # a loop is one step
      ids = seen[entry["first_step"] - 1]
      assert entry["hashes"] == [f"{ledger_digest(ids[ids >= 0]):016x}"]
    assert {entry["first_step"] for entry in entries} == set(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def resized(tmp_path_factory):
  """Three workers, or two after a loss: worker 1 is killed after step 4, worker 0 after step 12."""
  folder = tmp_path_factory.mktemp("resized")
  signals = {"worker 1 step 4": signal.SIGKILL.value, "worker 0 step 12": signal.SIGKILL.value}
  params = [f"Keeper.signals = {signals}", "Keeper.pause_s = 0.3", "run.ledger = True",
            "run.train_steps = 20"]  # fmt: skip
  program = (
    "import functools, sys; from loopwright.commands import main; "
    "from loopwright.tools import local_cluster as cluster; "
    "cluster.LocalCluster = functools.partial(cluster.LocalCluster, rest_s=0.5); "
    "sys.exit(main(sys.argv))"
  )
  return run(folder, "2:3", *params, program=["-c", program])


@pytest.mark.whole
def test_a_run_goes_on_with_the_workers_that_are_left_and_grows_back(resized):
  assert resized.status == 0, resized.err
  told = re.findall(r"going on with 2 of|growing to 3 workers", resized.err)
  assert told[:3] == ["going on with 2 of", "growing to 3 workers", "going on with 2 of"]
  history = (resized.folder / "m" / "history.jsonl").read_text().splitlines()
  sizes = [json.loads(line)["in_use"]["workers"] for line in history]
  assert sizes[:4] == ["3", "2", "3", "2"]
  legs = (resized.folder / "m" / "flight" / "0.jsonl").read_text().splitlines()
  begins = [leg["from_step"] for leg in map(json.loads, legs) if leg["first"]]
  assert begins[0] == 0
  assert begins[1] in (2, 4)  # of the newest checkpoint


@pytest.mark.whole
def test_a_run_of_several_sizes_is_the_same_run(resized, tmp_path, capsys):
  assert __main__.main([str(resized.folder / "m")]) == 0
  assert "steps 1 to 20: each consumed exactly once" in capsys.readouterr().out
  whole = run(tmp_path / "whole", 2, "run.train_steps = 20")
  learned, losses = reference(order(whole, 2))
  for got, wanted in zip(resized.variables(0), learned, strict=True):
    np.testing.assert_allclose(got.reshape(-1), wanted, rtol=1e-5, atol=1e-6)
  assert [r["step"] for r in resized.records("train")] == list(range(1, 21))
  np.testing.assert_allclose([r["loss"] for r in resized.records("train")], losses, rtol=1e-5)


def started(folder, config, cluster, worker, *params):
  """Starts one worker of a cluster, as a scheduler does."""
  task = {"type": "worker", "index": worker}
  tf_config = json.dumps({"cluster": {"worker": cluster}, "task": task})
  command = [sys.executable, str(ROOT / "launch.py"), f"--gin_file={config}"]
  command += [f"--gin_param={param}" for param in params]
  env = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CONFIG": tf_config}
  return subprocess.Popen(
    [*command, f"--model_dir={folder / 'm'}"], cwd=SUPPORT, env=env, stderr=subprocess.PIPE,
    text=True,
  )  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize("trouble", ["differs", "does not come"])
def test_workers_that_do_not_fit_together_end_in_one_line(tmp_path, trouble):
  """`run.seed` and `run.train_steps` differ, behind a proxy; or one of three does not come."""
  config = tmp_path / "config.gin"
  config.write_text(CONFIG.format(folder=tmp_path, rate=RATE, batch=BATCH, steps=STEPS))
  differs = trouble == "differs"
  cluster = make_cluster(workers=2 if differs else 3)["worker"]
  params = [[f"run.train_steps = {worker + 3}", f"run.seed = {worker}"] for worker in (0, 1)]
  short = ["multi_worker_mirrored.start_timeout_s = 20.0"]
  processes = [
    started(tmp_path, config, cluster, worker, *(params[worker] if differs else short))
    for worker in (0, 1)
  ]
  errors = [process.communicate(timeout=120)[1] for process in processes]
  one, two = (f"worker-{i} ({cluster[i]})" for i in ((0, 1) if differs else (0, 2)))
  line = (
    f"error: {two} differs from {one} in its run.seed, 1 and not 0 (and 1 more); start all workers "
    "with the same command."
    if differs
    else f"failed: {two} did not connect within 20 s"
  )
  assert [process.returncode for process in processes] == [2 if differs else 1] * 2
  assert [error.splitlines().count(line) for error in errors] == [1, 1], errors
