"""Group "inputs" of --mode=verify: each planted defect is named and placed, right tasks pass."""

import keras
import pytest
from defects import inputs as defects
from defects.randomness import NoiseOfExamples
from defects.right import RIGHT, Dropout, Right, TrainOnly
from defects.small import accused, failures, place

from loopwright.tools.verify.bench import survey
from loopwright.tools.verify.bench.bench import Subject
from loopwright.tools.verify.checks import inputs


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  monkeypatch.setattr(inputs, "READ_S", 0.5)


def subject(task, **options):
  return Subject(
    **{"task": task, "optimizer": keras.optimizers.Adam, "global_batch_size": 16, **options}
  )


@pytest.mark.parametrize("name", defects.DEFECTS)
@pytest.mark.fast(name=["MixesNeighbours", "MissingValues"])
def test_a_defect(name):
  causes, words, *more = defects.DEFECTS[name]
  options = dict(*more)
  task = getattr(defects, name)
  owner, says = options.pop("owner", task), options.pop("says", "")
  found = {each.check: each for each in failures(inputs.check(subject(task, **options)))}
  assert {check: each.cause for check, each in found.items()} == causes
  first = found[next(iter(causes))]
  assert says in first.detail
  assert first.place == place(owner, words)
  assert all(each.remedy for each in found.values())


@pytest.mark.parametrize("task", [*RIGHT, NoiseOfExamples, defects.Episodes])
@pytest.mark.fast(task=RIGHT[:1])
def test_a_right_task(task):
  assert accused(inputs.check(subject(task))) == []


@pytest.mark.whole
def test_a_batch_larger_than_the_data_in_micro_batches():
  results = inputs.check(subject(Dropout, global_batch_size=129, options={"accumulation_steps": 2}))
  assert accused(results) == []


@pytest.mark.whole
def test_there_may_be_nothing_to_evaluate_on():
  found = {each.check: each for each in inputs.check(subject(TrainOnly))}
  for check in ("train and eval apart", "evaluation in batches of any size"):
    assert found[check].status == "not applicable"
    assert found[check].detail == "source('eval') fails with KeyError"


@pytest.mark.whole
def test_examples_that_are_only_numbers_are_no_data():
  found = {each.check: each for each in inputs.check(subject(defects.Episodes))}
  assert found["train and eval apart"].status == "not applicable"
  assert "examples are only numbers (number)" in found["train and eval apart"].detail


def digests_of(contents):
  by_id = {i: bytes([content]) for i, content in enumerate(contents)}
  return survey.Digests(by_id, True, len(by_id), set())


def test_the_chance_of_equal_examples():
  """Good and Turing, unless training examples were repeated: each twice, or more than by chance."""
  rare = digests_of([0, 1, 2, 3, 4, 5, 6, 6])
  assert survey.chance(rare, digests_of([0, 9])) == pytest.approx(2 / 8)
  twice = digests_of([*range(40)] * 2)
  assert survey.chance(twice, digests_of(range(40))) == 0
  some = digests_of([*range(40), *[*range(20)] * 3])
  assert survey.chance(some, digests_of(range(40))) == 0
  assert survey.chance(some, digests_of([*range(4)] * 10)) == pytest.approx(80 / 100)


def test_a_sample_says_so(monkeypatch):
  monkeypatch.setattr(inputs, "READ_S", -1.0)
  monkeypatch.setattr(survey, "AT_ONCE", 8)
  found = {each.check: each for each in inputs.check(subject(Right))}
  assert found["train and eval apart"].detail == "none of 8 eval in 8 train examples (a sample)"
  assert found["each example once"].detail == "a sample of 16 examples"
