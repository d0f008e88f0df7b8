"""The PerExample metrics of an evaluation, collected by the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from loopwright.errors import ConfigError
from loopwright.metrics.values import PerExample


class CollectedRows:
  """The PerExample metrics of an evaluation (host)."""

  _LAG = 16
  """Batches whose values may still be on the device."""

  def __init__(self) -> None:
    self._waiting: list[tuple[int, Mapping[str, PerExample]]] = []
    self._rows: dict[str, list[np.ndarray]] = {}

  def add(self, metrics: Mapping[str, PerExample], batches: int = 1) -> None:
    """Adds a batch, or several as [batches, n, ...]: tensors or arrays, of all replicas."""
    if metrics:
      self._waiting.append((batches, metrics))
    while sum(number for number, _ in self._waiting[1:]) >= self._LAG:
      self._take(self._waiting.pop(0)[1])

  def result(self) -> dict[str, np.ndarray]:
    """Returns name -> [m, ...], the rows whose weight is not 0, in the order of the batches.

    Raises:
      ConfigError: rows of one name have several shapes.
    """
    for _, metrics in self._waiting:
      self._take(metrics)
    self._waiting = []
    for name, rows in self._rows.items():
      shapes = sorted({part.shape[1:] for part in rows})
      if len(shapes) > 1:
        raise ConfigError(
          f"PerExample metric {name!r} has rows of shape {shapes[0]} in one batch and {shapes[1]} "
          "in another; give all rows one shape, such as one number for each example."
        )
    return {name: np.concatenate(rows) for name, rows in self._rows.items()}

  def _take(self, metrics: Mapping[str, PerExample]) -> None:
    for name, (values, weight) in metrics.items():
      self._rows.setdefault(name, []).append(np.asarray(values)[np.asarray(weight) != 0])
