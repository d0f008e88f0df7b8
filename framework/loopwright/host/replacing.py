"""Attributes replaced: those of a thread, and functions of another library."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def replaced(owner: ModuleType | threading.local, **attributes: Any) -> Iterator[None]:
  """Inside `with`, attributes of these names are others; those of a module in all threads."""
  before = {name: getattr(owner, name) for name in attributes}
  vars(owner).update(attributes)
  try:
    yield
  finally:
    vars(owner).update(before)


def wrap(owner: type | ModuleType, name: str, instead: Callable[..., Any]) -> None:
  """Replaces a method or function for good by `instead`, which gets it and then its arguments."""
  usual = getattr(owner, name)

  @functools.wraps(usual)
  def call(*args: Any, **kwargs: Any) -> Any:
    return instead(usual, *args, **kwargs)

  setattr(owner, name, call)
