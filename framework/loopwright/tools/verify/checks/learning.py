"""Whether the task can learn: its first loss is that of guessing, and it can fit one batch."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from loopwright.task import Task
from loopwright.tools.verify.bench import bench, layer_calls, loss_graph, shared_noise, source_lines
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
LEAST_FALL = 0.05
"""The part of the loss at the start that must be gone at a floor of the sum of examples."""
METHODS = ("loss", "forward", "build_model", "train_step")


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
  remedy = "too high: scale the inputs, or make the first outputs small; too low: the label may be "
  remedy += "among the inputs, or the loss is not a sum over examples"
  place = source_lines.find(task, "loss", "forward", "preprocess")
  return GROUP.failed(name, detail, "far from chance at the start", remedy, place)


def _own_optimizer(losses: Sequence[float]) -> Result:
  """Checks that a few steps of the config's optimizer do not increase the loss much."""
  losses = losses[-OWN_STEPS:]
  name, detail = "own optimizer", f"{losses[0]:.4g} > {losses[-1]:.4g} in {OWN_STEPS} steps"
  if not _grows(losses):
    return GROUP.passed(name, detail)
  remedy = "lower the optimizer's learning rate, warm it up, or set Trainer.clip_norm"
  return GROUP.failed(name, detail, "learning rate too high", remedy)


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
    start = _losses(here, batch)[0]
    if not math.isfinite(start):
      break
    if number is None:
      first = start
    elif start == first:  # the loss does not depend on the step
      continue
    end = start
    for _ in range(STEPS):
      end = _losses(here, batch)[0]
      start = start or end  # the first steps may compute no loss
      if end < start - share * abs(start):
        detail = f"{start:.4g} > {end:.4g} on {len(batch['weight'])} examples, Adam({rate:g})"
        return GROUP.passed(name, detail)
    if not still:
      seen.append(f"{start:.4g} > {end:.4g}")
    elif floor := _floor(subject, here, batch, began, (start, end)):
      return GROUP.passed(name, floor)
  told = f"{len(batch['weight'])} examples, {STEPS} steps of Adam: "
  told += " and ".join(seen) or "a loss that is not finite"
  remedy = "look for a loss with the wrong sign, outputs that do not reach the loss, activations "
  remedy += "instead of logits, labels of other examples"
  place = source_lines.find(here.task, *METHODS, containing=SUSPECTS, anywhere=True)
  return GROUP.failed(name, told, "cannot learn one batch", remedy, place)


def _floor(
  subject: Subject, here: Bench, batch: Rows, began: Sequence[np.ndarray], losses: Sequence[float]
) -> str:
  """Returns how a loss that has fallen too little is at its floor; "" if it is not.

  There the gradient of each example vanishes; or that of their sum does, as where equal inputs have
  different labels, or where a small model fits them as well as it can. In the latter case, outputs
  must depend on the inputs: the best constant also makes the sum's gradient vanish.
  """
  start, end = losses
  if not end < start:
    return ""
  fall = Fall(subject, batch, began)
  for further in (0, 3 * STEPS):
    for _ in range(further):
      end = _losses(here, batch)[0]
    of_each, of_sum = fall.to(now := here.read())
    told = f"{start:.4g} > {end:.4g}, its floor: there the gradient of "
    if of_each < VANISHED:
      return f"{told}each example is {of_each:.1%} of that at the start"
    falls = of_sum < VANISHED / 2 and end < start - LEAST_FALL * abs(start)
    if falls and fall.outputs_differ(now):
      return f"{told}their sum is {of_sum:.1%} of that at the start"
    if of_each > 0.5 and of_sum > 0.5:
      break
  return ""


class Fall:
  """How the gradients of some examples, and of their sum, become smaller."""

  def __init__(self, subject: Subject, batch: Rows, start: Sequence[np.ndarray]) -> None:
    """Looks at the start; its gradients are those without random numbers."""
    self._here = Bench(subject, rows=len(batch["weight"]), assigns=False, **bench.PLAIN)
    self._here.around = shared_noise.still
    self._batch = batch
    self._squashed = loss_graph.squashed(self._here.graph(batch), self._here.task, batch)
    self._start = self._sizes(start)

  def to(self, values: Sequence[np.ndarray]) -> tuple[float, float]:
    """Returns the sizes, of each and of the sum, as parts of those at the start.

    1 if an activation bounds what the loss or a softmax gets: gradients then vanish above a floor.
    """
    if self._squashed:
      return 1.0, 1.0
    each, total = (
      float(now / before) if before else 1.0
      for now, before in zip(self._sizes(values), self._start, strict=True)
    )
    return each, total

  def outputs_differ(self, values: Sequence[np.ndarray]) -> bool:
    """Whether a part of the model returns numbers that differ between examples in a step."""
    rows = len(self._batch["weight"])
    with contextlib.suppress(Exception):  # not every task runs eagerly
      here = Bench(self._here.subject, rows=rows, assigns=False, eager=True, **bench.PLAIN)
      with layer_calls.watch() as calls:
        here.steps_from(values, self._batch)
      parts = (part for _, part in loss_graph.parts_by_name(here.task.model))
      outputs = [np.asarray(o) for part in parts for call in calls.of(part) for o in call.outputs]
      return any(
        value.shape[:1] == (rows,) and value.dtype.kind == "f"
        and np.ptp(value, axis=0).max(initial=0.0) > 1e-3 * np.abs(value).max()
        for value in outputs
      )  # fmt: skip
    return False

  def _sizes(self, values: Sequence[np.ndarray]) -> tuple[float, float]:
    rows = np.arange(len(self._batch["weight"]))
    batches = [*(bench.masked(self._batch, rows == row) for row in rows), self._batch]
    *each, total = (self._size(values, batch) for batch in batches)
    return sum(each), total

  def _size(self, values: Sequence[np.ndarray], batch: Rows) -> float:
    updates = zip(self._here.steps_from(values, batch).update(), self._here.trainable, strict=True)
    return float(sum(np.linalg.norm(update) for update, trained in updates if trained))
