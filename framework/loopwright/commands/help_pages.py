"""The help of each command, by argparse; the flags themselves are absl's."""

import argparse
import re

from absl import flags

from loopwright.commands.arguments import COMMANDS, FLAGS_ALONE, flags_of


def page(command: str, about: str) -> str:
  """Returns the help of a command; "" is for all, with `about`."""
  if command:
    return parser(command).format_help()
  listed = [f"  {name:<10}{each.summary}" for name, each in COMMANDS.items()]
  listed = ["Commands, each with its own --help:", *listed, "", "With flags alone:"]
  return "\n".join([about, *listed, parser("").format_help().partition("\n")[2]])


def parser(command: str) -> argparse.ArgumentParser:
  """Returns a parser with the flags and arguments of a command."""
  known = COMMANDS.get(command, FLAGS_ALONE)
  made = argparse.ArgumentParser(
    prog=f"loopwright {command}".strip(), description=known.summary, add_help=False,
    usage=" ".join(filter(None, ["loopwright", command, known.arguments, "[flags]"])),
  )  # fmt: skip
  values = flags_of(command)
  for name in values:
    _add(made, values[name])
  return made


def _add(made: argparse.ArgumentParser, flag: flags.Flag) -> None:
  text = re.sub(r";\s+repeat this option.*", "", str(flag.help), flags=re.DOTALL).replace("%", "%%")
  if flag.boolean:
    made.add_argument(f"--{flag.name}", help=text, action="store_true")
  else:
    action = "append" if isinstance(flag, flags.MultiFlag) else "store"
    added = made.add_argument(f"--{flag.name}", help=text, metavar="...", action=action)
    added.choices = getattr(flag.parser, "enum_values", None)
