"""Models, losses and rates of people's own: mistakes are named with their line, others pass."""

import dataclasses

import keras
import pytest
from defects import small, steps
from defects.small import accused, explained, failures, found, place, subject
from test_verify_newcomers import on_two

from loopwright.tools import verify
from loopwright.tools.verify import report
from loopwright.tools.verify.bench.comparison import Comparison
from loopwright.tools.verify.checks import (
  gradients,
  own_optimizer,
  precision,
  replicas,
)
from loopwright.tools.verify.report import Result

SEVERAL = {"LogsOne": ("slow", "fast"), "Forgotten": ("first", "last")}
IN_MODEL = "every variable is in the model"
OWNED = "every variable has an optimizer"


def subject_of(task, **options):
  names = SEVERAL.get(task.__name__)
  return subject(task, optimizer=names and dict.fromkeys(names, keras.optimizers.Adam), **options)


# ---- Gradients


def test_a_network_that_no_optimizer_updates_is_named():
  results = gradients.check(subject_of(steps.Forgotten))
  causes = {OWNED: "variable that no optimizer updates"}
  explained(results, steps.Forgotten, causes, "between/", "def variables_of")


@pytest.mark.parametrize(
  ("task", "words"),
  [
    (steps.Positions, "positions(tf.range"),
    (steps.MadeByForward, "self.scale(batch"),
  ],
)
@pytest.mark.fast(task=[steps.Positions])
def test_a_variable_outside_the_model_is_named(task, words):
  causes = {IN_MODEL: "variable outside the model"}
  explained(gradients.check(subject_of(task)), task, causes, "", words)


def test_a_model_may_be_a_part_of_a_larger_one():
  results = gradients.check(subject_of(steps.PartOfLarger))
  assert accused(results) == []
  assert found(results, IN_MODEL).status == "passed"


def test_a_layer_that_each_call_makes_anew_is_named():
  report = verify.verify(subject_of(steps.MadeInForward), groups=("order", "gradients"))
  causes, words = {"runs at all": "variable outside the model"}, "keras.layers.Dense(FEATURES)("
  explained(report.results, steps.MadeInForward, causes, "", words)


@pytest.mark.parametrize(
  ("task", "words"), [(steps.Reversal, "reverse(hidden)"), (steps.Quantised, "rounded(super")]
)
def test_a_gradient_that_is_replaced_on_purpose_is_no_failure(task, words):
  results = gradients.check(subject_of(task))
  assert accused(results) == []
  compared = found(results, "finite differences")
  assert compared.status == "not applicable"
  assert f"replaces a gradient ({place(task, words)}) on purpose" in compared.detail


@pytest.mark.parametrize("task", [steps.Bootstrapped, steps.Detached])
def test_a_loss_may_call_its_network_twice(task):
  results = gradients.check(subject_of(task))
  assert accused(results) == []
  assert found(results, "every variable has a gradient").status == "passed"


def test_a_step_may_log_one_of_its_two_optimizers():
  subject = dataclasses.replace(subject_of(steps.LogsOne), precision="mixed_float16")
  [result] = precision.check(subject)
  assert result.status == "passed"


# ---- Rates


@pytest.mark.parametrize(
  ("task", "optimizer", "words"),
  [
    (small.Small, steps.sgd_by_local_epochs, (steps, "num_replicas_in_sync")),
    (steps.LocalEpochs, None, (steps.LocalEpochs, "def train_step")),
  ],
)
def test_epochs_of_one_replica_are_named(task, optimizer, words):
  """An epoch is of 333 steps on one replica and of 666 on two, ten are 330 and 660: at 512."""
  chosen = subject(task, optimizer=optimizer)
  compared = Comparison(chosen, rows=chosen.divisible_rows)
  [failed] = failures(own_optimizer.same_with_options(compared, alike=True))
  assert (failed.check, failed.cause) == (own_optimizer.LATER, own_optimizer.LOCAL_EPOCHS)
  assert "at step 512 on 2" in failed.detail
  assert failed.place == place(*words).replace("defects.steps.", "")


# ---- Rows that depend on one another

MIXED, PADDED = "examples that depend on one another", "padded rows among the others"


@pytest.mark.parametrize(
  ("task", "cause", "words"),
  [
    (steps.Crowded, MIXED, (steps.Router, "tf.cumsum")),
    (steps.Towers, MIXED, (steps.Towers, "tf.matmul(queries")),
    (steps.PaddedCandidates, PADDED, (steps.Towers, "tf.matmul(queries")),
    (steps.InForward, MIXED, (steps.InForward, "tf.reduce_mean(x")),
  ],
)
@pytest.mark.fast(task=[steps.Crowded])
def test_the_line_where_rows_meet_is_named(task, cause, words):
  found = failures(on_two(subject_of(task)))
  assert {each.cause for each in found} == {cause}
  assert {each.place.partition(", in ")[0] for each in found} == {
    place(*words).partition(", in ")[0]
  }
  assert all("all_gather" in each.remedy for each in found)
  assert ("weight == 0" in found[0].remedy) == (cause == PADDED)


@pytest.mark.parametrize("task", [steps.Mixture, steps.Candidates, steps.Graphs])
@pytest.mark.whole
def test_rows_that_do_not_depend_on_one_another_pass(task):
  assert accused(on_two(subject_of(task))) == []


@pytest.mark.whole
def test_experts_that_see_few_rows_and_are_balanced_over_all_replicas_pass():
  subject = subject_of(steps.Balanced)
  results = [*gradients.check(subject), *replicas.check(subject)]
  assert accused(results) == []
  assert {r.check: r.status for r in results}["no gradient is zero"] == "passed"


# ---- One mistake, several checks


def failed(check, cause, place="mine.py:1, in Mine.loss"):
  return Result(group="some", check=check, status="failed", detail="0.1", cause=cause, place=place)


def test_what_follows_from_a_failure_is_no_second_one():
  first = [failed("on 2", "mean of means"), failed("on 3", "mean of means")]
  before = report.marked(first, [])
  assert [each.status for each in before] == ["failed", "not applicable"]
  assert before[1].detail == "follows from 'on 2' above; 0.1"
  others = [
    failed("on 2 again", "mean of means", place="mine.py:9, in Mine.metrics"),
    failed("wrong", "wrong gradient"),
    failed("learns", "cannot learn one batch", place=""),
  ]
  after = report.marked(others, before)
  assert [each.status for each in after] == ["failed", "failed", "not applicable"]


def test_failures_without_a_cause_are_each_shown():
  unknown = [failed("one", "unknown", place=""), failed("other", "unknown", place="")]
  assert report.marked(unknown, []) == unknown
