"""The first gradient in half precision compared with float32, from the same weights and batch.

Gradients are read from the momentum of plain gradient descent, which begins at zero: so it holds
exactly what was applied, while the change of a weight would be rounded.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from loopwright.host import failures
from loopwright.models import models
from loopwright.optimizers import loss_scale
from loopwright.tools.verify import causes
from loopwright.tools.verify.bench import bench, recorded_step, shared_noise, source_lines
from loopwright.tools.verify.bench.bench import Bench, Rows, Subject, under
from loopwright.tools.verify.bench.recorded_step import Operation
from loopwright.tools.verify.report import Group, Result

GROUP, CHECK = Group("precision"), "gradient in half precision"
LIMITS = {"mixed_float16": 0.1, "mixed_bfloat16": 0.2}
"""Limits of the relative error. Rounding alone gives about 2**-11 and 2**-8 per layer, in sum
mostly below 0.01 and 0.05. A gradient with a larger error than these limits is wrong."""
UNDERFLOW = 0.05
"""Limit of the share of elements that become 0; Adam moves small elements as far as large ones."""
_NOISE = 0.1
_SAME = 1e-6
_MANY = 2048
"""From this many elements on, a float16 sum has no digit left for a single one."""
SUMS = ("Sum", "Mean", "L2Loss", "Cumsum", "Prod", "EuclideanNorm")
DIVISIONS = ("RealDiv", "Div", "Reciprocal", "Inv", "Rsqrt", "Log", "Log1p", "Xlogy")
_TRIES = (2.0**4, 2.0**8, 2.0**12, 2.0**16, 2.0**24)
OVERFLOW, SMALL = "overflow in the forward pass", "underflow in the forward pass"
A_SUM = "a sum in half precision"
TOO_SMALL, TOO_LARGE = "loss scale too small", "loss scale too large"
MIXED = "float32 and half precision mixed"


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group; restores the policies of both Keras generations."""
  policy = subject.precision
  if policy not in LIMITS:
    return [GROUP.skipped(CHECK, f"run.precision is {policy}")]
  half = HalfGradient(subject)
  with under(policy):
    return [half.result()]


class GradientStep(NamedTuple):
  """One step.

  Attributes:
    gradients: one per trained variable, float64, unscaled; zero if the step was skipped.
    skipped: whether a gradient was not finite.
    loss: the mean loss.
    scale: the loss scale of the step.
  """

  gradients: list[np.ndarray]
  skipped: bool
  loss: float
  scale: float

  @property
  def flat(self) -> np.ndarray:
    """All gradients as one vector."""
    return np.concatenate([gradient.ravel() for gradient in self.gradients])


class HalfGradient:
  """The gradient under the config's policy, compared with that in float32."""

  def __init__(self, subject: Subject) -> None:
    """Takes the latter, and again with the rows in reverse order; the difference is rounding."""
    self.subject, self.rows = subject, subject.divisible_rows
    self.dtype, self.limit = subject.precision[len("mixed_") :], LIMITS[subject.precision]
    with under("float32"):
      here = make(subject, self.rows, loss_scale=loss_scale.none)
      owned = [v for o in here.trainer.parts.optimizers.values() for v in o.variables]
      self.start, self.names = here.read(), [models.name(variable) for variable in owned]
      self.batch = subject.rows(here.task, self.rows)
      self.wanted = gradient(here, self.start, self.batch)
      backwards = {name: value[::-1].copy() for name, value in self.batch.items()}
      other = gradient(here, self.start, backwards).flat
    self.flat = self.wanted.flat
    apart = np.abs(other - self.flat)
    self.meaningful = (self.flat != 0) & (apart <= _NOISE * np.abs(self.flat))

  def result(self) -> Result:
    """Returns the result, or why there is none; the policy must be in force."""
    if not (np.isfinite(self.flat).all() and self.flat.any()):
      return GROUP.skipped(CHECK, "the first gradient in float32 is zero or not finite")
    try:
      here = make(self.subject, self.rows)
      taken = self._settled(here)
    except Exception as error:  # anything that the user's code raises in the other dtype
      place = source_lines.qualified(failures.place_of(error), self.subject.fresh_task())
      return GROUP.failed(CHECK, failures.failure(error), MIXED, place)
    apart = self._apart(taken)
    if apart < _SAME and not taken.skipped:
      of_keras = any(models.is_keras(part) for part in models.parts(here.task.model))
      why = "no layer uses" if of_keras else "a tf.Module ignores"
      return GROUP.skipped(CHECK, f"{why} the dtype policy: the gradient is that of float32")
    lost = self._lost(taken)
    values = {"relative_error": apart, "underflow": lost, "loss_scale": taken.scale}
    told = self._told(taken, apart, lost)
    if not (taken.skipped or apart > self.limit or lost > UNDERFLOW):
      return GROUP.passed(CHECK, told, values=values)
    cause, place, number = self._explained(taken)
    remedy = causes.remedy(cause, GROUP.name).format(number)
    return GROUP.failed(CHECK, told, cause, place, remedy, values=values)

  def _settled(self, here: Bench) -> GradientStep:
    """Returns the first step that a dynamic scale does not skip; otherwise the last one tried."""
    for _ in range(24):
      taken = gradient(here, self.start, self.batch)
      if not taken.skipped or not np.isfinite(taken.loss) or taken.scale == _scale(here):
        break
    return taken

  def _apart(self, taken: GradientStep) -> float:
    return float(np.linalg.norm(taken.flat - self.flat) / np.linalg.norm(self.flat))

  def _lost(self, taken: GradientStep) -> float:
    """Returns the share of elements that are 0 here but not in float32."""
    lost = taken.flat[self.meaningful] == 0
    return float(lost.mean()) if lost.size else 0.0

  def _told(self, taken: GradientStep, apart: float, lost: float) -> str:
    scaled = f" at loss scale {taken.scale:g}" if taken.scale != 1 else ""
    if taken.skipped:
      what = "gradient" if np.isfinite(taken.loss) else "loss"
      return f"the {what} is not finite{scaled}, in float32 it is"
    pairs = zip(taken.gradients, self.wanted.gradients, self.names, strict=True)
    floor = 1e-3 * np.linalg.norm(self.flat)
    each = [(np.linalg.norm(g - w) / max(np.linalg.norm(w), floor), name) for g, w, name in pairs]
    worst, name = max(each)
    most = f"relative error {apart:.1e} (most in {name}, {worst:.1e})"
    return f"{most}, {lost:.1%} of the elements underflow{scaled}"

  # ---- Why ----

  def _explained(self, taken: GradientStep) -> tuple[str, str, str]:
    """Returns (cause, place, a loss scale that would do)."""
    if taken.skipped and np.isfinite(taken.loss):
      return TOO_LARGE, "", ""
    if not taken.skipped and (helped := self._larger_scale(taken.scale)):
      return TOO_SMALL, "", f"{helped:g}"
    seen = self._watched()
    if taken.skipped:
      broken = (op for op, halves in seen if not all(np.isfinite(v).all() for v in halves))
      first = next(broken, None)
      kind = first.kind if first else ""
      cause = A_SUM if kind in SUMS else SMALL if kind in DIVISIONS else OVERFLOW
      return cause, first.place if first else "", ""
    for operation, [half, *_] in seen:
      size = 1 if operation.kind == "Cumsum" else max(1, half.size)
      if operation.kind in SUMS and operation.elements // size >= _MANY:
        return A_SUM, operation.place, ""
    return "unknown", "", ""

  def _larger_scale(self, scale: float) -> float | None:
    for factor in _TRIES if self.dtype == "float16" else ():
      scaled = functools.partial(loss_scale.fixed, scale=scale * factor)
      here = make(self.subject, self.rows, loss_scale=scaled)
      taken = gradient(here, self.start, self.batch)
      right = self._apart(taken) <= self.limit and self._lost(taken) <= UNDERFLOW
      if right and not taken.skipped:
        return scale * factor
    return None

  def _watched(self) -> list[tuple[Operation, list[np.ndarray]]]:
    """Returns the user's operations in an eager step, in order, with results in half precision."""
    here = make(self.subject, self.rows, eager=True)
    dtype = tf.as_dtype(self.dtype).as_numpy_dtype
    with contextlib.suppress(Exception), recorded_step.watched(here.task) as seen:
      gradient(here, self.start, self.batch)
      halves = [(op, [v.astype(np.float32) for v in op.values if v.dtype == dtype]) for op in seen]
      return [(op, values) for op, values in halves if op.place and values]
    return []  # the task cannot run eagerly


_KEEPING = functools.partial(keras.optimizers.SGD, bench.RATE, momentum=0.5)


def make(subject: Subject, rows: int, **options: Any) -> Bench:
  """Builds a bench under the policies in force; its optimizer keeps the first gradient."""
  plain: dict[str, Any] = {
    "clip_norm": None, "clip_value": None, "accumulation_steps": 1, "ema_decay": None,
    "jit_compile": False, "eager": False, **options,
  }  # fmt: skip
  return Bench(subject, rows=rows, optimizer=_KEEPING, quiet=False, **plain)


def gradient(here: Bench, start: Sequence[np.ndarray], batch: Rows) -> GradientStep:
  """Runs one step from `start` with zero momentum; the step may change the loss scale (host)."""
  optimizers = here.trainer.parts.optimizers.values()
  for momentum in (models.raw(m) for each in optimizers for m in each.optimizer.momentums):
    momentum.assign(tf.zeros_like(momentum))
  here.trainer.global_step.assign(0)  # on which random numbers depend
  scale = _scale(here)
  with shared_noise.same_draws():
    metrics = here.steps_from(start, batch).metrics
  kept = [
    np.array(value, np.float64) / -bench.RATE
    for optimizer in optimizers
    for value in optimizer.fusion.unpack([models.raw(m) for m in optimizer.optimizer.momentums])
  ]
  return GradientStep(kept, metrics["skipped"] > 0, here.loss_in(metrics), scale)


def _scale(here: Bench) -> float:
  return float(tf.convert_to_tensor(here.trainer.parts.loss_scale.value()))
