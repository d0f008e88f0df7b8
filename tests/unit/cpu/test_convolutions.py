"""The order of the two gradients of a convolution, seen in graphs; no value depends on it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework.cpu import convolutions
from framework.inputs import datasets
from framework.inputs.sources import ArraySource
from framework.metrics import Loss
from framework.strategies import factories
from framework.task import Task
from framework.trainer import Trainer

IMAGES, SIDE, RATE, STEPS = 6, 5, 0.05, 3
RNG = np.random.default_rng(5)
X = RNG.normal(size=[IMAGES, SIDE, SIDE, 2]).astype(np.float32)
FIRST = RNG.normal(size=[1, 1, 2, 3]).astype(np.float32)
SECOND = RNG.normal(size=[1, 1, 3, 4]).astype(np.float32)


@pytest.fixture(autouse=True)
def small(monkeypatch):
  """Convolutions of these sizes are put in order."""
  monkeypatch.setattr(convolutions, "PIXELS", IMAGES * SIDE**2 // 2)


def convolution(x, kernel):
  return tf.nn.conv2d(x, kernel, 1, "SAME")


def traced(function):
  return tf.function(function, autograph=False).get_concrete_function().graph


def waits(graph):
  """Returns, for each filter's gradient of a graph, which inputs' gradients it waits for, sorted.

  By shapes: one pair (shape of the filter, shapes of the inputs) for each.
  """
  found = []
  for operation in graph.get_operations():
    if operation.type == "Conv2DBackpropFilter":
      others = [o for o in operation.control_inputs if o.type == "Conv2DBackpropInput"]
      found.append((list(operation.outputs[0].shape), [list(o.outputs[0].shape) for o in others]))
  return sorted(found)


def gradients(loss, kernels, first=FIRST, second=SECOND):
  """Returns a function that computes the gradients of a loss of two convolutions' result."""

  def compute():
    with tf.GradientTape() as tape:
      hidden = tf.nn.relu(convolution(tf.constant(X), kernels.get("first", first)))
      value = loss(convolution(hidden, kernels.get("second", second)), kernels)
    found = tape.gradient(value, list(kernels.values()))
    convolutions.input_first(found)
    return found

  return compute


def mean_square(outputs, kernels):
  del kernels
  return tf.reduce_mean(outputs**2)


def regularized(outputs, kernels):
  return mean_square(outputs, kernels) + sum(tf.nn.l2_loss(kernel) for kernel in kernels.values())


def penalized(outputs, kernels):
  """With the norm of a gradient in it, for which each convolution is differentiated twice."""
  with tf.GradientTape() as tape:
    tape.watch(outputs)
    again = tf.reduce_sum(
      tf.sin(convolution(outputs, tf.transpose(kernels["second"], [0, 1, 3, 2])))
    )
  return tf.reduce_sum(tape.gradient(again, kernels["second"]) ** 2) + mean_square(outputs, kernels)


HIDDEN = [IMAGES, SIDE, SIDE, 3]
WAITING = [([1, 1, 2, 3], []), ([1, 1, 3, 4], [HIDDEN])]


@pytest.mark.parametrize("loss", [mean_square, regularized])
def test_the_filters_gradient_waits_for_the_inputs(loss):
  """That of the first filter waits for nothing: nobody needs the gradient of the images."""
  kernels = {"first": tf.Variable(FIRST), "second": tf.Variable(SECOND)}
  assert waits(traced(gradients(loss, kernels))) == WAITING


def test_in_half_precision_too():
  kernels = {"first": tf.Variable(FIRST), "second": tf.Variable(SECOND)}

  def compute():
    with tf.GradientTape() as tape:
      halves = [tf.cast(kernel, tf.bfloat16) for kernel in kernels.values()]
      hidden = convolution(tf.constant(X, tf.bfloat16), halves[0])
      value = tf.reduce_mean(convolution(hidden, halves[1]) ** 2)
    found = tape.gradient(value, list(kernels.values()))
    convolutions.input_first(found)
    return found

  assert waits(traced(compute)) == WAITING


def test_nothing_is_computed_that_only_a_constant_would_need():
  """A gradient of an input that leads to no variable is left out of the graph that runs."""
  kernels = {"second": tf.Variable(SECOND)}
  assert waits(traced(gradients(mean_square, kernels))) == [([1, 1, 3, 4], [])]

  frozen = tf.Variable(FIRST)

  def compute():
    with tf.GradientTape() as tape:
      hidden = tf.nn.relu(convolution(tf.constant(X), frozen))  # on the tape, and not asked for
      value = tf.reduce_mean(convolution(hidden, kernels["second"]) ** 2)
    found = tape.gradient(value, list(kernels.values()))
    convolutions.input_first(found)
    return found

  assert ([1, 1, 3, 4], []) in waits(traced(compute))


@pytest.mark.parametrize(("pixels", "ordered"), [(0, True), (1, False)])
def test_few_pixels_stay_as_they_are(monkeypatch, pixels, ordered):
  monkeypatch.setattr(convolutions, "PIXELS", IMAGES * SIDE**2 + pixels)
  kernels = {"first": tf.Variable(FIRST), "second": tf.Variable(SECOND)}
  inputs = [HIDDEN] if ordered else []
  assert waits(traced(gradients(mean_square, kernels))) == [WAITING[0], ([1, 1, 3, 4], inputs)]


def test_a_gradient_inside_the_loss():
  kernels = {"first": tf.Variable(FIRST), "second": tf.Variable(SECOND)}
  compute = gradients(penalized, kernels)
  assert any(inputs for _, inputs in waits(traced(compute)))
  for found, expected in zip(tf.function(compute)(), compute(), strict=True):  # eager: no order
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_one_that_the_other_needs_does_not_wait_for_it():
  def compute():
    result = tf.ones([IMAGES, SIDE, SIDE, 4])
    kernel = tf.raw_ops.Conv2DBackpropFilter(
      input=tf.ones(HIDDEN), filter_sizes=[1, 1, 3, 4], out_backprop=result,
      strides=[1] * 4, padding="SAME",
    )  # fmt: skip
    image = tf.raw_ops.Conv2DBackpropInput(
      input_sizes=HIDDEN, filter=kernel, out_backprop=result, strides=[1] * 4, padding="SAME"
    )
    convolutions.input_first([kernel, image + 1.0])
    return kernel, image

  assert waits(traced(compute)) == [([1, 1, 3, 4], [])]


def test_a_gradient_that_is_a_constant_of_the_host_is_left_alone():
  outside = tf.constant(1.0)  # as a custom gradient may return

  def compute():
    with tf.GradientTape() as tape:
      kernel = tf.constant(SECOND)
      tape.watch(kernel)
      value = tf.reduce_mean(convolution(tf.ones(HIDDEN), kernel) ** 2)
    found = [tape.gradient(value, kernel), outside, None]
    convolutions.input_first(found)
    return found[:2]

  assert waits(traced(compute)) == [([1, 1, 3, 4], [])]


class Convolutions(Task):
  """The mean square of what two convolutions of 1 x 1, with ReLU between, make of the images."""

  def build_model(self):
    layers = keras.layers
    model = keras.Sequential([
      keras.Input([SIDE, SIDE, 2]),
      layers.Conv2D(3, 1, use_bias=False, activation="relu"),
      layers.Conv2D(4, 1, use_bias=False),
    ])  # fmt: skip
    model.set_weights([FIRST, SECOND])
    return model

  def forward(self, batch, training):
    return self.model(batch["x"], training=training)

  def loss(self, outputs, batch):
    return Loss.from_examples(tf.reduce_mean(outputs**2, axis=[1, 2, 3]), batch["weight"])


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_training_loop_is_ordered_on_every_replica_and_right(replicas, monkeypatch):
  seen, usual = [], convolutions.input_first
  monkeypatch.setattr(convolutions, "input_first", lambda found: seen.append(found) or usual(found))
  task, source = Convolutions(), ArraySource(features={"x": X})
  trainer = Trainer(
    task=task,
    strategy=factories.mirrored(cpu_replicas=replicas) if replicas > 1 else factories.default(),
    dataset_fn=lambda position: datasets.train_dataset(
      source, global_batch_size=IMAGES, position=position
    ),
    global_batch_size=IMAGES,
    optimizer=lambda: keras.optimizers.SGD(RATE),
  )
  trainer.train(tf.constant(STEPS))
  share = [IMAGES // replicas, SIDE, SIDE, 3]
  [graph] = {found[0].graph for found in seen}
  assert waits(graph) == [([1, 1, 2, 3], [])] * replicas + [([1, 1, 3, 4], [share])] * replicas

  pixels = X.reshape(-1, 2).astype(np.float64)
  first, second = (kernel[0, 0].astype(np.float64) for kernel in (FIRST, SECOND))
  for _ in range(STEPS):
    hidden = pixels @ first
    outputs = np.maximum(hidden, 0) @ second
    slope = 2 * outputs / outputs.size
    back = slope @ second.T * (hidden > 0)
    first, second = first - RATE * pixels.T @ back, second - RATE * np.maximum(hidden, 0).T @ slope
  for found, expected in zip(task.model.get_weights(), (first, second), strict=True):
    np.testing.assert_allclose(found[0, 0], expected, rtol=1e-5, atol=1e-6)
