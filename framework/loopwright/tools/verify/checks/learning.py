"""Whether the task learns: its first loss is that of guessing, and a batch can be learned by heart.

What a loss must do is the task's own affair (a floor, a bound, an objective without a gradient), so
how far it falls is a note. It fails if nothing moves, or if the loss is no number any more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from loopwright.task import Task
from loopwright.tools.verify import causes
from loopwright.tools.verify.bench import source_lines
from loopwright.tools.verify.bench.bench import Bench, Rows, Subject
from loopwright.tools.verify.report import Group, Result

GROUP = Group("learning")
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
    names = ("loss at the start", "own optimizer", "learns one batch by heart")
    return [GROUP.skipped(n, why) for n in names]
  micro = subject.accumulation_steps
  rows = _start_rows(subject) * micro
  here = Bench(subject, rows=rows, always=True)
  batch = subject.rows(here.task, rows)
  losses = _losses(here, batch, OWN_STEPS)
  if _grows(losses):  # perhaps because the loss has a weight that grows with the step
    same = Bench(subject, rows=rows, always=True, number=OWN_STEPS)
    losses = [losses[0], *_losses(same, batch, OWN_STEPS)]
  few, *others = (
    {name: value[first : first + ROWS * micro] for name, value in batch.items()}
    for first in range(0, 3 * ROWS * micro, ROWS * micro)
  )
  return [
    _chance(here.task, losses[0]),
    _own_optimizer(losses),
    _by_heart(subject, few, others if here.keeps_state else []),
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
  name, chance = "loss at the start", task.chance_loss
  if chance is None:
    return GROUP.skipped(name, f"{loss:.4g}; Task.chance_loss, the loss of guessing, is not set")
  detail = f"{loss:.4g}, guessing gives {chance:.4g}"
  low, high = (factor * chance for factor in NEAR_CHANCE)
  if low <= loss <= high:
    return GROUP.passed(name, detail)
  place = source_lines.find(task, "loss", "forward", "preprocess")
  return GROUP.failed(name, detail, "far from chance at the start", place)


def _own_optimizer(losses: Sequence[float]) -> Result:
  """Checks that a loss is still a number after a few steps of the config's optimizer."""
  losses = losses[-OWN_STEPS:]
  name, detail = "own optimizer", f"{losses[0]:.4g} > {losses[-1]:.4g} in {OWN_STEPS} steps"
  if math.isfinite(losses[0]) and not losses[-1] < LOST * max(losses[0], 1.0):
    return GROUP.failed(name, detail, "learning rate too high")
  remedy = causes.remedy("learning rate too high", GROUP.name)
  hint = f"; if a loss must not grow here, {remedy}" if _grows(losses) else ""
  return GROUP.passed(name, detail + hint)


def _by_heart(subject: Subject, batch: Rows, others: Sequence[Rows]) -> Result:
  """Notes how far Adam lowers the loss of one batch; fails only if no weight moves at all.

  State that the step keeps, such as a queue, stays as it is after steps on `others`. If nothing
  moves in the first steps, the steps are tried again with a late number.
  """
  name, told, moves = "learns one batch by heart", list[str](), False
  count = f"{len(batch['weight'])} examples, {STEPS} steps of Adam"
  for rate, number in (*((rate, None) for rate in RATES), (RATES[-1], LATE)):
    if moves and number is not None:
      break
    adam = functools.partial(keras.optimizers.Adam, rate)
    here = _made(
      subject, others, optimizer=adam, always=True, number=number, rows=len(batch["weight"])
    )
    began, [start] = here.read(), _losses(here, batch)
    end = start
    for _ in range(STEPS):
      [end] = _losses(here, batch)
      if end < start - ENOUGH * abs(start):
        return GROUP.passed(name, f"{start:.4g} > {end:.4g}, {count} at {rate:g}")
    pairs = zip(began, here.read(), here.trainable, strict=True)
    moves = moves or any(used and not np.array_equal(a, b) for a, b, used in pairs)
    told.append(f"{start:.4g} > {end:.4g}")
  detail, cause = f"{count}: {' and '.join(told)}", "cannot learn one batch"
  remedy = causes.remedy(cause, GROUP.name)
  if moves:
    return GROUP.passed(name, f"{detail}; if this loss has no floor, {remedy}")
  return GROUP.failed(name, f"{detail}; no weight moves", cause)


def _made(subject: Subject, others: Sequence[Rows], **options: Any) -> Bench:
  here = Bench(subject, **options)
  if not others:
    return here
  for batch in others:
    here.step(batch)
  kept = Bench(subject, assigns=False, **options)
  kept.assign(here.read())
  return kept
