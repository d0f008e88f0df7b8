"""`loopwright repeat my.gin --seeds=5`: the same run with several seeds; how its results differ.

Its trials are those of a sweep (loopwright/tools/sweep), and a trial's number is its seed.
"""

from __future__ import annotations

import os
from pathlib import Path

from loopwright.commands.arguments import Parsed, config_of, define_config_flags
from loopwright.commands.parser import Parser
from loopwright.host import urls


def define(parser: Parser) -> None:
  """Adds the command's flags."""
  define_config_flags(parser)
  told = "How many, from 0 on; more of them go on with those that are there."
  parser.whole("seeds", 5, told, at_least=2, at_most=10_000)
  parser.whole("jobs", 1, "How many runs at once.", at_least=1)
  parser.text("dir", None, "The folder; default: runs/<config>-repeat.")


def run(parsed: Parsed) -> int:
  """Trains with each seed, or goes on, and prints a table; returns the exit status (host).

  Raises:
    ConfigError: a mistake in flags or config, or Optuna is missing.
  """
  values = parsed.values
  files, params = config_of(parsed.arguments, needed=not values.gin_file)
  files, params = [*values.gin_file, *files], [*values.gin_param, *params]
  urls.require_path("--dir", values.dir or "", "the study and the runs are there")
  from loopwright.tools import sweep
  from loopwright.tools.runs.repetitions import SEED

  sweep.require_optuna("a repetition")
  from loopwright.tools.sweep import space, study

  return sweep.run_trials(
    files, params, [space.Dimension(SEED, (), 0, 2**31 - 1)],
    folder=values.dir or os.path.join("runs", f"{Path(files[0]).stem}-repeat"),
    sampling=study.Sampling("in order", 0, prune=False), trials=values.seeds, jobs=values.jobs,
  )  # fmt: skip
