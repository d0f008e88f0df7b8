"""Dtypes that layers have of themselves: their loss scale, and what `run.precision` does."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from runs import make_trainer
from toys import KERAS

import loopwright
from loopwright import ArraySource, ConfigError, Loss, Task
from loopwright.reporting import summary
from loopwright.runs.runner import run
from loopwright.strategies import factories

X = np.random.default_rng(0).normal(size=[24, 4]).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


class Tiny(keras.losses.Loss):
  """Its gradients are zero in float16."""

  def call(self, y_true, y_pred):
    return tf.reduce_mean(tf.square(tf.cast(y_pred, tf.float32) - y_true), -1) * 1e-7


def halved():
  """A model compiled under mixed_float16, whose policy is not in force later."""
  keras.config.set_dtype_policy("mixed_float16")
  try:
    hidden = keras.layers.Dense(
      8, activation="tanh", kernel_initializer=keras.initializers.GlorotUniform(seed=1)
    )
    last = keras.layers.Dense(
      1, dtype="float32", kernel_initializer=keras.initializers.GlorotUniform(seed=2)
    )
    model = keras.Sequential([keras.layers.Input([4]), hidden, last])
    model.compile(keras.optimizers.Adam(0.05, epsilon=1e-12), Tiny())
  finally:
    keras.config.set_dtype_policy("float32")
  return model


@pytest.mark.parametrize("replicas", [1, 2])
def test_layers_in_float16_have_fits_loss_scale(replicas, mirrored):
  expected = halved()
  assert isinstance(expected.optimizer, keras.optimizers.LossScaleOptimizer)
  expected.fit(X, Y, batch_size=6, epochs=3, shuffle=False, verbose=0)
  task = loopwright.from_keras(halved(), X, Y)
  strategy = factories.default() if replicas == 1 else mirrored(replicas)
  optimizer = task.own_optimizer
  trainer = make_trainer(task, strategy, batch=6, optimizer=optimizer, data={"shuffle": False})
  result = trainer.train(tf.constant(12))
  for ours, theirs in zip(task.model.get_weights(), expected.get_weights(), strict=True):
    atol = 1e-6 if replicas == 1 else 3e-4  # sums of halves in float16; without a scale 0.18
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)
  assert (result["loss_scale"], result["skipped_steps"]) == (2.0**15, 0)
  lines = summary.describe(
    trainer, precision="float32", start_step=0, train_steps=12, model_dir="runs/x"
  )
  assert "float32, the layers in float16, float32\n" in lines


class Line(Task):
  def __init__(self, make):
    self._make = make

  def build_model(self):
    return self._make()

  def source(self, split):
    return ArraySource(features={"x": X, "y": Y})

  def forward(self, batch, training):
    if isinstance(self.model, tf.Variable):
      return tf.linalg.matmul(tf.cast(batch["x"], self.model.dtype), self.model)
    return self.model(batch["x"], training=training)

  def loss(self, outputs, batch):
    error = tf.cast(tf.math.real(outputs), tf.float32) - batch["y"]
    return Loss.from_examples(tf.square(error)[:, 0], batch["weight"])


def dense(library, dtype):
  k = KERAS[library]
  return lambda: k.Sequential([k.layers.Input([4]), k.layers.Dense(1, dtype=dtype)])


def scale_of(make):
  optimizer, strategy = keras.optimizers.SGD, factories.default()
  trainer = make_trainer(Line(make), strategy, batch=6, optimizer=optimizer)
  return trainer.train(tf.constant(1))["loss_scale"]


def half_weights():
  return tf.Variable(tf.ones([4, 1], tf.float16))


def test_the_scale_is_that_of_the_dtypes_that_are_there():
  made_with = tf_keras.mixed_precision.Policy("mixed_float16")
  for make in (dense("tf_keras", made_with), dense("keras", "float16"), half_weights):
    assert scale_of(make) in (2.0**14, 2.0**15)  # the first step may overflow
  for dtype in ("float32", "mixed_bfloat16", "float64"):
    assert scale_of(dense("keras", dtype)) == 1.0


def start(make, model_dir, **options):
  run(
    task=Line(make), model_dir=str(model_dir), mode="train", train_steps=1, global_batch_size=6,
    strategy=factories.default, **options,
  )  # fmt: skip


@pytest.mark.parametrize("library", KERAS)
def test_a_precision_without_effect_is_refused(library, tmp_path):
  model = dense(library, None)()
  with pytest.raises(
    ConfigError, match=r"run.precision is 'mixed_bfloat16', but .* float32, so it"
  ):
    start(lambda: model, tmp_path / "given", precision="mixed_bfloat16")
  start(dense(library, None), tmp_path / "made", precision="mixed_bfloat16")
  with pytest.raises(ConfigError, match="'mixed_bfloat16', but the model computes in float32, so"):
    start(lambda: tf.Variable(tf.ones([4, 1])), tmp_path / "bare", precision="mixed_bfloat16")


@pytest.mark.parametrize("replicas", [1, 2])
def test_complex_weights_are_refused(replicas, mirrored):
  strategy = factories.default() if replicas == 1 else mirrored(replicas)
  task = Line(lambda: tf.Variable(tf.ones([4, 1], tf.complex64)))
  trainer = make_trainer(task, strategy, batch=6, optimizer=keras.optimizers.SGD)
  with pytest.raises(ConfigError, match="is complex64, which optimizers do not train") as caught:
    trainer.train(tf.constant(1))
  assert "\n" not in str(caught.value)
