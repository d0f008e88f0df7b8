"""Prints a mixture's shares after 1, 10 and a million examples, and what a mixture costs.

python -m benchmarks.mixture
"""

import itertools
import statistics
import time

import numpy as np
import tensorflow as tf

from loopwright import ArraySource, Mixture
from loopwright.inputs.datasets import train_dataset

WEIGHTS = {"a": 0.7, "b": 0.2, "c": 0.1}
BATCH, EXAMPLES, ROUNDS = 128, 60_000, 5


def source(count):
  """Examples of 28 x 28 float32."""
  return ArraySource(features={"x": np.zeros([count, 28, 28], np.float32)})


def rate(given, batches=1500):
  """Examples a second of CPU time."""
  iterator = iter(train_dataset(given, global_batch_size=BATCH))
  list(itertools.islice(iterator, 100))
  began = time.process_time()
  list(itertools.islice(iterator, batches))
  return BATCH * batches / (time.process_time() - began)


def main():
  """Prints both tables."""
  parts = {name: source(EXAMPLES // 3) for name in WEIGHTS}
  mixture = Mixture(parts=parts, weights=WEIGHTS)
  random = np.random.default_rng(0).choice(3, 10**6, p=list(WEIGHTS.values()))
  chosen = mixture.shares.places(tf.range(10**6, dtype=tf.int64))[0].numpy()
  print("| examples | mixture | drawn at random |\n|---|---|---|")
  for n in (1, 10, 10**6):
    ours, drawn = (np.bincount(each[:n], minlength=3).tolist() for each in (chosen, random))
    assert list(mixture.shares.before(n).values()) == ours
    print(f"| {n:,} | {', '.join(map(str, ours))} | {', '.join(map(str, drawn))} |")
  one = source(EXAMPLES)
  ratios = [rate(mixture) / rate(one) for _ in range(ROUNDS)]
  print(
    f"\nrate of the mixture over one source: {statistics.median(ratios):.2f} "
    f"[{min(ratios):.2f}, {max(ratios):.2f}]"
  )
  for position in (0, 10**12):
    began = time.perf_counter()
    next(iter(train_dataset(mixture, global_batch_size=BATCH, position=position)))
    print(f"first batch from position {position:,}: {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
  main()
