"""Kills a run of a config with SIGKILL, starts it again, and compares it with an unbroken one.

    uv run python -m benchmarks.task_kills --gin_file=configs/pendulum_sac.gin \\
      --gin_param="run.train_steps = 1000" --gin_param="run.checkpoint_every_steps = 200" --kills 3

Every tensor of the last checkpoint, and every logged value that is not a time, must be equal to the
bit. A kill comes at a random moment after a random step.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import numpy as np
import tensorflow as tf

from loopwright.run_folder.checkpoints import START

ROOT = pathlib.Path(__file__).parents[1]
TIMES = ("wall_time", "input_wait_s", "start_s", "communication_s")
RATES = ("examples_per_second", "steps_per_second")


def main() -> int:
  arguments = parsed()
  with tempfile.TemporaryDirectory(prefix="task_kills_") as folder:
    whole, broken = pathlib.Path(folder) / "whole", pathlib.Path(folder) / "broken"
    finish(start(arguments, whole))
    last = max(record["step"] for record in records(whole))
    chance = random.Random(arguments.seed)
    for number in range(arguments.kills):
      after = chance.randrange(last * number // arguments.kills, last)
      where = killed(start(arguments, broken), broken, after, chance.random() * 0.5)
      print(f"kill {number + 1}: {where}", flush=True)
    finish(start(arguments, broken))
    different = differences(whole, broken, last)
  for line in different:
    print(line)
  print(f"{arguments.kills} kills: {'DIFFERENT' if different else 'identical to the bit'}")
  return int(bool(different))


def parsed() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--gin_file", required=True)
  parser.add_argument("--gin_param", action="append", default=[])
  parser.add_argument("--kills", type=int, default=2)
  parser.add_argument("--seed", type=int, default=0)
  return parser.parse_args()


def start(arguments: argparse.Namespace, model_dir: pathlib.Path) -> subprocess.Popen[bytes]:
  command = [sys.executable, ROOT / "launch.py", f"--gin_file={arguments.gin_file}"]
  command += [f"--gin_param={param}" for param in arguments.gin_param]
  command.append(f"--model_dir={model_dir}")
  return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> None:
  _, err = process.communicate()
  if process.returncode:
    raise SystemExit(f"the run ended with {process.returncode}: {err.decode()[-2000:]}")


def killed(
  process: subprocess.Popen[bytes], model_dir: pathlib.Path, after: int, delay_s: float
) -> str:
  """Kills the process `delay_s` after it has logged a step beyond `after`; says where."""
  while process.poll() is None:
    reached = max((record["step"] for record in records(model_dir)), default=0)
    if reached > after:
      time.sleep(delay_s)
      process.kill()
      process.communicate()
      return f"after step {reached}"
    time.sleep(0.05)
  process.communicate()
  return "had ended before"


def records(model_dir: pathlib.Path) -> list[dict[str, float]]:
  """Returns the whole lines of the log."""
  path = model_dir / "metrics.jsonl"
  lines = path.read_text().split("\n")[:-1] if path.exists() else []
  return [json.loads(line) for line in lines]


def differences(whole: pathlib.Path, broken: pathlib.Path, step: int) -> list[str]:
  found = [
    f"step {one['step']}: {name} {one[name]} against {other.get(name)}"
    for one, other in zip(records(whole), records(broken), strict=True)
    for name in one
    if name not in TIMES + RATES and one[name] != other.get(name)
  ]
  paths = [str(folder / "checkpoints" / f"ckpt-{step}") for folder in (whole, broken)]
  first, second = map(tf.train.load_checkpoint, paths)
  apart = {"_CHECKPOINTABLE_OBJECT_GRAPH", START}  # the second is each process's own
  names = set(first.get_variable_to_shape_map()) - apart
  if names ^ set(second.get_variable_to_shape_map()) - apart:
    found.append("the checkpoints have different tensors")
  same = (np.array_equal(first.get_tensor(name), second.get_tensor(name)) for name in sorted(names))
  return found + [f"{n} differs" for n, equal in zip(sorted(names), same, strict=True) if not equal]


if __name__ == "__main__":
  sys.exit(main())
