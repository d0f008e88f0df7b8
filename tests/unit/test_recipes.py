"""The programs of docs/recipes.md, on one and two replicas, against NumPy."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from runs import make_trainer

from loopwright import ArraySource
from loopwright.models import models

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text()
RNG = np.random.default_rng(0)
X = RNG.normal(size=[9, 4]).astype(np.float32)
Y = RNG.normal(size=[9, 2]).astype(np.float32)
LABELLED = np.float32([[1, 1, 0, 1, 0, 0, 1, 1, 0], [0, 1, 1, 1, 1, 0, 1, 0, 1]])
RATE, KERNEL = 0.1, RNG.normal(size=[4, 2])


def named(name):
  """What a block of the page defines."""
  [code] = [c for c in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if f" {name}(" in c]
  names = {"__name__": "recipes_block"}
  exec(code, names)
  return names[name]


def trained(mirrored, replicas, task, steps=3):
  """The trainer after some steps of SGD over all rows."""
  trainer = make_trainer(
    task, mirrored(replicas), optimizer=lambda: keras.optimizers.SGD(RATE), batch=9,
  )  # fmt: skip
  trainer.train(tf.constant(steps))
  return trainer


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("surgery", [False, True])
def test_several_tasks_in_one_model(surgery, replicas, mirrored):
  surgeon = named("without_conflicts")
  price, sold = Y.T[0], (Y.T[1] > 0).astype(np.float32)

  class Linear(named("SeveralTasks")):
    def build_model(self):
      inputs = keras.Input([4])
      hidden = keras.layers.Dense(
        2, use_bias=False, kernel_initializer=keras.initializers.Constant(KERNEL)
      )(inputs)
      heads = {
        name: keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name=name)(hidden)
        for name in self.shares
      }
      return keras.Model(inputs, heads)

    def source(self, split):
      has = {"has_price": LABELLED[0], "has_sold": LABELLED[1]}
      return ArraySource({"x": X, "price": price, "sold": sold, **has})

    def combined(self, found):
      if not surgery:
        return super().combined(found)
      return surgeon(found, self.model.trainable_variables)

  trainer = trained(mirrored, replicas, Linear())
  kernel, heads = KERNEL.copy(), [np.ones([2, 1]), np.ones([2, 1])]
  for _ in range(3):
    hidden, found = X @ kernel, []
    for task, (share, goal) in enumerate([(1.0, price), (0.5, sold)]):
      out = (hidden @ heads[task])[:, 0]
      slope = 2 * (out - goal) if task == 0 else 1 / (1 + np.exp(-out)) - goal
      slope = share * (slope * LABELLED[task] / LABELLED[task].sum())[:, None]
      own = [X.T @ (slope @ heads[task].T), np.zeros([2, 1]), np.zeros([2, 1])]
      own[1 + task] = hidden.T @ slope
      found.append(np.concatenate([each.ravel() for each in own]))
    one, two = found
    if surgery and one @ two < 0:
      one, two = one - (one @ two) / (two @ two) * two, two - (one @ two) / (one @ one) * one
    update = np.split(RATE * (one + two), [8, 10])
    kernel -= update[0].reshape(4, 2)
    heads = [head - part[:, None] for head, part in zip(heads, update[1:], strict=True)]
  got = [variable.numpy() for variable in trainer.task.model.trainable_variables]
  for value, expected in zip(got, [kernel, *heads], strict=True):
    np.testing.assert_allclose(value, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
def test_losses_weighted_by_their_uncertainty(replicas, mirrored):
  class Linear(named("Uncertain")):
    def build_model(self):
      model = super().build_model()
      model["net"].set_weights([KERNEL, np.zeros(2)])
      return model

    def source(self, split):
      return ArraySource({"x": X, "y": Y})

  trainer = trained(mirrored, replicas, Linear())
  kernel, bias, s = KERNEL.copy(), np.zeros(2), np.zeros(2)
  for _ in range(3):
    gap = X @ kernel + bias - Y
    slope = 2 * np.exp(-s) * gap / 9
    s = s - RATE * (1 - np.exp(-s) * np.mean(gap**2, axis=0))
    kernel, bias = kernel - RATE * X.T @ slope, bias - RATE * slope.sum(0)
  got = [v.numpy() for v in models.trainable_variables(trainer.task.model)]
  for value, expected in zip(got, (kernel, bias, s), strict=True):
    np.testing.assert_allclose(value, expected, rtol=2e-5, atol=1e-6)
