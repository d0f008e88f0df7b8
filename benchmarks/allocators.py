"""Compares training with the C library's memory allocator and with others, on Linux.

    apt-get install libjemalloc2 libtcmalloc-minimal4
    python -m benchmarks.allocators libjemalloc.so.2 libtcmalloc_minimal.so.4

The libraries are loaded by LD_PRELOAD. Every figure is of a new process; the contenders take turns.
docs/benchmarks.md has the results.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np

BLOCK_STEPS = {
  "mlp": 400, "cnn": 60, "many": 300, "wide": 40, "embedding": 40, "mobilenet": 2,
  "language_model": 4,
}  # fmt: skip
BLOCKS = 7
COLUMNS = {"start_s": "start, s", "step_us": "a step, us", "mib": "peak memory, MiB"}
"""The start is what the first block takes more than the others: tracing, optimizing the graph."""
USUAL = "the C library's"

Figures = dict[str, float]
"""Name of `COLUMNS` -> figure of one process."""


def main(arguments: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.allocators", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("libraries", nargs="+", help="names or paths, for LD_PRELOAD")
  parser.add_argument("--models", nargs="+", default=list(BLOCK_STEPS), choices=BLOCK_STEPS)
  parser.add_argument("--replicas", type=int, default=1)
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)  # in its process
  options = parser.parse_args(arguments)
  if options.measure:
    print(json.dumps(measure(options.models[0], options.replicas)))
    return
  print("| model | allocator |", " | ".join(COLUMNS.values()), "|")
  print("|---|---|---|---|---|")
  for model in options.models:
    found = rounds(model, options)
    for name in found:
      cells = [cell(found, name, column) for column in COLUMNS]
      print(f"| {model} x{options.replicas} | {name} |", " | ".join(cells), "|", flush=True)


def rounds(model: str, options: argparse.Namespace) -> dict[str, list[Figures]]:
  """Returns allocator -> figures of each round."""
  found: dict[str, list[Figures]] = {name: [] for name in (USUAL, *options.libraries)}
  order = random.Random(0)
  for _ in range(options.rounds):
    for name in order.sample(list(found), len(found)):
      found[name].append(process(name, model, options.replicas))
  return found


def process(name: str, model: str, replicas: int) -> Figures:
  """Returns the figures of a new process with an allocator; raises RuntimeError if it fails."""
  command = [sys.executable, "-m", "benchmarks.allocators", "--measure", name]
  library = "" if name == USUAL else name
  done = subprocess.run(
    [*command, "--models", model, "--replicas", str(replicas)],
    capture_output=True, text=True, env={**os.environ, "LD_PRELOAD": library},
  )  # fmt: skip
  if done.returncode or "cannot be preloaded" in done.stderr:
    raise RuntimeError(f"{model} with {name}: {done.stderr[-500:]}")
  return json.loads(done.stdout.splitlines()[-1])


def measure(model: str, replicas: int) -> Figures:
  """Returns the figures of this process."""
  os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
  from benchmarks import contenders

  steps = BLOCK_STEPS[model]
  block = contenders.make("loopwright", model, replicas, steps).block
  seconds = []
  for _ in range(1 + BLOCKS):
    started = time.perf_counter()
    block()
    seconds.append(time.perf_counter() - started)
  block_s = statistics.median(seconds[1:])
  memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
  return {"start_s": seconds[0] - block_s, "step_us": block_s / steps * 1e6, "mib": memory}


def cell(found: dict[str, list[Figures]], name: str, column: str) -> str:
  """Returns the median, and the ratio to the usual allocator with quartiles over the rounds."""
  ours, usual = (np.array([one[column] for one in found[n]]) for n in (name, USUAL))
  if name == USUAL:
    return f"{np.median(ours):.4g}"
  low, middle, high = np.quantile(ours / usual, [0.25, 0.5, 0.75])
  return f"{np.median(ours):.4g}, {middle:.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
  main()
