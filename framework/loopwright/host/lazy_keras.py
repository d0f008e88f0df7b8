"""Defers the import of parts of Keras that import other libraries, and of tf_keras.

If scikit-learn and matplotlib are installed, `import keras` imports both in every process, for
wrappers and plots that no step uses; docs/architecture.md gives the cost. Orbit imports tf_keras,
and uses none of it. `importlib.util`'s LazyLoader does not help: it executes a module at any
attribute access, and AutoGraph accesses all modules. The modules here are executed at the first
access to a name of their own, or to a module in them.

While tf_keras is not executed no object is of one of its classes, so `tf_keras_classes` has none.
"""

import abc
import importlib
import importlib.abc
import importlib.machinery
import operator
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
  import keras
  import tf_keras

PARTS = frozenset(
  f"keras.{name}"
  for part in ("visualization", "wrappers")
  for name in (part, f"src.{part}", f"_tf_keras.keras.{part}")
)
TF_KERAS = "tf_keras"
_ASKED = ("__all__", "__version__", "__internal__")
"""Names with underscores at which a module is executed."""
_waiting: list[Callable[[], None]] = []


class Finder(importlib.abc.MetaPathFinder):
  """Finds the deferred modules as Python does, with a loader that defers execution."""

  def find_spec(
    self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
  ) -> importlib.machinery.ModuleSpec | None:
    """Returns the spec of a deferred module; None for others."""
    if fullname.startswith(f"{TF_KERAS}."):
      getattr(sys.modules.get(TF_KERAS), "Model", None)  # before any module in it
    if fullname not in PARTS and fullname != TF_KERAS:
      return None
    spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
    if spec is not None and spec.loader is not None:
      spec.loader = Deferred(spec.loader)
    return spec


class Deferred(importlib.abc.Loader):
  """Executes a module with another loader at the first access to a missing name."""

  def __init__(self, loader: importlib.abc.Loader) -> None:
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
      if name.startswith("__") and name not in _ASKED:  # Python and AutoGraph ask any module
        raise absent
      with self._lock:
        if not self._started:
          self._started = True
          try:
            self._loader.exec_module(module)
          except BaseException:
            self._started = False
            raise
          vars(module).pop("__getattr__", None)
          if module.__name__ == TF_KERAS:
            while _waiting:
              _waiting.pop(0)()
      if name not in vars(module):
        raise absent
      return vars(module)[name]

    vars(module)["__getattr__"] = missing


def tf_keras_loaded() -> bool:
  """Whether tf_keras has been executed, and is not only imported."""
  module = sys.modules.get(TF_KERAS)
  return module is not None and "Model" in vars(module)


def tf_keras_classes(*paths: str) -> tuple[type, ...]:
  """Returns classes of tf_keras, such as "layers.Layer"; none if it has not been executed."""
  if not tf_keras_loaded():
    return ()
  return operator.attrgetter(*paths, "Model")(sys.modules[TF_KERAS])[:-1]


def kerases() -> list[ModuleType]:
  """Returns Keras 3, and tf_keras if it has been executed."""
  return [sys.modules[name] for name in ("keras", *[TF_KERAS] * tf_keras_loaded())]


if TYPE_CHECKING:
  KerasOptimizer: TypeAlias = keras.optimizers.Optimizer | tf_keras.optimizers.Optimizer
else:

  class KerasOptimizer(abc.ABC):  # noqa: B024
    """An optimizer of Keras 3 or tf_keras; a union of both would execute tf_keras."""

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
      """Whether a class is one of either Keras."""
      known = tuple(package.optimizers.Optimizer for package in kerases())
      return issubclass(other, known) or NotImplemented


def when_tf_keras_loads(call: Callable[[], None]) -> None:
  """Calls `call` when tf_keras has been executed: at once, or right after its execution (host)."""
  if tf_keras_loaded():
    call()
  elif _is_installed():
    _waiting.append(call)
  else:  # its import cannot be noticed: it is now
    importlib.import_module(TF_KERAS)
    call()


def install() -> None:
  """Defers these modules in this process; no effect once Keras is imported (host)."""
  if not _is_installed():
    sys.meta_path.insert(0, Finder())


def _is_installed() -> bool:
  return any(isinstance(finder, Finder) for finder in sys.meta_path)
