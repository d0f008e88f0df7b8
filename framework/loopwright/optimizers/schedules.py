"""Learning rates as functions of the training step, for optimizers of both Keras generations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from loopwright.errors import ConfigError, require_integer, require_positive
from loopwright.optimizers.schedule import Schedule, as_schedule, float64, rate_of
from loopwright.options.declaration import SCHEDULE, may_change


def follow(optimizer: Any, schedule: Schedule) -> None:
  """Gives an optimizer of either Keras, not built, this rate in place of its own (host)."""
  optimizer.learning_rate = schedule
  if build := getattr(optimizer, "_build_learning_rate", None):  # of tf_keras
    build(schedule)  # makes the variable with the last rate


def constant(*, learning_rate: float) -> Schedule:
  """The same rate at every step.

  Raises:
    ConfigError: `learning_rate` is not finite, or negative.
  """
  return as_schedule("constant.learning_rate", learning_rate)


def linear_warmup(*, warmup_steps: int, after: Schedule | float, start: float = 0.0) -> Schedule:
  """A straight line from `start`, then another schedule whose steps count from there::

      step < warmup_steps:  start + (after(0) - start) * step / warmup_steps
      else:                 after(step - warmup_steps)

  So warm-up and a cosine decay of N steps take warmup_steps + N steps in total. With `start` 0 the
  first update changes nothing. Goyal et al. 2017 (arXiv:1706.02677) start at the rate of one
  worker.

  >>> from loopwright.optimizers.schedules import cosine_decay, linear_warmup
  >>> rate = linear_warmup(warmup_steps=100, after=cosine_decay(initial=0.2, decay_steps=200))
  >>> [round(float(rate.at(step)), 3) for step in (0, 50, 100, 200, 300)]
  [0.0, 0.1, 0.2, 0.1, 0.0]
  >>> optimizer = keras.optimizers.SGD(rate)  # of tf_keras too

  Args:
    warmup_steps: at least 0.
    after: the schedule after warm-up.
    start: the rate at step 0.

  Raises:
    ConfigError: `warmup_steps` is not a whole number of at least 0, or a rate is negative.
  """
  warmup_steps = require_integer("linear_warmup.warmup_steps", warmup_steps, at_least=0)
  first = rate_of("linear_warmup.start", start)
  then = as_schedule("linear_warmup.after", after)

  def rate(step: tf.Tensor) -> tf.Tensor:
    elapsed = tf.minimum(step / max(warmup_steps, 1), 1.0)
    later = float64(then.function(tf.maximum(step - warmup_steps, 0.0)))
    return tf.where(step < warmup_steps, first + (later - first) * elapsed, later)

  config = {"schedule": "linear_warmup", "warmup_steps": warmup_steps}
  return Schedule(rate, config={**config, "after": then, "start": first})


def cosine_decay(*, initial: float, decay_steps: int, final: float = 0.0) -> Schedule:
  """Half a cosine from `initial` at step 0 to `final` at `decay_steps`, then constant at `final`.

  Without restarts; Loshchilov and Hutter 2017 (arXiv:1608.03983), equation 5.

  Args:
    initial: the rate at step 0.
    decay_steps: the number of steps of the decay, at least 1.
    final: the last rate itself, not a fraction of `initial` (as Keras's `alpha` is).

  Raises:
    ConfigError: `decay_steps` is not a whole number of at least 1, or a rate is negative.
  """
  decay_steps = require_integer("cosine_decay.decay_steps", decay_steps, at_least=1)
  first, last = (
    rate_of("cosine_decay.initial", initial),
    rate_of("cosine_decay.final", final),
  )

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
    decay_steps: the number of steps after which the part above `final` is multiplied by
      `decay_rate`.
    decay_rate: above 0.
    staircase: round the exponent down.
    final: the limit of the rate.

  Raises:
    ConfigError: `decay_steps` is not a whole number of at least 1, `decay_rate` is not above 0, or
      a rate is negative.
  """
  decay_steps = require_integer("exponential_decay.decay_steps", decay_steps, at_least=1)
  first = rate_of("exponential_decay.initial", initial)
  last = rate_of("exponential_decay.final", final)
  base = rate_of("exponential_decay.decay_rate", decay_rate)
  require_positive("exponential_decay.decay_rate", decay_rate)

  def rate(step: tf.Tensor) -> tf.Tensor:
    # Integer division: in a graph, x / 49 becomes x * (1 / 49), which misses 6 of 10 stairs.
    stair = float64(tf.cast(step, tf.int64) // decay_steps)
    return last + (first - last) * tf.pow(float64(base), stair if staircase else step / decay_steps)

  config = {"schedule": "exponential_decay", "initial": first, "decay_steps": decay_steps}
  config |= {"decay_rate": base, "staircase": staircase, "final": last}
  return Schedule(rate, config=config)


def piecewise_constant(*, boundaries: Sequence[int], values: Sequence[float]) -> Schedule:
  """values[0] for the first boundaries[0] steps, then values[1] up to boundaries[1], and so on.

  The value is values[i] where boundaries[i-1] <= step < boundaries[i]. (Keras's
  PiecewiseConstantDecay changes one step later.)

  Args:
    boundaries: increasing steps, at least 1.
    values: the rates, one more than boundaries.

  Raises:
    ConfigError: the boundaries are not increasing whole numbers of at least 1, a value is negative,
      or the number of values is wrong.
  """
  rates = [rate_of("piecewise_constant.values", value) for value in values]
  steps = [require_integer("piecewise_constant.boundaries", b, at_least=1) for b in boundaries]
  if steps != sorted(set(steps)):
    raise ConfigError(
      f"piecewise_constant.boundaries is {steps}; each must be above the previous one."
    )
  if len(rates) != len(steps) + 1:
    raise ConfigError(
      f"piecewise_constant has {len(steps)} boundaries and {len(rates)} values; it must have one "
      "value more than boundaries."
    )

  def rate(step: tf.Tensor) -> tf.Tensor:
    passed = tf.math.count_nonzero(step >= tf.constant(steps, tf.float64, [len(steps)]))
    return tf.gather(tf.constant(rates, tf.float64), passed)

  config = {"schedule": "piecewise_constant", "boundaries": steps}
  return Schedule(rate, config={**config, "values": rates})


def by_epoch(*, of: Schedule | float, steps_per_epoch: int, staircase: bool = True) -> Schedule:
  """Another schedule, called with epochs instead of steps: of(step / steps_per_epoch).

  For example, `linear_warmup.warmup_steps = 5` inside it means 5 epochs.

  Args:
    of: the schedule.
    steps_per_epoch: examples divided by the global batch size.
    staircase: round the epoch down, so the rate is constant within an epoch.

  Raises:
    ConfigError: `steps_per_epoch` is not a whole number of at least 1, or the rate is negative.
  """
  length = require_integer("by_epoch.steps_per_epoch", steps_per_epoch, at_least=1)
  base = as_schedule("by_epoch.of", of)

  def rate(step: tf.Tensor) -> tf.Tensor:
    stair = float64(tf.cast(step, tf.int64) // length)  # as in exponential_decay
    return float64(base.function(stair if staircase else step / length))

  config = {"schedule": "by_epoch", "steps_per_epoch": length, "of": base}
  return Schedule(rate, config={**config, "staircase": staircase})


def scaled(*, of: Schedule | float, factor: float) -> Schedule:
  """`factor` times another schedule.

  Raises:
    ConfigError: `factor` or the rate is not finite, or negative.
  """
  times = rate_of("scaled.factor", factor)
  base = as_schedule("scaled.of", of)
  return Schedule(
    lambda step: times * float64(base.function(step)),
    config={"schedule": "scaled", "factor": times, "of": base},
  )


def scale_by_replicas(*, schedule: Schedule | float) -> Schedule:
  """The linear scaling rule: the schedule times the number of replicas.

  Goyal et al. 2017 (arXiv:1706.02677), section 2.1. Use it if the global batch size grows with the
  number of replicas. Call it in `strategy.scope()`, as optimizer factories are; the number is read
  then and stored in the config.
  """
  replicas = tf.distribute.get_strategy().num_replicas_in_sync
  return scaled(of=schedule, factor=replicas)


@may_change(SCHEDULE)
def times_replicas(*, value: float) -> float:
  """A number, such as `exponential_decay.initial`, times the number of replicas.

  For schedules of which only a part scales with replicas; `scale_by_replicas` scales a whole
  schedule. Call it in `strategy.scope()`, as everything that an optimizer's factory refers to is.
  """
  return rate_of("times_replicas.value", value) * tf.distribute.get_strategy().num_replicas_in_sync
