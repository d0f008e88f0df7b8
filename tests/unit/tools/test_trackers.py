"""Trackers: each line of metrics.jsonl arrives once, whatever happens, and training never waits."""

import contextlib
import csv
import json
import os
import struct
import sys
import threading
import time
import types

import pytest
import tensorflow as tf
from prometheus_client.parser import text_string_to_metric_families

from loopwright.actions.base import Run
from loopwright.errors import ConfigError, Preempted
from loopwright.reporting.board import Board
from loopwright.run_folder import layout, legs
from loopwright.run_folder.metrics_log import MetricsLog
from loopwright.tools.trackers import base, wandb
from loopwright.tools.trackers.base import Tracker, without_secrets
from loopwright.tools.trackers.csv_file import CSVFile
from loopwright.tools.trackers.mlflow import MLflow
from loopwright.tools.trackers.prometheus import Prometheus
from loopwright.tools.trackers.wandb import WandB


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  monkeypatch.setattr(base, "POLL_S", 0.01)
  monkeypatch.setattr(base, "PICTURES_S", 0.01)
  monkeypatch.setattr(base, "_LONGEST_PAUSE_S", 0.02)


@pytest.fixture
def model_dir(tmp_path):
  (tmp_path / "run").mkdir()
  return str(tmp_path / "run")


class Remote:
  """A tracker's server: what has arrived, and whether it answers."""

  def __init__(self):
    self.rows, self.pictures, self.closed = [], [], []
    self.down = self.abandoned = False
    self.breaks_after = None  # rows of one request, of which the rest is lost with its answer
    self.gate = threading.Event()
    self.gate.set()

  @property
  def steps(self):
    return [(split, step) for split, step, _ in self.rows]


class ToRemote(Tracker):
  def __init__(self, remote, **options):
    super().__init__(**options)
    self.remote = remote

  def connect(self):
    self._answer()
    self.kept.run = self.kept.run or "the run"

  def held(self):
    last = {}
    for split, step, _ in self.remote.rows:
      last[split] = max(step, last.get(split, -1))
    return last

  def log(self, records):
    for record in records:
      self._answer()
      self.remote.rows.append((record["split"], record["step"], record["loss"]))
      if self.remote.breaks_after is not None:
        self.remote.breaks_after -= 1
        if self.remote.breaks_after == 0:
          self.remote.breaks_after = None
          raise ConnectionError("no answer")

  def show(self, name, step, path):
    self.remote.pictures.append((name, step, os.path.basename(path)))

  def close(self, status, uploads):
    self._answer()
    self.remote.closed.append((status, sorted(uploads)))

  def abandon(self):
    self.remote.abandoned = True
    raise RuntimeError("a private name has changed")

  def _answer(self):
    self.remote.gate.wait()
    if self.remote.down:
      raise ConnectionError("https://me:secret@host is down")


class Blind(ToRemote):
  """Its tracker cannot tell what it has."""

  def held(self):
    return Tracker.held(self)


class Process:
  """One process of a run."""

  def __init__(self, model_dir, *trackers, is_chief=True, restored=0, config=None):
    self.step = tf.Variable(restored, dtype=tf.int64)
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
    )
    for tracker in trackers:
      tracker.bind(run)
    for tracker in trackers:
      tracker.begin()

  def loop(self, step, split="train", **values):
    self.step.assign(step)
    for tracker in self.trackers:
      tracker({})
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

  def killed(self):
    """As SIGKILL: what the threads have not sent by now is not sent by them."""
    for tracker in self.trackers:
      tracker._sender._run = None
      tracker._sender._over.set()
      tracker._sender._thread.join(10)


def until(condition):
  end = time.monotonic() + 10
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.005)


def state(model_dir, name="ToRemote"):
  with open(os.path.join(model_dir, "trackers", f"{name}.json")) as file:
    return json.load(file)


# -- each line once


def test_each_line_arrives_once_and_in_order(model_dir):
  remote = Remote()
  process = Process(model_dir, ToRemote(remote))
  for step in (10, 20, 30):
    process.loop(step)
    process.loop(step, "eval")
  process.end()
  assert remote.rows == [
    ("train", 10, 0.1), ("eval", 10, 0.1), ("train", 20, 0.05), ("eval", 20, 0.05),
    ("train", 30, 1 / 30), ("eval", 30, 1 / 30),
  ]  # fmt: skip
  assert remote.closed == [("finished", [])]
  assert not remote.abandoned
  assert state(model_dir)["sent"] == {"train": 30, "eval": 30}
  assert process.said == []


@pytest.mark.parametrize("kind", [ToRemote, Blind])
def test_a_killed_run_goes_on_with_its_curve(model_dir, kind):
  remote = Remote()
  process = Process(model_dir, kind(remote))
  for step in (10, 20, 30):
    process.loop(step)
  until(lambda: len(remote.rows) == 3)
  until(lambda: state(model_dir, kind.__name__)["sent"] == {"train": 30})
  process.killed()
  first = state(model_dir, kind.__name__)
  process = Process(model_dir, kind(remote), restored=10)  # its newest checkpoint
  for step in (20, 30, 40):
    process.loop(step)
  process.end()
  assert remote.steps == [("train", 10), ("train", 20), ("train", 30), ("train", 40)]
  assert state(model_dir, kind.__name__)["id"] == first["id"]


def test_a_kill_between_arrival_and_note_sends_nothing_twice(model_dir):
  remote = Remote()
  process = Process(model_dir, ToRemote(remote))
  process.loop(10)
  until(lambda: remote.rows)
  process.killed()
  path = os.path.join(model_dir, "trackers", "ToRemote.json")
  with open(path, "w") as file:
    json.dump({"id": "1" * 32, "run": "the run", "sent": {}}, file)
  process = Process(model_dir, ToRemote(remote), restored=10)
  process.loop(20)
  process.end()
  assert remote.steps == [("train", 10), ("train", 20)]


def test_a_request_that_arrives_by_half_is_completed(model_dir):
  remote = Remote()
  remote.gate.clear()
  process = Process(model_dir, ToRemote(remote))
  for step in (10, 20, 30, 40):
    process.loop(step)
  remote.breaks_after = 2
  remote.gate.set()
  process.end()  # its one attempt may be the one that breaks
  process = Process(model_dir, ToRemote(remote), restored=40)
  process.end()
  assert remote.steps == [("train", step) for step in (10, 20, 30, 40)]


def test_many_lines_are_read_in_parts(model_dir, monkeypatch):
  log = MetricsLog(os.path.join(model_dir, "metrics.jsonl"))
  for step in range(1, 41):
    log.append(step, "train", {"loss": step, "array": list(range(step))})
  lengths = [len(line) + 1 for line in open(log.path, "rb").read().splitlines()]  # noqa: SIM115
  for most in (1, 7, min(lengths), max(lengths), 10**6):
    offset, steps = 0, []
    while True:
      records, offset = log.read_from(offset, most=most)
      if not records:
        break
      steps += [record["step"] for record in records]
    assert steps == list(range(1, 41))
    assert offset == sum(lengths)


def test_a_line_that_is_being_written_waits(model_dir):
  log = MetricsLog(os.path.join(model_dir, "metrics.jsonl"))
  assert log.read_from(0) == ([], 0)
  log.append(1, "train", {"loss": 1.0})
  size = os.path.getsize(log.path)
  with open(log.path, "a") as file:
    file.write('{"step": 2, "spl')
  records, offset = log.read_from(0)
  assert [record["step"] for record in records] == [1]
  assert offset == size
  assert log.read_from(offset) == ([], offset)


# -- a tracker that is down or slow


def test_a_tracker_that_is_down_gets_one_warning_and_is_caught_up(model_dir):
  remote = Remote()
  remote.down = True
  process = Process(model_dir, ToRemote(remote))
  process.loop(10)
  until(lambda: process.trackers[0]._sender._failing)
  time.sleep(0.2)  # several attempts
  process.loop(20)
  assert process.said == [
    "warning: ToRemote fails (https://***@host is down); training goes on, and what it misses is "
    "sent later"
  ]
  remote.down = False
  until(lambda: len(remote.rows) == 2)
  process.loop(30)
  process.end()
  assert remote.steps == [("train", 10), ("train", 20), ("train", 30)]
  assert process.said[1:] == ["ToRemote has caught up"]


def test_what_a_tracker_misses_the_next_start_sends(model_dir):
  remote = Remote()
  remote.down = True
  process = Process(model_dir, ToRemote(remote))
  process.loop(10)
  process.end()
  assert process.said[-1] == (
    "ToRemote has this run up to step 0; start the same command again to send the rest"
  )
  remote.down = False
  Process(model_dir, ToRemote(remote), restored=10).end()  # nothing to train
  assert remote.steps == [("train", 10)]


def test_training_never_waits_for_a_tracker_that_does_not_answer(model_dir):
  remote = Remote()
  remote.gate.clear()
  process = Process(model_dir, ToRemote(remote, wait_s=0.2))
  began = time.monotonic()
  for step in range(1, 101):
    process.loop(step)
  assert time.monotonic() - began < 15
  began = time.monotonic()
  process.end()
  assert 0.2 <= time.monotonic() - began < 60
  assert remote.abandoned
  assert process.said == [
    "ToRemote has this run up to step 0; start the same command again to send the rest"
  ]
  remote.gate.set()


def test_a_signal_waits_less_and_is_told_as_a_kill(model_dir, monkeypatch):
  monkeypatch.setattr(base, "_PREEMPTED_WAIT_S", 0.1)
  remote, other = Remote(), Remote()
  other.gate.clear()
  process = Process(model_dir, ToRemote(remote), ToRemote(other, wait_s=600.0))
  process.end_with(Preempted("SIGTERM"))
  assert remote.closed == [("killed", [])]
  assert "ToRemote.2 has this run up to step 0" in process.said[0]
  other.gate.set()


def test_an_error_ends_the_run_of_the_tracker_as_failed(model_dir):
  remote = Remote()
  process = Process(model_dir, ToRemote(remote, upload=["metrics.jsonl"]))
  process.loop(10)
  process.end_with(RuntimeError())
  assert remote.closed == [("failed", [])]


# -- pictures and files


def test_pictures_arrive_once(model_dir):
  remote = Remote()
  process = Process(model_dir, ToRemote(remote))
  process.loop(10)
  process.board.image("b", [[[0.0]]])
  until(lambda: len(remote.pictures) == 1)
  process.board.image("samples/a", [[[1.0]]])  # later, of the same step
  process.board.text("words", "not a picture")
  process.end()
  process = Process(model_dir, ToRemote(remote), restored=0)
  process.loop(10)
  process.board.image("b", [[[0.5]]])  # again after a restart
  process.loop(20)
  process.board.image("b", [[[0.5]]])
  process.end()
  assert remote.pictures == [
    ("b", 10, "b-10.png"), ("samples/a", 10, "a-10.png"), ("b", 20, "b-20.png")
  ]  # fmt: skip


def test_files_are_uploaded_once_when_training_is_over(model_dir):
  remote, upload = Remote(), ["metrics.jsonl", "export"]
  process = Process(model_dir, ToRemote(remote, upload=upload))
  process.loop(10)
  process.end()
  Process(model_dir, ToRemote(remote, upload=upload), restored=10).end()
  assert remote.closed == [("finished", ["metrics.jsonl"]), ("finished", [])]


def test_workers_other_than_the_chief_write_nothing(model_dir):
  remote = Remote()
  process = Process(model_dir, ToRemote(remote), CSVFile(), is_chief=False)
  process.loop(10)
  process.end()
  assert remote.rows == []
  assert os.listdir(model_dir) == ["metrics.jsonl"]  # of this test's own


# -- mistakes and secrets


@pytest.mark.parametrize(
  ("make", "line"),
  [
    (lambda: ToRemote(None, wait_s=0), "ToRemote.wait_s is 0; it must be above 0 seconds."),
    (lambda: MLflow(upload="export"), "MLflow.upload is 'export'; it must be a list"),
    (lambda: MLflow(upload=["../secret"]), "it must be a list of files and folders of the run"),
    (lambda: CSVFile(file="a/b.csv"), "CSVFile.file is 'a/b.csv'; it must be a name that ends"),
    (
      lambda: WandB(mode="disabled"),
      "unknown WandB.mode 'disabled'; it must be one of offline, on",
    ),
    (lambda: MLflow(tracking_uri="http://me:pw@host"), "MLflow.tracking_uri contains a password"),
    (
      lambda: MLflow(tracking_uri="http://h?write_token=x"),
      "MLflow.tracking_uri contains a password",
    ),
  ],
)
def test_a_wrong_option_is_one_line_without_the_secret(make, line):
  with pytest.raises(ConfigError) as raised:
    make()
  assert line in str(raised.value)
  assert "pw" not in str(raised.value)
  assert "=x" not in str(raised.value)


def test_a_missing_package_names_its_extra(model_dir, monkeypatch):
  monkeypatch.setattr(MLflow, "package", "no_such_package")
  with pytest.raises(ConfigError, match=r"'no_such_package' is not installed; run: pip install "):
    Process(model_dir, MLflow())


def test_messages_have_no_secrets(monkeypatch):
  monkeypatch.setenv("WANDB_API_KEY", "abcdef123456")
  text = "401 for https://me:pw@host/a?write_token=xyz&b=1 with abcdef123456"
  assert without_secrets(text) == "401 for https://***@host/a?write_token=***&b=1 with ***"


# -- CSV


def rows(model_dir):
  with open(os.path.join(model_dir, "metrics.csv"), newline="") as file:
    return list(csv.DictReader(file))


def test_the_csv_file_has_the_lines_of_the_log(model_dir):
  process = Process(model_dir, CSVFile())
  process.loop(10, rate=0.5)
  until(lambda: os.path.exists(os.path.join(model_dir, "metrics.csv")))
  process.loop(20, rate=0.25, array=[1, 2])
  process.loop(20, "eval", accuracy=float("nan"), **{"=1+1": 3.0})  # new columns
  process.loop(30, late=1.0)
  process.end()
  *found, last = rows(model_dir)
  assert [row["'=1+1"] for row in (*found, last)] == ["", "", "3.0", ""]
  assert [(r["step"], r["split"], r["loss"], r["rate"], r["accuracy"]) for r in found] == [
    ("10", "train", "0.1", "0.5", ""), ("20", "train", "0.05", "0.25", ""),
    ("20", "eval", "0.05", "", "nan"),
  ]  # fmt: skip
  assert "array" not in found[0]


def test_the_csv_file_follows_a_run_that_goes_back(model_dir):
  process = Process(model_dir, CSVFile())
  for step in (10, 20, 30):
    process.loop(step)
  process.end()
  with open(os.path.join(model_dir, "metrics.csv"), "a") as file:
    file.write("40,tra")  # a kill
  process = Process(model_dir, CSVFile(), restored=10)
  process.loop(20)
  process.end()
  assert [row["step"] for row in rows(model_dir)] == ["10", "20"]


# -- Prometheus


def test_the_text_file_of_prometheus_has_the_newest_values_of_each_split(model_dir):
  os.mkdir(os.path.join(model_dir, layout.FLIGHT))
  parts = {"training": 3.0, "evaluation": 1.0}
  writer = legs.Writer(model_dir, 0)
  writer.write(legs.Leg(began=5, parts=parts, first=True, from_step=0, step=20, saved=True))
  process = Process(model_dir, Prometheus())
  process.loop(10, rate=0.5)
  process.loop(20, rate=0.25)
  process.loop(20, "eval", accuracy=0.75)
  process.end()
  found = in_prometheus(model_dir)
  assert found["loopwright_step", "run", "train"] == 20
  assert found["loopwright_rate", "run", "train"] == 0.25
  assert found["loopwright_accuracy", "eval", "run"] == 0.75
  assert found["loopwright_goodput_ratio", "run"] == 0.75
  assert found["loopwright_wall_seconds", "evaluation", "run"] == 1
  assert (found["loopwright_starts", "run"], found["loopwright_broken", "run"]) == (1, 1)


def in_prometheus(model_dir):
  """Returns (name, *values of labels) -> value, as Prometheus has them: an empty label is none."""
  with open(os.path.join(model_dir, "metrics.prom")) as file:
    samples = [s for f in text_string_to_metric_families(file.read()) for s in f.samples]
  return {(s.name, *sorted(filter(None, s.labels.values()))): s.value for s in samples}


def test_no_two_metrics_are_one_to_prometheus_and_none_is_in_the_way(model_dir):
  os.mkdir(os.path.join(model_dir, layout.FLIGHT))
  writer = legs.Writer(model_dir, 0)
  writer.write(legs.Leg(began=5, parts={"training": 3.0}, first=True, from_step=0, step=20))
  process = Process(model_dir, Prometheus())
  process.loop(20, "eval", **{"a.b": 1.0, "a_b": 2.0, "a/b": 3.0, "starts": 4.0, 'é"\n\\': 5.0})
  process.end()
  found = in_prometheus(model_dir)
  for labels, value in {(): 2, ("a.b",): 1, ("a/b",): 3}.items():
    assert found[("loopwright_a_b", *sorted([*labels, "eval", "run"]))] == value
  assert (found["loopwright_starts", "eval", "run"], found["loopwright_starts", "run"]) == (4, 1)
  assert found["loopwright_____", "eval", "run", 'é"\n\\'] == 5


# -- MLflow, with a client that keeps everything in memory


class Store:
  """What an MLflow server keeps."""

  def __init__(self):
    self.runs, self.metrics, self.params, self.tags, self.artifacts = {}, [], {}, {}, []
    self.status, self.fails_after = "", None


def stand_in(monkeypatch, store):
  """Puts a module `mlflow` in place whose client writes to `store`, one metric after another."""

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

    def log_batch(self, run_id, metrics=(), params=(), tags=()):
      for key, value, _, step in metrics:
        if store.fails_after == 0:
          store.fails_after = None
          raise ConnectionError("half of a batch")
        store.fails_after = None if store.fails_after is None else store.fails_after - 1
        store.metrics.append((key, step, value))
      for key, value in params:
        assert store.params.setdefault(key, value) == value  # as MLflow: constant
      store.tags.update(tags)

    def log_artifact(self, run_id, path, folder=None):
      store.artifacts.append((os.path.basename(path), folder))

    def log_artifacts(self, run_id, path, folder=None):
      store.artifacts.append((sorted(os.listdir(path)), folder))

    def set_tag(self, run_id, key, value):
      store.tags[key] = value

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
  monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")


def test_mlflow_gets_one_run_however_often_it_is_killed(model_dir, monkeypatch):
  store = Store()
  stand_in(monkeypatch, store)
  process = Process(model_dir, MLflow(), config={"run.seed": "3", "a b@c.d": "'x'"})
  process.loop(10, accuracy=0.5)
  until(lambda: len(store.metrics) == 2)
  process.killed()
  kept = state(model_dir, "MLflow")
  with open(os.path.join(model_dir, "trackers", "MLflow.json"), "w") as file:
    json.dump({"id": kept["id"]}, file)  # killed before it was told the run's id
  store.fails_after = 1
  process = Process(model_dir, MLflow(), restored=10, config={"run.seed": "4", "a b@c.d": "'x'"})
  process.loop(20, accuracy=0.75)
  until(lambda: len(store.metrics) == 4)
  process.board.image("deep/samples", [[[1.0]]])
  os.makedirs(os.path.join(model_dir, "export"))
  process.end()
  assert list(store.runs) == ["r0"]
  assert store.runs["r0"]["model_dir"] == model_dir
  assert sorted(store.metrics) == [
    ("train/accuracy", 10, 0.5), ("train/accuracy", 20, 0.75),
    ("train/loss", 10, 0.1), ("train/loss", 20, 0.05),
  ]  # fmt: skip
  assert store.params == {"run.seed": "3", "a b_c.d": "'x'"}
  assert store.tags == {"run.seed": "4"}
  assert store.artifacts == [("samples-20.png", "media/deep"), ([], "export")]
  assert store.status == "FINISHED"


# -- the files of an offline run of Weights & Biases


def leveldb(entries, *, cut=0):
  """The bytes of a log in LevelDB's format, as https://github.com/google/leveldb describes it."""
  content = b":W&B" + bytes([0xE1, 0xBE, 0])
  for entry in entries:
    kind, rest = 2, entry
    while True:
      room = 32768 - len(content) % 32768
      if room < 7:
        content += bytes(room)
        room = 32768
      piece, rest = rest[: room - 7], rest[room - 7 :]
      number = {(2, True): 1, (2, False): 2, (3, False): 3, (3, True): 4}[kind, not rest]
      content += struct.pack("<IHB", 0, len(piece), number) + piece
      kind = 3
      if not rest:
        break
  return content[: len(content) - cut]


@pytest.mark.parametrize("first", [1, 32768 - 7 - 7 - 3, 32768 - 7 - 7 - 7, 100_000])
def test_entries_of_the_transaction_log(first):
  entries = [b"a" * first, b"bc", b"", b"d" * 70_000, b"e"]
  assert list(wandb._entries(leveldb(entries))) == entries
  assert list(wandb._entries(leveldb(entries, cut=1))) == entries[:-1]
