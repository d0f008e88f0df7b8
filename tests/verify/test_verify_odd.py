"""Objectives and states that are odd: mistakes that the recorded step knows, and what is right."""

import keras
import pytest
from defects import odd, small
from defects import order as bad_order
from defects.small import accused, failures, found

from loopwright.tools import verify
from loopwright.tools.verify.checks import (
  gradients,
  inputs,
  learning,
  order,
  randomness,
)

GROUPS = ("replicas", "order", "gradients", "randomness", "learning")


@pytest.mark.parametrize("name", [
  "Evolution", "EvolutionWithoutScale", "ScoreMatching", "Surrogate", "OldSurrogate", "Collected",
])  # fmt: skip
@pytest.mark.fast(name=["Evolution"])
def test_a_right_objective(name):
  results = verify.verify(small.subject(getattr(odd, name)), groups=GROUPS).results
  assert accused(results) == []
  assert {found(results, "same update on 2 replicas").status} == {"passed"}
  assert {found(results, "learns one batch by heart").status} == {"passed"}


def test_noise_that_each_replica_gives_its_own_rows_is_named():
  subject = small.subject(odd.EvolutionOfRows)
  assert [r.cause for r in failures(randomness.check(subject))] == ["a seed without the replica"]
  assert accused(order.check(subject)) == []


@pytest.mark.whole
def test_what_is_clipped_while_scaled_is_no_padding_that_counts():
  task = bad_order.ClipsScaled
  results = verify.verify(small.subject(task, **task.options), groups=("replicas", "order")).results
  assert [(r.check, r.cause, r.place) for r in failures(results)] == [
    ("padding changes nothing", "clipped while scaled", small.place(task, "clip_by_global_norm"))
  ]


@pytest.mark.whole
def test_an_index_of_a_feature_may_refuse_an_infinity():
  results = verify.verify(small.subject(odd.Collected), groups=("replicas",)).results
  assert found(results, "overflow on one replica").status == "not applicable"
  assert found(results, "same weights after 4 steps").status == "passed"


@pytest.mark.whole
def test_a_loss_that_falls_too_little_is_a_note():
  results = learning.check(small.subject(odd.Surrogate))
  assert "if this loss has no floor, look for" in found(results, "learns one batch by heart").detail


TWICE, TRAINED = "variable that two optimizers move", "average that is trained too"
LOST, WHOLE = "a mask that is lost", "weights divided as whole numbers"
CHECKS = {
  TWICE: gradients.check, TRAINED: gradients.check, LOST: gradients.check,
  WHOLE: inputs.check,
}  # fmt: skip
WRONG = {
  TWICE: ("SharedByTwo", "SharedByThree", "SharedScale", "SharedByVerbs"),
  TRAINED: ("KeyTrained", "TeacherTrained", "TargetTrained", "TrainedBySecond", "TrainedLast"),
  LOST: (
    "LostBeforePool", "LostBeforeRecurrent", "LostByConvolution", "LostEarlier", "LostBothWays",
  ),
  WHOLE: (
    "WholeTable", "WholeInGraph", "WholeInSource", "WholeInPreprocess",
  ),
}  # fmt: skip
RIGHT = {
  TWICE: ("TakeTurns", "StopsAtBody", "TwoBodies", "BodyOfFirst", "UpdatedTwice"),
  TRAINED: ("KeyStopped", "Lookahead", "Mutual", "ClipsWeights", "Shrinks"),
  LOST: ("Kept", "NoPadding", "OfTheLargest", "Flat", "Given"),
  WHOLE: (
    "Balanced", "IgnoresCommon", "AtLeastOnce", "RoundedUp", "Unlabelled",
  ),
}  # fmt: skip
LINES = {
  TRAINED: "step.assign(slow, self.follow", "LostByConvolution": "", LOST: "x + self",
}  # fmt: skip


def subject_of(name):
  task = getattr(odd, name)
  names = getattr(task, "names", None) or ("default", "second") * (name == "TrainedBySecond")
  return small.subject(task, optimizer=names and dict.fromkeys(names, keras.optimizers.Adam))


def each(tasks):
  return [(cause, name) for cause, names in tasks.items() for name in names]


@pytest.mark.parametrize(("cause", "name"), each(WRONG))
@pytest.mark.fast(name=[names[0] for names in WRONG.values()])
def test_what_the_recorded_step_knows(cause, name):
  [result] = failures(CHECKS[cause](subject_of(name)))
  assert result.cause == cause
  assert result.remedy
  words = LINES.get(name, LINES.get(cause, ""))
  owner = odd.Positions if cause == LOST else getattr(odd, name)
  line = small.line_of(owner, words).partition(", in ")[0] if words else ""
  assert result.place.partition(", in ")[0] == line


@pytest.mark.parametrize(("cause", "name"), each(RIGHT))
@pytest.mark.fast(name=[names[0] for names in RIGHT.values()])
def test_what_looks_alike_and_is_right(cause, name):
  results = CHECKS[cause](subject_of(name))
  assert accused(results) == []
  assert len(results) > 5
