"""Traces of chosen steps: the files that TensorBoard looks for, what is in them, no side effect."""

import glob
import re

import everything
import numpy as np
import pytest
import tensorflow as tf
from input_cases import one_line_error
from runs import records
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from loopwright.actions.profiling import Profile
from loopwright.options.groups import Cadence
from loopwright.run_folder.places import RunFolder
from loopwright.runs.session import Session

STEPS, LOOP = 12, 5


def train(folder, strategy, *actions, steps=STEPS):
  trainer = everything.make_trainer(strategy)
  cadence = Cadence(train_steps=steps, steps_per_loop=LOOP, checkpoint_every_steps=100)
  made = Session(
    trainer=trainer, folder=RunFolder(str(folder)), cadence=cadence, keep_checkpoints=10,
    actions=list(actions),
  )  # fmt: skip
  made.restore()
  made.go("train")
  return trainer


def traces(folder):
  """Event name -> how often, of each trace, oldest first."""
  found = []
  for path in sorted(glob.glob(f"{folder}/profile/plugins/profile/*/*.xplane.pb")):
    space = xplane_pb2.XSpace()
    with open(path, "rb") as file:
      space.ParseFromString(file.read())
    names = {}
    for plane in space.planes:
      for line in plane.lines:
        for event in line.events:
          name = plane.event_metadata[event.metadata_id].name
          names[name] = names.get(name, 0) + 1
    found.append(names)
  return found


def steps_logged(folder):
  return [record["step"] for record in records(folder)]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.fast(replicas=[2])
def test_the_trace_has_the_operations_of_just_these_steps(replicas, tmp_path, mirrored):
  strategy = tf.distribute.get_strategy() if replicas == 1 else mirrored(replicas)
  trainer = train(tmp_path, strategy, Profile(steps=(7, 9)))
  [names] = traces(tmp_path)
  kind = re.compile(r".*/hidden\w*/BiasAdd/BiasAddGrad:BiasAddGrad")
  found = {name: count for name, count in names.items() if kind.fullmatch(name)}
  assert len(found) == replicas
  assert set(found.values()) == {3}
  assert steps_logged(tmp_path) == [5, 6, 9, 10, 12]
  assert trainer.traces == 1


@pytest.mark.whole
def test_no_step_computes_anything_else(tmp_path, mirrored):
  ends = []
  for name, actions in (("without", ()), ("with", (Profile(steps=(3, 8)),))):
    (tmp_path / name).mkdir()
    train(tmp_path / name, mirrored(2), *actions)
    ends.append(everything.read(tmp_path / name / "checkpoints" / f"ckpt-{STEPS}"))
  assert everything.differing(*ends) == []
  assert traces(tmp_path / "without") == []


@pytest.mark.parametrize(
  ("steps", "logged"),
  [
    ((1, 2), [2, 5, 10, 12]),
    ((11, 40), [5, 10, 12]),
    ((6, 10), [5, 10, 12]),
    ((20, 21), [5, 10, 12]),
  ],
)
@pytest.mark.fast(steps=[(6, 10)])
def test_steps_at_the_ends_of_loops_and_of_the_run(steps, logged, tmp_path, mirrored):
  train(tmp_path, tf.distribute.get_strategy(), Profile(steps=steps))
  assert steps_logged(tmp_path) == logged
  assert len(traces(tmp_path)) == (steps[0] <= STEPS)


@pytest.mark.whole
def test_a_restart_within_the_steps_traces_the_rest(tmp_path):
  strategy = tf.distribute.get_strategy()
  train(tmp_path, strategy, steps=8)
  train(tmp_path, strategy, Profile(steps=(7, 10)))
  assert len(traces(tmp_path)) == 1


@pytest.mark.parametrize("steps", [(0, 3), (5, 4), (3,)])
def test_steps_that_are_none_are_refused(steps):
  with one_line_error("Profile.steps is .* must be the first and the last step to trace"):
    Profile(steps=steps)


def test_only_the_chief_traces(tmp_path):
  profile = Profile(steps=(1, 5))
  profile.run = type("Run", (), {"step": 0, "is_chief": False, "model_dir": str(tmp_path)})()
  profile.begin()
  profile.end()
  assert not (tmp_path / "profile").exists()
  assert np.asarray(profile.loop_ends()).tolist() == [0, 5]
