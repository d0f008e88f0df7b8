"""Functions of another library replaced for a while, where it offers no other way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def replaced(module: ModuleType, **functions: Callable[..., Any]) -> Iterator[None]:
  """Inside `with`, a module's functions of these names are others, in all threads."""
  before = {name: getattr(module, name) for name in functions}
  vars(module).update(functions)
  try:
    yield
  finally:
    vars(module).update(before)
