"""Group "lengths" of --mode=verify: padding inside a row, in buckets and by the task's own hand."""

import pytest
from defects import lengths as defects
from defects.kinds import Small
from defects.small import accused, explained, found, subject

from loopwright.tools.verify.checks import lengths

CHECKS = (defects.EVALUATION, defects.STEP, defects.CONTENTS)


@pytest.mark.parametrize("name", defects.DEFECTS)
@pytest.mark.fast(name=["WithoutMask"])
def test_a_defect(name):
  check, says, words = defects.DEFECTS[name]
  task = getattr(defects, name)
  results = lengths.check(subject(task))
  assert tuple(each.check for each in results) == CHECKS
  explained(results, task, {check: "padding counts inside a row"}, says, words)


@pytest.mark.parametrize("task", [*defects.RIGHT, Small])
@pytest.mark.fast(task=[defects.Graphs])
def test_a_right_task(task):
  results = lengths.check(subject(task))
  assert accused(results) == []
  assert sum(each.status == "passed" for each in results) == defects.RIGHT.get(task, 0)


def test_a_model_of_one_length_is_no_finding():
  results = lengths.check(subject(defects.OneLength))
  assert "takes no longer rows" in found(results, defects.EVALUATION).detail
