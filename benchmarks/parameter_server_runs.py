"""Runs asynchronous training from start to end; checks accuracy and the exact number of steps.

    python -m benchmarks.parameter_server_runs --runs 10

Each run is launch.py with configs/fashion_mnist_cnn.gin on a local cluster of 2 workers, 2
parameter servers and a chief; every second run has Keras 2's model and optimizer instead of Keras
3's. The counts are read from the last checkpoint: the framework's global step and position, and the
optimizer's own iterations; each must be exact. Exit status 1 if a count is wrong, a run fails, or
an accuracy is below 0.90.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIG = "configs/fashion_mnist_cnn.gin"
BATCH, LEAST = 128, 0.90
KERAS_2 = """
import benchmarks.tf_keras_networks
ImageClassification.network = @tf_keras_cnn
run.optimizer = @tf_keras.Adam
tf_keras.Adam.learning_rate = @linear_warmup()
"""
REPLACED = ("ImageClassification.network", "run.optimizer", "cnn.", "keras.Adam.")


def main(arguments: Sequence[str] | None = None) -> int:
  options = _parse(arguments)
  failed = 0
  print("run  Keras  accuracy  steps  examples  iterations  seconds")
  for number in range(options.runs):
    with tempfile.TemporaryDirectory() as folder:
      keras = 2 if number % 2 else 3
      failed += not _run(number, keras, options.steps, Path(folder))
  print(f"{options.runs - failed} of {options.runs} runs are right")
  return 1 if failed else 0


def _run(number: int, keras: int, steps: int, folder: Path) -> bool:
  config = REPOSITORY / CONFIG
  if keras == 2:
    kept = [line for line in config.read_text().splitlines() if not line.startswith(REPLACED)]
    config = folder / "keras_2.gin"
    config.write_text("\n".join(kept) + KERAS_2)
  began = time.monotonic()
  done = subprocess.run(
    [
      sys.executable, "launch.py", f"--gin_file={config}", f"--model_dir={folder / 'run'}",
      "--gin_param=run.strategy = @parameter_server", f"--gin_param=run.train_steps = {steps}",
      f"--gin_param=run.seed = {number}", "--local_workers=2", "--local_ps=2",
    ],
    cwd=REPOSITORY, capture_output=True, text=True, check=False,
  )  # fmt: skip
  seconds = time.monotonic() - began
  if done.returncode:
    print(f"{number:3}  {keras:5}  ended with status {done.returncode}: {done.stderr[-500:]}")
    return False
  lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
  accuracy = [line for line in lines if line["split"] == "eval"][-1]["accuracy"]
  made, examples, iterations = _counted(folder / "run")
  counts = f"{made:5}  {examples:8}  {iterations:10}"
  print(f"{number:3}  {keras:5}  {accuracy:8.4f}  {counts}  {seconds:7.0f}", flush=True)
  return accuracy >= LEAST and made == iterations == steps and examples == steps * BATCH


def _counted(run: Path) -> tuple[int, int, int]:
  reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(run / "checkpoints")))

  def value(*names: str) -> int:
    suffix = "/.ATTRIBUTES/VARIABLE_VALUE"
    [key] = [
      key for key in reader.get_variable_to_shape_map()
      if key.endswith(suffix) and key.removesuffix(suffix).endswith(names)
    ]  # fmt: skip
    return int(reader.get_tensor(key))

  return value("global_step"), value("position"), value("/iterations", "/_iterations", "/iter")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.parameter_server_runs", description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )  # fmt: skip
  parser.add_argument("--runs", type=int, default=10, help="how many (default: %(default)s)")
  parser.add_argument("--steps", type=int, default=3000, help="of each (default: %(default)s)")
  return parser.parse_args(arguments)


if __name__ == "__main__":
  sys.exit(main())
