"""A gradient beside the change of the loss along a direction, of two lengths."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from loopwright.graphs.aliases import Variable
from loopwright.models import models

TOLERANCE = {"float64": 1e-3, "float32": 0.1}
"""Largest relative difference between gradient and finite difference, by precision of the loss."""
ROUNDING = {"float64": 1e-14, "float32": 1e-6, "float16": 1e-2}
"""Relative rounding error of the loss."""


def compare(
  total: Callable[[], tf.Tensor],
  gradient: np.ndarray,
  variable: Variable,
  rng: np.random.Generator,
  precision: str,
) -> tuple[float, float] | None:
  """Returns (gradient, difference) along a direction; two equal numbers if they agree.

  None if the loss changes too little, or is too curved, to tell.
  """
  raw = models.raw(variable)
  start = raw.numpy()
  random = rng.normal(size=gradient.shape)
  direction = gradient / np.linalg.norm(gradient) + 0.5 * random / np.linalg.norm(random)
  told = float((gradient * direction).sum())
  here = float(total())
  precise = ROUNDING["float16" if raw.dtype.size < 4 else precision]
  moves = 1e-5 if precision == "float64" else 3e-3  # relative change of the loss
  length = moves * (abs(here) + 1e-3) / abs(told)
  length = min(length, 0.05 * (np.linalg.norm(start) + 0.1))

  def slope(length: float) -> float:
    ends = []
    for sign in (1, -1):
      raw.assign((start + sign * length * direction).astype(start.dtype))
      ends.append(float(total()))
    return (ends[0] - ends[1]) / (2 * length)

  try:
    coarse, fine = slope(length), slope(length / 2)
  finally:
    raw.assign(start)
  rounding = 8 * precise * abs(here) / length
  bent = abs(coarse - fine)
  if not np.isfinite(fine) or rounding + bent > 0.5 * max(abs(fine), abs(told)):
    return None
  allowed = TOLERANCE[precision] * max(abs(fine), abs(told)) + rounding + 2 * bent
  agrees = abs(fine - told) <= allowed
  return (told, told) if agrees else (told, fine)
