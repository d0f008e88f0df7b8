"""A run that is killed, with a stopwatch outside: what `loopwright goodput` must say of it.

The run has worker processes that are killed by SIGKILL at random times, and that are started again
after a random pause. From outside are known: the wall time from the first start to the last end,
the time from each kill to the next start, and the steps between the newest checkpoint and the last
line of the log when the kill came. tests/unit/monitoring/test_goodput.py compares.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from loopwright.run_folder import layout

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
