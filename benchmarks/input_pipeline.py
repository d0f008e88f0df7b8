"""Compares the speed of the framework's index shuffle with tf.data's shuffle buffer.

    python benchmarks/input_pipeline.py

60,000 uint8 images of 28x28 with labels, in batches of 128, all with prefetch, read inside one
tf.function. The pipelines take turns, so a busy machine slows all of them. A ratio is the median
over turns of (examples per second) / (the first row's in the same turn). CPU time counts all
threads and varies less on a shared machine.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import numpy as np
import tensorflow as tf

from loopwright.inputs.array_files import load_arrays
from loopwright.inputs.datasets import train_dataset
from loopwright.inputs.sources import ArraySource


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--examples", type=int, default=60_000)
  parser.add_argument("--batch_size", type=int, default=128)
  parser.add_argument("--steps", type=int, default=1000, help="batches per turn")
  parser.add_argument("--turns", type=int, default=9)
  return parser.parse_args()


def made_features(examples):
  rng = np.random.default_rng(0)
  return {
    "image": rng.integers(0, 256, (examples, 28, 28), np.uint8),
    "label": rng.integers(0, 10, examples).astype(np.int32),
  }


def normalized(batch, training=True):
  return {**batch, "image": tf.cast(batch["image"], tf.float32) * (1 / 255)}


def buffered(features, buffer, batch_size):
  dataset = tf.data.Dataset.from_tensor_slices(features).shuffle(buffer).repeat()
  return dataset.batch(batch_size, drop_remainder=True)


def pipelines(features, mapped, batch_size):
  size = {"global_batch_size": batch_size}
  memory, files = ArraySource(features=features), ArraySource(features=mapped)
  prefetched = {
    "shuffle(60000).batch": buffered(features, 60_000, batch_size),
    "shuffle(10000).batch": buffered(features, 10_000, batch_size),
    "shuffle(60000).batch.map(normalize)": buffered(features, 60_000, batch_size).map(
      normalized, num_parallel_calls=tf.data.AUTOTUNE
    ),
  }
  return {name: dataset.prefetch(tf.data.AUTOTUNE) for name, dataset in prefetched.items()} | {
    "train_dataset, arrays": train_dataset(memory, **size),
    "train_dataset, memory-mapped": train_dataset(files, **size),
    "train_dataset, arrays, normalize": train_dataset(memory, preprocess=normalized, **size),
  }


def reader(dataset):
  """Returns a function (iterator, steps) that reads `steps` batches and uses each."""

  def read(iterator, steps):
    total = tf.constant(0.0)
    for _ in tf.range(steps):
      batch = next(iterator)
      total += tf.cast(batch["image"][0, 0, 0], tf.float32) + tf.cast(batch["label"][0], tf.float32)
    return total

  return tf.function(read).get_concrete_function(iter(dataset), tf.constant(0))


def one_turn(dataset, read, steps):
  """Returns (seconds, CPU seconds) for `steps` batches of a new iterator, without its start."""
  iterator = iter(dataset)
  read(iterator, tf.constant(50)).numpy()
  wall, cpu = time.perf_counter(), time.process_time()
  read(iterator, tf.constant(steps)).numpy()
  return time.perf_counter() - wall, time.process_time() - cpu


def measured(datasets, steps, turns):
  readers = {name: reader(dataset) for name, dataset in datasets.items()}
  times = {name: [] for name in datasets}
  for _ in range(turns):
    for name, dataset in datasets.items():
      times[name].append(one_turn(dataset, readers[name], steps))
  return times


def print_table(times, steps, batch_size):
  median = statistics.median
  base = next(iter(times.values()))
  print(
    f"{'':38}{'examples/s':>11}{'ratio':>7}{'(least, most)':>15}{'CPU us/batch':>14}{'ratio':>7}"
  )
  for name, turns in times.items():
    ratios = [slow / fast for (slow, _), (fast, _) in zip(base, turns, strict=True)]
    cpu_ratios = [slow / fast for (_, slow), (_, fast) in zip(base, turns, strict=True)]
    rate = steps * batch_size / median(wall for wall, _ in turns)
    cpu_us = median(cpu for _, cpu in turns) / steps * 1e6
    spread = f"({min(ratios):.1f}, {max(ratios):.1f})"
    print(
      f"{name:38}{rate:11,.0f}{median(ratios):7.2f}{spread:>15}{cpu_us:14.0f}{median(cpu_ratios):7.2f}"
    )


def main():
  arguments = parse_arguments()
  features = made_features(arguments.examples)
  with tempfile.TemporaryDirectory() as folder:
    for name, array in features.items():
      np.save(os.path.join(folder, f"{name}.npy"), array)
    datasets = pipelines(features, load_arrays(folder), arguments.batch_size)
    times = measured(datasets, arguments.steps, arguments.turns)
  print(f"{os.cpu_count()} cores, TensorFlow {tf.__version__}, medians of {arguments.turns} turns")
  print_table(times, arguments.steps, arguments.batch_size)


if __name__ == "__main__":
  main()
