"""Names of modules: the shipped tasks', now and before.

Each shipped task is a module of `framework.tasks`. Run folders of before name it `tasks.gan`.
"""

import importlib.machinery
import importlib.util
import re
from pathlib import Path

TASKS = "framework.tasks"
FOLDER = Path(__file__).parents[1] / "tasks"
_BEFORE = re.compile(r"(?<![\w.])tasks\.[A-Za-z_]\w*")


def current(text: str) -> str:
  """Returns a text with the names of shipped tasks as they are now: framework.tasks.gan.

  A module `tasks.gan` of the user's own keeps its name.
  """
  return _BEFORE.sub(lambda found: _current(found[0]), text)


def _current(module: str) -> str:
  name = module.partition(".")[2]
  ours = FOLDER / f"{name}.py"
  if not ours.is_file():
    return module
  theirs = _file_of(module)
  return module if theirs and not ours.samefile(theirs) else f"{TASKS}.{name}"


def _file_of(module: str) -> str | None:
  """Returns the file that `import tasks.x` would execute; imports nothing."""
  package = importlib.util.find_spec(module.partition(".")[0])
  places = package and package.submodule_search_locations
  found = places and importlib.machinery.PathFinder.find_spec(module, [*places])
  return found.origin if found and found.has_location else None
