"""The compiled loop: traced once, equal when traced again, without calls to the host.

A tf.function runs Python only while it is traced: a counter that a task keeps as a Python value
becomes a constant of the loop. So the loop is traced a second time; what differs depends on a
Python value that changes. XLA must compile a replica's pass, forward and back, to the same update.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright import configurables
from loopwright.errors import ConfigError
from loopwright.graphs import operations as graphs
from loopwright.graphs import xla
from loopwright.models import models
from loopwright.tools.verify.bench import bench, harness, held_state, shared_noise, source_lines
from loopwright.tools.verify.bench.bench import Bench, Rows, Subject
from loopwright.tools.verify.report import Group, Result
from loopwright.trainer import Trainer

GROUP = Group("compilation")
LOOPS = (1, 3, 2)
"""Steps of the loops to run; after the first, none may trace the loop again."""
TRACED_ONCE, SAME_TRACE, NO_HOST = (
  "traced once", "the same when traced again", "no host call in the loop",
)  # fmt: skip
XLA_CLEAN, UNSET = "XLA-clean", "Trainer.jit_compile is not set"
TOLERANCE = {"float32": 1e-3}
"""Of the update, by precision; XLA keeps half-precision intermediate results in float32."""
_HALF = 5e-2
_UNSUPPORTED = re.compile(r"(\w+) \(No registered '\w+' OpKernel")
_NODE = re.compile(r"\{\{node ([\w/.]+)\}\}")
HOST = {
  "Python in the loop": ("PyFunc", "EagerPyFunc", "PyFuncStateless"),
  "printing in the loop": ("Print", "PrintV2"),
  "summaries in the loop": (
    "WriteSummary", "WriteScalarSummary", "WriteHistogramSummary", "WriteImageSummary",
    "WriteAudioSummary", "WriteRawProtoSummary", "WriteGraphSummary",
  ),
  "files in the loop": ("ReadFile", "WriteFile", "MatchingFiles", "SaveV2", "RestoreV2"),
}  # fmt: skip
_CAUSE_OF = {kind: cause for cause, kinds in HOST.items() for kind in kinds}


CHANGES = "Python value that changes"
FIRST = "in the loop, each step gets that of the first trace"


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  trainer = harness.make_trainer(
    subject, bench.strategy_of(1), rows=subject.divisible_rows, jit_compile=False
  )
  if trainer.eager:
    return [GROUP.skipped(name, "run.eager: nothing is compiled") for name in _ALL]
  loop = Loop(trainer)
  return [loop.traced_once(), loop.same_trace(), loop.no_host_call(), xla_clean(subject)]


class Loop:
  """The compiled loop of a trainer that has run."""

  def __init__(self, trainer: Trainer) -> None:
    self.trainer, self.task = trainer, trainer.task
    built = {id(v) for v in _variables(trainer)}
    for steps in LOOPS:
      harness.train(trainer, steps)
    self.late = [v for v in _variables(trainer) if id(v) not in built]
    self.graph = trainer.graph()

  def traced_once(self) -> Result:
    """Checks that loops of several lengths, over several batches, use one trace."""
    traces = self.trainer.traces
    told = f"loops of {', '.join(map(str, LOOPS))} steps: {traces} trace" + "s" * (traces > 1)
    if traces == 1:
      return GROUP.passed(TRACED_ONCE, told)
    if self.late:
      told += f"; the step made {', '.join(v.name for v in self.late[:3])}"
      place = source_lines.mention(self.task, "tf.Variable", "def build_model")
      return GROUP.failed(TRACED_ONCE, told, "variables created in the step", place)
    place = source_lines.mention(self.task, "def train_step", "def source")
    return GROUP.failed(TRACED_ONCE, told, "changing shape or Python value", place)

  # ---- Traced again ----

  def same_trace(self) -> Result:
    """Traces the loop again and compares operations and constants."""
    before, generators = held_state.held(self.task), held_state.numpy_and_python()
    try:
      self.trainer.use()
      again = self.trainer.graph()
    except (TypeError, ValueError, tf.errors.OpError):
      if not self._kept():
        raise
      return self._keeps(self._kept()[0])
    mine, yours = _ingredients(self.graph), _ingredients(again)
    differing = [key for key in {**mine, **yours} if len(mine[key]) != len(yours[key])]
    if not differing:
      return GROUP.passed(SAME_TRACE, f"{sum(map(len, mine.values()))} operations")
    if kept := self._kept():
      return self._keeps(kept[0])
    drew, operation = held_state.numpy_and_python() != generators, yours[differing[0]]
    operation = (operation or mine[differing[0]])[-1]
    what, place = operation.type, source_lines.of_operation(operation, self.task)
    values, after = {n: h.value for n, h in before.items()}, held_state.held(self.task)
    if changed := [name for name, held in after.items() if values.get(name) != held.value]:
      held = after[changed[0]]
      told = f"{', '.join(changed)} changes when the step is traced, and with it a {what}; {FIRST}"
      place = source_lines.change(held.owner, held.attribute) or place
      return GROUP.failed(SAME_TRACE, told, CHANGES, place)
    if drew:
      told = f"the step draws from NumPy or Python when it is traced (a {what}); {FIRST}"
      place = source_lines.mention(self.task, "np.random", "random.") or place
      return GROUP.failed(SAME_TRACE, told, "random numbers of NumPy or Python", place)
    told = f"another {what} each time the step is traced; {FIRST}"
    return GROUP.failed(SAME_TRACE, told, CHANGES, place)

  def _kept(self) -> list[str]:
    found = held_state.held(self.task).items()
    return [name for name, held in found if held.value == held_state.OF_A_GRAPH]

  def _keeps(self, name: str) -> Result:
    held = held_state.held(self.task)[name]
    told = f"{name} holds a tensor of the first trace, which the next step cannot use"
    place = source_lines.change(held.owner, held.attribute)
    return GROUP.failed(SAME_TRACE, told, "tensor kept in Python", place)

  # ---- The host ----

  def no_host_call(self) -> Result:
    """Checks that no operation leaves the device for Python, the terminal or a file."""
    found: dict[str, tuple[str, str]] = {}
    for operation in graphs.operations(self.graph):
      place = source_lines.of_operation(operation, self.task) if operation.type in _CAUSE_OF else ""
      if place:  # otherwise it belongs to a library or the framework
        found.setdefault(place, (operation.type, _CAUSE_OF[operation.type]))
    if not found:
      return GROUP.passed(NO_HOST, "no Python, printing, summary or file operation")
    place, (_, cause) = next(iter(found.items()))
    told = "; ".join(f"{kind} at {where}" for where, (kind, _) in found.items())
    values = [{"type": kind, "place": where} for where, (kind, _) in found.items()]
    return GROUP.failed(
      NO_HOST, f"{told}: each step waits for the host", cause, place,
      values={"operations": values},
    )  # fmt: skip


_ALL = (TRACED_ONCE, SAME_TRACE, NO_HOST, XLA_CLEAN)


def _ingredients(graph: tf.Graph) -> dict[Any, list[tf.Operation]]:
  """Groups operations by type, dtypes, shapes, and value if constant.

  Names and order do not count, as they may differ between two traces of the same step.
  """
  found: dict[Any, list[tf.Operation]] = collections.defaultdict(list)
  for operation in graphs.operations(graph):
    found[_kind(operation)].append(operation)
  return found


def _kind(operation: tf.Operation) -> tuple[Any, ...]:
  outputs = tuple((t.dtype.name, str(t.shape)) for t in operation.outputs)
  value = operation.get_attr("value").SerializeToString() if operation.type == "Const" else b""
  return operation.type, outputs, value


def _variables(trainer: Trainer) -> Iterator[Any]:
  yield from map(models.raw, models.all_variables(trainer.task.model))
  for held in held_state.held(trainer.task).values():
    if held.variable is not None:
      yield held.variable


# ---- XLA ----


def xla_clean(subject: Subject) -> Result:
  """Compiles one step with XLA and compares it with the same step without XLA.

  It compiles for the CPU; operations without an XLA kernel there mostly have none elsewhere.

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
    return GROUP.skipped(XLA_CLEAN, f"{UNSET}; it would be refused: {error}")
  except (tf.errors.OpError, ValueError, TypeError) as error:
    found = _offending(compiled, batch, str(error))
    told = ", ".join(f"{kind} ({place})" if place else kind for kind, place in found)
    if not asked:
      return GROUP.skipped(XLA_CLEAN, f"{UNSET}; would not compile: {told}")
    place = next((place for _, place in found if place), "")
    return GROUP.failed(XLA_CLEAN, told, "operations without an XLA kernel", place)
  return _compared(subject, asked, compiled, seen, start, batch)


def _compared(
  subject: Subject, asked: bool, compiled: Bench, seen: list[np.ndarray],
  start: Sequence[np.ndarray], batch: Rows,
) -> Result:  # fmt: skip
  plain = _bench(subject, len(batch["weight"]), jit_compile=False)
  with shared_noise.same_draws():
    expected, again = (_update(plain, start, batch) for _ in range(2))
  apart, tolerance = _apart(seen, expected), TOLERANCE.get(subject.precision, _HALF)
  if apart > tolerance and _apart(again, expected) > tolerance / 10:
    why = "compiles, but its random numbers follow no seed, so updates cannot be compared"
    return GROUP.skipped(XLA_CLEAN, why)
  if apart > tolerance:
    told = f"compiles, but the update differs by {apart:.2g}"
    if not asked:
      return GROUP.skipped(XLA_CLEAN, f"{UNSET}; {told}")
    place = source_lines.mention(compiled.task, "gather", "stateless_", "def forward")
    return GROUP.failed(XLA_CLEAN, told, "different result under XLA", place)
  places = (
    f"{op.type} ({place})"
    for op in _operations(compiled, batch)
    if op.type in xla.DYNAMIC and (place := source_lines.of_operation(op, compiled.task))
  )
  note = ", ".join(sorted(set(places)))
  note = f"; with shapes that depend on values: {note}" if note else ""
  told = f"forward and backward compile on the CPU; relative difference {apart:.1e}{note}"
  return GROUP.passed(XLA_CLEAN, told, values={"difference": apart})


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
