"""Recomputation: the gradients of the function itself, with dropout, without its activations."""

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from runs import make_trainer, values
from toys import KERAS

import loopwright
from loopwright.errors import ConfigError
from loopwright.graphs import randomness
from loopwright.inputs.sources import ArraySource
from loopwright.metrics import Loss
from loopwright.models import models, recomputation
from loopwright.task import Task

RNG = np.random.default_rng(0)
X = RNG.normal(size=[8, 6]).astype(np.float32)
Y = RNG.normal(size=8).astype(np.float32)
COUNTER = tf.Variable(0.0)


class Blocks(Task):
  """Two blocks with dropout and batch normalisation; the second also takes a mask and noise."""

  def __init__(self, wrap, *, library="keras"):
    self.wrap, self._keras = wrap, KERAS[library]

  def build_model(self):
    keras.utils.set_random_seed(1)
    tf_keras.utils.set_random_seed(1)
    return {name: self.block(name) for name in ("one", "two")}

  def block(self, name):
    layers = self._keras.layers
    return self._keras.Sequential(
      [
        self._keras.Input([6]),
        layers.Dense(6, activation="tanh", name=name),
        layers.BatchNormalization(momentum=0.5),
        layers.Dropout(0.5),
        layers.Dense(6),
      ]
    )

  def source(self, split):
    return ArraySource(features={"x": X, "y": Y})

  def train_step(self, step, batch):
    def loss_fn(batch):
      scale = tf.reduce_mean(self.model["one"].trainable_variables[0] ** 2)

      def second(x, mask, options):
        noise = tf.random.stateless_normal(tf.shape(x), step.seed())
        step.log({"seen": (tf.reduce_sum(mask), tf.constant(1.0))})
        outputs = self.model["two"](x + 0.1 * noise, training=options["training"])
        return {"out": outputs * mask[:, None] * scale, "square": x**2}

      x = self.wrap(self.model["one"])(batch["x"], training=True)
      ends = self.wrap(second)(x, batch["weight"], {"training": True})
      outputs = tf.reduce_mean(ends["out"] + ends["square"] + x, axis=1)
      return Loss.from_examples(tf.square(outputs - batch["y"]), batch["weight"])

    step.update(loss_fn, batch)


def trained(task, strategy, *, steps=2, batch=8, **options):
  """Returns the metrics and the weights after a few steps of gradient descent."""
  sgd = functools.partial(task._keras.optimizers.SGD, 0.01)
  trainer = make_trainer(task, strategy, batch=batch, optimizer=sgd, **options)
  metrics = trainer.train(tf.constant(steps))
  kept = {name: metrics[name] for name in ("loss", "gradient_norm", "seen")}
  return kept, values(task.model)


def not_recomputed(function):
  """Draws as `recompute` does: one seed for the function, and from it those of its layers."""

  def call(*args, **kwargs):
    key = randomness.entered_stream().next_key()
    return recomputation._seeded(lambda *a: function(*a, **kwargs), key, args)

  return call


@pytest.mark.parametrize(
  ("library", "replicas", "options"),
  [
    ("keras", 2, {}),
    pytest.param("keras", 1, {"jit_compile": True}, marks=pytest.mark.whole),
    pytest.param("keras", 2, {"batch": 7}, marks=pytest.mark.whole),
    pytest.param("keras", 1, {"eager": True}, marks=pytest.mark.whole),
    pytest.param("tf_keras", 2, {"accumulation_steps": 2}, marks=pytest.mark.whole),
  ],
)
def test_the_step_is_that_without_recomputation(library, replicas, options, mirrored):
  plain = trained(Blocks(not_recomputed, library=library), mirrored(replicas), **options)
  saving = trained(Blocks(loopwright.recompute, library=library), mirrored(replicas), **options)
  assert saving[0] == pytest.approx(plain[0], rel=1e-6)
  for one, other in zip(plain[1], saving[1], strict=True):
    np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


class Named(Blocks):
  """Two blocks, one in a model of its own, and a layer; `wrap` is around each block, or None."""

  def build_model(self):
    keras.utils.set_random_seed(1)
    tf_keras.utils.set_random_seed(1)
    layers, blocks = self._keras.layers, {}
    for name in ("block_1", "block_2"):
      inner = [layers.Dense(6, activation="tanh"), layers.BatchNormalization(), layers.Dropout(0.5)]
      blocks[name] = self._keras.Sequential([self._keras.Input([6]), *inner], name=name)
    outer = self._keras.Sequential([self._keras.Input([6]), blocks["block_2"]], name="outer")
    return {"first": blocks["block_1"], "outer": outer, "last": layers.Dense(1, name="last")}

  def train_step(self, step, batch):
    def loss_fn(batch):
      x = batch["x"]
      if self.wrap is None:
        x = self.model["outer"](self.model["first"](x, training=True), training=True)
      else:
        for block in (self.model["first"], self.model["outer"].layers[-1]):
          x = self.wrap(block)(x, training=True)
      step.log({"seen": (tf.constant(1.0), tf.constant(1.0))})
      return Loss.from_examples(
        tf.square(self.model["last"](x)[:, 0] - batch["y"]), batch["weight"]
      )

    step.update(loss_fn, batch)


@pytest.mark.parametrize(
  ("library", "replicas"), [("keras", 2), pytest.param("tf_keras", 2, marks=pytest.mark.whole)]
)
def test_layers_recompute_by_name(library, replicas, mirrored):
  by_name = trained(
    Named(None, library=library), mirrored(replicas), recompute=["block_[12]", "block_1"]
  )
  by_hand = trained(Named(loopwright.recompute, library=library), mirrored(replicas))
  without = trained(Named(None, library=library), mirrored(replicas))
  assert by_name[0] == pytest.approx(by_hand[0], rel=1e-6)
  assert by_name[0]["loss"] != pytest.approx(without[0]["loss"], rel=1e-3)  # it draws other masks
  for one, other in zip(by_hand[1], by_name[1], strict=True):
    np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  ("pattern", "line"),
  [
    ("block", r"has 'block', which matches the whole name of no Keras layer; names are .*block_1"),
    ("block_(", "has 'block_\\(', which is no regular expression"),
  ],
)
def test_a_name_of_no_layer_is_refused(pattern, line, mirrored):
  with pytest.raises(ConfigError, match=f"Trainer.recompute {line}"):
    trained(Named(None), mirrored(1), recompute=[pattern])


@pytest.mark.parametrize("wrap", [loopwright.recompute, lambda function: function])
def test_the_backward_pass_uses_no_activation_of_the_forward_pass(wrap):
  """The inner tanh has one reader, the next layer; without recomputation its gradient too."""
  block = keras.Sequential(
    [
      keras.Input([3]),
      keras.layers.Dense(3, activation="tanh", name="inner"),
      keras.layers.Dense(2),
    ]
  )
  variables = [models.raw(v) for v in block.trainable_variables]

  @tf.function
  def gradients(x):
    with randomness.random_streams(tf.constant([1, 2])), tf.GradientTape() as tape:
      total = tf.reduce_sum(wrap(block)(x))
    return tape.gradient(total, variables)

  graph = gradients.get_concrete_function(tf.TensorSpec([4, 3])).graph
  (tanh,) = [op for op in graph.get_operations() if op.type == "Tanh"]
  readers = {op.type for op in tanh.outputs[0].consumers()}
  assert readers == ({"MatMul"} if wrap is loopwright.recompute else {"MatMul", "TanhGrad"})


@pytest.mark.parametrize(
  ("function", "reason"),
  [
    (lambda x: x + tf.random.normal([3]), "draws from tf.random (RandomStandardNormal), not from"),
    (lambda x: x + COUNTER.assign_add(1.0), "assigns to a variable (AssignAddVariableOp); the"),
    (keras.layers.Activation("tanh", activity_regularizer="l2"), "adds a loss, as"),
  ],
)
def test_what_would_not_repeat_is_refused(function, reason):
  @tf.function(autograph=False)
  def call():
    with randomness.random_streams(tf.constant([1, 2])):
      return loopwright.recompute(function)(tf.ones([2, 3]))

  with pytest.raises(ConfigError, match=re.escape(f"recompute() got a function that {reason}")):
    call()


def test_what_communicates_is_refused(mirrored):
  class Synchronised(Blocks):
    def block(self, name):
      layers = [keras.Input([6]), keras.layers.BatchNormalization(synchronized=True)]
      return keras.Sequential(layers)

  reason = "communicates with other replicas, as BatchNormalization"
  with pytest.raises(ConfigError, match=reason):
    trained(Synchronised(loopwright.recompute), mirrored(2))
