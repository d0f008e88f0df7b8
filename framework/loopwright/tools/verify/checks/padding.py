"""Part of the group "replicas": what one replica makes of padding and of weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.tools.verify.bench import bench, layer_calls
from loopwright.tools.verify.bench import explanations as known
from loopwright.tools.verify.bench.bench import PLAIN, Bench, Rows
from loopwright.tools.verify.bench.comparison import LEAST, Comparison, Difference
from loopwright.tools.verify.checks import order
from loopwright.tools.verify.report import Group, Result

GROUP = Group("replicas")
PADDING, WEIGHTS = "padding changes nothing", "weights count"
OTHER_CONTENTS = "other contents of the padded rows"


def on_one(of: Comparison) -> Iterator[Result]:
  """Yields the results of steps on one replica, the first only if the same step is another one."""
  found = of.difference(of.again, of.reference["full batch"])
  if found.worst > LEAST:
    cause, place = next(iter(of.unsteady().items()), (known.UNKNOWN, ""))
    yield GROUP.failed("same step twice", found.detail, cause, place)
    return
  yield GROUP.passed("same step twice", found.detail)
  padding = _padding(of)
  yield padding
  yield _weights(of, known_to_count=padding.cause == known.PADDING)


def _padding(of: Comparison) -> Result:
  """Checks that the contents and the number of rows of weight 0 change nothing."""
  found, what = _padded(of)
  told = f"with {what}: {found.detail}"
  if found.worst <= of.tolerance and not found.metrics:
    return GROUP.passed(PADDING, found.detail)
  if (again := of.retraced()).worst > of.tolerance:
    told = f"the same step, traced again: {again.detail}"
    of.blamed = known.PYTHON_VALUE, of.constant_place()
    return GROUP.failed(PADDING, told, *of.blamed)
  if normalised := [layer.name for layer in layer_calls.normalisations(of.task.model)]:
    why = f"{normalised[0]} normalises over all rows of a batch, padding included"
    return GROUP.skipped(PADDING, why)
  if found.worst > of.tolerance and what == OTHER_CONTENTS and (kept := _kept(of)) is not None:
    return GROUP.failed(PADDING, told, known.LOCAL_STATE, of.assigned_at(kept))
  if found.worst > of.tolerance and what == OTHER_CONTENTS and _mixes(of):
    of.blamed = cause, place = of.coupling()
    if any(call.verb == "all_gather" for call in of.calls):
      cause = "padded rows among the others"
    return GROUP.failed(PADDING, told, cause, place)
  in_update = found.worst > of.tolerance
  if in_update and (mistake := order.scaled(of.subject, of.calls)):
    of.blamed = mistake
    return GROUP.failed(PADDING, told, *mistake)
  place = of.loss_place() if in_update else of.metric_place(found.metrics)
  of.blamed = (known.PADDING, place) if in_update else None
  return GROUP.failed(PADDING, told, known.PADDING, place)


def _kept(of: Comparison) -> int | None:
  """Returns the state by which padded rows change later steps, if they change no update."""
  real = bench.masked(of.batch, np.arange(of.rows) < of.real)
  one, other = of.on_one(real), of.on_one(of.cases["batch that does not divide"])
  if not of.state or of.difference(one, other, without=of.state).worst > of.tolerance:
    return None
  found = of.difference(one, other, without=of.updated)
  return found.first if found.worst > of.tolerance else None


def _mixes(of: Comparison) -> bool:
  """Whether rows change the part of others in the update, rather than add an own part.

  Then the update depends on which rows have which weights, but not on the size of all weights.
  """
  rows = of.cases["batch that does not divide"]
  smaller = of.on_one({**rows, "weight": rows["weight"] / 16})
  return not of.moved(smaller, of.on_one(rows)) and _weights_count(of) is not None


def _weights_count(of: Comparison) -> Difference | None:
  """Returns how the update changes when rows exchange their weights; None if it does not."""
  rows = of.cases["unequal weights"]
  turned = of.on_one({**rows, "weight": rows["weight"][::-1]})
  return of.moved(turned, of.reference["unequal weights"])


def _padded(of: Comparison) -> tuple[Difference, str]:
  """Returns the first difference that padding makes, and how it was made; else a small one."""
  real = np.arange(of.rows) < of.real
  other = _one_after(of, bench.masked(of.batch, real), of.cases["batch that does not divide"])
  same = other.worst <= of.tolerance and not other.metrics
  if same and (fewer := _without_padding(of)):
    return fewer, f"{of.rows // 2} rows and no padding"
  return other, OTHER_CONTENTS


def _one_after(of: Comparison, batch: Rows, other: Rows) -> Difference:
  """Compares the steps on two batches, and those after them, which may use kept state."""
  outcomes = [of.on_one(each) for each in (batch, other)]
  found = of.difference(*outcomes, without=of.state)
  if found.worst > of.tolerance or found.metrics or not of.state:
    return found
  kept = (
    [b if used else a[0] for a, b, used in zip(o.after, of.start, of.trained, strict=True)]
    for o in outcomes
  )
  after = [of.alone.steps_from(values, of.batch) for values in kept]
  return of.difference(*after, without=of.state)


def _without_padding(of: Comparison) -> Difference | None:
  """Compares half the rows with the same rows padded; None if the task needs its row count."""
  half = of.rows // 2
  padded = of.on_one(bench.padded(of.batch, half))
  try:
    here = Bench(of.subject, rows=half, eager=True, **PLAIN)
    here.first_number = of.alone.first_number
    short = {name: value[:half] for name, value in of.batch.items()}
    return of.difference(here.steps_from(of.start, short), padded, without=of.state)
  except (ConfigError, ValueError, tf.errors.InvalidArgumentError):
    return None


def _weights(of: Comparison, *, known_to_count: bool) -> Result:
  """Checks that the update depends on which rows have which weights."""
  if found := _weights_count(of):
    told = f"other weights change the update, by {min(found.worst, 9.99):.2g}"
    return GROUP.passed(WEIGHTS, told)
  half = of.rows // 2
  halves = (slice(0, half), slice(half, 2 * half))
  batches = ({n: np.concatenate([v[rows]] * 2) for n, v in of.batch.items()} for rows in halves)
  same = not of.moved(*(of.on_one(batch) for batch in batches))
  if same or known_to_count:
    why = "all rows of the batch give the same update" if same else "padding counts, see above"
    return GROUP.skipped(WEIGHTS, why)
  told = "the update stays the same when the rows exchange their weights"
  return GROUP.failed(WEIGHTS, told, "weights are ignored", of.loss_place())
