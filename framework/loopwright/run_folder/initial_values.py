"""Finds a setting without effect: it only changes initial values, which a checkpoint overrides.

A run that goes on restores its variables. So a setting that only sets their initial values, such as
the scale of an initializer, would be recorded but never used.
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
"""Short digest of a variable's place in a checkpoint -> number of elements, mean, deviation."""

_EXACT = 1e-5
_SIGMAS = 5.0
_KINDS = ("model/", "untracked/", "optimizers/", "loss_scale/")


def measured(trainer: Trainer) -> Values:
  """Returns mean and deviation of each variable before anything is restored (host)."""
  return {key: _moments(variable) for key, variable in _floats(trainer)}


def differences(trainer: Trainer, began: Values, *, other_seed: bool = False) -> list[str]:
  """Returns the names of variables whose first values are others than when the run began (host).

  Other random numbers of the same distribution are no difference.

  Args:
    other_seed: whether the run's seed has changed; a single number may then be such a one.
  """
  found = []
  for key, variable in _floats(trainer):
    count, mean, deviation = _moments(variable)
    before = began.get(key)
    if other_seed and count == 1:
      continue
    if before and before[0] == count and _differ((mean, deviation), before[1:], int(count)):
      found.append(models.name(variable))
  return found


def _floats(trainer: Trainer) -> Iterator[tuple[str, Any]]:
  """Yields what a restore overrides, without counters and learning rates."""
  root = tf.train.Checkpoint(**trainer.checkpoint_items())
  for path, variable in variables_of(root).items():
    raw = models.raw(variable)
    if not path.startswith(_KINDS) or "learning_rate" in path or not raw.dtype.is_floating:
      continue
    if models.is_variable(variable) and not hasattr(raw, "variables"):  # not one in partitions
      yield f"{zlib.crc32(path.encode()):08x}", variable


def _moments(variable: Variable) -> tuple[float, float, float]:
  value = tf.cast(tf.convert_to_tensor(models.raw(variable)), tf.float32)
  mean, deviation = tf.reduce_mean(value), tf.math.reduce_std(value)
  count = float(value.shape.num_elements())
  return count, float(f"{float(mean):.7g}"), float(f"{float(deviation):.7g}")


def _differ(here: Sequence[float], before: Sequence[float], count: int) -> bool:
  """Whether two (mean, deviation) differ by more than samples of one distribution do."""
  scale = max(map(abs, (*here, *before)))
  if min(here[1], before[1]) <= _EXACT * scale:  # a constant, at least once
    return max(abs(a - b) for a, b in zip(here, before, strict=True)) > _EXACT * scale
  tolerance = _SIGMAS * (2 / count) ** 0.5
  return (
    abs(here[0] - before[0]) > tolerance * max(here[1], before[1])
    or abs(math.log(here[1] / before[1])) > tolerance / 2**0.5
  )
