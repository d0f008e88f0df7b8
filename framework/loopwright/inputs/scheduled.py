"""Batches of several shapes, one after the other, as a schedule says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
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
  """The batches of all buckets, from some step on.

  Attributes:
    datasets: of each bucket, endless, from its next batch on.
    schedule: says which one each step takes.
    step: the next step.
  """

  datasets: list[tf.data.Dataset]
  schedule: Schedule
  step: int

  def iterate(self, make: Callable[[tf.data.Dataset], Iterator[Batch]]) -> ScheduledIterator:
    """Returns an iterator; `make` makes that of one bucket."""
    return ScheduledIterator([make(each) for each in self.datasets], self.schedule, self.step)


class ScheduledIterator:
  """Takes the batches of several iterators as a schedule says (host)."""

  def __init__(self, iterators: Sequence[Any], schedule: Schedule, step: int) -> None:
    """Begins before `step`, where the iterators are too."""
    self.iterators, self._schedule, self._step = iterators, schedule, step

  def __iter__(self) -> ScheduledIterator:
    """Returns itself."""
    return self

  def __next__(self) -> Batch:
    """Returns the next batch, eagerly."""
    [(iterator, _)] = self.runs(1)
    return next(iterator)

  def runs(self, steps: int) -> Iterator[tuple[Any, int]]:
    """Yields (iterator, number of steps) until all steps are shared out."""
    order = self._schedule.buckets(self._step, steps)
    ends = [*(np.flatnonzero(np.diff(order)) + 1).tolist(), len(order)]
    begin = 0
    for end in ends:
      yield self.iterators[order[begin]], end - begin
      self._step += end - begin
      begin = end


def runs(iterator: Any, steps: tf.Tensor) -> Iterator[tuple[Any, tf.Tensor]]:
  """Yields (iterator of one shape, number of steps) until so many steps are shared out (host)."""
  if not isinstance(iterator, ScheduledIterator):
    yield iterator, steps
    return
  for each, number in iterator.runs(int(steps)):
    yield each, tf.constant(number)
