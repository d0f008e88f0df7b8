"""Compares steps of convolutional networks whose gradients TensorFlow orders and ours, on a CPU.

    python -m benchmarks.convolutions

Each row is a network of convolutions with a bias and an activation, trained by plain gradient
descent in a compiled loop. The contenders take turns: the gradients of a convolution's input and of
its filter together, and one after the other whatever their size.
framework/cpu/convolutions.py states the conclusion.
"""

import argparse
import itertools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import tensorflow as tf

from benchmarks import stacks
from framework.cpu import convolutions
from framework.graphs import autograph

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
  inputs = tf.random.normal([images, side, side, channels[0]])
  shapes = [[width, width, *pair] for pair in itertools.pairwise(channels)]
  together = autograph.compiled(stacks.made(inputs, shapes, layer))
  ordered = autograph.compiled(stacks.made(inputs, shapes, layer, convolutions.input_first))
  seconds, ratio = stacks.compared({"together": together, "in order": ordered}, block_s=0.3)
  return seconds * 1e3, ratio


def layer(x, weight, bias, last):
  del last
  return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, weight, 1, "SAME"), bias))


if __name__ == "__main__":
  main()
