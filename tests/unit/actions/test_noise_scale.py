"""The gradient noise scale of two replicas and more, against NumPy and against its definition."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys

from loopwright import ConfigError
from loopwright.actions.noise_scale import NoiseScale
from loopwright.builder import Recipe
from loopwright.optimizers import loss_scale

EXAMPLES, BATCH = 4000, 24
RNG = np.random.default_rng(1)
X = RNG.normal(size=[EXAMPLES, 3]).astype(np.float32)
Y = (X @ [1.0, -2.0, 0.5] + 0.5 * RNG.normal(size=EXAMPLES)).astype(np.float32)
START = np.array([[0.5], [-1.0], [0.0]], np.float32)


class Fit(toys.Regression):
  """Regression; a rate of 0 keeps the weights, so that each step estimates the same numbers."""

  features = {"x": X, "y": Y}

  def build_model(self):
    return toys.linear(START)


def gradients():
  """Returns the gradient of each example, float64 [EXAMPLES, 3]."""
  error = X.astype(float) @ START[:, 0] - Y
  return 2 * error[:, None] * X


def measured(strategy, steps, batch=BATCH, **options):
  action, seen = NoiseScale(), []
  recipe = Recipe(
    optimizer=lambda: keras.optimizers.SGD(0.0), global_batch_size=batch, shuffle=False,
    options=options,
  )  # fmt: skip
  trainer = recipe.trainer(Fit(), strategy)
  action.bind(types.SimpleNamespace(strategy=strategy, trainer=trainer))
  keep = action._seen
  action._seen = lambda *values: (seen.append(values), keep(*values))[1]
  [observer] = trainer.parts.observers
  observer._seen = action._seen
  return trainer.train(tf.constant(steps)), seen[0], action


def by_numpy(steps, replicas, batch=BATCH):
  """Returns the means over the steps of what is estimated, by pairs of examples of two replicas."""
  each, squares, variances = gradients(), [], []
  share = -(-batch // replicas)
  for step in range(steps):
    rows = each[step * batch : (step + 1) * batch]
    parts = [rows[i : i + share] for i in range(0, batch, share)]
    products = [
      a @ b for i, one in enumerate(parts) for j, two in enumerate(parts) if i != j
      for a in one for b in two
    ]  # fmt: skip
    square = np.mean(products)
    within = sum(np.square(part.sum(axis=0)).sum() for part in parts)
    squares.append(square)
    variances.append((within - square * sum(len(part) ** 2 for part in parts)) / batch)
  return np.mean(squares), np.mean(variances)


@pytest.mark.parametrize(
  ("replicas", "batch", "options"),
  [(2, 24, {}), (3, 22, {}), (2, 24, {"loss_scale": loss_scale.dynamic, "accumulation_steps": 2})],
)
@pytest.mark.fast(replicas=[2], options=[{}])
def test_it_is_that_of_numpy(replicas, batch, options, mirrored):
  """22 examples on 3 replicas: 8, 8 and 6."""
  results, (square, variance, steps), action = measured(mirrored(replicas), 5, batch, **options)
  expected = by_numpy(5, replicas, batch)
  np.testing.assert_allclose((square, variance), expected, rtol=1e-4)
  assert steps == 5
  assert results["noise_scale"] == pytest.approx(expected[1] / expected[0], rel=1e-4)
  assert not {"noise_square", "noise_variance"} & results.keys()
  assert action.result() == f"noise scale {results['noise_scale']:.3g}"


@pytest.mark.whole
def test_it_is_near_its_definition(mirrored):
  """Over all 4000 examples, once: tr(S) / |G|^2 of the gradients of single examples."""
  results, _, _ = measured(mirrored(2), EXAMPLES // 20, 20)
  each = gradients()
  mean = each.mean(axis=0)
  wanted = np.square(each - mean).sum(axis=1).mean() / np.square(mean).sum()
  assert results["noise_scale"] == pytest.approx(wanted, rel=0.05)


def test_the_state_goes_on():
  one, other = NoiseScale(), NoiseScale()
  one._seen(2.0, 30.0, 10)
  other.restore(one.state())
  assert other._seen(1.0, 40.0, 5) == one._seen(1.0, 40.0, 5)
  kept = 0.99**5
  first = 1 - 0.99**10
  wanted = (kept * first * 30 + (1 - kept) * 40) / (kept * first * 2 + (1 - kept))
  assert one._scale() == pytest.approx(wanted, rel=1e-12)


def test_one_replica_is_refused():
  with pytest.raises(ConfigError, match=r"compares the gradients of replicas, and .* has 1 that"):
    NoiseScale().bind(types.SimpleNamespace(strategy=tf.distribute.get_strategy(), trainer=None))
