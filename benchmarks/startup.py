"""From the command to the first step: Loopwright beside a script that an expert writes by hand.

    python -m benchmarks.startup                                # 15 minutes
    python -m benchmarks.startup --models digits --rounds 3

Every figure is of a new process, with all imports; the two contenders take turns. Loopwright runs
its command with a config, run folder, checks and all. The script does what training needs, and no
more: imports, data, model, optimizer, a compiled loop. Both end with the first step's loss on the
host. To the script scikit-learn and matplotlib are not installed: `import keras` imports both if
they are, which takes 1 to 2 s, and Loopwright does not let it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

WHO = ("loopwright", "by hand")
MODELS = ("digits", "mobilenet", "language_model")
PARTS = ("imports", "data, model, optimizer", "proof", "input pipeline", "tracing", "first step")
_TIMEOUT_S = 300.0

Seconds = Mapping[str, float]
"""Seconds of each of `PARTS`, and of "cpu", the processor time of all of them."""
Rounds = Sequence[Mapping[str, Seconds]]
"""In each round: contender -> seconds."""


def main(arguments: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("--models", default=",".join(MODELS))
  parser.add_argument("--replicas", default="1,2", help="which numbers of replicas")
  parser.add_argument("--rounds", type=int, default=7, help="after one that does not count")
  parser.add_argument("--json", help="write all figures to this file")
  options = parser.parse_args(arguments)
  if unknown := {*options.models.split(",")} - {*MODELS}:
    parser.error(f"unknown model {sorted(unknown)}; choose from {', '.join(MODELS)}")
  measured: dict[str, Rounds] = {}
  for model in options.models.split(","):
    for replicas in map(int, options.replicas.split(",")):
      measured[f"{model} x{replicas}"] = rounds(model, replicas, options.rounds)
      if options.json:
        with open(options.json, "w") as file:
          json.dump(measured, file)
  print(report(measured))


def rounds(model: str, replicas: int, count: int) -> Rounds:
  """Returns the figures of `count` rounds; the first round of all fills the caches of files."""
  found = []
  for number in range(count + 1):
    order = WHO if number % 2 else WHO[::-1]
    found.append({who: process(who, model, replicas) for who in order})
    print(f"{model} x{replicas}: round {number} of {count}", file=sys.stderr, flush=True)
  return found[1:]


def process(who: str, model: str, replicas: int) -> Seconds:
  """Runs a new process up to its first step; raises RuntimeError if it fails."""
  with tempfile.TemporaryDirectory() as folder:
    result = os.path.join(folder, "seconds.json")
    sides = [sys.executable, "-m", "benchmarks.startup_sides", who, model, str(replicas), folder]
    command = [*sides, result, repr(time.perf_counter())]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, env=environment)
    if not os.path.exists(result):
      end = "\n".join(done.stderr.decode(errors="replace").splitlines()[-5:])
      raise RuntimeError(f"{who}, {model} x{replicas}, ended before its first step: {end}")
    with open(result) as file:
      return json.load(file)


def report(measured: Mapping[str, Rounds]) -> str:
  """Returns Markdown tables: the ratios of Loopwright to the script, and the seconds of parts."""
  first = ["| | Loopwright, s | by hand, s | ratio | ratio of processor time |", f"|{'---|' * 5}"]
  parts = [f"| seconds | | {' | '.join(PARTS)} |", f"|{'---|' * (2 + len(PARTS))}"]
  for name, figures in measured.items():
    ours, theirs = ([total(each[who]) for each in figures] for who in WHO)
    cpu = [each[WHO[0]]["cpu"] / each[WHO[1]]["cpu"] for each in figures]
    ratio = quartiles(np.divide(ours, theirs))
    first.append(
      f"| {name} | {np.median(ours):.2f} | {np.median(theirs):.2f} | {ratio} | {quartiles(cpu)} |"
    )
    for who in WHO:
      middle = [f"{np.median([each[who].get(p, 0.0) for each in figures]):.2f}" for p in PARTS]
      parts.append(f"| {name} | {who} | {' | '.join(middle)} |")
  return "\n".join([*first, "", *parts])


def total(seconds: Seconds) -> float:
  return sum(seconds.get(part, 0.0) for part in PARTS)


def quartiles(values: Iterable[float]) -> str:
  low, middle, high = np.quantile(np.array(list(values)), [0.25, 0.5, 0.75])
  return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
  main()
