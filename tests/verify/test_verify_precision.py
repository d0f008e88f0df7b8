"""The first gradient in half precision: what is lost, and why."""

import dataclasses
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

F16, BF16 = "mixed_float16", "mixed_bfloat16"


def check(task, policy=F16, scale=None):
  """The result in a run of that precision."""
  trainer = {"loss_scale": functools.partial(loss_scale.fixed, scale=scale)} if scale else {}
  [result] = precision.check(sound.subject(task, precision=policy, options=trainer))
  assert (result.group, result.check) == ("precision", precision.CHECK)
  return result


# policy, fixed loss scale, cause, in the detail, line
DEFECTS = {
  "Mixed": (F16, None, precision.MIXED, "", "tf.square"),
  "Tiny": (F16, 1.0, precision.TOO_SMALL, "underflow", ""),
  "Squares": (F16, None, precision.OVERFLOW, "the loss is not finite", "tf.square"),
  "Wide": (F16, None, precision.A_SUM, "relative error", "tf.reduce_mean"),
  "Total": (F16, None, precision.A_SUM, "the loss is not finite", "tf.reduce_sum"),
  "Logarithm": (F16, None, precision.SMALL, "the loss is not finite", "tf.math.log"),
  "Running": (BF16, None, precision.A_SUM, "relative error", "tf.cumsum"),
}


@pytest.mark.parametrize("name", DEFECTS)
@pytest.mark.fast(name=list(DEFECTS)[:1])
def test_a_defect(name):
  policy, scale, cause, told, text = DEFECTS[name]
  kind = getattr(defects, name)
  result = check(kind, policy, scale)
  assert (result.status, result.cause) == ("failed", cause), result
  assert told in result.detail
  assert result.place == (place(kind, text) if text else "")


@pytest.mark.whole
def test_a_larger_loss_scale_is_recommended_and_helps():
  result = check(defects.Tiny, F16, 1.0)
  assert result.values["underflow"] > precision.UNDERFLOW
  recommended = float(result.remedy.partition("at least ")[2])
  better = check(defects.Tiny, F16, recommended)
  assert better.status == "passed"
  assert better.values["loss_scale"] == recommended
  assert check(defects.Tiny).status == "passed"  # dynamic


def test_a_loss_scale_that_overflows():
  result = check(sound.Regression, F16, 2.0**30)
  assert (result.status, result.cause) == ("failed", precision.TOO_LARGE)
  assert "the gradient is not finite at loss scale 1.07374e+09" in result.detail


def test_a_dynamic_scale_may_find_its_level():
  scaled = {"loss_scale": functools.partial(loss_scale.dynamic, initial=2.0**30)}
  [result] = precision.check(sound.subject(sound.Regression, precision=F16, options=scaled))
  assert result.status == "passed"
  assert 1 < result.values["loss_scale"] < 2.0**30


@pytest.mark.parametrize(
  ("task", "policy", "why"),
  [
    (sound.Module, F16, "a tf.Module ignores the dtype policy"),
    (defects.InFloat32, F16, "no layer uses"),
    (defects.Squares, "float32", "run.precision is float32"),
  ],
)
@pytest.mark.fast(policy=["float32"])
def test_what_is_not_in_half_precision(task, policy, why):
  result = check(task, policy)
  assert result.status == "not applicable"
  assert result.detail.startswith(why)


@pytest.mark.parametrize("policy", precision.LIMITS)
@pytest.mark.parametrize("name", [n for n in sound.SUBJECTS if n != "tf.Module"])
@pytest.mark.fast(name=["regression"], policy=[F16])
def test_a_right_task(name, policy):
  subject = dataclasses.replace(sound.SUBJECTS[name](), precision=policy)
  [result] = precision.check(subject)
  assert result.status == "passed", result
  assert 0 < result.values["relative_error"] < 0.1
  assert result.values["underflow"] < 0.01


@pytest.mark.parametrize("before", ["float32", BF16])
def test_the_policies_are_put_back(before):
  with under(before):
    check(defects.Mixed)
    assert keras.config.dtype_policy().name == before
    assert tf_keras.mixed_precision.global_policy().name == before
  assert keras.config.dtype_policy().name == "float32"
  assert tf_keras.mixed_precision.global_policy().name == "float32"
