"""Learning rates as functions of the training step, for the optimizers of both Keras generations.

    rate = linear_warmup(warmup_steps=500, after=cosine_decay(initial=0.1, decay_steps=10_000))
    optimizer = keras.optimizers.SGD(rate)   # tf_keras.optimizers.SGD(rate) works alike
    float(rate.at(250))                      # 0.05

A step counts the training steps completed before the update, so the first update is made at step 0.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
import tf_keras

from framework.errors import ConfigError

ScheduleFunction = Callable[[tf.Tensor], Any]
_KERAS_SCHEDULES = (
  keras.optimizers.schedules.LearningRateSchedule,
  tf_keras.optimizers.schedules.LearningRateSchedule,
)


class Schedule(
  keras.optimizers.schedules.LearningRateSchedule,
  tf_keras.optimizers.schedules.LearningRateSchedule,
):
  """A function of the step that optimizers of Keras 3 and of tf_keras take as learning rate."""

  def __init__(
    self, function: ScheduleFunction, *, config: Mapping[str, Any] | None = None
  ) -> None:
    """Wraps a function, a user's own included: `Schedule(lambda step: 0.1 / (1 + step))`.

    Args:
      function: float64 scalar step -> scalar learning rate, in TensorFlow ops; traced into the
        training loop. float64 because float32 cannot tell steps above 2**24 apart.
      config: what `from_config` rebuilds it from; only the functions of this module set it.
    """
    self._function = function
    self._config = config
    self._step: tf.Variable | None = None

  def at(self, step: Any) -> tf.Tensor:
    """Returns the learning rate (float32 scalar) at `step`, bound or not.

    Args:
      step: a scalar of any integer or float type: number, tensor or variable.
    """
    return tf.cast(self._function(_float64(step)), tf.float32)

  def __call__(self, iterations: Any) -> tf.Tensor:
    """Returns the learning rate (float32 scalar), in any context; what optimizers call.

    Args:
      iterations: the optimizer's own counter; ignored once a step variable is bound.
    """
    return self.at(iterations if self._step is None else self._step)

  def bind(self, step: tf.Variable) -> Schedule:
    """Makes optimizers follow `step` from now on instead of their own counter; returns self.

    An optimizer's `iterations` misses skipped updates, and loses counts under ParameterServer.
    """
    self._step = step
    return self

  def get_config(self) -> dict[str, Any]:
    """Returns the arguments it was made from, nested schedules included.

    Raises:
      ConfigError: it wraps a function that this module did not make.
    """
    if self._config is None:
      raise ConfigError(
        "a Schedule of your own function cannot be saved inside an optimizer's config; compose "
        "the functions of framework.optimizers.schedules, or save the optimizer by "
        "tf.train.Checkpoint."
      )
    return {k: v.get_config() if isinstance(v, Schedule) else v for k, v in self._config.items()}

  @classmethod
  def from_config(cls, config: Mapping[str, Any]) -> Schedule:
    """Rebuilds a schedule from `get_config`."""
    arguments = {k: cls.from_config(v) if isinstance(v, Mapping) else v for k, v in config.items()}
    return _BY_NAME[arguments.pop("schedule")](**arguments)


def bind(optimizer: Any, step: tf.Variable) -> None:
  """Makes an optimizer's learning rate follow `step` if it is a schedule, Keras's own included.

  Args:
    optimizer: of Keras 3 or tf_keras (not legacy), before the training step is traced.
    step: int64 scalar, the number of training steps completed.

  Raises:
    ConfigError: the rate is a plain function.
  """
  rate = optimizer._learning_rate  # the property would already evaluate the schedule
  if callable(rate) and not isinstance(rate, _KERAS_SCHEDULES):
    raise ConfigError(
      f"the learning rate of {type(optimizer).__name__} is a function, "
      f"{getattr(rate, '__name__', rate)}; wrap it as framework.Schedule(function), which calls it "
      "with the step."
    )
  if isinstance(rate, _KERAS_SCHEDULES):
    optimizer.learning_rate = _as_schedule("learning_rate", rate).bind(step)


def constant(*, learning_rate: float) -> Schedule:
  """The same rate at every step.

  Raises:
    ConfigError: `learning_rate` is not a finite number of 0 or more.
  """
  rate = _rate("constant.learning_rate", learning_rate)
  return Schedule(
    lambda step: tf.constant(rate, tf.float64),
    config={"schedule": "constant", "learning_rate": rate},
  )


def linear_warmup(*, warmup_steps: int, after: Schedule | float, start: float = 0.0) -> Schedule:
  """A straight line from `start`, then another schedule, which counts from the end of the warm-up.

      step < warmup_steps:  start + (after(0) - start) * step / warmup_steps
      else:                 after(step - warmup_steps)

  So warm-up and a cosine decay of N steps take warmup_steps + N in all. With `start` 0 the first
  update changes nothing. Goyal et al. 2017 (arXiv:1706.02677) start at the rate of one worker.

  Raises:
    ConfigError: `warmup_steps` is not a whole number of 0 or more, or a rate is negative.
  """
  warmup_steps = _whole("linear_warmup.warmup_steps", warmup_steps, least=0)
  first = _rate("linear_warmup.start", start)
  then = _as_schedule("linear_warmup.after", after)

  def rate(step: tf.Tensor) -> tf.Tensor:
    elapsed = tf.minimum(step / max(warmup_steps, 1), 1.0)
    later = _float64(then._function(tf.maximum(step - warmup_steps, 0.0)))
    return tf.where(step < warmup_steps, first + (later - first) * elapsed, later)

  config = {"schedule": "linear_warmup", "warmup_steps": warmup_steps}
  return Schedule(rate, config={**config, "after": then, "start": first})


def cosine_decay(*, initial: float, decay_steps: int, final: float = 0.0) -> Schedule:
  """Half a cosine from `initial` at step 0 to `final` at `decay_steps`, and `final` ever after.

  Without restarts; Loshchilov and Hutter 2017 (arXiv:1608.03983), equation 5.

  Args:
    initial: the rate at step 0.
    decay_steps: how many steps it takes.
    final: the last rate itself, not a fraction of `initial` (which is Keras's `alpha`).

  Raises:
    ConfigError: `decay_steps` is not a whole number of 1 or more, or a rate is negative.
  """
  decay_steps = _whole("cosine_decay.decay_steps", decay_steps, least=1)
  first, last = _rate("cosine_decay.initial", initial), _rate("cosine_decay.final", final)

  def rate(step: tf.Tensor) -> tf.Tensor:
    done = tf.minimum(step / decay_steps, 1.0)
    return last + (first - last) * 0.5 * (1.0 + tf.cos(math.pi * done))

  config = {"schedule": "cosine_decay", "initial": first, "decay_steps": decay_steps}
  return Schedule(rate, config={**config, "final": last})


def exponential_decay(
  *,
  initial: float,
  decay_steps: int,
  decay_rate: float,
  staircase: bool = False,
  final: float = 0.0,
) -> Schedule:
  """final + (initial - final) * decay_rate ** (step / decay_steps).

  Args:
    initial: the rate at step 0.
    decay_steps: after how many steps what is above `final` is multiplied by `decay_rate`.
    decay_rate: above 0.
    staircase: round the exponent down.
    final: the rate that it comes ever nearer to.

  Raises:
    ConfigError: `decay_steps` is not a whole number of 1 or more, `decay_rate` is not above 0, or
      a rate is negative.
  """
  decay_steps = _whole("exponential_decay.decay_steps", decay_steps, least=1)
  first = _rate("exponential_decay.initial", initial)
  last = _rate("exponential_decay.final", final)
  base = _rate("exponential_decay.decay_rate", decay_rate)
  if base == 0:
    raise ConfigError("exponential_decay.decay_rate is 0; it must be above 0.")

  def rate(step: tf.Tensor) -> tf.Tensor:
    # Whole numbers: a graph turns x / 49 into x * (1 / 49), which misses six stairs in ten.
    stair = _float64(tf.cast(step, tf.int64) // decay_steps)
    return last + (first - last) * tf.pow(
      _float64(base), stair if staircase else step / decay_steps
    )

  config = {"schedule": "exponential_decay", "initial": first, "decay_steps": decay_steps}
  config |= {"decay_rate": base, "staircase": staircase, "final": last}
  return Schedule(rate, config=config)


def piecewise_constant(*, boundaries: Sequence[int], values: Sequence[float]) -> Schedule:
  """values[0] for the first boundaries[0] steps, then values[1] up to boundaries[1], and so on.

  At a boundary the next value holds already: values[i] where boundaries[i-1] <= step <
  boundaries[i]. (Keras's PiecewiseConstantDecay changes one step later.)

  Raises:
    ConfigError: the boundaries are not increasing whole numbers of 1 or more, a value is negative,
      or there is not exactly one value more than boundaries.
  """
  rates = [_rate("piecewise_constant.values", value) for value in values]
  steps = [_whole("piecewise_constant.boundaries", b, least=1) for b in boundaries]
  if steps != sorted(set(steps)):
    raise ConfigError(
      f"piecewise_constant.boundaries is {steps}; each must be above the one before."
    )
  if len(rates) != len(steps) + 1:
    raise ConfigError(
      f"piecewise_constant has {len(steps)} boundaries and {len(rates)} values; give one value "
      "more than boundaries."
    )

  def rate(step: tf.Tensor) -> tf.Tensor:
    passed = tf.math.count_nonzero(step >= tf.constant(steps, tf.float64, [len(steps)]))
    return tf.gather(tf.constant(rates, tf.float64), passed)

  config = {"schedule": "piecewise_constant", "boundaries": steps}
  return Schedule(rate, config={**config, "values": rates})


def by_epoch(*, of: Schedule | float, steps_per_epoch: int, staircase: bool = True) -> Schedule:
  """Another schedule that counts epochs in place of steps: of(step / steps_per_epoch).

  So `linear_warmup.warmup_steps = 5` in it are five epochs.

  Args:
    of: the schedule.
    steps_per_epoch: examples over the global batch size.
    staircase: round the epoch down, so that the rate stays the same within each.

  Raises:
    ConfigError: `steps_per_epoch` is not a whole number of 1 or more, or the rate is negative.
  """
  length = _whole("by_epoch.steps_per_epoch", steps_per_epoch, least=1)
  base = _as_schedule("by_epoch.of", of)

  def rate(step: tf.Tensor) -> tf.Tensor:
    stair = _float64(tf.cast(step, tf.int64) // length)  # whole numbers: see exponential_decay
    return _float64(base._function(stair if staircase else step / length))

  config = {"schedule": "by_epoch", "steps_per_epoch": length, "of": base}
  return Schedule(rate, config={**config, "staircase": staircase})


def scaled(*, of: Schedule | float, factor: float) -> Schedule:
  """`factor` times another schedule.

  Raises:
    ConfigError: `factor` or the rate is not a finite number of 0 or more.
  """
  times = _rate("scaled.factor", factor)
  base = _as_schedule("scaled.of", of)
  return Schedule(
    lambda step: times * _float64(base._function(step)),
    config={"schedule": "scaled", "factor": times, "of": base},
  )


def scale_by_replicas(*, schedule: Schedule | float) -> Schedule:
  """The linear scaling rule: the schedule times the number of replicas, where the batch grows too.

  Goyal et al. 2017 (arXiv:1706.02677), section 2.1. Of no use if the global batch size stays the
  same on more replicas. Call it in `strategy.scope()` (an optimizer factory is called there); the
  number is taken now and kept in the config.
  """
  replicas = tf.distribute.get_strategy().num_replicas_in_sync
  return scaled(of=schedule, factor=replicas)


def times_replicas(*, value: float) -> float:
  """A number, such as `exponential_decay.initial`, times the number of replicas.

  As `scale_by_replicas` does with a whole schedule: for schedules of which only a part shall grow.
  Call it in `strategy.scope()`, as all that an optimizer's factory refers to is.
  """
  return _rate("times_replicas.value", value) * tf.distribute.get_strategy().num_replicas_in_sync


_BY_NAME: dict[str, Callable[..., Schedule]] = {
  function.__name__: function
  for function in (
    constant,
    linear_warmup,
    cosine_decay,
    exponential_decay,
    piecewise_constant,
    by_epoch,
    scaled,
  )
}


def _as_schedule(name: str, value: Any) -> Schedule:
  if isinstance(value, Schedule):
    return value
  if isinstance(value, _KERAS_SCHEDULES):
    return Schedule(value)
  return constant(learning_rate=_rate(name, value))


def _float64(value: Any) -> tf.Tensor:
  if isinstance(value, (int, float)):  # tf.cast would make them int32 or float32 first
    return tf.constant(value, tf.float64)
  return tf.cast(value, tf.float64)


def _rate(name: str, value: Any) -> float:
  number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if not number or not math.isfinite(value) or value < 0:
    raise ConfigError(f"{name} is {value!r}; it must be a finite number of 0 or more.")
  return float(value)


def _whole(name: str, value: Any, *, least: int) -> int:
  if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
    raise ConfigError(f"{name} is {value!r}; it must be a whole number of {least} or more.")
  return int(value)
