"""A trace of some steps for TensorBoard: which operation ran when, on which thread and device.

    run.actions = [@Profile()]
    Profile.steps = (100, 105)

writes <model_dir>/profile/plugins/profile/<time>/, which `tensorboard --logdir <model_dir>` shows
under "Profile" where its plugin tensorboard-plugin-profile is installed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf

from framework.actions.base import Action, Output
from framework.errors import ConfigError


class Profile(Action):
  """Traces some training steps of the chief; no step computes anything else because of it.

  A training loop ends before the first and after the last of them, whatever `run.steps_per_loop`,
  so that there are up to two more lines in metrics.jsonl.
  """

  on = "train"

  def __init__(self, *, steps: tuple[int, int] = (11, 15)) -> None:
    """Traces nothing yet.

    Args:
      steps: the first and the last step to trace, counted from 1.

    Raises:
      ConfigError: they are no two steps in order.
    """
    if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
      raise ConfigError(
        f"Profile.steps is {steps}; it must be the first and the last step to trace, counted from "
        "1, such as (100, 105)."
      )
    self._first, self._last = steps
    self._tracing = False

  def loop_ends(self) -> Sequence[int]:
    """Returns the steps between which to trace."""
    return (self._first - 1, self._last)

  def begin(self) -> None:
    """Starts, where training goes on from within the steps or just before."""
    self._follow()

  def __call__(self, output: Output) -> None:
    """Starts or stops, after the loop that has come to one of `loop_ends`."""
    self._follow()

  def end(self) -> None:
    """Writes what was traced where training has ended within the steps."""
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
