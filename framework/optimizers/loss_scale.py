"""Loss scaling: keeps small float16 gradients above zero, and backs off when one overflows.

Scale the loss before the backward pass, divide the *reduced* gradients by the same number. The
finite check that drives `update` is made on reduced gradients, so all replicas decide alike.
"""

import tensorflow as tf

from framework.errors import ConfigError

LARGEST_SCALE = 2.0**127
"""The largest power of two that float32 holds; growth stops there."""


class LossScale(tf.Module):
  """A constant scale of 1: no loss scaling. The base of the others."""

  def value(self) -> tf.Tensor | float:
    """Returns the scale, a float32 scalar (any context)."""
    return 1.0

  def scaled(self, total: tf.Tensor, examples: int = 1) -> tf.Tensor:
    """Returns `total` times the scale, over the number of examples (any context).

    Args:
      total: a float scalar, a sum over examples.
      examples: of the global batch, so that what is scaled is as large as a mean loss: the usual
        scales are made for means, and a sum's gradients overflow float16 sooner.
    """
    scale = self.value()
    is_one = isinstance(scale, float) and scale == 1.0  # known when traced: costs no operation
    return total if is_one else total * tf.cast(scale / examples, total.dtype)

  @property
  def expects_overflow(self) -> bool:
    """Whether a gradient that is not finite is a normal event: this scale reacts to it."""
    return type(self).update is not LossScale.update

  def update(self, finite: tf.Tensor) -> None:
    """Takes note of whether this step's reduced gradients were finite (cross-replica).

    Args:
      finite: bool scalar.
    """
    del finite

  def describe(self) -> str:
    """Returns one phrase for the summary at the start of a run."""
    return "none"


class FixedLossScale(LossScale):
  """A constant scale; an overflowing step is skipped and the scale stays."""

  def __init__(self, *, scale: float) -> None:
    """Keeps the scale, which must be above 0, else ConfigError."""
    super().__init__()
    if not scale > 0:
      raise ConfigError(f"fixed.scale is {scale}; it must be above 0, for example 1024.")
    self._scale = float(scale)

  def value(self) -> tf.Tensor | float:
    """Returns the scale as given."""
    return self._scale

  def describe(self) -> str:
    """Returns the scale."""
    return f"fixed, {self._scale:g}"


class DynamicLossScale(LossScale):
  """Doubles after `growth_steps` finite steps in a row, halves at once on an overflow.

  The rule of Micikevicius et al., "Mixed Precision Training" (2018), section 3.2, with the
  defaults that Keras uses. Its two variables are saved in every checkpoint.
  """

  def __init__(
    self,
    *,
    initial: float = 2.0**15,
    growth_steps: int = 2000,
    factor: float = 2.0,
    floor: float = 1.0,
  ) -> None:
    """Makes the two variables, so call it in `strategy.scope()`.

    Args:
      initial: the first scale.
      growth_steps: finite steps in a row before the scale is multiplied by `factor`.
      factor: above 1; an overflow divides by it.
      floor: the scale never falls below this.

    Raises:
      ConfigError: a value is out of its range.
    """
    super().__init__()
    if not 0 < floor <= initial <= LARGEST_SCALE:
      raise ConfigError(
        f"dynamic.initial is {initial} and dynamic.floor is {floor}; "
        "they must satisfy 0 < floor <= initial <= 2**127."
      )
    if growth_steps < 1 or not factor > 1:
      raise ConfigError(
        f"dynamic.growth_steps is {growth_steps} (must be 1 or more) and dynamic.factor is "
        f"{factor} (must be above 1)."
      )
    self._growth_steps, self._factor, self._floor = growth_steps, float(factor), float(floor)
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    self._scale = tf.Variable(
      float(initial), trainable=False, dtype=tf.float32, aggregation=first, name="loss_scale"
    )
    self._good_steps = tf.Variable(
      0, trainable=False, dtype=tf.int64, aggregation=first, name="loss_scale_good_steps"
    )

  def value(self) -> tf.Tensor:
    """Returns the current scale."""
    return self._scale.read_value()

  def describe(self) -> str:
    """Returns the current scale and the growth interval."""
    return f"dynamic, now {float(self._scale.numpy()):g}, doubled every {self._growth_steps} steps"

  def update(self, finite: tf.Tensor) -> None:
    """Grows, keeps or lowers the scale (cross-replica)."""
    scale, good = self._scale.read_value(), self._good_steps.read_value() + 1
    grow = good >= self._growth_steps
    grown = tf.where(grow, tf.minimum(scale * self._factor, LARGEST_SCALE), scale)
    lowered = tf.maximum(scale / self._factor, self._floor)
    self._scale.assign(tf.where(finite, grown, lowered))
    self._good_steps.assign(tf.where(finite & ~grow, good, 0))


def none() -> LossScale:
  """No loss scaling: what float32 and bfloat16 need."""
  return LossScale()


def fixed(*, scale: float = 1024.0) -> LossScale:
  """A constant loss scale; see `FixedLossScale`."""
  return FixedLossScale(scale=scale)


def dynamic(
  *,
  initial: float = 2.0**15,
  growth_steps: int = 2000,
  factor: float = 2.0,
  floor: float = 1.0,
) -> LossScale:
  """A loss scale that finds its own level; see `DynamicLossScale`."""
  return DynamicLossScale(initial=initial, growth_steps=growth_steps, factor=factor, floor=floor)
