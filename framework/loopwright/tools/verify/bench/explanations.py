"""Causes that several checks name, and the update that some of them predict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

FITS = 0.02
"""The largest relative difference between an update and the one that a mistake predicts."""
NEVER_REDUCED = "never reduced"
TWICE = "reduced twice"
PADDING = "padding counts"
COUPLED = "examples that depend on one another"
LOCAL_BATCH = "loss divided by the local batch"
PYTHON_VALUE = "Python value that changes"
CLIPPED_FIRST = "clipped before the reduction"
CHECKED_FIRST = "finite check before the reduction"
LOCAL_STATE = "state fed from local rows only"
LOCAL_CONDITION = "a condition that differs between replicas"
LOCAL_WEIGHT = "divided by the weight of one replica"
LOCAL_OFFSETS = "perturbed by the gradients of one replica"
UNKNOWN = "unknown"

Part = tuple[np.ndarray, float]


def weighted_mean(parts: Sequence[Part]) -> np.ndarray:
  """Returns the update of all rows, if that of each replica does not depend on other rows."""
  total = sum(weight for _, weight in parts)
  return np.sum([part * (weight / total) for part, weight in parts], axis=0)


Predict: TypeAlias = Callable[[np.ndarray, Sequence[Part]], np.ndarray]
PREDICTIONS: Sequence[tuple[str, Predict]] = (
  (TWICE, lambda whole, parts: whole * len(parts)),
  ("mean of means", lambda whole, parts: np.mean([part for part, _ in parts], axis=0)),
  (LOCAL_BATCH, lambda whole, parts: np.sum([part for part, _ in parts], axis=0)),
  (LOCAL_BATCH, lambda whole, parts: whole / len(parts)),
)


def fits(seen: np.ndarray, predicted: np.ndarray) -> bool:
  """Whether an update is the predicted one."""
  size = np.linalg.norm(predicted)
  return bool(size and np.linalg.norm(seen - predicted) <= FITS * size)
