"""The commands, their flags and their arguments. A command that runs a config becomes flags:

loopwright train digits_cnn run.seed=3
python launch.py --mode=train_and_evaluate --gin_file=configs/digits_cnn.gin --gin_param=run.seed=3
"""

import importlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from absl import flags

from loopwright.commands import shipped
from loopwright.errors import unknown
from loopwright.modes import LAUNCH_MODES, TRAINING_MODES

LOCAL_FLAGS = ("local_workers", "local_ps", "max_restarts")
LOCAL_MODES = (*TRAINING_MODES, "replay")
_CONFIG = "[CONFIG] [NAME=VALUE ...]"


class Workers(int):
  """The number of workers that a local cluster begins with; it goes on with `least`."""

  least: int

  def __str__(self) -> str:
    """Returns it as a flag has it."""
    return f"{self.least}:{int(self)}" if self.least < self else f"{int(self)}"


class _WorkersParser(flags.ArgumentParser):
  syntactic_help = "N or LEAST:MOST"

  def parse(self, argument: str | int) -> Workers:
    found = re.fullmatch(r"(?:(\d{1,6}):)?(\d{1,6})", str(argument), re.ASCII)
    workers = Workers(found[2] if found else -1)
    workers.least = int(found[1]) if found and found[1] else workers
    if workers < 0 or not bool(workers) <= workers.least <= workers:
      raise ValueError(
        f"{argument} is no number of workers, such as 4, nor the least and most, such as 2:4"
      )
    return workers

  def flag_type(self) -> str:
    return "workers"


class Command(NamedTuple):
  """One command.

  Attributes:
    summary: one line for the help.
    arguments: as the help shows them.
    module: below `framework`, with a function `run(parsed)` that returns the exit status, and,
      without `modes`, a function `define(values)` that adds its flags.
    modes: for a command that runs a config, its values of --mode; the first is the default.
  """

  summary: str
  arguments: str = _CONFIG
  module: str = "commands.launching"
  modes: tuple[str, ...] = ()


COMMANDS: Mapping[str, Command] = {
  "train": Command(
    "Trains and evaluates; --mode=train only trains.", modes=("train_and_evaluate", "train")
  ),
  "evaluate": Command(
    "Evaluates the newest checkpoint.", modes=("evaluate", "evaluate_continuously")
  ),
  "export": Command("Writes a SavedModel of the newest checkpoint.", modes=("export",)),
  "replay": Command("Repeats the step at which a run became NaN or infinite.", modes=("replay",)),
  "verify": Command("Checks the task, in about a minute.", modes=("verify",)),
  "tune": Command("Finds the fastest settings, in a few minutes.", modes=("tune",)),
  "memory": Command("Estimates the memory of each device.", modes=("memory",)),
  "check": Command("Checks the config alone, without a device.", modes=("check_config",)),
  "sweep": Command("Searches for the best bindings, in many runs.", module="commands.sweep"),
  "repeat": Command(
    "Trains with several seeds: mean and spread of every metric.", module="commands.repeat"
  ),
  "options": Command("Lists all that a config can set.", module="commands.options"),
  "ls": Command("Lists the runs in folders, by default in runs/.", "[FOLDER ...]", "tools.runs.ls"),
  "report": Command("Writes an HTML page about runs.", "RUN [RUN ...]", "tools.report"),
  "diff": Command(
    "Compares two runs: bindings, data, versions, results.", "RUN RUN", "tools.runs.diff"
  ),
  "goodput": Command("Tells where the wall time of a run went.", "RUN", "tools.goodput"),
  "stacks": Command("Tells what the processes of a run do now.", "RUN", "tools.stacks"),
  "average": Command(
    "Averages the weights of runs: a model soup.", "RUN [RUN ...] --to=FOLDER", "commands.average"
  ),
  "push": Command(
    "Uploads a run that its store has not got whole.", "URL [URL ...]", "commands.push"
  ),
  "new": Command("Makes a project: a task, its config, a test.", "NAME", "commands.new"),
}

FLAGS_ALONE = Command("Does what --mode says.", arguments="", modes=LAUNCH_MODES)


class Parsed(NamedTuple):
  """A command line.

  Attributes:
    command: its name in `COMMANDS`; "" for flags alone.
    known: what `COMMANDS` has of it.
    values: the flags.
    arguments: what is neither command nor flag.
  """

  command: str
  known: Command
  values: flags.FlagValues
  arguments: list[str]


def parse(argv: Sequence[str]) -> Parsed:
  """Returns a command line, the program first, in its parts.

  Raises:
    flags.Error: a wrong flag or argument, or no gin file.
    ConfigError: an unknown command or config.
  """
  command, rest = "", argv[1:]
  if rest and not rest[0].startswith("-"):
    command, rest = rest[0], rest[1:]
    _require_command(command)
  known, values = COMMANDS.get(command, FLAGS_ALONE), flags_of(command)
  arguments = values([argv[0], *rest])[1:]
  if known.modes and not values.help:
    arguments = _as_flags(command, values, arguments)
    _check_flags(values)
  return Parsed(command, known, values, arguments)


def parse_flags(argv: Sequence[str]) -> flags.FlagValues:
  """Returns the flags of a command line that runs a config; see `parse`."""
  return parse(argv).values


def flags_of(command: str) -> flags.FlagValues:
  """Returns the flags that a command takes; "" is for a command line of flags alone."""
  values, known = flags.FlagValues(), COMMANDS.get(command, FLAGS_ALONE)
  if known.modes:
    define_config_flags(values)
    _define_run_flags(values, known.modes)
  else:
    importlib.import_module(f"loopwright.{known.module}").define(values)
  flags.DEFINE_boolean("help", False, "Print this help.", values)
  return values


def config_of(arguments: Sequence[str], *, needed: bool) -> tuple[list[str], list[str]]:
  """Returns the gin files and the bindings that arguments name.

  Args:
    arguments: those with "=" are bindings.
    needed: whether the only gin file of this folder is taken if they name none.

  Raises:
    ConfigError: an argument names no config; or there is none, and not one gin file here.
  """
  bindings = [argument for argument in arguments if "=" in argument]
  files = [shipped.find(argument) for argument in arguments if argument not in bindings]
  return files if files or not needed else [shipped.the_only_one()], bindings


def _require_command(name: str) -> None:
  if name in COMMANDS:
    return
  if name.endswith(".gin") or name in shipped.names():
    raise flags.Error(
      f"unexpected argument {name!r}; write a command before it, such as `train {name}`, or a gin "
      f"file as --gin_file={name}"
    )
  raise unknown("command", name, COMMANDS)


def _as_flags(command: str, values: flags.FlagValues, arguments: Sequence[str]) -> list[str]:
  """Adds the arguments of a command that runs a config to its flags; returns what is left: none."""
  if command:
    files, params = config_of(arguments, needed=not values.gin_file)
    values(["", *(f"--gin_file={x}" for x in files), *(f"--gin_param={x}" for x in params)])
  elif arguments:
    raise flags.Error(
      f"unexpected argument {arguments[0]!r}; a command such as `train` comes before the flags, a "
      f"gin file is written as --gin_file={arguments[0]}"
    )
  return []


def define_config_flags(values: flags.FlagValues) -> None:
  """Adds the flags that name a config."""
  flags.DEFINE_multi_string(
    "gin_file", [], "A gin file; repeatable, later files override earlier ones.", values
  )
  flags.DEFINE_multi_string(
    "gin_param", [], 'A binding such as "run.seed = 3"; repeatable, after the files.', values
  )


def _define_run_flags(values: flags.FlagValues, modes: Sequence[str]) -> None:
  default = "train_and_evaluate" if "train_and_evaluate" in modes else modes[0]
  flags.DEFINE_enum("mode", default, modes, "What to do.", values)
  flags.DEFINE_string(
    "model_dir",
    None,
    "The run folder, or its URL; default: runs/<name of the first gin file>.",
    values,
  )
  flags.DEFINE(
    _WorkersParser(), "local_workers", 0, "Number of workers of a cluster on this machine; 0 for "
    "no cluster. LEAST:MOST, such as 2:4, goes on without lost workers.", values,
  )  # fmt: skip
  flags.DEFINE_integer(
    "local_ps",
    0,
    "Number of parameter servers of that cluster; above 0 it also has a chief.",
    0,
    None,
    values,
  )
  flags.DEFINE_integer(
    "max_restarts", 0, "How often to restart that cluster after a failure.", 0, None, values
  )
  flags.DEFINE_string("json", None, "For --mode=verify: a file to write the report to.", values)
  flags.DEFINE_float(
    "device_gib",
    None,
    "For --mode=memory: GiB of one device, to show what fits.",
    None,
    None,
    values,
  )
  flags.DEFINE_boolean(
    "learning_rate", False, "For --mode=tune: a range test of the learning rate instead.", values
  )
  flags.DEFINE_enum(
    "log_format", "plain", ["plain", "time", "json"], "What the lines of the log are: as they "
    "come, after their time, or objects of JSON with time, stream and text.", values,
  )  # fmt: skip
  flags.DEFINE_boolean(
    "accept_changes", False, "Go on with a config or data that the run has not had so far.", values
  )


def _check_flags(values: flags.FlagValues) -> None:
  if not values.gin_file:
    raise flags.Error("no gin file; add one, for example --gin_file=configs/digits_cnn.gin")
  if values.model_dir == "":
    raise flags.Error("--model_dir is empty; give a folder, or leave the flag out")
  if values.json is not None and values.mode != "verify":
    raise flags.Error(f"--json={values.json} is for --mode=verify, not {values.mode}; remove it")
  if values.device_gib is not None and values.mode != "memory":
    raise flags.Error(
      f"--device_gib={values.device_gib} is for --mode=memory, not {values.mode}; remove it"
    )
  if values.learning_rate and values.mode != "tune":
    raise flags.Error(f"--learning_rate is for --mode=tune, not {values.mode}; remove it")
  _check_local_flags(values)


def _check_local_flags(values: flags.FlagValues) -> None:
  for name in LOCAL_FLAGS[1:]:
    if values[name].value and not values.local_workers:
      raise flags.Error(f"--{name}={values[name].value} needs a local cluster; add --local_workers")
  if values.local_workers and values.mode not in LOCAL_MODES:
    raise flags.Error(
      f"received both --mode={values.mode} and --local_workers={values.local_workers}; "
      f"a local cluster supports {', '.join(LOCAL_MODES)}: remove --local_workers"
    )
  if values.local_ps and values.local_workers.least < values.local_workers:
    raise flags.Error(
      f"received both --local_workers={values.local_workers} and --local_ps={values.local_ps}; "
      "workers beside parameter servers come and go anyway: give one number of workers"
    )
  if values.local_workers and "TF_CONFIG" in os.environ:
    raise flags.Error(
      f"received both --local_workers={values.local_workers}, which sets TF_CONFIG for each "
      "process, and TF_CONFIG in the environment; remove one"
    )
