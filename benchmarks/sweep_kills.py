"""Kills sweeps again and again, at random moments, and starts the same command until it ends.

  python -m benchmarks.sweep_kills --sweeps 4

Trials are tests/support/trial_stub.py, without TensorFlow, so that there is time for many kills.
Each sweep must end with every trial once: with the values that its number gives, and each of its
steps once, without a gap. Exit status 1 if anything else happens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support import trial_stub

TRIALS = 8
MOMENTS_S = (0.5, 6.0)
"""A sweep is killed after a time between these; alone it takes about four seconds."""
SWEEP = f"""if True:
  import sys
  from loopwright import commands
  from loopwright.commands import process
  from loopwright.tools.sweep import jobs, runner, space
  runner.POLL_S = 0.02
  jobs.Command.of = lambda self, values, model_dir: [
    sys.executable, {trial_stub.__file__!r}, "train", "--gin_param=pace = 0.05",
    *(f"--gin_param={{each}}" for each in space.bindings(values)), f"--model_dir={{model_dir}}",
  ]
  space.in_another_process = lambda *_: space.Facts({{}}, None)
  process.run(commands.main, ["loopwright", "sweep", *sys.argv[1:]])
"""
ROOT = Path(__file__).resolve().parents[1]


def killed(folder: Path, rng: random.Random) -> int:
  """Runs a sweep to its end; returns how often it was killed."""
  given = ["any.gin", f"--dir={folder}", "--vary=x = uniform(0, 1)", "--sampler=random"]
  given += [f"--trials={TRIALS}", "--jobs=2", "--prune"]
  kills = 0
  while True:
    with subprocess.Popen(
      [sys.executable, "-c", SWEEP, *given],
      stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as sweep:  # fmt: skip
      try:
        if status := sweep.wait(rng.uniform(*MOMENTS_S)):
          raise SystemExit(f"a sweep ended with status {status}")
        return kills
      except subprocess.TimeoutExpired:
        sweep.kill()
        kills += 1


def found(folder: Path) -> list[str]:
  """Returns the values of the trials, by number; ends the program if a step is not there once."""
  values = []
  for number in range(TRIALS):
    trial = folder / f"trial-{number:04d}"
    starts = [json.loads(line)["values"]["x"] for line in (trial / "starts").open()]
    steps = [json.loads(line)["step"] for line in (trial / "metrics.jsonl").open()]
    if len({*starts}) != 1 or steps != [*range(1, len(steps) + 1)]:
      raise SystemExit(f"{trial}: {starts} {steps}")
    values.append(starts[0])
  if len([*folder.glob("trial-*")]) != TRIALS:
    raise SystemExit(f"{folder} has other trials too")
  return values


def main() -> None:
  """Runs the sweeps and prints how often they were killed."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("--sweeps", type=int, default=4)
  parser.add_argument("--seed", type=int, default=0)
  options = parser.parse_args()
  rng, expected = random.Random(options.seed), None
  with tempfile.TemporaryDirectory() as base:
    for number in range(options.sweeps):
      folder = Path(base, str(number))
      kills = killed(folder, rng)
      values = found(folder)
      if values != (expected := expected or values):
        raise SystemExit(f"the values are {values}, not {expected}")
      print(f"sweep {number}: {kills} kills, every trial once", flush=True)


if __name__ == "__main__":
  main()
