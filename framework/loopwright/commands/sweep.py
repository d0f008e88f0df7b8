"""`loopwright sweep my.gin --vary '...'`; docs/sweeps.md describes it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from loopwright.commands.arguments import Parsed, config_of, define_config_flags
from loopwright.commands.parser import Parser
from loopwright.errors import ConfigError, Preempted, UsageError, first_line
from loopwright.host import urls
from loopwright.run_folder import folders


def define(parser: Parser) -> None:
  """Adds the command's flags."""
  define_config_flags(parser)
  parser.texts(
    "vary", "What varies, such as 'keras.Adam.learning_rate = log(1e-4, 1e-1)' or "
    "'run.global_batch_size = [64, 512]'; repeatable. Lists alone are a grid.",
  )  # fmt: skip
  parser.choice("sampler", "tpe", ("tpe", "random"), "How values of a range are chosen.")
  parser.whole("trials", None, "How many; default: 20, of a grid all.", at_least=1)
  parser.whole("jobs", 1, "How many trials at once.", at_least=1)
  parser.whole("seed", 0, "Of the sampler.", at_most=2**31 - 1)
  parser.text("metric", "loss", "Of the evaluations; default: loss.")
  parser.switch("maximize", "More of the metric is better.")
  parser.switch("minimize", "Less of the metric is better.")
  parser.switch("prune", "End trials that are worse than the median.")
  parser.switch("report", "Print what each trial costs: time, examples/s, memory, utilisation.")
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
  try:
    from loopwright.tools.sweep import results, runner, space, study
  except ModuleNotFoundError as error:
    raise ConfigError(
      f"a sweep needs optuna ({error}); install the extra: `pip install 'loopwright[sweep]'`, "
      "with uv `uv run --extra sweep loopwright sweep`."
    ) from error

  free, dimensions = runner.slots(values.jobs), space.read(values.vary)
  maximize = _maximize(values.metric, more=values.maximize, less=values.minimize)
  opened = study.Study(
    values.dir or os.path.join("runs", f"{Path(files[0]).stem}-sweep"),
    values.storage, dimensions, metric=values.metric, maximize=maximize,
    bindings=space.checked(files, params, dimensions), sampler=values.sampler, seed=values.seed,
    prune=values.prune, trials=values.trials,
  )  # fmt: skip
  try:
    runner.run(opened, files, params, free)
  except Preempted as stop:
    print(first_line(stop), file=sys.stderr)
    return 75
  return results.finish(opened, report=values.report)


def _maximize(metric: str, *, more: bool, less: bool) -> bool:
  """Returns whether more of a metric is better: of the flags, else by its name."""
  if more and less:
    raise UsageError("received both --maximize and --minimize; remove one")
  if more or less:
    return more
  if not (best := folders.direction(metric)):
    raise UsageError(f"--metric={metric}: is more better, or less? add --maximize or --minimize")
  return best == "max"
