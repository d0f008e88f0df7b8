"""A recorded step: its operations, its communications, its verbs, the variables that it makes.

Operations come by TensorFlow's callbacks, eagerly and while a step is traced, communications by an
own `CrossDeviceOps`, verbs by a subclass of `Step`, variables by a scope: nothing is replaced.

What a verb gets is read from the graph, by the operations behind its tensors. A gradient is *raw*
if they lead to a result of `step.gradients` without a communication on the way. A value is *local*
if they lead to the rows, the gradients or the seeds of this replica. So it does not matter in which
order several optimizers take their turns.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_callbacks

from loopwright.graphs.aliases import Gradient, Variable
from loopwright.metrics import Loss
from loopwright.models import models
from loopwright.optimizers.fusion import Gradients
from loopwright.step import Step
from loopwright.tools.verify.bench import bench, source_lines
from loopwright.tools.verify.bench.bench import Bench, Communications, Outcome, Subject

REPLICAS = 2
OWN = "own communication"
"""The verb of a communication that no verb of the step makes."""

LIMITS = ("Minimum", "Maximum")
NEAR_ZERO = 1e-5


# ---- Operations


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
  """What an eager operation did.

  Attributes:
    kind: its type.
    inputs, outputs: the tensors, by id.
    elements: of its largest input.
    values: of the outputs that are numbers.
    place: the user's line that made it; "" if none did.
  """

  kind: str
  inputs: list[int]
  outputs: list[int]
  elements: int
  values: list[np.ndarray]
  place: str


@contextlib.contextmanager
def watched(task: Any) -> Iterator[list[Operation]]:
  """Yields a list of the eager operations inside the context, as they come."""
  seen: list[Operation] = []
  alive: list[Any] = []  # so that no two tensors have the same id

  def watch(
    op_type: str, inputs: Any, attrs: Any, outputs: Any, op_name: Any = None, graph: Any = None
  ) -> None:
    if graph is not None:
      return
    alive.extend((*inputs, *outputs))
    seen.append(
      Operation(
        kind=op_type, inputs=[id(each) for each in inputs], outputs=[id(each) for each in outputs],
        elements=max((int(np.prod(i.shape)) for i in inputs if hasattr(i, "shape")), default=0),
        values=[out.numpy() for out in outputs if _is_number(out)],
        place=source_lines.of_frames(source_lines.frames(but=__file__), task),
      )
    )  # fmt: skip

  with _told(watch):
    yield seen


@contextlib.contextmanager
def traced(wanted: Callable[[str], bool]) -> Iterator[list[tf.Operation]]:
  """Yields a list of the operations of some types that are traced inside, in all threads."""
  seen: list[tf.Operation] = []

  def note(
    op_type: str, inputs: Any, attrs: Any, outputs: Any, op_name: Any = None, graph: Any = None
  ) -> None:
    if graph is not None and wanted(op_type):
      seen.append(outputs[0].op if outputs else graph.get_operation_by_name(op_name))

  with _told(note):
    yield seen


@contextlib.contextmanager
def _told(watch: Callable[..., None]) -> Iterator[None]:
  op_callbacks.add_op_callback(watch)
  try:
    yield
  finally:
    op_callbacks.remove_op_callback(watch)


def _is_number(tensor: Any) -> bool:
  dtype = getattr(tensor, "dtype", tf.string)
  return dtype.is_floating or dtype.is_integer or dtype.is_bool


# ---- Verbs


@dataclasses.dataclass
class Call:
  """One call of a verb, with a description of its input.

  Attributes:
    verb: its name, such as "apply".
    what: the description.
    place: the line of the user's code.
    communications: the bytes of each communication.
    raw, reduced: whether it gets gradients that are not reduced, or that are.
    clipped: whether raw gradients are limited before it gets them.
    limited: the line that limits reduced gradients which it gets; or "".
    local: whether a condition (`when`), or the value of an assignment, is local.
    always: whether it is made in each step, as it has no `when`.
    idle: whether an assignment is computed only from variables that no step changes, and averages
      them or changes nothing.
  """

  verb: str
  what: str = ""
  place: str = ""
  communications: list[int] = dataclasses.field(default_factory=list)
  raw: bool = False
  reduced: bool = False
  clipped: bool = False
  limited: str = ""
  local: bool = False
  always: bool = False
  idle: bool = False

  def __str__(self) -> str:
    parts = [part for part in (self.what, communicated(self.communications)) if part]
    return f"{self.verb} ({', '.join(parts)})" if parts else self.verb


class Recording:
  """Records what the first replica's step calls while it is traced.

  Attributes:
    calls: of verbs, in order.
    losses: those that the step differentiates.
    metrics: those that it logs.
    task: names the methods in places.
  """

  task: Any = None

  def __init__(self) -> None:
    self.calls: list[Call] = []
    self.losses: list[Loss] = []
    self.metrics: dict[str, Any] = {}
    self._owner: Step | None = None
    self._own: list[tuple[Call, tf.Tensor]] = []
    self._known: dict[int, tuple[str, Any]] = {}
    self._reads: list[tuple[Call, Variable, set[str], list[tf.Operation]]] = []

  def begins(
    self, step: Step, call: Call, tensors: Iterable[Any] = (), equal: Iterable[Any] = ()
  ) -> None:
    """Records a call of the first step made, the gradients that it passes, what must be equal."""
    if self.owns(step):
      self._note(call, tensors)
      call.local |= bool({"rows", "raw"} & self._behind(_tensors(equal))[0])

  def knows(self, step: Step, kind: str, values: Any) -> None:
    """Keeps tensors of the first step: "rows", "raw" gradients or what is "shared"."""
    if self.owns(step):
      self._known |= {id(t): (kind, t) for t in _tensors(values)}

  def owns(self, step: Step) -> bool:
    """Whether it is the first step, whose batch is known from then on."""
    if self._owner is None:
      self._owner = step
      self.knows(step, "rows", step.record.batch.values())
    return step is self._owner

  def follows(self, step: Step, call: Call, variable: Variable, value: Any) -> None:
    """Keeps the reads of variables from which the first step computes what it assigns."""
    if self.owns(step):
      kinds, operations = self._behind(_tensors([value]))
      reads = [op for op in operations if op.type == "ReadVariableOp"]
      self._reads.append((call, models.raw(variable), kinds, reads))

  def end(self, here: Bench, outcome: Outcome) -> None:
    """Finds lines that communicate, and idle assignments, once the step has run on a bench."""
    for call, result in self._own:  # it is made between the threads of the replicas
      places = (source_lines.of_operation(op, self.task) for op in result.consumers())
      call.place = next(filter(None, places), call.place)
    used = dict(zip(map(id, here.variables), here.trainable, strict=True))
    assigned = {id(variable) for _, variable, _, _ in self._reads}
    still = {id(_handle(v)): v for v in here.variables if not used[id(v)] and id(v) not in assigned}
    changed = zip(here.variables, outcome.before, outcome.after, strict=True)
    moved = {id(v) for v, before, after in changed if not np.allclose(before, after[0], rtol=1e-6)}
    if not any(used[each] for each in moved):
      return  # the step was skipped
    for call, variable, kinds, reads in self._reads:
      outer = {id(inner): id(handle) for op in reads[:1] for handle, inner in op.graph.captures}
      handles = {outer.get(id(op.inputs[0]), 0) for op in reads}
      others = handles - {id(_handle(variable))}
      if variable.dtype.is_floating and handles and not kinds and others <= still.keys():
        averages = others and others != handles and not moved & {id(still[h]) for h in others}
        call.idle = bool(averages or (not others and call.always and id(variable) not in moved))

  def communicates(self, tensors: Sequence[tf.Tensor], results: Sequence[tf.Tensor]) -> None:
    """Records a communication as part of the latest call."""
    if not self.calls or self.calls[-1].verb not in ("all_reduce", "all_gather", "apply"):
      self._note(Call(OWN), tensors)
      self._own.append((self.calls[-1], results[0]))
    call = self.calls[-1]
    call.communications.append(sum((t.shape.num_elements() or 0) * t.dtype.size for t in tensors))
    kind = "reduced" if call.raw or call.reduced else "shared"
    self._known |= {id(t): (kind, t) for t in results}

  def _note(self, call: Call, tensors: Iterable[Any]) -> None:
    call.place = source_lines.of_frames(source_lines.frames(but=__file__), self.task)
    found, behind = self._behind(_tensors(tensors))
    limits = [operation for operation in behind if _limits(operation)]
    call.raw, call.reduced = "raw" in found, "reduced" in found
    call.clipped = call.raw and bool(limits) and not self._combines()
    if call.reduced and not call.raw:
      places = (source_lines.of_operation(operation, self.task) for operation in limits)
      call.limited = next(filter(None, places), "")
    call.local = call.verb == "apply" and "rows" in found and not call.raw
    self.calls.append(call)

  def _combines(self) -> bool:
    """Whether gradients of several losses come together, as in gradient surgery."""
    verbs = [call.verb for call in self.calls if call.verb in ("gradients", "all_reduce")]
    return verbs[-2:] == ["gradients", "gradients"]

  def _behind(self, tensors: Sequence[tf.Tensor]) -> tuple[set[str], list[tf.Operation]]:
    """Returns the kinds of known tensors from which others are computed, and the operations."""
    found: set[str] = set()
    seen: dict[str, tf.Operation] = {}
    waiting = list(tensors)
    while waiting:
      tensor = waiting.pop()
      several = tensor.op.type == "IdentityN"  # such as what a custom gradient returns, and gets
      name = tensor.name if several else tensor.op.name
      if id(tensor) in self._known:
        found.add(self._known[id(tensor)][0])
      elif name not in seen:
        seen[name] = tensor.op
        waiting += [tensor.op.inputs[tensor.value_index]] if several else [*tensor.op.inputs]
    return found, list(seen.values())

  def step_class(self) -> type[Step]:
    """Returns a Step that reports to this recording."""
    return type("Recorded", (_Recorded,), {"recording": self})


class _Recorded(Step):
  """Reports its verbs to a recording, which `Recording.step_class` sets."""

  recording: Recording

  def gradients(
    self, loss_fn: Any, batch: Any, variables: Sequence[Variable], *, when: Any = None
  ) -> Any:
    self.recording.begins(self, Call("gradients", f"{len(variables)} variables"), equal=[when])
    gradients, loss = super().gradients(loss_fn, batch, variables, when=when)
    self.recording.knows(self, "raw", gradients)
    self.recording.losses.append(loss)
    return gradients, loss

  def gradients_of(
    self, tape: tf.GradientTape, loss: Loss, variables: Sequence[Variable]
  ) -> Gradients:
    self.recording.begins(self, Call("gradients", f"{len(variables)} variables"))
    gradients = super().gradients_of(tape, loss, variables)
    self.recording.knows(self, "raw", gradients)
    self.recording.losses.append(loss)
    return gradients

  def log(self, metrics: Any) -> None:
    super().log(metrics)
    self.recording.metrics |= metrics

  def assign(self, variable: Variable, value: Any, *, when: Any = None) -> None:
    call = Call("assign", models.name(variable), always=when is None)
    self.recording.begins(self, call, equal=[value, when])
    self.recording.follows(self, call, variable, value)
    super().assign(variable, value, when=when)

  def seed(self) -> tf.Tensor:
    made = super().seed()
    self.recording.knows(self, "rows", [made])
    return made

  def all_reduce(self, gradients: Sequence[Gradient], loss: Loss) -> tuple[Gradients, Loss]:
    there = sum(g is not None for g in gradients)
    self.recording.begins(self, Call("all_reduce", f"{there} gradients, loss, weight"), gradients)
    return super().all_reduce(gradients, loss)

  def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
    self.recording.begins(self, Call("all_gather", str(tf.convert_to_tensor(tensor).shape)))
    made = super().all_gather(tensor)
    self.recording.knows(self, "shared", [made])
    return made

  @contextlib.contextmanager
  def perturbed(self, variables: Sequence[Variable], offsets: Sequence[Any]) -> Iterator[None]:
    self.recording.begins(self, Call("perturbed"), offsets)
    with super().perturbed(variables, offsets):
      yield

  def unscale(self, gradients: Sequence[Gradient], loss: Loss) -> Gradients:
    self.recording.begins(self, Call("unscale"), gradients, equal=[loss.weight])
    return super().unscale(gradients, loss)

  def check(self, gradients: Sequence[Gradient]) -> tuple[tf.Tensor, tf.Tensor]:
    self.recording.begins(self, Call("check finite"), gradients)
    return super().check(gradients)

  def clip(self, gradients: Sequence[Gradient], norm: tf.Tensor) -> Gradients:
    limit = self.parts.clip_value or self.parts.clip_norm or "off"
    self.recording.begins(self, Call("clip", str(limit)), gradients)
    return super().clip(gradients, norm)

  def apply(
    self, gradients: Sequence[Gradient], finite: tf.Tensor, optimizer: str = "default"
  ) -> None:
    what = "" if optimizer == "default" else optimizer
    self.recording.begins(self, Call("apply", what), gradients, equal=[finite])
    super().apply(gradients, finite, optimizer)


def record(subject: Subject) -> tuple[Recording, Bench]:
  """Traces one step on two replicas, once; returns its calls and the bench."""
  known: dict[str, Any] = vars(subject)  # as `functools.cached_property` keeps its values
  if "recorded" not in known:
    recording = Recording()
    communications, rows = Communications(), subject.divisible_rows
    here = Bench(
      subject, REPLICAS, rows=rows, optimizer=bench.gradient_descent, quiet=False,
      step=recording.step_class(),
      strategy=bench.strategy_of(REPLICAS, communications=communications),
    )  # fmt: skip
    recording.task = here.task
    communications.told = recording.communicates
    recording.end(here, here.step(subject.rows(here.task, rows)))
    known["recorded"] = recording, here
  return known["recorded"]


def _limits(operation: tf.Operation) -> bool:
  """Whether an operation limits a value: more than its sign, or a divisor, as in max(x, 1e-12)."""
  limits = [tf.get_static_value(each) for each in operation.inputs]
  near = (limit is not None and bool((abs(limit) < NEAR_ZERO).all()) for limit in limits)
  return operation.type == "ClipByValue" or (operation.type in LIMITS and not any(near))


def _handle(variable: Variable) -> Any:
  """Returns the handle of a variable's copy on the first replica."""
  return getattr(variable, "values", [variable])[0].handle


def communicated(counted: Sequence[int]) -> str:
  """Returns "2 communications of 96 bytes", or "" for none."""
  plural = "communication" if len(counted) == 1 else "communications"
  return f"{len(counted)} {plural} of {sum(counted):,} bytes" if counted else ""


def _tensors(values: Any) -> list[tf.Tensor]:
  values = values.tensors if isinstance(values, Gradients) else values
  return [each for each in tf.nest.flatten(list(values)) if isinstance(each, tf.Tensor)]


# ---- Variables


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
  """One variable, and the user's line."""

  variable: Variable
  place: str


@contextlib.contextmanager
def variables_made(*, moved: frozenset[int] = frozenset()) -> Iterator[list[Made]]:
  """Yields a list of the trainable variables of floats that the user's code makes inside.

  Those of the numbers `moved`, in the order of the list, begin at other values.
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


def outside_of_model(made: list[Made], here: Bench) -> list[int]:
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
    with variables_made(moved=moved):
      here = Bench(subject, rows=rows, optimizer=bench.gradient_descent, always=True)
      losses.append(here.loss_in(here.step(subject.rows(here.task, rows)).metrics))
  one, other = losses
  return not np.isclose(one, other, rtol=1e-5, atol=0.0, equal_nan=True)
