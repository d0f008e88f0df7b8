"""Trains stacks of layers in two compiled loops that take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from benchmarks import turns

ROUNDS, TRIED = 15, 10

Layer = Callable[[tf.Tensor, tf.Variable, tf.Variable, bool], tf.Tensor]
"""(input, weights, bias, whether it is the last) -> output."""


def made(
  inputs: tf.Tensor,
  shapes: Sequence[Sequence[int]],
  layer: Layer,
  order: Callable[[Any], None] = lambda gradients: None,
) -> Callable[[tf.Tensor], tf.Tensor]:
  """Returns a loop, to be compiled, that trains a number of steps and returns the last loss.

  Args:
    inputs: of the first layer, the same in every step.
    shapes: of the weights of each layer; the last dimension is that of its bias.
    layer: computes one.
    order: called with the gradients.
  """
  weights = [tf.Variable(tf.random.normal(shape) * 0.1) for shape in shapes]
  biases = [tf.Variable(tf.zeros(shape[-1:])) for shape in shapes]

  def step(done, loss):
    del loss
    with tf.GradientTape() as tape:
      x = inputs
      for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = layer(x, weight, bias, number == len(weights) - 1)
      loss = tf.reduce_mean(x * x)
    gradients = tape.gradient(loss, weights + biases)
    order(gradients)
    for variable, gradient in zip(weights + biases, gradients, strict=True):
      variable.assign_sub(1e-6 * gradient)
    return done + 1, loss

  def loop(number):
    start = tf.constant(0), tf.constant(0.0)
    return tf.while_loop(lambda done, loss: done < number, step, start)[1]

  return loop


def compared(
  loops: Mapping[str, Callable[[tf.Tensor], tf.Tensor]], *, block_s: float
) -> tuple[float, str]:
  """Returns the seconds of the first loop's step, and how many times as fast the second's is.

  Args:
    loops: two, by name.
    block_s: about how long each runs in a round.
  """
  first, second = loops
  for loop in loops.values():
    loop(tf.constant(3))
  started = time.perf_counter()
  loops[first](tf.constant(TRIED)).numpy()
  steps = tf.constant(max(1, int(block_s * TRIED / (time.perf_counter() - started))))
  blocks = {name: (lambda loop=loop: loop(steps).numpy()) for name, loop in loops.items()}
  times = turns.seconds(blocks, ROUNDS)
  return sorted(times[first])[ROUNDS // 2] / int(steps), turns.ratio(times, second, first)
