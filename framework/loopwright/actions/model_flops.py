"""`ModelFlops`: model FLOP/s of each loop, and which part of the devices' peak they are (MFU).

docs/traces.md says what counts.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import tensorflow as tf

from loopwright.actions.base import Action, Output, Run
from loopwright.distribution import gpus, placement
from loopwright.errors import ConfigError, require_positive
from loopwright.graphs import flops
from loopwright.observers import Forward, Metrics, Observer, StepObserver

if TYPE_CHECKING:
  from loopwright.graphs.aliases import Batch
  from loopwright.metrics import Loss

_BACKWARD = 2
"""Of the forward pass's operations; Chowdhery et al., "PaLM" (2022), appendix B."""
_FORWARD = "forward FLOPs"


class ModelFlops(Action):
  """Logs `model_flops_per_s` of each loop, and `mfu`, if the peak of the devices is known.

  Those of matrix products and convolutions of the forward passes, three times, as the backward
  pass counts twice; without rows of padding. MFU is their part of the peak of all devices
  (Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B). They come
  from the shapes of the traced step. If it has a loop of unknown length, a line says so, and
  nothing is logged.
  """

  on = "train"

  def __init__(self, *, peak_flops_per_s: float | None = None) -> None:
    """Sets the peak.

    Args:
      peak_flops_per_s: of one device in the dtype in which it computes; None takes that of its
        data sheet, which is known for some NVIDIA GPUs.

    Raises:
      ConfigError: it is not above 0.
    """
    if peak_flops_per_s is not None:
      require_positive("ModelFlops.peak_flops_per_s", peak_flops_per_s)
    self._peak, self._told = peak_flops_per_s, False

  def bind(self, run: Run) -> None:
    """Makes the trainer count.

    Raises:
      ConfigError: training is asynchronous, or in eager mode.
    """
    super().bind(run)
    trainer = run.trainer
    assert trainer is not None
    if trainer.eager:
      raise ConfigError(
        "run.eager is True, but ModelFlops counts operations of a compiled step; remove either."
      )
    self._count = FlopsCount(self._log)
    trainer.observe(self._count)
    replicas, self._devices = run.strategy.num_replicas_in_sync, placement.of(run.strategy).devices
    self._per_row = replicas / trainer.padded_batch_size
    self._number = max(replicas, len(self._devices))

  def __call__(self, output: Output) -> None:
    """Says once that nothing is logged, if so; the trainer logs the rest."""
    unknown = self._count.unknown
    if unknown and not self._told:
      self._told = True
      self.run.message(
        "ModelFlops logs nothing, as its count is incomplete: of a loop or an operation the turns "
        f"or sizes are unknown: {unknown[0]} (one of {len(unknown)})."
      )

  def _log(self, results: dict[str, float]) -> None:
    """Adds to the values of a loop what its mean step computes."""
    per_example = (1 + _BACKWARD) * self._per_row * results.pop(_FORWARD, math.nan)
    if self._count.unknown:
      return
    rate = results["model_flops_per_s"] = per_example * results["examples_per_second"]
    [(dtype, _)] = self._count.dtypes.most_common(1) or [("float32", 0)]
    peak = self._peak or gpus.peak_flops(self._devices, dtype)
    if peak is not None:
      results["mfu"] = rate / (peak * self._number)


class FlopsCount(Observer):
  """Adds up what the forward passes of a step compute.

  Attributes:
    dtypes: name of a dtype -> its floating-point operations in all traces so far.
    unknown: see `flops.Count`.
  """

  def __init__(self, log: Callable[[dict[str, float]], None]) -> None:
    """Gives the values of each loop to `log`."""
    self.dtypes: collections.Counter[str] = collections.Counter()
    self.unknown: list[str] = []
    self._log = log

  def of_replica(self) -> StepObserver:
    """Counts the forward passes of a replica."""
    return _Passes(self)

  def loop_ends(self, results: dict[str, float], *, done: int, ran: int) -> None:
    """Adds the rates to the values of the loop."""
    self._log(results)

  def add(self, count: flops.Count) -> None:
    """Adds the count of a pass."""
    self.dtypes.update(count.dtypes)
    self.unknown += count.unknown


class _Passes(StepObserver):
  def __init__(self, total: FlopsCount) -> None:
    self._total = total

  def forward(self, loss_fn: Forward, log: Callable[[Metrics], None]) -> Forward:
    def counted(batch: Batch) -> Loss:
      begun = tf.no_op()
      loss = loss_fn(batch)
      made = begun.graph.get_operations()
      made = made[made.index(begun) :]
      if tf.distribute.get_strategy().num_replicas_in_sync > 1:  # they may take turns in a pass
        made = [each for each in made if each.device == begun.device]
      count = flops.Count(loss, among=set(made))
      self._total.add(count)
      log({_FORWARD: (tf.constant(count.flops, tf.float64), tf.constant(0.0, tf.float64))})
      return loss

    return counted

  def metrics(self) -> Metrics:
    return {_FORWARD: (0.0, 1.0)}
