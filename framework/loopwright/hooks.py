"""What goes along with the loop of a run: actions, reports, savers and watchers, in one list.

A session makes the list once; loop.py calls it. All calls are on the host:

    begins                       once, before the first loop
      loop_end                   where the next loop must end
      loop_begins, loop_ends     around each compiled loop
      after("train", output)     its values
      due                        what its last step asks for, such as a checkpoint
      evaluates                  around the batches of an evaluation
      after("eval", output)      its values
      pauses                     after each `steps_per_loop` steps, and after an evaluation
    saves                        the state of the last step, if it is not saved yet
    ends                         once, also after an error
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
  from loopwright.evaluator import Evaluator

Output: TypeAlias = Mapping[str, Any]
"""What a loop or an evaluation returns: name -> scalar or array, maybe nested."""


class StopTraining(Exception):  # noqa: N818 (it is not an error)
  """Raised by an action to end training early; the run still succeeds.

      raise StopTraining("the loss is below 0.01")

  Attributes:
    reason: one line for the user.
    output: the values the action was called with, for a loop of your own that catches this before
      it has written them, as around Orbit's Controller; a run reports them in any case.
  """

  def __init__(self, reason: str, output: Output | None = None) -> None:
    super().__init__(reason)
    self.reason = reason
    self.output = dict(output or {})


class Interrupted(Exception):  # noqa: N818 (it is not an error)
  """Raised between the batches of an evaluation, which then ends without values."""


class Hook:
  """Goes along with a run's loop (host); the base class changes nothing.

  On several workers each has the same hooks, and all call them at the same steps.
  """

  def begins(self, step: int) -> None:
    """The state of `step` is restored, and training begins; may raise StopTraining."""

  def loop_end(self, step: int, end: int) -> int:
    """Returns the step at which a loop that begins after `step` ends: `end`, or one before it."""
    del step
    return end

  def loop_begins(self, step: int) -> None:
    """A loop begins after so many steps."""

  def loop_ends(self, step: int, output: Output, traces: int) -> None:
    """It has ended, also if an observer has undone all of its steps.

    Args:
      step: the number of steps now.
      output: its values.
      traces: how often the loop has been traced so far.
    """

  def after(self, split: str, output: Output) -> None:
    """Receives the values of a loop ("train") or an evaluation ("eval"); may raise StopTraining."""

  def due(self, step: int) -> None:
    """A loop ended at `step`, and nothing stopped the run."""

  def evaluates(self, evaluator: Evaluator, step: int) -> AbstractContextManager[Any]:
    """Returns a context for the batches of an evaluation, in which Interrupted may be raised."""
    del evaluator, step
    return contextlib.nullcontext()

  def pauses(self, step: int) -> None:
    """The run may end here: raises what ends it, such as Preempted or the error of a save."""

  def saves(self) -> None:
    """Saves the state of the current step; may return before it is complete."""

  def ends(self) -> None:
    """Training in this process is over, or has failed; `begins` may not have been called."""


def _to_each(name: str) -> Callable[..., None]:
  """Returns a method that calls the one of this name of each hook."""

  def tell(self: Hooks, *told: Any) -> None:
    for hook in self.hooks:
      getattr(hook, name)(*told)

  return tell


class Hooks(Hook):
  """Calls several hooks, in their order."""

  begins, pauses, saves = _to_each("begins"), _to_each("pauses"), _to_each("saves")
  loop_begins, loop_ends, due = _to_each("loop_begins"), _to_each("loop_ends"), _to_each("due")

  def __init__(self, hooks: Sequence[Hook]) -> None:
    self.hooks = tuple(hooks)

  def loop_end(self, step: int, end: int) -> int:
    """Returns the first step that one of them asks for."""
    return min(hook.loop_end(step, end) for hook in self.hooks)

  def after(self, split: str, output: Output) -> None:
    """Gives the values to all, also if one of them stops the run; raises its StopTraining then."""
    stop = None
    for hook in self.hooks:
      try:
        hook.after(split, output)
      except StopTraining as asked:
        stop = stop or asked
    if stop is not None:
      raise stop

  @contextlib.contextmanager
  def evaluates(self, evaluator: Evaluator, step: int) -> Iterator[None]:
    """Returns the context of all."""
    with contextlib.ExitStack() as stack:
      for hook in self.hooks:
        stack.enter_context(hook.evaluates(evaluator, step))
      yield

  def ends(self) -> None:
    """Ends each, whatever the others raise."""
    with contextlib.ExitStack() as stack:
      for hook in reversed(self.hooks):
        stack.callback(hook.ends)
