"""Where do runs of two, three and four replicas part? Rounding, until a kink makes more of it.

  python -m benchmarks.rounding           # max pooling, and no kinks; 1500 steps, about 3 minutes

Three trainers in one process take the same batches of digits on 3, 2 and 4 logical CPUs. Sums over
replicas are in another order, so weights differ in the last bits. Where the two largest values of a
pooling window are closer than that, the replicas' gradient goes to another of them: a kink. For
each pair it prints the largest difference before the first kink, and what came of it.
"""

from __future__ import annotations

import argparse
import functools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from loopwright.builder import Recipe
from loopwright.inputs import datasets
from loopwright.strategies import factories
from loopwright.tasks import image_classification
from loopwright.trainer import Trainer

SIZES = (3, 2, 4)
BATCH = 50
NETWORKS = {"max pooling": (16, 32), "no kinks": ()}
"""Name -> `cnn.filters`; a block of convolution has max pooling."""


def trainers(devices: list[str], filters: tuple[int, ...]) -> list[Trainer]:
  """Returns one for each of SIZES, with equal weights."""
  network = functools.partial(
    image_classification.cnn, filters=filters, units=64, activation="silu"
  )
  sgd = functools.partial(keras.optimizers.SGD, learning_rate=0.01, momentum=0.9)
  made = []
  for size in SIZES:
    keras.utils.set_random_seed(0)
    task = image_classification.ImageClassification(
      data=image_classification.digits(), network=network, input_shape=(8, 8, 1), shift=1
    )
    recipe = Recipe(optimizer=sgd, global_batch_size=BATCH, options={"clip_norm": 5.0})
    alone = tf.distribute.ReductionToOneDevice()  # a collective allows one group in a process
    strategy = tf.distribute.MirroredStrategy(devices[:size], cross_device_ops=alone)
    made.append(recipe.trainer(task, strategy))
  return made


def choices(model: keras.Model, images: tf.Tensor) -> list[np.ndarray]:
  """Returns which value of each window the pooling layers take."""
  outputs = [each.input for each in model.layers if isinstance(each, keras.layers.MaxPooling2D)]
  if not outputs:
    return []
  found = []
  for values in keras.Model(model.inputs, outputs)(images):
    n, height, width, channels = values.shape
    windows = np.reshape(values, [n, height // 2, 2, width // 2, 2, channels])
    moved = windows.transpose(0, 1, 3, 5, 2, 4)
    found.append(moved.reshape(*moved.shape[:4], 4).argmax(-1))
  return found


def apart(one: Trainer, other: Trainer) -> float:
  """Returns the largest difference in a tensor, relative to its largest value."""
  pairs = zip(one.task.model.get_weights(), other.task.model.get_weights(), strict=True)
  return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def measure(devices: list[str], filters: tuple[int, ...], steps: int) -> list[str]:
  """Returns a row for each pair."""
  first, *others = all_of_them = trainers(devices, filters)
  task = first.task
  batches = iter(
    datasets.train_dataset(
      task.source("train"),
      position=0,
      seed=0,
      shuffle=True,
      global_batch_size=BATCH,
      rows=None,
      pad_multiple=1,
      preprocess=task.preprocess,
      first_step=0,
      shard=None,
    )
  )
  kink = dict.fromkeys(SIZES[1:], 0)
  before, after = (dict.fromkeys(SIZES[1:], (0.0, 0.0)) for _ in range(2))
  for step in range(1, steps + 1):
    images = next(batches)["image"]
    taken = [choices(each.task.model, images) for each in all_of_them]
    losses = [each.train(tf.constant(1))["loss"] for each in all_of_them]
    for number, (size, other) in enumerate(zip(SIZES[1:], others, strict=True), 1):
      if any((a != b).any() for a, b in zip(taken[0], taken[number], strict=True)):
        kink[size] = kink[size] or step
      found = after if kink[size] else before
      loss, weights = found[size]
      off = abs(losses[number] - losses[0]) / losses[0]
      found[size] = max(loss, off), max(weights, apart(other, first))
  return [
    f"{size} and {SIZES[0]} | {kink[size] or 'none'} | {before[size][0]:.1e} | "
    f"{before[size][1]:.1e} | {after[size][0]:.1e} | {after[size][1]:.1e} |"
    for size in SIZES[1:]
  ]


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--steps", type=int, default=1500)
  steps = parser.parse_args().steps
  devices = factories.split_cpu(max(SIZES))
  print("| model | replicas | first kink, step | loss before | a tensor before | loss | a tensor |")
  print("|---|---|---|---|---|---|---|")
  for name, filters in NETWORKS.items():
    for row in measure(devices, filters, steps):
      print(f"| {name} | {row}", flush=True)


if __name__ == "__main__":
  main()
