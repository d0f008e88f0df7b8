"""A run that was stopped, killed or robbed of its last checkpoint ends as an undisturbed one."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import everything
import pytest
import tensorflow as tf
from runs import records

import launch
from loopwright import errors
from loopwright.actions.base import Action, StopTraining
from loopwright.actions.best import EarlyStopping
from loopwright.evaluator import Evaluator
from loopwright.inputs import datasets
from loopwright.options.groups import Cadence
from loopwright.run_folder import checkpoints
from loopwright.run_folder.places import RunFolder
from loopwright.runs.session import Session

REPOSITORY = Path(launch.__file__).parent
STEPS, EVAL_EVERY, CHECKPOINT_EVERY, LOOP = 12, 6, 4, 2


# ---- Real processes, really killed ----


@pytest.mark.whole
def test_killed_runs_end_as_one_that_was_never_killed():
  """More, and in every part of a run: `python -m benchmarks.trials kills`."""
  command = [sys.executable, "-m", "benchmarks.trials", "kills", "--first=7", "--trials=2"]
  done = subprocess.run([*command, "--replicas=1"], cwd=REPOSITORY, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr
  assert done.stdout.count(" s: nothing lost\n") == 4
  for trial in ("SIGKILL 7: in ", "SIGKILL 8: in ", "SIGTERM 7: in ", "SIGTERM 8: in "):
    [line] = [line for line in done.stdout.splitlines() if line.startswith(trial)]
    assert ("loop" if "7" in trial else "write") in line
  assert done.stdout.endswith("4 trials, 0 with losses, 0 processes left\n")


# ---- In this process ----


class Scene:
  """One compiled trainer and evaluator, brought back to their beginning for every session."""

  def __init__(self, folder):
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    self.trainer = everything.make_trainer(strategy)
    made = self.trainer.task
    self.evaluator = Evaluator(
      task=made,
      strategy=strategy,
      dataset=datasets.eval_dataset(made.source("eval"), global_batch_size=everything.BATCH),
      ema=self.trainer.parts.ema,
    )
    self._checkpoint = tf.train.Checkpoint(**self.trainer.checkpoint_items())
    self._beginning = self._checkpoint.write(str(folder / "beginning"))

  def session(self, folder, **options):
    self._checkpoint.read(self._beginning).assert_consumed()
    self.trainer.reset_input()
    steps = {
      "train_steps": STEPS,
      "steps_per_loop": LOOP,
      "eval_every_steps": EVAL_EVERY,
      "eval_timeout_s": None,
      "checkpoint_every_steps": CHECKPOINT_EVERY,
    }
    cadence = Cadence(**{name: options.pop(name, value) for name, value in steps.items()})
    made = Session(
      **{
        "trainer": self.trainer,
        "evaluator": self.evaluator,
        "folder": RunFolder(str(folder)),
        "cadence": cadence,
        "keep_checkpoints": 10,
        **options,
      }
    )
    made.restore()
    return made

  def run(self, folder, mode="train_and_evaluate", **options):
    os.makedirs(folder, exist_ok=True)
    return self.session(folder, **options).go(mode)


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
  return Scene(tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="module")
def whole(scene, tmp_path_factory):
  """The folder of an uninterrupted run; to be left alone."""
  folder = tmp_path_factory.mktemp("whole")
  scene.run(folder)
  return folder


@pytest.fixture
def folder(whole, tmp_path):
  """A copy of the uninterrupted run's folder."""
  return Path(shutil.copytree(whole, tmp_path / "run"))


def log_of(folder):
  """The records of metrics.jsonl, without what is a time."""
  times = (
    "wall_time",
    "steps_per_second",
    "examples_per_second",
    "input_wait_s",
    "cpu_utilization",
  )
  found = records(folder) if (folder / "metrics.jsonl").exists() else []
  return [{k: v for k, v in record.items() if k not in times} for record in found]


def final(folder):
  return everything.read(folder / "checkpoints" / f"ckpt-{STEPS}")


def steps_saved(folder):
  return [
    int(p.rpartition("-")[2]) for p in checkpoints.list_checkpoints(str(folder / "checkpoints"))
  ]


def forget(folder, *, after_step):
  """What a kill would have: nothing saved after a step, but maybe something logged."""
  for path in (folder / "checkpoints").glob("ckpt-*"):
    if int(path.name.split("-")[1].split(".")[0]) > after_step:
      path.unlink()


@pytest.mark.parametrize(
  ("step", "logged"),
  [(0, 0), (0, 4), (4, 4), (4, 8), (8, 12)],
)
def test_a_killed_run_goes_on(scene, whole, folder, step, logged):
  """Killed after `step` was saved and `logged` was logged, with a line half written."""
  forget(folder, after_step=step)
  lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
  kept = [line for line in lines if f'"step": {logged + LOOP}' not in line]
  kept = kept[: next((i for i, line in enumerate(kept) if record_step(line) > logged), len(kept))]
  (folder / "metrics.jsonl").write_text("".join(kept) + '{"step": 1, "spl')
  scene.run(folder)
  assert log_of(folder) == log_of(whole)
  assert everything.differing(final(folder), final(whole)) == []
  assert steps_saved(folder) == steps_saved(whole) == [4, 8, 12]


def record_step(line):
  return int(line.split('"step": ')[1].split(",")[0])


def test_a_damaged_newest_checkpoint_costs_only_time(scene, whole, folder, caplog):
  index = folder / "checkpoints" / "ckpt-12.index"
  index.write_bytes(index.read_bytes()[:-9])
  scene.run(folder)
  assert "ckpt-12 is damaged" in caplog.text
  assert log_of(folder) == log_of(whole)
  assert everything.differing(final(folder), final(whole)) == []


def test_an_evaluation_that_a_kill_prevented_is_made_up_for(scene, whole, folder):
  shutil.rmtree(folder)
  scene.run(folder, train_steps=6)
  lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
  (folder / "metrics.jsonl").write_text("".join(x for x in lines if '"eval"' not in x))
  scene.run(folder)
  assert log_of(folder) == log_of(whole)


def test_nothing_is_retraced(scene, whole, tmp_path):
  """After all the restores of this module, and two batch shapes."""
  scene.run(tmp_path)
  assert scene.trainer.traces == 1


class At(Action):
  """Does something once, at a step."""

  def __init__(self, step, what, on="train"):
    self.on, self._step, self._what = on, step, what

  def __call__(self, output):
    if self.run.step == self._step:
      self._what(output)


def send(number):
  return lambda output: os.kill(os.getpid(), number)


@pytest.mark.parametrize(
  ("number", "name", "error", "on", "step"),
  [
    (signal.SIGTERM, "SIGTERM", errors.Preempted, "train", 2),
    (signal.SIGHUP, "SIGHUP", errors.Preempted, "train", 4),
    (signal.SIGINT, "Ctrl-C", KeyboardInterrupt, "train", 6),
    (signal.SIGTERM, "SIGTERM", errors.Preempted, "eval", 6),
    (signal.SIGTERM, "SIGTERM", errors.Preempted, "train", 12),
  ],
)
def test_a_signal_saves_and_the_same_command_goes_on(
  scene, whole, tmp_path, number, name, error, on, step
):
  signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it
  before = signal.getsignal(number)
  with pytest.raises(error) as caught:
    scene.run(tmp_path, actions=[At(step, send(number), on)])
  assert str(caught.value) == (
    f"{name}: saved step {step} in {tmp_path / 'checkpoints'}; start the same command again to "
    "continue"
  )
  assert signal.getsignal(number) is before
  assert steps_saved(tmp_path)[-1] == step
  reported = [r for r in log_of(whole) if r["step"] < step or r["split"] in ("train", on)]
  assert log_of(tmp_path) == [r for r in reported if r["step"] <= step]
  scene.run(tmp_path)
  assert log_of(tmp_path) == log_of(whole)
  assert everything.differing(final(tmp_path), final(whole)) == []


@pytest.mark.parametrize("mode", ["evaluate", "evaluate_continuously"])
def test_sigterm_ends_an_evaluating_process_at_once(scene, folder, mode):
  handlers = []
  look = At(STEPS, lambda _: handlers.append(signal.getsignal(signal.SIGTERM)), "eval")
  scene.run(folder, mode=mode, actions=[look])
  assert handlers == [signal.getsignal(signal.SIGTERM)]


def stop(output):
  raise StopTraining("enough", output)


def fail(output):
  raise ZeroDivisionError("a bug")


def test_a_run_that_was_stopped_early_stays_so(scene, tmp_path, capsys):
  never_better = {"metric": "loss", "mode": "max", "patience": 1, "min_delta": 1e9}
  for _ in range(2):
    scene.run(tmp_path, actions=[EarlyStopping(**never_better)])
    assert capsys.readouterr().out.startswith("stopped: step 12 | ")
  scene.run(tmp_path, train_steps=18, actions=[EarlyStopping(**never_better)])
  assert capsys.readouterr().out.startswith("stopped: step 12 | ")


def test_an_action_may_stop_an_evaluation_only_process(scene, folder, capsys):
  scene.run(folder, mode="evaluate", actions=[At(12, stop, "eval")])
  assert capsys.readouterr().out.startswith("stopped: step 12 | eval loss ")


def test_a_failing_last_evaluation_costs_no_training(scene, whole, tmp_path):
  with pytest.raises(ZeroDivisionError):
    scene.run(tmp_path, actions=[At(12, fail, "eval")])
  assert steps_saved(tmp_path)[-1] == 12
  scene.run(tmp_path)
  assert log_of(tmp_path) == log_of(whole)


def test_actions_begin_with_the_restored_state_and_the_trimmed_log(scene, folder):
  seen = []

  class Begun(Action):
    on = "train"

    def begin(self):
      seen.append((self.run.step, max(r["step"] for r in self.run.metrics_log.records())))

    def __call__(self, output):
      seen.append(self.run.step)

  forget(folder, after_step=8)
  scene.run(folder, actions=[Begun()])
  assert seen == [(8, 8), 10, 12]


def test_actions_get_the_weights_that_are_evaluated(scene, tmp_path):
  seen = []

  def look(_):
    with action.run.evaluated_weights():
      seen.append(kernel.numpy())

  kernel, averages = scene.trainer.task.model["network"].layers[0].kernel, scene.trainer.parts.ema
  action = At(12, look, "eval")
  scene.run(tmp_path, actions=[action])
  assert (seen[0] == averages.averages[0].numpy()).all()
  assert (seen[0] != kernel.numpy()).any()


# ---- evaluate_continuously ----


class Trainer:
  """In the place of `time`: another process, which saves while the evaluator sleeps."""

  def __init__(self, source, target, *steps):
    self.now, self._source, self._target, self._steps = 0.0, source, target, list(steps)
    target.mkdir(parents=True)

  def monotonic(self):
    return self.now

  def sleep(self, seconds):
    self.now += seconds
    if self._steps:
      self._steps.pop(0)(self)

  def save(self, step):
    for path in (self._source / "checkpoints").glob(f"ckpt-{step}.*"):
      os.utime(shutil.copy(path, self._target), (self.now, self.now))

  def tear(self, step):
    self.save(step)
    (self._target / f"ckpt-{step}.data-00000-of-00001").write_bytes(b"torn")


def saved(step):
  return lambda other: other.save(step)


def torn(step):
  return lambda other: other.tear(step)


@pytest.mark.parametrize(
  ("happenings", "evaluated"),
  [
    ([saved(4), saved(8), saved(12), saved(4)], [4, 8, 12]),
    ([torn(4), saved(8), torn(12), lambda _: None, saved(12)], [8, 12]),
    ([saved(4), torn(8)], [4]),
    ([], []),
  ],
)
def test_evaluate_continuously(scene, whole, tmp_path, monkeypatch, happenings, evaluated):
  other = Trainer(whole, tmp_path / "checkpoints", *happenings)
  monkeypatch.setattr(checkpoints, "time", other)
  scene.run(tmp_path, mode="evaluate_continuously", eval_timeout_s=9.0)
  assert [(r["split"], r["step"]) for r in log_of(tmp_path)] == [("eval", s) for s in evaluated]
  if 12 in evaluated:
    assert log_of(tmp_path)[-1] == log_of(whole)[-1]
    assert other.now < 9
