"""One face for the optimizers of Keras 3 and tf_keras, with their own reduction switched off.

The framework has already summed the gradients over replicas, clipped them and checked that they
are finite; what is left for an optimizer is its update rule.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
import tf_keras

from framework import models, schedules
from framework.errors import ConfigError

OptimizerFactory = Callable[[], Any]
DEFAULT = "default"


class Optimizer:
  """An optimizer of either Keras generation and the variables it owns."""

  def __init__(self, *, optimizer: Any, variables: Sequence[Any], step: tf.Variable) -> None:
    """Builds the optimizer's slots, so call it in `strategy.scope()`.

    Args:
      optimizer: a Keras 3 or tf_keras optimizer, fresh.
      variables: what it updates; see `models.trainable_variables`.
      step: int64 scalar, the framework's step counter, which learning-rate schedules follow.
    """
    self.optimizer = optimizer
    self.variables = list(variables)
    schedules.bind(optimizer, step)
    self._build()

  def learning_rate(self) -> tf.Tensor:
    """Returns the learning rate of the next update, a float32 scalar."""
    return tf.convert_to_tensor(self.optimizer.learning_rate, tf.float32)

  def apply(self, gradients: Sequence[tf.Tensor | None]) -> None:
    """Updates the variables (replica context); communicates nothing.

    Args:
      gradients: one an own variable, reduced: the same on every replica; None leaves it alone.
    """
    raise NotImplementedError

  def _build(self) -> None:
    raise NotImplementedError


class Keras3Optimizer(Optimizer):
  """Keras 3: `apply` always sums gradients over replicas again, which would double the update."""

  def _build(self) -> None:
    # The only switch there is; tests/test_optimizers.py has a canary for it.
    self.optimizer._all_reduce_sum_gradients = list
    self.optimizer.build(self.variables)

  def apply(self, gradients: Sequence[tf.Tensor | None]) -> None:
    """Updates the variables (replica context)."""
    with warnings.catch_warnings():  # the framework has named variables without gradient already
      warnings.simplefilter("ignore")
      self.optimizer.apply(list(gradients), self.variables)


class TfKerasOptimizer(Optimizer):
  """tf_keras, the optimizers since 2.11 (not `tf_keras.optimizers.legacy`)."""

  def _build(self) -> None:
    self.optimizer.jit_compile = False  # its XLA update cannot be nested in the step's branch
    self._raw = [models.raw(v) for v in self.variables]
    self.optimizer.build(self._raw)

  def apply(self, gradients: Sequence[tf.Tensor | None]) -> None:
    """Updates the variables (replica context)."""
    pairs = [(g, v) for g, v in zip(gradients, self._raw, strict=True) if g is not None]
    self.optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)


def build(
  factories: OptimizerFactory | Mapping[str, OptimizerFactory],
  variables_of: Callable[[str], Sequence[Any]],
  step: tf.Variable,
) -> dict[str, Optimizer]:
  """Makes every optimizer of a task, in `strategy.scope()`.

  Args:
    factories: one factory, or name -> factory.
    variables_of: name -> the variables that optimizer owns.
    step: the framework's step counter.

  Returns:
    name -> optimizer; a single factory gets the name "default".

  Raises:
    ConfigError: not a factory, not an optimizer, an option that contradicts the framework's, or an
      optimizer without variables.
  """
  named = factories if isinstance(factories, Mapping) else {DEFAULT: factories}
  return {name: _build_one(name, f, variables_of(name), step) for name, f in named.items()}


def _build_one(name: str, factory: Any, variables: Sequence[Any], step: tf.Variable) -> Optimizer:
  if _generation(factory) is not None or not callable(factory):
    raise ConfigError(
      f"optimizer {name!r} is {type(factory).__name__}, already built; give a factory, which the "
      "framework calls inside the strategy's scope (in gin: @keras.Adam without parentheses)."
    )
  optimizer = factory()
  adapter = _generation(optimizer)
  if adapter is None:
    raise ConfigError(
      f"optimizer {name!r} is a {type(optimizer).__name__}; it must be a Keras 3 optimizer or a "
      "tf_keras optimizer that is not legacy."
    )
  _refuse_conflicts(name, optimizer)
  if not variables:
    raise ConfigError(
      f"optimizer {name!r} has no trainable variable to update; build the model's variables in "
      "build_model() (call it once, or give it an Input), or override Task.variables_of()."
    )
  return adapter(optimizer=optimizer, variables=variables, step=step)


def _generation(optimizer: Any) -> type[Optimizer] | None:
  if isinstance(optimizer, tf_keras.optimizers.Optimizer):
    return TfKerasOptimizer
  if isinstance(optimizer, keras.optimizers.Optimizer):
    return Keras3Optimizer
  return None


_CONFLICTS = {
  "gradient_accumulation_steps": "Trainer.accumulation_steps",
  "loss_scale_factor": "Trainer.loss_scale",
  "use_ema": "Trainer.ema_decay",
  "global_clipnorm": "Trainer.clip_norm",
  "clipvalue": "Trainer.clip_value",
}


def _refuse_conflicts(name: str, optimizer: Any) -> None:
  if "LossScale" in type(optimizer).__name__:
    raise ConfigError(
      f"optimizer {name!r} is a {type(optimizer).__name__}, which checks only replica 0; "
      "use Trainer.loss_scale = @dynamic instead."
    )
  for option, ours in _CONFLICTS.items():
    if getattr(optimizer, option, None):
      raise ConfigError(
        f"optimizer {name!r} sets {option}={getattr(optimizer, option)}; that is the loop's work "
        f"here, so that N replicas agree: use {ours} instead."
      )


class Ema:
  """An exponential moving average of the trainable variables, for evaluation and export."""

  def __init__(self, *, decay: float, variables: Sequence[Any]) -> None:
    """Makes one average a variable, starting at its value, in `strategy.scope()`.

    Args:
      decay: above 0 and below 1; average = decay * average + (1 - decay) * variable.
      variables: what to average.

    Raises:
      ConfigError: `decay` is out of range.
    """
    if not 0 < decay < 1:
      raise ConfigError(f"Trainer.ema_decay is {decay}; it must be between 0 and 1, such as 0.999.")
    self._decay = decay
    self._variables = [models.raw(v) for v in variables]
    self.averages = [
      tf.Variable(v.read_value(), trainable=False, name=f"ema_{i}")
      for i, v in enumerate(self._variables)
    ]

  def update(self, strategy: tf.distribute.Strategy, variables: Sequence[Any]) -> None:
    """Moves the averages of `variables` toward them (cross-replica)."""
    chosen = {id(models.raw(v)) for v in variables}

    def move(average: tf.Variable, variable: tf.Tensor) -> None:
      average.assign_sub((1.0 - self._decay) * (average - tf.cast(variable, average.dtype)))

    for average, variable in zip(self.averages, self._variables, strict=True):
      if id(variable) in chosen:
        strategy.extended.update(average, move, args=(variable,), group=False)

  @contextlib.contextmanager
  def in_place(self) -> Iterator[None]:
    """Puts the averages in place of the variables for a while (host)."""
    self.swap()
    try:
      yield
    finally:
      self.swap()

  def swap(self) -> None:
    """Exchanges variables and averages (host); calling it twice restores both."""
    for average, variable in zip(self.averages, self._variables, strict=True):
      held = variable.read_value()
      variable.assign(average.read_value())
      average.assign(held)
