"""The memory of a compiled function, against closed forms and TensorFlow's own allocator."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from loopwright.tools import liveness

MIB = 2**20
SQUARE = tf.TensorSpec([512, 512])  # 1 MiB


def traced(function, *specs):
  return tf.function(function, autograph=False).get_concrete_function(*specs)


def backward_pass(layers):
  """Returns a step of so many dense layers of 512 units on 4096 rows, traced."""
  weights = [tf.Variable(tf.eye(512)) for _ in range(layers)]

  def step(x):
    with tf.GradientTape() as tape:
      for weight in weights:
        x = tf.tanh(x @ weight)
      loss = tf.reduce_sum(x)
    for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
      weight.assign_sub(1e-3 * gradient)

  return traced(step, tf.TensorSpec([4096, 512]))


def allocated_by_backward_pass(layers):
  """Returns what `allocated` finds in a process whose allocator counts on every kind of CPU.

  Without oneDNN the default allocator has no statistics; BFC, which GPUs have too, has them.
  """
  code = f"import test_liveness as t; print(t.allocated(t.backward_pass({layers})))"
  environment = {
    **os.environ,
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "PYTHONPATH": os.pathsep.join(sys.path),
  }
  child = [sys.executable, "-c", code]
  done = subprocess.run(
    child, cwd=os.path.dirname(__file__), env=environment, check=True, capture_output=True
  )
  return int(done.stdout)


def allocated(function):
  """Returns the bytes that TensorFlow had at most in a call beyond those before it.

  The least of five calls: on a busy machine one thread may run ahead of another, and keep more.
  """
  arguments = [tf.ones(spec.shape, spec.dtype) for spec in function.structured_input_signature[0]]
  function(*arguments)
  found = []
  for _ in range(5):
    tf.config.experimental.reset_memory_stats("CPU:0")
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    kept = function(*arguments)
    found.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)
    del kept
  return min(found)


def test_a_chain_needs_an_operations_input_and_output():
  found = liveness.peak(traced(lambda x: x @ x @ x @ x @ x, SQUARE))
  assert found.size == 2 * MIB
  assert [size for _, size in found.largest if size] == [MIB, MIB]
  assert found.unknown == ()


def test_elementwise_operations_work_in_place_unless_their_input_is_read_again():
  def in_place(x):
    return tf.exp(tf.sqrt(x @ x))

  def read_again(x):
    y = x @ x
    return tf.exp(y), y

  assert liveness.peak(traced(in_place, SQUARE)).size == MIB
  assert liveness.peak(traced(read_again, SQUARE)).size == 2 * MIB


def test_a_backward_pass_keeps_one_activation_a_layer():
  layers = 8
  function = backward_pass(layers)
  # One activation [4096, 512] of each layer, and two gradients of activations; a gradient of a
  # weight is smaller.
  expected = (layers + 2) * 8 * MIB
  assert liveness.peak(function).size == pytest.approx(expected, abs=8 * MIB)
  measured = allocated_by_backward_pass(layers)
  assert liveness.peak(function).size == pytest.approx(measured, rel=0.1)
  assert liveness.variables_size(function) == layers * MIB


def test_branches_are_followed_and_loops_are_named():
  def branch(x):
    return tf.cond(x[0, 0] > 0, lambda: x @ x @ x, lambda: x)

  def loop(x):
    return tf.while_loop(lambda y: y[0, 0] < 9.0, lambda y: (y @ x,), [x])

  assert liveness.peak(traced(branch, SQUARE)).size == 2 * MIB
  assert "while" in liveness.peak(traced(loop, SQUARE)).unknown


def test_bfloat16_convolutions_can_be_examined():
  kernel = tf.Variable(np.ones([3, 3, 8, 8]), dtype=tf.float32)

  def convolve(x):
    y = tf.nn.conv2d(tf.cast(x, tf.bfloat16), tf.cast(kernel, tf.bfloat16), 1, "SAME")
    return tf.nn.relu(tf.nn.bias_add(y, tf.zeros([8], tf.bfloat16)))

  found = liveness.peak(traced(convolve, tf.TensorSpec([64, 32, 32, 8])))
  image = 64 * 32 * 32 * 8 * 2
  assert found.size == pytest.approx(2 * image, rel=0.01)
