"""The first gradient in half precision compared with float32, from the same weights and batch.

Gradients are read from the momentum of plain gradient descent, which begins at zero: so it holds
exactly what was applied, while the change of a weight would be rounded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from loopwright.host import failures
from loopwright.models import models
from loopwright.optimizers import loss_scale
from loopwright.task import Task
from loopwright.tools.verify import causes
from loopwright.tools.verify.bench import bench, recorded_step, shared_noise
from loopwright.tools.verify.bench.bench import Bench, Rows, Subject, under
from loopwright.tools.verify.bench.recorded_step import Operation
from loopwright.tools.verify.report import Group, Result

GROUP = Group("precision")
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
LOGARITHMS = (
  "Softmax", "LogSoftmax", "SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits",
  "Log", "Log1p", "Exp", "Softplus",
)  # fmt: skip
DIVISIONS = ("RealDiv", "Div", "Reciprocal", "Inv", "Rsqrt", "Log", "Log1p", "Xlogy")
_TRIES = (2.0**4, 2.0**8, 2.0**12, 2.0**16, 2.0**24)
_PLACE = re.compile(r"\(([^()]+:\d+, in [^()]+)\)$")


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group; restores the policies of both Keras generations."""
  reference = Float32Gradient(subject)
  results = []
  for policy in LIMITS:
    with under(policy):
      results += list(HalfGradient(reference, policy).results())
  return results


class Float32Gradient:
  """The gradient in float32."""

  def __init__(self, subject: Subject) -> None:
    """Takes it, and again with the rows in reverse order; the difference is rounding."""
    self.subject, self.rows = subject, subject.divisible_rows
    with under("float32"):
      here = make(subject, self.rows, loss_scale=loss_scale.none)
      self.start, self.names = here.read(), _names(here)
      self.batch = subject.rows(here.task, self.rows)
      self.step = gradient(here, self.start, self.batch)
      backwards = {name: value[::-1].copy() for name, value in self.batch.items()}
      other = gradient(here, self.start, backwards)
    self.flat = self.step.flat
    apart = np.abs(other.flat - self.flat)
    self.meaningful = (self.flat != 0) & (apart <= _NOISE * np.abs(self.flat))

  @property
  def usable(self) -> bool:
    """Whether the gradient is finite and not zero."""
    return bool(np.isfinite(self.flat).all() and self.flat.any())


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientStep:
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
  """The gradient under one policy, which must be in force."""

  def __init__(self, reference: Float32Gradient, policy: str) -> None:
    """Sets what to compare with; takes no step yet."""
    self.reference, self.policy = reference, policy
    self.subject, self.dtype = reference.subject, policy.removeprefix("mixed_")
    self.asked = self.subject.precision == policy
    self.check = f"gradient in {self.dtype}"

  def results(self) -> Iterator[Result]:
    """Yields the result for the gradient, or why there is none."""
    if not self.reference.usable:
      yield self._not_applicable("the first gradient in float32 is zero or not finite")
      return
    try:
      here = make(self.subject, self.reference.rows)
      taken = self._settled(here)
    except Exception as error:  # anything that the user's code raises in the other dtype
      yield self._refused(error)
      return
    apart = self._apart(taken)
    if apart < _SAME and not taken.skipped:
      yield self._not_applicable(_why_ignored(here.task))
      return
    lost = self._lost(taken)
    values = {"relative_error": apart, "underflow": lost, "loss_scale": taken.scale}
    told = self._told(taken, apart, lost)
    wrong = taken.skipped or apart > LIMITS[self.policy] or lost > UNDERFLOW
    if not wrong:
      yield GROUP.passed(self.check, told, values=values)
    elif not self.asked:
      yield self._would_fail(told, values)
    else:
      cause, place, scale = self._explained(taken)
      remedy = causes.remedy(cause, GROUP.name).format(scale)
      yield GROUP.failed(self.check, told, cause, place, remedy, values=values)

  def _settled(self, here: Bench) -> GradientStep:
    """Returns the first step that a dynamic scale does not skip; otherwise the last one tried."""
    for _ in range(24):
      taken = gradient(here, self.reference.start, self.reference.batch)
      if not taken.skipped or not np.isfinite(taken.loss) or taken.scale == _scale(here):
        break
    return taken

  # ---- Numbers ----

  def _apart(self, taken: GradientStep) -> float:
    wanted = self.reference.flat
    return float(np.linalg.norm(taken.flat - wanted) / np.linalg.norm(wanted))

  def _lost(self, taken: GradientStep) -> float:
    """Returns the share of elements that are 0 here but not in float32."""
    meaningful = self.reference.meaningful
    return float((taken.flat[meaningful] == 0).mean()) if meaningful.any() else 0.0

  def _told(self, taken: GradientStep, apart: float, lost: float) -> str:
    scaled = f" at loss scale {taken.scale:g}" if taken.scale != 1 else ""
    if taken.skipped:
      what = "gradient" if np.isfinite(taken.loss) else "loss"
      return f"the {what} is not finite{scaled}, in float32 it is"
    pairs = zip(taken.gradients, self.reference.step.gradients, self.reference.names, strict=True)
    floor = 1e-3 * np.linalg.norm(self.reference.flat)
    each = [(np.linalg.norm(g - w) / max(np.linalg.norm(w), floor), name) for g, w, name in pairs]
    worst, name = max(each)
    most = f"relative error {apart:.1e} (most in {name}, {worst:.1e})"
    return f"{most}, {lost:.1%} of the elements underflow{scaled}"

  # ---- Why ----

  def _explained(self, taken: GradientStep) -> tuple[str, str, str]:
    """Returns (cause, place, a loss scale that would do)."""
    dtype = tf.as_dtype(self.dtype).as_numpy_dtype
    seen = [op for op in self._watched() if any(value.dtype == dtype for value in op.values)]
    if taken.skipped and not np.isfinite(taken.loss):
      first = next((op for op in seen if not _finite(op, dtype)), None)
      cause = A_SUM if first and first.kind in SUMS else OVERFLOW
      cause = SMALL if first and first.kind in DIVISIONS else cause
      return cause, first.place if first else "", ""
    if taken.skipped:
      return TOO_LARGE, "", ""
    if helped := self._larger_scale(taken.scale):
      return TOO_SMALL, "", f"{helped:g}"
    if sums := [op for op in seen if op.kind in SUMS and _summed(op, dtype) >= _MANY]:
      return A_SUM, sums[0].place, ""
    if logarithms := [op for op in seen if op.kind in LOGARITHMS]:
      return LOGARITHM, logarithms[0].place, ""
    return "unknown", "", ""

  def _larger_scale(self, scale: float) -> float | None:
    if self.dtype != "float16":
      return None
    for factor in _TRIES:
      scaled = functools.partial(loss_scale.fixed, scale=scale * factor)
      here = make(self.subject, self.reference.rows, loss_scale=scaled)
      taken = gradient(here, self.reference.start, self.reference.batch)
      right = self._apart(taken) <= LIMITS[self.policy] and self._lost(taken) <= UNDERFLOW
      if right and not taken.skipped:
        return scale * factor
    return None

  def _watched(self) -> list[Operation]:
    """Returns the operations of the user's code in an eager step, in order."""
    here = make(self.subject, self.reference.rows, eager=True)
    with contextlib.suppress(Exception), recorded_step.watched(here.task) as seen:
      gradient(here, self.reference.start, self.reference.batch)
      return [operation for operation in seen if operation.place]
    return []  # the task cannot run eagerly

  # ---- Rows ----

  def _refused(self, error: Exception) -> Result:
    line = failures.failure(error)
    if not self.asked:
      return self._would_fail(line)
    place = found[1] if (found := _PLACE.search(line)) else ""
    return GROUP.failed(self.check, line, MIXED, place)

  def _would_fail(self, told: str, values: dict[str, Any] | None = None) -> Result:
    why = f"run.precision is {self.subject.precision}; it would fail: {told}"
    return self._not_applicable(why, values)

  def _not_applicable(self, why: str, values: dict[str, Any] | None = None) -> Result:
    return GROUP.skipped(self.check, why, values=values or {})


OVERFLOW, SMALL = "overflow in the forward pass", "underflow in the forward pass"
A_SUM, LOGARITHM = "a sum in half precision", "a logarithm in half precision"
TOO_SMALL, TOO_LARGE = "loss scale too small", "loss scale too large"
MIXED = "float32 and half precision mixed"


def _summed(operation: Operation, dtype: type) -> int:
  """Returns how many inputs an operation has for each output in half precision."""
  half = next(value for value in operation.values if value.dtype == dtype)
  return operation.elements // (1 if operation.kind == "Cumsum" else max(1, half.size))


def _finite(operation: Operation, dtype: type) -> bool:
  halves = [value for value in operation.values if value.dtype == dtype]
  return all(np.isfinite(value.astype(np.float32)).all() for value in halves)


# ---- Steps ----

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
  for optimizer in optimizers:
    for momentum in map(models.raw, optimizer.optimizer.momentums):
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
  return GradientStep(
    gradients=kept, skipped=metrics["skipped"] > 0, loss=here.loss_in(metrics), scale=scale
  )


def _scale(here: Bench) -> float:
  return float(tf.convert_to_tensor(here.trainer.parts.loss_scale.value()))


def _names(here: Bench) -> list[str]:
  return [models.name(v) for o in here.trainer.parts.optimizers.values() for v in o.variables]


def _why_ignored(task: Task) -> str:
  if not any(models.is_keras(part) for part in models.parts(task.model)):
    return "a tf.Module ignores the dtype policy: it computes in float32 under each"
  return "no layer uses the dtype policy: the gradient is that of float32"
