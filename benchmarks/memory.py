"""What `loopwright memory` estimates beside what TensorFlow allocates, for whole configs.

  uv run --extra text python -m benchmarks.memory

Each config is trained in a process of its own, on one device and on two replicas. Measured are the
variables and the peak of TensorFlow's CPU allocator in a step; it counts tensors of 256 KiB and
more. The state of the input pipeline is no part of either.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

CONFIGS = (
  "fashion_mnist_cnn", "fashion_mnist_vae", "fashion_mnist_diffusion", "fashion_mnist_gan",
  "language_model", "digits_contrastive", "imdb", "imdb_lstm",
)  # fmt: skip
STEPS = 5


def compare(config: str, replicas: int, bindings: list[str]) -> None:
  """Prints one line: estimated, measured, their ratio."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  import dataclasses
  import statistics

  import tensorflow as tf

  from loopwright import configurables
  from loopwright.options import Numerics
  from loopwright.run_folder import assets
  from loopwright.runs import builder
  from loopwright.runs import from_config as runs
  from loopwright.strategies import factories
  from loopwright.tools import memory

  configurables.parse([f"configs/{config}.gin"], bindings)
  builder.set_globals(Numerics(precision=runs.bound("precision")))
  one, several = factories.one_device, factories.mirrored
  strategy = one() if replicas == 1 else several(cpu_replicas=replicas)
  task, learned = builder.made_task(runs.bound("task")), None
  learned = assets.provide_in_memory(task, learned)
  recipe = dataclasses.replace(runs.bound_recipe(), one_shape=True)
  trainer = recipe.trainer(task, strategy)
  other = builder.made_task(runs.bound("task"))
  assets.provide_in_memory(other, learned)
  single = recipe.trainer(other, one())
  need, _ = memory.estimate(single, trainer.padded_batch_size // replicas)
  if replicas > 1:
    need = memory.reduced(need)
  trainer.train(tf.constant(2))
  peaks = []
  for _ in range(STEPS):
    tf.config.experimental.reset_memory_stats("CPU:0")
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    trainer.train(tf.constant(1))
    peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)
  measured = need.weights + need.state + statistics.median(peaks) / replicas
  print(
    f"{config:24} {replicas:8} {need.total / memory.MIB:9.1f} {measured / memory.MIB:9.1f} "
    f"{need.total / measured:6.2f}",
    flush=True,
  )


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("--configs", nargs="+", default=CONFIGS)
  parser.add_argument("--replicas", nargs="+", type=int, default=[1, 2])
  parser.add_argument("--params", nargs="*", default=[], help="bindings for each config")
  parser.add_argument("--one", action="store_true", help="in this process")
  given = parser.parse_args()
  if given.one:
    compare(given.configs[0], given.replicas[0], given.params)
    return
  print(f"{'MiB on one device':24} replicas estimated  measured  ratio")
  for config in given.configs:
    for replicas in given.replicas:
      command = [sys.executable, "-m", "benchmarks.memory", "--one", "--configs", config]
      command += ["--replicas", str(replicas), "--params", *given.params]
      subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
  main()
