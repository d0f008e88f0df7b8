"""The user's mistakes: one line that names the value, what it must be, and the remedy."""

import difflib
import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

_PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_NOT_THE_USERS = (
  str(Path(__file__).parent),
  *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)


class ConfigError(ValueError):
  """A mistake in a config, a task or the data; launch.py prints it and exits with status 2."""


def suggest(name: str, choices: Iterable[str]) -> str:
  """Returns " Did you mean 'x'?" for the choice nearest to `name`, or "" if none is near."""
  near = difflib.get_close_matches(name, list(choices), n=1)
  return f" Did you mean {near[0]!r}?" if near else ""


def unknown(what: str, value: object, choices: Iterable[str]) -> ConfigError:
  """Returns the error for a `value` that is not one of `choices`."""
  names = sorted(choices)
  hint = suggest(str(value), names)
  return ConfigError(f"unknown {what} {value!r}; it must be one of {', '.join(names)}.{hint}")


def kind(value: object) -> str:
  """Returns what a wrong value is, in words: "None", "a tensor of shape (4, 1)" or "a list"."""
  if value is None:
    return "None"
  shape = getattr(value, "shape", None)
  return f"a {type(value).__name__}" if shape is None else f"a tensor of shape {shape}"


def failure(error: BaseException) -> str:
  """Returns one line on an error that is no `ConfigError`: what, and where in the user's code.

  TensorFlow and AutoGraph put both into a text of many lines: the places first, the reason last.
  """
  noise = ("In call to configurable", "File ", "[[", "Arguments received by", "•")
  lines = [line.strip() for line in re.sub(r"\x1b\[\d+m", "", str(error)).splitlines()]
  lines = [line for line in lines if line and not line.startswith(noise)] or [""]
  reason = lines[-1] if _PLACE.search(str(error)) else lines[0]
  if several := re.search(r"^\s*\(0\) [A-Z_]+: +(.+)$", str(error), re.MULTILINE):
    reason = re.sub(r"(?<=\S)\{\{node \S+\}\}$", "", several[1])  # the node once more
    reason = re.sub(r"\{\{node (\S+)\}\}", r"\1", reason)
  if not re.match(r"\w+(Error|Exception): ", reason):
    reason = f"{type(error).__name__}: {reason}"
  frames = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]
  places = [(file, line, name) for file, line, name in [*frames, *_PLACE.findall(str(error))]]
  for file, line, name in reversed(places):
    if is_the_users(file):
      return f"{reason} ({Path(file).name}:{line}, in {name})"
  return reason


def is_the_users(file: str) -> bool:
  """Whether a file of a traceback is neither the framework's nor an installed package's."""
  names = ("launch.py", "<", "__autograph_generated_file")
  return not file.startswith(_NOT_THE_USERS) and not Path(file).name.startswith(names)


def mistake(error: Exception) -> str | None:
  """Returns the one line of a user's mistake, or None for a failure.

  TensorFlow hides a mistake found while tracing or in the input pipeline, which marks it with
  "user error: ", in the text of an error of its own; gin appends lines to any error.
  """
  if "[user error: " in str(error):
    return user_error(error)
  hidden = re.search(r"\b(?:user error|ConfigError): (.*)", str(error))
  if hidden:
    return hidden[1]
  return str(error).partition("\n")[0] if isinstance(error, ConfigError) else None


class Preempted(Exception):  # noqa: N818  (an event, not an error)
  """SIGTERM came and the state is saved; launch.py exits with status 75, "try again later"."""


USER_ERROR = "user error: "
"""Begins what the pipeline raises, inside a tf.errors.OpError, for a mistake in the user's data."""


def user_error(error: BaseException) -> str | None:
  """Returns the line meant for the user in what a running pipeline raised; None if there is none.

  TensorFlow wraps the line in an account of ops and iterators, which does not help its reader.
  """
  found = re.search(rf"\[{USER_ERROR}(.*?)\](?:\n|$)", str(error))
  return re.sub(r"\\(['\"\\])", r"\1", found[1]) if found else None


def first_line(error: BaseException) -> str:
  """Returns the first line of an error's text, or the name of its class if it has no text."""
  return str(error).strip().partition("\n")[0] or type(error).__name__
