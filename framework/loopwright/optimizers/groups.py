"""Options of an optimizer by variable: rates by layer, weights without decay, other betas.

Keras's rules read their options from the optimizer when a variable is updated. So an option of a
group is put in its place for the time of this update; the rule itself stays Keras's.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from loopwright.errors import ConfigError, is_finite, unknown
from loopwright.graphs.aliases import Variable
from loopwright.host import lazy_keras
from loopwright.host.lazy_keras import KerasOptimizer
from loopwright.models import models
from loopwright.optimizers import rule
from loopwright.optimizers.rule import GROUPS, Options, Update, groups_of, is_free
from loopwright.options.declaration import COUNTS, may_change

SCALE = "learning_rate_scale"
_OF_ALL = ("clipnorm", "clipvalue", "global_clipnorm", "ema_momentum", "loss_scale_factor")
_AT_FIRST = ("initial_accumulator_value",)
_BEFORE, _AFTER = r"(?:^|/)(?:", r")(?:/replica_\d+)?(?::\d+)?$"
"""Around a name: Keras searches the pattern in the whole path, such as block/bias/replica_1:0."""


@may_change(COUNTS)
def without_decay(*, of: Callable[[], KerasOptimizer], names: Sequence[str]) -> KerasOptimizer:
  """Returns another factory's optimizer, without weight decay for some variables.

  For example biases, gains of normalisation layers, or embeddings. The updates of such an optimizer
  are not fused; see `adapters.is_elementwise`.

  Args:
    of: a factory of an optimizer with weight decay, such as `keras.optimizers.AdamW`.
    names: regular expressions for the names of variables without decay: "bias", not "dense/bias".
      Each must match a variable.

  Raises:
    ConfigError: the optimizer has no weight decay, or `names` is empty or a plain string.
  """
  if isinstance(names, str) or not names:
    raise ConfigError(f"without_decay.names is {names!r}; it must be a list such as ['bias'].")
  optimizer = of()
  if rule.of(optimizer) is None:
    return optimizer  # `build` raises the error
  if getattr(optimizer, "weight_decay", None) is None:
    raise ConfigError(
      f"without_decay.of returns a {type(optimizer).__name__} without weight decay; set its "
      "weight_decay, or remove without_decay."
    )
  optimizer.exclude_from_weight_decay(var_names=[_BEFORE + name + _AFTER for name in names])
  return optimizer


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
  vars(optimizer)[GROUPS] = {pattern: dict(options) for pattern, options in groups.items()}
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
  if option == "beta_1" and is_free(optimizer):
    raise ConfigError(f"{where} has 'beta_1', which is one for all of ScheduleFreeAdamW.")


def require_matches(name: str, optimizer: KerasOptimizer, variables: Sequence[Variable]) -> None:
  """Raises a ConfigError: a name of `without_decay` matches no variable."""
  known = [models.raw(v).name for v in variables]
  for excluded in _names_without_decay(optimizer):
    if not any(re.search(_BEFORE + excluded + _AFTER, each) for each in known):
      own = sorted({each.rpartition("/")[2].partition(":")[0] for each in known})
      raise ConfigError(
        f"optimizer {name!r}: without_decay.names has {excluded!r}, which matches no variable; the "
        f"names are {', '.join(own)}."
      )


def _names_without_decay(optimizer: KerasOptimizer) -> list[str]:
  pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)  # of Keras 3
  names = getattr(optimizer, "_exclude_from_weight_decay_names", None) or []  # of tf_keras
  text = pattern.pattern if pattern else "|".join(names)
  return sorted(re.findall(f"{re.escape(_BEFORE)}(.*?){re.escape(_AFTER)}", text))


def matched(name: str, optimizer: Any, variables: Sequence[Variable]) -> list[Options]:
  """Returns the options of each variable; [] without groups.

  Raises:
    ConfigError: a pattern matches no variable, or two match the same.
  """
  if not (groups := groups_of(optimizer)):
    return []
  names = [models.name(v) for v in variables]
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


def update_of(update: Update, options: Sequence[Options]) -> Update:
  """Returns an update with the options of each variable, in order."""

  def with_options(
    optimizer: Any, index: int, gradient: tf.Tensor, variable: Variable, rate: Any
  ) -> None:
    rate = rate * options[index].get(SCALE, 1.0)
    with _in_place(optimizer, options[index], rate):
      update(optimizer, index, gradient, variable, rate)

  return with_options


@contextlib.contextmanager
def _in_place(optimizer: Any, options: Options, rate: Any) -> Iterator[None]:
  """The attributes of an optimizer are those of a group inside `with` (while it is traced).

  Kerases track what is assigned to an optimizer, so its dict is changed.
  """
  attributes, put = vars(optimizer), {n: v for n, v in options.items() if n != SCALE}
  if SCALE in options and not isinstance(optimizer, keras.optimizers.Optimizer):
    follows = lazy_keras.tf_keras_classes("optimizers.schedules.LearningRateSchedule")
    scheduled = isinstance(attributes["_learning_rate"], follows)
    place = "_current_learning_rate" if scheduled else "_learning_rate"
    put[place] = rate
  held = {name: attributes[name] for name in put}
  attributes.update(put)
  try:
    yield
  finally:
    attributes.update(held)
