"""`Spikes`: finds a loss or gradient far above its recent distribution, and the examples.

A step that is outside is undone, as it is for `StopOnNonFinite`, and replayed eagerly to find
its examples. Then it is repeated: as it was ('report'), without its update ('skip'), or without
these examples, which are padding from there on ('rewind').
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args

import numpy as np
import tensorflow as tf

from loopwright.actions.base import Action, Output, Run
from loopwright.distribution import placement
from loopwright.engine.step_parts import StepParts
from loopwright.errors import require_integer, require_positive, unknown
from loopwright.graphs.aliases import Batch, Gradient
from loopwright.metrics import Loss
from loopwright.optimizers.fusion import Fusion, Gradients
from loopwright.optimizers.rollback import Rollback
from loopwright.options.declaration import COUNT
from loopwright.step import LossFn
from loopwright.tools.forensics import examine
from loopwright.tools.forensics.action import NonFiniteLoss
from loopwright.trainer import Trainer

OnSpike = Literal["report", "skip", "rewind"]
_SHOWN = 8
_USUAL_DEVIATIONS = 3.0
_NORMAL = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""
_LEAST = 0.01
"""A spread below this part of the usual loss counts as this part of it."""


class Diverged(NonFiniteLoss):
  """The loss is outside its recent distribution in many steps in a row; one line."""


class Spikes(Action):
  """Finds steps whose loss or gradient is far above its recent distribution, and their examples.

  The distribution is that of the last `window` losses: their median, and a spread of 1.4826 times
  their median absolute deviation, but at least 1 % of the median. A loss above the median by more
  than `deviations` spreads is a spike; so is one that is not finite. So it is with the norm of the
  reduced gradient, before clipping. Both are those of the step's first update, over all replicas,
  before the update. The first `window` steps are not judged. The same steps are found on any
  number of replicas, up to rounding, and after a restart.
  """

  on = "train"

  def __init__(
    self,
    *,
    on_spike: OnSpike = "report",
    deviations: float = 10.0,
    window: int = 64,
    patience: Annotated[int, COUNT] = 10,
  ) -> None:
    """Sets what to do.

    Args:
      on_spike: what becomes of a step with a spike. 'report' goes on with it; 'skip' makes no
        update, as for gradients that are not finite; 'rewind' goes back to the state before it and
        repeats it without the fewest examples whose absence makes its loss usual: they are padding
        from there on, in later epochs too. If half of the batch is not enough, all of it is left
        out.
      deviations: how far above the median a loss is a spike, in spreads.
      window: how many losses the distribution has.
      patience: after more steps in a row, 'skip' and 'rewind' fail the run.

    Raises:
      ConfigError: an unknown `on_spike`, or a number out of range.
    """
    if on_spike not in get_args(OnSpike):
      raise unknown("Spikes.on_spike", on_spike, get_args(OnSpike))
    require_positive("Spikes.deviations", deviations)
    self._window = require_integer("Spikes.window", window, at_least=8)
    self._patience = require_integer("Spikes.patience", patience, at_least=1)
    self._on_spike, self._deviations = on_spike, deviations
    self.changes_training = on_spike != "report"
    self._count, self._in_a_row, self._newest = 0, 0, 0

  def bind(self, run: Run) -> None:
    """Makes the trainer judge its steps.

    Raises:
      ConfigError: under parameter servers or on a mesh, where a step cannot be replayed.
    """
    super().bind(run)
    examine.require_replays(placement.of(run.strategy))
    trainer = self._trainer
    self._guard = Guard(
      trainer, window=self._window, deviations=self._deviations,
      updates=self._on_spike != "skip", on_spike=self._found,
    )  # fmt: skip
    trainer.observe(self._guard)
    if self._on_spike == "rewind" and trainer.parts.padded is None:
      why = "Spikes.on_spike = 'rewind' leaves out examples"
      trainer.use(padded=(why, "use on_spike = 'skip'"))

  @property
  def _trainer(self) -> Trainer:
    trainer = self.run.trainer
    assert trainer is not None
    return trainer

  def state(self) -> dict[str, Any]:
    """Returns the losses so far and what is left out."""
    counts = {"count": self._count, "in_a_row": self._in_a_row, "newest": self._newest}
    return {**counts, **self._guard.state(), "left_out": sorted(self._trainer.left_out)}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from a `state`."""
    self._count, self._in_a_row = state["count"], state["in_a_row"]
    self._newest = state["newest"]
    self._guard.restore(state)
    self._trainer.left_out = frozenset(state["left_out"])

  def __call__(self, output: Output) -> None:
    """Does nothing: spikes are found in the loop."""

  def result(self) -> str:
    """Returns how many spikes there were."""
    return f"{self._count} spike{'' if self._count == 1 else 's'} of the loss" * bool(self._count)

  def _found(self, seen: Mapping[str, Judged]) -> None:
    """Examines the step that the trainer has undone, and decides how it is repeated (host)."""
    trainer, step = self._trainer, self.run.step + 1
    self._count_step(step)
    batch = _examined(trainer)
    rows, without = _culprits(trainer, batch, seen)
    ids = {int(each) for each in batch.ids[rows]}
    high = " and ".join(f"{name} is {each}" for name, each in seen.items() if each.is_high)
    said = _described(batch, rows, without)
    self.run.message(f"step {step}: the {high}; {said}{self._doing(few=without is not None)}")
    if self.run.is_chief:
      self.run.metrics_log.append(
        step, "spike",
        {"examples": sorted(ids), "replicas": sorted({int(each) for each in batch.replicas[rows]})}
        | {f"{n.replace(' ', '_')}{k}": v for n, each in seen.items() for k, v in each.record()},
      )  # fmt: skip
    if self._on_spike == "rewind":
      trainer.left_out |= ids
    else:
      self._guard.repeat(step - 1)

  def _count_step(self, step: int) -> None:
    """Counts a step, unless it is repeated; raises `Diverged` if there are too many in a row."""
    if step == self._newest:
      return
    self._count += 1
    self._in_a_row = self._in_a_row + 1 if step == self._newest + 1 else 1
    self._newest = step
    if self._in_a_row > self._patience and self.changes_training:
      raise Diverged(
        f"the loss or the gradient is far above its usual values in {self._in_a_row} steps in a "
        f"row, up to step {step}, so it is not single examples. Try a lower learning rate or a "
        "warm-up, or Trainer.clip_norm, from an earlier checkpoint; Spikes.patience allows more "
        "steps."
      )

  def _doing(self, *, few: bool) -> str:
    if self._on_spike == "rewind":
      return "; left out from here on" if few else "; all of them are left out from here on"
    return "; no update" if self._on_spike == "skip" else ""


def _described(batch: Examined, rows: np.ndarray, without: Examined | None) -> str:
  """Returns which replicas and examples have a spike, and which gradients they raise."""
  if without is None:
    return f"not a few examples: it is still high without half of the {len(rows)}"
  parts = []
  for replica in sorted(set(batch.replicas[rows])):
    here = [row for row in rows if batch.replicas[row] == replica]
    named = [f"{batch.ids[row]} (loss {batch.losses[row]:.3g})" for row in here[:_SHOWN]]
    more = f" and {len(here) - _SHOWN} more" if len(here) > _SHOWN else ""
    parts.append(f"replica {replica}: example{'s' * (len(here) > 1)} {', '.join(named)}{more}")
  grown = {name: norm / without.norms[name] for name, norm in batch.norms.items()
           if without.norms.get(name)}  # fmt: skip
  most = sorted(grown.items(), key=lambda item: -item[1])[:3]
  gradients = ", ".join(f"{name} x {factor:.3g}" for name, factor in most)
  return "; ".join(parts) + (f"; gradients with them: {gradients}" if gradients else "")


# ---- The steps are judged ----


class Judged(NamedTuple):
  """A loss or norm, and what it is compared with; `most` is the largest usual value."""

  value: float
  usual: float
  spread: float
  most: float

  @property
  def is_high(self) -> bool:
    """Whether it is a spike, as it is if it is not finite."""
    return not self.value <= min(self.most, sys.float_info.max)

  def allows(self, value: float) -> bool:
    """Whether another value is a usual one."""
    return value <= self.usual + _USUAL_DEVIATIONS * self.spread or math.isinf(self.most)

  def record(self) -> Iterable[tuple[str, float]]:
    """Returns what the log has of it: (ending of a name, value)."""
    return ("", self.value), ("_usual", self.usual), ("_most", self.most)

  def __str__(self) -> str:
    """Returns "884.1, usually 5.251 and at most 31.13"."""
    return f"{self.value:.4g}, usually {self.usual:.4g} and at most {self.most:.4g}"


class Guard(Rollback):
  """Undoes a step whose loss or norm is a spike, which ends the loop; judges nothing else."""

  JUDGED = ("loss", "gradient norm")

  def __init__(
    self,
    trainer: Trainer,
    *,
    window: int,
    deviations: float,
    updates: bool,
    on_spike: Callable[[Mapping[str, Judged]], None],
  ) -> None:
    """Makes its variables in host memory.

    Args:
      updates: whether a step that is repeated is updated.
      on_spike: called (host) after a loop that ended before a spike.
    """
    super().__init__(
      strategy=trainer.strategy, model=trainer.task.model, loss_scale=trainer.parts.loss_scale,
      counters=[trainer.global_step, trainer.nonfinite_step], ema=trainer.parts.ema,
    )  # fmt: skip
    self.counts_gradients = False
    self._step, self._window, self._deviations = trainer.global_step, window, deviations
    self._updates, self._on_spike = updates, on_spike
    with tf.device("CPU:0"):
      self._values = tf.Variable(np.zeros([window, len(self.JUDGED)]), trainable=False)
      self._seen = tf.Variable(np.int64(0), trainable=False)
      self._repeated = tf.Variable(np.int64(-1), trainable=False)
      judged = np.zeros([len(Judged._fields), len(self.JUDGED)])
      self._judged = tf.Variable(judged, trainable=False)

  def repeat(self, step: int) -> None:
    """Lets the step after `step` steps pass, whatever its loss (host)."""
    self._repeated.assign(np.int64(step))

  def state(self) -> dict[str, Any]:
    """Returns the values of its variables (host)."""
    return {"values": self._values.numpy().tolist(), "seen": int(self._seen.numpy())}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Sets its variables; another window begins anew (host)."""
    if len(state["values"]) == self._window:
      self._values.assign(np.array(state["values"]))
      self._seen.assign(np.int64(state["seen"]))

  def step_begins(self) -> None:
    """See `Observer`; also computes what is usual."""
    super().step_begins()
    self._now: list[tf.Tensor] = []
    with tf.device("CPU:0"):
      values = self._values.read_value()
      usual = _median(values)
      spread = tf.maximum(_NORMAL * _median(tf.abs(values - usual)), _LEAST * tf.abs(usual))
      most = tf.where(self._seen < self._window, _INFINITY, usual + self._deviations * spread)
      self._usual = usual, spread, most
      self._again = self._step.read_value() == self._repeated

  def accepts(self, update: int, total: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """See `Rollback`."""
    if update:
      return tf.constant(True)
    with tf.device("CPU:0"):
      self._weighs = weight > 0
      loss = tf.math.divide_no_nan(tf.cast(total, tf.float64), tf.cast(weight, tf.float64))
      # A loss has no norm yet, and a task may never check one.
      self._now, self._inside = [loss, tf.zeros([], tf.float64)], self._is_inside(0, loss)
      return self._allowed()

  def accepts_norm(self, update: int, norm: tf.Tensor) -> tf.Tensor | None:
    """See `Rollback`; a norm that is not finite is the business of `Step.check`."""
    if update:
      return None
    with tf.device("CPU:0"):
      norm = tf.cast(norm, tf.float64)
      norm = tf.where(tf.math.is_finite(norm), norm, tf.zeros_like(norm))
      self._now[1] = norm
      self._inside &= self._is_inside(1, norm)
      return self._allowed()

  def _is_inside(self, index: int, value: tf.Tensor) -> tf.Tensor:
    return (value <= self._usual[-1][index]) & tf.math.is_finite(value) | ~self._weighs

  def _allowed(self) -> tf.Tensor:
    return self._inside | self._again if self._updates else self._inside

  def is_good(self, finite: tf.Tensor, loss_finite: tf.Tensor) -> tf.Tensor:
    """See `Rollback`; also adds the values of a step that stands to the distribution."""
    del finite, loss_finite
    if not self._now:
      return tf.constant(True)
    with tf.device("CPU:0"):
      good, now = self._inside | self._again, tf.stack(self._now)
      added, place = good & self._weighs, self._seen % self._window
      finite_now = tf.where(tf.math.is_finite(now), now, _INFINITY)
      value = tf.where(added, finite_now, self._values[place])
      tf.raw_ops.ResourceScatterUpdate(resource=self._values.handle, indices=place, updates=value)
      self._seen.assign_add(tf.cast(added, tf.int64), read_value=False)
      self._judged.assign(tf.stack([now, *self._usual]), read_value=False)
      return good

  def loop_ends(self, results: dict[str, float], *, done: int, ran: int) -> None:
    """Reports a spike, unless something else has undone the last step (host)."""
    if ran == done:
      return
    columns = self._judged.numpy().T.tolist()
    judged = {name: Judged(*each) for name, each in zip(self.JUDGED, columns, strict=True)}
    if any(each.is_high for each in judged.values()):
      self._on_spike(judged)


_INFINITY = np.float64(np.inf)


def _median(values: tf.Tensor) -> tf.Tensor:
  """Returns the median of each column."""
  count = values.shape[0]
  ordered = tf.sort(values, axis=0)
  return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2


# ---- A step is examined ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examined:
  """A step: its loss and gradients, and its examples over all replicas.

  Attributes:
    values: the loss and the norm of the gradient.
    norms: variable -> the norm of its gradient.
    known: whether the task's loss says what is each example's.
    ids: int64 [n].
    losses: [n], what each adds to the summed loss.
    slopes: [n], what each adds to half the square of the gradient's norm on its replica; the
      losses if an operation has no second derivative.
    replicas: [n], of which each is an example.
  """

  values: tuple[float, float]
  norms: Mapping[str, float]
  known: bool
  ids: np.ndarray
  losses: np.ndarray
  slopes: np.ndarray
  replicas: np.ndarray


def _culprits(
  trainer: Trainer, batch: Examined, seen: Mapping[str, Judged]
) -> tuple[np.ndarray, Examined | None]:
  """Returns the fewest rows without which the step is usual, and the step without them (host).

  All rows, and None, if half of them are not enough.
  """
  whole = np.arange(len(batch.ids))
  if not batch.known:
    return whole, None
  parts = batch.losses if seen["loss"].is_high else batch.slopes
  order = np.argsort(-np.where(np.isfinite(parts), parts, np.inf), kind="stable")
  low, high, found = 0, len(order) // 2, None
  while high > low:  # without `low` rows it is not usual
    count = high if found is None else (low + high) // 2
    if count == low:
      break
    without = _examined(trainer, without=batch.ids[order[:count]])
    if all(each.allows(v) for each, v in zip(seen.values(), without.values, strict=True)):
      high, found = count, without
    elif found is None:
      return whole, None
    else:
      low = count
  return (whole, None) if found is None else (order[:high], found)


def _examined(trainer: Trainer, *, without: Iterable[int] = ()) -> Examined:
  """Replays the step after `trainer.global_step` (host; every worker must call it).

  Args:
    without: ids of examples that are padding in it.
  """
  parts, left_out = dataclasses.replace(trainer.parts, observers=()), trainer.left_out
  trainer.left_out = left_out | {int(each) for each in without}
  try:
    with examine.replayed(trainer, lambda: _Rows(parts)) as [step, *_]:
      rows = {name: value.numpy() for name, value in step.rows.items()}
      norms = {name: float(tf.norm(gradient)) for name, gradient in step.summed.items()}
      values = float(step.values[0]), float(step.values[1])
  finally:
    trainer.left_out = left_out
  real = rows["ids"] >= 0
  rows = {name: value[real] for name, value in rows.items()}
  return Examined(values=values, norms=norms, known=step.known, **rows)


class _Rows(examine.Replayed):
  """A step, run eagerly, that keeps each example's part in the loss and in the gradient's norm.

  They are slopes in its weight: of the sum of losses, and of half the square of the norm.
  """

  def __init__(self, parts: StepParts) -> None:
    super().__init__(parts)
    self._updates = 0
    self._parts: list[tuple[tf.Tensor | None, tf.Tensor | None]] = []
    self.known = True
    self.rows: dict[str, tf.Tensor] = {}
    self.summed: dict[str, tf.Tensor] = {}
    self.values = [tf.constant(0.0), tf.constant(0.0)]

  def over(self, batch: Batch) -> None:
    count = batch["weight"].shape[0]
    parts = [
      [each for each in parts if each is not None] for parts in zip(*self._parts, strict=True)
    ]
    found = [tf.concat(each, 0) if each else tf.zeros([0]) for each in parts]
    losses, slopes = [*found, tf.zeros([0]), tf.zeros([0])][:2]
    self.known = losses.shape[0] == count  # not if the loss is of other rows than the batch's
    losses = losses if self.known else tf.zeros([count])
    slopes = slopes if slopes.shape[0] == count else losses
    rows = {
      "ids": batch["example_id"], "losses": batch["weight"] * losses,
      "slopes": batch["weight"] * slopes, "replicas": tf.fill([count], self.replica),
    }  # fmt: skip
    gather = self.parts.reduction.all_gather
    self.rows = {name: gather(value) for name, value in rows.items()}

  def forward_backward(
    self, loss_fn: LossFn, batch: Batch, fusion: Fusion
  ) -> tuple[Gradients, Loss]:
    if self._updates or "weight" not in batch:
      return super().forward_backward(loss_fn, batch, fusion)
    weight = batch["weight"]
    with tf.GradientTape(persistent=True) as tape:
      tape.watch(weight)
      gradients, loss = super().forward_backward(loss_fn, batch, fusion)
      half = tf.add_n([tf.nn.l2_loss(tf.cast(each, tf.float32)) for each in gradients.tensors])
    slope = None
    with contextlib.suppress(LookupError):  # an operation without a second derivative
      slope = tape.gradient(half, weight)
    self._parts.append((tape.gradient(loss.total, weight), slope))
    return gradients, loss

  def all_reduce(self, gradients: Sequence[Gradient], loss: Loss) -> tuple[Gradients, Loss]:
    summed, total = super().all_reduce(gradients, loss)
    if not self._updates:
      self.values[0] = tf.math.divide_no_nan(total.total, total.weight)
    self._updates += 1
    return summed, total

  def check(self, gradients: Sequence[Gradient]) -> tuple[tf.Tensor, tf.Tensor]:
    finite, norm = super().check(gradients)
    if self._updates == 1 and self.names and not self.summed:
      named = zip(self.names[0], gradients, strict=True)
      self.summed = {name: each for name, each in named if each is not None}
      self.values[1] = tf.where(finite, norm, 0.0)
    return finite, norm
