"""Errors for users: one line with the wrong value, what it must be, and what to do."""

import difflib
import math
import numbers
import os
import sysconfig
from collections.abc import Iterable
from typing import Any

_INSTALLED = tuple(sysconfig.get_path(x) for x in ("stdlib", "purelib", "platlib", "scripts"))
_PACKAGE = os.path.join(os.path.dirname(__file__), "")
_TASKS = os.path.join(_PACKAGE, "tasks", "")

INT64_MAX = 2**63 - 1


class ConfigError(ValueError):
  """A mistake in a config, a task or the data; launch.py prints its line and exits with 2.

  >>> lw.ArraySource({"x": np.zeros(3), "y": np.zeros(2)})
  Traceback (most recent call last):
  loopwright.errors.ConfigError: features have different lengths ('x' 3, 'y' 2); they must have one
    row per example.
  """


class UsageError(ConfigError):
  """A mistake in the flags or arguments of a command line."""


def suggest(name: str, choices: Iterable[str]) -> str:
  """Returns " Did you mean 'x'?" for the closest of `choices`, or "" if none is close."""
  near = difflib.get_close_matches(name, list(choices), n=1)
  return f" Did you mean {near[0]!r}?" if near else ""


def unknown(what: str, value: object, choices: Iterable[str]) -> ConfigError:
  """Returns the error for a `value` that is not one of `choices`."""
  names = sorted(choices)
  hint = suggest(str(value), names)
  return ConfigError(f"unknown {what} {value!r}; it must be one of {', '.join(names)}.{hint}")


def is_integer(value: object, *, at_least: int, at_most: int = INT64_MAX) -> bool:
  """Whether `value` is an integer of Python or NumPy (not a bool) within the bounds."""
  if not isinstance(value, numbers.Integral) or isinstance(value, bool):
    return False
  return at_least <= int(value) <= at_most


def require_integer(what: str, value: Any, *, at_least: int, at_most: int = INT64_MAX) -> int:
  """Returns `value` as an int; raises a ConfigError unless it is an integer within the bounds."""
  if not is_integer(value, at_least=at_least, at_most=at_most):
    above = isinstance(value, numbers.Integral) and int(value) > at_most
    both = above or at_most < INT64_MAX
    bounds = f"from {at_least} to {at_most}" if both else f"of at least {at_least}"
    raise ConfigError(f"{what} is {shown(value)}; it must be a whole number {bounds}.")
  return int(value)


def is_finite(value: object) -> bool:
  """Whether `value` is a number (not a bool) that a float64 can hold."""
  if not isinstance(value, numbers.Real) or isinstance(value, bool):
    return False
  try:
    return math.isfinite(value)
  except OverflowError:  # an int above 1.8e308
    return False


def require_positive(what: str, value: float, *, unit: str = "") -> None:
  """Raises a ConfigError, which names `what` and the `unit`, unless `value` is above 0.

  Infinity passes. An int that a float64 cannot hold does not.
  """
  if not value > 0 or (isinstance(value, int) and not is_finite(value)):
    limit = "above 0" if not value > 0 else "a number that a float64 can hold"
    raise ConfigError(f"{what} is {shown(value)}; it must be {limit}{unit and f' {unit}'}.")


def shown(value: object, most: int = 200) -> str:
  """Returns the repr of a value that an error names, shortened in the middle if it is long."""
  try:
    text = repr(value)
  except ValueError:  # Python refuses to write an int of more than 4,300 digits
    return "a number of several thousand digits"
  return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 4 :]}"


def kind(value: object) -> str:
  """Returns what an error calls a wrong value: "None", "a tensor of shape (4, 1)" or "a list"."""
  if value is None:
    return "None"
  shape = getattr(value, "shape", None) if hasattr(value, "dtype") else None  # a table has none
  return f"a {type(value).__name__}" if shape is None else f"a tensor of shape {shape}"


def is_the_users(file: str) -> bool:
  """Whether a file in a traceback belongs neither to the framework nor to an installed package."""
  names = ("launch.py", "<", "__autograph_generated_file")
  if is_the_frameworks(file) or file.startswith(_INSTALLED):
    return False
  return not os.path.basename(file).startswith(names)


def is_the_frameworks(file: str) -> bool:
  """Whether a file in a traceback belongs to the framework, without its tasks."""
  return file.startswith(_PACKAGE) and not file.startswith(_TASKS)


def printable(line: str) -> str:
  """Returns a line with control characters, line breaks and surrogates escaped, as in a repr."""
  return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


class Preempted(Exception):  # noqa: N818  (an event, not an error)
  """Raised after SIGTERM, when the state is saved; launch.py exits with status 75."""


class Failed(RuntimeError):  # noqa: N818  (what happened)
  """A failure, no mistake, which one line tells; launch.py prints no traceback, exits with 1."""


USER_ERROR = "user error: "
"""Prefix of the pipeline's message, in a tf.errors.OpError, about a mistake in the user's data."""


def first_line(error: BaseException) -> str:
  """Returns the first line of an error's text, or the name of its class if it has no text."""
  return str(error).strip().partition("\n")[0] or type(error).__name__
