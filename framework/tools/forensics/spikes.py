"""`Spikes`: finds a loss far outside its recent distribution, and the examples that cause it.

A step whose loss is outside is undone, as it is for `StopOnNonFinite`, and replayed eagerly to find
its examples. Then it is repeated: as it was ('report'), without its update ('skip'), or without
these examples, which are padding from there on ('rewind').
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import tensorflow as tf

from framework.actions.base import Action, Output, Run
from framework.errors import require_integer, require_positive, unknown
from framework.metrics import Loss
from framework.models import models
from framework.optimizers.fusion import Fusion, Gradients
from framework.optimizers.rollback import Rollback
from framework.step import Gradient, LossFn, Step
from framework.strategies import placement
from framework.tools.forensics import examine
from framework.tools.forensics.action import NonFiniteLoss
from framework.trainer import Trainer
from framework.types import Batch, Variable

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
  """Finds steps whose loss is far above its recent distribution, and the examples that cause it.

  The distribution is that of the last `window` losses: their median, and a spread of 1.4826 times
  their median absolute deviation, but at least 1 % of the median. A loss above the median by more
  than `deviations` spreads is a spike; so is one that is not finite. The loss is that of the
  step's first update, over all replicas, before the update. The first `window` steps are not
  judged. The same steps are found on any number of replicas, up to rounding, and after a restart.
  """

  on = "train"

  def __init__(
    self,
    *,
    on_spike: OnSpike = "report",
    deviations: float = 10.0,
    window: int = 64,
    patience: int = 10,
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

  def _found(self, seen: Judged) -> None:
    """Examines the step that the trainer has undone, and decides how it is repeated (host)."""
    trainer, step = self._trainer, self.run.step + 1
    self._count_step(step)
    batch = _examined(trainer)
    rows, few = batch.culprits(seen.usual + _USUAL_DEVIATIONS * seen.spread)
    ids = {int(each) for each in batch.ids[rows]}
    grown = _growth(trainer, batch, ids) if few else {}
    said = _described(batch, rows, few=few, grown=grown)
    self.run.message(f"step {step}: {seen}; {said}{self._doing(few)}")
    if self.run.is_chief:
      self.run.metrics_log.append(
        step, "spike",
        {"loss": seen.loss, "usual": seen.usual, "most": seen.most, "examples": sorted(ids),
         "replicas": sorted({int(each) for each in batch.replicas[rows]})},
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
        f"the loss is far above its usual values in {self._in_a_row} steps in a row, up to step "
        f"{step}, so it is not single examples. Try a lower learning rate or a warm-up, or "
        "Trainer.clip_norm, from an earlier checkpoint; Spikes.patience allows more steps."
      )

  def _doing(self, few: bool) -> str:
    if self._on_spike == "rewind":
      return "; left out from here on" if few else "; all of them are left out from here on"
    return "; no update" if self._on_spike == "skip" else ""


def _described(batch: Examined, rows: np.ndarray, *, few: bool, grown: Mapping[str, float]) -> str:
  """Returns which replicas and examples have a spike, and which gradients it raises."""
  if not few:
    return f"not a few examples: without half of the {len(rows)} it is still high"
  parts = []
  for replica in sorted(set(batch.replicas[rows])):
    here = [row for row in rows if batch.replicas[row] == replica]
    named = [f"{batch.ids[row]} (loss {batch.losses[row]:.3g})" for row in here[:_SHOWN]]
    more = f" and {len(here) - _SHOWN} more" if len(here) > _SHOWN else ""
    parts.append(f"replica {replica}: example{'s' * (len(here) > 1)} {', '.join(named)}{more}")
  most = sorted(grown.items(), key=lambda item: -item[1])[:3]
  gradients = ", ".join(f"{name} x {factor:.3g}" for name, factor in most)
  return "; ".join(parts) + (f"; gradients with them: {gradients}" if gradients else "")


# ---- The steps are judged ----


class Judged(NamedTuple):
  """The loss of a step, and what it is compared with; `most` is the largest usual loss."""

  loss: float
  usual: float
  spread: float
  most: float

  def __str__(self) -> str:
    """Returns both as text."""
    return f"the loss is {self.loss:.4g}, usually {self.usual:.4g} and at most {self.most:.4g}"


class Guard(Rollback):
  """Undoes a step whose loss is a spike, which ends the loop; judges nothing else."""

  def __init__(
    self,
    trainer: Trainer,
    *,
    window: int,
    deviations: float,
    updates: bool,
    on_spike: Callable[[Judged], None],
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
      self._losses = tf.Variable(np.zeros([window]), trainable=False)
      self._seen = tf.Variable(np.int64(0), trainable=False)
      self._repeated = tf.Variable(np.int64(-1), trainable=False)
      self._judged = tf.Variable(np.zeros([len(Judged._fields)]), trainable=False)

  def repeat(self, step: int) -> None:
    """Lets the step after `step` steps pass, whatever its loss (host)."""
    self._repeated.assign(np.int64(step))

  def state(self) -> dict[str, Any]:
    """Returns the values of its variables (host)."""
    return {"losses": self._losses.numpy().tolist(), "seen": int(self._seen.numpy())}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Sets its variables; another window begins anew (host)."""
    if len(state["losses"]) == self._window:
      self._losses.assign(np.array(state["losses"]))
      self._seen.assign(np.int64(state["seen"]))

  def step_begins(self) -> None:
    """See `Observer`; also computes what is usual."""
    super().step_begins()
    self._loss: tf.Tensor | None = None
    with tf.device("CPU:0"):
      usual = _median(self._losses)
      spread = _NORMAL * _median(tf.abs(self._losses - usual))
      spread = tf.maximum(spread, _LEAST * tf.abs(usual))
      infinity = tf.constant(np.inf, tf.float64)
      most = tf.where(self._seen < self._window, infinity, usual + self._deviations * spread)
      self._usual = [usual, spread, most]
      self._again = self._step.read_value() == self._repeated

  def accepts(self, update: int, total: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """See `Rollback`."""
    if update:
      return tf.constant(True)
    with tf.device("CPU:0"):
      loss = tf.math.divide_no_nan(tf.cast(total, tf.float64), tf.cast(weight, tf.float64))
      self._loss, self._weighs = loss, weight > 0
      self._inside = (loss <= self._usual[-1]) & tf.math.is_finite(loss) | ~self._weighs
      return self._inside | self._again if self._updates else self._inside

  def is_good(self, finite: tf.Tensor, loss_finite: tf.Tensor) -> tf.Tensor:
    """See `Rollback`; also adds the loss of a step that stands to the distribution."""
    del finite, loss_finite
    if self._loss is None:
      return tf.constant(True)
    with tf.device("CPU:0"):
      good = self._inside | self._again
      added, place = good & self._weighs, self._seen % self._window
      finite_loss = tf.where(tf.math.is_finite(self._loss), self._loss, np.inf)
      value = tf.where(added, finite_loss, self._losses[place])
      tf.raw_ops.ResourceScatterUpdate(resource=self._losses.handle, indices=place, updates=value)
      self._seen.assign_add(tf.cast(added, tf.int64), read_value=False)
      self._judged.assign(tf.stack([self._loss, *self._usual]), read_value=False)
      return good

  def loop_ends(self, results: dict[str, float], *, done: int, ran: int) -> None:
    """Reports a spike, unless something else has undone the last step (host)."""
    judged = Judged(*self._judged.numpy().tolist())
    if ran > done and not judged.loss <= min(judged.most, math.inf):
      self._on_spike(judged)


def _median(values: tf.Tensor | tf.Variable) -> tf.Tensor:
  count = values.shape[0]
  ordered = tf.sort(values)
  return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2


# ---- A step is examined ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examined:
  """The examples of a step, over all replicas, and its gradients.

  Attributes:
    ids: int64 [n].
    losses: [n], NaN if the task's loss does not say them.
    weights: [n].
    replicas: [n], of which each is an example.
    norms: variable -> the norm of its gradient.
  """

  ids: np.ndarray
  losses: np.ndarray
  weights: np.ndarray
  replicas: np.ndarray
  norms: Mapping[str, float]

  def culprits(self, usual: float) -> tuple[np.ndarray, bool]:
    """Returns the fewest rows without which the mean loss is at most `usual`, largest first.

    And whether they are at most half; if not, all rows are returned.
    """
    losses = self.weights * self.losses
    order = np.argsort(-np.where(np.isfinite(losses), losses, np.inf), kind="stable")
    for count in range(1, len(order) // 2 + 1):
      rest = order[count:]
      if losses[rest].sum() <= usual * self.weights[rest].sum():  # False for NaN
        return order[:count], True
    return order, False


def _examined(trainer: Trainer) -> Examined:
  """Replays the step after `trainer.global_step` (host; every worker must call it)."""
  parts = dataclasses.replace(trainer.parts, observers=())
  with examine.replayed(trainer, lambda: _Rows(parts)) as [step, *_]:
    rows = {name: value.numpy() for name, value in step.rows.items()}
    norms = {name: float(tf.norm(gradient)) for name, gradient in step.summed.items()}
  real = (rows["ids"] >= 0) & (rows["weights"] > 0)
  return Examined(norms=norms, **{name: value[real] for name, value in rows.items()})


def _growth(trainer: Trainer, batch: Examined, ids: Collection[int]) -> dict[str, float]:
  """Returns variable -> by which factor its gradient is larger with these examples (host)."""
  left_out = trainer.left_out
  trainer.left_out = left_out | set(ids)
  try:
    without = _examined(trainer).norms
  finally:
    trainer.left_out = left_out
  return {name: norm / without[name] for name, norm in batch.norms.items() if without[name]}


class _Rows(Step):
  """A step, run eagerly, that keeps each example's loss: the slope of the sum in its weight."""

  def __init__(self, parts: Any) -> None:
    replica = int(parts.replica_id())
    super().__init__(dataclasses.replace(parts, replica_id=lambda: tf.constant(replica)))
    self._replica, self._updates = replica, 0
    self._losses: list[tf.Tensor | None] = []
    self._names: list[str] = []
    self.rows: dict[str, tf.Tensor] = {}
    self.summed: dict[str, tf.Tensor] = {}

  def run(self, task_step: Callable[..., None], batch: Batch) -> None:
    super().run(task_step, batch)
    weights, count = tf.cast(batch["weight"], tf.float32), batch["weight"].shape[0]
    kept = [each for each in self._losses if each is not None]
    losses = tf.concat(kept, 0) if kept and len(kept) == len(self._losses) else tf.zeros([0])
    if losses.shape[0] != count:  # the task's loss is of other rows than the batch's
      losses = tf.fill([count], np.nan)
    rows = {
      "ids": batch["example_id"], "weights": weights, "losses": tf.cast(losses, tf.float32),
      "replicas": tf.fill([count], self._replica),
    }  # fmt: skip
    gather = self.parts.reduction.all_gather
    self.rows = {name: gather(value) for name, value in rows.items()}

  def gradients(
    self,
    loss_fn: LossFn,
    batch: Batch,
    variables: Sequence[Variable],
    *,
    when: tf.Tensor | bool | None = None,
  ) -> tuple[Gradients, Loss]:
    self._names = self._names or [models.name(variable) for variable in variables]
    return super().gradients(loss_fn, batch, variables, when=when)

  def forward_backward(
    self, loss_fn: LossFn, batch: Batch, fusion: Fusion
  ) -> tuple[Gradients, Loss]:
    if self._updates or "weight" not in batch:
      return super().forward_backward(loss_fn, batch, fusion)
    with tf.GradientTape() as tape:
      tape.watch(batch["weight"])
      gradients, loss = super().forward_backward(loss_fn, batch, fusion)
    self._losses.append(tape.gradient(loss.total, batch["weight"]))
    return gradients, loss

  def check(self, gradients: Sequence[Gradient]) -> tuple[tf.Tensor, tf.Tensor]:
    if not self._updates:
      named = zip(self._names, gradients, strict=True)
      self.summed = {name: each for name, each in named if each is not None}
    self._updates += 1
    return super().check(gradients)
