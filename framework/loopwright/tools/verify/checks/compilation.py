"""The compiled loop: traced once, equal when traced again, without calls to the host.

A tf.function runs Python only while it is traced: a counter that a task keeps as a Python value
becomes a constant of the loop. So the loop is traced a second time; what differs depends on a
Python value that changes. XLA must compile a replica's pass, forward and back, to the same update.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright import configurables
from loopwright.errors import ConfigError
from loopwright.graphs import operations as graphs
from loopwright.graphs import xla
from loopwright.host import failures
from loopwright.models import models
from loopwright.tools.verify.bench import bench, harness, held_state, shared_noise
from loopwright.tools.verify.bench.bench import Bench, Rows, Subject
from loopwright.tools.verify.bench.held_state import Held
from loopwright.tools.verify.bench.source_lines import made_at, method, of_operation
from loopwright.tools.verify.report import Group, Result
from loopwright.trainer import Trainer

GROUP = Group("compilation")
LOOPS = (1, 3, 2)
"""Steps of the loops to run; after the first, none may trace the loop again."""
TRACED_ONCE, SAME_TRACE, NO_HOST, XLA_CLEAN = ALL = (
  "traced once", "the same when traced again", "no host call in the loop", "XLA-clean",
)  # fmt: skip
TOLERANCE = {"float32": 1e-3}
"""Of the update, by precision; XLA keeps half-precision intermediate results in float32."""
_HALF = 5e-2
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


def check(subject: Subject) -> list[Result]:
  """Returns the results of this group."""
  task, strategy = subject.fresh_task(), bench.strategy_of(1)
  trainer = harness.make_trainer(subject, task, strategy, jit_compile=False)
  if trainer.eager:
    return [GROUP.skipped(name, "run.eager: nothing is compiled") for name in ALL]
  once = traced_once(trainer)
  graph = trainer.graph()
  return [once, same_trace(trainer, graph), no_host_call(trainer, graph), xla_clean(subject)]


def traced_once(trainer: Trainer) -> Result:
  """Checks that loops of several lengths, over several batches, use one trace."""
  built = _variables(trainer).keys()
  for steps in LOOPS:
    harness.train(trainer, steps)
  told = f"loops of {', '.join(map(str, LOOPS))} steps: {trainer.traces} traces"
  if trainer.traces == 1:
    return GROUP.passed(TRACED_ONCE, told.removesuffix("s"))
  variables = _variables(trainer)
  if late := [variables[key].name for key in variables.keys() - built]:
    told += f"; the step made {', '.join(sorted(late)[:3])}"
    place = method(trainer.task, "build_model")
    return GROUP.failed(TRACED_ONCE, told, "variables created in the step", place)
  return GROUP.failed(TRACED_ONCE, told, "changing shape or Python value")


def _variables(trainer: Trainer) -> dict[int, Any]:
  found = [*map(models.raw, models.all_variables(trainer.task.model))]
  found += [held.variable for held in held_state.held(trainer.task).values()]
  return {id(variable): variable for variable in found if variable is not None}


def same_trace(trainer: Trainer, graph: tf.Graph) -> Result:
  """Traces the loop again and compares operations and constants."""
  task = trainer.task
  before, generators = held_state.held(task), held_state.numpy_and_python()
  try:
    trainer.use()
    again = trainer.graph()
  except (TypeError, ValueError, tf.errors.OpError):
    if kept := _kept(task):
      return kept
    raise
  mine, yours = _ingredients(graph), _ingredients(again)
  differing = [key for key in {**mine, **yours} if len(mine[key]) != len(yours[key])]
  if not differing:
    return GROUP.passed(SAME_TRACE, f"{sum(map(len, mine.values()))} operations")
  if kept := _kept(task):
    return kept
  found = list[tuple[str, str]]()
  for key in differing:
    sides = ([of_operation(op, task) for op in each[key]] for each in (mine, yours))
    one, other = map(collections.Counter, sides)
    found += [(place, key[0]) for place in (one - other) + (other - one)]
  place, what = next(filter(lambda pair: pair[0], found), found[0])
  drew = held_state.numpy_and_python() != generators
  why, cause = _changed(before, held_state.held(task)), "Python value that changes"
  if not why and drew:
    why, cause = "a number of NumPy or Python", "random numbers of NumPy or Python"
  told = f"{why or 'something'} changes when the step is traced, and with it a {what}"
  return GROUP.failed(
    SAME_TRACE, f"{told}; in the loop, each step gets that of the first trace", cause, place
  )


def _changed(before: Mapping[str, Held], after: Mapping[str, Held]) -> str:
  same = {name for name in before.keys() & after.keys() if before[name].value == after[name].value}
  return ", ".join(name for name in after if name not in same)


def _kept(task: Any) -> Result | None:
  """Returns that the task keeps a tensor of a trace; None if it keeps none."""
  for name, held in held_state.held(task).items():
    if held.value == held_state.OF_A_GRAPH:
      told = f"{name} holds a tensor of the first trace, which the next step cannot use"
      place = made_at(held.tensor, task)
      return GROUP.failed(SAME_TRACE, told, "tensor kept in Python", place)
  return None


def _ingredients(graph: tf.Graph) -> dict[Any, list[tf.Operation]]:
  """Groups operations by type, dtypes, shapes, and value if constant.

  Names and order do not count, as they may differ between two traces of the same step.
  """
  found: dict[Any, list[tf.Operation]] = collections.defaultdict(list)
  for op in graphs.operations(graph):
    outputs = tuple((t.dtype.name, str(t.shape)) for t in op.outputs)
    value = op.get_attr("value").SerializeToString() if op.type == "Const" else b""
    found[op.type, outputs, value].append(op)
  return found


def no_host_call(trainer: Trainer, graph: tf.Graph) -> Result:
  """Checks that no operation leaves the device for Python, the terminal or a file."""
  found: dict[str, str] = {}
  for operation in graphs.operations(graph):
    place = of_operation(operation, trainer.task) if operation.type in _CAUSE_OF else ""
    if place:  # otherwise it belongs to a library or the framework
      found.setdefault(place, operation.type)
  if not found:
    return GROUP.passed(NO_HOST, "no Python, printing, summary or file operation")
  place, kind = next(iter(found.items()))
  told = "; ".join(f"{kind} at {where}" for where, kind in found.items())
  return GROUP.failed(NO_HOST, f"{told}: each step waits for the host", _CAUSE_OF[kind], place)


# ---- XLA ----


def xla_clean(subject: Subject) -> Result:
  """Compiles one step with XLA and compares it with the same step without, if the config asks.

  It compiles for the CPU; operations without an XLA kernel there mostly have none elsewhere.
  """
  bound = configurables.bindings()
  asked = subject.options.get("jit_compile", bound.get("Trainer.jit_compile") == "True")
  if not asked and "tpu" not in bound.get("run.strategy", ""):
    return GROUP.skipped(XLA_CLEAN, "Trainer.jit_compile is not set")
  compiled = _bench(subject, jit_compile=True)
  task, start = compiled.task, compiled.read()
  batch = subject.rows(task, subject.divisible_rows)
  try:
    seen = _update(compiled, start, batch)
  except ConfigError:
    raise
  except (tf.errors.OpError, ValueError, TypeError) as error:
    programs = xla.programs(compiled.graph(batch))
    broken = (op for inner in programs for op in graphs.operations(inner) if xla.lacks_kernel(op))
    found = dict.fromkeys((op.type, of_operation(op, task)) for op in broken)
    told = ", ".join(f"{kind} ({place})" if place else kind for kind, place in found)
    told, place = told or failures.failure(error), next((place for _, place in found if place), "")
    return GROUP.failed(XLA_CLEAN, told, "operations without an XLA kernel", place)
  plain = _bench(subject, jit_compile=False)
  expected, again = (_update(plain, start, batch) for _ in range(2))
  apart, tolerance = _apart(seen, expected), TOLERANCE.get(subject.precision, _HALF)
  if apart > tolerance and _apart(again, expected) > tolerance / 10:
    why = "compiles, but its random numbers follow no seed, so updates cannot be compared"
    return GROUP.skipped(XLA_CLEAN, why)
  if apart > tolerance:
    place = method(task, "forward", "training_loss", "train_step")
    told = f"compiles, but the update differs by {apart:.2g}"
    return GROUP.failed(XLA_CLEAN, told, "different result under XLA", place)
  told = f"forward and backward compile on the CPU; relative difference {apart:.1e}"
  return GROUP.passed(XLA_CLEAN, told, values={"difference": apart})


def _bench(subject: Subject, *, jit_compile: bool) -> Bench:
  return Bench(
    subject, rows=subject.divisible_rows, optimizer=bench.gradient_descent, quiet=False,
    jit_compile=jit_compile, eager=False,
  )  # fmt: skip


def _update(here: Bench, start: Sequence[np.ndarray], batch: Rows) -> list[np.ndarray]:
  here.trainer.global_step.assign(0)  # random numbers depend on it
  with shared_noise.same_draws():
    return here.steps_from(start, batch).update()


def _apart(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
  """Returns the largest difference of a variable's update, relative to it or 1% of the largest."""
  sizes = [float(np.linalg.norm(each)) for each in other]
  floor = 1e-2 * max(sizes, default=0.0) or 1.0
  apart = [np.linalg.norm(a - b) / max(s, floor) for a, b, s in zip(one, other, sizes, strict=True)]
  return float(np.nan_to_num(max(apart, default=0.0), nan=np.inf))
