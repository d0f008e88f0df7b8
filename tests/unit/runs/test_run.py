"""One run in each mode: what it trains, writes, returns and prints, against NumPy."""

import errno
import json
import math
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
import toys
from runs import records

import loopwright
from loopwright import configurables
from loopwright.actions.base import Action, StopTraining
from loopwright.actions.best import BestCheckpoint, EarlyStopping
from loopwright.errors import ConfigError, Preempted
from loopwright.host.files import StorageError
from loopwright.inputs import datasets
from loopwright.inputs.sources import ArraySource
from loopwright.inputs.streams import StreamSource
from loopwright.metrics import weighted_sum
from loopwright.metrics.names import REPORTED
from loopwright.reporting.progress import format_number
from loopwright.run_folder.checkpoints import CheckpointManager
from loopwright.run_folder.places import require_writable
from loopwright.runs import builder
from loopwright.runs.runner import run
from loopwright.strategies import factories

EXAMPLES, BATCH, RATE, STEPS = 11, 4, 0.125, 5
RNG = np.random.default_rng(9)
X = {split: RNG.normal(size=[EXAMPLES, 2]).astype(np.float32) for split in ("train", "eval")}
Y = {split: RNG.normal(size=EXAMPLES).astype(np.float32) for split in X}
KERNEL = np.array([[0.5], [1.0]], np.float32)
HIDDEN = ("input_wait_s", "gradient_norm", "learning_rate", "loss_scale", "skipped_steps")


@loopwright.register
class Linear(toys.Regression):
  """x @ kernel; calls `on_step` whenever Python comes to a training step."""

  def __init__(self, *, random=False, on_step=lambda: None):
    self.random, self.on_step, self.steps_in_python = random, on_step, 0

  def build_model(self):
    if self.random:
      return toys.network([2], keras.layers.Dense(1, use_bias=False))
    return toys.linear(KERNEL)

  def source(self, split):
    return ArraySource(features={"x": X[split], "y": Y[split]})

  def forward(self, batch, training):
    return tf.cast(super().forward(batch, training), tf.float32)

  def metrics(self, outputs, batch):
    return {"mae": weighted_sum(tf.abs(outputs - batch["y"]), batch["weight"])}

  def train_step(self, step, batch):
    self.steps_in_python += 1
    self.on_step()
    super().train_step(step, batch)


class Reference:
  """The same by NumPy in float64: the kernel, its moving average and the means before each step."""

  def __init__(self, *, rows=None, decay=0.0):
    self.kernel = KERNEL[:, 0].astype(np.float64)
    self.average, self.decay = self.kernel.copy(), decay
    self.rows = rows or (lambda step: (step * BATCH + np.arange(BATCH)) % EXAMPLES)
    self.means = []

  def train(self, steps):
    for _ in range(steps):
      rows = self.rows(len(self.means))
      self.means.append(self.judge("train", rows, self.kernel))
      x = X["train"][rows].astype(np.float64)
      self.kernel = self.kernel - RATE * 2 * (x @ self.kernel - Y["train"][rows]) @ x / len(rows)
      self.average = self.decay * self.average + (1 - self.decay) * self.kernel
    return self

  def judge(self, split, rows, kernel):
    error = X[split][rows].astype(np.float64) @ kernel - Y[split][rows]
    return np.mean(error**2), np.mean(np.abs(error))

  def loop(self, first, last):
    """The training metrics of a loop over steps `first` to `last`, counted from 1."""
    return self.named(np.mean(self.means[first - 1 : last], axis=0))

  def evaluation(self):
    return self.named(self.judge("eval", slice(None), self.average if self.decay else self.kernel))

  def named(self, means):
    return dict(zip(("loss", "mae"), (pytest.approx(m, rel=1e-5) for m in means), strict=True))


def start(folder, mode="train_and_evaluate", **options):
  return run(
    **{
      "task": Linear,
      "train_steps": STEPS,
      "global_batch_size": BATCH,
      "mode": mode,
      "model_dir": str(folder),
      "strategy": factories.default,
      "optimizer": lambda: keras.optimizers.SGD(RATE),
      "shuffle": False,
      **options,
    }
  )


def log_of(folder):
  """(split, step, loss and mae) of each line in metrics.jsonl."""
  return [(r["split"], r["step"], {k: r[k] for k in ("loss", "mae")}) for r in records(folder)]


def steps_saved(folder):
  return sorted(int(p.stem.split("-")[1]) for p in (folder / "checkpoints").glob("ckpt-*.index"))


def saved_kernel(folder, step):
  reader = tf.train.load_checkpoint(str(folder / "checkpoints" / f"ckpt-{step}"))
  shapes = reader.get_variable_to_shape_map()
  [key] = [k for k, shape in shapes.items() if shape == [2, 1] and not k.startswith("ema/")]
  return reader.get_tensor(key)[:, 0]


def the_values(results):
  return {name: results[name] for name in ("loss", "mae")}


def printed(results):
  return f"loss {results['loss']:.4f} mae {results['mae']:.4f}"


def check_result_line(capsys, folder, text):
  """The only line on stdout: `text`, the seconds, the folder."""
  out, err = capsys.readouterr()
  assert re.fullmatch(rf"{re.escape(text)} \| \d+\.\d s \| {re.escape(str(folder))}\n", out)
  return err


# ---- The modes ----


def test_the_last_line_tells_that_nothing_was_learned(tmp_path, capsys, monkeypatch):
  monkeypatch.setitem(Y, "train", Y["train"] * np.float32("nan"))
  start(tmp_path, "train_and_evaluate")
  assert f" | skipped {STEPS} of {STEPS} steps, not finite | " in capsys.readouterr().out


def test_train(tmp_path, capsys):
  results = start(tmp_path, "train", steps_per_loop=2)
  reference = Reference().train(STEPS)
  expected = [("train", last, reference.loop(first, last)) for first, last in ((1, 2), (3, 4))]
  expected.append(("train", 5, reference.loop(5, 5)))
  assert log_of(tmp_path) == expected
  assert the_values(results) == reference.loop(5, 5)
  assert results["learning_rate"] == RATE
  assert steps_saved(tmp_path) == [5]
  np.testing.assert_allclose(saved_kernel(tmp_path, 5), reference.kernel, rtol=1e-5)
  err = check_result_line(capsys, tmp_path, f"done: step 5 | train {printed(results)}")
  assert f"step 5/5  {printed(results).replace(' mae', '  mae')}" in err
  assert not any(f"  {name} " in err for name in HIDDEN)


def test_the_task_chooses_what_is_shown(tmp_path, capsys):
  class Choosy(Linear):
    shown = ("mae", "learning_rate", "no_such")

    def derived(self, values):
      return {"table": [[1, 2], [3, 4]]}

  results = start(tmp_path, task=Choosy)
  shown = f"mae {results['mae']:.4f}"
  err = check_result_line(capsys, tmp_path, f"done: step 5 | eval {shown}")
  assert f"step 5/5  mae {log_of(tmp_path)[-2][2]['mae']:.4f}  learning_rate {RATE:.4f}  " in err
  assert err.count("Choosy.shown has 'no_such', but no metric has this name.") == 1
  assert results["table"] == [[1, 2], [3, 4]]


def test_train_and_evaluate(tmp_path, capsys):
  """Loops end where an evaluation is due, and the last step is evaluated whatever its number."""
  results = start(tmp_path, eval_every_steps=2, steps_per_loop=10)
  reference, expected = Reference(), []
  for first, last in ((1, 2), (3, 4), (5, 5)):
    reference.train(last - first + 1)
    expected.append(("train", last, reference.loop(first, last)))
    expected.append(("eval", last, reference.evaluation()))
  assert log_of(tmp_path) == expected
  assert results.keys() == {"loss", "mae"}
  assert results == reference.evaluation()
  err = check_result_line(capsys, tmp_path, f"done: step 5 | eval {printed(results)}")
  assert err.count("eval at step ") == 3


@pytest.mark.parametrize(("replicas", "share"), [(1, BATCH), (2, BATCH // 2)])
@pytest.mark.fast(replicas=[2])
def test_the_global_batch_grows_with_the_replicas(replicas, share, tmp_path, mirrored):
  start(
    tmp_path, "train", strategy=lambda: mirrored(replicas), global_batch_size=None,
    per_replica_batch_size=share,
  )  # fmt: skip
  np.testing.assert_allclose(saved_kernel(tmp_path, 5), Reference().train(STEPS).kernel, rtol=1e-5)


@pytest.mark.parametrize(
  ("sizes", "says"),
  [
    ((4, 2), "both run.global_batch_size=4 and run.per_replica_batch_size=2; choose one"),
    ((None, None), "neither global_batch_size nor per_replica_batch_size; set one"),
    ((None, 0), "run.per_replica_batch_size is 0; it must be a whole number of at least 1"),
  ],
)
def test_exactly_one_batch_size(sizes, says, tmp_path):
  with pytest.raises(ConfigError, match=says):
    start(tmp_path, global_batch_size=sizes[0], per_replica_batch_size=sizes[1])


def test_without_eval_every_steps_there_is_one_evaluation_at_the_end(tmp_path):
  start(tmp_path, steps_per_loop=2)
  assert [(split, step) for split, step, _ in log_of(tmp_path)] == [
    ("train", 2), ("train", 4), ("train", 5), ("eval", 5)
  ]  # fmt: skip


def test_checkpoints_come_every_so_often_and_at_the_end(tmp_path):
  start(tmp_path, "train", checkpoint_every_steps=2, steps_per_loop=1, keep_checkpoints=2)
  assert steps_saved(tmp_path) == [4, 5]


def test_a_loop_ends_where_a_checkpoint_is_due(tmp_path):
  start(tmp_path, "train", checkpoint_every_steps=2, steps_per_loop=3)
  assert steps_saved(tmp_path) == [2, 4, 5]
  assert [step for _, step, _ in log_of(tmp_path)] == [2, 3, 4, 5]


def test_a_run_that_goes_on_saves_at_the_same_steps(tmp_path):
  start(tmp_path, "train", train_steps=3, checkpoint_every_steps=2)
  start(tmp_path, "train", checkpoint_every_steps=2, keep_checkpoints=9)
  assert steps_saved(tmp_path) == [2, 3, 4, 5]


@pytest.mark.parametrize("mode", ["evaluate", "evaluate_continuously"])
@pytest.mark.parametrize(("replicas", "eval_batch_size"), [(1, None), (2, 5)])
@pytest.mark.fast(replicas=[2], mode=["evaluate_continuously"])
def test_evaluation_alone_is_of_the_newest_checkpoint(
  mode, replicas, eval_batch_size, tmp_path, mirrored, capsys
):
  """By another process, on other replicas and in other batches: the same numbers, no training."""
  start(tmp_path, "train", checkpoint_every_steps=2, steps_per_loop=1)
  before = log_of(tmp_path)
  config = (tmp_path / "operative_config.gin").stat().st_mtime_ns
  capsys.readouterr()
  task = Linear()
  results = start(
    tmp_path, mode, task=task, strategy=lambda: mirrored(replicas), eval_batch_size=eval_batch_size
  )
  expected = Reference().train(STEPS).evaluation()
  assert results == expected
  assert log_of(tmp_path) == [*before, ("eval", 5, expected)]
  assert task.steps_in_python == 0
  assert steps_saved(tmp_path) == [2, 4, 5]
  assert (tmp_path / "operative_config.gin").stat().st_mtime_ns == config
  check_result_line(capsys, tmp_path, f"done: step 5 | eval {printed(results)}")


def served_kernel(folder):
  served = tf.saved_model.load(str(folder / "export")).signatures["serving_default"]
  [outputs] = served(inputs=tf.eye(2)).values()
  return outputs.numpy()[:, 0]


def test_export(tmp_path, capsys):
  start(tmp_path, "train")
  capsys.readouterr()
  assert start(tmp_path, "export", train_steps=1) == {}
  kernel = Reference().train(STEPS).kernel
  np.testing.assert_allclose(served_kernel(tmp_path), kernel, rtol=1e-5)
  check_result_line(capsys, tmp_path, "done: step 5 | SavedModel in export/")


@pytest.mark.parametrize("name", ["checkpoints/ckpt-2", "chosen"])
@pytest.mark.fast(name=["chosen"])
def test_an_older_checkpoint_is_evaluated_and_exported_by_name(name, tmp_path):
  start(tmp_path, "train", checkpoint_every_steps=2, steps_per_loop=1)
  for file in (tmp_path / "checkpoints").glob("ckpt-2.*"):
    (tmp_path / "chosen").mkdir(exist_ok=True)
    shutil.copy(file, tmp_path / "chosen")
  (tmp_path / "chosen" / "checkpoint").write_text('model_checkpoint_path: "ckpt-2"\n')
  reference = Reference().train(2)
  chosen = str(tmp_path / name)
  assert start(tmp_path, "evaluate", checkpoint=chosen) == reference.evaluation()
  assert log_of(tmp_path)[-1] == ("eval", 2, reference.evaluation())
  start(tmp_path, "export", checkpoint=chosen)
  np.testing.assert_allclose(served_kernel(tmp_path), reference.kernel, rtol=1e-5)


@pytest.mark.parametrize(
  ("mode", "name", "message"),
  [
    ("evaluate", "nowhere", r"^run.checkpoint is '.*nowhere', where there is no checkpoint; give "),
    (
      "export",
      "checkpoints/ckpt-3",
      r"^run.checkpoint is '.*ckpt-3', where there is no checkpoint",
    ),
    ("evaluate", "torn", r"^run.checkpoint '.*torn' is damaged"),
    ("train", "checkpoints/ckpt-2", r"but mode 'train' cannot use it; leave it out"),
  ],
)
def test_a_checkpoint_that_cannot_be_taken_is_refused(mode, name, message, tmp_path):
  start(tmp_path, "train", checkpoint_every_steps=2, steps_per_loop=1)
  for file in (tmp_path / "checkpoints").glob("ckpt-4.*"):
    torn = file.read_bytes()[:-9]
    (tmp_path / file.name.replace("ckpt-4", "torn")).write_bytes(torn)
  before = log_of(tmp_path)
  with pytest.raises(ConfigError, match=message):
    start(tmp_path, mode, checkpoint=str(tmp_path / name))
  assert log_of(tmp_path) == before


# ---- Through gin ----


def configured(folder, mode, *params):
  config = f"""
    run.task = @Linear()
    run.train_steps = {STEPS}
    run.global_batch_size = {BATCH}
    run.strategy = @default
    run.shuffle = False
    run.optimizer = @keras.SGD
    keras.SGD.learning_rate = {RATE}
  """
  path = folder / "config.gin"
  path.write_text("\n".join(line.strip() for line in config.splitlines()))
  configurables.parse([str(path)], params)
  return configurables.configured(run)(mode=mode, model_dir=str(folder / "run"))


def test_evaluations_and_the_export_have_the_moving_average(tmp_path):
  decay = "Trainer.ema_decay = 0.5"
  results = configured(tmp_path, "train_and_evaluate", decay)
  reference = Reference(decay=0.5).train(STEPS)
  assert results == reference.evaluation()
  assert configured(tmp_path, "evaluate", decay) == reference.evaluation()
  configured(tmp_path, "export", decay)
  np.testing.assert_allclose(served_kernel(tmp_path / "run"), reference.average, rtol=1e-5)
  np.testing.assert_allclose(saved_kernel(tmp_path / "run", 5), reference.kernel, rtol=1e-5)
  assert np.abs(reference.average - reference.kernel).max() > 1e-3


@loopwright.register
class Dying(Linear):
  """Fails when its first step is traced."""

  def __init__(self):
    super().__init__(on_step=self.fail)

  def fail(self):
    raise ZeroDivisionError("a bug")


def test_the_config_of_a_run_that_dies_in_its_first_step_is_written(tmp_path):
  """With its defaults, so that a run that dies in its first step can still be told apart."""
  with pytest.raises(Exception, match="a bug"):
    configured(tmp_path, "train", "run.task = @Dying()")
  written = (tmp_path / "run" / "operative_config.gin").read_text()
  for line in (f"keras.SGD.learning_rate = {RATE}", "run.train_steps = 5", "run.seed = 0"):
    assert line in written.splitlines()
  assert not (tmp_path / "run" / "metrics.jsonl").exists()
  assert steps_saved(tmp_path / "run") == []


def test_going_on_writes_the_config_that_it_goes_on_with(tmp_path):
  for steps in (5, 7):
    configured(tmp_path, "train", f"run.train_steps = {steps}")
    written = (tmp_path / "run" / "operative_config.gin").read_text()
    assert f"run.train_steps = {steps}" in written.splitlines()


# ---- Actions ----


class Stop(Action):
  """Stops at a step; remembers each step it was called at."""

  def __init__(self, *, on, step):
    self.on, self.step, self.called = on, step, []

  def __call__(self, output):
    self.called.append(self.run.step)
    if self.run.step >= self.step:
      raise StopTraining("enough", output)


@pytest.mark.parametrize(
  ("mode", "on"),
  [("train", "train"), ("train_and_evaluate", "train"), ("train_and_evaluate", "eval")],
)
def test_an_action_stops_the_run_in_good_order(mode, on, tmp_path, capsys):
  """What it stopped at is in the log, the step is saved, the result is the last there is."""
  action = Stop(on=on, step=2)
  results = start(tmp_path, mode, actions=[action], steps_per_loop=1, eval_every_steps=2)
  reference = Reference().train(2)
  expected = [("train", 1, reference.loop(1, 1)), ("train", 2, reference.loop(2, 2))]
  if on == "eval":
    expected.append(("eval", 2, reference.evaluation()))
  assert log_of(tmp_path) == expected
  assert action.called == ([1, 2] if on == "train" else [2])
  assert steps_saved(tmp_path) == [2]
  if mode != "train" and on == "train":  # nothing had been evaluated
    assert results == {}
    err = check_result_line(capsys, tmp_path, "stopped: step 2")
  else:
    assert the_values(results) == expected[-1][2]
    err = check_result_line(capsys, tmp_path, f"stopped: step 2 | {on} {printed(results)}")
  assert "stopped at step 2: enough" in err


def test_after_early_stopping_the_last_line_names_the_best_evaluation(tmp_path, capsys):
  actions = [EarlyStopping(patience=1), BestCheckpoint(metric="loss", mode="min")]
  options = {"optimizer": lambda: keras.optimizers.SGD(5.0), "eval_every_steps": 1}  # it diverges
  start(tmp_path, "train_and_evaluate", actions=actions, steps_per_loop=1, **options)
  first, second = (values["loss"] for split, _, values in log_of(tmp_path) if split == "eval")
  assert first < second
  line = capsys.readouterr().out.splitlines()[-1]
  assert line.startswith("stopped: step 2 | eval loss ")
  assert line.count(f" | best loss {format_number(first)} at step 1 | ") == 1


def test_a_stopped_run_goes_on_without_the_action(tmp_path):
  start(tmp_path, "train", actions=[Stop(on="train", step=2)], steps_per_loop=2)
  start(tmp_path, "train")
  reference = Reference().train(STEPS)
  assert log_of(tmp_path) == [
    ("train", 2, reference.loop(1, 2)), ("train", 5, reference.loop(3, 5))
  ]  # fmt: skip
  np.testing.assert_allclose(saved_kernel(tmp_path, 5), reference.kernel, rtol=1e-5)


@loopwright.register
class TwoSets(Linear):
  """The evaluation examples, and an endless stream of the first of them.

  With a `number`, this process gets that signal in each batch of the evaluation.
  """

  def __init__(self, number=None):
    super().__init__()
    self.number = number

  def eval_step(self, step, batch):
    super().eval_step(step, batch)
    if self.number:
      kill = tf.numpy_function(lambda x: os.kill(os.getpid(), self.number) or x, [1], tf.int32)
      tf.debugging.assert_equal(kill, 1)

  def source(self, split):
    known = super().source(split)
    if split == "train":
      return known
    element = {"x": X[split][0], "y": Y[split][0]}

    def forever():
      while True:
        yield element

    spec = {"x": tf.TensorSpec([2]), "y": tf.TensorSpec([])}
    stream = tf.data.Dataset.from_generator(forever, output_signature=spec)
    return {"known": known, "endless": StreamSource(dataset=stream)}


def of_two_sets(reference, batches):
  rows = {"known": slice(0, batches * BATCH), "endless": [0]}
  judged = {name: reference.judge("eval", part, reference.kernel) for name, part in rows.items()}
  return {f"{name}/{k}": v for name in rows for k, v in reference.named(judged[name]).items()}


def test_several_evaluation_sets_of_at_most_eval_steps_batches(tmp_path):
  best = BestCheckpoint(metric="known/mae", mode="min")
  results = start(tmp_path, task=TwoSets, eval_steps=2, actions=[best])
  wanted = of_two_sets(Reference().train(STEPS), batches=2)
  assert results == wanted
  [_, record] = records(tmp_path)
  assert {name: record[name] for name in wanted} == wanted
  assert json.loads((tmp_path / "best" / "best.json").read_text())["value"] == wanted["known/mae"]
  [start_of_run] = (tmp_path / "history.jsonl").read_text().splitlines()
  assert set(json.loads(start_of_run)["data"]) == {
    "training", "evaluation known", "evaluation endless"
  }  # fmt: skip


def test_a_line_leaves_out_metrics_that_have_no_weight_in_a_set(tmp_path, capsys):
  known = TwoSets().source("eval")["known"]

  class Later(TwoSets):
    def metrics(self, outputs, batch):
      first = known.fetch(tf.constant([0], tf.int64))["y"]
      later = batch["weight"] * tf.cast(batch["y"] != first, tf.float32)  # "endless" has no other
      return {"later": (2.0 * tf.reduce_sum(later), tf.reduce_sum(later))}

  results = start(tmp_path, task=Later, eval_steps=2)
  assert (results["known/later"], math.isnan(results["endless/later"])) == (2.0, True)
  out, err = capsys.readouterr()
  for text in (out, err[err.index("eval at") :]):
    assert "known/later 2.0000" in text
    assert "endless/loss" in text
    assert "endless/later" not in text


@pytest.mark.parametrize(
  ("number", "ends"), [(signal.SIGTERM, Preempted), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_ends_an_endless_evaluation_and_nothing_is_lost(number, ends, tmp_path):
  """It is not reported, and done again by the next process, with the trained weights."""
  with pytest.raises(ends, match=f"saved step {STEPS} in "):
    start(tmp_path, task=TwoSets(number))
  reference = Reference().train(STEPS)
  assert steps_saved(tmp_path) == [STEPS]
  assert log_of(tmp_path) == [("train", STEPS, reference.loop(1, STEPS))]
  results = start(tmp_path, task=TwoSets, eval_steps=1, accept_changes=True)
  assert results == of_two_sets(reference, batches=1)
  np.testing.assert_allclose(saved_kernel(tmp_path, STEPS), reference.kernel, rtol=1e-5)


def test_a_signal_in_an_evaluation_of_averages_saves_the_weights(tmp_path):
  """The evaluation has the averages in the place of the weights."""
  signalled = ("run.task = @TwoSets()", f"TwoSets.number = {int(signal.SIGTERM)}")
  options = ("Trainer.ema_decay = 0.5", "run.eval_every_steps = 2", *signalled)
  with pytest.raises(Preempted, match="saved step 2 in "):
    configured(tmp_path, "train_and_evaluate", *options)
  reference = Reference(decay=0.5).train(2)
  np.testing.assert_allclose(saved_kernel(tmp_path / "run", 2), reference.kernel, rtol=1e-5)


def test_a_save_that_fails_beside_training_ends_it_after_the_loop(tmp_path, monkeypatch):
  def complete(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "checkpoints"))

  class AfterTheSave(Action):
    on = "train"

    def __call__(self, output):
      while any(thread.name == "loopwright-files" for thread in threading.enumerate()):
        time.sleep(0.001)

  monkeypatch.setattr(CheckpointManager, "_complete", complete)
  options = {"train_steps": 50, "steps_per_loop": 1, "checkpoint_every_steps": 2}
  with pytest.raises(StorageError, match="No space left on device; there is no complete check"):
    start(tmp_path, actions=[AfterTheSave()], **options)
  assert [step for _, step, _ in log_of(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("mode", ["evaluate", "evaluate_continuously", "export"])
@pytest.mark.fast(mode=["evaluate"])
def test_actions_are_for_the_modes_that_train(mode, tmp_path, capsys):
  start(tmp_path, "train")
  capsys.readouterr()
  actions = [Stop(on=on, step=0) for on in ("train", "eval")]
  start(tmp_path, mode, actions=actions)
  assert [action.called for action in actions] == [[], []]
  assert capsys.readouterr().out.startswith("done: step 5 | ")


# ---- Options ----


def test_every_name_in_the_log_is_a_tasks_own_or_reserved(tmp_path):
  start(tmp_path, steps_per_loop=2)
  names = {name for record in records(tmp_path) for name in record}
  assert names - {"mae"} <= set(REPORTED)
  assert {"loss", "gradient_norm", "examples_per_second", "step", "wall_time"} <= names


@pytest.mark.parametrize("make", [Linear, Linear(), lambda: Linear()], ids=["class", "one", "call"])
def test_a_task_may_be_an_instance_or_a_factory(make, tmp_path):
  start(tmp_path, "train", task=make, train_steps=1)
  np.testing.assert_allclose(saved_kernel(tmp_path, 1), Reference().train(1).kernel, rtol=1e-6)


def test_the_order_of_examples_is_that_of_the_seed(tmp_path):
  dataset = datasets.train_dataset(Linear().source("train"), global_batch_size=BATCH, seed=3)
  rows = [batch["example_id"] for batch in dataset.take(STEPS).as_numpy_iterator()]
  start(tmp_path, "train", shuffle=True, seed=3)
  shuffled = Reference(rows=lambda step: rows[step]).train(STEPS).kernel
  np.testing.assert_allclose(saved_kernel(tmp_path, 5), shuffled, rtol=1e-5)
  assert np.abs(shuffled - Reference().train(STEPS).kernel).max() > 1e-3


def test_eager_runs_the_tasks_python_at_each_step(tmp_path):
  task = Linear()
  results = start(tmp_path, task=task, eager=True)
  assert task.steps_in_python == STEPS
  assert results == Reference().train(STEPS).evaluation()
  compiled = Linear()
  start(tmp_path / "compiled", task=compiled)
  assert compiled.steps_in_python == 1


def test_precision_is_that_of_both_generations_of_keras(tmp_path, capsys):
  seen = []
  task = Linear(
    on_step=lambda: seen.append(
      (task.model.compute_dtype, tf_keras.mixed_precision.global_policy().name)
    )
  )
  start(tmp_path, "train", task=task, precision="mixed_bfloat16", train_steps=1)
  assert seen == [("bfloat16", "mixed_bfloat16")]
  assert re.search(r"^precision +mixed_bfloat16$", capsys.readouterr().err, re.MULTILINE)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"mode": "trian"}, r"^unknown run.mode 'trian'; .* Did you mean 'train'\?"),
    ({"precision": "float16"}, r"^unknown run.precision 'float16'; it must be one of float32, "),
    ({"train_steps": True}, r"^run.train_steps is True; it must be a whole number of at least 1"),
    ({"train_steps": 2.0}, r"^run.train_steps is 2.0; it must be a whole number"),
    ({"checkpoint_every_steps": 0}, r"^run.checkpoint_every_steps is 0; it must be"),
    ({"eval_every_steps": -1}, r"^run.eval_every_steps is -1; it must be"),
    ({"keep_checkpoints": 0}, r"^run.keep_checkpoints is 0; it must be"),
    ({"task": "Linear"}, r"^run.task is a str; it must be a loopwright.Task"),
    ({"task": lambda: 3}, r"^run.task is a int; it must be a loopwright.Task"),
    ({"strategy": lambda: "mirrored"}, r"^run.strategy makes a str; it must be a factory of"),
  ],
)
def test_a_wrong_argument_is_refused_before_anything_is_written(options, message, tmp_path):
  with pytest.raises(ConfigError, match=message):
    start(tmp_path / "run", **options)
  assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize("name", ["metrics.jsonl", ".writable", "history.jsonl"])
def test_a_pipe_in_the_run_folder_is_refused(tmp_path, name):
  """A reader of it would wait without end."""
  os.mkfifo(tmp_path / name)
  with pytest.raises(ConfigError) as caught:
    require_writable(str(tmp_path))
  assert str(caught.value) == f"'{tmp_path / name}' is a pipe, not a file; remove it."


def test_a_folder_that_tensorflow_and_the_system_do_not_find_alike(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  Path("x/deep").mkdir(parents=True)
  Path("link").symlink_to("x/deep")
  for wrong, plain in {"x/no/../y": "x/y", "link/../y": "y", "no/../y": "y"}.items():
    with pytest.raises(ConfigError) as caught:
      require_writable(wrong)
    assert str(caught.value) == (
      f"model_dir is {wrong!r}, in which '..' follows a link, or no folder; write {plain!r}."
    )
    assert sorted(os.listdir()) == ["link", "x"]
  require_writable("x/deep/../y")
  require_writable("a..b")
  assert (sorted(os.listdir("x")), os.path.isdir("a..b")) == (["deep", "y"], True)
  with pytest.raises(ConfigError, match=r"^model_dir is 'a\\udcff'; its name must be text"):
    require_writable("a\udcff")


def test_methods_of_lightning_in_a_task_are_told(caplog):
  class Lit(toys.Regression):
    def training_step(self, batch):
      raise AssertionError("the loop calls it")

  builder.made_task(Lit())
  assert "Lit.training_step is not called by the loop; what a task has is loss(" in caplog.text
  caplog.clear()
  builder.made_task(toys.Regression())
  assert not caplog.text
