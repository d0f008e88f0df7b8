"""The reference itself, against finite differences and closed forms."""

import cases
import numpy as np
import pytest
import reference


def batch():
  [first] = cases.float64_batches(cases.Case(scenario=SCENARIO))[:1]
  return first


SCENARIO = cases.Scenario(name="gradients", batch_size=9, steps=1, random_weights=True)


@pytest.mark.parametrize("index", range(4), ids=reference.NAMES)
def test_gradients_are_the_finite_differences_of_the_objective(index):
  weights = [w.astype(np.float64) for w in reference.initial_weights()]
  gradients, _ = reference.objective(weights, batch(), l2=0.3)
  step = 1e-6
  for place in np.ndindex(weights[index].shape):
    ends = []
    for sign in (1, -1):
      moved = [w.copy() for w in weights]
      moved[index][place] += sign * step
      ends.append(reference.objective(moved, batch(), l2=0.3)[1])
    difference = (ends[0] - ends[1]) / (2 * step)
    assert gradients[index][place] == pytest.approx(difference, rel=1e-6, abs=1e-8)


def test_the_first_step_of_adam_has_the_size_of_the_learning_rate():
  [moved] = reference.Adam().step([np.zeros(2)], [np.array([3.0, -0.5])], rate=0.01)
  np.testing.assert_allclose(moved, [-0.01, 0.01], rtol=1e-4)


def test_adam_follows_the_bias_corrected_moments_of_the_paper():
  rng, adam, weights = np.random.default_rng(0), reference.Adam(epsilon=0.0), [np.zeros(3)]
  gradients = rng.normal(size=(5, 3))
  first, second, expected = np.zeros(3), np.zeros(3), np.zeros(3)
  for time, gradient in enumerate(gradients, start=1):
    weights = adam.step(weights, [gradient], rate=0.1)
    first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
    expected -= 0.1 * (first / (1 - 0.9**time)) / np.sqrt(second / (1 - 0.999**time))
  np.testing.assert_allclose(weights[0], expected, rtol=1e-12)


def test_clipping_by_norm_keeps_the_direction():
  gradients = [np.array([3.0]), np.array([[4.0]])]
  norm = reference.global_norm(gradients)
  assert norm == 5.0
  assert [g.item() for g in reference.clipped(gradients, norm, 1.0, None)] == pytest.approx(
    [0.6, 0.8]
  )
  assert reference.clipped(gradients, norm, 6.0, None) is gradients
