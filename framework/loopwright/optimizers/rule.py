"""What an update is: (variables, gradients, step) -> updates, for optimizers of both Kerases.

A `Rule` makes one update of an optimizer's variables. By itself it calls what Keras's `fit` calls,
so that what a class overrides counts. With an `Update` it goes through the variables itself, and
calls that for each: a fused kernel (kernels.py), options by variable (groups.py), the corrected
rule of an optimizer (schedule_free.py), or that of a kind of strategy (kinds/mesh/updates.py).

    rule = of(optimizer)(optimizer, variables)       # in `strategy.scope()`
    rule.update = rule.decayed(kernels.update_of(optimizer, rule.usual))
    rule.apply(gradients)                            # in replica context
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf
import tf_keras  # executed when something of it is used

from loopwright.distribution import placement
from loopwright.errors import ConfigError
from loopwright.graphs.aliases import Gradient, TensorLike, Variable
from loopwright.host import lazy_keras
from loopwright.host.lazy_keras import KerasOptimizer
from loopwright.models import models

Update: TypeAlias = Callable[[Any, int, tf.Tensor, Any, TensorLike], None]
"""(optimizer, index of the variable's slots, gradient, variable, learning rate): updates the copies
of a variable and of its slots that are on one device."""
Options = Mapping[str, float]
_PACKAGES = ("keras", "tf_keras")
GROUPS = "variable_groups"
"""The attribute in which an optimizer of `groups.grouped` has its groups."""


class Rule(abc.ABC):
  """The update of an optimizer of either Keras, without a reduction of its own.

  Attributes:
    optimizer: built with `variables`.
    variables: what it updates.
    update: of one variable; None for Keras's update of all.
  """

  uncalled: tuple[str, ...] = ()
  """Methods of Keras in whose place the framework has its own."""
  gives_rate = True

  def __init__(self, optimizer: KerasOptimizer, variables: Sequence[Variable]) -> None:
    """Builds the optimizer's slots; call it in `strategy.scope()`."""
    self.optimizer, self.variables = optimizer, list(variables)
    self.update: Update | None = None
    self._raw = [models.raw(v) for v in variables]
    self._build()

  def apply(self, gradients: Sequence[Gradient]) -> None:
    """Updates the variables once; communicates nothing (replica context).

    Args:
      gradients: one for each of the variables, equal on every replica; None leaves it as it is.
    """
    updated = [index for index, gradient in enumerate(gradients) if gradient is not None]
    tensors = [gradients[index] for index in updated]
    if self.update is None:
      variables = [self.variables[index] for index in updated]
      self.optimizer.apply_gradients(list(zip(tensors, variables, strict=True)))
      return
    optimizer, rate = self.optimizer, self._begin()

    def update_each(
      strategy: tf.distribute.Strategy, tensors: Sequence[tf.Tensor], rate: TensorLike
    ) -> None:
      for index, tensor in zip(updated, tensors, strict=True):
        strategy.extended.update(
          self._raw[index], self._one, args=(index, tensor, rate), group=False
        )
      count = models.raw(optimizer.iterations)  # tf_keras's has no aggregation
      strategy.extended.update(count, lambda each: each.assign_add(1), group=False)

    tf.__internal__.distribute.interim.maybe_merge_call(
      update_each, tf.distribute.get_strategy(), optimizer._clip_gradients(tensors), rate
    )
    for index in updated:
      variable = self.variables[index]
      constraint = getattr(variable, "constraint", None)  # AutoGraph knows no :=
      if constraint is not None:
        variable.assign(constraint(variable))

  def _one(self, variable: tf.Variable, index: int, gradient: tf.Tensor, rate: TensorLike) -> None:
    assert self.update is not None
    self.update(self.optimizer, index, gradient, variable, rate)

  def usual(
    self, optimizer: Any, index: int, gradient: tf.Tensor, variable: Any, rate: TensorLike
  ) -> None:
    """Keras's `Update` of one variable; that of tf_keras reads the rate from the optimizer."""
    del index
    optimizer.update_step(gradient, variable, *([rate] if self.gives_rate else []))

  def decayed(self, update: Update) -> Update:
    """Returns an update that subtracts the weight decay first, as Keras does."""
    decays = [self.optimizer._use_weight_decay(variable) for variable in self._raw]

    def both(
      optimizer: Any, index: int, gradient: tf.Tensor, variable: Any, rate: TensorLike
    ) -> None:
      decay = _decay_of(optimizer, index) if decays[index] else None
      if decay:
        now = tf.cast(rate, variable.dtype)
        variable.assign_sub(variable * tf.cast(decay, variable.dtype) * now)
      update(optimizer, index, gradient, variable, rate)

    return both

  @abc.abstractmethod
  def learning_rate(self) -> tf.Tensor:
    """Returns the learning rate of the next update, a float32 scalar (any context)."""

  @abc.abstractmethod
  def _build(self) -> None:
    """Builds the slots, and switches Keras's reduction off."""

  @abc.abstractmethod
  def _begin(self) -> TensorLike:
    """Does what an update does once for all variables; returns its learning rate."""


class Keras3(Rule):
  """Keras 3, whose `apply` would sum the gradients over replicas a second time."""

  def _build(self) -> None:
    # Keras has no public switch; a test in tests/unit/optimizers/test_optimizers.py watches this.
    self.optimizer._all_reduce_sum_gradients = list
    self.optimizer.build(self.variables)
    product = getattr(self.optimizer, "_u_product", None)
    if product is not None and placement.here().shares_variables:
      # Nadam's, which every replica assigns: see TfKeras._build.
      self.optimizer._u_product = keras.Variable(
        product, trainable=False, name=product.name, aggregation="only_first_replica"
      )

  def learning_rate(self) -> tf.Tensor:
    """See `Rule`."""
    return tf.convert_to_tensor(self.optimizer.learning_rate, tf.float32)

  def _begin(self) -> TensorLike:
    rate = self.optimizer.learning_rate
    if hasattr(self.optimizer, "_u_product"):
      self.optimizer._backend_update_step([], [], rate)  # Nadam's schedule of its momentum
    return rate


class TfKeras(Rule):
  """tf_keras, except `tf_keras.optimizers.legacy`."""

  uncalled = ("minimize", "compute_gradients", "aggregate_gradients")
  gives_rate = False

  def _build(self) -> None:
    self.variables = self._raw
    self.optimizer.jit_compile = False  # XLA updates cannot be nested in the step's tf.cond
    # Its public switch is an argument, which what overrides `apply_gradients` may not pass on.
    self.optimizer.aggregate_gradients = list
    if (rate := getattr(self.optimizer, "_current_learning_rate", None)) is not None:
      # The last value of a schedule, which every replica assigns. Central storage rejects such an
      # assignment unless the variable has an aggregation.
      self.optimizer._current_learning_rate = tf.Variable(
        rate.read_value(),
        trainable=False,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        name="current_learning_rate",
      )
    self.optimizer.build(self.variables)

  def learning_rate(self) -> tf.Tensor:
    """See `Rule`; tf_keras's property gives the rate of the last update."""
    rate = self.optimizer._learning_rate
    if isinstance(rate, tf_keras.optimizers.schedules.LearningRateSchedule):
      rate = rate(self.optimizer.iterations)
    return tf.convert_to_tensor(rate, tf.float32)

  def _begin(self) -> TensorLike:
    self.optimizer._compute_current_learning_rate()
    return self.optimizer.learning_rate


def of(optimizer: Any) -> type[Rule] | None:
  """Returns the kind of rule of an optimizer; None for what is none of either Keras."""
  if isinstance(optimizer, lazy_keras.tf_keras_classes("optimizers.Optimizer")):
    return TfKeras
  return Keras3 if isinstance(optimizer, keras.optimizers.Optimizer) else None


def built(optimizer: KerasOptimizer, variables: Sequence[Variable]) -> Rule:
  """Returns the rule of an optimizer, which it builds; call it in `strategy.scope()`."""
  kind = of(optimizer)
  assert kind is not None, optimizer
  return kind(optimizer, variables)


WHOLE = ("apply", "apply_gradients")
"""What updates all variables."""


def overridden(optimizer: KerasOptimizer, *names: str) -> list[str]:
  """Returns which methods of Keras a user's own class of optimizers has changed."""
  kind = type(optimizer)
  kerases = (each for each in kind.__mro__ if each.__module__.split(".")[0] in _PACKAGES)
  own = next(kerases)
  return [name for name in names if getattr(kind, name, None) is not getattr(own, name, None)]


def require_called(name: str, optimizer: KerasOptimizer, kind: type[Rule]) -> None:
  """Checks that whatever an optimizer's class overrides has an effect.

  Raises:
    ConfigError: it overrides a method that the framework does not call.
  """
  who, called = ("@grouped", "update_step") if groups_of(optimizer) else ("the framework", WHOLE[1])
  whole = WHOLE if groups_of(optimizer) else ()
  if uncalled := overridden(optimizer, *kind.uncalled, *whole):
    raise ConfigError(
      f"optimizer {name!r} is a {type(optimizer).__name__}, which overrides {uncalled[0]}(), but "
      f"{who} calls only its {called}(); do it there, or to the gradients in Task.train_step()."
    )


def groups_of(optimizer: Any) -> dict[str, Options]:
  """Returns pattern -> options of an optimizer; none unless `groups.grouped` made it."""
  return getattr(optimizer, GROUPS, {})


def is_free(optimizer: Any) -> bool:
  """Whether it is Keras's ScheduleFreeAdamW, which Keras 3.12 does not have."""
  return isinstance(optimizer, getattr(keras.optimizers, "ScheduleFreeAdamW", ()))


def _decay_of(optimizer: Any, index: int) -> float | None:
  """Returns the weight decay; Muon has another for what it updates with Adam."""
  by_adam = getattr(optimizer, "adam_velocities", None)
  if by_adam is not None and by_adam[index] is not None:
    return optimizer.adam_weight_decay
  return optimizer.weight_decay
