"""Compares steps of dense networks with and without the fused products of TensorFlow, on a CPU.

    python -m benchmarks.fused_products

Each row is a network of dense layers with a bias and an activation, trained by plain gradient
descent in a compiled loop. The two contenders take turns. framework/backend/grappler.py states
the conclusion.
"""

import argparse
import itertools
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import tensorflow as tf

from benchmarks import turns
from framework.backend import autograph, grappler

NETWORKS = [
  (64, [64, 64, 64, 10]),
  (128, [784, 128, 10]),
  (256, [4, 256, 256, 1]),
  (512, [256] * 4),
  (1024, [128] * 5),
  (4096, [64] * 5),
  (2048, [256] * 4),
  (128, [1024] * 4),
]
"""Rows of a batch, and the widths of the layers."""
ACTIVATIONS = {"relu": tf.nn.relu, "tanh": tf.tanh, "gelu": tf.nn.gelu}
ROUNDS, BLOCK_S = 15, 0.15


def main():
  argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
  grappler.SMALL = 2**40  # so that every size is tried
  print(
    "| rows | widths | activation | largest result | fused, us a step | times as fast when not |"
  )
  print("|---|---|---|---|---|---|")
  for rows, widths in NETWORKS:
    for name in ACTIVATIONS:
      us, ratio = compared(rows, widths, ACTIVATIONS[name])
      told = "-".join(map(str, widths))
      print(
        f"| {rows} | {told} | {name} | {rows * max(widths[1:])} | {us:.0f} | {ratio} |", flush=True
      )


def compared(rows, widths, activation):
  """Returns the microseconds of a fused step, and the ratio to one without fused products."""
  loops = {"fused": autograph.compiled(made(rows, widths, activation))}
  loops["apart"] = grappler.Compiled(made(rows, widths, activation))
  for loop in loops.values():
    loop(tf.constant(3))
  started = time.perf_counter()
  loops["fused"](tf.constant(10)).numpy()
  steps = tf.constant(max(1, int(BLOCK_S * 10 / (time.perf_counter() - started))))
  blocks = {name: (lambda loop=loop: loop(steps).numpy()) for name, loop in loops.items()}
  times = turns.seconds(blocks, ROUNDS)
  us = sorted(times["fused"])[ROUNDS // 2] / int(steps) * 1e6
  return us, turns.ratio(times, "apart", "fused")


def made(rows, widths, activation):
  """Returns a loop, to be compiled, that trains a number of steps and returns the last loss."""
  weights = [tf.Variable(tf.random.normal(pair) * 0.1) for pair in itertools.pairwise(widths)]
  biases = [tf.Variable(tf.zeros([width])) for width in widths[1:]]
  inputs = tf.random.normal([rows, widths[0]])

  def step(done, loss):
    del loss
    with tf.GradientTape() as tape:
      x = inputs
      for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = tf.nn.bias_add(tf.matmul(x, weight), bias)
        x = activation(x) if layer < len(weights) - 1 else x
      loss = tf.reduce_mean(x * x)
    for variable, gradient in zip(
      weights + biases, tape.gradient(loss, weights + biases), strict=True
    ):
      variable.assign_sub(1e-6 * gradient)
    return done + 1, loss

  def loop(number):
    start = tf.constant(0), tf.constant(0.0)
    return tf.while_loop(lambda done, loss: done < number, step, start)[1]

  return loop


if __name__ == "__main__":
  main()
