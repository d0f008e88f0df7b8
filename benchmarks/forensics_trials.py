"""Measures whether planted non-finite values are located, and what watching for them costs.

    python -m benchmarks.forensics_trials                        # 20 random injections
    python -m benchmarks.forensics_trials --trials=100 --seed=7
    python -m benchmarks.forensics_trials --cost --rounds=100    # watched and unwatched loops

A trial plants one example that makes the loss, or the gradient of one variable, non-finite
(tests/support/planted.py), at a random step, replica (of 2 or 3) and row. It is located if the
report names exactly that step, replica, variable (or the loss) and example. All trials share one
process, so one device makes all sums.

The cost: three trainers of one model, one of them watched, take turns in a random order, one block
of steps each; the third shows the noise. The model "norm" is a CNN with batch normalisation, whose
statistics are read each step; "twice" is the MLP updated twice per batch, where the values that the
first update changes are kept until the second is checked. A gin file instead of a model measures
its task.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import keras
import numpy as np
import tensorflow as tf

from benchmarks import contenders, models
from loopwright import Trainer, builder, configurables
from loopwright import running as runs
from loopwright.tools.forensics import examine
from tests.support import planted

LONGEST = 12
"""Steps of a trial's loop: one epoch, so each example occurs once."""
COLUMNS = "{:>5}  {:8}  {:>8}  {:>4}  {:>7}  {:>7}  {:13}  {:>9}  {}"


def main(arguments: Sequence[str] | None = None) -> int:
  options = _parse(arguments)
  cpu = tf.config.list_physical_devices("CPU")[0]
  devices = [tf.config.LogicalDeviceConfiguration()] * max(3, options.replicas)
  tf.config.set_logical_device_configuration(cpu, devices)
  if options.cost:
    for model in options.models.split(","):
      cost(model, options.replicas, options.rounds, options.steps)
    return 0
  tf.get_logger().setLevel("ERROR")  # that replicas are slow eagerly
  rng = random.Random(options.seed)
  print(
    COLUMNS.format(
      "trial", "", "replicas", "step", "replica", "example", "planted in", "examine s", "operation"
    )
  )
  located = sum(trial(number, rng) for number in range(1, options.trials + 1))
  print(f"{located} of {options.trials} located")
  return 0 if located == options.trials else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.forensics_trials")
  parser.add_argument("--trials", type=int, default=20)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--cost", action="store_true", help="measure the cost instead")
  parser.add_argument("--models", default=",".join(TASKS), help="for the cost")
  parser.add_argument("--replicas", type=int, default=1, help="for the cost")
  parser.add_argument("--rounds", type=int, default=100, help="for the cost")
  parser.add_argument("--steps", type=int, default=50, help="of a block, for the cost")
  return parser.parse_args(arguments)


# --- trials -----------------------------------------------------------------------------------


def trial(number: int, rng: random.Random) -> bool:
  """Plants one example, trains, and compares the report with what was planted."""
  replicas, step, where = rng.choice((2, 3)), rng.randint(1, LONGEST), rng.choice(planted.WHERE)
  replica, example = _random_example(rng, replicas, step)
  task = planted.Planted(example=example, where=where)
  trainer = planted.make_trainer(_strategy(replicas), task)
  examine.watch(trainer)
  trainer.train(tf.constant(LONGEST))
  started = time.perf_counter()
  report = examine.examine(trainer)
  seconds = time.perf_counter() - started
  what = "loss" if where in planted.LOSSES else f"gradient of {where}"
  found = [(f.replica, f.what, f.examples) for f in report.findings]
  good = (report.step, found) == (step, [(replica, what, (example,))])
  operation = report.findings[0].operation if report.findings else None
  word = "located" if good else "WRONG"
  facts = (number, word, replicas, step, replica, example, where, f"{seconds:.2f}", operation)
  print(COLUMNS.format(*map(str, facts)), flush=True)
  if not good:
    print(report)
  return good


def _random_example(rng: random.Random, replicas: int, step: int) -> tuple[int, int]:
  example = -1
  while example < 0:  # padding
    replica, row = rng.randrange(replicas), rng.randrange(-(-planted.BATCH // replicas))
    example = planted.example_at(step=step, replica=replica, row=row, replicas=replicas)
  return replica, example


def _strategy(replicas: int) -> tf.distribute.Strategy:
  if replicas == 1:
    return tf.distribute.get_strategy()
  return tf.distribute.MirroredStrategy(
    [f"CPU:{i}" for i in range(replicas)], cross_device_ops=tf.distribute.ReductionToOneDevice()
  )


# --- the cost ---------------------------------------------------------------------------------


def cost(model: str, replicas: int, rounds: int, steps: int) -> None:
  """Prints the median times of a step, and the ratios to the first contender's."""
  names = ("unwatched", "watched", "unwatched again")
  trainers = [_trainer(model, replicas) for _ in names]
  examine.watch(trainers[1])
  times: list[list[tuple[float, float]]] = [[] for _ in names]
  order = random.Random(0)
  for number in range(rounds + 1):
    for i in order.sample(range(len(names)), len(names)):
      started, cpu_started = time.perf_counter(), time.process_time()
      trainers[i].train(tf.constant(steps))
      if number:  # the first traces
        times[i].append((time.perf_counter() - started, time.process_time() - cpu_started))
  seconds = np.median(times, axis=1)
  print(f"{model} x{replicas}, {rounds} rounds of {steps} steps: us a step, and its ratio")
  for name, figures, (wall, used) in zip(names, times, seconds, strict=True):
    paired = np.median(np.divide(figures, times[0]), axis=0)
    print(
      f"  {name:16} {1e6 * wall / steps:7.0f}  of medians {wall / seconds[0][0]:.3f}, median of "
      f"ratios {paired[0]:.3f}; of CPU time {used / seconds[0][1]:.3f}, {paired[1]:.3f}",
      flush=True,
    )


class Normalized(contenders.Classification):
  """Three blocks of convolution and batch normalisation, then dropout."""

  def build_model(self):
    layers = keras.layers
    blocks = [
      layer
      for channels in (16, 32, 32)
      for layer in (
        layers.Conv2D(channels, 3, strides=2),
        layers.BatchNormalization(),
        layers.ReLU(),
      )
    ]
    head = [layers.Flatten(), layers.Dropout(0.2), layers.Dense(models.CLASSES)]
    return keras.Sequential([keras.Input(models.IMAGE_SHAPE), *blocks, *head])


class Twice(contenders.Classification):
  def train_step(self, step, batch):
    for _ in range(2):
      step.update(lambda part: self.training_loss(step, part), batch)


TASKS = {
  "mlp": lambda: contenders.Classification("mlp"),
  "cnn": lambda: contenders.Classification("cnn"),
  "norm": lambda: Normalized("cnn"),
  "twice": lambda: Twice("mlp"),
}


def _trainer(model: str, replicas: int) -> Trainer:
  strategy = _strategy(replicas)
  if model.endswith(".gin"):
    configurables.parse([model])
    task = builder.made_task(runs.bound("task"))
    return runs.bound_recipe(strategy.num_replicas_in_sync).trainer(task, strategy)
  return Trainer(
    task=TASKS[model](),
    strategy=strategy,
    dataset_fn=lambda position: models.dicts(),
    global_batch_size=models.BATCH_SIZE,
    optimizer=keras.optimizers.Adam,
  )


if __name__ == "__main__":
  sys.exit(main())
