"""Group "evaluation" of --mode=verify: mistakes are named with their line, right tasks pass."""

import pytest
import sound
from defects import evaluation as defects
from defects import kinds, right
from defects.small import explained, found, place, subject

from loopwright.tools import verify
from loopwright.tools.verify.checks import evaluation

CHECKS = (defects.MODE, defects.PADDING, defects.ORDER, defects.SMALLER, defects.ON_TWO)


@pytest.mark.parametrize("name", defects.DEFECTS)
@pytest.mark.fast(name=["LocalRecall", "NormalisesInEvaluation"])
def test_a_defect(name):
  checks, cause, says, words = defects.DEFECTS[name]
  task = getattr(defects, name)
  results = evaluation.check(subject(task))
  assert tuple(each.check for each in results) == CHECKS
  explained(results, task, dict.fromkeys(checks, cause), says, words)


RIGHT = [
  *(defects.Towers, right.Normalised, defects.GatheredRecall, defects.Confusion),
  *(defects.FewOfOneClass, defects.TopTen, defects.TwoSets, defects.MovesInTraining),
  defects.Counts,
  *(task for task in right.RIGHT if task is not right.TrainOnly), *kinds.RIGHT,
]  # fmt: skip


@pytest.mark.parametrize("task", [*RIGHT, *sound.SUBJECTS])
@pytest.mark.fast(task=[defects.GatheredRecall])
def test_a_right_task(task):
  results = evaluation.check(sound.SUBJECTS[task]() if task in sound.SUBJECTS else subject(task))
  assert [(each.check, each.detail) for each in results if each.status != "passed"] == []


@pytest.mark.whole
def test_one_metric_is_one_failure():
  """The training metric is found first; its cause and line are those of the evaluation."""
  [failed] = verify.verify(subject(defects.LocalRecall), groups=("replicas", "evaluation")).failures
  assert (failed.check, failed.cause) == ("same metrics on 2 replicas", defects.MIXED)
  assert failed.place == place(defects.LocalRecall, "tf.matmul")


def test_there_may_be_nothing_to_evaluate_on():
  results = evaluation.check(subject(right.TrainOnly))
  assert {each.status for each in results} == {"not applicable"}
  assert {each.detail for each in results} == {"source('eval') fails with KeyError"}


def test_what_step_all_gather_collects_depends_on_the_batch():
  results = evaluation.check(subject(defects.GatheredRecall))
  assert "keep run.eval_batch_size as it is" in found(results, defects.SMALLER).detail
