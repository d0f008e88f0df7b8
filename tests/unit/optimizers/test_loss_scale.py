import math

import numpy as np
import pytest
import tensorflow as tf

from loopwright.engine.step_parts import Scaling
from loopwright.errors import ConfigError
from loopwright.optimizers import loss_scale


def rule(finite_steps, *, growth_steps, initial=2.0**15, factor=2.0, floor=1.0):
  """Micikevicius et al. (2018), section 3.2, in plain Python: the scale after each step."""
  scale, good, scales = initial, 0, []
  for finite in finite_steps:
    good = good + 1 if finite else 0
    if not finite:
      scale = max(scale / factor, floor)
    elif good == growth_steps:
      scale, good = min(scale * factor, 2.0**127), 0
    scales.append(scale)
  return scales


def scales_after(scale, finite_steps):
  scales = []
  for finite in finite_steps:
    scale.update(tf.constant(finite))
    scales.append(float(scale.value()))
  return scales


@pytest.mark.parametrize(
  "options",
  [
    {"growth_steps": 3},
    {"initial": 8.0, "growth_steps": 1, "factor": 4.0, "floor": 2.0},
    {"initial": 2.0**125, "growth_steps": 2, "factor": 2.0, "floor": 1.0},
  ],
  ids=["usual", "grows_at_once", "at_the_ceiling"],
)
def test_dynamic_follows_the_rule_of_the_paper(options):
  finite_steps = np.random.default_rng(1).random(60) < 0.8
  scales = rule(finite_steps, **options)
  assert len(set(scales)) >= 3
  for make in (loss_scale.dynamic, loss_scale.DynamicLossScale):
    assert scales_after(make(**options), finite_steps) == scales


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_replica_reads_the_scale_that_one_update_left(mirrored, replicas):
  strategy = mirrored(replicas)
  with strategy.scope():
    scale = loss_scale.dynamic(initial=16.0)

  @tf.function
  def step():
    scale.update(tf.constant(False))
    return strategy.run(lambda: 3.0 * scale.factor())

  assert [float(v) for v in strategy.experimental_local_results(step())] == [24.0] * replicas


def test_the_state_of_dynamic_is_saved_and_restored(tmp_path):
  first = loss_scale.dynamic(initial=8.0, growth_steps=3)
  scales_after(first, [False, True, True])
  path = tf.train.Checkpoint(scale=first).write(str(tmp_path / "scale"))
  second = loss_scale.dynamic(initial=8.0, growth_steps=3)
  tf.train.Checkpoint(scale=second).read(path).assert_consumed()
  assert scales_after(second, [True]) == [8.0]  # the third good step in a row, from 4


@pytest.mark.parametrize("make", [loss_scale.dynamic, loss_scale.DynamicLossScale])
def test_the_defaults_of_dynamic(make):
  scale = make()
  assert scale.describe() == "dynamic, now 32768, doubled every 2000 steps"
  assert scales_after(scale, [False] * 16) == [2.0**k for k in range(14, -1, -1)] + [1.0]
  assert scale.trainable_variables == ()


def test_only_dynamic_reacts_to_an_overflow():
  made = [loss_scale.none(), loss_scale.fixed(), loss_scale.dynamic()]
  assert [scale.expects_overflow for scale in made] == [False, False, True]


def test_scaling_divides_by_the_examples_of_the_global_batch():
  assert float(loss_scale.fixed(scale=512.0).factor(64)) == 8.0
  assert float(loss_scale.dynamic(initial=16.0).factor(64)) == 0.25


def test_fixed_stays():
  scale = loss_scale.fixed(scale=512.0)
  assert scales_after(scale, [True, False, True]) == [512.0] * 3
  assert float(scale.factor()) == 512.0


def test_none_is_one_and_costs_no_operation():
  assert loss_scale.none().value() == 1.0
  assert loss_scale.none().factor(48) is None


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_the_factor_has_the_dtype_of_the_loss(dtype):
  factor = Scaling(loss_scale.dynamic(initial=4.0), 2).cast(tf.as_dtype(dtype))
  assert (factor.dtype, float(factor)) == (dtype, 2.0)


@pytest.mark.parametrize("initial", [0.25, 2.0**127])
def test_the_first_scale_may_be_the_least_and_the_largest(initial):
  assert float(loss_scale.dynamic(initial=initial, floor=0.25).value()) == initial


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"initial": 0.5}, r"dynamic.initial is 0.5 and dynamic.floor is 1.0"),
    ({"initial": 2.0**128}, r"0 < floor <= initial <= 2\*\*127"),
    ({"floor": 0.0}, "dynamic.floor is 0.0"),
    ({"initial": math.nan}, "dynamic.initial is nan"),
    ({"growth_steps": 0}, r"dynamic.growth_steps is 0; it must be a whole number of at least 1"),
    ({"factor": 1.0}, "dynamic.factor is 1.0; it must be above 1"),
  ],
)
def test_dynamic_refuses_values_out_of_range(options, message):
  with pytest.raises(ConfigError, match=message):
    loss_scale.dynamic(**options)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan])
def test_fixed_refuses_a_scale_that_is_not_positive(scale):
  with pytest.raises(ConfigError, match=rf"fixed.scale is {scale}; it must be above 0"):
    loss_scale.fixed(scale=scale)


def test_descriptions_name_the_scale():
  assert loss_scale.none().describe() == "none"
  assert loss_scale.fixed(scale=512.0).describe() == "fixed, 512"
  assert loss_scale.fixed().describe() == "fixed, 1024"
