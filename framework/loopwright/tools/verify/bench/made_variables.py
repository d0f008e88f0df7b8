"""Notes which trainable variables the user's code makes, and on which line (host).

So a variable that is not part of the model is found wherever it is made: by a layer that is called
on a constant, by a layer that the task holds, or in forward().
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.graphs.aliases import Variable
from loopwright.models import models
from loopwright.tools.verify.bench import bench, source_lines
from loopwright.tools.verify.bench.bench import Bench, Subject


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
  """One variable, and the user's line."""

  variable: Variable
  place: str


@contextlib.contextmanager
def noted(*, moved: frozenset[int] = frozenset()) -> Iterator[list[Made]]:
  """Notes the trainable variables of floats that the user's code makes inside the context.

  Args:
    moved: numbers, in the order of the list, of variables that begin at other values.

  Yields:
    The list, which grows.
  """
  found: list[Made] = []

  def creator(next_creator: Any, **options: Any) -> Any:
    variable = next_creator(**options)
    if not (variable.trainable and variable.dtype.is_floating):
      return variable
    if place := source_lines.of_frames(source_lines.frames(but=__file__), None):
      if len(found) in moved:
        variable.assign(variable + 0.1 + 0.5 * tf.abs(variable))
      found.append(Made(variable=variable, place=place))
    return variable

  with tf.variable_creator_scope(creator):
    yield found


def outside(made: list[Made], here: Bench) -> list[int]:
  """Returns the numbers of the variables that neither the model nor an optimizer has (host)."""
  known = [models.raw(v) for v in models.all_variables(here.task.model)]
  for optimizer in here.trainer.parts.optimizers.values():
    known += [models.raw(v) for v in (*optimizer.variables, *optimizer.fusion.variables)]
  strategy = here.strategy
  ids = {id(copy) for v in known for copy in (v, *strategy.experimental_local_results(v))}
  return [number for number, each in enumerate(made) if id(each.variable) not in ids]


def read_by_step(subject: Subject, numbers: list[int], rows: int) -> bool:
  """Whether the step's loss depends on these variables, which each new model makes (host)."""
  losses = []
  for moved in (frozenset[int](), frozenset(numbers)):
    with noted(moved=moved):
      here = Bench(subject, rows=rows, optimizer=bench.gradient_descent, always=True)
      losses.append(here.loss_in(here.step(subject.rows(here.task, rows)).metrics))
  one, other = losses
  return not np.isclose(one, other, rtol=1e-5, atol=0.0, equal_nan=True)
