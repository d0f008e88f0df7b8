"""Goodput against time lines written by hand, and against a stopwatch outside of killed runs."""

import itertools
import json
import os
import time

import keras
import numpy as np
import pytest
import toys
from input_cases import one_line_error

from benchmarks import goodput_trials
from loopwright import Action, ArraySource, commands
from loopwright.monitoring import goodput, record
from loopwright.monitoring.record import Leg
from loopwright.run_folder import layout
from loopwright.runs.runner import run
from loopwright.strategies import factories

NOW = 10_000.0


def leg(began, steps, parts, **more):
  return Leg(began=began, parts=parts, from_step=steps[0], step=steps[1], **more)


def killed_and_gone_on():
  """20 steps count, 4 of 24 were in vain; a step takes 0.2 s, also in loops that were traced."""
  return [
    leg(100, (0, 10), {"imports": 8, "setup": 2, "tracing": 5}, first=True, traced=10, saved=True),
    leg(115, (10, 20), {"training": 1.6, "input wait": 0.4, "checkpoints": 0.5}, saved=True),
    leg(117.5, (20, 24), {"training": 0.8, "host": 0.25}),
    leg(124.55, (20, 30), {"imports": 8, "tracing": 3}, first=True, traced=10, saved=True),
    leg(135.55, (30, 30), {"evaluation": 2}, ended="done"),
  ]


def test_the_parts_of_a_killed_run_that_went_on():
  found = goodput.of(killed_and_gone_on(), NOW)
  assert found.parts == pytest.approx({
    "productive steps": 2 + 1.6 + 2, "steps repeated": 0.8, "input wait": 0.4,
    "start: imports": 8, "start: setup": 2, "start: tracing": 3, "checkpoints": 0.5,
    "recovery: imports": 8, "recovery: tracing": 1, "evaluation": 2, "host": 0.25, "down": 6,
  })  # fmt: skip
  assert found.seconds == pytest.approx(137.55 - 100)
  assert sum(map(found.share, found.parts)) == pytest.approx(1)
  assert (found.steps, found.repeated, found.starts, found.broken) == (30, 4, 2, 1)


def test_saved_steps_are_repeated_too_if_the_run_goes_on_before_them():
  """The newest checkpoint was damaged, or was not complete yet."""
  found = goodput.of(
    [
      leg(0, (0, 5), {"training": 5}, first=True, saved=True),
      leg(5, (5, 9), {"training": 4}, saved=True),
      leg(9, (9, 9), {"host": 1}, ended="failed"),
      leg(12, (5, 9), {"training": 4}, first=True, saved=True, ended="preempted"),
    ],
    NOW,
  )
  assert found.parts == {"productive steps": 9, "steps repeated": 4, "host": 1, "down": 2}
  assert (found.repeated, found.broken) == (4, 1)


def test_steps_that_are_restored_from_memory_count_without_a_save():
  """Killed at step 24 with a checkpoint of step 10 and a copy in memory of step 20."""
  found = goodput.of(
    [
      leg(0, (0, 10), {"training": 10}, first=True, saved=True),
      leg(10, (10, 24), {"training": 14}),
      leg(30, (20, 30), {"training": 10}, first=True, saved=True, ended="done"),
    ],
    NOW,
  )
  assert found.parts == pytest.approx({"productive steps": 30, "steps repeated": 4, "down": 6})
  assert (found.steps, found.repeated) == (30, 4)


@pytest.mark.parametrize(("ago_s", "part"), [(1, "productive steps"), (60, "steps repeated")])
def test_what_is_not_saved_counts_while_the_process_lives(ago_s, part):
  found = goodput.of([leg(NOW - ago_s - 3, (0, 2), {"training": 3}, first=True)], NOW)
  assert (found.parts, found.broken) == ({part: 3}, int(ago_s == 60))


def test_a_first_loop_that_never_ended_was_no_step():
  found = goodput.of([leg(0, (0, 0), {"imports": 1, "training": 3}, first=True)], NOW)
  assert found.parts == {"start: imports": 1, "start: tracing": 3}


# ---- The record ----


class Line(toys.Regression):
  """y = 2 x."""

  def build_model(self):
    return toys.network([1], keras.layers.Dense(1))

  def source(self, split):
    x = np.linspace(0, 1, 32, dtype=np.float32)
    return ArraySource(features={"x": x[:, None], "y": 2 * x})


class Slow(Action):
  """Takes 50 ms after each loop, or as long as the machine makes of them."""

  on = "train"
  took_s = 0.0

  def __call__(self, output):
    began = time.monotonic()
    time.sleep(0.05)
    Slow.took_s += time.monotonic() - began


def train(folder, **more):
  began = time.monotonic()
  run(
    task=Line, model_dir=str(folder), global_batch_size=8, strategy=factories.default,
    steps_per_loop=5, checkpoint_every_steps=10, actions=[Slow()], **{"train_steps": 30, **more},
  )  # fmt: skip
  return time.monotonic() - began


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A run that has gone on once; and the seconds of its two starts."""
  made = tmp_path_factory.mktemp("run")
  return made, [train(made), train(made, train_steps=50)]


def test_a_run_records_where_its_time_goes(folder):
  made, seconds = folder
  worker = record.read(str(made))[0]
  assert [(each.from_step, each.step, each.saved) for each in worker] == [
    (0, 10, True), (10, 20, True), (20, 30, True), (30, 30, False),
    (30, 40, True), (40, 50, True), (50, 50, False),
  ]  # fmt: skip
  assert [each.first for each in worker] == [True, *[False] * 3, True, *[False] * 2]
  assert [each.ended for each in worker] == ["", "", "", "done", "", "", "done"]
  assert [each.traced for each in worker] == [5, 0, 0, 0, 5, 0, 0]
  for of_start, outside_s in zip((worker[:4], worker[4:]), seconds, strict=True):
    assert sum(each.end - each.began for each in of_start) == pytest.approx(outside_s, rel=0.02)
    for one, following in itertools.pairwise(of_start):
      assert following.began == pytest.approx(one.end, abs=1e-4)
  slept_s = sum(each.parts.get("action Slow", 0) for each in worker)
  assert slept_s == pytest.approx(Slow.took_s, rel=0.02)


def test_the_command_prints_it(folder, capsys):
  made, seconds = folder
  assert commands.main(["loopwright", "goodput", str(made)]) == 0
  printed, _, workers = capsys.readouterr().out.partition("a step of each worker:\n")
  lines = printed.splitlines()
  assert "50 steps, 0 repeated; starts: 2, broken: 0" in lines[0]
  assert [row.split()[:2] for row in workers.splitlines()] == [
    ["worker", "phase"],
    ["0", "input"],
    ["0", "compute"],
  ]
  shares = [float(line.split()[-2]) for line in lines[1:-1]]
  assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))
  assert commands.main(["loopwright", "goodput", "--json", str(made)]) == 0
  found = json.loads(capsys.readouterr().out)
  up_s = found["seconds"] - found["parts"]["down"]
  assert up_s == pytest.approx(sum(seconds), rel=0.02)


def test_a_run_without_a_record_is_told_so(tmp_path, capsys):
  (tmp_path / layout.METRICS).write_text("")
  assert commands.main(["loopwright", "goodput", str(tmp_path)]) == 2
  assert "has no flight record, flight/0.jsonl" in capsys.readouterr().err


def test_a_torn_line_is_left_out_and_the_next_process_writes_behind_it(tmp_path):
  path = tmp_path / layout.flight(0)
  path.parent.mkdir()
  path.write_text('{"began": 1, "parts": {"host": 2}, "first": true}\n{"began": 5, "par')
  writer = record.Writer(str(tmp_path), 0)
  writer.write(Leg(began=7, parts={"a long name": 1.0}, phase=["x" * 50]))
  writer.write(Leg(began=7, parts={"a": 1.5}))
  writer.next()
  writer.write(Leg(began=9))
  writer.close()
  found = record.read(str(tmp_path))[0]
  assert [(each.began, each.parts) for each in found] == [
    (1, {"host": 2}), (7, {"a": 1.5}), (9, {}),
  ]  # fmt: skip


def test_a_record_that_is_no_file_is_one_line(tmp_path):
  os.makedirs(tmp_path / layout.flight(0))
  with one_line_error("flight record"):
    record.read(str(tmp_path))


@pytest.mark.whole
def test_a_stopwatch_outside_says_the_same_of_a_killed_run(tmp_path):
  outside = goodput_trials.trial(str(tmp_path), kills=2, steps=2000, seed=1)
  found = goodput.read(str(tmp_path))
  assert found.seconds == pytest.approx(outside.wall_s, rel=0.02)
  assert (
    0 < outside.repeated <= found.repeated <= outside.repeated + 2 * 20
  )  # a loop's line is late
  assert (found.starts, found.broken) == (3, 2)
  assert sum(map(found.share, found.parts)) == pytest.approx(1)
