"""What the traced loss says of its gradients: where they are stopped, replaced, or pass.

The graph is that of one replica, from a batch to the total loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import func_graph

from loopwright import errors
from loopwright.graphs import operations as graphs
from loopwright.graphs.aliases import Model, Variable
from loopwright.models import models
from loopwright.tools.verify.bench import layer_calls, random_draws, source_lines

STEPWISE = frozenset(
  ("Round", "Rint", "Floor", "Ceil", "Sign", "ArgMax", "ArgMin", "OneHot", "FloorDiv", "Bucketize",
   "Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual")
)  # fmt: skip
"""Operations that pass no gradient: who replaces the gradient of one does so on purpose."""
_TENSORFLOW = tf.__file__.rpartition("/")[0]
_UNCHANGED = ("ReadVariableOp", "Identity", "Cast")
_NARROW = (tf.float32, tf.float16, tf.bfloat16)
LossFn = Callable[[Any], Any]


class LossGraph:
  """The graph of a loss; it knows nothing if the loss cannot be traced."""

  def __init__(self, loss_fn: LossFn, batch: Any, task: Any) -> None:
    """Traces `loss_fn(batch).total` (replica context)."""
    self._task, self._traced, graph = task, False, func_graph.FuncGraph("none")
    with layer_calls.watch() as self._layers, contextlib.suppress(Exception):
      # the eager step says what is wrong
      traced = tf.function(lambda b: loss_fn(b).total, autograph=False)
      graph, self._traced = traced.get_concrete_function(batch).graph, True
    self._graph, self._operations = graph, [*graphs.operations(graph)]
    self._inside = {id(outer): inner for outer, inner in graph.captures}

  @property
  def stops(self) -> bool:
    """Whether the loss contains a StopGradient, or cannot be traced."""
    return not self._traced or any(op.type == "StopGradient" for op in self._operations)

  @property
  def is_exact(self) -> bool:
    """Whether it computes only in float64; constants may be float32, as in `tf.nn.silu`."""
    computed = (op for op in self._operations if op.type != "Const")
    return self._traced and not any(o.dtype in _NARROW for op in computed for o in op.outputs)

  def replaced(self, *, on_purpose: bool) -> str:
    """Returns the first line of the user's with a custom gradient; "" if there is none.

    Args:
      on_purpose: True looks for gradients that are surely meant to differ from the function's:
        those of the identity (reversed, scaled or clipped gradients) and of rounding.
    """
    custom = (op for op in self._operations if _is_custom(op) and on_purpose == _is_meant(op))
    return next(filter(None, (source_lines.of_operation(op, self._task) for op in custom)), "")

  @property
  def counted_twice(self) -> str:
    """The user's line that adds the layers' losses, if the framework adds them too; or ""."""
    used = behind(self._graph.outputs)
    own, others = "", False
    for read in self._layers.penalties:
      if any(tf.is_tensor(t) and t.op.name in used for t in read.outputs):
        place = source_lines.of_caller(read.frames, self._task)
        own, others = own or place, others or not place
    return own if others else ""

  @property
  def loses_masks(self) -> bool:
    """Whether a layer loses a mask that a later one could have used."""
    return bool(self._layers.lost_masks())

  def end(self, variable: Variable) -> str:
    """Returns the line of the operation that passes no gradient to a variable; "" if none is."""
    ahead = set[str]().union(*map(graphs.computed_from, self._handle(variable)))
    on_the_way = [op for name, op in behind(self._graph.outputs).items() if name in ahead]
    whole = [op for op in on_the_way if _is_stepwise(op)]
    stops = whole or [op for op in on_the_way if op.type == "StopGradient"]
    places = (source_lines.of_operation(op, self._task) for op in reversed(stops))
    return next(filter(None, places), "")

  def noisy(self, trained: Sequence[Variable]) -> dict[str, str]:
    """Returns the parts of the model that draw random numbers for the loss alone -> the line.

    A part whose outputs a trained weight takes up, such as a body below a new head, is left out.
    """
    weights = {handle.op.name for variable in trained for handle in self._handle(variable)}
    found, made = {}, self._graph.get_operations()
    for name, part in parts_by_name(self._task.model):
      for call in self._layers.of(part):
        inputs, outputs = ([*filter(tf.is_tensor, each)] for each in call[:2])
        drawn, after = behind(outputs), set[str]().union(*map(graphs.computed_from, outputs))
        new = drawn.keys() - behind(inputs).keys()
        taken = (t for op in made if op.name in after for t in op.inputs)
        if any(random_draws.is_random(drawn[key].type) for key in new) and not any(
          _unwrapped(tensor, _UNCHANGED).op.name in weights for tensor in taken
        ):
          found[name] = source_lines.of_frames(call.frames, self._task)
    return found

  def _handle(self, variable: Variable) -> list[tf.Tensor]:
    """Returns a variable's handle inside of the graph, if the loss reads it."""
    inner = self._inside.get(id(getattr(models.raw(variable), "handle", None)))
    return [] if inner is None else [inner]


# ---- The traced loss, run


def lost_masks(loss_fn: LossFn, batch: Any, task: Any) -> tuple[str, str, str] | None:
  """Returns the layer that loses a mask, one that gives another result with it, and a line.

  The line is that of the first one's result, in the user's code.
  """
  found: list[tuple[layer_calls.Call, layer_calls.Call]] = []

  def traced(given: Any) -> list[tf.Tensor]:
    with layer_calls.watch() as calls:
      loss_fn(given)
    found.extend(calls.lost_masks())
    return [_apart(start, end) for start, end in found]

  changes = tf.function(traced, autograph=False)(batch)
  for (start, end), change in zip(found, changes, strict=True):
    if change > 1e-4:
      place = source_lines.of_operation(start.outputs[0].op, task)
      return start.layer.name, end.layer.name, place
  return None


def _apart(start: layer_calls.Call, end: layer_calls.Call) -> tf.Tensor:
  """Returns how much a layer's result changes with a mask that was lost, relative to its size."""
  given = dict.fromkeys(end.taking, start.masks[0])
  options = {**end.options, "training": False} if "training" in end.options else end.options
  without, masked = (
    tf.nest.flatten(end.layer(*end.args, **{**options, **more}))[0] for more in ({}, given)
  )
  size = tf.reduce_max(tf.abs(without)) + 1e-9
  return tf.reduce_max(tf.abs(masked - without)) / size


def not_finite(loss_fn: LossFn, batch: Any, task: Any) -> str:
  """Returns the line of the operation that makes a finite gradient one that is not; or ""."""
  places: list[str] = []

  def floats(tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    return [tensor for tensor in tensors if tensor.dtype.is_floating]

  def traced(given: Any) -> list[tf.Tensor]:
    total, breaks = loss_fn(given).total, []
    made = {op: source_lines.of_operation(op, task) for op in total.graph.get_operations()}
    outputs = floats(output for op, place in made.items() if place for output in op.outputs)
    passed = {id(o): g for o, g in zip(outputs, tf.gradients(total, outputs), strict=True)}
    for operation in (op for op, place in made.items() if place and floats(op.inputs)):
      ends = [each for each in operation.outputs if passed.get(id(each)) is not None]
      upstream, inputs = [passed[id(each)] for each in ends], floats(operation.inputs)
      own = tf.gradients(ends, inputs, upstream, stop_gradients=inputs) if ends else []
      if own := [each for each in own if each is not None]:
        places.append(made[operation])
        breaks.append(_all_finite(upstream) & ~_all_finite(own))
    return breaks

  found = tf.function(traced, autograph=False)(batch)
  return next((place for place, breaks in zip(places, found, strict=True) if breaks), "")


def _all_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
  return tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in tensors])


def cancels(loss_fn: LossFn, batch: Any, variables: Sequence[Variable]) -> list[bool]:
  """Returns for each variable whether the gradients of its uses add up to zero and are not zero.

  So it is in a loss of differences: the last bias is added to both. What each use passes back is
  multiplied by uneven numbers, element by element: what is zero stays zero, what cancels does not.
  """

  def traced(given: Any) -> list[tf.Tensor]:
    tf.config.run_functions_eagerly(True)  # a function inside is traced as a part of this one
    try:
      total = loss_fn(given).total
    finally:
      tf.config.run_functions_eagerly(False)
    captured = {id(outer): inner for outer, inner in total.graph.captures}
    handles = [captured.get(id(models.raw(v).handle)) for v in variables]
    known = {id(inner) for inner in captured.values() if inner.dtype == tf.resource}
    inputs = (op for op in total.graph.get_operations() if op.type == "Placeholder")
    fed = [op.outputs[0] for op in inputs if id(op.outputs[0]) not in known]
    of_batch = set[str]().union(*map(graphs.computed_from, fed))
    return [_weighted_gradient(total, handle, of_batch) for handle in handles]

  norms = tf.function(traced, autograph=False)(batch)
  return [bool(norm > 0) for norm in norms]


def _weighted_gradient(total: tf.Tensor, handle: Any, of_batch: set[str]) -> tf.Tensor:
  """Returns the norm of a variable's gradient if its uses by the batch count unevenly."""
  uses, seen = list[tf.Tensor](), set[str]()
  waiting = [handle] if handle is not None else []
  while waiting:
    for operation in waiting.pop().consumers():
      if operation.name not in seen and operation.outputs:
        seen.add(operation.name)
        (uses if operation.name in of_batch else waiting).extend(operation.outputs)
  uses = [each for each in uses if each.dtype.is_floating]
  passed = [(u, g) for u, g in zip(uses, tf.gradients(total, uses), strict=True) if g is not None]
  weighted = [g * _uneven(g, number) for number, (_, g) in enumerate(passed)]
  [gradient] = tf.gradients([use for use, _ in passed], [handle], weighted) if passed else [None]
  return tf.constant(0.0) if gradient is None else tf.norm(tf.cast(gradient, tf.float32))


def _uneven(like: tf.Tensor, number: int) -> tf.Tensor:
  """Returns a factor for each element; a random op would give all rows the same in a bench."""
  places = tf.cast(tf.range(tf.size(like)) + 7 * number, like.dtype)
  return tf.reshape(1.0 + 0.5 * tf.sin(places), tf.shape(like))


# ---- Graphs


def unused(graph: tf.Graph, task: Any) -> str:
  """Returns the first line with a custom gradient of the user's whose result is not used; or ""."""
  made = graph.get_operations()
  effects = [op for op in made if op.op_def.is_stateful and op.type != "ReadVariableOp"]
  used = behind([*graph.outputs, *(tensor for op in effects for tensor in op.inputs)])
  for operation in made:
    if _is_custom(operation) and operation.name not in used:
      files = [frame.filename for frame in operation.traceback]
      own = next((file for file in reversed(files) if not file.startswith(_TENSORFLOW)), "")
      if errors.is_the_users(own):
        return source_lines.of_operation(operation, task)
  return ""


def parts_by_name(model: Model) -> list[tuple[str, Any]]:
  """Returns (name, part) of each entry of a dict of models, or of the only model."""
  if isinstance(model, Mapping):
    return [(str(name), part) for name, part in model.items() if not models.is_variable(part)]
  return [(getattr(model, "name", "the model"), model)]


def behind(tensors: Iterable[tf.Tensor]) -> dict[str, tf.Operation]:
  """Returns the operations from which tensors are computed, by name."""
  found: dict[str, tf.Operation] = {}
  waiting = [tensor.op for tensor in tensors]
  while waiting:
    operation = waiting.pop()
    if operation.name not in found:
      found[operation.name] = operation
      waiting += [tensor.op for tensor in operation.inputs]
  return found


def _is_custom(operation: tf.Operation) -> bool:
  return operation.type == "IdentityN" and "_gradient_op_type" in operation.node_def.attr


def _is_stepwise(operation: tf.Operation) -> bool:
  to_whole = operation.type == "Cast" and not operation.outputs[0].dtype.is_floating
  return operation.type in STEPWISE or to_whole


def _is_meant(operation: tf.Operation) -> bool:
  """Whether a custom gradient is that of the identity, or of a function with a stepwise part."""
  result, *others = map(_unwrapped, operation.inputs)
  ends, waiting, seen = {id(each) for each in others}, [result], set[str]()
  if id(result) in ends:
    return True
  while waiting:
    tensor = waiting.pop()
    if id(_unwrapped(tensor)) not in ends and tensor.op.name not in seen:
      seen.add(tensor.op.name)
      if _is_stepwise(tensor.op):
        return True
      waiting += list(tensor.op.inputs)
  return False


def _unwrapped(tensor: tf.Tensor, of: Sequence[str] = ("Identity",)) -> tf.Tensor:
  while tensor.op.type in of:
    tensor = tensor.op.inputs[0]
  return tensor
