"""The range test of the learning rate, against rates at which a quadratic diverges."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import tensorflow as tf

import loopwright
from loopwright.errors import ConfigError
from loopwright.inputs.sources import ArraySource
from loopwright.metrics import Loss
from loopwright.task import Task
from loopwright.tools import tune_rate

TARGETS = np.random.default_rng(0).normal(size=[24, 3]).astype(np.float32)
CONFIG = """
run.task = @Bowl()
run.train_steps = 100
run.global_batch_size = 6
"""


@loopwright.register
class Bowl(Task):
  """Half the sum of curvature * (w - target)^2 over the weights, for each example."""

  def __init__(self, *, curvatures: Sequence[float] = (8.0, 8.0, 8.0), noise: float = 0.0):
    self.curvatures, self.noise = np.array(curvatures, np.float32), noise

  def build_model(self):
    model = tf.Module()
    model.w = tf.Variable(tf.ones([3]))
    return model

  def source(self, split):
    return ArraySource(features={"x": self.noise * TARGETS})

  def forward(self, batch, training):
    return 0.5 * tf.reduce_sum(self.curvatures * tf.square(self.model.w - batch["x"]), axis=1)

  def loss(self, outputs, batch):
    return Loss.from_examples(outputs, batch["weight"])


@pytest.fixture
def tested(tmp_path):
  def call(*params):
    (tmp_path / "bowl.gin").write_text(CONFIG)
    lines = []
    found = tune_rate.range_test(
      [str(tmp_path / "bowl.gin")], params, model_dir=str(tmp_path / "run"), show=lines.append
    )
    return found, lines

  return call


@pytest.mark.parametrize(
  ("replicas", "optimizer", "wanted", "within"),
  [
    (1, ["run.optimizer = @keras.SGD"], 2 / 8, 0.1),
    (2, ["run.optimizer = @tf_keras.SGD", "tf_keras.SGD.momentum = 0.5"], 3 / 8, 0.25),
  ],
)
@pytest.mark.fast(replicas=[1])
def test_the_rate_at_which_a_quadratic_diverges(tested, replicas, optimizer, wanted, within):
  found, lines = tested(f"auto.cpu_replicas = {replicas}", *optimizer)
  assert found.diverges == pytest.approx(wanted, rel=within)
  assert found.suggested == found.lowest / 10
  np.testing.assert_allclose(found.rates[:3], 1e-6 * (1e7 ** (1 / 199)) ** np.arange(3), rtol=1e-5)
  w, speed, momentum = np.ones(3), np.zeros(3), 0.5 if replicas == 2 else 0.0
  for rate, loss in zip(found.rates, found.losses, strict=True):
    assert loss == pytest.approx(0.5 * (8 * w**2).sum(), rel=1e-3, abs=1e-9)
    speed = momentum * speed - rate * 8 * w
    w = w + speed
  assert any(f"it diverges from: {found.diverges:.2g}" in line for line in lines)
  with open(found.path) as file:
    picture = file.read()
  assert picture.count("<polyline") == 4
  assert f"suggested: {found.suggested:.2g}" in picture


def test_the_largest_curvature_counts(tested):
  """With gradients that differ from batch to batch, as those of data do."""
  found, _ = tested(
    "auto.cpu_replicas = 1", "Bowl.curvatures = [0.5, 2.0, 8.0]", "Bowl.noise = 0.1",
    "run.optimizer = @keras.SGD",
  )  # fmt: skip
  assert found.diverges == pytest.approx(2 / 8, rel=0.5)


@pytest.mark.whole
def test_it_follows_the_schedule_that_replaces_one(tested):
  found, _ = tested(
    "auto.cpu_replicas = 1", "run.optimizer = @keras.SGD", "keras.SGD.learning_rate = @constant()",
    "constant.learning_rate = 123.0",
  )  # fmt: skip
  assert found.diverges == pytest.approx(2 / 8, rel=0.1)


RATES = np.geomspace(1e-4, 1, 60)


def valley(noise, seed=3):
  """Returns losses that fall from 2 until rate 0.05, then rise by a quarter a step."""
  loss = 2 - 1.5 * np.minimum(np.log(RATES / 1e-4) / np.log(0.05 / 1e-4), 1)
  turn = int(np.searchsorted(RATES, 0.05))
  loss[turn:] *= 1.25 ** np.arange(len(RATES) - turn)
  return loss + noise * np.random.default_rng(seed).normal(size=len(RATES))


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_valley_with_noise(noise):
  found = tune_rate.judged(list(RATES), list(valley(noise)))
  assert found.diverges == pytest.approx(0.05, rel=0.6)
  assert found.suggested == pytest.approx(0.005, rel=0.6)


def test_a_loss_that_does_not_diverge_or_does_not_fall():
  falling = tune_rate.judged(list(RATES), list(np.linspace(-1, -5, 60)))
  assert (falling.diverges, falling.lowest) == (None, pytest.approx(1.0, rel=0.5))
  rising = tune_rate.judged(list(RATES), list(np.linspace(1, 5, 60)))
  assert (rising.lowest, rising.diverges, rising.suggested) == (None, None, None)
  ends = tune_rate.judged(list(RATES), [*np.linspace(3, 1, 50), *[math.nan] * 10])
  assert ends.diverges == pytest.approx(RATES[49], rel=0.6)


def test_several_optimizers_are_refused(tested):
  with pytest.raises(ConfigError, match="the optimizers are 'a', 'b', and a range test is for"):
    tested("run.optimizer = {'a': @keras.SGD, 'b': @keras.Adam}")
