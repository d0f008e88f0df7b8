"""Sharded optimizer state beside whole state: memory of each replica, and time of a step, in turns.

  uv run python -m benchmarks.sharded_state --replicas 2 3 4 --rounds 7

Trains the transformer of configs/language_model.gin with Adam on logical CPUs. Each round trains
both ways for some steps. The speed is time whole / time sharded: above 1 sharding is faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from loopwright.inputs import datasets
from loopwright.models import models
from loopwright.strategies import factories
from loopwright.tasks import language_model
from loopwright.trainer import Trainer

CONTEXT, BATCH = 64, 12


class Text:
  """Documents of random bytes."""

  def documents(self, split: str) -> list[bytes]:
    del split
    return [np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8).tobytes()]


def trainer_of(replicas: int, *, shard: bool) -> Trainer:
  task = language_model.LanguageModel(corpus=Text(), context=CONTEXT)
  source = task.source("train")
  return Trainer(
    task=task, strategy=factories.mirrored(cpu_replicas=replicas), global_batch_size=BATCH,
    optimizer=lambda: keras.optimizers.Adam(1e-3), shard_optimizer_state=shard,
    dataset_fn=lambda position: datasets.train_dataset(
      source, global_batch_size=BATCH, pad_multiple=BATCH, position=position,
      preprocess=task.preprocess,
    ),
  )  # fmt: skip


def slot_bytes(trainer: Trainer) -> list[int]:
  """Returns the bytes of the optimizer's slots on each replica."""
  [adam] = trainer.parts.optimizers.values()
  slots = [models.raw(v) for v in adam.optimizer.variables]
  local = trainer.strategy.experimental_local_results
  copies = [local(v) for v in slots if v.shape.rank]
  return [
    sum(c.dtype.size * c.shape.num_elements() for c in each) for each in zip(*copies, strict=True)
  ]


def seconds(trainer: Trainer, steps: int) -> float:
  began = time.perf_counter()
  trainer.train(tf.constant(steps))
  return (time.perf_counter() - began) / steps


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--replicas", type=int, nargs="+", default=[2, 3, 4])
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--steps", type=int, default=10)
  arguments = parser.parse_args()
  factories.split_cpu(max(arguments.replicas))
  print("| replicas | MB of slots a replica, whole | sharded | speed: median (least to most) |")
  print("|---|---|---|---|")
  for replicas in arguments.replicas:
    whole, sharded = (trainer_of(replicas, shard=shard) for shard in (False, True))
    for one in (whole, sharded):
      seconds(one, 2)
    ratios = sorted(
      seconds(whole, arguments.steps) / seconds(sharded, arguments.steps)
      for _ in range(arguments.rounds)
    )
    sizes = [f"{max(slot_bytes(one)) / 1e6:.2f}" for one in (whole, sharded)]
    middle = statistics.median(ratios)
    speed = f"{middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    print(f"| {replicas} | {sizes[0]} | {sizes[1]} | {speed} |", flush=True)


if __name__ == "__main__":
  main()
