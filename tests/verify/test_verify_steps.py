"""Models, losses and rates of people's own: mistakes are named with their line, others pass."""

import keras
import pytest
from defects import steps
from defects.small import found, place, subject

from framework.verify.checks import gradients, precision

SEVERAL = {"LogsOne": ("slow", "fast"), "Forgotten": ("first", "last")}
OWNED, READS = "every variable has an optimizer", "what the loss depends on"


def subject_of(task, **options):
  names = SEVERAL.get(task.__name__)
  return subject(task, optimizer=names and dict.fromkeys(names, keras.optimizers.Adam), **options)


def failures(results):
  return [(each.check, each.cause, each.place) for each in results if each.status == "failed"]


# ---- Gradients


def test_a_network_that_no_optimizer_updates_is_named():
  results = gradients.check(subject_of(steps.Forgotten))
  where = place(steps.Forgotten, '"between": network')
  assert failures(results) == [(OWNED, "variable that no optimizer updates", where)]
  assert found(results, OWNED).detail.startswith("between/")


@pytest.mark.parametrize(
  ("task", "words"), [(steps.Reversal, "reverse(hidden)"), (steps.Quantised, "rounded(super")]
)
def test_a_gradient_that_is_replaced_on_purpose_is_no_failure(task, words):
  results = gradients.check(subject_of(task))
  assert failures(results) == []
  compared = found(results, "finite differences")
  assert compared.status == "not applicable"
  assert f"replaces a gradient ({place(task, words)}) on purpose" in compared.detail


@pytest.mark.parametrize(
  ("task", "calls"),
  [
    (steps.Bootstrapped, "2 calls, gradient through 2; a target needs tf.stop_gradient"),
    (steps.Detached, "2 calls, gradient through 1"),
  ],
)
def test_calls_through_which_no_gradient_passes_are_counted(task, calls):
  results = gradients.check(subject_of(task))
  assert failures(results) == []
  told = found(results, READS).detail
  assert calls in told
  assert ("tf.stop_gradient" in told) == ("through 2" in calls)


def test_a_step_may_log_one_of_its_two_optimizers():
  results = precision.check(subject_of(steps.LogsOne))
  assert [each.check for each in results] == ["gradient in float16", "gradient in bfloat16"]
  assert {each.status for each in results} == {"passed"}
