"""The line where one row of a batch first changes what is computed for another (host).

A step runs eagerly several times, each time with one row replaced. The first operation whose other
rows change is where rows meet: a product of rows with rows, a cumulative sum, a mean over the
batch. Shapes and transpositions do not matter, and code in the user's own layers is found too.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from loopwright.tools.verify.bench.bench import PLAIN, Bench, Rows, Subject
from loopwright.tools.verify.bench.recorded_step import Operation, watched

PRIMES = (17, 19, 23, 29, 31, 37, 41, 43, 47)
_REDUCTIONS = ("Mean", "Sum", "Max", "Min", "Prod", "TopKV2", "Bincount", "DenseBincount", "Cumsum")
_CHANGE = 1e-4


class Meeting(NamedTuple):
  """Where rows meet.

  Attributes:
    place: "file.py:31, in Mine.loss", or "" if no row changes another on its way to the loss.
    shifted: whether rows that were put one after the other are shifted against one another there.
  """

  place: str = ""
  shifted: bool = False


def of_step(subject: Subject) -> Meeting:
  """Returns where rows meet in a training step."""
  with contextlib.suppress(Exception):  # the task cannot run eagerly, or not on this many rows
    single: dict[str, Any] = {"accumulation_steps": 1, "jit_compile": False}
    here = Bench(subject, rows=max(PRIMES), eager=True, **PLAIN, **single)
    start = here.read()
    given = subject.rows(here.task, subject.divisible_rows)
    return meeting(here.task, given, lambda batch: here.steps_from(start, batch))
  return Meeting()


def meeting(task: Any, given: Rows, run: Callable[[Rows], object]) -> Meeting:
  """Returns where rows meet: `run` computes eagerly of the `given` ones, as many as no axis has."""
  sizes = {size for value in given.values() for size in value.shape[1:]}
  count = next(prime for prime in PRIMES if prime not in sizes)
  rows = {name: value[np.arange(count) % len(value)] for name, value in given.items()}
  run(rows)  # the first step makes constants that the others have

  def operations(batch: Rows) -> list[Operation]:
    with watched(task) as seen:
      run(batch)
    return seen

  whole = operations(rows)
  for row, offset in itertools.product((0, count - 1), (1, count // 3, count // 2)):
    found = _first(whole, operations(_replaced(rows, row, offset)), count, row)
    if found.place:
      return found
  return Meeting()


def _replaced(rows: Rows, row: int, offset: int) -> Rows:
  """Returns the rows, of which one has the features of another."""
  count = len(rows["weight"])
  source = np.where(np.arange(count) == row, (row + offset) % count, np.arange(count))
  kept = ("weight", "example_id")
  return {n: v if n.rpartition("/")[2] in kept else v[source] for n, v in rows.items()}


def _first(one: list[Operation], other: list[Operation], count: int, row: int) -> Meeting:
  others = np.arange(count) != row
  for index, (mine, yours) in enumerate(zip(one, other, strict=False)):
    if mine.kind != yours.kind or len(mine.values) != len(yours.values):
      return Meeting()
    for a, b in zip(mine.values, yours.values, strict=True):
      if (
        a.shape == b.shape
        and _has_rows(a, count)
        and _differ(a.reshape([count, -1])[others], b.reshape([count, -1])[others])
      ):
        found = _reduction(one, other, index, count)
        return found if found.place else Meeting(mine.place)
  return Meeting()


def _reduction(one: list[Operation], other: list[Operation], last: int, count: int) -> Meeting:
  """Returns the line of the reduction by which rows met, else of an operation on shifted rows."""
  makers = {output: number for number in range(last) for output in one[number].outputs}
  waiting, seen, shifted = [last], {last}, ""
  while waiting:
    number = waiting.pop()
    if one[number].kind in _REDUCTIONS:
      return Meeting(one[number].place)
    mixed = [maker for each in one[number].inputs if (maker := makers.get(each, last)) != last]
    mixed = [m for m in mixed if not any(_has_rows(value, count) for value in one[m].values)]
    if number != last and sum(value.size > 1 for m in mixed for value in one[m].values) > 1:
      shifted = shifted or one[number].place
    mixed = [m for m in mixed if any(map(_differ, one[m].values, other[m].values))]
    waiting += {*mixed} - seen
    seen |= {*mixed}
  flat = (value.shape[0] for m in seen for value in one[m].values if _has_rows(value, count))
  return Meeting(shifted, bool(shifted) and max(flat, default=0) > count)


def sources(operations: Sequence[Operation], last: int) -> set[int]:
  """Returns the places of the operations from which one is computed."""
  makers = {output: number for number in range(last) for output in operations[number].outputs}
  found, waiting = set[int](), [last]
  while waiting:
    inputs = operations[waiting.pop()].inputs
    new = {makers[each] for each in inputs if each in makers} - found
    waiting += new
    found |= new
  return found


def _has_rows(value: np.ndarray, count: int) -> bool:
  return bool(value.size and value.ndim and value.shape[0] % count == 0)


def _differ(one: np.ndarray, other: np.ndarray) -> bool:
  if one.shape != other.shape:
    return True
  if one.dtype.kind not in "fc" and one.dtype.name != "bfloat16":
    return not np.array_equal(one, other)
  one, other = one.astype(np.float64), other.astype(np.float64)
  size = np.abs(one).max(initial=0.0) + 1e-12
  return not np.allclose(one, other, rtol=0.0, atol=_CHANGE * size, equal_nan=True)
