"""After 20 steps all is as in the float64 reference, whatever the strategy, the op and Keras."""

import dataclasses

import cases
import numpy as np
import pairwise
import pytest
import reference

TOLERANCE = 1e-5
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
EXACT = [c for c in cases.CASES.values() if c.scenario.wire_dtype is None]
WIRED = [c for c in cases.CASES.values() if c.scenario.name in ("wire_bfloat16", "wire_float16")]
OVERFLOWING = [c for c in EXACT if c.scenario.overflow_step is not None]


def each(chosen):
  """Parametrizes over cases, in the tiers for which `pairwise` has selected them."""

  def marks(case):
    left = pytest.mark.ci if case in pairwise.CI else pytest.mark.whole
    return () if case in pairwise.FAST else left

  found = [pytest.param(c, id=c.id, marks=marks(c)) for c in chosen]
  return pytest.mark.parametrize("case", found)


def assert_close(actual, expected, name):
  np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE, err_msg=name)


@each(EXACT)
def test_weights_equal_the_reference(case, results):
  arrays, _ = results[case]
  for name, expected in zip(reference.NAMES, cases.expected(case).weights, strict=True):
    for copy in arrays[name]:
      assert_close(copy, expected, name)


@each(EXACT)
def test_every_device_holds_the_same_weights(case, results):
  arrays, facts = results[case]
  assert facts["replicas"] == case.replicas
  for name, copies in arrays.items():
    assert len(copies) == (case.replicas if case.strategy == "mirrored" else 1)
    for copy in copies[1:]:
      np.testing.assert_array_equal(copy, copies[0], err_msg=name)


@each([c for c in EXACT if c.scenario.ema_decay is not None])
def test_moving_averages_equal_the_reference(case, results):
  arrays, _ = results[case]
  for name, expected in zip(reference.NAMES, cases.expected(case).averages, strict=True):
    assert_close(arrays[f"ema/{name}"][0], expected, name)


@each([c for c in EXACT if c.model.startswith("module")])
def test_a_variable_without_gradient_stays_as_it_is(case, results):
  arrays, _ = results[case]
  for name in ("untouched", "ema/untouched"):
    for copy in arrays[name]:
      np.testing.assert_array_equal(copy, [1.0, -2.0, 3.0])


@each(EXACT)
def test_counters_and_loss_scale_equal_the_reference(case, results):
  _, facts = results[case]
  expected, scenario = cases.expected(case), case.scenario
  assert facts["iterations"] == expected.applied
  assert facts["skipped_steps"] == expected.skipped_steps
  assert facts["loss_scale"] == expected.loss_scale
  assert facts["global_step"] == scenario.steps
  assert facts["position"] == scenario.steps * scenario.batch_size


@each(EXACT)
def test_the_loop_is_traced_once(case, results):
  _, facts = results[case]
  assert facts["traces"] == (0 if case.scenario.eager else 1)


@each(EXACT)
def test_xla_compiles_all_that_it_should(case, results):
  _, facts = results[case]
  parts = "the forward and backward pass, the mean, check and update"
  expected = "the step as one program" if case.replicas == 1 else parts
  if (steps := case.steps_per_program) != "auto":
    assert facts["compiled"] == f"{steps} steps as one program"
  else:
    assert facts["compiled"] == (expected if case.compiled else "")


@each(EXACT)
def test_metrics_of_each_loop_equal_the_reference(case, results):
  _, facts = results[case]
  for actual, expected in zip(facts["loops"], cases.expected(case).loops, strict=True):
    assert expected.keys() <= actual.keys()
    for name, value in expected.items():
      np.testing.assert_allclose(actual[name], value, rtol=TOLERANCE, err_msg=name)


@each([c for c in EXACT if c.scenario.optimizer != "two"])
def test_the_learning_rate_is_that_of_the_next_step(case, results):
  _, facts = results[case]
  [(_, _, rate)] = reference.optimizers_of(case.scenario).values()
  done = [case.scenario.first_loop, case.scenario.steps]
  rates = [loop["learning_rate"] for loop in facts["loops"]]
  np.testing.assert_allclose(rates, [rate(step) for step in done], rtol=1e-6)


@each(OVERFLOWING)
def test_the_infinity_was_on_the_last_replica_alone(case, results):
  _, facts = results[case]
  assert np.isnan(facts["loops"][0]["overflow_replica"])
  assert facts["loops"][1]["overflow_replica"] == case.replicas - 1


@each([c for c in EXACT if c.scenario.infinite_label_step is not None])
def test_the_first_step_with_an_infinite_loss_is_named(case, results):
  _, facts = results[case]
  assert "nonfinite_step" not in facts["loops"][0]
  assert facts["loops"][1]["nonfinite_step"] == case.scenario.infinite_label_step + 1


@each([c for c in OVERFLOWING if c.scenario.name == "overflow"])
def test_an_overflow_with_a_finite_loss_is_no_nonfinite_step(case, results):
  _, facts = results[case]
  assert all("nonfinite_step" not in loop for loop in facts["loops"])


@each([c for c in EXACT if c.scenario.evaluated])
def test_evaluations_with_averages_and_with_weights_equal_the_reference(case, results):
  _, facts = results[case]
  trained = cases.expected(case)
  batches = cases.float64_batches(case)[: cases.EVALUATED_BATCHES]
  for actual, weights in zip(
    facts["evaluations"], (trained.averages, trained.weights), strict=True
  ):
    for name, value in reference.evaluate(weights, batches).items():
      np.testing.assert_allclose(actual[name], value, rtol=TOLERANCE, err_msg=name)


def local_gradients(case, weights, batch):
  """Returns, for each replica, the gradients of its own sum, from a padded batch."""
  batch = {name: value.astype(np.float64) for name, value in batch.items()}
  shares = [case.rows_of_replica(replica) for replica in range(case.replicas)]
  return [
    reference.gradient_sums(weights, *(batch[name][rows] for name in ("x", "y", "weight")))[0]
    for rows in shares
  ]


def rounding_bound(case, gradients, weight):
  """Each replica's gradient is rounded once, and each of the N - 1 partial sums."""
  relative = ROUNDING[case.scenario.wire_dtype] * case.replicas / weight
  return [relative * sum(np.abs(local[i]) for local in gradients) for i in range(4)]


@each(WIRED)
def test_a_narrow_wire_rounds_as_documented_and_no_more(case, results):
  arrays, _ = results[case]
  start = [w.astype(np.float64) for w in reference.initial_weights()]
  [batch] = cases.padded_batches(case)
  gradients = local_gradients(case, start, batch)
  bounds = rounding_bound(case, gradients, batch["weight"].sum())
  errors = []
  for name, bound, expected in zip(
    reference.NAMES, bounds, cases.expected(case).weights, strict=True
  ):
    errors.append(np.abs(arrays[name][0] - expected))
    assert np.all(errors[-1] <= bound + 1e-6), name
  assert max(error.max() for error in errors) > 10 * TOLERANCE  # it did travel in fewer bits


@each(WIRED)
def test_the_weight_travels_in_full_over_a_narrow_wire(case, results):
  _, facts = results[case]
  [loop], [expected] = facts["loops"], cases.expected(case).loops
  assert loop["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@each([c for c in cases.CASES.values() if c.scenario.name == "wire_overflow"])
def test_an_overflow_on_a_float16_wire_is_skipped_until_the_scale_fits(case, results):
  arrays, facts = results[case]
  scenario, weights = case.scenario, [w.astype(np.float64) for w in reference.initial_weights()]
  scale, bound, skipped = scenario.loss_scale.initial, 0.0, 0
  for batch in cases.padded_batches(case):
    gradients = local_gradients(case, weights, batch)
    both = [sum(parts) for parts in zip(*gradients, strict=True)]
    largest = max(np.abs(g).max() for local in [*gradients, both] for g in local)
    largest *= scale / case.scenario.batch_size
    assert not 64000 < largest < 67000  # else rounding, not arithmetic, would decide
    if largest > np.finfo(np.float16).max:
      scale, skipped = scale / 2, skipped + 1
      continue
    weight = batch["weight"].sum()
    weights = [w - scenario.rate * g / weight for w, g in zip(weights, both, strict=True)]
    step_bound = rounding_bound(case, gradients, weight)
    bound += scenario.rate * max(part.max() for part in step_bound)
  assert 0 < skipped < scenario.steps
  assert (facts["skipped_steps"], facts["loss_scale"]) == (skipped, scale)
  for name, expected in zip(reference.NAMES, weights, strict=True):
    np.testing.assert_allclose(arrays[name][0], expected, rtol=0, atol=bound, err_msg=name)


@pytest.mark.parametrize(
  "without",
  [
    {"random_weights": False},
    {"l2": 0.0},
    {"clip_norm": None},
    {"overflow_step": None},
    {"idle_first_step": None},
    {"idle_last_step": None},
    {"batch_size": 46},
  ],
  ids=lambda without: next(iter(without)),
)
def test_every_part_of_everything_matters(without):
  """Leaving it out moves a weight by a hundred tolerances: no case passes by accident."""
  case = cases.Case(scenario=cases.EVERYTHING)
  other = cases.Case(scenario=dataclasses.replace(cases.EVERYTHING, **without))
  pairs = zip(cases.expected(case).weights, cases.expected(other).weights, strict=True)
  assert max(np.abs(a - b).max() for a, b in pairs) > 100 * TOLERANCE


def test_everything_clips_some_steps_and_not_others():
  norms = cases.expected(cases.Case(scenario=cases.EVERYTHING)).norms
  assert 3 <= sum(norm > cases.EVERYTHING.clip_norm for norm in norms) <= len(norms) - 3


def test_the_loss_scale_of_everything_goes_up_and_down():
  case = cases.Case(scenario=cases.EVERYTHING)
  # 7 finite steps double it twice, the overflow halves it, 12 finite steps double it four times.
  assert cases.expected(case).loss_scale == 2.0 ** (15 + 2 - 1 + 4)
