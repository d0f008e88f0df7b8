"""The groups of options of run: each is an argument of it, and workers compare it."""

import inspect
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from input_cases import one_line_error
from runs import records

from loopwright.distribution import cluster
from loopwright.errors import ConfigError
from loopwright.inputs.streams import StreamSource
from loopwright.options.groups import (
  BatchSize,
  Evaluation,
  Gpus,
  Intervals,
  Length,
  Numerics,
  facts,
  names_of,
  taken,
)
from loopwright.runs.runner import run
from loopwright.task import Task

GIVEN = {
  "train_steps": 9, "steps_per_loop": 2, "checkpoint_every_steps": 4, "keep_checkpoints": 3,
  "global_batch_size": 8, "eval_steps": 5, "seed": 7, "mode": "train",
}  # fmt: skip


@pytest.mark.parametrize("group", [BatchSize, Intervals, Length, Evaluation, Numerics, Gpus])
def test_each_option_of_a_group_is_an_argument_of_run(group):
  defaults = {name: each.default for name, each in inspect.signature(run).parameters.items()}
  made = taken(group, GIVEN)
  for name in names_of(group):
    assert name in defaults
    assert getattr(made, name) == GIVEN.get(name, defaults[name])


def test_what_workers_compare_has_each_option_once():
  found = facts(taken(BatchSize, GIVEN), taken(Numerics, GIVEN, precision="mixed_float16"))
  assert found == {
    "run.global_batch_size": 8, "run.per_replica_batch_size": None, "run.seed": 7,
    "run.precision": "mixed_float16", "run.tf32": None, "run.deterministic": False,
    "run.eager": False,
  }  # fmt: skip


def test_run_declares_all_of_them(monkeypatch, tmp_path):
  declared = {}

  def declare(found):
    declared.update(found)
    raise InterruptedError

  monkeypatch.setattr(cluster, "declare", declare)
  with pytest.raises(InterruptedError):
    run(
      task=Task(), train_steps=9, global_batch_size=8, model_dir=str(tmp_path), keep_checkpoints=2
    )
  for group in (BatchSize, Intervals, Length, Evaluation, Numerics):
    assert {f"run.{name}" for name in names_of(group)} <= declared.keys()
  assert declared["run.keep_checkpoints"] == 2


@pytest.mark.parametrize(
  ("group", "option"),
  [(BatchSize, "global_batch_size"), (Intervals, "steps_per_loop"), (Evaluation, "eval_steps")],
)
def test_a_count_of_zero_is_refused_where_it_is_given(group, option):
  with one_line_error(f"run.{option} is 0; it must be a whole number of at least 1"):
    taken(group, {**GIVEN, option: 0})


@pytest.mark.parametrize(
  ("sizes", "batch"),
  [({"global_batch_size": 8}, 8), ({"per_replica_batch_size": 8}, 24)],
)
def test_the_batch_of_three_replicas(sizes, batch):
  assert BatchSize(**sizes).on(3) == batch


@pytest.mark.parametrize(
  ("epochs", "examples", "batch", "steps"),
  [(1, 10, 5, 2), (1, 10, 4, 3), (2, 10, 4, 5), (2.5, 10, 4, 7), (0.1, 100, 10, 1), (3, 7, 7, 3)],
)
def test_epochs_are_steps_that_read_all_of_them(epochs, examples, batch, steps):
  assert Length(train_epochs=epochs).steps(examples, batch) == steps


class Line(toys.Regression):
  features = {"x": np.ones([10, 1], np.float32), "y": np.ones(10, np.float32)}

  def build_model(self):
    return toys.network([1], keras.layers.Dense(1))


def test_a_run_ends_after_its_epochs(tmp_path):
  folder = tmp_path / "run"
  run(task=Line(), train_epochs=2, global_batch_size=4, model_dir=str(folder), mode="train")
  assert [r["step"] for r in records(folder)][-1] == 5
  assert json.loads((folder / "history.jsonl").read_text())["train_steps"] == 5
  for given, line in (
    ({}, "run has neither train_steps nor train_epochs; set one"),
    ({"train_epochs": 1, "train_steps": 3}, "received both run.train_steps=3 and run.train_epochs"),
    ({"train_epochs": 0}, "run.train_epochs is 0; it must be above 0 epochs"),
  ):
    with pytest.raises(ConfigError, match=line):
      run(task=Line(), global_batch_size=4, model_dir=str(tmp_path / "b"), mode="train", **given)


def test_a_stream_has_no_epochs(tmp_path):
  class Endless(Line):
    def source(self, split):
      rows = tf.data.Dataset.from_tensor_slices(
        {"x": np.ones([4, 1], np.float32), "y": np.ones(4, np.float32)}
      )
      return StreamSource(dataset=rows.repeat())

  with pytest.raises(ConfigError, match="the training source has no number of examples; set"):
    run(task=Endless(), train_epochs=1, global_batch_size=4, model_dir=str(tmp_path), mode="train")
