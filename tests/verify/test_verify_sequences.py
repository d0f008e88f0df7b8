"""Group "sequences" of --mode=verify: documents, later tokens, labels and padding."""

import pytest
from defects import sequences as defects
from defects.kinds import Small
from defects.small import accused, failures, subject

from loopwright.tools.verify import report
from loopwright.tools.verify.checks import sequences


@pytest.mark.parametrize("name", defects.DEFECTS)
@pytest.mark.fast(name=["CausalAlone", "ShiftedTwice", "MetricOverPadding"])
def test_a_defect(name):
  results = sequences.check(subject(getattr(defects, name)))
  assert tuple(each.check for each in results) == sequences.NAMES
  [failed] = failures(report.marked(results, []))
  assert (failed.cause, failed.place) == defects.DEFECTS[name]
  assert failed.remedy


@pytest.mark.parametrize("name", defects.RIGHT)
@pytest.mark.fast(name=["Texts", "Prefix", "Autoencoder", "SmoothMixture"])
def test_a_right_task(name):
  results = sequences.check(subject(getattr(defects, name)))
  assert accused(results) == []
  assert sum(each.status == "passed" for each in results) >= 2 - (name == "Tagger")


def test_other_tasks_are_no_sequences():
  [result] = sequences.check(subject(Small))
  assert result.status == "not applicable"
  assert result.detail == "no feature [n, length] of whole numbers"
