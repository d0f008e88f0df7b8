"""Weights split over a mesh's rows beside whole ones: memory, time, and what the collectives carry.

  uv run python -m benchmarks.sharded_parameters --devices 2 3

Trains a transformer with Adam on logical CPUs. Each way has a process of its own for the memory:
what the variables of one device need, and the peak of TensorFlow's allocator in a step, divided by
the devices. The collectives are those of the program that DTensor makes of a step. The CPU time of
a step is taken in turns, in one process.
"""

from __future__ import annotations

import argparse
import glob
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from loopwright.inputs import datasets
from loopwright.models import models
from loopwright.strategies import factories, placement
from loopwright.tasks import language_model
from loopwright.trainer import Trainer

CONTEXT, BATCH, WIDTH, LAYERS = 64, 12, 384, 4
WAYS = ("mirrored", "mirrored, sharded state", "mesh", "mesh, recomputed", "sharded",
        "sharded, recomputed")  # fmt: skip
MIB = 2**20


class Text:
  """Documents of random bytes."""

  def documents(self, split: str) -> list[bytes]:
    del split
    return [np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8).tobytes()]


def trainer_of(way: str, count: int) -> Trainer:
  keras.utils.set_random_seed(5)
  if way.startswith("mirrored"):
    strategy = factories.mirrored(cpu_replicas=count)
  else:
    shards = way.startswith("sharded")
    strategy = factories.model_parallel(mesh={"batch": count}, shard_parameters=shards)
  task = language_model.LanguageModel(
    corpus=Text(), context=CONTEXT,
    network=lambda: language_model.transformer(layers=LAYERS, width=WIDTH, heads=4, dropout=0.0),
  )  # fmt: skip
  source = task.source("train")
  return (placement.of(strategy).trainer or Trainer)(
    task=task, strategy=strategy, global_batch_size=BATCH,
    optimizer=lambda: keras.optimizers.Adam(1e-3),
    shard_optimizer_state=way == "mirrored, sharded state",
    recompute=["block_.*"] if way.endswith("recomputed") else [],
    dataset_fn=lambda position: datasets.train_dataset(
      source, global_batch_size=BATCH, pad_multiple=BATCH, position=position,
      preprocess=task.preprocess,
    ),
  )  # fmt: skip


def weights(trainer: Trainer) -> list[np.ndarray]:
  return [models.raw(v).numpy() for v in models.trainable_variables(trainer.task.model)]


def own_bytes(trainer: Trainer) -> int:
  """Returns the bytes of weights, slots and the optimizer's parts on the first device."""
  [one] = trainer.parts.optimizers.values()
  kept = [*models.trainable_variables(trainer.task.model), *one.optimizer.variables]
  kept += one.fusion.variables
  raws = {id(models.raw(v)): models.raw(v) for v in kept}.values()
  sizes = []
  for raw in raws:
    layout = getattr(raw, "layout", None)
    parts = int(np.prod([layout.num_shards(n) for n in range(layout.rank)])) if layout else 1
    sizes.append(raw.shape.num_elements() * raw.dtype.size // parts)
  return sum(sizes)


def memory(way: str, count: int) -> None:
  trainer = trainer_of(way, count)
  trainer.train(tf.constant(3))
  peaks = []
  for _ in range(5):
    weights(trainer)  # waits for the mesh
    tf.config.experimental.reset_memory_stats("CPU:0")
    trainer.train(tf.constant(1))
    weights(trainer)
    peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
  print(f"{own_bytes(trainer) / MIB:.1f} | {statistics.median(peaks) / count / MIB:.1f}")


def collectives(folder: str) -> str:
  """Returns what DTensor's last program, that of the step, carries: number and MiB."""
  programs = sorted(glob.glob(f"{folder}/*after_DTensorSPMDExpansion*"))
  found: dict[str, list[float]] = {}
  lines = pathlib.Path(programs[-1]).read_text().splitlines() if programs else []
  for line in lines:
    if made := re.search(r'"tf\.DTensor(AllGather|AllReduce)".*-> tensor<([\dx]*)x?f32>', line):
      size = np.prod([int(n) for n in made[2].split("x") if n]) * 4
      found.setdefault(made[1], []).append(float(size))
  return ", ".join(f"{n} {len(each)}: {sum(each) / MIB:.1f}" for n, each in sorted(found.items()))


def times(ways: list[str], count: int, rounds: int, steps: int) -> None:
  trainers = {way: trainer_of(way, count) for way in ways}
  taken: dict[str, list[float]] = {way: [] for way in ways}
  for turn in range(rounds + 1):
    for way, trainer in trainers.items():
      began = time.process_time()
      trainer.train(tf.constant(steps))
      weights(trainer)
      if turn:
        taken[way].append((time.process_time() - began) / steps)
  end = weights(trainers["mesh"])
  for way, trainer in trainers.items():
    apart = max(float(abs(a - b).max()) for a, b in zip(end, weights(trainer), strict=True))
    ratios = [a / b for a, b in zip(taken[way], taken["mesh"], strict=True)]
    middle = statistics.median(ratios)
    print(
      f"{count} | {way} | {statistics.median(taken[way]) * 1e3:.0f} ms of CPU a step, of mesh's "
      f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | differs by {apart:.1e}", flush=True,
    )  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--devices", type=int, nargs="+", default=[2, 3])
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--steps", type=int, default=3)
  parser.add_argument("--ways", nargs="+", default=WAYS)
  parser.add_argument("--one", nargs=2)
  given = parser.parse_args()
  if given.one:
    way, count = given.one
    if way == "times":
      times(given.ways, int(count), given.rounds, given.steps)
    else:
      memory(way, int(count))
    return
  command = [sys.executable, "-m", "benchmarks.sharded_parameters"]
  command += ["--rounds", str(given.rounds), "--steps", str(given.steps), "--ways", *given.ways]
  print("devices | way | MiB of weights and state on one | peak of a step | collectives, MiB")
  for count in given.devices:
    for way in given.ways:
      with tempfile.TemporaryDirectory() as folder:
        dumps = {"TF_DUMP_GRAPH_PREFIX": folder, "TF_CPP_VMODULE": "dtensor_mlir_passes=1"}
        done = subprocess.run(
          [*command, "--one", way, str(count)], env=os.environ | dumps, check=True,
          capture_output=True, text=True,
        )  # fmt: skip
        print(count, way, done.stdout.strip(), collectives(folder), sep=" | ", flush=True)
    subprocess.run([*command, "--one", "times", str(count)], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
  main()
