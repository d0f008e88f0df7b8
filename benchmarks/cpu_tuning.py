"""What each of the shortcuts for CPUs gains, on the shipped configs, with and without oneDNN.

    python -m benchmarks.cpu_tuning                                 # all, 40 minutes on two cores
    python -m benchmarks.cpu_tuning --configs digits_cnn --replicas 1

A row is a config on a number of replicas, of one or two logical CPUs. Its contenders are trainers
in one process that take turns: as it is, and without one shortcut each. A ratio says how many times
as fast the loop is with the shortcut: median and quartiles over the rounds. TF_ENABLE_ONEDNN_OPTS=0
stands for a CPU without AVX-512. docs/benchmarks.md has figures.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

CONFIGS = ("digits_cnn", "fashion_mnist_cnn", "fashion_mnist_gan", "fashion_mnist_vae",
           "language_model", "pendulum_sac", "sinusoid_maml")  # fmt: skip
AS_IS = "as it is"
BLOCK_S = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_tuning", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("--configs", nargs="+", default=CONFIGS)
  parser.add_argument("--replicas", nargs="+", type=int, default=[1, 2])
  parser.add_argument("--onednn", nargs="+", default=["0", "1"])
  parser.add_argument("--rounds", type=int, default=11)
  parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
  given = parser.parse_args(arguments)
  if given.one:
    print(json.dumps(measured(given.configs[0], given.replicas[0], given.rounds)))
    return 0
  header: list[str] = []
  for onednn in given.onednn:
    for config in given.configs:
      for replicas in given.replicas:
        row = _in_own_process(config, replicas, onednn, given.rounds)
        if not header:
          header = ["oneDNN", "config", "replicas", "steps/s", *row["ratios"]]
          print("| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
        cells = [onednn, config, str(replicas), f"{row['rate']:.0f}", *row["ratios"].values()]
        print("| " + " | ".join(cells) + " |", flush=True)
  return 0


def _in_own_process(config: str, replicas: int, onednn: str, rounds: int) -> dict:
  command = [sys.executable, "-m", "benchmarks.cpu_tuning", "--one", "--configs", config]
  command += ["--replicas", str(replicas), "--rounds", str(rounds)]
  environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": onednn}
  done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
  return json.loads(done.stdout.splitlines()[-1])


def measured(config: str, replicas: int, rounds: int) -> dict:
  """Returns steps per second as it is, and the ratios of the others to it, in this process."""
  import tensorflow as tf

  from benchmarks import turns
  from loopwright import configurables, run
  from loopwright.builder import made_task
  from loopwright.strategies import factories

  tf.get_logger().setLevel("ERROR")  # on tracing often
  configurables.parse([f"configs/{config}.gin"])
  factories.split_cpu(replicas)
  blocks: dict[str, Callable[[], object]] = {}
  steps = 0
  for name in shortcuts():
    strategy = factories.mirrored(cpu_replicas=replicas) if replicas > 1 else factories.default()
    with without(name):
      task = made_task(run.bound("task"))
      trainer = run.bound_recipe(replicas).trainer(task, strategy)
      trainer.train(tf.constant(3))
    if not steps:
      started = time.perf_counter()
      trainer.train(tf.constant(20))
      steps = max(3, int(BLOCK_S / ((time.perf_counter() - started) / 20)))
    blocks[name] = functools.partial(trainer.train, tf.constant(steps))
    blocks[name]()
  times = turns.seconds(blocks, rounds)
  rate = steps / sorted(times[AS_IS])[rounds // 2]
  ratios = {name: turns.ratio(times, AS_IS, name) for name in blocks if name != AS_IS}
  return {"rate": rate, "ratios": ratios}


def shortcuts() -> dict[str, Sequence[tuple[str, object]]]:
  """Returns what each contender lacks: name -> attributes to replace, by what."""
  missing: dict[str, Sequence[tuple[str, object]]] = {
    "small Adam by Keras": [("loopwright.optimizers.kernels.FORKED", range(0))],
    "no branch": [("loopwright.optimizers.kernels.masks", lambda *args, **kwargs: False)],
  }
  return {AS_IS: [], **missing, "both": [each for those in missing.values() for each in those]}


@contextlib.contextmanager
def without(name: str) -> Iterator[None]:
  """Builds and traces without a shortcut."""
  with contextlib.ExitStack() as stack:
    for target, replacement in shortcuts()[name]:
      stack.enter_context(mock.patch(target, replacement))
    yield


if __name__ == "__main__":
  sys.exit(main())
