"""Imports the modules that a gin file names, and explains failures."""

import contextlib
import gc
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator

from loopwright import registry
from loopwright.errors import ConfigError, suggest
from loopwright.host import modules, signals
from loopwright.host.children import SOURCE

REPOSITORY = SOURCE.parent if (SOURCE.parent / "setup.cfg").exists() else SOURCE
"""The clone; or, of an installed package, where packages are installed."""

SHIPPED = SOURCE / "loopwright" if REPOSITORY == SOURCE else REPOSITORY
"""The folder of configs/; a package has it inside."""


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
  """Inside `with`, Python searches no garbage, if the process is a command's own (host).

  The import of TensorFlow and Keras makes a million objects and no garbage, and the search takes a
  fifth of its time. What there is at the end is never searched again. Threads that begin in the
  import, as those of OpenBLAS, leave SIGTERM to the main thread; see `signals.kept`.
  """
  if not signals.owns_process or not gc.isenabled() or "tensorflow" in sys.modules:
    yield
    return
  gc.disable()
  try:
    with signals.kept():
      yield
  finally:
    gc.freeze()
    gc.enable()


def make_importable(gin_files: Iterable[str]) -> None:
  """Makes the modules in the working directory and next to the gin files importable.

  Behind Python's own modules, so that a `queue.py` of the user's replaces none of them.
  """
  if not {"", os.getcwd()} & set(sys.path):
    own = sysconfig.get_path("stdlib")
    places = [sys.path.index(x) for x in (own, f"{own}/lib-dynload") if x in sys.path]
    sys.path.insert(max(places, default=-1) + 1, os.getcwd())
  for file in gin_files:
    if "://" in file:
      continue
    folder = os.path.dirname(os.path.abspath(file))
    if folder not in sys.path:
      sys.path.append(folder)


def import_module(module: str) -> None:
  """Imports a module that a gin file names.

  Raises:
    ConfigError: there is no such module, or importing it failed.
  """
  if module.startswith("__gin__"):
    raise ConfigError(f"{module} is not supported. Import modules; they register their own names.")
  try:
    importlib.import_module(module)
  except ConfigError:
    raise
  except Exception as error:
    if line := modules.namesake_in(error):
      raise ConfigError(f"import {module} failed: {line}") from error
    if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
      hint = suggest(module, registry.load("part", "own_modules")())
      hint = hint or " Start where it is found, or add its folder to PYTHONPATH."
      raise ConfigError(f"no module named {module!r}.{hint}") from error
    raise ConfigError(_failure(module, error)) from error


def _failure(module: str, error: Exception) -> str:
  frame = traceback.extract_tb(error.__traceback__)[-1]
  place = f"{frame.filename}:{frame.lineno}"
  if isinstance(error, SyntaxError):
    place = f"{error.filename}:{error.lineno}"
  reason = str(error).partition("\n")[0]
  return f"import {module} failed at {place} with {type(error).__name__}: {reason}"
