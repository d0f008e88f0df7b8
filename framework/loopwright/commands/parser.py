"""The parser of every command line: argparse, whose mistakes are one line."""

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from loopwright.errors import UsageError, suggest

_LIMIT = 2**63 - 1


class Parser(argparse.ArgumentParser):
  """Takes flags as --name=value or --name value, before, between and after arguments.

  parser = Parser(prog="loopwright sweep")
  parser.whole("jobs", 1, "How many at once.", at_least=1)
  values, arguments = parser.parse(["digits_cnn", "--jobs=2"])
  """

  def __init__(self, **options: Any) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    super().__init__(**options, add_help=False, allow_abbrev=False, formatter_class=formatter)
    self.switches = {"help", "version"}
    self.names = {"help"}
    self.add_argument("-h", "--help", action="store_true", help="Print this help.")

  def switch(self, name: str, told: str) -> None:
    """Adds a flag without a value, False by default."""
    self.switches.add(name)
    self._flag(name, told, action="store_true")

  def text(self, name: str, default: str | None, told: str) -> None:
    """Adds a flag whose value is a text."""
    self._flag(name, told, metavar="...", default=default)

  def texts(self, name: str, told: str) -> None:
    """Adds a flag that may come several times; its value is the list."""
    self._flag(name, told, metavar="...", action="append", default=[])

  def choice(self, name: str, default: str | None, choices: Sequence[str], told: str) -> None:
    """Adds a flag whose value is one of `choices`; a single one is not offered in the help."""

    def read(text: str) -> str:
      if text in choices:
        return text
      raise ValueError(f"it must be one of {', '.join(choices)}.{suggest(text, choices)}")

    told = told if len(choices) > 1 else argparse.SUPPRESS
    self.value(name, default, read, told, choices=choices, metavar=None)

  def whole(
    self, name: str, default: int | None, told: str, *, at_least: int = 0, at_most: int = _LIMIT
  ) -> None:
    """Adds a flag whose value is a whole number within bounds."""

    def read(text: str) -> int:
      if re.fullmatch(r"-?\d{1,19}", text, re.ASCII) and at_least <= int(text) <= at_most:
        return int(text)
      to = f"from {at_least} to {at_most}" if at_most < _LIMIT else f"of at least {at_least}"
      raise ValueError(f"it must be a whole number {to}")

    self.value(name, default, read, told)

  def value(
    self, name: str, default: Any, read: Callable[[str], Any], told: str, **options: Any
  ) -> None:
    """Adds a flag whose value `read` makes of the text, or raises a ValueError with the reason."""

    def value(text: str) -> Any:
      try:
        return read(text)
      except ValueError as error:
        raise argparse.ArgumentTypeError(f"--{name}={text}: {error}") from None

    self._flag(name, told, **{"metavar": "...", "type": value, "default": default, **options})

  def parse(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the flags, and the other words; a word that is an unknown flag is one of them.

    Raises:
      UsageError: a value is missing or wrong.
    """
    words = [word for each in argv for word in self._plain(each)]
    values, rest = self.parse_known_args(words)
    return values, [word for word in rest if word != "--"]

  def error(self, message: str) -> NoReturn:
    """Raises a UsageError in place of argparse's exit."""
    found = re.fullmatch(r"argument (?:-\w/)?(--\w+): (.*)", message, re.DOTALL)
    if not found:
      raise UsageError(message)
    flag, text = found.groups()
    if "expected one argument" in text:
      raise UsageError(f"{flag} needs a value, as in {flag}=...")
    if "ignored explicit argument" in text:
      raise UsageError(f"{flag} is a switch, which takes no value; write {flag} alone")
    raise UsageError(text)

  def _flag(self, name: str, told: str, **options: Any) -> None:
    self.names.add(name)
    self.add_argument(f"--{name}", help=told.replace("%", "%%"), **options)

  def _plain(self, word: str) -> list[str]:
    """Returns a word in argparse's form: two dashes, underscores, a switch without its value."""
    found = re.fullmatch(r"--?(\w[\w-]*)(=.*)?", word, re.DOTALL)
    name = found[1].replace("-", "_") if found else ""
    if not found or name not in self.names:
      return [word]
    on = (found[2] or "").lower()
    if name in self.switches and on in ("=true", "=false"):
      return [f"--{name}"] if on == "=true" else []
    return [f"--{name}{found[2] or ''}"]
