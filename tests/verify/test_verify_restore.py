"""A resumed run is the uninterrupted one; where it is not, the cause is found and named."""

import pytest
import sound
from defects import restore as defects
from defects.small import accused, explained, failures

from loopwright.tools.verify.checks import restore

BATCH, STEP = restore.NEXT_BATCH, restore.SAME_STEP
PYTHON, GENERATOR = "Python value outside the checkpoint", "random generator outside the checkpoint"
BUILDS, NUMBERS = "task differs between builds", "random numbers outside the checkpoint"
# check, cause, in the detail, line
DEFECTS = {
  "Counter": (STEP, PYTHON, "Counter.progress", "tf.numpy_function"),
  "History": (STEP, PYTHON, "History.history", "tf.numpy_function"),
  "Stateful": (STEP, "stateful random op", "kernel", "tf.random.normal"),
  "NumpyNoise": (STEP, GENERATOR, "kernel", "np.random.normal"),
  "Late": (STEP, "variables created late", "head/kernel", "def build_model"),
  "Augmented": (BATCH, NUMBERS, "x of the resumed run", "tf.random.uniform"),
  "Shuffled": (BATCH, BUILDS, "Shuffled.order", "def __init__"),
  "Projected": (STEP, BUILDS, "Projected.projection", "def __init__"),
  "Vocabulary": (STEP, "model differs between builds", "embeddings", "def build_model"),
}  # fmt: skip


@pytest.fixture
def on_one_device(monkeypatch):
  """No other strategy."""
  passed = restore.GROUP.passed(restore.ACROSS)
  monkeypatch.setattr(restore.Resumption, "across_strategies", lambda self: passed)


@pytest.mark.parametrize("name", DEFECTS)
@pytest.mark.fast(name=["Counter"])
def test_a_defect(name, on_one_device):
  check, cause, told, text = DEFECTS[name]
  kind = getattr(defects, name)
  explained(restore.check(sound.subject(kind)), kind, {check: cause}, told, text)


@pytest.mark.parametrize("kind", [defects.Generator, defects.Metric])
def test_what_a_task_keeps_beside_its_model_is_restored(kind, on_one_device):
  assert accused(restore.check(sound.subject(kind))) == []


@pytest.mark.whole
def test_what_each_replica_counts_for_itself_moves_to_no_other_number_of_replicas():
  [result] = failures(restore.check(sound.subject(defects.PerReplica)))
  assert (result.check, result.cause) == (restore.ACROSS, "per-replica value")
  where, told = "saved on one device and restored on three replicas", "is [3], but was saved as [4]"
  assert result.detail == f"{where}: updates:0 {told}"


def test_what_is_saved_on_several_replicas_must_be_what_one_restores(monkeypatch):
  """A restore that does nothing is noticed."""
  whole = restore.CheckpointManager.restore
  monkeypatch.setattr(
    restore.CheckpointManager, "restore",
    lambda self, path: None if "three" in path else whole(self, path),
  )  # fmt: skip
  [result] = failures(restore.check(sound.SUBJECTS["regression"]()))
  assert result.detail.startswith("saved on three replicas and restored on one device: ")


@pytest.mark.parametrize("name", sound.SUBJECTS)
@pytest.mark.fast(name=["regression"])
def test_a_right_task(name):
  assert [(r.group, r.check, r.status) for r in restore.check(sound.SUBJECTS[name]())] == [
    ("restore", check, "passed") for check in (BATCH, STEP, restore.ACROSS)
  ]
