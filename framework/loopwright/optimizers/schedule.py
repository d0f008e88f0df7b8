"""A learning rate as a function of the training step: what schedules.py makes, and users write.

A step is the number of training steps completed before the update, so the first update is at step
0.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeAlias

import keras
import tensorflow as tf
import tf_keras

from loopwright import registry
from loopwright.errors import ConfigError, is_finite, shown
from loopwright.graphs.aliases import TensorLike
from loopwright.host import lazy_keras
from loopwright.host.lazy_keras import KerasOptimizer
from loopwright.options.declaration import SCHEDULE, asked

ScheduleFunction = Callable[[tf.Tensor], TensorLike]


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
  """A function of the step that Keras 3 and tf_keras optimizers accept as learning rate.

  >>> round(float(lw.Schedule(lambda step: 0.1 / (1 + step)).at(4)), 6)
  0.02

  For `isinstance` it is a schedule of tf_keras too, once tf_keras is executed.
  """

  may_change = SCHEDULE

  @property  # type: ignore[misc]
  def __class__(self) -> type:
    """What `isinstance` asks besides the type, and Keras's `serialize` in its place."""
    if self._stands_for is not None:
      return type(self._stands_for)
    return _of_both() if lazy_keras.tf_keras_loaded() else type(self)

  def __init__(
    self, function: ScheduleFunction, *, config: Mapping[str, Any] | None = None
  ) -> None:
    """Wraps a function, such as your own: `Schedule(lambda step: 0.1 / (1 + step))`.

    Args:
      function: float64 scalar step -> scalar learning rate, in TensorFlow ops, which are traced
        into the training loop. float64 because float32 cannot distinguish steps above 2**24.
      config: the arguments for `from_config`; only the functions of this module set it.
    """
    self.function = function
    self._config = config
    self._step: tf.Variable | None = None
    self._given: Callable[[], tf.Tensor] | None = None
    self._stands_for: Any = None

  def at(self, step: TensorLike) -> tf.Tensor:
    """Returns the learning rate at `step`, a float32 scalar (any context).

    Args:
      step: a scalar of any integer or float type: number, tensor or variable.
    """
    return tf.cast(self.function(float64(step)), tf.float32)

  def __call__(self, iterations: TensorLike) -> tf.Tensor:
    """Returns the learning rate, a float32 scalar; called by optimizers (any context).

    Args:
      iterations: the optimizer's own counter; ignored after `bind`.
    """
    if self._given is not None:
      return self._given()
    return self.at(iterations if self._step is None else self._step)

  def ahead(self, first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Returns the rates of `count` steps from `first` on, float32 [count] (any context)."""
    steps = first + tf.range(tf.cast(count, tf.int64))
    return tf.map_fn(self.at, steps, fn_output_signature=tf.float32)

  @contextlib.contextmanager
  def given(self, rates: tf.Tensor, index: tf.Tensor, *, to_xla: bool = False) -> Iterator[None]:
    """Optimizers use `rates[index]` inside.

    An index on the host costs a GPU no copy in a slice, for which XLA makes a program of each.
    """
    if to_xla:
      self._given = lambda: tf.gather(rates, index)
    else:
      self._given = lambda: tf.reshape(tf.slice(rates, [index], [1]), [])
    try:
      yield
    finally:
      self._given = None

  def bind(self, step: tf.Variable) -> Schedule:
    """Makes optimizers follow `step` instead of their own counter; returns self.

    An optimizer's `iterations` does not count skipped updates, and misses counts under parameter
    servers.

    Args:
      step: int64 scalar.
    """
    self._step = step
    return self

  def standing_for(self, other: Any) -> Schedule:
    """Makes optimizers save the schedule of Keras whose rates it gives; returns self."""
    self._stands_for = other
    return self

  def get_config(self) -> dict[str, Any]:
    """Returns the arguments that it was made from, including nested schedules.

    Raises:
      ConfigError: it wraps a function that is not of this module.
    """
    if self._stands_for is not None:
      config: dict[str, Any] = self._stands_for.get_config()
      return config
    if self._config is None:
      raise ConfigError(
        "a Schedule of your own function cannot be saved in an optimizer's config; compose the "
        "functions of loopwright.optimizers.schedules, or save the optimizer with "
        "tf.train.Checkpoint."
      )
    return {k: v.get_config() if isinstance(v, Schedule) else v for k, v in self._config.items()}

  @classmethod
  def from_config(cls, config: Mapping[str, Any]) -> Schedule:
    """Makes a schedule from the result of `get_config`."""
    arguments = {k: cls.from_config(v) if isinstance(v, Mapping) else v for k, v in config.items()}
    return registry.load("part", arguments.pop("schedule"))(**arguments)


EmaDecay: TypeAlias = Annotated[
  float | Schedule | None,
  asked("counts from there on; averages that are new begin at the weights"),
]
"""The decay of a moving average of the weights, or how it follows from the step; None for none."""


@functools.cache
def _of_both() -> type:
  also = tf_keras.optimizers.schedules.LearningRateSchedule
  return type("Schedule", (Schedule, also), {"__module__": __name__})


def _is_schedule(rate: object) -> bool:
  """Whether it is a schedule of either Keras."""
  of_tf_keras = lazy_keras.tf_keras_classes("optimizers.schedules.LearningRateSchedule")
  return isinstance(rate, (keras.optimizers.schedules.LearningRateSchedule, *of_tf_keras))


def bind(optimizer: KerasOptimizer, step: tf.Variable) -> None:
  """Makes an optimizer's learning rate follow `step` if it is a schedule, including Keras's own.

  Args:
    optimizer: of Keras 3 or tf_keras (not legacy), before the training step is traced.
    step: int64 scalar, the number of training steps completed.

  Raises:
    ConfigError: the rate is a plain function.
  """
  rate = optimizer._learning_rate  # the public property would evaluate the schedule
  if callable(rate) and not _is_schedule(rate):
    raise ConfigError(
      f"the learning rate of {type(optimizer).__name__} is a function, "
      f"{getattr(rate, '__name__', rate)}; wrap it in loopwright.Schedule(function), which calls "
      "it with the step."
    )
  if _is_schedule(rate):
    bound = as_schedule("learning_rate", rate).bind(step)
    kinds = [each.optimizers for each in lazy_keras.kerases() if not isinstance(rate, Schedule)]
    if any(
      isinstance(optimizer, kind.Optimizer)
      and isinstance(rate, kind.schedules.LearningRateSchedule)
      for kind in kinds
    ):
      bound.standing_for(rate)
    optimizer.learning_rate = bound


def as_schedule(name: str, value: Any) -> Schedule:
  """Returns a schedule, one of either Keras or a number as a `Schedule`.

  Args:
    name: of the option that has the value, such as "scaled.of".

  Raises:
    ConfigError: the number is not finite, or negative.
  """
  if isinstance(value, Schedule):
    return value
  if _is_schedule(value):
    return Schedule(value)
  rate = rate_of(name, value)
  return Schedule(
    lambda step: tf.constant(rate, tf.float64),
    config={"schedule": "constant", "learning_rate": rate},
  )


def float64(value: TensorLike) -> tf.Tensor:
  """Returns a scalar as a float64 tensor, with all digits that it has."""
  if isinstance(value, (int, float)):  # tf.cast would convert them to int32 or float32 first
    return tf.constant(value, tf.float64)
  return tf.cast(value, tf.float64)


def rate_of(name: str, value: Any) -> float:
  """Returns a learning rate as a float; raises a ConfigError unless it is finite and at least 0."""
  if not is_finite(value) or value < 0:
    raise ConfigError(f"{name} is {shown(value)}; it must be a finite number of at least 0.")
  return float(value)
