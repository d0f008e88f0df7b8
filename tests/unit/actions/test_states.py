"""What an action keeps over a restart, and what is refused before training."""

import json
import re
from pathlib import Path
from typing import ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys

from loopwright import (
  Action,
  BestCheckpoint,
  ConfigError,
  EarlyStopping,
  Loss,
  StopTraining,
  Sum,
)
from loopwright.runs.runner import run
from loopwright.strategies import factories
from loopwright.tools.trackers.base import Tracker


class Steady(toys.Regression):
  """The loss falls by a known amount each step; `traced` counts how often Python evaluates."""

  features = {"x": np.ones([4, 1], np.float32)}
  traced = 0

  def build_model(self):
    return toys.linear([0.0])

  def forward(self, batch, training):
    self.traced += not training
    return super().forward(batch, training)

  def losses(self, outputs, batch):
    return 10.0 - outputs


class Diary(Action):
  """Keeps what it was called with; `dies` ends the process as a kill would, once."""

  on = "both"

  def __init__(self, *, dies=None):
    self.pages, self.dies, self.restored = [], dies, 0

  def __call__(self, output):
    self.pages.append([self.run.split, self.run.step, round(float(output["loss"]), 4)])
    if self.dies == (self.run.split, self.run.step):
      raise Killed

  def state(self):
    return {"pages": self.pages}

  def restore(self, state):
    self.pages, self.restored = state["pages"], self.restored + 1


class Killed(BaseException):
  """Stands for SIGKILL."""


def start(folder, *actions, task=Steady, **options):
  return run(
    **{
      "task": task, "train_steps": 6, "global_batch_size": 4, "mode": "train_and_evaluate",
      "model_dir": str(folder), "strategy": factories.default, "eval_every_steps": 2,
      "steps_per_loop": 1, "checkpoint_every_steps": 2, "actions": actions,
      "optimizer": lambda: keras.optimizers.SGD(1.0), **options,
    }
  )  # fmt: skip


def records(folder):
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [(r["split"], r["step"]) for r in map(json.loads, lines)]


class ToMemory(Tracker):
  rows: ClassVar = []

  def connect(self, run_id):
    return {name: step for name, step, _ in self.rows}

  def log(self, split, step, wall_time, values):
    self.rows += [(name, step, value) for name, value in values.items()]


def test_a_tracker_has_the_config_and_every_line(tmp_path):
  ToMemory.rows.clear()
  with pytest.raises(Killed):
    start(tmp_path, ToMemory(), Diary(dies=("train", 5)))
  start(tmp_path, tracker := ToMemory(), Diary())
  assert tracker.run.config["train_steps"] == "6"
  lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
  losses = [(f"{each['split']}/loss", each["step"], each["loss"]) for each in lines]
  assert [row for row in tracker.rows if row[0].endswith("/loss")] == losses


def test_every_action_ends_although_another_fails_to(tmp_path):
  ended = []

  class Ends(Action):
    on = "train"

    def __init__(self, name):
      self.name = name

    def __call__(self, output):
      pass

    def end(self):
      ended.append(self.name)
      if self.name != "c":
        raise ConfigError(f"{self.name} fails")

  with pytest.raises(ConfigError, match=r"^b fails$"):
    start(tmp_path, Ends("a"), Ends("b"), Ends("c"), train_steps=1)
  assert ended == ["a", "b", "c"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
  folder, diary = tmp_path_factory.mktemp("unbroken"), Diary()
  start(folder, diary)
  return diary.pages, records(folder)


@pytest.mark.parametrize("dies", [("train", 4), ("eval", 4), ("train", 5)])
@pytest.mark.fast(dies=[("train", 5)])
def test_a_state_continues_from_the_checkpoint(dies, unbroken, tmp_path):
  """At ("train", 5) the checkpoint is older than the evaluation of its step: it is made again."""
  pages, log = unbroken
  with pytest.raises(Killed):
    start(tmp_path, Diary(dies=dies))
  again = Diary()
  start(tmp_path, again)
  assert again.pages == pages
  assert again.restored == 1
  assert records(tmp_path) == log


@pytest.mark.whole
def test_a_state_that_saw_the_evaluation_does_not_see_it_again(tmp_path):
  """The stop saves a checkpoint after the evaluation: none was due before it."""

  class Stop(Action):
    on = "eval"

    def __call__(self, output):
      raise StopTraining("enough", output)

  start(tmp_path, Diary(), Stop(), checkpoint_every_steps=5)
  again = Diary()
  start(tmp_path, again, train_steps=3)
  assert [page[:2] for page in again.pages] == [
    ["train", 1], ["train", 2], ["eval", 2], ["train", 3], ["eval", 3],
  ]  # fmt: skip


@pytest.mark.whole
def test_two_of_a_class_keep_their_own_states(tmp_path):
  first, second = Diary(), Diary(dies=("train", 3))
  with pytest.raises(Killed):
    start(tmp_path, first, second)
  first.pages.clear()
  again = [Diary(), Diary()]
  again[1].restore = lambda state: again[1].pages.extend([*state["pages"], "second"])
  start(tmp_path, *again, mode="train", train_steps=4)
  assert again[0].pages[0] == ["train", 1, 9.0 + 1.0]
  assert "second" not in again[0].pages
  assert "second" in again[1].pages


@pytest.mark.whole
def test_checkpoints_with_and_without_a_state_restore_in_both(tmp_path):
  start(tmp_path, train_steps=2)
  diary = Diary()
  start(tmp_path, diary, train_steps=4)
  assert (diary.restored, diary.pages[-2][:2]) == (0, ["train", 4])
  start(tmp_path, train_steps=6)
  assert records(tmp_path)[-2:] == [("train", 6), ("eval", 6)]


def test_a_state_that_json_does_not_have_is_refused_before_training(tmp_path):
  class Wrong(Diary):
    def state(self):
      return {"pages": {1, 2}}

  with pytest.raises(ConfigError, match=r"^state\(\) of the actions Wrong must consist of dicts"):
    start(tmp_path, Wrong())
  assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("on", ["test", None])
def test_on_is_a_split_or_both(on, tmp_path):
  action = Diary()
  action.on = on
  with pytest.raises(ConfigError, match=rf"^Diary.on is {on!r}; it must be 'train', 'eval' or"):
    start(tmp_path, action)


@pytest.mark.parametrize(
  ("action", "line"),
  [
    (BestCheckpoint(metric="acuracy", mode="max"), "unknown BestCheckpoint.metric 'acuracy'"),
    (
      EarlyStopping(metric="Loss", mode="min", patience=1),
      "'Loss'; it must be one of loss. Did you mean",
    ),
  ],
)
def test_a_metric_that_cannot_exist_is_refused_before_training(action, line, tmp_path):
  with pytest.raises(ConfigError, match=line):
    start(tmp_path, action)
  assert not (tmp_path / "metrics.jsonl").exists()
  assert not (tmp_path / "checkpoints").exists()


def test_the_names_of_metrics_cost_no_second_trace(tmp_path, mirrored):
  task, best = Steady(), BestCheckpoint(metric="loss", mode="min")
  start(tmp_path, best, task=task, train_steps=2, strategy=lambda: mirrored(2))
  assert task.traced == 2  # once for each replica


class Deriving(Steady):
  """Says "wide" only of all examples, not of the first batch."""

  def metrics(self, outputs, batch):
    return {"rows": Sum(tf.reduce_sum(batch["weight"]))}

  def derived(self, values):
    found = {"doubled": 2 * values["loss"], "rows": values["rows"]}
    return {**found, "wide": 1.0} if values["rows"] > 2 else found


@pytest.mark.parametrize("eager", [False, True])
def test_a_derived_metric_is_looked_for_before_training(eager, tmp_path):
  given = {"task": Deriving, "global_batch_size": 2, "eager": eager}
  best = BestCheckpoint(metric="doubled", mode="min")
  start(tmp_path / "a", best, BestCheckpoint(metric="wide", mode="max", directory="wide"), **given)
  assert json.loads((tmp_path / "a" / "best" / "best.json").read_text())["value"] == 8.0
  wrong = EarlyStopping(metric="tripled", mode="max", patience=1)
  with pytest.raises(ConfigError, match=r"unknown EarlyStopping\.metric 'tripled'; it must be one"):
    start(tmp_path / "b", wrong, **given)
  assert not (tmp_path / "b" / "metrics.jsonl").exists()


def test_the_documented_action_goes_on_where_it_was(tmp_path):
  page = (Path(__file__).resolve().parents[3] / "docs" / "actions.md").read_text()
  code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
  names = {"__name__": "actions_block"}  # as test_docs.py calls it, for gin
  exec(code, names)
  stop = names["StopOnDivergence"]

  class Rising(Steady):
    def loss(self, outputs, batch):
      rise = 5.0 * tf.cast(batch["step"] >= 3, tf.float32)
      return Loss.from_examples(1.0 + rise + 0.0 * outputs, batch["weight"])

  options = {"task": Rising, "train_steps": 20, "eval_every_steps": 20, "mode": "train"}
  with pytest.raises(Killed):
    start(tmp_path, stop(patience=4), Diary(dies=("train", 5)), **options)
  start(tmp_path, stop(patience=4), Diary(), **options)
  assert records(tmp_path)[-1] == ("train", 7)  # losses 1, 1, 1, then four of 6, over the restart
