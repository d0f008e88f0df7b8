"""Trackers: what a run logs arrives under its step, in one run however often it starts again."""

import contextlib
import json
import os
import sys
import threading
import types

import numpy as np
import pytest
import tensorflow as tf

from loopwright.actions.base import Run
from loopwright.errors import ConfigError, Preempted
from loopwright.reporting.board import Board
from loopwright.run_folder.metrics_log import MetricsLog
from loopwright.tools.trackers.base import Tracker, without_secrets
from loopwright.tools.trackers.mlflow import MLflow
from loopwright.tools.trackers.wandb import WandB


@pytest.fixture
def model_dir(tmp_path):
  (tmp_path / "run").mkdir()
  return str(tmp_path / "run")


class Remote:
  """A tracker's server: what has arrived, and whether it answers."""

  def __init__(self):
    self.rows, self.pictures, self.closed, self.ids = [], [], [], []
    self.down = False
    self.gate = threading.Event()
    self.gate.set()

  @property
  def steps(self):
    return [(name, step) for name, step, _ in self.rows]


class ToRemote(Tracker):
  uploads = ("metrics.jsonl", "export")

  def __init__(self, remote):
    self.remote = remote

  def connect(self, run_id):
    self._answer()
    self.remote.ids.append(run_id)
    return {name: step for name, step, _ in sorted(self.remote.rows, key=lambda row: row[1])}

  def log(self, split, step, wall_time, values):
    self._answer()
    assert wall_time > 1e9
    self.remote.rows += [(name, step, value) for name, value in values.items()]

  def show(self, name, step, path):
    self.remote.pictures.append((name, step, os.path.basename(path)))

  def close(self, status, uploads):
    self.remote.gate.wait()
    self.remote.closed.append((status, sorted(uploads)))

  def _answer(self):
    if self.remote.down:
      raise ConnectionError("https://me:secret@host is down")


class Process:
  """One process of a run."""

  def __init__(self, model_dir, *trackers, is_chief=True, restored=0, config=None):
    self.step, self.split = tf.Variable(restored, dtype=tf.int64), "train"
    self.log = MetricsLog(os.path.join(model_dir, "metrics.jsonl"))
    self.log.trim(restored)
    self.said, self.trackers = [], trackers
    self.board = Board(model_dir, step=lambda: int(self.step.numpy()))
    run = Run(
      task=None,
      strategy=None,
      trainer=None,
      evaluator=None,
      checkpoint=None,
      metrics_log=self.log,
      global_step=self.step,
      model_dir=model_dir,
      is_chief=is_chief,
      actions=trackers,
      message=self.said.append,
      board=self.board,
      config=config or {},
      current_split=lambda: self.split,
    )
    for tracker in trackers:
      tracker.bind(run)
    for tracker in trackers:
      tracker.begin()

  def loop(self, step, split="train", **values):
    self.step.assign(step)
    self.split = split
    for tracker in self.trackers:
      tracker({"loss": np.float32(1 / step), **values})
    self.log.append(step, split, {"loss": 1 / step, **values})

  def end(self):
    for tracker in self.trackers:
      tracker.end()

  def end_with(self, error):
    """As `Session._train`."""
    with contextlib.suppress(type(error)):
      try:
        raise error
      finally:
        self.end()


def test_each_value_arrives_once_and_in_order(model_dir):
  remote = Remote()
  process = Process(model_dir, ToRemote(remote))
  for step in (2, 4):
    process.loop(step, array=np.arange(3), nested={"a@b": 0.75})
  process.loop(4, "eval")
  process.end()
  assert remote.rows == [
    ("train/loss", 2, 0.5), ("train/nested/a_b", 2, 0.75), ("train/loss", 4, 0.25),
    ("train/nested/a_b", 4, 0.75), ("eval/loss", 4, 0.25),
  ]  # fmt: skip
  assert remote.closed == [("finished", ["metrics.jsonl"])]
  assert process.said == []


def test_a_killed_run_goes_on_with_its_curve(model_dir):
  remote = Remote()
  process = Process(model_dir, ToRemote(remote))
  for step in (10, 20, 30):
    process.loop(step)
  process = Process(model_dir, ToRemote(remote), restored=10)  # its newest checkpoint
  for step in (20, 30, 40):
    process.loop(step)
  process.loop(40, "eval")
  assert remote.steps == [
    *(("train/loss", step) for step in (10, 20, 30, 40)), ("eval/loss", 40)
  ]  # fmt: skip
  assert remote.ids[0] == remote.ids[1]


def test_the_run_of_an_earlier_version_goes_on(model_dir):
  os.mkdir(os.path.join(model_dir, "trackers"))
  with open(os.path.join(model_dir, "trackers", "ToRemote.json"), "w") as file:
    json.dump({"id": "1" * 32, "run": "the run", "sent": {"train": 10}, "uploaded": -1}, file)
  remote = Remote()
  Process(model_dir, ToRemote(remote))
  assert remote.ids == ["1" * 32]


def test_a_tracker_that_is_down_is_one_warning_and_the_next_start_sends_the_rest(model_dir):
  remote, other = Remote(), Remote()
  process = Process(model_dir, ToRemote(remote), ToRemote(other))
  process.loop(10)
  remote.down = True
  for step in (20, 30):
    process.loop(step)
  process.end()
  assert process.said == [
    "warning: ToRemote fails (https://***@host is down); training goes on without it, and the next "
    "start sends what it lacks"
  ]
  assert other.steps == [("train/loss", step) for step in (10, 20, 30)]
  assert (remote.closed, other.closed) == ([], [("finished", ["metrics.jsonl"])])
  remote.down = False
  Process(model_dir, ToRemote(remote), restored=30).end()  # nothing to train
  assert remote.rows == [("train/loss", 10, np.float32(0.1)), ("train/loss", 20, 0.05),
                         ("train/loss", 30, 1 / 30)]  # fmt: skip


def test_the_end_does_not_wait_long_for_a_tracker_that_does_not_answer(model_dir, monkeypatch):
  remote, joined = Remote(), []
  remote.gate.clear()
  process = Process(model_dir, ToRemote(remote))
  join = threading.Thread.join
  monkeypatch.setattr(
    threading.Thread, "join", lambda self, timeout: joined.append(timeout) or join(self, 0.05)
  )
  process.end_with(Preempted("SIGTERM"))
  process.trackers[0].begin()
  process.end()
  assert joined == [5, 30]
  line = "warning: ToRemote does not answer; it may lack the last values"
  assert process.said == [line, line]
  remote.gate.set()


@pytest.mark.parametrize(
  ("error", "status"),
  [(Preempted("SIGTERM"), "killed"), (KeyboardInterrupt(), "killed"), (RuntimeError(), "failed")],
)
def test_the_run_of_the_tracker_ends_as_the_run_does(model_dir, error, status):
  remote = Remote()
  process = Process(model_dir, ToRemote(remote))
  process.loop(10)
  process.end_with(error)
  assert remote.closed == [(status, [])]


def test_pictures_arrive_once(model_dir):
  remote = Remote()
  process = Process(model_dir, ToRemote(remote))
  process.board.image("b", [[[0.0]]])
  process.loop(10)
  process.board.image("samples/a", [[[1.0]]])  # later, of the same step
  process.board.text("words", "not a picture")
  process.loop(10, "eval")
  process.loop(20)
  assert remote.pictures == [("b", 0, "b-0.png"), ("samples/a", 10, "a-10.png")]


def test_workers_other_than_the_chief_send_nothing(model_dir):
  remote = Remote()
  process = Process(model_dir, ToRemote(remote), is_chief=False)
  process.loop(10)
  process.end()
  assert (remote.ids, remote.rows, remote.closed) == ([], [], [])
  assert os.listdir(model_dir) == ["metrics.jsonl"]  # of this test's own


# -- mistakes and secrets


@pytest.mark.parametrize("url", ["http://me:pw@host", "http://h?write_token=x"])
def test_an_address_with_a_password_is_one_line_without_it(url):
  with pytest.raises(ConfigError) as raised:
    MLflow(tracking_uri=url)
  assert "MLflow.tracking_uri contains a password or token" in str(raised.value)
  assert "pw" not in str(raised.value)
  assert "=x" not in str(raised.value)


def test_a_missing_package_names_its_extra(model_dir, monkeypatch):
  monkeypatch.setattr(MLflow, "package", "no_such_package")
  line = r"'no_such_package' is not installed; run: pip install 'loopwright\[no_such_package\]'"
  with pytest.raises(ConfigError, match=line):
    Process(model_dir, MLflow())


def test_messages_have_no_secrets(monkeypatch):
  monkeypatch.setenv("WANDB_API_KEY", "abcdef123456")
  text = "401 for https://me:pw@host/a?write_token=xyz&b=1 with abcdef123456"
  assert without_secrets(text) == "401 for https://***@host/a?write_token=***&b=1 with ***"


# -- MLflow, with a client that keeps everything in memory


class Store:
  """What an MLflow server keeps."""

  def __init__(self):
    self.runs, self.metrics, self.params, self.tags, self.artifacts = {}, [], {}, {}, []
    self.status, self.lost = "", set()


def stand_in(monkeypatch, store):
  """Puts a module `mlflow` in place whose client writes to `store`, one metric after another."""

  def lost():
    raise ConnectionError("the server was down")

  class Client:
    def __init__(self, tracking_uri=None):
      self.uri = tracking_uri

    def get_experiment_by_name(self, name):
      return types.SimpleNamespace(experiment_id="7")

    def search_runs(self, experiments, filter_string):
      ours = [i for i, tags in store.runs.items() if tags["loopwright.id"] in filter_string]
      return [types.SimpleNamespace(info=types.SimpleNamespace(run_id=i)) for i in ours]

    def create_run(self, experiment, tags, run_name):
      run_id = f"r{len(store.runs)}"
      store.runs[run_id] = tags
      return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    def update_run(self, run_id, status):
      store.status = status

    def get_run(self, run_id):
      last = {}
      for key, step, _ in store.metrics:
        last[key] = max(step, last.get(key, -1))
      metrics = [types.SimpleNamespace(key=key, step=step) for key, step in last.items()]
      data = types.SimpleNamespace(metrics=metrics, params=dict(store.params))
      return types.SimpleNamespace(data=data, to_proto=lambda: types.SimpleNamespace(data=data))

    def log_batch(self, run_id, metrics=(), params=(), tags=(), synchronous=True):
      for key, value, _, step in metrics:
        if step in store.lost:
          return types.SimpleNamespace(wait=lost)
        store.metrics.append((key, step, value))
      for key, value in params:
        assert store.params.setdefault(key, value) == value  # as MLflow: constant
      store.tags.update(tags)
      assert not (metrics and synchronous)
      return types.SimpleNamespace(wait=lambda: None)

    def log_artifact(self, run_id, path, folder=None):
      store.artifacts.append((os.path.basename(path), folder))

    def log_artifacts(self, run_id, path, folder=None):
      store.artifacts.append((sorted(os.listdir(path)), folder))

    def set_terminated(self, run_id, status):
      store.status = status

  entities = types.ModuleType("mlflow.entities")
  entities.Metric = entities.Param = entities.RunTag = lambda *values: values
  module = types.ModuleType("mlflow")
  module.MlflowClient, module.entities = Client, entities
  module.__spec__ = types.SimpleNamespace(name="mlflow")
  monkeypatch.setitem(sys.modules, "mlflow", module)
  monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
  for name in ("MLFLOW_LOGGING_LEVEL", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
    monkeypatch.setenv(name, "")
  monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "")


def test_mlflow_gets_one_run_however_often_it_is_killed(model_dir, monkeypatch):
  store = Store()
  stand_in(monkeypatch, store)
  process = Process(model_dir, MLflow(), config={"run.seed": "3", "a b@c.d": "'x'"})
  process.loop(10, accuracy=0.5)
  store.lost = {20}
  process.loop(20, accuracy=0.625)
  process.end()
  assert [line.partition(" (")[0] for line in process.said] == ["warning: MLflow fails"]
  store.lost = set()
  process = Process(model_dir, MLflow(), restored=10, config={"run.seed": "4", "a b@c.d": "'x'"})
  process.loop(20, accuracy=0.625)
  process.loop(30, accuracy=0.75)
  process.board.image("deep/samples", [[[1.0]]])
  os.makedirs(os.path.join(model_dir, "export"))
  process.loop(30, "eval")
  process.end()
  assert process.said == []
  assert list(store.runs) == ["r0"]
  assert store.runs["r0"]["model_dir"] == model_dir
  assert sorted(store.metrics) == [
    ("eval/loss", 30, pytest.approx(1 / 30)),
    ("train/accuracy", 10, 0.5), ("train/accuracy", 20, 0.625), ("train/accuracy", 30, 0.75),
    *(("train/loss", step, pytest.approx(1 / step)) for step in (10, 20, 30)),
  ]  # fmt: skip
  assert store.params == {"run.seed": "3", "a b_c.d": "'x'"}
  assert store.tags == {"run.seed": "4"}
  assert store.artifacts == [("samples-30.png", "media/deep"), ([], "export")]
  assert store.status == "FINISHED"


# -- Weights & Biases, with a client that keeps everything in memory


@pytest.mark.parametrize("offline", [False, True])
def test_wandb_gets_one_run_whose_mode_the_environment_says(model_dir, monkeypatch, offline):
  inits, rows, config, ends = [], [], {}, []

  def init(**given):
    inits.append(given)
    summary = {name: value for row in rows for name, value in row.items()}
    return types.SimpleNamespace(
      id=given["id"], offline=offline, summary={} if offline else summary, log=rows.append,
      config=types.SimpleNamespace(update=lambda values, allow_val_change: config.update(values)),
      define_metric=lambda *names, **more: None, finish=lambda exit_code: ends.append(exit_code),
    )  # fmt: skip

  module = types.ModuleType("wandb")
  module.init, module.Settings = init, lambda **settings: settings
  module.Image = os.path.basename
  module.__spec__ = types.SimpleNamespace(name="wandb")
  monkeypatch.setitem(sys.modules, "wandb", module)
  monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "")
  process = Process(model_dir, WandB(), config={"run.seed": "3"})
  process.loop(10)
  process.loop(20)
  process.end_with(Preempted("SIGTERM"))
  process = Process(model_dir, WandB(mode="offline"), restored=10, config={"run.seed": "4"})
  process.loop(20)
  process.board.image("a", [[[1.0]]])
  process.loop(20, "eval")
  process.end()
  repeated = [{"train/step": 20, "train/loss": 0.05}] if offline else []
  assert rows == [
    pytest.approx({"train/step": 10, "train/loss": 0.1}),
    pytest.approx({"train/step": 20, "train/loss": 0.05}), *map(pytest.approx, repeated),
    pytest.approx({"eval/step": 20, "eval/loss": 0.05}), {"media/step": 20, "media/a": "a-20.png"},
  ]  # fmt: skip
  assert [given["mode"] for given in inits] == [None, "offline"]  # None: wandb asks WANDB_MODE
  assert inits[0]["id"] == inits[1]["id"]
  assert (config, ends) == ({"run.seed": "4"}, [143, 0])
