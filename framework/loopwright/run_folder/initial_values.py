"""Finds a setting without effect: it only changes initial values, which a checkpoint overrides.

A run that goes on restores its variables. So a setting that only sets their initial values, such as
the scale of an initializer, would be recorded but never used.

With one seed the same numbers are drawn, so other values show such a setting, however few they are.
But a setting with an effect, such as a dropout that was 0, may change which numbers are drawn. Some
elements, less the mean and divided by the deviation, tell one from the other.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from loopwright.aliases import Variable
from loopwright.models import models
from loopwright.run_folder.checkpoints import variables_of

if TYPE_CHECKING:
  from loopwright.trainer import Trainer

Values = Mapping[str, Sequence[float]]
"""Short digest of a variable's place in a checkpoint -> number of elements, mean, deviation; then
the first elements less the mean and divided by the deviation."""

_EXACT = 1e-5
_SAME_DRAW = 1e-4
_SIGMAS = 5.0
_FIRST = 4
_KINDS = ("model/", "untracked/", "optimizers/", "loss_scale/")


def measured(trainer: Trainer) -> Values:
  """Returns what is known of each variable before anything is restored (host)."""
  return {key: _moments(variable) for key, variable in _floats(trainer)}


def differences(
  trainer: Trainer, began: Values, *, other_seed: bool = False
) -> tuple[list[str], list[str]]:
  """Returns the names of variables whose first values are others than when the run began (host).

  Args:
    other_seed: whether the run's seed has changed; a single number may then be such a one.

  Returns:
    Those of another distribution; and with the same seed those that are perhaps drawn otherwise.
  """
  other, redrawn = [], []
  for key, variable in _floats(trainer):
    now, before = _moments(variable), began.get(key, ())
    if not before or before[0] != now[0] or now == before or (other_seed and now[0] == 1):
      continue
    of_one_draw = len(before) == len(now) > 3 and not other_seed and _close(now[3:], before[3:])
    if _differ(now[1:3], before[1:3], int(now[0]), exactly=of_one_draw):
      other.append(models.name(variable))
    elif not other_seed and not of_one_draw and len(before) == len(now) > 3:
      redrawn.append(models.name(variable))
  return other, redrawn


def _floats(trainer: Trainer) -> Iterator[tuple[str, Any]]:
  """Yields what a restore overrides, without counters and learning rates."""
  root = tf.train.Checkpoint(**trainer.checkpoint_items())
  for path, variable in variables_of(root).items():
    raw = models.raw(variable)
    if not path.startswith(_KINDS) or "learning_rate" in path or not raw.dtype.is_floating:
      continue
    if models.is_variable(variable) and not hasattr(raw, "variables"):  # not one in partitions
      yield f"{zlib.crc32(path.encode()):08x}", variable


def _moments(variable: Variable) -> Sequence[float]:
  value = tf.cast(tf.convert_to_tensor(models.raw(variable)), tf.float32)
  mean, deviation = tf.reduce_mean(value), tf.math.reduce_std(value)
  shown = [float(f"{float(each):.7g}") for each in (mean, deviation)]
  first = tf.math.divide_no_nan(tf.reshape(value, [-1])[:_FIRST] - mean, deviation).numpy()
  varies = shown[1] > _EXACT * abs(shown[0]) and len(first) == _FIRST
  return [float(value.shape.num_elements()), *shown, *(first.round(6).tolist() if varies else ())]


def _close(here: Sequence[float], before: Sequence[float]) -> bool:
  return all(abs(a - b) <= _SAME_DRAW for a, b in zip(here, before, strict=True))


def _differ(here: Sequence[float], before: Sequence[float], count: int, *, exactly: bool) -> bool:
  """Whether two (mean, deviation) differ by more than samples of one distribution, or at all."""
  scale = max(map(abs, (*here, *before)))
  if exactly or min(here[1], before[1]) <= _EXACT * scale:  # a constant, at least once
    return max(abs(a - b) for a, b in zip(here, before, strict=True)) > _EXACT * scale
  tolerance = _SIGMAS * (2 / count) ** 0.5
  return (
    abs(here[0] - before[0]) > tolerance * max(here[1], before[1])
    or abs(math.log(here[1] / before[1])) > tolerance / 2**0.5
  )
