"""The user's mistakes: one line that names the value, what it must be, and the remedy."""

import difflib
from collections.abc import Iterable


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


class Preempted(Exception):  # noqa: N818  (an event, not an error)
  """SIGTERM came and the state is saved; launch.py exits with status 75, "try again later"."""
