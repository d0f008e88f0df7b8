"""Averages of the trainable variables: exponential moving ones, and those that a rule asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from framework.errors import ConfigError
from framework.models import models
from framework.optimizers import schedule_free
from framework.optimizers.adapters import Optimizer
from framework.types import Model, Variable


class Ema:
  """An exponential moving average of the trainable variables, for evaluation and export.

  Attributes:
    decay: see `__init__`; None if the optimizers say what the average is.
    averages: a variable for each trainable one.
  """

  decay: float | None

  def __init__(self, *, decay: float, variables: Sequence[Variable]) -> None:
    """Makes one average per variable, initialised to its value; call it in `strategy.scope()`.

    Args:
      decay: above 0 and below 1; average = decay * average + (1 - decay) * variable.

    Raises:
      ConfigError: `decay` is out of range.
    """
    if not 0 < decay < 1:
      raise ConfigError(f"Trainer.ema_decay is {decay}; it must be between 0 and 1, such as 0.999.")
    self.decay = decay
    self._make(variables)

  def _make(self, variables: Sequence[Variable]) -> None:
    self._variables = [models.raw(v) for v in variables]
    self.averages = [
      tf.Variable(v.read_value(), trainable=False, name=f"ema_{i}")
      for i, v in enumerate(self._variables)
    ]

  @classmethod
  def of_model(cls, model: Model, *, decay: float) -> Ema:
    """Makes the averages of a model's trainable variables, in `strategy.scope()`."""
    return cls(decay=decay, variables=models.trainable_variables(model))

  def update(self, strategy: tf.distribute.Strategy, variables: Sequence[Variable]) -> None:
    """Updates the averages of `variables` (cross-replica)."""
    chosen, kept = {id(models.raw(v)) for v in variables}, self.decay or 0.0

    def move(average: tf.Variable, variable: tf.Tensor) -> None:
      average.assign_sub((1.0 - kept) * (average - tf.cast(variable, average.dtype)))

    for average, variable in zip(self.averages, self._variables, strict=True):
      if id(variable) in chosen:
        strategy.extended.update(average, move, args=(variable,), group=False)

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


def averages(
  model: Model, optimizers: Mapping[str, Optimizer], *, decay: float | None
) -> Ema | None:
  """Returns the averages at which a model is evaluated, None for none; in `strategy.scope()`.

  Args:
    decay: of a moving average.

  Raises:
    ConfigError: `decay` is out of range, or an optimizer has an average of its own.
  """
  free = {n: each for n, each in optimizers.items() if schedule_free.is_free(each.optimizer)}
  if not free:
    return None if decay is None else Ema.of_model(model, decay=decay)
  if decay is not None:
    name, first = next(iter(free.items()))
    raise ConfigError(
      f"received Trainer.ema_decay={decay}, but optimizer {name!r}, a "
      f"{type(first.optimizer).__name__}, averages the weights itself; remove one of them."
    )
  return ScheduleFree(list(free.values()))
