"""Compares steps of dense networks with and without the fused products of TensorFlow, on a CPU.

    python -m benchmarks.fused_products

Each row is a network of dense layers with a bias and an activation, trained by plain gradient
descent in a compiled loop. The two contenders take turns. framework/cpu/grappler.py states
the conclusion.
"""

import argparse
import itertools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import tensorflow as tf

from benchmarks import stacks
from framework.cpu import grappler
from framework.graphs import autograph

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

  def layer(x, weight, bias, last):
    x = tf.nn.bias_add(tf.matmul(x, weight), bias)
    return x if last else activation(x)

  inputs, shapes = tf.random.normal([rows, widths[0]]), list(itertools.pairwise(widths))
  fused = autograph.compiled(stacks.made(inputs, shapes, layer))
  apart = grappler.Compiled(stacks.made(inputs, shapes, layer))
  seconds, ratio = stacks.compared({"fused": fused, "apart": apart}, block_s=0.15)
  return seconds * 1e6, ratio


if __name__ == "__main__":
  main()
