"""Parts of a traced step as programs of XLA, and what XLA cannot compile, found in their traces.

A part is traced once. If XLA has each of its operations, it becomes one program, with the parts
inside it; else it runs as TensorFlow does, and the parts inside it are programs of their own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import concrete_function
from tensorflow.python.framework import kernels

from loopwright import errors
from loopwright.graphs import operations as graphs
from loopwright.host.replacing import replaced

T = TypeVar("T")
DYNAMIC = ("Where", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2")
"""Operations to which XLA gives the largest possible shape; some devices reject them."""
_STATEFUL_DRAWS = ("RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal",
  "RandomShuffle", "Multinomial")  # fmt: skip
"""Operations that XLA has, but with other numbers in each process, whatever the seed."""
AS_ONE = "as one program"
_numbers = itertools.count()
_LANES = 128
_here = threading.local()
Instead: TypeAlias = "Callable[[], Mapping[int, tf.Tensor]] | None"
_ARGUMENTS = ("Placeholder", "_Arg", "_Retval", "NoOp")


def program(function: Callable[[], T]) -> Callable[[], T]:
  """Returns a function without arguments as one program, whatever it does (under trace)."""
  return _traced(function, jit_compile=True)


def if_possible(
  function: Callable[[], T], *, kind: str
) -> tuple[Callable[[Instead], Callable[[], T]], str]:
  """Returns what makes programs of a function without arguments, and "" or why not (under trace).

  It takes what returns, in a program, id of a tensor that it uses -> what it takes instead. Without
  XLA for that `kind` of device, "GPU" or "CPU", the function is called as it is, traced once.
  """
  with _tracing_for(kind):
    traced = _traced(function)
  if why := obstacle(traced.graph, kind=kind):
    return lambda _: traced, why

  def made(instead: Instead) -> Callable[[], T]:
    def call() -> T:
      others = instead() if instead else {}
      return traced._call_flat([], [others.get(id(t), t) for t in traced.captured_inputs])

    return program(call)

  return made, ""


@contextlib.contextmanager
def _tracing_for(kind: str) -> Iterator[None]:
  before, _here.kind = getattr(_here, "kind", ""), kind
  try:
    yield
  finally:
    _here.kind = before


def traced_for() -> str:
  """Returns "CPU" or "GPU" if what is traced here may become a program there, else ""."""
  return getattr(_here, "kind", "")


def sum_of_squares(tensor: tf.Tensor) -> tf.Tensor:
  """Returns the sum of a tensor's squares, as a product: XLA's own sum on CPUs is not vectorised.

  100,000 elements take 6 us in place of 130.
  """
  flat = tf.reshape(tensor, [-1])
  rows = flat.shape.num_elements() // _LANES
  even = tf.reshape(flat[: rows * _LANES], [rows, _LANES])
  ones = tf.ones([_LANES, 1], tensor.dtype)
  return tf.reduce_sum(tf.square(even) @ ones) + tf.reduce_sum(tf.square(flat[rows * _LANES :]))


def _traced(function: Callable[[], T], **options: Any) -> Any:
  """Returns a concrete function whose name does not depend on what was traced before it.

  A kept program is found by names too, and a run that goes on has traced a restore.
  """
  with replaced(concrete_function, _inference_name=lambda name: f"{name}_part_{next(_numbers)}"):
    return tf.function(function, autograph=False, **options).get_concrete_function()


def obstacle(graph: tf.Graph, *, kind: str) -> str:
  """Returns what of a traced function XLA cannot compile, with its place in the user's code.

  Returns:
    Such as "PyFunc (mine.py:31, in loss)"; "" if there is nothing.
  """
  for operation in graphs.operations(graph):
    if operation.type in (*DYNAMIC, *_STATEFUL_DRAWS) or lacks_kernel(operation, kind=kind):
      return f"{operation.type}{place(operation)}"
  away = {device for device in _devices(graph) if device != kind}
  return f"a variable on a {away.pop()}" if away else ""


def lacks_kernel(operation: tf.Operation, *, kind: str = "CPU") -> bool:
  """Whether XLA cannot compile an operation, with the types that it has."""
  if operation.type in _ARGUMENTS:
    return False
  return not any(_fits(each, operation) for each in _kernels(operation.type, f"XLA_{kind}_JIT"))


@functools.cache
def _kernels(operation: str, device: str) -> list[Any]:
  """Returns the constraints of the types of each kernel that XLA has for an operation."""
  if operation != "Const" and not _kernels("Const", device):  # they come with the first function
    with tf.init_scope():
      tf.function(lambda: tf.constant(0))()
    _kernels.cache_clear()
  found = kernels.get_registered_kernels_for_op(operation).kernel
  return [each.constraint for each in found if each.device_type == device]


def _devices(graph: Any) -> set[str]:
  """Returns the kinds of devices of the variables that a traced function uses."""
  handles = [outside for outside, _ in graph.captures if outside.dtype == tf.resource]
  found = set()
  for handle in handles:
    while tf.is_symbolic_tensor(handle):
      around = {id(inside): outside for outside, inside in getattr(handle.graph, "captures", ())}
      if (outside := around.get(id(handle))) is None:
        break  # an argument
      handle = outside
    else:
      found.add(tf.DeviceSpec.from_string(handle.device).device_type)
  return found


def _fits(constraints: Any, operation: tf.Operation) -> bool:
  """Whether the types of an operation are those that a kernel is for."""
  for each in constraints:
    given = operation.get_attr(each.name)
    of = given if isinstance(given, list) else [given]
    allowed = each.allowed_values.list.type
    if allowed and any(isinstance(t, tf.DType) and t.as_datatype_enum not in allowed for t in of):
      return False
  return True


def programs(graph: tf.Graph) -> Iterator[Any]:
  """Yields the graphs of the functions that XLA must compile, from a traced function."""
  for operation in graphs.operations(graph):
    if operation.node_def.attr["_XlaMustCompile"].b:
      for name in graphs.function_names(operation):
        if inner := graphs.function_of(operation.graph, name):
          yield inner


def refuses(error: Exception) -> bool:
  """Whether a program could not be made, so that nothing of it has run: see `obstacle`."""
  signs = ("tf2xla conversion failed", "XLA compilation requires", "xla_compile_cache__")
  return any(sign in str(error) for sign in signs)


def told(parts: Mapping[str, str]) -> str:
  """Returns a text of what is compiled; `parts` are what was to be, and why each is not, or ""."""
  for part in parts:
    if part.endswith(" steps") and not parts[part]:
      return f"{part} {AS_ONE}"
  if parts.get("step") == "":
    return f"the step {AS_ONE}"
  done = ", ".join(f"the {part}" for part, why in parts.items() if not why) or "nothing"
  whys = {why: part for part, why in [*parts.items()][::-1] if why}  # the innermost of each
  return done + "".join(f"; not the {part}: {why}" for why, part in whys.items())


def place(operation: tf.Operation) -> str:
  """Returns where the user's code made an operation, such as " (mine.py:31, in loss)"; or ""."""
  for frame in reversed(operation.traceback or ()):
    if errors.is_the_users(frame.filename):
      function = f", in {frame.name}" if frame.name.isidentifier() else ""  # a lambda has no name
      return f" ({Path(frame.filename).name}:{frame.lineno}{function})"
  return ""
