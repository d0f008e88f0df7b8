"""Several steps as one program of XLA: it gets their batches stacked, and loops over them inside.

Between two operations of TensorFlow's executor lies more time than a small operation takes, and so
does at the edge of each program. One program of 16 steps has that edge once in 16 steps; weights,
slots, sums, counters and random keys stay inside. The number of its steps is an argument, so the
rest of a loop is the same program, and a step computes the same wherever a loop begins or ends.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from loopwright.distribution.placement import Placement
from loopwright.graphs import operations as graphs
from loopwright.graphs import xla
from loopwright.graphs.aliases import Batch, PerReplica

if TYPE_CHECKING:
  from loopwright.engine import gpu_pipeline
  from loopwright.engine.step_parts import InputWait, StepParts
  from loopwright.trainer import Trainer

STEPS, BYTES = 16, 2**23
"""The most steps of a program by default, and the most memory for their batches."""

LARGE, MANY = 2**24, 100
"""Products of numbers in a product of matrices that oneDNN computes faster than XLA; how many
operations are worth a program."""
TRANSPOSED, ROWS = 2**21, 512
"""So many products of numbers, in sums of so many rows, suffice if the left side is transposed, as
in the gradient of a layer's weights."""
_SLOWER = ("Conv", "DepthwiseConv", "MaxPool", "AvgPool")
_UNCHECKED = ("Assert", "ResourceGather", "Gather")
"""Of which XLA ignores what TensorFlow says on a CPU: that a condition is false, or an index not in
the tensor, unless it is made so that it always is."""
_ALWAYS_INSIDE = ("Const", "FloorMod")
_OF_THE_LOOP = ("IteratorGetNext", "IteratorGetNextSync", "Timestamp")
"""Which are not in the program."""


class Given(NamedTuple):
  """What a step takes in place of its iterator.

  Attributes:
    batch: its rows of the stack.
    waited_s: its share of the wait for the stack, float32 seconds.
  """

  batch: Batch
  waited_s: tf.Tensor


class Several:
  """The steps of one loop, so many at a time (cross-replica, under trace)."""

  def __init__(self, iterator: Any, parts: StepParts, wait: InputWait, place: Placement) -> None:
    """Reads nothing yet."""
    self._iterator, self._parts, self._wait, self._place = iterator, parts, wait, place
    self._at_once = int(parts.steps_per_program)

  def run(self, step: Callable[[Given], tf.Tensor], steps: tf.Tensor) -> None:
    """Calls `step` so many times; if XLA cannot compile it, `left_out` has why."""
    if self._place.on_gpus:
      self._run_on_gpu(step, steps)
      return

    def body(done: tf.Tensor) -> tuple[tf.Tensor]:
      count = tf.minimum(steps - done, self._at_once)
      stack, waited_s = self._wait.measured(lambda: self._read(count))
      programs = self._programs(step, stack, count, waited_s / tf.cast(count, tf.float32))
      with tf.control_dependencies([programs(None)()]):
        return (done + count,)

    tf.while_loop(lambda done: done < steps, body, (tf.constant(0),))

  def _run_on_gpu(self, step: Callable[[Given], tf.Tensor], steps: tf.Tensor) -> None:
    """Does it with stacks sent ahead, and full programs of a constant number of steps.

    Else the host would read in each step whether there is one more.
    """

    @contextlib.contextmanager
    def words(done: tf.Tensor) -> Iterator[list[tf.Tensor]]:
      with self._place.on_host():
        yield [tf.minimum(steps - done, self._at_once)]

    def program(given: gpu_pipeline.Given, words: list[tf.Tensor]) -> tf.Tensor:
      [count] = words

      def full() -> dict[int, tf.Tensor]:
        return {**given.instead(), id(count): tf.constant(self._at_once)}

      programs = self._programs(step, given.batch, count, tf.constant(0.0))

      with self._place.on_host():
        is_full = count == self._at_once
      with tf.device(self._place.devices[0]):
        return tf.cond(is_full, programs(full), programs(given.instead))

    def read(words: list[tf.Tensor]) -> Batch:
      return self._wait.measured(lambda: self._read(words[0]))[0]

    from loopwright.engine import gpu_pipeline

    specs = self._iterator.element_spec
    gpu_pipeline.Ahead(read, specs, self._place, self._at_once).run(program, words, steps)

  def _programs(
    self, step: Callable[[Given], tf.Tensor], stack: Batch, count: tf.Tensor, waited_s: tf.Tensor
  ) -> Callable[[xla.Instead], Callable[[], tf.Tensor]]:
    """Returns what makes programs of `count` steps on a stack; each returns True."""

    def loop() -> tf.Tensor:
      def one(number: tf.Tensor) -> tuple[tf.Tensor]:
        with tf.name_scope(""):
          step(Given({name: value[number] for name, value in stack.items()}, waited_s))
        return (number + 1,)

      return tf.while_loop(lambda number: number < count, one, (tf.constant(0),))[0] > 0

    made, why = xla.if_possible(loop, kind=self._place.device_kind)
    self._parts.left_out[f"{self._at_once} steps"] = why
    return made

  def _read(self, count: tf.Tensor) -> Batch:
    """Returns the next `count` batches, stacked."""
    specs = self._iterator.element_spec

    def all_of_them() -> list[tf.Tensor]:
      batches = [self._place.read(self._iterator) for _ in range(self._at_once)]
      return [tf.stack([batch[name] for batch in batches]) for name in specs]

    def some_of_them() -> list[tf.Tensor]:
      def one(number: tf.Tensor, *arrays: tf.TensorArray) -> Any:
        batch = self._place.read(self._iterator)
        return number + 1, *(a.write(number, batch[n]) for n, a in zip(specs, arrays, strict=True))

      empty = [
        tf.TensorArray(spec.dtype, self._at_once, element_shape=spec.shape)
        for spec in specs.values()
      ]
      _, *arrays = tf.while_loop(lambda number, *_: number < count, one, (tf.constant(0), *empty))
      return [array.stack() for array in arrays]

    stacks = tf.cond(count == self._at_once, all_of_them, some_of_them)
    return dict(zip(specs, stacks, strict=True))


def of(
  iterator: Iterator[PerReplica], parts: StepParts, wait: InputWait, place: Placement
) -> Several | None:
  """Returns what runs a loop; None where its steps run one by one, and `left_out` has why."""
  why = _why_not_here(parts, place) or _why_not_these(iterator)
  parts.left_out[f"{parts.steps_per_program} steps"] = why
  return None if why else Several(iterator, parts, wait, place)


def _why_not_here(parts: StepParts, place: Placement) -> str:
  """Returns why several steps cannot be one program; "" if they can, as far as is known."""
  alone = place.strategy.num_replicas_in_sync == 1 and place.cluster.size == 1
  if not (alone and place.loops_evaluation):
    return "only those of one replica can be"
  seen_by = sorted({type(each).__name__ for each in parts.observers})
  return f"{', '.join(seen_by)} sees each step" if seen_by else ""


def _why_not_these(iterator: Any) -> str:
  """Returns why batches cannot be stacked; "" if they can."""
  specs = getattr(iterator, "element_spec", None)
  if not (isinstance(iterator, tf.data.Iterator) and isinstance(specs, dict)):
    return "a batch is no dict of tensors"
  for name, spec in specs.items():
    static = isinstance(spec, tf.TensorSpec) and spec.shape.is_fully_defined()
    if not (static and (spec.dtype.is_bool or spec.dtype.is_integer or spec.dtype.is_floating)):
      return f"batch[{name!r}] is {spec}, not numbers of one shape"
  return ""


def chosen(trainer: Trainer, graph: tf.Graph, iterator: Any, per_loop: int) -> int | None:
  """Returns how many steps are one program if nobody says it; None leaves them as they are (host).

  It depends on the graph alone, so equal runs compute the same, and on what cannot change results.
  On GPUs nobody has measured it.

  Args:
    trainer: with its loop traced.
    graph: of that loop.
    iterator: of its batches.
    per_loop: the most steps of a loop.
  """
  place = trainer.placement
  if place.on_gpus or _why_not_here(trainer.parts, place) or not suits(graph):
    return None
  specs = tf.nest.flatten(getattr(iterator, "element_spec", ()))
  sizes = [math.prod(spec.shape) * spec.dtype.size for spec in specs if hasattr(spec, "shape")]
  steps = min(STEPS, per_loop, BYTES // max(sum(sizes), 1))
  return steps if steps > 1 else None


def suits(graph: tf.Graph) -> bool:
  """Whether a traced loop has many small operations, all of which XLA has and does as well."""
  found = [each for each in graphs.operations(graph) if each.type not in _OF_THE_LOOP]
  return len(found) >= MANY and not any(map(_is_better_without, found))


def _is_better_without(operation: tf.Operation) -> bool:
  """Whether an operation is missing in XLA, is slower there, or is not checked."""
  if operation.type.startswith(_SLOWER) or products(operation) > LARGE or _sums_rows(operation):
    return True
  if operation.type.startswith(_UNCHECKED):
    return len(operation.inputs) < 2 or operation.inputs[1].op.type not in _ALWAYS_INSIDE
  return xla.lacks_kernel(operation)


def _sums_rows(operation: tf.Operation) -> bool:
  transposed = any(operation.node_def.attr[name].b for name in ("transpose_a", "adj_x"))
  if not transposed or products(operation) < TRANSPOSED:
    return False
  return bool(operation.inputs[0].shape[-2] >= ROWS)  # known, else there would be infinitely many


def products(operation: tf.Operation) -> float:
  """Returns how many products of numbers an operation makes; 0 if it is no product of matrices."""
  if not operation.type.startswith(("MatMul", "BatchMatMul", "Einsum")):
    return 0
  shapes = [each.shape for each in (*operation.inputs, *operation.outputs)]
  if not all(shape.is_fully_defined() for shape in shapes):
    return math.inf
  sizes = [shape.num_elements() for shape in shapes]
  return math.sqrt(math.prod(sizes)) if len(sizes) == 3 else max(sizes)
