"""Completes commands, flags, configs and bindings in a shell, with argcomplete. No TensorFlow."""

from __future__ import annotations

import argparse
import ast
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from framework.commands import help_pages, shipped
from framework.commands.arguments import COMMANDS
from framework.configurables.imports import REPOSITORY
from framework.configurables.table import GIVEN, TABLE


def complete() -> None:
  """Answers the shell and ends the process; returns if argcomplete is not installed."""
  with contextlib.suppress(ImportError):
    import argcomplete

    argcomplete.autocomplete(parser(), always_complete_options=False)


def parser() -> argparse.ArgumentParser:
  """Returns a parser of all commands, in which each argument knows its completer."""
  made = argparse.ArgumentParser(prog="loopwright", add_help=False)
  commands = made.add_subparsers()
  for name, command in COMMANDS.items():
    one = commands.add_parser(
      name, help=command.summary, parents=[help_pages.parser(name)], add_help=False
    )
    arguments = one.add_argument("arguments", nargs="*")
    if "CONFIG" in command.arguments:
      arguments.completer = configs_and_bindings  # type: ignore[attr-defined]
  return made


def configs_and_bindings(prefix: str, **unused: object) -> list[str]:
  """Returns the configs, or for a prefix with a dot the bindings, that begin so."""
  files = [str(path) for path in Path().glob("*.gin")]
  found = [*bindings(), *files] if "." in prefix else [*files, *shipped.names()]
  return sorted(each for each in found if each.startswith(prefix))


def bindings() -> Iterator[str]:
  """Yields "name.parameter=" of the framework's options, and of registered names in *.py here."""
  for module, names in TABLE:
    yield from _parameters(REPOSITORY / f"{module.replace('.', '/')}.py", names.split())
  for file in Path().glob("*.py"):
    yield from _parameters(file, None)


def _parameters(file: Path, names: list[str] | None) -> Iterator[str]:
  with contextlib.suppress(OSError, SyntaxError, ValueError):
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
      if not isinstance(node, ast.ClassDef | ast.FunctionDef):
        continue
      if node.name in names if names is not None else _is_registered(node):
        yield from (
          f"{node.name}.{name}=" for name in _names(node) if name not in GIVEN.get(node.name, ())
        )


def _is_registered(node: ast.ClassDef | ast.FunctionDef) -> bool:
  return any(re.search(r"\bregister\b", ast.unparse(each)) for each in node.decorator_list)


def _names(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
  """Returns the parameters of a function, or of what makes a class."""
  if isinstance(node, ast.ClassDef):
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    return [name for each in methods if each.name == "__init__" for name in _names(each)[1:]]
  return [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
