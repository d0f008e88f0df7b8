"""`Profile`: a trace of some steps for TensorBoard: each operation, its time, thread and device.

docs/traces.md shows how to use it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf

from loopwright.actions.base import Action, Output
from loopwright.errors import ConfigError


class Profile(Action):
  """Traces some training steps of the chief, without changing what they compute.

  A training loop ends before the first and after the last of these steps, whatever
  `run.steps_per_loop`; so metrics.jsonl may have two more lines.
  """

  on = "train"

  def __init__(self, *, steps: tuple[int, int] = (11, 15)) -> None:
    """Sets the steps.

    Args:
      steps: the first and the last step to trace, counted from 1.

    Raises:
      ConfigError: not two steps in ascending order.
    """
    if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
      raise ConfigError(
        f"Profile.steps is {steps}; it must be the first and the last step to trace, counted from "
        "1, such as (100, 105)."
      )
    self._first, self._last = steps
    self._tracing = False

  def loop_ends(self) -> Sequence[int]:
    """Returns the step before the first traced one, and the last."""
    return (self._first - 1, self._last)

  def begin(self) -> None:
    """Starts the trace if training continues from just before or within the steps."""
    self._follow()

  def __call__(self, output: Output) -> None:
    """Starts or stops the trace after a loop that ended at one of `loop_ends`."""
    self._follow()

  def end(self) -> None:
    """Writes the trace if training ended within the steps."""
    if self._tracing:
      self._stop()

  def _follow(self) -> None:
    step = self.run.step
    if self._tracing and step >= self._last:
      self._stop()
    elif not self._tracing and self._first - 1 <= step < self._last and self.run.is_chief:
      tf.profiler.experimental.start(os.path.join(self.run.model_dir, "profile"))
      self._tracing = True

  def _stop(self) -> None:
    tf.profiler.experimental.stop()
    self._tracing = False
