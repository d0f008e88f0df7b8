"""Batches of several shapes, one after the other, as a schedule says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from loopwright.aliases import Batch


class Schedule(Protocol):
  """Which of several data sets each step reads; see `loopwright.inputs.buckets.Schedule`."""

  def buckets(self, first: int, steps: int) -> np.ndarray:
    """Returns the data set of each of some steps from `first` on, int64 [steps]."""


@dataclasses.dataclass
class Scheduled:
  """The batches of all buckets, from some step on: data sets, or iterators made of them (host).

  Attributes:
    datasets: of each bucket, endless, from its next batch on.
    schedule: says which one each step takes.
    step: the next step.
  """

  datasets: list[Any]
  schedule: Schedule
  step: int

  def iterate(self, make: Callable[[tf.data.Dataset], Iterator[Batch]]) -> Scheduled:
    """Returns an iterator; `make` makes that of one bucket."""
    return dataclasses.replace(self, datasets=[*map(make, self.datasets)])

  def __iter__(self) -> Scheduled:
    return self

  def __next__(self) -> Batch:
    """Returns the next batch, eagerly."""
    [(iterator, _)] = runs(self, tf.constant(1))
    return next(iterator)


def runs(iterator: Any, steps: tf.Tensor) -> Iterator[tuple[Any, tf.Tensor]]:
  """Yields (iterator of one shape, number of steps) until so many steps are shared out (host)."""
  if not isinstance(iterator, Scheduled):
    yield iterator, steps
    return
  order = iterator.schedule.buckets(iterator.step, int(steps))
  ends = [*(np.flatnonzero(np.diff(order)) + 1).tolist(), len(order)]
  for begin, end in zip([0, *ends], ends, strict=False):
    yield iterator.datasets[order[begin]], tf.constant(end - begin)
    iterator.step += end - begin
