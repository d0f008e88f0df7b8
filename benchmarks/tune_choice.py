"""Is what --mode=tune takes the fastest? Holds it against every combination of what it tries.

    python -m benchmarks.tune_choice --gin_file=configs/digits_cnn.gin \
        --gin_param="auto.cpu_replicas = 2"

First it tunes as launch.py does, then each combination takes turns with the choice, a block of
steps each in a random order, so that what other programs do to the machine hits both. A figure is
the median over rounds, with quartiles, of how many times as fast the combination is; the choice
itself competes too, as a control. The best of many noisy figures is too high a figure, so the best
combination meets the choice once more. Exit status 1 if it is then faster by more than 5 %.
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

from framework import configurables, tune
from framework.errors import ConfigError
from framework.tune import Bindings, Contest, Option

ALLOWED = 1.05


def main(arguments: Sequence[str] | None = None) -> int:
  """Tunes, measures all combinations, prints a table."""
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
  """Returns every way to take at most one exact option of each axis."""
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
