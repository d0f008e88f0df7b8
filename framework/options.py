"""Options of a run that travel together; the attributes are arguments of `framework.run.run`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cadence:
  """When a run evaluates, saves and ends."""

  train_steps: int
  steps_per_loop: int
  checkpoint_every_steps: int
  keep_checkpoints: int
  eval_every_steps: int | None = None
  eval_timeout_s: float | None = None

  def counts(self) -> dict[str, int | None]:
    """Returns name -> value of the attributes that must be whole numbers."""
    values = dataclasses.asdict(self)
    return {name: value for name, value in values.items() if name != "eval_timeout_s"}

  def next_evaluation(self, step: int) -> int:
    """Returns the step of the first evaluation after `step`."""
    every = self.eval_every_steps or self.train_steps
    return min((step // every + 1) * every, self.train_steps)

  def next_save(self, step: int) -> int:
    """Returns the step of the first periodic checkpoint after `step`."""
    return (step // self.checkpoint_every_steps + 1) * self.checkpoint_every_steps

  def evaluates_at(self, step: int) -> bool:
    """Returns whether an evaluation is due at `step`."""
    every = self.eval_every_steps or self.train_steps
    return step > 0 and (step % every == 0 or step >= self.train_steps)
