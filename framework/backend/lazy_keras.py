"""Defers the import of parts of Keras that import other libraries.

If scikit-learn and matplotlib are installed, `import keras` imports both in every process, for
wrappers and plots that no step uses; docs/architecture.md gives the cost. `importlib.util`'s
LazyLoader does not help: it executes a module at any attribute access, and AutoGraph accesses all
modules. The modules here are executed at the first access to a name of their own.
"""

import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

PARTS = frozenset(
  f"keras.{name}"
  for part in ("visualization", "wrappers")
  for name in (part, f"src.{part}", f"_tf_keras.keras.{part}")
)


class Finder(importlib.abc.MetaPathFinder):
  """Finds the deferred modules as Python does, with a loader that defers execution."""

  def find_spec(
    self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
  ) -> importlib.machinery.ModuleSpec | None:
    """Returns the spec of a deferred module; None for others."""
    if fullname not in PARTS:
      return None
    spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
    if spec is not None and spec.loader is not None:
      spec.loader = Deferred(spec.loader)
    return spec


class Deferred(importlib.abc.Loader):
  """Executes a module with another loader at the first access to a missing name."""

  def __init__(self, loader: importlib.abc.Loader) -> None:
    """Stores the loader that executes the module."""
    self._loader = loader
    self._lock = threading.RLock()
    self._started = False

  def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
    """Returns the module of the other loader."""
    return self._loader.create_module(spec)

  def exec_module(self, module: ModuleType) -> None:
    """Gives the module a `__getattr__` that executes it."""

    def missing(name: str) -> Any:
      absent = AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
      if name.startswith("__") and name != "__all__":  # Python and AutoGraph ask any module
        raise absent
      with self._lock:
        if not self._started:
          self._started = True
          try:
            self._loader.exec_module(module)
          except BaseException:
            self._started = False
            raise
          del vars(module)["__getattr__"]
      if name not in vars(module):
        raise absent
      return vars(module)[name]

    vars(module)["__getattr__"] = missing


def install() -> None:
  """Defers these modules in this process; no effect once Keras is imported (host)."""
  if not any(isinstance(finder, Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, Finder())
