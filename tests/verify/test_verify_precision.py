"""The first gradient in half precision: what is lost, and why."""

import functools

import keras
import pytest
import sound
import tf_keras
from defects import precision as defects
from defects.small import place

from loopwright.optimizers import loss_scale
from loopwright.tools.verify.bench.bench import under
from loopwright.tools.verify.checks import precision

F16, BF16 = "gradient in float16", "gradient in bfloat16"


def check(task, policy="float32", scale=None, **options):
  """The result of each check, in a run of that precision."""
  trainer = {"loss_scale": functools.partial(loss_scale.fixed, scale=scale)} if scale else {}
  subject = sound.subject(task, precision=policy, options=trainer, **options)
  results = precision.check(subject)
  assert [(r.group, r.check) for r in results] == [("precision", F16), ("precision", BF16)]
  return {r.check: r for r in results}


# policy, fixed loss scale, cause, in the detail, line
DEFECTS = {
  "Mixed": (
    "mixed_float16", None, "float32 and half precision mixed", "", "tf.square"),
  "Tiny": ("mixed_float16", 1.0, precision.TOO_SMALL, "underflow", ""),
  "Squares": (
    "mixed_float16", None, precision.OVERFLOW, "the loss is not finite", "tf.square"),
  "Wide": ("mixed_float16", None, precision.A_SUM, "relative error", "tf.reduce_mean"),
  "Total": (
    "mixed_float16", None, precision.A_SUM, "the loss is not finite", "tf.reduce_sum"),
  "Logarithm": (
    "mixed_float16", None, precision.SMALL, "the loss is not finite", "tf.math.log"),
  "Running": (
    "mixed_bfloat16", None, precision.A_SUM, "relative error", "tf.cumsum"),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
@pytest.mark.fast(name=list(DEFECTS)[:1])
def test_a_defect(name):
  policy, scale, cause, told, text = DEFECTS[name]
  kind = getattr(defects, name)
  result = check(kind, policy, scale)[F16 if policy == "mixed_float16" else BF16]
  assert (result.status, result.cause) == ("failed", cause), result
  assert told in result.detail
  where = place(kind, text) if text else ""
  assert result.place in (where, where.replace(f"{name}.", ""))


@pytest.mark.whole
def test_a_larger_loss_scale_is_recommended_and_helps():
  result = check(defects.Tiny, "mixed_float16", 1.0)[F16]
  assert result.values["underflow"] > precision.UNDERFLOW
  recommended = float(result.remedy.partition("at least ")[2])
  better = check(defects.Tiny, "mixed_float16", recommended)[F16]
  assert better.status == "passed"
  assert better.values["loss_scale"] == recommended
  assert check(defects.Tiny, "mixed_float16")[F16].status == "passed"  # dynamic


def test_a_loss_scale_that_overflows():
  result = check(sound.Regression, "mixed_float16", 2.0**30)[F16]
  assert (result.status, result.cause) == ("failed", precision.TOO_LARGE)
  assert "the gradient is not finite at loss scale 1.07374e+09" in result.detail


def test_a_dynamic_scale_may_find_its_level():
  scaled = {"loss_scale": functools.partial(loss_scale.dynamic, initial=2.0**30)}
  subject = sound.subject(sound.Regression, precision="mixed_float16", options=scaled)
  result = precision.check(subject)[0]
  assert result.status == "passed"
  assert 1 < result.values["loss_scale"] < 2.0**30


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.fast(policy=["mixed_bfloat16"])
def test_what_nobody_asked_for_does_not_fail(policy):
  result = check(defects.Squares, policy)[F16]
  assert result.status == "not applicable"
  assert result.detail.startswith(f"run.precision is {policy}; it would fail: the loss is not")
  result = check(defects.Mixed, policy)[F16]
  assert result.status == "not applicable"
  assert result.detail.startswith(f"run.precision is {policy}; it would fail: ")


@pytest.mark.parametrize(
  ("task", "why"),
  [(sound.Module, "a tf.Module ignores the dtype policy"), (defects.InFloat32, "no layer uses")],
)
def test_models_that_follow_no_policy(task, why):
  results = check(task, "mixed_float16")
  assert {r.status for r in results.values()} == {"not applicable"}
  assert results[F16].detail.startswith(why)


@pytest.mark.parametrize("name", [n for n in sound.SUBJECTS if n != "tf.Module"])
@pytest.mark.fast(name=["regression"])
def test_a_right_task(name):
  """What passes does so in a run of any precision."""
  results = precision.check(sound.SUBJECTS[name]())
  assert {r.status for r in results} == {"passed"}, results
  assert all(0 < r.values["relative_error"] < 0.1 for r in results)
  assert results[0].values["underflow"] < 0.01


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_the_policies_are_put_back(policy):
  with under(policy):
    check(defects.Mixed)
    assert keras.config.dtype_policy().name == policy
    assert tf_keras.mixed_precision.global_policy().name == policy
  assert keras.config.dtype_policy().name == "float32"
  assert tf_keras.mixed_precision.global_policy().name == "float32"
