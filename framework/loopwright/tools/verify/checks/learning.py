"""Whether the task can learn: its first loss is that of guessing, and it can fit one batch."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from loopwright.task import Task
from loopwright.tools.verify.bench import bench, loss_graph, shared_noise, source_lines
from loopwright.tools.verify.bench.bench import Bench, Rows, Subject
from loopwright.tools.verify.report import Group, Result

GROUP = Group("learning")
START_ROWS, ROWS = 64, 8
STEPS = 150
RATES = (0.003, 0.02)
ENOUGH = 0.5
"""A batch is learned if its loss falls by this share of the loss at the start."""
STATE_SHARE = 0.5
"""How much less is enough with state, such as negatives, which may bound the loss from below."""
NEAR_CHANCE = (0.6, 1.6)
OWN_STEPS = 20
LATE = 10_000
"""A step number at which a loss that changes with the step has its final form."""
EXPLODES = 5.0
SUSPECTS = ("-tf.", "-self.", "softmax", "sigmoid", "relu", "stop_gradient")
VANISHED = 0.1
"""At the floor of a loss each example's gradient is less than this part of that at the start."""
METHODS = ("loss", "forward", "build_model", "train_step")


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  if isinstance(subject.optimizer, Mapping) and len(subject.optimizer) > 1:
    why = f"{len(subject.optimizer)} optimizers have no common loss that must fall"
    names = ("loss at the start", "own optimizer", "learns one batch by heart")
    return [GROUP.skipped(n, why) for n in names]
  micro = subject.accumulation_steps
  here = Bench(subject, rows=START_ROWS * micro, always=True)
  batch = subject.rows(here.task, START_ROWS * micro)
  losses = _losses(here, batch, OWN_STEPS)
  if _grows(losses):  # perhaps because the loss has a weight that grows with the step
    same = Bench(subject, rows=START_ROWS * micro, always=True, number=OWN_STEPS)
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


def _losses(here: Bench, batch: Rows, steps: int) -> list[float]:
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
  return GROUP.failed(
    name, detail=detail,
    cause="far from chance at the start",
    remedy="too high: scale the inputs, or make the first outputs small; too low: the label may be "
    "among the inputs, or the loss is not a sum over examples",
    place=source_lines.find(task, "loss", "forward", "preprocess"),
  )  # fmt: skip


def _own_optimizer(losses: Sequence[float]) -> Result:
  """Checks that a few steps of the config's optimizer do not increase the loss much."""
  losses = losses[-OWN_STEPS:]
  name, detail = "own optimizer", f"{losses[0]:.4g} > {losses[-1]:.4g} in {OWN_STEPS} steps"
  if not _grows(losses):
    return GROUP.passed(name, detail)
  return GROUP.failed(
    name, detail=detail, cause="learning rate too high",
    remedy="lower the optimizer's learning rate, warm it up, or set Trainer.clip_norm",
  )  # fmt: skip


def _made(subject: Subject, others: Sequence[Rows], **options: Any) -> Bench:
  here = Bench(subject, **options)
  if not others:
    return here
  for batch in others:
    here.step(batch)
  kept = Bench(subject, assigns=False, **options)
  kept.assign(here.read())
  return kept


def _by_heart(subject: Subject, batch: Rows, others: Sequence[Rows]) -> Result:
  """Checks that Adam, at one of two learning rates, halves the loss of one batch.

  State that the step keeps, such as a queue, stays as it is after steps on `others`. A last attempt
  draws nothing at random. If even that does not halve the loss, it may have a floor above zero.
  """
  name, seen, first = "learns one batch by heart", [], math.nan
  share = (1 - ENOUGH) * (STATE_SHARE if others else 1.0)
  attempts = [*itertools.product(RATES, (None, LATE), (False,)), (RATES[-1], None, True)]
  for rate, number, still in attempts:
    adam = functools.partial(keras.optimizers.Adam, rate)
    options: dict[str, Any] = {"optimizer": adam, "always": True, "number": number}
    options["rows"] = len(batch["weight"])
    here = _made(subject, others, **options)
    here.around = shared_noise.still if still else here.around
    began = here.read()
    start = here.loss_in(here.step(batch).metrics)
    if not math.isfinite(start):
      break
    if number is None:
      first = start
    elif start == first:  # the loss does not depend on the step
      continue
    end = start
    for _ in range(STEPS):
      end = here.loss_in(here.step(batch).metrics)
      start = start or end  # the first steps may compute no loss
      if end < start - share * abs(start):
        detail = f"{start:.4g} > {end:.4g} on {len(batch['weight'])} examples, Adam({rate:g})"
        return GROUP.passed(name, detail)
    if not still:
      seen.append(f"{start:.4g} > {end:.4g}")
    elif end < start and (fall := _fall(subject, batch, began, here.read())) < VANISHED:
      detail = f"{start:.4g} > {end:.4g}, its floor: there each example's gradient is {fall:.1%}"
      return GROUP.passed(name, f"{detail} of that at the start")
  return GROUP.failed(
    name, detail=f"{len(batch['weight'])} examples, {STEPS} steps of Adam: "
    f"{' and '.join(seen) or 'a loss that is not finite'}",
    cause="cannot learn one batch",
    remedy="look for a loss with the wrong sign, outputs that do not reach the loss, activations "
    "instead of logits, labels of other examples",
    place=source_lines.find(here.task, *METHODS, containing=SUSPECTS, anywhere=True),
  )  # fmt: skip


def _fall(
  subject: Subject, batch: Rows, start: Sequence[np.ndarray], end: Sequence[np.ndarray]
) -> float:
  """Returns the size of the examples' gradients at the end, as a part of that at the start.

  Each is that of one example, because the best constant also makes their sum vanish. 1 if an
  activation bounds what the loss or a softmax gets: the gradient then vanishes above the floor.
  """
  here = Bench(subject, rows=len(batch["weight"]), assigns=False, **bench.PLAIN)
  here.around = shared_noise.still
  if loss_graph.squashed(here.graph(batch), here.task, batch):
    return 1.0
  rows = np.arange(len(batch["weight"]))
  sizes = [
    sum(
      np.linalg.norm(update)
      for row in rows
      for update, trained in zip(
        here.steps_from(values, bench.masked(batch, rows == row)).update(), here.trainable,
        strict=True,
      )
      if trained
    )
    for values in (start, end)
  ]  # fmt: skip
  return float(sizes[1] / sizes[0]) if sizes[0] else 1.0
