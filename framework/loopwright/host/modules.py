"""Names of modules: those of the shipped tasks, now and before; names that two modules have.

Each shipped task is a module of `loopwright.tasks`. Older run folders name it `tasks.gan` or
`framework.tasks.gan`, as the package was called `framework`.
"""

import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

TASKS = "loopwright.tasks"
FOLDER = Path(__file__).parents[1] / "tasks"
_BEFORE = re.compile(r"(?<![\w.])(?:framework\.)?tasks\.[A-Za-z_]\w*|(?<![\w.])framework\.\w+")


def current(text: str) -> str:
  """Returns a text with the names of our modules as they are now: loopwright.tasks.gan.

  A module `tasks.gan` or `framework.tasks.gan` of the user's own keeps its name.
  """
  return _BEFORE.sub(lambda found: _current(found[0]), text)


def _current(module: str) -> str:
  name = module.removeprefix("framework.")
  ours = FOLDER.parent.joinpath(*name.split("."))
  if not ours.with_suffix(".py").is_file() and (name.startswith("tasks.") or not ours.is_dir()):
    return module
  theirs = _file_of(module)
  is_theirs = theirs is not None and FOLDER.resolve() not in Path(theirs).resolve().parents
  return module if is_theirs else f"loopwright.{name}"


def _file_of(module: str) -> str | None:
  """Returns the file that `import tasks.x` would execute; imports nothing."""
  places, name = None, ""
  for part in module.split("."):
    name = f"{name}.{part}".lstrip(".")
    found = importlib.machinery.PathFinder.find_spec(name, places)
    if found is None:
      return None
    places = found.submodule_search_locations
  return found.origin if found and found.has_location else None


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


def mistaken(name: str, loaded: Iterable[str]) -> str | None:
  """Returns the line about a user's module in whose place another one was imported.

  Args:
    name: of a module that a config imports.
    loaded: names of the modules that this import loaded; of the user's, what they import counts.
  """
  if not _is_the_users(name) and (line := namesake(name)):
    return line
  for importer in filter(_is_the_users, loaded):
    for value in list(vars(sys.modules[importer]).values()):
      wanted = value.__name__ if isinstance(value, ModuleType) else _home(value)
      if wanted in sys.modules and not _is_the_users(wanted) and (line := namesake(wanted)):
        return f"{importer} imports {wanted}, but {line}"
  return None


def _home(value: object) -> str:
  name = getattr(value, "__module__", None)
  return name if isinstance(name, str) else ""


def _is_the_users(name: str) -> bool:
  file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
  if not isinstance(file, str) or name.startswith("loopwright."):
    return False
  return not is_installed(os.path.abspath(file))


def is_installed(path: str) -> bool:
  """Whether a path is of Python, or of an installed package."""
  return path.startswith((sys.prefix, sys.base_prefix))
