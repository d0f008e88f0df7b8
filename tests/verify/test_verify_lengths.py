"""Group "lengths" of --mode=verify: padding inside a row, in buckets and by the task's own hand."""

import numpy as np
import pytest
from defects import lengths as defects
from defects.kinds import Small
from defects.small import found, line_of, subject

from loopwright.tools.verify.bench import longer_rows
from loopwright.tools.verify.checks import lengths

CHECKS = (defects.EVALUATION, defects.STEP, defects.CONTENTS)


@pytest.mark.parametrize("name", defects.DEFECTS)
@pytest.mark.fast(name=["WithoutMask"])
def test_a_defect(name):
  check, says, words = defects.DEFECTS[name]
  task = getattr(defects, name)
  results = lengths.check(subject(task))
  assert tuple(each.check for each in results) == CHECKS
  [failed] = [each for each in results if each.status == "failed"]
  assert (failed.check, failed.cause) == (check, "padding counts inside a row")
  assert says in failed.detail
  assert failed.place == line_of(task, words)
  assert failed.remedy


@pytest.mark.parametrize("task", [*defects.RIGHT, Small])
@pytest.mark.fast(task=[defects.Graphs])
def test_a_right_task(task):
  results = lengths.check(subject(task))
  assert [(each.check, each.detail) for each in results if each.status == "failed"] == []
  assert sum(each.status == "passed" for each in results) == defects.RIGHT.get(task, 0)


def test_examples_are_those_of_two_buckets():
  """From the fullest bucket but the longest: its own length, and that of the longest."""
  made, all_graphs = longer_rows.find(defects.Graphs()), defects.graphs("eval")
  count = made.short["mask"].sum(axis=1)
  assert made.short["nodes"].shape == (12, 4, 3)
  assert made.long["edges"].shape == (12, 12, 12)
  assert (count.max(), count.min()) == (4, all_graphs["count"].min())
  np.testing.assert_array_equal(made.long["nodes"][:, :4], made.short["nodes"])
  padding = np.arange(12) >= count[:, np.newaxis]
  assert (made.long["nodes"][padding] == 0).all()
  assert (made.others["nodes"][padding] != 0).all()
  np.testing.assert_array_equal(made.others["nodes"][~padding], made.long["nodes"][~padding])


def test_a_model_of_one_length_is_no_finding():
  results = lengths.check(subject(defects.OneLength))
  assert "takes no longer rows" in found(results, defects.EVALUATION).detail
