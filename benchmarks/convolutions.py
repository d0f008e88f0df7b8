"""Compares steps of convolutional networks whose gradients TensorFlow orders and ours, on a CPU.

    python -m benchmarks.convolutions

Each row is a network of convolutions with a bias and an activation, trained by plain gradient
descent in a compiled loop. The contenders take turns: the gradients of a convolution's input and of
its filter together, and one after the other whatever their size.
framework/backend/convolutions.py states the conclusion.
"""

import argparse
import itertools
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import tensorflow as tf

from benchmarks import turns
from framework.backend import autograph, convolutions

NETWORKS = [
  (128, 28, 3, [1, 32, 64]),
  (64, 32, 3, [3, 8, 8, 8, 8]),
  (32, 28, 3, [1, 32, 64, 64]),
  (32, 32, 3, [3, 64, 64, 64, 64]),
  (32, 32, 1, [3, 64, 64, 64, 64]),
  (32, 32, 1, [3, 256, 64, 256, 64]),
  (8, 56, 3, [3, 64, 64, 64, 64]),
  (128, 8, 5, [3, 32, 32, 32, 32]),
  (32, 14, 3, [3, 256, 256, 256]),
  (16, 14, 1, [3, 1024, 256, 1024]),
  (32, 7, 3, [3, 128, 128, 128]),
  (32, 4, 1, [3, 64, 384, 64, 384]),
]
"""Images of a batch, pixels of a side, of the filter's side, and channels of the layers."""
ROUNDS, BLOCK_S = 15, 0.3


def main():
  argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
  convolutions.PIXELS = 0  # so that every size is tried
  print(
    "| images | side | filter | channels | pixels | together, ms a step | times as fast in order |"
  )
  print("|---|---|---|---|---|---|---|")
  for images, side, width, channels in NETWORKS:
    ms, ratio = compared(images, side, width, channels)
    told = "-".join(map(str, channels))
    pixels = images * side**2
    print(
      f"| {images} | {side} | {width} x {width} | {told} | {pixels} | {ms:.2f} | {ratio} |",
      flush=True,
    )


def compared(images, side, width, channels):
  """Returns the milliseconds of a step as TensorFlow orders it, and the ratio to one in order."""
  orders = {"together": lambda gradients: None, "in order": convolutions.input_first}
  loops = {
    name: autograph.compiled(made(images, side, width, channels, order))
    for name, order in orders.items()
  }
  for loop in loops.values():
    loop(tf.constant(3))
  started = time.perf_counter()
  loops["together"](tf.constant(5)).numpy()
  steps = tf.constant(max(1, int(BLOCK_S * 5 / (time.perf_counter() - started))))
  blocks = {name: (lambda loop=loop: loop(steps).numpy()) for name, loop in loops.items()}
  times = turns.seconds(blocks, ROUNDS)
  ms = sorted(times["together"])[ROUNDS // 2] / int(steps) * 1e3
  return ms, turns.ratio(times, "in order", "together")


def made(images, side, width, channels, order):
  """Returns a loop, to be compiled, that trains a number of steps and returns the last loss."""
  shapes = [[width, width, *pair] for pair in itertools.pairwise(channels)]
  filters = [tf.Variable(tf.random.normal(shape) * 0.1) for shape in shapes]
  biases = [tf.Variable(tf.zeros([number])) for number in channels[1:]]
  inputs = tf.random.normal([images, side, side, channels[0]])

  def step(done, loss):
    del loss
    with tf.GradientTape() as tape:
      x = inputs
      for of_layer, bias in zip(filters, biases, strict=True):
        x = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, of_layer, 1, "SAME"), bias))
      loss = tf.reduce_mean(x * x)
    gradients = tape.gradient(loss, filters + biases)
    order(gradients)
    for variable, gradient in zip(filters + biases, gradients, strict=True):
      variable.assign_sub(1e-6 * gradient)
    return done + 1, loss

  def loop(number):
    start = tf.constant(0), tf.constant(0.0)
    return tf.while_loop(lambda done, loss: done < number, step, start)[1]

  return loop


if __name__ == "__main__":
  main()
