"""A resumed run is the uninterrupted one; where it is not, the cause is found and named."""

import inspect
from pathlib import Path

import pytest
import sound
from defects import restore as defects

from loopwright.tools.verify.checks import restore


def line_of(kind, text):
  """Returns "file.py:31", where `text` stands in the source of a defect."""
  lines, first = inspect.getsourcelines(kind)
  found = [number for number, line in enumerate(lines, first) if text in line]
  assert found, text
  return f"{Path(inspect.getsourcefile(kind)).name}:{found[0]}"


def by_check(results):
  assert {result.group for result in results} == {"restore"}
  return {result.check: result for result in results}


# check, cause, in the detail, where
DEFECTS = {
  "Variable": (
    restore.SAME_STEP, "variable outside the checkpoint", "Variable.baseline",
    "self.baseline.assign", "forward",
  ),
  "Counter": (
    restore.SAME_STEP, "Python value outside the checkpoint", "Counter.progress",
    'self.progress["steps"] += 1', "difficulty",
  ),
  "History": (
    restore.SAME_STEP, "Python value outside the checkpoint", "History.history",
    "self.history.append", "remember",
  ),
  "Generator": (
    restore.SAME_STEP, "random generator outside the checkpoint", "Generator.noise",
    "self.noise =", "build_model",
  ),
  "Stateful": (
    restore.SAME_STEP, "stateful random op", "kernel", "tf.random.normal", "forward",
  ),
  "NumpyNoise": (
    restore.SAME_STEP, "random generator outside the checkpoint", "kernel", "np.random.normal",
    "forward",
  ),
  "Metric": (
    restore.SAME_STEP, "metric outside the checkpoint", "Metric.mean_error",
    "self.mean_error.update_state", "metrics",
  ),
  "Late": (
    restore.SAME_STEP, "variables created late", "head/kernel", "def build_model", "build_model",
  ),
  "Augmented": (
    restore.NEXT_BATCH, "random numbers outside the checkpoint", "x of the resumed run",
    "tf.random.uniform", "preprocess",
  ),
  "Shuffled": (
    restore.NEXT_BATCH, "task differs between builds", "Shuffled.order", "self.order =", "__init__",
  ),
  "Projected": (
    restore.SAME_STEP, "task differs between builds", "Projected.projection", "self.projection =",
    "__init__",
  ),
}  # fmt: skip


@pytest.fixture
def fewer(monkeypatch):
  """The first and the third strategy alone, to save time."""
  found = {n: s for n, s in restore.strategies().items() if n in ("one device", "mirrored on 3")}
  monkeypatch.setattr(restore, "strategies", lambda: found)


@pytest.fixture
def on_one_device(monkeypatch):
  """No other strategy."""
  passed = restore.GROUP.passed(restore.ACROSS)
  monkeypatch.setattr(restore.Resumption, "across_strategies", lambda self: passed)


@pytest.mark.parametrize("name", DEFECTS)
@pytest.mark.fast(name=["Counter", "Variable"])
def test_the_defect_is_found_and_named(name, on_one_device):
  check, cause, told, text, method = DEFECTS[name]
  kind = getattr(defects, name)
  results = by_check(restore.check(sound.subject(kind)))
  failed = [result.check for result in results.values() if result.status == "failed"]
  assert failed == [check]
  assert results[check].cause == cause
  assert told in results[check].detail
  assert results[check].place == f"{line_of(kind, text)}, in {name}.{method}"


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
    "saved under one device and restored under mirrored on 3: updates:0 is [0], but was saved as "
    "[1]"
  )
  assert result.place == f"{line_of(defects.Counting, 'ON_READ')}, in Counting.__init__"


def test_a_model_that_is_built_otherwise_each_time(tmp_path, on_one_device):
  subject = sound.subject(lambda: defects.Vocabulary(str(tmp_path)))
  result = by_check(restore.check(subject))[restore.SAME_STEP]
  assert (result.status, result.cause) == ("failed", "model differs between builds")
  assert "embeddings" in result.detail
  assert result.place.endswith("in Vocabulary.build_model")


@pytest.mark.parametrize("name", sound.SUBJECTS)
@pytest.mark.fast(name=["regression"])
def test_nothing_is_found_in_a_sound_task(name):
  assert [(r.check, r.status, r.cause) for r in restore.check(sound.SUBJECTS[name]())] == [
    (restore.NEXT_BATCH, "passed", ""),
    (restore.SAME_STEP, "passed", ""),
    (restore.ACROSS, "passed", ""),
  ]
