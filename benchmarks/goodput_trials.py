"""Is what `loopwright goodput` says what a stopwatch outside says? Kills a run, and compares.

    python -m benchmarks.goodput_trials --kills=3

The run has worker processes that are killed by SIGKILL at random times, and that are started again
after a random pause. From outside are known: the wall time from the first start to the last end,
the time from each kill to the next start, and the steps between the newest checkpoint and the last
line of the log when the kill came.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from loopwright.run_folder import layout
from loopwright.tools import goodput

REPOSITORY = Path(__file__).parents[1]


class Outside(NamedTuple):
  """What is known from outside: seconds in all, seconds down, steps done in vain."""

  wall_s: float
  down_s: float
  repeated: int


def trial(folder: str, *, kills: int, steps: int, seed: int) -> Outside:
  """Trains in a folder, with kills."""
  draws = random.Random(seed)
  bindings = [
    f"run.train_steps={steps}", "run.steps_per_loop=20", f"run.checkpoint_every_steps={steps // 8}",
    "run.eval_every_steps=1000000",
  ]  # fmt: skip
  command = [sys.executable, "launch.py", "train", "digits_cnn", *bindings]
  began = killed = time.monotonic()
  down_s, repeated = 0.0, 0
  for number in range(kills + 1):
    down_s += time.monotonic() - killed if number else 0.0
    process = subprocess.Popen(
      [*command, f"--model_dir={folder}"], cwd=REPOSITORY, stderr=subprocess.DEVNULL
    )
    if number == kills:
      assert process.wait() == 0
      break
    goal = steps * (number + 1) / (kills + 1) + draws.uniform(0, steps / 8)
    while last_step(folder) < goal and process.poll() is None:
      time.sleep(0.01)
    process.kill()
    killed = time.monotonic()
    process.wait()
    repeated += last_step(folder) - max(layout.checkpoint_steps(folder), default=0)
    time.sleep(draws.uniform(0.5, 3))
  return Outside(time.monotonic() - began, down_s, repeated)


def last_step(folder: str) -> int:
  """Returns the step of the last whole line of the log of training."""
  path = Path(folder, layout.METRICS)
  lines = path.read_text().split("\n")[:-1] if path.exists() else []
  trained = [record["step"] for line in lines if (record := json.loads(line))["split"] == "train"]
  return max(trained, default=0)


def compare(outside: Outside, found: goodput.Goodput) -> list[str]:
  """Returns a line for each figure that both know."""
  down_s = found.parts.get(goodput.DOWN, 0.0)
  off = 100 * (found.seconds / outside.wall_s - 1)
  return [
    f"wall time {found.seconds:.2f} s, stopwatch {outside.wall_s:.2f} s: {off:+.2f} %",
    f"down {down_s:.2f} s, stopwatch {outside.down_s:.2f} s",
    f"steps repeated {found.repeated}, by log and checkpoints {outside.repeated}",
    f"sum of shares {100 * sum(map(found.share, found.parts)):.6f} %",
  ]


def main() -> None:
  """Runs the trial and prints what both say."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--kills", type=int, default=3)
  parser.add_argument("--steps", type=int, default=4000)
  parser.add_argument("--seed", type=int, default=0)
  asked = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    outside = trial(folder, kills=asked.kills, steps=asked.steps, seed=asked.seed)
    found = goodput.read(folder)
    assert found is not None
    print(goodput.table(found, every=asked.steps // 8))
    print("\n".join(compare(outside, found)))


if __name__ == "__main__":
  main()
