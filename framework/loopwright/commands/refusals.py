"""What is told of a command or a flag that there is not."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

from loopwright.commands import shipped
from loopwright.errors import ConfigError, UsageError, suggest, unknown
from loopwright.options import words

Modes: TypeAlias = Mapping[str, Sequence[str]]


def of_command(name: str, commands: Sequence[str]) -> ConfigError:
  """Returns the error for a first word that is no command."""
  if name.endswith(".gin") or name in shipped.names():
    return UsageError(
      f"unexpected argument {name!r}; write a command before it, such as `train {name}`, or a gin "
      f"file as --gin_file={name}"
    )
  if name in words.COMMANDS:
    return UsageError(f"there is no command {name!r}; {words.COMMANDS[name]}")
  return unknown("command", name, commands)


def of_flag(
  word: str, command: str, names: Collection[str], commands: Mapping[str, Any], of_modes: Modes
) -> UsageError:
  """Returns the error for a word such as "--steps=3" that is no flag of a command."""
  name = re.findall(r"[\w-]+", word.lstrip("-"))[0].replace("-", "_")
  hint = "bindings have no dashes, as in keras.Adam.learning_rate=0.01"
  taking = {*of_modes.get(name, ())}
  if command and (others := [n for n, each in commands.items() if taking & {*each.modes}]):
    told = f"`{command}` has no flag --{name}, but {', '.join(f'`{each}`' for each in others)}"
    return UsageError(f"{told}; {hint}")
  if name in words.BINDINGS:
    return UsageError(f"there is no flag --{name}; write a binding: {words.BINDINGS[name]}")
  if name in words.FLAGS:
    return UsageError(f"there is no flag --{name}; {words.FLAGS[name]}")
  near = suggest(f"--{name}", [f"--{n}" for n in names])
  return UsageError(f"unknown flag --{name}.{near}" if near else f"unknown flag --{name}; {hint}")
