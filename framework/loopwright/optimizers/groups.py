"""Options of an optimizer by variable: rates by layer, weights without decay, other betas.

Keras's rules read their options from the optimizer when a variable is updated. So an option of a
group is put in its place for the time of this update; the rule itself stays Keras's.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from loopwright.aliases import TensorLike, Variable
from loopwright.declaration import COUNTS, may_change
from loopwright.errors import ConfigError, is_finite, unknown
from loopwright.host import lazy_keras
from loopwright.models import models
from loopwright.optimizers import schedule_free

if TYPE_CHECKING:
  from loopwright.optimizers.adapters import KerasOptimizer

SCALE = "learning_rate_scale"
_KEPT = "variable_groups"
_OF_ALL = ("clipnorm", "clipvalue", "global_clipnorm", "ema_momentum", "loss_scale_factor")
_AT_FIRST = ("initial_accumulator_value",)
Options = Mapping[str, float]


@may_change(COUNTS)
def grouped(
  *, of: Callable[[], KerasOptimizer], groups: Mapping[str, Mapping[str, float]]
) -> KerasOptimizer:
  """Returns another factory's optimizer, with other options for some variables.

  The updates of such an optimizer are not fused. Its state can be sharded.

  Args:
    of: a factory of an optimizer of either Keras, such as `keras.optimizers.AdamW`.
    groups: regular expression for whole names of variables, such as '.*/bias' -> options:
      'learning_rate_scale', which multiplies the rate or its schedule, and numbers that the
      optimizer's constructor takes, such as 'weight_decay' or 'beta_2'. A variable that matches
      none keeps the optimizer's own.

  Raises:
    ConfigError: not such a dict; an option that the optimizer has not, or not by variable.
  """
  right = isinstance(groups, Mapping) and groups
  if not right or not all(isinstance(each, Mapping) and each for each in groups.values()):
    raise ConfigError(
      f"grouped.groups is {groups!r}; it must be a dict such as {{'.*/bias': {{'weight_decay': "
      "0.0}}."
    )
  optimizer = of()
  if not hasattr(optimizer, "update_step"):
    return optimizer  # `build` raises the error
  for pattern, options in groups.items():
    try:
      re.compile(pattern)
    except re.error as error:
      raise ConfigError(
        f"grouped.groups has {pattern!r}, which is no regular expression: {error}."
      ) from error
    for option, value in options.items():
      _check(optimizer, pattern, option, value)
  vars(optimizer)[_KEPT] = {pattern: dict(options) for pattern, options in groups.items()}
  return optimizer


def _check(optimizer: Any, pattern: str, option: str, value: float) -> None:
  where, own = f"grouped.groups[{pattern!r}]", getattr(optimizer, option, None)
  if option == "learning_rate":
    raise ConfigError(
      f"{where} has 'learning_rate'; give {SCALE!r}, by which the optimizer's rate is multiplied."
    )
  known = [
    name
    for name in inspect.signature(type(optimizer).__init__).parameters
    if ("weight_decay" in name or type(getattr(optimizer, name, None)) is float)
    and name not in (*_OF_ALL, *_AT_FIRST, "learning_rate")
  ]
  if option not in (SCALE, *known):
    raise unknown(f"option of {where}", option, (SCALE, *known))
  if not is_finite(value) or value < 0:
    raise ConfigError(f"{where} has {option}={value!r}; it must be a finite number of at least 0.")
  if own == 0 and "weight_decay" not in option:
    raise ConfigError(
      f"{where} has {option}={value!r}, but {option} is 0 for the optimizer, which then has no "
      "state for it; set it there too."
    )
  if option == "beta_1" and schedule_free.is_free(optimizer):
    raise ConfigError(f"{where} has 'beta_1', which is one for all of ScheduleFreeAdamW.")


def of(optimizer: Any) -> dict[str, Options]:
  """Returns pattern -> options of an optimizer; none unless `grouped` made it."""
  return getattr(optimizer, _KEPT, {})


def matched(name: str, optimizer: Any, variables: Sequence[Variable]) -> list[Options]:
  """Returns the options of each variable.

  Raises:
    ConfigError: a pattern matches no variable, or two match the same.
  """
  groups, names = of(optimizer), [models.name(v) for v in variables]
  fitting = [[p for p in groups if re.fullmatch(p, each)] for each in names]
  for pattern in groups:
    if not any(pattern in each for each in fitting):
      raise ConfigError(
        f"optimizer {name!r}: grouped.groups has {pattern!r}, which matches no variable; the names "
        f"are {', '.join(names[:5])}{', ...' if names[5:] else ''}."
      )
  for each, found in zip(names, fitting, strict=True):
    if len(found) > 1:
      raise ConfigError(
        f"optimizer {name!r}: grouped.groups has {found[0]!r} and {found[1]!r}, which both match "
        f"{each!r}; a variable is in one group: make the patterns exclude one another."
      )
  return [groups[found[0]] if found else {} for found in fitting]


def use(optimizer: Any, options: Sequence[Options], variables: Sequence[Variable]) -> None:
  """Gives the updates of a built optimizer the options of their variables, in order."""
  of_keras_3 = isinstance(optimizer, keras.optimizers.Optimizer)
  rule = optimizer.update_step
  given = variables if of_keras_3 else map(models.raw, variables)
  decays = [optimizer._use_weight_decay(variable) for variable in given]

  def update_step(gradient: tf.Tensor, variable: Variable, *rate: TensorLike) -> None:
    index = (
      optimizer._get_variable_index(variable)
      if of_keras_3
      else optimizer._index_dict[optimizer._var_key(variable)]
    )
    with _in_place(optimizer, options[index]):
      scaled = [given * options[index].get(SCALE, 1.0) for given in rate]
      if decays[index] and (decay := _decay_of(optimizer, index)):
        now = tf.cast(scaled[0] if scaled else optimizer.learning_rate, variable.dtype)
        variable.assign_sub(variable * tf.cast(decay, variable.dtype) * now)
      rule(gradient, variable, *scaled)

  optimizer.update_step = update_step
  optimizer._apply_weight_decay = lambda variables: None


def _decay_of(optimizer: Any, index: int) -> float | None:
  """Returns the weight decay; Muon has another for what it updates with Adam."""
  by_adam = getattr(optimizer, "adam_velocities", None)
  if by_adam is not None and by_adam[index] is not None:
    return optimizer.adam_weight_decay
  return optimizer.weight_decay


@contextlib.contextmanager
def _in_place(optimizer: Any, options: Options) -> Iterator[None]:
  """The attributes of an optimizer are those of a group inside `with` (while it is traced).

  Kerases track what is assigned to an optimizer, so its dict is changed.
  """
  attributes, put = vars(optimizer), {n: v for n, v in options.items() if n != SCALE}
  if SCALE in options and not isinstance(optimizer, keras.optimizers.Optimizer):
    follows = lazy_keras.tf_keras_classes("optimizers.schedules.LearningRateSchedule")
    scheduled = isinstance(attributes["_learning_rate"], follows)
    place = "_current_learning_rate" if scheduled else "_learning_rate"
    put[place] = optimizer.learning_rate * options[SCALE]
  held = {name: attributes[name] for name in put}
  attributes.update(put)
  try:
    yield
  finally:
    attributes.update(held)
