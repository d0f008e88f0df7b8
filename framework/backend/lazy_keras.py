"""Keras's parts that import other libraries, left until somebody asks for them.

Where scikit-learn and matplotlib are installed, `import keras` imports both, for wrappers and plots
that no step uses, in every process of a cluster; docs/architecture.md says what that costs.
`importlib.util.LazyLoader` would not do: it executes a module at any look at it, and AutoGraph
looks at every module there is. These parts are executed when a name of their own is asked for.
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
  """Finds the parts as Python does, and defers them."""

  def find_spec(
    self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
  ) -> importlib.machinery.ModuleSpec | None:
    """Returns the spec of a part; None for everything else."""
    if fullname not in PARTS:
      return None
    spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
    if spec is not None and spec.loader is not None:
      spec.loader = Deferred(spec.loader)
    return spec


class Deferred(importlib.abc.Loader):
  """Executes a module by another loader, at the first question for a name that is not there."""

  def __init__(self, loader: importlib.abc.Loader) -> None:
    """Takes the loader that will execute the module."""
    self._loader = loader
    self._lock = threading.RLock()
    self._started = False

  def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
    """Returns what the other loader makes."""
    return self._loader.create_module(spec)

  def exec_module(self, module: ModuleType) -> None:
    """Gives the module a `__getattr__`, until it is executed."""

    def missing(name: str) -> Any:
      absent = AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
      if name.startswith("__") and name != "__all__":  # of Python's and AutoGraph's own interest
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
  """Defers the parts in this process; changes nothing once Keras has been imported (host)."""
  if not any(isinstance(finder, Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, Finder())
