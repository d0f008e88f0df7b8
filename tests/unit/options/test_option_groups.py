"""The groups of options of run: each is an argument of it, and workers compare it."""

import inspect

import pytest
from input_cases import one_line_error

from loopwright.distribution import cluster
from loopwright.options import (
  BatchSize,
  Cadence,
  Evaluation,
  Gpus,
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


@pytest.mark.parametrize("group", [BatchSize, Cadence, Evaluation, Numerics, Gpus])
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
  for group in (BatchSize, Cadence, Evaluation, Numerics):
    assert {f"run.{name}" for name in names_of(group)} <= declared.keys()
  assert declared["run.keep_checkpoints"] == 2


@pytest.mark.parametrize(
  ("group", "option"),
  [(BatchSize, "global_batch_size"), (Cadence, "steps_per_loop"), (Evaluation, "eval_steps")],
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
