"""Names of modules: those of the shipped tasks; names that two modules have."""

import importlib.machinery
import os
import re
import sys
from pathlib import Path

TASKS = "loopwright.tasks"
FOLDER = Path(__file__).parents[1] / "tasks"


def users_folders() -> list[str]:
  """Returns the folders of `sys.path` in which nothing is installed."""
  return [folder or os.getcwd() for folder in sys.path if not is_installed(folder)]


def namesake(name: str) -> str | None:
  """Returns the line about a module of the user's that has the name of another; None if none has.

  Args:
    name: of a module, or of something in it.
  """
  top = name.partition(".")[0]
  folders = users_folders()
  files = [os.path.join(f, end) for f in folders for end in (f"{top}.py", f"{top}/__init__.py")]
  own = [file for file in files if os.path.isfile(file)]
  if not own or top == __name__.partition(".")[0]:
    return None
  if top in sys.stdlib_module_names:
    return f"{own[0]} has the name of Python's own module {top!r}: rename it."
  there = importlib.machinery.PathFinder.find_spec(top, [p for p in sys.path if p not in folders])
  if there is None or not there.origin:
    return None
  return f"{own[0]} has the name of the module {top!r} of {there.origin}: rename it."


def namesake_in(error: BaseException) -> str | None:
  """Returns the line about such a module that explains an error; None if none does."""
  if not isinstance(error, (ImportError, AttributeError)):
    return None
  for name in re.findall(r"'([A-Za-z_]\w*)[.']", str(error)):
    if line := namesake(name):
      return f"{line} ({type(error).__name__}: {error})"
  return None


def is_installed(path: str) -> bool:
  """Whether a path is of Python, or of an installed package."""
  return path.startswith((sys.prefix, sys.base_prefix))
