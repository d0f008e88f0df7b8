"""What `LayerStatistics` costs: a compiled step, and one that is replayed for the statistics.

python -m benchmarks.layer_statistics digits_cnn "auto.cpu_replicas = 2"
"""

from __future__ import annotations

import argparse
import statistics as numbers
import time

import tensorflow as tf

from loopwright import builder, configurables
from loopwright import running as runs
from loopwright.commands import shipped
from loopwright.strategies import placement
from loopwright.tools.forensics import layers

ROUNDS, STEPS = 9, 50


def main() -> None:
  """Prints the medians, and the cost of a step at some cadences."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("config")
  parser.add_argument("bindings", nargs="*")
  given = parser.parse_args()
  configurables.parse([shipped.find(given.config)], given.bindings)
  strategy: tf.distribute.Strategy = placement.made(runs.bound("strategy"))
  recipe = runs.bound_recipe(strategy.num_replicas_in_sync)
  trainer = recipe.trainer(builder.made_task(runs.bound("task")), strategy)
  steps, replays = [], []
  trainer.train(tf.constant(STEPS))
  layers.statistics(trainer)
  for _ in range(ROUNDS):
    began = time.perf_counter()
    trainer.train(tf.constant(STEPS))
    steps.append((time.perf_counter() - began) / STEPS)
    began = time.perf_counter()
    found = layers.statistics(trainer)
    replays.append(time.perf_counter() - began)
  step, replay = numbers.median(steps), numbers.median(replays)
  print(f"{len(found)} numbers; a step {1e3 * step:.3g} ms, a replay {1e3 * replay:.3g} ms")
  for every in (100, 1000):
    print(f"every {every} steps: {replay / every / step:.2%} of the time")


if __name__ == "__main__":
  main()
