"""Where wall time goes: parts that exclude each other, entered and left by what does the work.

    watch = Stopwatch()
    watch.start()
    train()          # what is decorated by @timed("training") and so on counts for its part
    watch.stop()
    watch.seconds    # {"host": 0.4, "training": 11.2, "checkpoints": 0.7, ...}

While a part lasts, the one around it stands still, so that the parts always add up to the whole.
Where no stopwatch runs, `timed` costs one look at a variable.
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
"""The part of all that is in no other."""

_running: contextvars.ContextVar[Stopwatch | None] = contextvars.ContextVar("running", default=None)


class Stopwatch:
  """Adds up the seconds of each part.

  Attributes:
    seconds: part -> seconds so far, of parts that were left or interrupted.
  """

  def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
    """Stands still until `start`.

    Args:
      clock: seconds, monotonic.
    """
    self.seconds: dict[str, float] = collections.defaultdict(float)
    self._clock = clock
    self._parts: list[str] = []
    self._since = 0.0

  def start(self) -> None:
    """Starts in the part `HOST`, and is from now on the one that `timed` functions count for."""
    self._parts, self._since = [HOST], self._clock()
    _running.set(self)

  def stop(self) -> None:
    """Stands still again; `timed` functions count for nobody."""
    self._turn()
    self._parts = []
    _running.set(None)

  @property
  def is_running(self) -> bool:
    """Whether it was started and not stopped."""
    return bool(self._parts)

  @contextlib.contextmanager
  def part(self, name: str) -> Iterator[None]:
    """Counts the time within as `name`'s, but for parts within it."""
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
  """Counts the time in a function as the part `name` of the stopwatch that runs (a decorator)."""

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
  """Returns the seconds since the epoch, a float64 scalar (any context)."""
  if tf_config.is_op_determinism_enabled():  # which forbids tf.timestamp
    return tf.ensure_shape(tf.numpy_function(time.time, [], tf.float64), [])
  return tf.timestamp()
