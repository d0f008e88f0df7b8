"""Whether the task learns: its first loss is that of guessing, and a batch can be learned by heart.

What a loss must do is the task's own affair (a floor, a bound, an objective without a gradient), so
how far it falls is a note. It fails if nothing moves, or if the loss is no number any more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import keras
import numpy as np

from loopwright.task import Task
from loopwright.tools.verify import causes
from loopwright.tools.verify.bench import source_lines
from loopwright.tools.verify.bench.bench import Bench, Rows, Subject
from loopwright.tools.verify.report import Group, Result

GROUP = Group("learning")
START, OWN, HEART = "loss at the start", "own optimizer", "learns one batch by heart"
START_ROWS, ROWS = 64, 8
STEPS = 150
RATES = (0.003, 0.02)
ENOUGH = 0.5
"""A batch is learned if its loss falls by this share of the loss at the start."""
NEAR_CHANCE = (0.6, 1.6)
OWN_STEPS = 20
LATE = 10_000
"""A step number at which a loss that changes with the step has its final form."""
EXPLODES, LOST = 5.0, 1e6
"""A loss that grows so many times is noted, and fails."""


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  if isinstance(subject.optimizer, Mapping) and len(subject.optimizer) > 1:
    why = f"{len(subject.optimizer)} optimizers have no common loss that must fall"
    return [GROUP.skipped(name, why) for name in (START, OWN, HEART)]
  rows = _start_rows(subject) * subject.accumulation_steps
  here = Bench(subject, rows=rows, always=True)
  batch = subject.rows(here.task, rows)
  losses = _losses(here, batch, OWN_STEPS)
  if _grows(losses):  # perhaps because the loss has a weight that grows with the step
    same = Bench(subject, rows=rows, always=True, number=OWN_STEPS)
    losses = [losses[0], *_losses(same, batch, OWN_STEPS)]
  few = {name: value[: ROWS * subject.accumulation_steps] for name, value in batch.items()}
  return [
    _chance(here.task, losses[0]),
    _own_optimizer(losses[-OWN_STEPS:]),
    _by_heart(subject, few),
  ]


def _start_rows(subject: Subject) -> int:
  """Returns how many rows show the loss of chance: fewer if each has many tokens."""
  specs = subject.dataset(subject.fresh_task(), 1).element_spec.values()
  tokens = [spec.shape[1] for spec in specs if spec.dtype.is_integer and spec.shape.rank == 2]
  return 3 * ROWS if max((count or 0 for count in tokens), default=0) >= START_ROWS else START_ROWS


def _losses(here: Bench, batch: Rows, steps: int = 1) -> list[float]:
  return [here.loss_in(here.step(batch).metrics) for _ in range(steps)]


def _grows(losses: Sequence[float]) -> bool:
  grows = losses[0] > 0 and losses[-1] > EXPLODES * losses[0]
  return grows or not math.isfinite(losses[-1])


def _chance(task: Task, loss: float) -> Result:
  chance = task.chance_loss
  if chance is None:
    return GROUP.skipped(START, f"{loss:.4g}; Task.chance_loss, the loss of guessing, is not set")
  detail = f"{loss:.4g}, guessing gives {chance:.4g}"
  if NEAR_CHANCE[0] * chance <= loss <= NEAR_CHANCE[1] * chance:
    return GROUP.passed(START, detail)
  place = source_lines.method(task, "loss", "training_loss", "train_step")
  return GROUP.failed(START, detail, "far from chance at the start", place)


def _own_optimizer(losses: Sequence[float]) -> Result:
  """Checks that a loss is still a number after a few steps of the config's optimizer."""
  detail = f"{losses[0]:.4g} > {losses[-1]:.4g} in {OWN_STEPS} steps"
  cause = "learning rate too high"
  if math.isfinite(losses[0]) and not losses[-1] < LOST * max(losses[0], 1.0):
    return GROUP.failed(OWN, detail, cause)
  remedy = causes.remedy(cause, GROUP.name)
  hint = f"; if a loss must not grow here, {remedy}" if _grows(losses) else ""
  return GROUP.passed(OWN, detail + hint)


def _by_heart(subject: Subject, batch: Rows) -> Result:
  """Notes how far Adam lowers the loss of one batch; fails only if no weight moves at all.

  If nothing moves in the first steps, the steps are tried again with a late number.
  """
  told, moves = list[str](), False
  count = f"{len(batch['weight'])} examples, {STEPS} steps of Adam"
  for rate, number in (*((rate, None) for rate in RATES), (RATES[-1], LATE)):
    if moves and number is not None:
      break
    adam = functools.partial(keras.optimizers.Adam, rate)
    rows = len(batch["weight"])
    here = Bench(subject, rows=rows, optimizer=adam, always=True, number=number)
    began, [start] = here.read(), _losses(here, batch)
    end = start
    for _ in range(STEPS):
      [end] = _losses(here, batch)
      if end < start - ENOUGH * abs(start):
        return GROUP.passed(HEART, f"{start:.4g} > {end:.4g}, {count} at {rate:g}")
    pairs = zip(began, here.read(), here.trainable, strict=True)
    moves = moves or any(used and not np.array_equal(a, b) for a, b, used in pairs)
    told.append(f"{start:.4g} > {end:.4g}")
  detail, cause = f"{count}: {' and '.join(told)}", "cannot learn one batch"
  remedy = causes.remedy(cause, GROUP.name)
  if moves:
    return GROUP.passed(HEART, f"{detail}; if this loss has no floor, {remedy}")
  return GROUP.failed(HEART, f"{detail}; no weight moves", cause)
