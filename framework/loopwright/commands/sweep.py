"""`loopwright sweep my.gin --vary '...'`; docs/sweeps.md describes it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from loopwright.commands.arguments import Parsed, config_of, define_config_flags
from loopwright.commands.parser import Parser
from loopwright.errors import UsageError
from loopwright.host import urls
from loopwright.run_folder.folders import direction

if TYPE_CHECKING:
  from loopwright.tools.sweep.space import Goal

SAMPLERS = ("tpe", "random", "grid")


def define(parser: Parser) -> None:
  """Adds the command's flags."""
  define_config_flags(parser)
  parser.texts(
    "vary", "What varies, such as 'keras.Adam.learning_rate = log(1e-4, 1e-1)' or "
    "'run.seed = [0, 1]'; repeatable.",
  )  # fmt: skip
  parser.choice("sampler", "tpe", SAMPLERS, "How values are chosen.")
  parser.whole("trials", None, "How many; default: 20, of a grid all.", at_least=1)
  parser.whole("jobs", 1, "How many trials at once.", at_least=1)
  parser.whole("seed", 0, "Of the sampler.", at_most=2**31 - 1)
  parser.text(
    "metric", None, "Of the evaluations; default: that of EarlyStopping, BestCheckpoint or Export, "
    "else loss.",
  )  # fmt: skip
  parser.switch("maximize", "More of the metric is better.")
  parser.switch("minimize", "Less of the metric is better.")
  parser.switch("prune", "End trials that are worse than the median.")
  parser.text("dir", None, "The sweep folder; default: runs/<config>-sweep.")
  parser.text(
    "storage", None, "An Optuna storage URL, which machines can share; default: a file in the "
    "sweep folder.",
  )  # fmt: skip


def run(parsed: Parsed) -> int:
  """Runs or continues a sweep and prints its table; returns the exit status (host).

  Raises:
    ConfigError: a mistake in flags, space or config, or Optuna is missing.
  """
  values = parsed.values
  files, params = config_of(parsed.arguments, needed=not values.gin_file)
  files, params = [*values.gin_file, *files], [*values.gin_param, *params]
  urls.require_path("--dir", values.dir or "", "the study and the runs of a sweep are there")
  from loopwright.tools import sweep

  sweep.require_optuna("a sweep")
  from loopwright.tools.sweep import space, study

  return sweep.run_trials(
    files, params, space.read(values.vary, listed=values.sampler == "grid"),
    folder=values.dir or os.path.join("runs", f"{Path(files[0]).stem}-sweep"),
    sampling=study.Sampling(values.sampler, values.seed, prune=values.prune),
    trials=values.trials, jobs=values.jobs, storage=values.storage,
    goal=lambda of_config: _goal(values, of_config),
  )  # fmt: skip


def _goal(values: argparse.Namespace, of_config: Goal | None) -> Goal:
  """Returns the metric and its direction: of the flags, else of the config, else the loss."""
  from loopwright.tools.sweep.space import Goal

  if values.maximize and values.minimize:
    raise UsageError("received both --maximize and --minimize; remove one")
  metric = values.metric or (of_config.metric if of_config else "loss")
  if values.maximize or values.minimize:
    return Goal(metric, values.maximize)
  if of_config and of_config.metric == metric:
    return of_config
  if not (best := direction(metric)):
    raise UsageError(f"--metric={metric}: is more better, or less? add --maximize or --minimize")
  return Goal(metric, best == "max")
