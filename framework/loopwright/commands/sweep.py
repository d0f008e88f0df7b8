"""`loopwright sweep my.gin --vary '...'`; docs/sweeps.md describes it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from loopwright.commands.arguments import Parsed, config_of, define_config_flags
from loopwright.host import stores
from loopwright.tools import sweep

if TYPE_CHECKING:
  from loopwright.tools.sweep.space import Goal

SAMPLERS = ("tpe", "random", "grid")
KNOWN_GOALS = {"loss": False, "accuracy": True}
"""Metrics whose direction is clear, and whether more is better."""


def define(values: flags.FlagValues) -> None:
  """Adds the command's flags."""
  define_config_flags(values)
  flags.DEFINE_multi_string(
    "vary", [], "What varies, such as 'keras.Adam.learning_rate = log(1e-4, 1e-1)' or "
    "'run.seed = [0, 1]'; repeatable.", values,
  )  # fmt: skip
  flags.DEFINE_string("space", None, "A file with a line for each --vary.", values)
  flags.DEFINE_enum("sampler", "tpe", SAMPLERS, "How values are chosen.", values)
  flags.DEFINE_integer("trials", None, "How many; default: 20, of a grid all.", 1, None, values)
  flags.DEFINE_integer("jobs", 1, "How many trials at once.", 1, None, values)
  flags.DEFINE_integer("seed", 0, "Of the sampler.", 0, 2**31 - 1, values)
  flags.DEFINE_string(
    "metric", None, "Of the evaluations; default: that of EarlyStopping, BestCheckpoint or Export, "
    "else loss.", values,
  )  # fmt: skip
  flags.DEFINE_boolean("maximize", False, "More of the metric is better.", values)
  flags.DEFINE_boolean("minimize", False, "Less of the metric is better.", values)
  flags.DEFINE_boolean("prune", False, "End trials that are worse than the median.", values)
  flags.DEFINE_string("dir", None, "The sweep folder; default: runs/<config>-sweep.", values)
  flags.DEFINE_string(
    "storage", None, "An Optuna storage URL, which machines can share; default: a file in the "
    "sweep folder.", values,
  )  # fmt: skip


def run(parsed: Parsed) -> int:
  """Runs or continues a sweep and prints its table; returns the exit status (host).

  Raises:
    ConfigError: a mistake in flags, space or config, or Optuna is missing.
  """
  values = parsed.values
  files, params = config_of(parsed.arguments, needed=not values.gin_file)
  files, params = [*values.gin_file, *files], [*values.gin_param, *params]
  stores.require_path("--dir", values.dir or "", "the study and the runs of a sweep are there")
  sweep.require_optuna("a sweep")
  from loopwright.tools.sweep import space, study

  return sweep.run_trials(
    files, params, space.read(values.vary, values.space, listed=values.sampler == "grid"),
    folder=values.dir or os.path.join("runs", f"{Path(files[0]).stem}-sweep"),
    sampling=study.Sampling(values.sampler, values.seed, prune=values.prune),
    trials=values.trials, jobs=values.jobs, storage=values.storage,
    goal=lambda of_config: _goal(values, of_config),
  )  # fmt: skip


def _goal(values: flags.FlagValues, of_config: Goal | None) -> Goal:
  """Returns the metric and its direction: of the flags, else of the config, else the loss."""
  from loopwright.tools.sweep.space import Goal

  if values.maximize and values.minimize:
    raise flags.Error("received both --maximize and --minimize; remove one")
  metric = values.metric or (of_config.metric if of_config else "loss")
  if values.maximize or values.minimize:
    return Goal(metric, values.maximize)
  if of_config and of_config.metric == metric:
    return of_config
  if metric not in KNOWN_GOALS:
    raise flags.Error(f"--metric={metric}: is more better, or less? add --maximize or --minimize")
  return Goal(metric, KNOWN_GOALS[metric])
