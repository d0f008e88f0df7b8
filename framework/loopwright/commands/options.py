"""`loopwright options my.gin`: what a config can set, with type, default, meaning and value."""

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from loopwright.commands.arguments import Parsed, config_of, define_config_flags
from loopwright.commands.parser import Parser
from loopwright.errors import ConfigError

if TYPE_CHECKING:
  from loopwright.configurables.documentation import Setting

_WIDTH = 100


def define(parser: Parser) -> None:
  """Adds the command's flags."""
  define_config_flags(parser)
  parser.texts("prefix", "Only the options that begin so, such as Trainer.; repeatable.")


def run(parsed: Parsed) -> int:
  """Prints the options of a config; returns the exit status (host).

  Raises:
    ConfigError: the config cannot be read or a module not be imported, or no option begins so.
  """
  from loopwright import configurables
  from loopwright.configurables import documentation

  values = parsed.values
  files, params = config_of(parsed.arguments, needed=not values.gin_file)
  examination = configurables.examine([*values.gin_file, *files], [*values.gin_param, *params])
  for mistake in examination.mistakes:
    if mistake.kind in ("reading", "imports"):
      raise mistake.error
  prefixes = tuple(values.prefix) or ("",)
  found = [each for each in documentation.settings(examination) if each.name.startswith(prefixes)]
  if not found:
    raise ConfigError(f"no option begins with {' or '.join(map(repr, prefixes))}.")
  print("\n".join(line for option in found for line in lines(option)))
  return 0


def lines(option: "Setting") -> Iterator[str]:
  """Yields an option with its value, then its type, its default if it has another, its meaning."""
  from loopwright.configurables import documentation

  default = documentation.default(option.parameter)
  kind = f"{option.kind}, required" if default == "required" else option.kind
  if option.is_set:
    yield f"{option.name} = {option.value!r}"
    kind += "" if default == "required" else f", default {default}"
  elif default == "required":
    yield f"{option.name} is not set"
  else:
    yield f"{option.name} = {default} (default)"
  text = f"{kind}. {option.meaning}".strip()
  yield from textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")
