"""Completes commands, flags, configs and their bindings in a shell, with argcomplete."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from pathlib import Path

from loopwright.commands import shipped
from loopwright.commands.arguments import commands, parser_of
from loopwright.configurables import reading
from loopwright.errors import ConfigError


def complete() -> None:
  """Answers the shell and ends the process; returns if argcomplete is not installed."""
  with contextlib.suppress(ImportError):
    import argcomplete

    if os.environ.get("_ARGCOMPLETE_SHELL") != "zsh":  # in bash a word begins after a quote
      line = os.environ.get("COMP_LINE", "")
      os.environ["COMP_LINE"] = re.sub(r"(--\w+)=(['\"][^'\"]*)$", r"\1 \2", line)
    argcomplete.autocomplete(parser(), always_complete_options=False)


def parser() -> argparse.ArgumentParser:
  """Returns a parser of all commands, in which each argument knows its completer."""
  made = argparse.ArgumentParser(prog="loopwright", add_help=False)
  added = made.add_subparsers()
  for name, command in commands().items():
    one = added.add_parser(name, help=command.summary, parents=[parser_of(name)], add_help=False)
    arguments = one.add_argument("arguments", nargs="*")
    if "CONFIG" in command.arguments:
      arguments.completer = configs_and_bindings  # type: ignore[attr-defined]
    for flag in one._actions:  # noqa: SLF001
      if flag.dest in ("gin_param", "vary"):
        flag.completer = bindings_of_config  # type: ignore[attr-defined]
  return made


def configs_and_bindings(
  prefix: str, parsed_args: argparse.Namespace, **unused: object
) -> list[str]:
  """Returns the configs that begin so; also the bindings, after a dot or if no config does."""
  files = [str(path) for path in Path().glob("*.gin")]
  found = [each for each in (*files, *shipped.names()) if each.startswith(prefix)]
  if "." in prefix or not found:
    found += bindings_of_config(prefix, parsed_args)
  return sorted(found)


def bindings_of_config(prefix: str, parsed_args: argparse.Namespace, **unused: object) -> list[str]:
  """Returns "name.parameter=" of all bindings that begin so and that the command's configs have."""
  found: set[str] = set()
  for file in _gin_files(parsed_args):
    with contextlib.suppress(ConfigError):
      found |= {f"{each}=" for each in reading.read([file], []).bindings}
  return sorted(each for each in found if each.startswith(prefix))


def _gin_files(parsed: argparse.Namespace) -> list[str]:
  """Returns the gin files that a command line names so far, or else those of this folder."""
  files = [*(getattr(parsed, "gin_file", None) or [])]
  for argument in getattr(parsed, "arguments", None) or []:
    with contextlib.suppress(ConfigError):
      files += [] if "=" in argument else [shipped.find(argument)]
  return files or [str(path) for path in Path().glob("*.gin")]
