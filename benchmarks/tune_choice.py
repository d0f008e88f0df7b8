"""Checks whether --mode=tune finds the fastest setting, against all combinations that it tries.

    python -m benchmarks.tune_choice --gin_file=configs/digits_cnn.gin \
        --gin_param="auto.cpu_replicas = 2"

It tunes as launch.py does. Then each combination and the choice take turns, one block of steps
each, in a random order, so other programs affect both alike. A figure is the median over rounds,
with quartiles, of the combination's speed relative to the choice's; the choice itself is measured
too, as a control. The best of many noisy figures is biased upwards, so the best combination is
measured once more. Exit status 1 if it is then more than 5 % faster.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from loopwright import configurables
from loopwright.errors import ConfigError
from loopwright.tools import tune
from loopwright.tools.tune import Bindings, Contest, Option

ALLOWED = 1.05


def main(arguments: Sequence[str] | None = None) -> int:
  options = _parse(arguments)
  files, params = options.gin_file, options.gin_param
  began = time.perf_counter()
  with tempfile.TemporaryDirectory() as folder:
    chosen = tune.tune(files, params, model_dir=folder, show=_say).bindings
  _say(f"tuned in {time.perf_counter() - began:.0f} s\n")
  configurables.parse(files, params)
  contest = Contest(files, params, rounds=options.rounds, block_s=options.block_s)
  own = contest.contender({})
  found = {}
  for bindings in combinations(tune.axes(own.trainer, own.step_s)):
    name = str(Option(bindings)) or "(original config)"
    try:
      found[name] = bindings, contest.compare(chosen, bindings)
    except ConfigError:
      continue
    _say(f"{found[name][1]}  {name}{'  (the choice)' if bindings == chosen else ''}")
  best = max(found, key=lambda name: found[name][1].median)
  bindings, ratio = found[best]
  _say(f"\nof {len(found)} combinations the best is {best}: {ratio} times as fast as the choice")
  if bindings != chosen:
    ratio = contest.compare(chosen, bindings)
    _say(f"once more: {ratio}")
  return 1 if ratio.median > ALLOWED else 0


def combinations(axes: Sequence[Sequence[Option]]) -> list[Bindings]:
  """Returns every combination of at most one exact option per axis."""
  exact = [[Option({}), *(o for o in options if o.exact)] for options in axes]
  return [
    {name: value for option in options for name, value in option.bindings.items()}
    for options in itertools.product(*exact)
  ]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.tune_choice", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("--gin_file", action="append", required=True, help="repeatable")
  parser.add_argument("--gin_param", action="append", default=[], help="repeatable")
  parser.add_argument("--rounds", type=int, default=tune.ROUNDS, help="(default: %(default)s)")
  parser.add_argument(
    "--block_s", type=float, default=tune.BLOCK_S, help="seconds a turn (default: %(default)s)"
  )
  return parser.parse_args(arguments)


def _say(line: str) -> None:
  print(line, flush=True)


if __name__ == "__main__":
  sys.exit(main())
