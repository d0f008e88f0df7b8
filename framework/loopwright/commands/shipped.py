"""Finds configs by name: the user's, then those that come with Loopwright."""

import os
from pathlib import Path

from loopwright.configurables.imports import SHIPPED
from loopwright.errors import ConfigError, suggest

_FOLDER = "configs"


def names() -> list[str]:
  """Returns the names of the shipped configs, such as "digits_cnn"."""
  return sorted(file.stem for file in (SHIPPED / _FOLDER).glob("*.gin"))


def find(name: str) -> str:
  """Returns the gin file that an argument names, as a path for `configurables.parse` (host).

  A path, or a word that ends in .gin, names a file. Any other word is looked up: NAME.gin here,
  then in configs/ here, then the shipped config.

  Raises:
    ConfigError: nothing has this name.
  """
  if name.endswith(".gin") or os.sep in name:
    return name
  for path in (f"{name}.gin", os.path.join(_FOLDER, f"{name}.gin")):
    if os.path.isfile(path):
      return path
  if name in names():
    return os.path.join(_FOLDER, f"{name}.gin")
  known = sorted({*_here(), *names()})
  hint = suggest(name, known) or f" It must be a gin file, or one of {', '.join(known)}."
  raise ConfigError(f"there is no config {name!r}.{hint}")


def the_only_one() -> str:
  """Returns the gin file of a folder that has exactly one.

  Raises:
    ConfigError: the working directory has none, or several.
  """
  found = _here()
  if len(found) == 1:
    return f"{found[0]}.gin"
  if found:
    raise ConfigError(f"this folder has several configs; name one of {', '.join(found)}.")
  raise ConfigError(
    "no config: name a gin file, or a shipped config such as digits_cnn, or make a project with "
    "`loopwright new NAME`."
  )


def _here() -> list[str]:
  return sorted(file.stem for file in Path().glob("*.gin"))
