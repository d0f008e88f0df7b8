"""A resumed run is the uninterrupted one; where it is not, the cause is found and named."""

import pytest
import sound
from defects import restore as defects
from defects.small import accused, explained

from loopwright.tools.verify.checks import restore


def by_check(results):
  assert {result.group for result in results} == {"restore"}
  return {result.check: result for result in results}


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
}  # fmt: skip


@pytest.fixture
def fewer(monkeypatch):
  """Beside one device, mirrored on 3 alone, to save time."""
  found = {n: s for n, s in restore.strategies().items() if n == "mirrored on 3"}
  monkeypatch.setattr(restore, "strategies", lambda: found)


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
  results = by_check(restore.check(sound.subject(kind)))
  explained(results.values(), kind, {check: cause}, told, text)


@pytest.mark.parametrize("kind", [defects.Generator, defects.Metric])
def test_what_a_task_keeps_beside_its_model_is_restored(kind, on_one_device):
  results = by_check(restore.check(sound.subject(kind)))
  assert accused(results.values()) == []


def test_one_task_for_all_is_made_as_new(on_one_device):
  task = defects.Counter()
  result = by_check(restore.check(sound.subject(lambda: task)))[restore.SAME_STEP]
  assert result.cause == "Python value outside the checkpoint"
  assert result.values == {"outside": ["Counter.progress"]}


@pytest.mark.whole
def test_what_each_replica_counts_for_itself_moves_to_no_other_number_of_replicas(fewer):
  results = by_check(restore.check(sound.subject(defects.PerReplica)))
  assert [result.status for result in results.values()] == ["passed", "passed", "failed"]
  result = results[restore.ACROSS]
  assert result.cause == "per-replica value"
  assert result.detail == (
    "saved under one device and restored under mirrored on 3: updates:0 is [3], but was saved as "
    "[4]"
  )


def test_what_is_saved_on_several_replicas_must_be_what_one_restores(fewer, monkeypatch):
  """The state saved there is another than all have: a restore that does nothing is noticed."""
  whole = restore.CheckpointManager.restore
  monkeypatch.setattr(
    restore.CheckpointManager, "restore",
    lambda self, path: None if "mirrored" in path else whole(self, path),
  )  # fmt: skip
  result = by_check(restore.check(sound.SUBJECTS["regression"]()))[restore.ACROSS]
  assert result.status == "failed"
  assert result.detail.startswith("saved under mirrored on 3 and restored under one device: ")


def test_a_model_that_is_built_otherwise_each_time(tmp_path, on_one_device):
  subject = sound.subject(lambda: defects.Vocabulary(str(tmp_path)))
  result = by_check(restore.check(subject))[restore.SAME_STEP]
  assert (result.status, result.cause) == ("failed", "model differs between builds")
  assert "embeddings" in result.detail
  assert result.place.endswith("in Vocabulary.build_model")


@pytest.mark.parametrize("name", sound.SUBJECTS)
@pytest.mark.fast(name=["regression"])
def test_a_right_task(name):
  assert [(r.check, r.status, r.cause) for r in restore.check(sound.SUBJECTS[name]())] == [
    (restore.NEXT_BATCH, "passed", ""),
    (restore.SAME_STEP, "passed", ""),
    (restore.ACROSS, "passed", ""),
  ]
