"""Reads gin files into bindings with their places; looks up no names, imports no modules."""

import contextlib
import dataclasses
import io
import math
import os
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from gin import config_parser

from loopwright import registry
from loopwright.configurables import imports
from loopwright.errors import ConfigError, first_line, printable, shown
from loopwright.host import bounded, redaction, urls

MACRO = "gin.macro"
_MOST_INCLUDES = 100
"""No gin file is longer; the memory to parse one is a few hundred times its size."""


@dataclasses.dataclass(frozen=True)
class Reference:
  """`@scope/name`, `@scope/name()`, or `%scope` if the name is `MACRO`; repr is gin syntax."""

  scope: str
  name: str
  called: bool

  @property
  def is_macro(self) -> bool:
    """Whether it stands for a macro or a gin constant."""
    return self.name == MACRO

  def __repr__(self) -> str:
    """Returns it in gin's syntax."""
    if self.is_macro:
      return f"%{self.scope}"
    return f"@{scoped(self.scope, self.name)}{'()' if self.called else ''}"


@dataclasses.dataclass(frozen=True)
class Binding:
  """One `scope/name.parameter = value`; a macro binds the parameter "value" of `MACRO`."""

  where: str
  file: str
  scope: str
  name: str
  parameter: str
  value: Any

  @property
  def key(self) -> tuple[str, str, str]:
    """Scope, name and parameter."""
    return self.scope, self.name, self.parameter

  @property
  def place(self) -> str:
    """`where`, without a text of the command line: under a mistyped name it may be a secret."""
    plain = redaction.shown("secret", self.value) == self.value or not self.file.startswith("--")
    return self.where if plain else f"--gin_param {str(self)!r}"

  @property
  def told(self) -> str:
    """The value as messages show it: short, and a secret as its digest."""
    return shown(redaction.shown(str(self), self.value))

  def __str__(self) -> str:
    """Returns the left-hand side in gin's syntax."""
    if self.name == MACRO:
      return self.scope
    return f"{scoped(self.scope, self.name)}.{self.parameter}"


class Config(NamedTuple):
  """What was read, in order; each import statement with its place."""

  files: list[str]
  imports: list[tuple[str, config_parser.ImportStatement]]
  bindings: list[Binding]

  def import_lines(self) -> list[str]:
    """Returns the import statements in gin's syntax, without duplicates."""
    return list(dict.fromkeys(statement.format() for _, statement in self.imports))


def scoped(scope: str, name: str) -> str:
  """Returns "scope/name", or "name" for the empty scope."""
  return f"{scope}/{name}" if scope else name


@contextlib.contextmanager
def at(where: str) -> Iterator[None]:
  """Adds the place to a ConfigError raised inside."""
  try:
    yield
  except ConfigError as error:
    raise ConfigError(f"{where}: {error}") from error.__cause__


def read(gin_files: Iterable[str], gin_params: Iterable[str]) -> Config:
  """Reads gin files, including those they include, and then single bindings.

  Raises:
    ConfigError: a missing file, or a file that gin cannot read.
  """
  config = Config([], [], [])
  for name in gin_files:
    _read_file(config, _gin_file(name, [""]), ())
  for param in gin_params:
    _read_text(config, param, f"--gin_param {shown(redaction.line(param))}", ())
  return config


def is_writable(value: Any) -> bool:
  """Whether gin reads `repr(value)` back as the same value."""
  if type(value) in (list, tuple):
    return all(map(is_writable, value))
  if type(value) is dict:
    return all(map(is_writable, [*value, *value.values()]))
  if type(value) is float:
    return math.isfinite(value)
  return value is None or type(value) in (bool, int, str, bytes, Reference)


class _Delegate(config_parser.ParserDelegate):
  """Makes gin's parser return `Reference`s instead of looking up names."""

  def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
    scope, _, name = scoped_configurable_name.rpartition("/")
    return Reference(scope, name, evaluate)

  def macro(self, macro_name: str) -> Reference:
    return Reference(macro_name, MACRO, called=True)


def _read_file(config: Config, path: str, including: tuple[str, ...]) -> None:
  data = bounded.content(path, "a gin file", remedy="make it readable")
  try:
    text = io.StringIO(data.decode("utf-8-sig"), newline=None).read()  # all kinds of line ends
  except UnicodeDecodeError:
    raise ConfigError(f"{path} is not text; a gin file must be UTF-8.") from None
  config.files.append(path)
  _read_text(config, text, path, (*including, path))


def _read_text(config: Config, text: str, source: str, including: tuple[str, ...]) -> None:
  for statement in _statements(text, source):
    where = _place(source, statement.location.line_num)
    if isinstance(statement, config_parser.IncludeStatement):
      with at(where):
        path = _included(statement.filename, including)
      _read_file(config, path, including)
    elif isinstance(statement, config_parser.ImportStatement):
      config.imports.append((where, statement))
    elif isinstance(statement, config_parser.BindingStatement):
      config.bindings.append(_binding(statement, where, source))


def _binding(statement: config_parser.BindingStatement, where: str, source: str) -> Binding:
  scope, name, parameter, value, _ = statement
  if not parameter:
    scope, name, parameter = scoped(scope, name), MACRO, "value"
  binding = Binding(where, source, scope, name, parameter, value)
  if not is_writable(value):
    raise ConfigError(
      f"{where}: {binding} is {binding.told}; it must be finite. Use None for no limit."
    )
  return binding


def _statements(text: str, source: str) -> Iterator[Any]:
  try:
    yield from config_parser.ConfigParser(text, _Delegate())
  except SyntaxError as error:
    raise _unreadable(source, error.lineno or 1, error.msg, text) from None
  except tokenize.TokenError as error:
    message, (line, _) = error.args
    if "EOF" in message:
      message = "a bracket or a quote is never closed"
    raise _unreadable(source, line, message, text) from None
  except Exception as error:  # from Python's own parser: nesting, null characters, long numbers
    raise ConfigError(
      f"{source} cannot be read as gin ({type(error).__name__}: {printable(first_line(error))}); "
      "correct its syntax."
    ) from None


def _unreadable(source: str, line: int, message: str, text: str) -> ConfigError:
  lines = text.rstrip("\n").split("\n")
  line = min(line, len(lines))
  read, where = lines[line - 1].strip(), _place(source, line)
  error: ConfigError = registry.load("part", "unreadable_line")(where, read, message)
  return error


def _place(source: str, line: int) -> str:
  return source if source.startswith("--") else f"{source}:{line}"


def _included(name: str, including: tuple[str, ...]) -> str:
  path = _gin_file(name, [os.path.dirname(including[-1]), ""] if including else [""])
  if len(including) == _MOST_INCLUDES:
    raise ConfigError(f"{path} is included {_MOST_INCLUDES} deep; end the chain, or join files.")
  if path in including:
    chain = " includes ".join([*including, path])
    raise ConfigError(f"{chain}; a file must not include itself. Remove one of the includes.")
  return path


def _gin_file(name: str, folders: Sequence[str]) -> str:
  """Returns the path of a gin file, searched in `folders` and then among the shipped."""
  urls.require_path("the gin file", name, "configs are read from disk")
  tops = [*folders, str(imports.SHIPPED)]
  paths = list(dict.fromkeys(os.path.normpath(os.path.join(top, name)) for top in tops))
  for path in paths:
    if os.path.isfile(path):
      return path
  for path in paths:
    if os.path.exists(path):
      return path  # a folder or a pipe: the reader says which
  raise registry.load("part", "no_gin_file")(name, paths)
