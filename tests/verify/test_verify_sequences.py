"""Group "sequences" of --mode=verify: documents, later tokens, labels, padding and sums.

All groups of checks were run on all of these tasks, see docs/verify.md.
"""

import numpy as np
import pytest
from defects import sequences as defects
from defects.kinds import Small
from defects.small import subject

from loopwright import ArraySource, Packed
from loopwright.tools import verify
from loopwright.tools.verify import consequences
from loopwright.tools.verify.bench import documents
from loopwright.tools.verify.checks import inputs, sequences

OWN = [name for name, (group, _, _) in defects.DEFECTS.items() if group == "sequences"]
OTHERS = [name for name in defects.DEFECTS if name not in (*OWN, *defects.MISSED)]


def failures(results):
  return [each for each in consequences.marked(results, []) if each.status == "failed"]


@pytest.mark.parametrize("name", OWN)
@pytest.mark.fast(name=["CausalAlone", "ShiftedTwice", "MeanTimesRows"])
def test_a_defect(name):
  _, causes, line = defects.DEFECTS[name]
  results = sequences.check(subject(getattr(defects, name)))
  assert tuple(each.check for each in results) == sequences.NAMES
  [failed] = failures(results)
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
  assert [(each.check, each.detail) for each in results if each.status == "failed"] == []
  assert sum(each.status == "passed" for each in results) >= 2


def test_other_tasks_are_no_sequences():
  [result] = sequences.check(subject(Small))
  assert (result.status, result.detail) == (
    "not applicable",
    "no feature [n, length] of whole numbers",
  )


class Numbered(Small):
  """Documents of 3, 4 and 2 tokens in each of 4 rows of 10; tokens are numbered from 1."""

  def source(self, split):
    tokens = ArraySource(features={"token": np.arange(1, 37)})
    return Packed(tokens, lengths=[3, 4, 2] * 4, length=10, packing="in_order")


@pytest.fixture
def found():
  made = documents.find(Numbered())
  first = made.rows["token"][:, :1] - 1
  np.testing.assert_array_equal(made.rows["token"] - first * (made.number > 0), [BEFORE] * 4)
  return made


BEFORE = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]


def test_documents_are_known_by_their_segments(found):
  assert (found.known_by, found.counted, found.contents) == ("segment", "position", ["token"])
  np.testing.assert_array_equal(found.number, [[1, 1, 1, 2, 2, 2, 2, 3, 3, 0]] * 4)
  assert found.several
  assert found.anew() is None


def test_only_one_document_is_changed_and_by_tokens_of_others(found):
  wanted = found.number == 2
  rows = found.changed(wanted)
  np.testing.assert_array_equal(rows["token"] != found.rows["token"], wanted)
  assert (rows["token"][wanted] > 0).all()
  np.testing.assert_array_equal(rows["segment"], found.rows["segment"])


def test_the_first_document_goes_behind_the_others(found):
  rows, places = found.rotated()
  order = [3, 4, 5, 6, 7, 8, 0, 1, 2, 9]
  np.testing.assert_array_equal(places, [order] * 4)
  np.testing.assert_array_equal(rows["token"], found.rows["token"][:, order])
  np.testing.assert_array_equal(rows["segment"], [[1, 1, 1, 1, 2, 2, 3, 3, 3, 0]] * 4)
  np.testing.assert_array_equal(rows["position"], [[0, 1, 2, 3, 0, 1, 0, 1, 2, 0]] * 4)


def test_a_document_becomes_padding(found):
  rows = found.emptied(found.number == 3)
  for name in ("token", "segment", "position"):
    np.testing.assert_array_equal(rows[name][:, :7], found.rows[name][:, :7])
    assert (rows[name][:, 7:] == 0).all()
