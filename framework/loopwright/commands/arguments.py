"""The commands, their flags and their arguments. A command that runs a config becomes flags:

loopwright train digits_cnn run.seed=3
loopwright --mode=train_and_evaluate --gin_file=configs/digits_cnn.gin --gin_param=run.seed=3
"""

import argparse
import importlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from loopwright import registry
from loopwright.commands import shipped
from loopwright.commands.parser import Parser
from loopwright.errors import UsageError
from loopwright.options.modes import LAUNCH_MODES, MODES, TRAINING_MODES

LOCAL_FLAGS = ("local_workers", "local_ps", "max_restarts")
LOCAL_MODES = (*TRAINING_MODES, "replay")
_CONFIG = "[CONFIG] [NAME=VALUE ...]"


class Workers(int):
  """The number of workers that a local cluster begins with; it goes on with `least`."""

  least: int

  def __str__(self) -> str:
    """Returns it as a flag has it."""
    return f"{self.least}:{int(self)}" if self.least < self else f"{int(self)}"

  @classmethod
  def read(cls, text: str) -> "Workers":
    """Returns what "4" or "2:4" says; raises a ValueError for another text."""
    found = re.fullmatch(r"(?:(\d{1,6}):)?(\d{1,6})", text, re.ASCII)
    workers = cls(found[2] if found else -1)
    workers.least = int(found[1]) if found and found[1] else workers
    if workers < 0 or not bool(workers) <= workers.least <= workers:
      raise ValueError("it must be a number of workers, such as 4, or the least and most: 2:4")
    return workers


class Command(NamedTuple):
  """One command; what it does is the registry's "command" of its name.

  Attributes:
    summary: one line for the help.
    arguments: as the help shows them.
    modes: for a command that runs a config, its values of --mode; the first is the default.
    example: a command line, for the help.
  """

  summary: str
  arguments: str = _CONFIG
  modes: tuple[str, ...] = ()
  example: str = ""


COMMANDS: Mapping[str, Command] = {
  "train": Command(
    "Trains and evaluates; --mode=train only trains.",
    modes=("train_and_evaluate", "train"),
    example="train digits_cnn run.train_steps=200 --model_dir=runs/short",
  ),
  "evaluate": Command(
    "Evaluates the newest checkpoint.",
    modes=("evaluate", "evaluate_continuously"),
    example="evaluate digits_cnn --model_dir=runs/short",
  ),
  "export": Command(
    "Writes a SavedModel of the newest checkpoint.",
    modes=("export",),
    example="export digits_cnn --model_dir=runs/short",
  ),
  "replay": Command(
    "Repeats the step at which a run became NaN or infinite.",
    modes=("replay",),
    example="replay my.gin --model_dir=runs/mine",
  ),
  "verify": Command(
    "Checks the task, in about a minute.",
    modes=("verify",),
    example="verify my.gin --json=verify.json",
  ),
  "tune": Command(
    "Finds the fastest settings, in a few minutes.", modes=("tune",), example="tune digits_cnn"
  ),
  "check": Command(
    "Checks the config alone, without a device.",
    modes=("check_config",),
    example="check my.gin run.seed=3",
  ),
  "sweep": Command(
    "Searches for the best bindings, in many runs.",
    example="sweep digits_cnn --vary='keras.Adam.learning_rate = log(1e-4, 1e-1)' --trials=20",
  ),
  "repeat": Command(
    "Trains with several seeds: mean and spread of every metric.",
    example="repeat digits_cnn --seeds=5",
  ),
  "options": Command(
    "Lists all that a config can set.", example="options digits_cnn --prefix=Trainer."
  ),
  "ls": Command(
    "Lists the runs in folders, by default in runs/.",
    "[FOLDER ...]",
    example="ls runs --sort=best --status=done",
  ),
  "report": Command(
    "Writes an HTML page about runs.", "RUN [RUN ...]", example="report runs/a runs/b"
  ),
  "diff": Command(
    "Compares two runs: bindings, data, versions, results.", "RUN RUN", example="diff runs/a runs/b"
  ),
  "goodput": Command("Tells where the wall time of a run went.", "RUN", example="goodput runs/a"),
  "predict": Command(
    "Writes what the model of a run computes for each example.",
    "RUN",
    example="predict runs/digits_cnn --output=digits.npz",
  ),
  "new": Command("Makes a project: a task, its config, a test.", "NAME", example="new waves"),
}

FLAGS_ALONE = Command("Does what --mode says.", arguments="", modes=LAUNCH_MODES)

_OF_MODES: Mapping[str, Sequence[str]] = {
  **dict.fromkeys(LOCAL_FLAGS, LOCAL_MODES),
  "model_dir": (*MODES, "tune"),
  "accept_changes": MODES,
  **dict.fromkeys(("json", "only", "time"), ("verify",)),
  "format": ("export",),
}
"""Flags that are for some of the modes."""


class Parsed(NamedTuple):
  """A command line.

  Attributes:
    command: its name; "" for flags alone.
    known: what is known of it.
    values: the flags, by name.
    arguments: what is neither command nor flag.
  """

  command: str
  known: Command
  values: argparse.Namespace
  arguments: list[str]


def commands() -> dict[str, Command]:
  """Returns all commands, with those that other packages add."""
  added = [each for each in registry.entries("command") if each.name not in COMMANDS]
  return {**COMMANDS, **{e.name: Command(f"Of the module {e.module}.", "[...]") for e in added}}


def known(command: str) -> Command:
  """Returns what is known of a command; "" is for flags alone."""
  return FLAGS_ALONE if not command else COMMANDS.get(command) or commands()[command]


def parse(argv: Sequence[str]) -> Parsed:
  """Returns a command line, the program first, in its parts.

  Raises:
    UsageError: a wrong flag or argument, or no gin file.
    ConfigError: an unknown command or config.
  """
  command, rest = "", argv[1:]
  if rest and not rest[0].startswith("-"):
    command, rest = rest[0], rest[1:]
    if command not in COMMANDS and command not in commands():
      from loopwright.commands import refusals

      raise refusals.of_command(command, [*commands()])
  parser, of = parser_of(command), known(command)
  values, arguments = parser.parse(rest)
  for word in arguments:
    if re.match("--?[A-Za-z]", word):
      from loopwright.commands import refusals

      raise refusals.of_flag(word, command, parser.names, COMMANDS, _OF_MODES)
  if of.modes and not (values.help or getattr(values, "version", False)):
    _add_config(command, values, arguments)
    arguments = []
    _check_flags(values)
  return Parsed(command, of, values, arguments)


def parse_flags(argv: Sequence[str]) -> argparse.Namespace:
  """Returns the flags of a command line that runs a config; see `parse`."""
  return parse(argv).values


def parser_of(command: str) -> Parser:
  """Returns the parser of a command's flags; "" is for a command line of flags alone."""
  of = known(command)
  example = f"example: loopwright {of.example}" if of.example else None
  parser = Parser(
    prog=f"loopwright {command}".strip(), description=of.summary, epilog=example,
    usage=" ".join(filter(None, ["loopwright", command, of.arguments, "[flags]"])),
  )  # fmt: skip
  if of.modes:
    define_config_flags(parser)
    _define_run_flags(parser, of.modes)
  elif define := getattr(_module_of(command), "define", None):
    define(parser)
  if not command:
    parser.switch("version", "Print the version.")
  return parser


def _module_of(command: str) -> object:
  return importlib.import_module(registry.find("command", command).module)


def page(command: str, about: str) -> str:
  """Returns the help of a command; "" is for all, with `about`."""
  told = parser_of(command).format_help()
  if command:
    return told
  listed = [f"  {name:<10}{each.summary}" for name, each in commands().items()]
  listed = ["Commands, each with its own --help:", *listed, "", "With flags alone:"]
  return "\n".join([about, *listed, told.partition("\n")[2]])


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


def as_flags(values: argparse.Namespace) -> list[str]:
  """Returns the command line of flags alone that a process of a local cluster gets."""
  parser, found = parser_of(""), list[str]()
  for name, value in vars(values).items():
    if name not in LOCAL_FLAGS and (name == "mode" or value != parser.get_default(name)):
      items = value if isinstance(value, list) else [value]
      found += [f"--{name}" if item is True else f"--{name}={item}" for item in items]
  return found


def _add_config(command: str, values: argparse.Namespace, arguments: Sequence[str]) -> None:
  """Adds the arguments of a command that runs a config to its flags."""
  if command:
    files, params = config_of(arguments, needed=not values.gin_file)
    values.gin_file, values.gin_param = [*values.gin_file, *files], [*values.gin_param, *params]
  elif arguments:
    raise UsageError(
      f"unexpected argument {arguments[0]!r}; a command such as `train` comes before the flags, a "
      f"gin file is written as --gin_file={arguments[0]}"
    )


def define_config_flags(parser: Parser) -> None:
  """Adds the flags that name a config."""
  parser.texts("gin_file", "A gin file; repeatable, later files override earlier ones.")
  parser.texts("gin_param", 'A binding such as "run.seed = 3"; repeatable, after the files.')


def _define_run_flags(parser: Parser, modes: Sequence[str]) -> None:
  """Adds the flags that some of the modes take, and defaults for the others."""
  default = "train_and_evaluate" if "train_and_evaluate" in modes else modes[0]
  parser.choice("mode", default, modes, "What to do.")
  takes = [name for name, of in _OF_MODES.items() if {*of} & {*modes}]
  no_workers = Workers.read("0")
  parser.set_defaults(
    model_dir=None, local_workers=no_workers, local_ps=0, max_restarts=0, json=None,
    accept_changes=False, format="savedmodel", only=None, time=False,
  )  # fmt: skip
  if "model_dir" in takes:
    told = "The run folder, or its URL; default: runs/<name of the first gin file>."
    parser.text("model_dir", None, told)
  if "local_workers" in takes:
    parser.value(
      "local_workers", no_workers, Workers.read, "Number of workers of a cluster on this machine; "
      "0 for no cluster. LEAST:MOST, such as 2:4, goes on without lost workers.",
    )  # fmt: skip
    told = "Number of parameter servers of that cluster; above 0 it also has a chief."
    parser.whole("local_ps", 0, told)
    parser.whole("max_restarts", 0, "How often to restart that cluster after a failure.")
  if "json" in takes:
    parser.text("json", None, "For --mode=verify: a file to write the report to.")
    parser.text("only", None, "Only these groups of checks, such as replicas,inputs.")
    parser.switch("time", "Print each group's share of the time.")
  if "format" in takes:
    told = "For --mode=export: others than savedmodel write <model_dir>/model.<ending>."
    formats = ["savedmodel", "safetensors", "keras", "onnx", "litert"]
    parser.choice("format", "savedmodel", formats, told)
  if "accept_changes" in takes:
    told = "Go on with a config or data that the run has not had so far."
    parser.switch("accept_changes", told)


def _check_flags(values: argparse.Namespace) -> None:
  if not values.gin_file:
    raise UsageError("no gin file; add one, for example --gin_file=configs/digits_cnn.gin")
  if values.model_dir == "":
    raise UsageError("--model_dir is empty; give a folder, or leave the flag out")
  for name in ("json", "only", "time", "format"):
    value, [mode] = getattr(values, name), _OF_MODES[name]
    if value not in (None, False, "savedmodel") and values.mode != mode:
      told = f"--{name}" if value is True else f"--{name}={value}"
      raise UsageError(f"{told} is for --mode={mode}, not {values.mode}; remove it")
  _check_local_flags(values)


def _check_local_flags(values: argparse.Namespace) -> None:
  for name in LOCAL_FLAGS[1:]:
    if (value := getattr(values, name)) and not values.local_workers:
      raise UsageError(f"--{name}={value} needs a local cluster; add --local_workers")
  if values.local_workers and values.mode not in LOCAL_MODES:
    raise UsageError(
      f"received both --mode={values.mode} and --local_workers={values.local_workers}; "
      f"a local cluster supports {', '.join(LOCAL_MODES)}: remove --local_workers"
    )
  if values.local_ps and values.local_workers.least < values.local_workers:
    raise UsageError(
      f"received both --local_workers={values.local_workers} and --local_ps={values.local_ps}; "
      "workers beside parameter servers come and go anyway: give one number of workers"
    )
  if values.local_workers and "TF_CONFIG" in os.environ:
    raise UsageError(
      f"received both --local_workers={values.local_workers}, which sets TF_CONFIG for each "
      "process, and TF_CONFIG in the environment; remove one"
    )
