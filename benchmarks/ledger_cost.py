"""Measures the cost per step of an observer: one trainer with and one without, in turns.

The observer is that of `run.ledger = True`, or the one that tells slow workers.

    python -m benchmarks.ledger_cost                       # the MLP, one replica
    python -m benchmarks.ledger_cost --model cnn --replicas 2 --rounds 60
    python -m benchmarks.ledger_cost --what communication --replicas 2

Blocks of both run in one process, in a new random order each round, so other programs on a shared
machine affect both alike. "control" is a second trainer without it: its difference to the
first is noise.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Sequence

import numpy as np

STEPS = {"mlp": 100, "cnn": 50, "many": 100}
EXAMPLES = 2048


def main(arguments: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger_cost", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("--model", default="mlp", choices=STEPS)
  parser.add_argument("--what", default="ledger", choices=["ledger", "communication"])
  parser.add_argument("--replicas", type=int, default=1)
  parser.add_argument("--rounds", type=int, default=100)
  options = parser.parse_args(arguments)
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  seconds, cpu_seconds = measure(options.what, options.model, options.replicas, options.rounds)
  print(f"{options.model} x{options.replicas}, {options.rounds} rounds of {STEPS[options.model]}")
  for name in seconds:
    ratios = np.array(seconds[name]) / seconds["without"]
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    print(
      f"{name:13} {np.median(seconds[name]) / STEPS[options.model] * 1e6:6.0f} us a step, ratio of "
      f"medians {np.median(seconds[name]) / np.median(seconds['without']):.3f}, median ratio "
      f"{middle:.3f} [{low:.3f}, {high:.3f}], of CPU time "
      f"{np.median(cpu_seconds[name]) / np.median(cpu_seconds['without']):.3f}"
    )


def measure(
  what: str, model: str, replicas: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
  """Returns contender -> seconds of each block, one per round; and the same for CPU time."""
  import tensorflow as tf

  from loopwright.strategies import factories

  factories.split_cpu(replicas)
  steps = tf.constant(STEPS[model])
  trainers = {
    name: make_trainer(model, replicas, what=name) for name in ("without", what, "control")
  }
  for trainer in trainers.values():
    trainer.train(steps)
  seconds: dict[str, list[float]] = {name: [] for name in trainers}
  cpu_seconds: dict[str, list[float]] = {name: [] for name in trainers}
  order = random.Random(0)
  for _ in range(rounds):
    for name in order.sample(list(trainers), len(trainers)):
      started, cpu_started = time.perf_counter(), time.process_time()
      trainers[name].train(steps)
      seconds[name].append(time.perf_counter() - started)
      cpu_seconds[name].append(time.process_time() - cpu_started)
  return seconds, cpu_seconds


def make_trainer(model: str, replicas: int, *, what: str):
  import keras

  from benchmarks import contenders, models
  from loopwright.actions.time_budget import Communication
  from loopwright.inputs import datasets
  from loopwright.inputs.sources import ArraySource
  from loopwright.observers import Reading
  from loopwright.strategies import factories
  from loopwright.tools.ledger.recorder import Recorder
  from loopwright.trainer import Trainer

  rng = np.random.default_rng(0)
  features = {
    "image": rng.normal(size=[EXAMPLES, *models.IMAGE_SHAPE]).astype(np.float32),
    "label": rng.integers(models.CLASSES, size=EXAMPLES),
  }
  source = ArraySource(features=features)
  strategy = factories.mirrored(cpu_replicas=replicas) if replicas > 1 else factories.default()
  recorder = Recorder(model_dir=tempfile.mkdtemp(), strategy=strategy) if what == "ledger" else None
  order = {"global_batch_size": models.BATCH_SIZE, "seed": 0, "rows": None, "shuffle": True}

  def read(position: int):
    if recorder:
      size = models.BATCH_SIZE
      recorder.reads(Reading(source=source, position=position, padded_batch_size=size, **order))
    return datasets.train_dataset(source, position=position, pad_multiple=replicas, **order)

  return Trainer(
    task=contenders.Classification(model),
    strategy=strategy,
    dataset_fn=read,
    global_batch_size=models.BATCH_SIZE,
    optimizer=keras.optimizers.Adam,
    observers=[recorder] if recorder else Communication.of(strategy) * (what == "communication"),
  )


if __name__ == "__main__":
  main()
