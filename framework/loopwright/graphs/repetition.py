"""What the trace of a recomputation tells the rest; see loopwright/models/recomputation.py."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from loopwright.graphs.randomness import RandomStream


class _State(threading.local):
  def __init__(self) -> None:
    self.streams: list[RandomStream] = []
    self.repeating = False


_state = _State()


def stream() -> RandomStream | None:
  """Returns the stream of the innermost recomputed function that is being traced, or None."""
  return _state.streams[-1] if _state.streams else None


def is_repeating() -> bool:
  """Whether the trace is that of a recomputation, whose side effects must not count."""
  return _state.repeating


@contextlib.contextmanager
def drawing_from(own: RandomStream) -> Iterator[None]:
  """Inside `with`, `stream` is that of a recomputed function."""
  _state.streams.append(own)
  try:
    yield
  finally:
    _state.streams.pop()


@contextlib.contextmanager
def repeating() -> Iterator[None]:
  """Inside `with`, the trace is that of a recomputation."""
  outer, _state.repeating = _state.repeating, True
  try:
    yield
  finally:
    _state.repeating = outer
