"""Loss scaling: keeps small float16 gradients above zero and lowers the scale on an overflow.

Multiply the loss by the scale before the backward pass, and divide the *reduced* gradients by it.
The finite check for `update` uses reduced gradients, so all replicas decide alike.
"""

from collections.abc import Callable, Iterable
from typing import Annotated, TypeAlias

import tensorflow as tf

from loopwright.errors import ConfigError, require_integer, require_positive
from loopwright.options.declaration import COUNTS, Rule, asked

LARGEST_SCALE = 2.0**127
"""The largest power of two in float32; the scale does not grow further."""

_FIRST = Rule("no", "it is the first scale; the checkpoint has the scale in force")


class LossScale(tf.Module):
  """No loss scaling, a constant scale of 1; the base class of the others."""

  may_change = COUNTS

  def value(self) -> tf.Tensor | float:
    """Returns the scale, a float32 scalar (any context)."""
    return 1.0

  def factor(self, examples: int = 1) -> tf.Tensor | None:
    """Returns the scale divided by the number of examples, a float32 scalar (any context).

    None stands for 1 where no loss is ever scaled, so that no operation is added.

    Args:
      examples: the size of the global batch. The usual scales assume a mean loss; a sum's gradients
        overflow float16 sooner.
    """
    scale = self.value()
    if isinstance(scale, float) and scale == 1.0:  # known when traced
      return None
    return tf.convert_to_tensor(scale / examples)

  @property
  def expects_overflow(self) -> bool:
    """Whether a non-finite gradient is a normal event, to which this scale reacts."""
    return type(self).update is not LossScale.update

  def update(self, finite: tf.Tensor) -> None:
    """Adjusts the scale to whether the step's reduced gradients are finite (cross-replica)."""
    del finite

  def describe(self) -> str:
    """Returns a phrase for the summary at the start of a run."""
    return "none"


LossScaleFactory: TypeAlias = Annotated[
  Callable[[], LossScale] | None,
  asked("counts from there on; a dynamic one begins at its first scale"),
]
"""Makes a loss scale; None stands for `usual_loss_scale`."""


class FixedLossScale(LossScale):
  """A constant scale; a step that overflows is skipped and the scale does not change."""

  def __init__(self, *, scale: float) -> None:
    """Stores the scale; raises a ConfigError unless it is above 0."""
    super().__init__()
    require_positive("fixed.scale", scale)
    self._scale = float(scale)

  def value(self) -> tf.Tensor | float:
    """Returns the scale, a float."""
    return self._scale

  def describe(self) -> str:
    """Returns the scale."""
    return f"fixed, {self._scale:g}"


class DynamicLossScale(LossScale):
  """Grows after `growth_steps` finite steps in a row and shrinks after an overflow.

  The rule of Micikevicius et al., "Mixed Precision Training" (2018), section 3.2, with Keras's
  defaults. Its two variables are saved in every checkpoint.
  """

  def __init__(
    self,
    *,
    initial: float = 2.0**15,
    growth_steps: int = 2000,
    factor: float = 2.0,
    floor: float = 1.0,
  ) -> None:
    """Makes the two variables; call it in `strategy.scope()`.

    Args:
      initial: the first scale.
      growth_steps: the number of finite steps in a row after which the scale is multiplied by
        `factor`.
      factor: above 1; an overflow divides the scale by it.
      floor: the minimum of the scale.

    Raises:
      ConfigError: a value is out of range.
    """
    super().__init__()
    if not 0 < floor <= initial <= LARGEST_SCALE:
      raise ConfigError(
        f"dynamic.initial is {initial} and dynamic.floor is {floor}; "
        "they must satisfy 0 < floor <= initial <= 2**127."
      )
    require_integer("dynamic.growth_steps", growth_steps, at_least=1)
    if not factor > 1:
      raise ConfigError(f"dynamic.factor is {factor}; it must be above 1.")
    self._growth_steps, self._factor, self._floor = growth_steps, float(factor), float(floor)
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    self._scale = tf.Variable(
      float(initial), trainable=False, dtype=tf.float32, aggregation=first, name="loss_scale"
    )
    self._good_steps = tf.Variable(
      0, trainable=False, dtype=tf.int64, aggregation=first, name="loss_scale_good_steps"
    )

  def value(self) -> tf.Tensor:
    """Returns the current scale, a float32 scalar (any context)."""
    return self._scale.read_value()

  def describe(self) -> str:
    """Returns the current scale and the growth interval."""
    return f"dynamic, now {float(self._scale.numpy()):g}, doubled every {self._growth_steps} steps"

  def update(self, finite: tf.Tensor) -> None:
    """Grows, keeps or lowers the scale (cross-replica); see `LossScale.update`."""
    scale, good = self._scale.read_value(), self._good_steps.read_value() + 1
    grow = good >= self._growth_steps
    grown = tf.where(grow, tf.minimum(scale * self._factor, LARGEST_SCALE), scale)
    lowered = tf.maximum(scale / self._factor, self._floor)
    self._scale.assign(tf.where(finite, grown, lowered))
    self._good_steps.assign(tf.where(finite & ~grow, good, 0))


def none() -> LossScale:
  """No loss scaling, for float32 and bfloat16."""
  return LossScale()


def fixed(*, scale: float = 1024.0) -> LossScale:
  """A constant loss scale; see `FixedLossScale`."""
  return FixedLossScale(scale=scale)


def dynamic(
  *,
  initial: Annotated[float, _FIRST] = 2.0**15,
  growth_steps: int = 2000,
  factor: float = 2.0,
  floor: float = 1.0,
) -> LossScale:
  """A loss scale that adapts itself; see `DynamicLossScale`."""
  return DynamicLossScale(initial=initial, growth_steps=growth_steps, factor=factor, floor=floor)


def usual_loss_scale(compute_dtypes: Iterable[str]) -> Callable[[], LossScale]:
  """Returns `dynamic` for float16, whose range is too narrow for gradients; else `none`."""
  return dynamic if "float16" in compute_dtypes else none
