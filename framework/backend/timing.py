"""Measures wall time by named parts that exclude each other.

An inner part pauses the outer one, so the parts always add up to the total. Without a running
stopwatch, `timed` costs one variable lookup.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.framework import config as tf_config

Function = TypeVar("Function", bound=Callable[..., Any])

HOST = "host"
"""The part for time that is in no other part."""

_running: contextvars.ContextVar[Stopwatch | None] = contextvars.ContextVar("running", default=None)


class Stopwatch:
  """Accumulates the seconds of each part.

  Attributes:
    seconds: part -> seconds so far; the current part is added when it ends or is paused.
  """

  def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
    """Makes a stopped watch; `clock` returns seconds, monotonic."""
    self.seconds: dict[str, float] = collections.defaultdict(float)
    self._clock = clock
    self._parts: list[str] = []
    self._since = 0.0

  def start(self) -> None:
    """Starts with the part `HOST`; from now on `timed` functions count for this watch."""
    self._parts, self._since = [HOST], self._clock()
    _running.set(self)

  def stop(self) -> None:
    """Stops; `timed` functions no longer count."""
    self._turn()
    self._parts = []
    _running.set(None)

  @property
  def is_running(self) -> bool:
    """Whether it is started and not stopped."""
    return bool(self._parts)

  @contextlib.contextmanager
  def part(self, name: str) -> Iterator[None]:
    """Counts the time in the `with` for `name`, except for parts inside it."""
    self._turn()
    self._parts.append(name)
    try:
      yield
    finally:
      self._turn()
      self._parts.pop()

  def _turn(self) -> None:
    now = self._clock()
    self.seconds[self._parts[-1]] += now - self._since
    self._since = now


def timed(name: str) -> Callable[[Function], Function]:
  """Decorator: counts the time in a function for the part `name` of the running stopwatch."""

  def decorate(function: Function) -> Function:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
      watch = _running.get()
      if watch is None:
        return function(*args, **kwargs)
      with watch.part(name):
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]

  return decorate


def timestamp() -> tf.Tensor:
  """Returns the seconds since 1970-01-01 UTC, a float64 scalar (any context)."""
  if tf_config.is_op_determinism_enabled():  # it forbids tf.timestamp
    return tf.ensure_shape(tf.numpy_function(time.time, [], tf.float64), [])
  return tf.timestamp()
