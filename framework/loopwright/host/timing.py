"""Measures wall time by named parts that exclude each other.

An inner part pauses the outer one, so the parts always add up to the total. Without a stopwatch
that runs, `timed` costs one variable lookup.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import config as tf_config

Function = TypeVar("Function", bound=Callable[..., Any])

HOST = "host"
"""The part for time that is in no other part."""

_NO_JUMP_S = 0.01
"""Below it two clocks differ because they are not read at the same time."""

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

  def start(self, part: str = HOST) -> None:
    """Starts with a part; from now on `timed` functions count for this watch."""
    self._parts, self._since = [part], self._clock()
    _running.set(self)

  def stop(self) -> None:
    """Stops; `timed` functions no longer count."""
    self._turn()
    self._parts = []
    _running.set(None)

  def goes_on(self, part: str | None = None) -> None:
    """Counts the time so far; from now on, time outside of other parts counts for `part`."""
    self._turn()
    self._parts[0] = part or self._parts[0]

  def move(self, seconds: float, part: str, to: str) -> None:
    """Counts some seconds of a part for another one."""
    self.seconds[part] -= seconds
    self.seconds[to] += seconds

  def now(self) -> tuple[tuple[str, ...], float, dict[str, float]]:
    """Returns the part that runs, after those that it pauses; its seconds without a change; all.

    Another thread may call it.
    """
    parts, since, seconds = tuple(self._parts), self._since, dict(self.seconds)
    unchanged_s = self._clock() - since
    if parts:
      seconds[parts[-1]] = seconds.get(parts[-1], 0.0) + unchanged_s
    return parts, unchanged_s, seconds

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
  """Decorator: counts the time in a function for the part `name` of the stopwatch that runs."""

  def decorate(function: Function) -> Function:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
      watch = _running.get()
      with watch.part(name) if watch else contextlib.nullcontext():
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]

  return decorate


class LoopClock:
  """Frees durations that a compiled loop measures from jumps of the system's clock (host).

  TensorFlow has no other clock than the system's, which can be set back by an hour during a step.
  Python has a steady one, but a call of Python in each step would cost more than what it measures.

  Attributes:
    began_s: the system's clock at the start, on the scale of `timestamp`.
  """

  def __init__(
    self,
    *,
    system: Callable[[], float] | None = None,
    steady: Callable[[], float] = time.perf_counter,
  ) -> None:
    """Starts; the arguments return seconds and default to the process's clocks."""
    self._system, self._steady = system or time.time, steady
    self.began_s, self._since = self._system(), steady()

  def seconds(self) -> float:
    """Returns the seconds since the start."""
    return self._steady() - self._since

  def corrected(self, measured_s: float) -> float:
    """Returns a duration within the loop, measured by `timestamp`; at least 0.

    If the clock jumped and the duration is below 0 or above the loop's, it includes the jump.
    """
    elapsed = self.seconds()
    jump = self._system() - self.began_s - elapsed
    if abs(jump) < _NO_JUMP_S or 0 <= measured_s <= elapsed:
      return max(0.0, measured_s)
    return min(max(0.0, measured_s - jump), elapsed)


def timestamp() -> tf.Tensor:
  """Returns the seconds since 1970-01-01 UTC, a float64 scalar (any context).

  The system's clock may jump; a `LoopClock` corrects differences.
  """
  if tf_config.is_op_determinism_enabled():  # it forbids tf.timestamp
    # As an array: TensorFlow never frees a scalar that a numpy_function returns.
    now = tf.numpy_function(lambda: np.array([time.time()]), [], tf.float64, stateful=True)
    return tf.ensure_shape(now, [1])[0]
  return tf.timestamp()
