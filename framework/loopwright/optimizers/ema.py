"""Averages of the trainable variables: exponential moving ones, and those that a rule asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from loopwright.distribution import placement
from loopwright.errors import ConfigError, is_finite, require_integer, shown
from loopwright.graphs.aliases import TensorLike, Variable
from loopwright.models import models
from loopwright.optimizers.schedule import Schedule
from loopwright.options.declaration import COUNTS, asked, may_change

if TYPE_CHECKING:
  from loopwright.optimizers.adapters import Optimizer


class Ema:
  """An exponential moving average of the trainable variables, for evaluation and export.

  Attributes:
    decay: see `__init__`; None if the optimizers say what the average is.
    averages: a variable for each trainable one.
  """

  decay: float | Schedule | None

  def __init__(
    self,
    *,
    decay: float | Schedule,
    variables: Sequence[Variable],
    step: tf.Variable | None = None,
  ) -> None:
    """Makes one average per variable, initialised to its value; call it in `strategy.scope()`.

    Args:
      decay: above 0 and below 1; average = decay * average + (1 - decay) * variable. Or such a
        number as a function of the steps before the update: `ema_warmup`, `weight_averaging`.
      step: int64 scalar, the number of steps, for a `Schedule`.

    Raises:
      ConfigError: `decay` is out of range.
    """
    if not isinstance(decay, Schedule):
      _require_decay("Trainer.ema_decay", decay)
    self.decay, self._step = decay, step
    self._make(variables)

  def _make(self, variables: Sequence[Variable]) -> None:
    self._variables = [models.raw(v) for v in variables]
    self.averages = [
      tf.Variable(v.read_value(), trainable=False, name=f"ema_{i}")
      for i, v in enumerate(self._variables)
    ]

  def update(self, strategy: tf.distribute.Strategy, variables: Sequence[Variable]) -> None:
    """Updates the averages of `variables` (cross-replica)."""
    chosen, share = {id(models.raw(v)) for v in variables}, self._share()

    def move(average: tf.Variable, variable: tf.Tensor, share: TensorLike) -> None:
      far = average - tf.cast(variable, average.dtype)
      average.assign_sub(tf.cast(share, average.dtype) * far)

    for average, variable in zip(self.averages, self._variables, strict=True):
      if id(variable) in chosen:
        strategy.extended.update(average, move, args=(variable, share), group=False)

  def _share(self) -> tf.Tensor | float:
    """Returns 1 - decay, the share of a variable in its next average."""
    if not isinstance(self.decay, Schedule):
      return 1.0 - (self.decay or 0.0)
    assert self._step is not None
    with placement.here().on_host():
      return 1.0 - tf.cast(self.decay.function(tf.cast(self._step, tf.float64)), tf.float64)

  def settings(self) -> float | None:
    """Returns the decay of the next update, None if it has none (host)."""
    return 1.0 - float(self._share()) if isinstance(self.decay, Schedule) else self.decay

  def averages_of(self, variables: Sequence[Variable]) -> list[tf.Variable]:
    """Returns the averages of `variables`; variables without one are ignored."""
    chosen = {id(models.raw(v)) for v in variables}
    pairs = zip(self.averages, self._variables, strict=True)
    return [average for average, variable in pairs if id(variable) in chosen]

  def restart(self) -> None:
    """Sets every average to its variable's value (host)."""
    for average, variable in zip(self.averages, self._variables, strict=True):
      average.assign(variable.read_value())

  @contextlib.contextmanager
  def in_place(self) -> Iterator[None]:
    """Exchanges variables and averages inside the `with` (host)."""
    self.swap()
    try:
      yield
    finally:
      self.swap()

  def swap(self) -> None:
    """Exchanges the values of variables and averages (host); a second call restores both."""
    for average, variable in zip(self.averages, self._variables, strict=True):
      held = variable.read_value()
      variable.assign(average.read_value())
      average.assign(held)


class ScheduleFree(Ema):
  """The averages x at which a model of schedule-free optimizers is evaluated.

  Defazio et al., "The Road Less Scheduled" (2024): gradients are taken at
  y = (1 - beta) z + beta x, which Keras keeps in the variable, with z in a slot.
  """

  def __init__(self, optimizers: Sequence[Optimizer]) -> None:
    """Makes them for the variables of `optimizers`; call it in `strategy.scope()`."""
    self.decay = None
    self._make([v for each in optimizers for v in each.variables])
    owned = [each.optimizer for each in optimizers for _ in each.variables]
    self._betas = [optimizer.beta_1 for optimizer in owned]
    self._slots = [models.raw(z) for each in optimizers for z in each.optimizer._momentums]

  def update(self, strategy: tf.distribute.Strategy, variables: Sequence[Variable]) -> None:
    """See `Ema`."""
    chosen = {id(models.raw(v)) for v in variables}
    rows = zip(self.averages, self._variables, self._slots, self._betas, strict=True)
    for average, y, z, beta in rows:
      if id(y) in chosen:
        strategy.extended.update(average, _average, args=(y, z, beta), group=False)

  def restart(self) -> None:
    """See `Ema`."""
    for average, *given in zip(
      self.averages, self._variables, self._slots, self._betas, strict=True
    ):
      _average(average, *given)


def _average(average: tf.Variable, y: tf.Tensor, z: tf.Tensor, beta: float) -> None:
  average.assign((y - (1.0 - beta) * z) / beta)


@may_change(COUNTS)
def ema_warmup(*, decay: float) -> Schedule:
  """A decay that rises from 0.1 to `decay`: min(decay, (1 + t) / (10 + t)) after t steps.

  So an average soon forgets the first weights. It is what TensorFlow's ExponentialMovingAverage
  does with `num_updates`.

  Args:
    decay: above 0 and below 1.

  Raises:
    ConfigError: `decay` is out of range.
  """
  _require_decay("ema_warmup.decay", decay)
  return Schedule(lambda step: tf.minimum(tf.cast(decay, step.dtype), (1.0 + step) / (10.0 + step)))


@may_change(asked("counts from there on; what was averaged keeps its share"))
def weight_averaging(*, start_step: int, every_steps: int = 1) -> Schedule:
  """The mean of the weights after `start_step` steps and each `every_steps` more; before, the last.

  Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization" (2018),
  algorithm 1. A step whose update is skipped adds the mean so far.

  Args:
    start_step: the step after which weights are the first that count.
    every_steps: steps between weights that count, such as the length of a cycle of the rate.

  Raises:
    ConfigError: not whole numbers of at least 1.
  """
  start = require_integer("weight_averaging.start_step", start_step, at_least=1)
  every = require_integer("weight_averaging.every_steps", every_steps, at_least=1)

  def decay(step: tf.Tensor) -> tf.Tensor:
    since = step + 1.0 - start
    before = tf.math.floordiv(since, tf.cast(every, since.dtype))
    due = tf.equal(before * every, since)
    counted = tf.where(due, before / (before + 1.0), tf.ones_like(since))
    return tf.where(since < 0, tf.zeros_like(since), counted)

  return Schedule(decay)


def _require_decay(name: str, decay: float) -> None:
  if not is_finite(decay) or not 0 < decay < 1:
    raise ConfigError(f"{name} is {shown(decay)}; it must be between 0 and 1, such as 0.999.")
