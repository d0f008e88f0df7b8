"""Statistics of layers on one replica and several, against NumPy; what they cost when off."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from toys import KERAS

from loopwright import ConfigError
from loopwright.builder import Recipe
from loopwright.models import models
from loopwright.optimizers import loss_scale
from loopwright.tools.forensics.layers import LayerStatistics, statistics

RNG = np.random.default_rng(2)
X = RNG.normal(size=[21, 3]).astype(np.float32)
Y = (X @ [1.0, -2.0, 0.5]).astype(np.float32)
W1, W2 = RNG.normal(size=[3, 4]).astype(np.float32), RNG.normal(size=[4, 1]).astype(np.float32)
B1 = np.array([0.1, -50.0, 0.2, -50.0], np.float32)  # two units are dead
RATE, BATCH = 0.05, 7


class Net(toys.Regression):
  """Regression by a network of two layers, with given weights."""

  features = {"x": X, "y": Y}

  def __init__(self, library="keras"):
    self.library = library

  def build_model(self):
    layers = KERAS[self.library].layers
    hidden = layers.Dense(4, "relu", name="hidden")
    last = layers.Dense(1, use_bias=False, name="last")
    model = toys.network([3], hidden, last, library=KERAS[self.library])
    model.set_weights([W1, B1, W2])
    return model


def made(strategy, library="keras", **options):
  recipe = Recipe(
    optimizer=lambda: KERAS[library].optimizers.SGD(RATE), global_batch_size=BATCH, shuffle=False,
    options=options,
  )  # fmt: skip
  return recipe.trainer(Net(library), strategy)


def by_numpy(x, y, w1, b1, w2):
  """Returns the statistics of a step, and the weights after it."""
  hidden = np.maximum(x @ w1 + b1, 0)
  out = hidden @ w2
  slope = 2 * (out[:, 0] - y)[:, None] / len(x)
  to_hidden = slope @ w2.T * (hidden > 0)
  weights = {"hidden/kernel": w1, "hidden/bias": b1, "last/kernel": w2}
  gradients = [x.T @ to_hidden, to_hidden.sum(axis=0), hidden.T @ slope]
  found = {}
  for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
    found[f"gradient_norm/{name}"] = np.linalg.norm(gradient)
    found[f"update_ratio/{name}"] = RATE * np.linalg.norm(gradient) / np.linalg.norm(weight)
  for name, value in {"hidden": hidden, "last": out}.items():
    found |= {f"mean/{name}": value.mean(), f"std/{name}": value.std()}
    found[f"dead/{name}"] = (value == 0).all(axis=0).mean()
  return found, [w - RATE * g for w, g in zip(weights.values(), gradients, strict=True)]


def plain(found):
  """Returns statistics by short names: without the model's, and without the replica's."""
  return {name.replace("sequential/", "").replace(":0", ""): value for name, value in found.items()}


@pytest.mark.parametrize(
  ("replicas", "library", "options"),
  [
    (2, "keras", {}),
    (1, "tf_keras", {}),
    (2, "keras", {"accumulation_steps": 2, "jit_compile": True, "loss_scale": loss_scale.dynamic}),
    (3, "keras", {"recompute": ["hidden"]}),
  ],
)
@pytest.mark.fast(replicas=[2], options=[{}])
def test_they_are_those_of_numpy(replicas, library, options, mirrored):
  """7 examples a step, so that rows are padded on 2 replicas and more."""
  keras.backend.clear_session(free_memory=False)
  trainer = made(mirrored(replicas), library, **options)
  weights = [W1, B1, W2]
  trainer.train(tf.constant(1))
  _, weights = by_numpy(X[:7].astype(float), Y[:7], *weights)
  before = [v.numpy() for v in map(models.raw, models.all_variables(trainer.task.model))]
  found = plain(statistics(trainer))
  wanted, weights = by_numpy(X[7:14].astype(float), Y[7:14], *weights)
  assert found.keys() == wanted.keys()
  assert wanted["dead/hidden"] == 0.5
  for name, value in wanted.items():
    assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
  after = [v.numpy() for v in map(models.raw, models.all_variables(trainer.task.model))]
  for one, other in zip(before, after, strict=True):
    np.testing.assert_array_equal(one, other)  # the replay has left nothing
  trainer.train(tf.constant(1))
  for variable, value in zip(models.trainable_variables(trainer.task.model), weights, strict=True):
    np.testing.assert_allclose(models.raw(variable).numpy(), value, rtol=1e-4, atol=1e-6)
  assert trainer.traces == 1


def test_the_loop_is_the_same_with_it_and_without(mirrored):
  graphs = []
  for bound in (False, True):
    trainer, lines = made(mirrored(2)), []
    action = LayerStatistics(every_steps=2)
    if bound:
      log = types.SimpleNamespace(append=lambda *line, lines=lines: lines.append(line))
      action.bind(types.SimpleNamespace(
        strategy=trainer.strategy, trainer=trainer, metrics_log=log, is_chief=True, step=2
      ))  # fmt: skip
    trainer.train(tf.constant(2))
    if bound:
      assert action.loop_ends() == (4,)
      action({})
      [(step, split, values)] = lines
      assert (step, split) == (2, "layers")
      assert all(np.isfinite(value) for value in values.values())
    trainer.train(tf.constant(2))
    graphs.append(sorted(node.op for node in trainer.graph().as_graph_def().node))
  assert graphs[0] == graphs[1]


def test_a_mesh_is_refused():
  place = types.SimpleNamespace(replays=False)
  trainer = types.SimpleNamespace(placement=place)
  with pytest.raises(ConfigError, match="a step cannot be replayed under"):
    statistics(trainer)
