"""Whether XLA compiles a replica's forward and backward pass, and to the same update.

It compiles for the CPU; operations without an XLA kernel there mostly have none elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright import configurables
from loopwright.errors import ConfigError
from loopwright.graphs import operations as graphs
from loopwright.graphs import xla
from loopwright.tools.verify.bench import bench, shared_noise, source_lines
from loopwright.tools.verify.bench.bench import Bench, Rows, Subject
from loopwright.tools.verify.report import Group, Result

NAME, UNSET = "XLA-clean", "Trainer.jit_compile is not set"
TOLERANCE = {"float32": 1e-3}
"""Of the update, by precision; XLA keeps half-precision intermediate results in float32."""
_HALF = 5e-2
_UNSUPPORTED = re.compile(r"(\w+) \(No registered '\w+' OpKernel")
_NODE = re.compile(r"\{\{node ([\w/.]+)\}\}")


def check(subject: Subject, group: Group) -> Result:
  """Compiles one step with XLA and compares it with the same step without XLA.

  Returns:
    "failed" only if the config asks for XLA; otherwise what does not compile is "not applicable".
  """
  asked = _asked(subject)
  rows = subject.divisible_rows
  compiled = _bench(subject, rows, jit_compile=True)
  batch = subject.rows(compiled.task, rows)
  start = compiled.read()
  try:
    with shared_noise.same_draws():
      seen = _update(compiled, start, batch)
  except ConfigError as error:
    if asked:
      raise
    return group.skipped(NAME, f"{UNSET}; it would be refused: {error}")
  except (tf.errors.OpError, ValueError, TypeError) as error:
    found = _offending(compiled, batch, str(error))
    told = ", ".join(f"{kind} ({place})" if place else kind for kind, place in found)
    if not asked:
      return group.skipped(NAME, f"{UNSET}; would not compile: {told}")
    place = next((place for _, place in found if place), "")
    return group.failed(NAME, told, "operations without an XLA kernel", _REMEDY, place)
  return _compared(subject, group, asked, compiled, seen, start, batch)


def _compared(
  subject: Subject, group: Group, asked: bool, compiled: Bench, seen: list[np.ndarray],
  start: Sequence[np.ndarray], batch: Rows,
) -> Result:  # fmt: skip
  plain = _bench(subject, len(batch["weight"]), jit_compile=False)
  with shared_noise.same_draws():
    expected, again = (_update(plain, start, batch) for _ in range(2))
  apart, tolerance = _apart(seen, expected), TOLERANCE.get(subject.precision, _HALF)
  if apart > tolerance and _apart(again, expected) > tolerance / 10:
    why = "compiles, but its random numbers follow no seed, so updates cannot be compared"
    return group.skipped(NAME, why)
  if apart > tolerance:
    told = f"compiles, but the update differs by {apart:.2g}"
    if not asked:
      return group.skipped(NAME, f"{UNSET}; {told}")
    remedy = "XLA clamps out-of-range indices and draws other numbers for negative seeds"
    place = source_lines.mention(compiled.task, "gather", "stateless_", "def forward")
    return group.failed(NAME, told, "different result under XLA", remedy, place)
  places = (
    f"{op.type} ({place})"
    for op in _operations(compiled, batch)
    if op.type in xla.DYNAMIC and (place := source_lines.of_operation(op, compiled.task))
  )
  note = ", ".join(sorted(set(places)))
  note = f"; with shapes that depend on values: {note}" if note else ""
  told = f"forward and backward compile on the CPU; relative difference {apart:.1e}{note}"
  return group.passed(NAME, told, values={"difference": apart})


_REMEDY = (
  "use tf.where(condition, x, y) or batch['weight'] instead of selecting rows; move strings, files "
  "and Python to preprocess(), on the host"
)


def _asked(subject: Subject) -> bool:
  bound = configurables.bindings()
  compiled = subject.options.get("jit_compile", bound.get("Trainer.jit_compile") == "True")
  return bool(compiled) or "tpu" in bound.get("run.strategy", "")


def _bench(subject: Subject, rows: int, *, jit_compile: bool) -> Bench:
  options: dict[str, Any] = {"jit_compile": jit_compile, "eager": False}
  return Bench(subject, rows=rows, optimizer=bench.gradient_descent, quiet=False, **options)


def _update(here: Bench, start: Sequence[np.ndarray], batch: Rows) -> list[np.ndarray]:
  here.trainer.global_step.assign(0)  # random numbers depend on it
  return here.steps_from(start, batch).update()


def _apart(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
  """Returns the largest difference of a variable's update, relative to it or 1% of the largest."""
  sizes = [float(np.linalg.norm(each)) for each in other]
  floor = 1e-2 * max(sizes, default=0.0) or 1.0
  apart = [np.linalg.norm(a - b) / max(s, floor) for a, b, s in zip(one, other, sizes, strict=True)]
  return float(np.nan_to_num(max(apart, default=0.0), nan=np.inf))


# ---- What does not compile ----


def _operations(here: Bench, batch: Rows) -> list[tf.Operation]:
  return [op for inner in xla.programs(here.graph(batch)) for op in graphs.operations(inner)]


def _offending(here: Bench, batch: Rows, error: str) -> list[tuple[str, str]]:
  """Returns (type, place) of operations that XLA cannot compile; else (the error's line, "")."""
  named, nodes = set(_UNSUPPORTED.findall(error)), set(_NODE.findall(error))
  found: dict[tuple[str, str], None] = {}
  blamed: dict[tuple[str, str], None] = {}
  for operation in _operations(here, batch):
    told = operation.type, source_lines.of_operation(operation, here.task)
    if operation.type in named or (named and xla.lacks_kernel(operation)):
      found[told] = None
    elif operation.name in nodes:
      blamed[told] = None
  return list(found or blamed) or [(_useful_line(error), "")]


def _useful_line(error: str) -> str:
  lines = [line.strip() for line in error.splitlines() if line.strip()]
  noise = ("Graph execution", "Detected at", "<", "File")
  useful = [line for line in lines if not line.startswith(noise)]
  return (useful or lines or [""])[0]
