"""What TensorFlow rewrites in the compiled loops, seen in the graphs and options of their calls."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from runs import make_trainer
from tensorflow.python.eager import context

from loopwright.graphs import grappler
from loopwright.strategies import factories

ROWS, RATE, STEPS = 8, 0.05, 3
RNG = np.random.default_rng(3)
X = RNG.normal(size=[ROWS, 4, 4, 1]).astype(np.float32)
KERNEL = RNG.normal(size=[16, 5]).astype(np.float32)
BIAS = RNG.normal(size=5).astype(np.float32)


class Dense(toys.Regression):
  """The mean square of the outputs of a dense layer."""

  features = {"x": X}

  def build_model(self):
    dense = keras.layers.Dense(5, activation="relu")
    model = toys.network([4, 4, 1], keras.layers.Flatten(), dense)
    dense.set_weights([KERNEL, BIAS])
    return model

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)

  def losses(self, outputs, batch):
    return tf.reduce_mean(outputs**2, axis=1)


def made(task, replicas=1):
  strategy = factories.mirrored(cpu_replicas=replicas) if replicas > 1 else factories.default()
  return make_trainer(task, strategy, batch=ROWS, optimizer=lambda: keras.optimizers.SGD(RATE))


@pytest.fixture
def rewritings(monkeypatch):
  """The options for rewriting graphs of all calls of functions so far, the last one at the end."""
  given, usual = [], context.FunctionCallOptions.as_attrs

  def noting(options):
    config = tf.compat.v1.ConfigProto.FromString(options.config_proto_serialized)
    given.append(config.graph_options.rewrite_options)
    return usual(options)

  monkeypatch.setattr(context.FunctionCallOptions, "as_attrs", noting)
  return given


def test_only_the_loops_leave_out_the_inference_of_shapes(rewritings):
  trainer = made(Dense())
  for _ in range(2):  # a call that traces, and one that does not
    rewritings.clear()
    trainer.train(tf.constant(1))
    assert rewritings[-1].disable_tfg_optimizer
  tf.function(lambda: tf.zeros([]))()
  assert not rewritings[-1].disable_tfg_optimizer


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_weights_are_those_of_gradient_descent(replicas):
  task = Dense()
  made(task, replicas).train(tf.constant(STEPS))
  x, kernel, bias = X.reshape(ROWS, 16).astype(np.float64), KERNEL.astype(np.float64), BIAS * 1.0
  for _ in range(STEPS):
    outputs = np.maximum(x @ kernel + bias, 0)
    slope = 2 * outputs / outputs.size
    kernel, bias = kernel - RATE * x.T @ slope, bias - RATE * slope.sum(axis=0)
  np.testing.assert_allclose(task.model.get_weights()[0], kernel, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(task.model.get_weights()[1], bias, rtol=1e-5, atol=1e-6)


def test_a_graph_can_be_asked_for_before_the_first_call():
  compiled = grappler.Compiled(lambda x: x + 1.0)
  graph = compiled.get_concrete_function(tf.TensorSpec([], tf.float32)).graph
  assert "AddV2" in {operation.type for operation in graph.get_operations()}
  assert compiled(tf.constant(2.0)).numpy() == 3.0
  assert compiled.experimental_get_tracing_count() == 1
