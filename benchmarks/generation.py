"""Measures tokens written per second with a cache of keys and values and without, side by side.

    python -m benchmarks.generation
    python -m benchmarks.generation --rows=1 --prompt=32 --bytes=224

The network is that of configs/language_model_decoder.gin with its initial weights, in float32 on
the CPU. Both write the same texts in turns; the median of the rounds is printed.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from loopwright.tasks.decoder import decoder
from loopwright.tasks.generation import continued


def main() -> None:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.generation")
  for name, default in (("rows", 8), ("prompt", 128), ("bytes", 128), ("rounds", 5)):
    parser.add_argument(f"--{name}", type=int, default=default)
  given = parser.parse_args()
  model = decoder()
  shape = [given.rows, given.prompt]
  prompt = tf.constant(np.random.default_rng(0).integers(0, 256, shape), tf.int32)
  ways = {
    cached: tf.function(lambda cached=cached: continued(model, prompt, given.bytes, cached=cached))
    for cached in (True, False)
  }
  (written, logits), (same, without) = (ways[cached]() for cached in ways)
  differs = float(tf.reduce_max(tf.abs(logits - without)))
  print(f"the same bytes: {bool(tf.reduce_all(written == same))}; logits differ by {differs:.1e}")
  seconds: dict[bool, list[float]] = {cached: [] for cached in ways}
  for _ in range(given.rounds):
    for cached, way in ways.items():
      began = time.perf_counter()
      way()[0].numpy()
      seconds[cached].append(time.perf_counter() - began)
  for cached, found in seconds.items():
    rate = given.rows * given.bytes / statistics.median(found)
    print(f"{'with' if cached else 'without'} a cache: {rate:,.0f} tokens a second")


if __name__ == "__main__":
  main()
