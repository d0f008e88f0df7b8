"""Group "sequences" of --mode=verify: documents, later tokens, labels, padding and sums.

All groups of checks were run on all of these tasks, see docs/verify.md.
"""

import pytest
from defects import sequences as defects
from defects.kinds import Small
from defects.small import accused, failures, subject

from loopwright.tools import verify
from loopwright.tools.verify import consequences
from loopwright.tools.verify.checks import inputs, sequences

OWN = [name for name, (group, _, _) in defects.DEFECTS.items() if group == "sequences"]
OTHERS = [name for name in defects.DEFECTS if name not in (*OWN, *defects.MISSED)]


@pytest.mark.parametrize("name", OWN)
@pytest.mark.fast(name=["CausalAlone", "ShiftedTwice", "MeanTimesRows"])
def test_a_defect(name):
  _, causes, line = defects.DEFECTS[name]
  results = sequences.check(subject(getattr(defects, name)))
  assert tuple(each.check for each in results) == sequences.NAMES
  [failed] = failures(consequences.marked(results, []))
  assert failed.cause == causes[0]
  assert failed.place == line
  assert failed.remedy


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.whole
def test_a_mixture_is_named_by_the_other_groups(name, monkeypatch):
  monkeypatch.setattr(inputs, "READ_S", 0.3)
  group, causes, line = defects.DEFECTS[name]
  found = verify.verify(subject(getattr(defects, name)), groups=(group,)).failures
  assert {each.cause for each in found} & {*causes}
  assert line in {each.place for each in found}


@pytest.mark.parametrize("name", defects.RIGHT)
@pytest.mark.fast(name=["Texts", "Prefix", "Autoencoder", "SmoothMixture"])
def test_a_right_task(name):
  results = sequences.check(subject(getattr(defects, name)))
  assert accused(results) == []
  assert sum(each.status == "passed" for each in results) >= 2


def test_other_tasks_are_no_sequences():
  [result] = sequences.check(subject(Small))
  assert result.status == "not applicable"
  assert result.detail == "no feature [n, length] of whole numbers"
