import contextlib
import dataclasses
import json
import math
import os
import random
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from loopwright.actions import best
from loopwright.actions.base import Action, Run, StopTraining
from loopwright.actions.best import BestCheckpoint, EarlyStopping, Goal, OnBest
from loopwright.errors import ConfigError
from loopwright.host import files
from loopwright.run_folder.metrics_log import MetricsLog
from loopwright.tools.exports import export as exports
from loopwright.tools.exports.action import Export
from loopwright.tools.exports.export import export
from loopwright.tools.forensics.action import NonFiniteLoss, StopOnNonFinite


class Killed(BaseException):
  """Stands for SIGKILL: nothing after it runs."""


class Process:
  """One process of a run: at step s the weight is s, and an evaluation is a call of the actions."""

  def __init__(self, model_dir, made_actions, *, step=0, strategy=None, is_chief=True, task=None):
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
      self.weight = tf.Variable(float(step))
      self.global_step = tf.Variable(
        step, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
      )
    os.makedirs(model_dir, exist_ok=True)
    self.log = MetricsLog(os.path.join(model_dir, "metrics.jsonl"))
    self.log.trim(step)
    self.actions = made_actions
    self.run = Run(
      task=task,
      strategy=strategy,
      trainer=None,
      evaluator=None,
      checkpoint=tf.train.Checkpoint(weight=self.weight, global_step=self.global_step),
      metrics_log=self.log,
      global_step=self.global_step,
      model_dir=model_dir,
      is_chief=is_chief,
      actions=made_actions,
    )
    for action in made_actions:
      action.bind(self.run)

  def begin(self):
    for action in self.actions:
      action.begin()
    return self

  def evaluate(self, step, values, *, killed_before_log=False):
    self.weight.assign(float(step))
    self.global_step.assign(step)
    for action in self.actions:
      action(values)
    if killed_before_log:
      raise Killed
    if self.run.is_chief:
      self.log.append(step, "eval", values)


@pytest.fixture
def model_dir(tmp_path):
  return str(tmp_path / "run")


def best_of(model_dir):
  """(step, value, weight) as best.json says and as TensorFlow restores it."""
  folder = os.path.join(model_dir, "best")
  with open(os.path.join(folder, "best.json")) as file:
    record = json.load(file)
  weight, step = tf.Variable(-1.0), tf.Variable(-1, dtype=tf.int64)
  latest = tf.train.latest_checkpoint(folder)
  assert os.path.basename(latest) == record["checkpoint"]
  checkpoint = tf.train.Checkpoint(weight=weight, global_step=step)
  checkpoint.restore(latest).assert_existing_objects_matched()
  assert step.numpy() == record["step"]
  return record["step"], record["value"], float(weight.numpy())


def checkpoints_in(model_dir):
  names = os.listdir(os.path.join(model_dir, "best"))
  return sorted({name.rsplit(".", 1)[0] for name in names if name.startswith("ckpt-")})


# -- Goal


def test_an_unknown_metric_lists_those_there_are():
  with pytest.raises(ConfigError) as raised:
    Goal("acuracy", "max").value({"accuracy": 0.5, "loss": 1.0, "a": {"b": 0.5}}, "Export")
  assert str(raised.value) == (
    "unknown Export.metric 'acuracy'; it must be one of a/b, accuracy, loss. Did you mean "
    "'accuracy'?"
  )


@pytest.mark.parametrize(
  "make", [BestCheckpoint, Export, lambda **given: EarlyStopping(patience=1, **given)]
)
def test_the_actions_on_evaluations_agree_on_metric_and_mode(make):
  losses = (make(), make(metric="far/my_loss"))
  assert [(*one.reads().values(), one._goal.mode) for one in losses] == [
    ("loss", "min"), ("far/my_loss", "min")
  ]  # fmt: skip
  assert make(metric="top5_accuracy")._goal.mode == "max"
  with pytest.raises(ConfigError, match="unknown mode 'maximum'; it must be one of max, min"):
    make(mode="maximum")
  with pytest.raises(ConfigError, match=r"metric is 'mae', of which more or less may be better; s"):
    make(metric="mae")


@pytest.mark.parametrize(
  ("mode", "value", "best", "by", "expected"),
  [
    ("max", 0.5, None, 0.0, True), ("max", 0.5, 0.5, 0.0, False), ("max", 0.6, 0.5, 0.0, True),
    ("min", 0.5, None, 0.0, True), ("min", 0.5, 0.5, 0.0, False), ("min", 0.4, 0.5, 0.0, True),
    ("max", 0.75, 0.5, 0.25, False), ("min", 0.25, 0.5, 0.25, False), ("min", 0.2, 0.5, 0.25, True),
    ("max", math.nan, None, 0.0, False), ("min", -math.inf, 0.5, 0.0, False),
    ("max", math.inf, 0.5, 0.0, False),
  ],
)  # fmt: skip
def test_better(mode, value, best, by, expected):
  assert Goal("x", mode).better(value, best, by=by) is expected


# -- BestCheckpoint


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("mode", "best_step"), [("max", 30), ("min", 20)])
def test_best_checkpoint_keeps_the_best(model_dir, mode, best_step, replicas, mirrored):
  action = BestCheckpoint(metric="accuracy", mode=mode)
  process = Process(model_dir, [action], strategy=mirrored(replicas)).begin()
  accuracies = {10: 0.5, 20: 0.25, 30: 0.75, 40: 0.75, 50: math.nan}
  for step, accuracy in accuracies.items():
    process.evaluate(step, {"accuracy": tf.constant(accuracy)})
  assert best_of(model_dir) == (best_step, accuracies[best_step], float(best_step))
  assert checkpoints_in(model_dir) == [f"ckpt-{best_step}"]


def test_best_checkpoint_takes_a_nested_name(model_dir):
  process = Process(model_dir, [BestCheckpoint(metric="a/b", mode="max")]).begin()
  process.evaluate(1, {"a": {"b": 0.5}})
  assert best_of(model_dir) == (1, 0.5, 1.0)


def test_best_checkpoint_saves_nothing_that_is_not_finite(model_dir):
  process = Process(model_dir, [BestCheckpoint(metric="accuracy")]).begin()
  process.evaluate(1, {"accuracy": math.nan})
  assert not os.path.exists(os.path.join(model_dir, "best"))


def test_best_checkpoint_leaves_the_training_checkpoints_alone(model_dir):
  process = Process(model_dir, [BestCheckpoint(metric="accuracy")]).begin()
  manager = tf.train.CheckpointManager(process.run.checkpoint, model_dir + "/checkpoints", 3)
  process.evaluate(1, {"accuracy": 0.5})
  manager.save()
  process.evaluate(2, {"accuracy": 0.6})
  manager.save()
  assert [os.path.basename(p) for p in manager.checkpoints] == ["ckpt-1", "ckpt-2"]
  assert best_of(model_dir) == (2, 0.6, 2.0)


@pytest.mark.parametrize("begin", [True, False])
def test_best_checkpoint_remembers_after_a_restart(model_dir, begin):
  Process(model_dir, [BestCheckpoint(metric="accuracy")]).begin().evaluate(10, {"accuracy": 0.5})
  process = Process(model_dir, [BestCheckpoint(metric="accuracy")], step=10)
  if begin:
    process.begin()
  process.evaluate(20, {"accuracy": 0.4})
  assert best_of(model_dir) == (10, 0.5, 10.0)
  process.evaluate(30, {"accuracy": 0.6})
  assert best_of(model_dir) == (30, 0.6, 30.0)


@pytest.mark.parametrize("again", [True, False])
def test_best_checkpoint_remembers_an_evaluation_that_never_reached_the_log(model_dir, again):
  process = Process(model_dir, [BestCheckpoint(metric="accuracy")]).begin()
  with pytest.raises(Killed):
    process.evaluate(10, {"accuracy": 0.5}, killed_before_log=True)
  process = Process(model_dir, [BestCheckpoint(metric="accuracy")], step=10).begin()
  if again:
    process.evaluate(10, {"accuracy": 0.5})
  process.evaluate(20, {"accuracy": 0.4})
  assert best_of(model_dir) == (10, 0.5, 10.0)


def test_best_checkpoint_of_another_metric_is_not_compared(model_dir):
  Process(model_dir, [BestCheckpoint(metric="accuracy")]).begin().evaluate(
    10, {"accuracy": 0.9, "auc": 0.1}
  )
  process = Process(model_dir, [BestCheckpoint(metric="auc", mode="max")], step=10).begin()
  process.evaluate(20, {"accuracy": 0.8, "auc": 0.2})
  assert best_of(model_dir) == (20, 0.2, 20.0)


def kill_in(monkeypatch, where):
  """Makes the next save die: half way through writing, or between two of its steps."""
  if where == "write":

    def torn(self, path):
      os.makedirs(f"{path}_temp")
      for name in (f"{path}.data-00000-of-00001", f"{path}_temp/part-00000-of-00001.index"):
        with open(name, "w") as file:
          file.write("half")
      raise Killed

    monkeypatch.setattr(tf.train.Checkpoint, "write", torn)
  else:

    def die(*_):
      raise Killed

    owner = {"before best.json": (files, "atomic_write"), "after best.json": (best, "write_state")}
    monkeypatch.setattr(*owner[where], die)


@pytest.mark.parametrize(
  ("where", "expected"),
  [
    ("write", (10, 0.5, 10.0)),
    ("before best.json", (10, 0.5, 10.0)),
    ("after best.json", (20, 0.6, 20.0)),
  ],
)
def test_the_best_is_whole_wherever_a_kill_comes(model_dir, monkeypatch, where, expected):
  process = Process(model_dir, [BestCheckpoint(metric="accuracy")]).begin()
  process.evaluate(10, {"accuracy": 0.5})
  with monkeypatch.context() as patched:
    kill_in(patched, where)
    with pytest.raises(Killed):
      process.evaluate(20, {"accuracy": 0.6})
  Process(model_dir, [BestCheckpoint(metric="accuracy")], step=10).begin()
  assert best_of(model_dir) == expected
  assert checkpoints_in(model_dir) == [f"ckpt-{expected[0]}"]


def test_a_kill_does_no_harm_to_the_best_of_the_same_step(model_dir, monkeypatch):
  process = Process(model_dir, [BestCheckpoint(metric="accuracy")]).begin()
  process.evaluate(10, {"accuracy": 0.5})
  process.evaluate(10, {"accuracy": 0.6})
  with monkeypatch.context() as patched:
    kill_in(patched, "write")
    with pytest.raises(Killed):
      process.evaluate(10, {"accuracy": 0.7})
  assert best_of(model_dir) == (10, 0.6, 10.0)
  process = Process(model_dir, [BestCheckpoint(metric="accuracy")], step=10).begin()
  process.evaluate(10, {"accuracy": 0.8})
  assert best_of(model_dir) == (10, 0.8, 10.0)
  assert len(checkpoints_in(model_dir)) == 1


def test_a_kill_while_the_first_best_is_written_leaves_none(model_dir, monkeypatch):
  process = Process(model_dir, [BestCheckpoint(metric="accuracy")]).begin()
  with monkeypatch.context() as patched:
    kill_in(patched, "before best.json")
    with pytest.raises(Killed):
      process.evaluate(10, {"accuracy": 0.5})
  assert tf.train.latest_checkpoint(os.path.join(model_dir, "best")) is None
  process = Process(model_dir, [BestCheckpoint(metric="accuracy")]).begin()
  process.evaluate(10, {"accuracy": 0.4})
  assert best_of(model_dir) == (10, 0.4, 10.0)
  assert len(checkpoints_in(model_dir)) == 1


def test_a_worker_that_is_not_chief_takes_part_and_writes_nothing(model_dir, monkeypatch):
  writes = []
  write = tf.train.Checkpoint.write
  monkeypatch.setattr(
    tf.train.Checkpoint,
    "write",
    lambda self, path, *options: writes.append(path) or write(self, path, *options),
  )
  process = Process(model_dir, [BestCheckpoint(metric="accuracy")], is_chief=False).begin()
  process.evaluate(10, {"accuracy": 0.5})
  process.evaluate(20, {"accuracy": 0.4})
  assert len(writes) == 1
  assert os.listdir(model_dir) == []
  assert not tf.io.gfile.exists(f"{writes[0]}.index")


# -- EarlyStopping


def stopping_index(values, mode, patience, min_delta):
  """Which evaluation stops, by brute force: none of the last `patience` beat the best before."""
  sign = 1 if mode == "max" else -1
  best, last = -math.inf, -1
  for i, value in enumerate(values):
    if math.isfinite(value) and sign * value - best > min_delta:
      best, last = sign * value, i
    if i - last >= patience:
      return i
  return None


def run_until_stopped(model_dir, action, values, *, kill_after=()):
  """Evaluates at steps 10, 20, ...; starts a new process after the evaluations in `kill_after`."""
  process = Process(model_dir, [action()]).begin()
  for i, value in enumerate(values):
    try:
      process.evaluate(10 * (i + 1), {"loss": value})
    except StopTraining:
      return i
    if i in kill_after:
      process = Process(model_dir, [action()], step=10 * (i + 1)).begin()
  return None


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("patience", [1, 2, 4])
@pytest.mark.parametrize("min_delta", [0.0, 0.25])
@pytest.mark.fast(mode=["max"], patience=[2])
def test_early_stopping_is_the_brute_force_whatever_the_restarts(
  tmp_path, mode, patience, min_delta
):
  generator = random.Random(f"{mode}{patience}{min_delta}")
  for trial in range(10):
    values = [generator.choice([0, 0.125, 0.25, 0.5, 0.75, 1, math.nan]) for _ in range(12)]
    expected = stopping_index(values, mode, patience, min_delta)

    def action():
      return EarlyStopping(metric="loss", mode=mode, patience=patience, min_delta=min_delta)

    restarts = generator.sample(range(12), 4)
    for name, kills in (("whole", ()), ("killed", restarts)):
      folder = str(tmp_path / f"{trial}-{name}")
      assert run_until_stopped(folder, action, values, kill_after=kills) == expected, values


def test_early_stopping_says_why_and_hands_over_what_is_not_yet_written(model_dir):
  process = Process(model_dir, [EarlyStopping(patience=2)]).begin()
  for step, loss in ((10, 0.5), (20, 0.75)):
    process.evaluate(step, {"loss": loss})
  with pytest.raises(StopTraining) as stopped:
    process.evaluate(30, {"loss": 0.5, "accuracy": 0.1})
  assert stopped.value.reason == str(stopped.value)
  assert stopped.value.reason == (
    "eval loss has not been better than 0.5 for 2 evaluations (patience 2)"
  )
  assert stopped.value.output == {"loss": 0.5, "accuracy": 0.1}
  assert [r["step"] for r in process.log.records("eval")] == [10, 20]


def test_the_last_line_names_the_best_evaluation_unless_it_is_the_last(model_dir):
  best = BestCheckpoint(metric="accuracy")
  process = Process(model_dir, [best]).begin()
  assert best.result() == ""
  found = []
  for step, accuracy in ((10, 0.5), (20, 0.875), (30, math.nan), (40, 0.75), (50, 0.9)):
    process.evaluate(step, {"accuracy": accuracy})
    found.append(best.result())
  assert found == ["", "", *["best accuracy 0.8750 at step 20"] * 2, ""]


def test_early_stopping_when_nothing_was_ever_finite(model_dir):
  process = Process(model_dir, [EarlyStopping(patience=1)]).begin()
  with pytest.raises(StopTraining, match="has not been finite for 1 evaluation "):
    process.evaluate(10, {"loss": math.nan})


def test_a_run_that_has_stopped_stays_so(model_dir):
  process = Process(model_dir, [EarlyStopping(patience=1)]).begin()
  process.evaluate(10, {"loss": 0.5})
  with pytest.raises(StopTraining) as stopped:
    process.evaluate(20, {"loss": 0.6})
  process.log.append(20, "eval", stopped.value.output)
  again = Process(model_dir, [EarlyStopping(patience=1)], step=20)
  with pytest.raises(StopTraining, match=r"better than 0\.5 for 1 evaluation "):
    again.begin()
  Process(model_dir, [EarlyStopping(patience=2)], step=20).begin()
  Process(model_dir, [EarlyStopping(patience=1)], step=10).begin()


def test_early_stopping_counts_a_step_once(model_dir):
  Process(model_dir, [EarlyStopping(patience=2)]).begin().evaluate(10, {"loss": 0.5})
  process = Process(model_dir, [EarlyStopping(patience=2)], step=10)
  process.evaluate(10, {"loss": 0.5})
  process.evaluate(20, {"loss": 0.5})
  with pytest.raises(StopTraining):
    process.evaluate(30, {"loss": 0.5})


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"patience": 0}, "EarlyStopping.patience is 0; it must be a whole number of at least 1."),
    ({"patience": 1, "min_delta": -1}, "EarlyStopping.min_delta is -1; it must be 0 or more."),
    ({"patience": 1, "min_delta": math.nan}, "EarlyStopping.min_delta is nan"),
  ],
)
def test_early_stopping_refuses(arguments, message):
  with pytest.raises(ConfigError, match=message):
    EarlyStopping(**arguments)


# -- StopOnNonFinite


def test_stop_on_non_finite_names_the_step_and_deletes_nothing(model_dir):
  process = Process(model_dir, [StopOnNonFinite()]).begin()
  process.log.append(30, "train", {"loss": 1.0})
  before = sorted(os.listdir(model_dir))
  (action,) = process.actions
  assert action.on == "train"
  with pytest.raises(
    NonFiniteLoss, match=r"^the loss became NaN or infinite at step 37\. Try "
  ) as e:
    action({"loss": math.nan, "nonfinite_step": tf.constant(37.0)})
  assert "\n" not in str(e.value)
  assert sorted(os.listdir(model_dir)) == before


@pytest.mark.parametrize("output", [{}, {"nonfinite_step": -1}, {"nonfinite_step": np.float32(-1)}])
def test_stop_on_non_finite_is_silent_while_all_is_well(model_dir, output):
  Process(model_dir, [StopOnNonFinite()]).actions[0](output)


# -- export


class Task:
  def __init__(self, model, signature=None):
    self.model = model
    self.signature = signature

  def export_signature(self):
    if self.signature is not None:
      return self.signature

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, "x")])
    def serve(x):
      return {"y": self.model(x, training=False)}

    return serve


def dense_model(generation):
  layers = generation.layers
  start = layers.Input([3]) if generation is keras else layers.InputLayer([3])
  return generation.Sequential(
    [start, layers.Dense(4, activation="tanh"), layers.Dropout(0.5), layers.BatchNormalization()]
  )


def linear_module(generation):
  module = tf.Module()
  module.kernel = tf.Variable(tf.ones([3, 2]))
  module.__class__ = type("Linear", (tf.Module,), {"__call__": linear})
  return module


def linear(self, x, training=False):
  return x @ self.kernel


INPUT = np.random.default_rng(0).standard_normal([5, 3]).astype(np.float32)


def served(directory, name="serving_default", **inputs):
  loaded = tf.saved_model.load(directory)
  outputs = loaded.signatures[name](**{k: tf.constant(v) for k, v in inputs.items()})
  return {k: v.numpy() for k, v in outputs.items()}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
  ("make", "generation"),
  [(dense_model, keras), (dense_model, tf_keras), (linear_module, None)],
  ids=["keras", "tf_keras", "module"],
)
@pytest.mark.fast(replicas=[2], generation=[keras, None])
def test_export_serves_what_the_model_computes(tmp_path, mirrored, replicas, make, generation):
  with mirrored(replicas).scope():
    model = make(generation)
  for variable in model.trainable_variables:  # not what a fresh model has
    variable.assign(np.random.default_rng(1).standard_normal(tuple(variable.shape)))
  directory = str(tmp_path / "export") + "/"
  export(Task(model), directory)
  np.testing.assert_allclose(served(directory, x=INPUT)["y"], model(INPUT).numpy(), rtol=1e-6)
  assert os.listdir(tmp_path) == ["export"]


def test_export_serves_several_functions_of_several_models(tmp_path):
  models = {"a": dense_model(keras), "b": dense_model(tf_keras)}

  def signature(name):
    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, "x")])
    def serve(x):
      return models[name](x, training=False)

    return serve

  export(Task(models, {name: signature(name) for name in models}), str(tmp_path / "export"))
  for name, model in models.items():
    (output,) = served(str(tmp_path / "export"), name, x=INPUT).values()
    np.testing.assert_allclose(output, model(INPUT).numpy(), rtol=1e-6)


@pytest.mark.parametrize("signature", [lambda x: x, tf.function(lambda x: x)])
def test_export_refuses_what_has_no_input_signature(tmp_path, signature):
  with pytest.raises(
    ConfigError, match=r"^Task.export_signature\(\) returns .* for 'serving_default'"
  ):
    export(Task(dense_model(keras), signature), str(tmp_path / "export"))
  assert os.listdir(tmp_path) == []


@pytest.fixture
def exported(tmp_path):
  """A task exported once with a kernel of 1, whose kernel is 2 now."""
  task, directory = Task(linear_module(None)), str(tmp_path / "export")
  export(task, directory)
  task.model.kernel.assign(tf.fill([3, 2], 2.0))
  return task, directory


def factor(directory):
  return served(directory, x=np.float32([[1, 0, 0]]))["y"][0, 0]


def test_export_replaces_an_older_one(exported, tmp_path):
  task, directory = exported
  assert factor(directory) == 1
  export(task, directory)
  assert factor(directory) == 2
  assert os.listdir(tmp_path) == ["export"]


def test_a_kill_while_exporting_keeps_the_older_one(exported, tmp_path, monkeypatch):
  task, directory = exported
  save = tf.saved_model.save

  def killed(module, path, **options):
    save(module, path, **options)
    os.remove(os.path.join(path, "saved_model.pb"))
    raise Killed

  with monkeypatch.context() as patched:
    patched.setattr(tf.saved_model, "save", killed)
    with pytest.raises(Killed):
      export(task, directory)
  assert factor(directory) == 1
  export(task, directory)
  assert factor(directory) == 2
  assert os.listdir(tmp_path) == ["export"]


def test_a_kill_between_the_renames_loses_nothing(exported, tmp_path, monkeypatch):
  task, directory = exported
  rename = tf.io.gfile.rename

  def killed(source, target):
    if ".new-" in source:
      raise Killed
    rename(source, target)

  with monkeypatch.context() as patched:
    patched.setattr(tf.io.gfile, "rename", killed)
    with pytest.raises(Killed):
      export(task, directory)
    patched.setattr(tf.io.gfile, "rename", rename)
    patched.setattr(tf.saved_model, "save", lambda *_, **__: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
      export(task, directory)
  assert factor(directory) == 1
  assert os.listdir(tmp_path) == ["export"]


def saved_by_tensorflow(folder):
  tf.saved_model.save(tf.Module(), str(folder))


def an_export_with_more(folder):
  export(Task(linear_module(None)), str(folder))
  (folder / "mine.txt").write_text("mine")


@pytest.mark.parametrize("fill", [saved_by_tensorflow, an_export_with_more])
def test_export_replaces_nothing_but_an_export(tmp_path, fill):
  task, directory = Task(linear_module(None)), str(tmp_path / "export")
  fill(tmp_path / "export")
  before = sorted(tmp_path.rglob("*"))
  action = Export(metric="accuracy", directory=directory)
  for replace in (
    lambda: export(task, directory),
    lambda: action.bind(types.SimpleNamespace(model_dir=str(tmp_path), actions=[action])),
  ):
    with pytest.raises(ConfigError, match="would replace what is there"):
      replace()
    assert sorted(tmp_path.rglob("*")) == before


def test_export_leaves_alone_what_is_beside_it(tmp_path):
  task, directory = Task(linear_module(None)), str(tmp_path / "export")
  (tmp_path / "export").mkdir()  # an empty folder is free
  beside = ["export.old", f"export.old-{'0' * 32}", "export.new", "export2"]
  for name in beside:
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine.txt").write_text("mine")
  export(task, directory)
  export(task, directory)
  assert sorted(os.listdir(tmp_path)) == sorted(["export", *beside])
  assert [(tmp_path / name / "mine.txt").read_text() for name in beside] == ["mine"] * 4


def test_a_kill_while_the_old_export_is_removed_leaves_nothing(exported, tmp_path, monkeypatch):
  task, directory = exported

  def killed(path):
    os.remove(os.path.join(path, exports.MARK))
    raise Killed

  with monkeypatch.context() as patched:
    patched.setattr(tf.io.gfile, "rmtree", killed)
    with pytest.raises(Killed):
      export(task, directory)
  assert len(os.listdir(tmp_path)) == 2
  exports.mend(directory)
  assert os.listdir(tmp_path) == ["export"]
  assert factor(directory) == 2


@pytest.mark.parametrize("locks", [True, False])
def test_a_killed_export_is_removed_and_one_in_progress_is_not(tmp_path, monkeypatch, locks):
  task, directory = Task(linear_module(None)), str(tmp_path / "export")
  living, dead = (tmp_path / f"export.new-{digit * 32}" for digit in "01")
  for folder in (living, dead):
    folder.mkdir()
    (folder / "saved_model.pb").write_bytes(b"half")
  os.utime(dead / "saved_model.pb", (0, 0))
  os.utime(dead, (0, 0))
  if not locks:
    monkeypatch.setattr(files, "lock", lambda *_, **__: False)
  with exports._in_progress(str(living)):
    export(task, directory)
  assert sorted(os.listdir(tmp_path)) == ["export", living.name]


def test_export_follows_no_link(exported, tmp_path):
  task, directory = exported
  (tmp_path / "link").symlink_to(directory)
  with pytest.raises(ConfigError, match="link' would replace what is there"):
    export(task, str(tmp_path / "link"))
  assert factor(directory) == 1


def test_export_on_a_worker_that_is_not_chief_keeps_nothing(tmp_path):
  export(Task(linear_module(None)), str(tmp_path / "export"), is_chief=False)
  assert os.listdir(tmp_path) == []


def test_the_export_action_exports_the_best(model_dir):
  task = Task(linear_module(None))
  action = Export(metric="loss", mode="min")
  process = Process(model_dir, [action], task=task).begin()
  for step, loss in ((1, 0.5), (2, 0.75), (3, 0.25), (4, 0.25)):
    task.model.kernel.assign(tf.fill([3, 2], float(step)))
    process.evaluate(step, {"loss": loss})
  assert factor(os.path.join(model_dir, "export")) == 3


def test_the_export_action_exports_the_weights_that_were_evaluated(model_dir, tmp_path):
  task = Task(linear_module(None))

  @contextlib.contextmanager
  def average():
    task.model.kernel.assign(tf.fill([3, 2], 7.0))
    yield
    task.model.kernel.assign(tf.ones([3, 2]))

  process = Process(model_dir, [], task=task)
  action = Export(metric="accuracy", directory=str(tmp_path / "served"))
  action.bind(dataclasses.replace(process.run, evaluated_weights=average))
  action({"accuracy": 0.5})
  assert factor(str(tmp_path / "served")) == 7
  assert task.model.kernel.numpy()[0, 0] == 1


# -- actions of a user's own


class Steps(OnBest):
  """A user's own action."""

  def begin(self):
    super().begin()
    self.steps = []

  def on_best(self, value):
    self.steps.append((self.run.step, value))


def test_an_action_of_ones_own_hears_of_each_best_until_another_stops_the_run(model_dir):
  steps, stops = Steps(metric="accuracy"), EarlyStopping(metric="accuracy", patience=2)
  process = Process(model_dir, [BestCheckpoint(metric="accuracy"), steps, stops]).begin()
  for step, accuracy in ((2, 0.25), (4, 0.5), (6, 0.375)):
    process.evaluate(step, {"accuracy": tf.constant(accuracy)})
  with pytest.raises(StopTraining) as stopped:
    process.evaluate(8, {"accuracy": tf.constant(0.5)})
  assert stopped.value.output == {"accuracy": 0.5}
  assert [r["accuracy"] for r in process.log.records("eval")] == [0.25, 0.5, 0.375]
  assert best_of(model_dir) == (4, 0.5, 4.0)
  assert steps.steps == [(2, 0.25), (4, 0.5)]


def test_an_action_must_say_what_it_does():
  with pytest.raises(NotImplementedError):
    Action()({})
  with pytest.raises(NotImplementedError):
    OnBest().on_best(1.0)
