"""The exponential moving average of the trainable variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from framework.errors import ConfigError
from framework.models import models
from framework.types import Model, Variable


class Ema:
  """An exponential moving average of the trainable variables, for evaluation and export.

  Attributes:
    decay: see `__init__`.
    averages: a variable for each trainable one.
  """

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
    chosen = {id(models.raw(v)) for v in variables}

    def move(average: tf.Variable, variable: tf.Tensor) -> None:
      average.assign_sub((1.0 - self.decay) * (average - tf.cast(variable, average.dtype)))

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
