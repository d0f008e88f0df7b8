"""On a GPU, all that a step needs of the host is there before the step.

TensorFlow copies to a GPU when the GPU has ended all that it was asked for before, and the host
asks for nothing that needs the copy until then; it waits likewise at each edge of a graph from a
GPU to the host. In a usual loop both are in the way of each step, which so begins on an idle GPU.
Here only reads wait for reads, and steps for steps, so the host is some steps ahead of the GPU.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import tensorflow as tf

from loopwright.distribution.placement import Placement
from loopwright.graphs.aliases import Batch, PerReplica

if TYPE_CHECKING:
  from loopwright.engine.step_parts import InputWait, StepParts

STEPS, BYTES = 16, 2**25
"""The most steps that the host works on at once, and the most memory of the GPU for their batches:
the GPU is idle for a moment once in so many steps."""
_WORDS = {tf.int32: 1, tf.int64: 2, tf.bool: 1}
"""What the host computes with, in words of 32 bits: all of a step's are one copy."""

Words: TypeAlias = list[tf.Tensor]


class Given(NamedTuple):
  """What a step takes in place of its iterator.

  Attributes:
    batch: floats on the GPU, integers on the host.
    instead: returns id of a tensor of the host -> the same on the GPU, in a program of XLA.
  """

  batch: Batch
  instead: Callable[[], Mapping[int, tf.Tensor]]


class Ahead:
  """The steps of one loop on one GPU (cross-replica, under trace)."""

  def __init__(
    self, read: Callable[[Words], Batch], specs: Mapping[str, Any], place: Placement, steps: int = 1
  ) -> None:
    """Reads nothing yet.

    Args:
      read: (words) -> a batch, or so many stacked (host).
      specs: of a batch.
      place: of the GPU.
      steps: those of a turn.
    """
    self._read, self._place, self._steps = read, place, steps
    batch = sum(math.prod(spec.shape) * spec.dtype.size for spec in specs.values())
    self._at_once = max(2, min(STEPS, BYTES // max(batch * steps, 1)))

  def run_each(
    self,
    step: Callable[[Given, tf.Tensor], tf.Tensor],
    number_of: Callable[[tf.Tensor], contextlib.AbstractContextManager[tf.Tensor]],
    steps: tf.Tensor,
  ) -> None:
    """Calls `step(given, number)` so many times, as `run` does; `number_of`: (steps done)."""

    @contextlib.contextmanager
    def words(done: tf.Tensor) -> Iterator[Words]:
      with number_of(done) as number:
        yield [number, done]

    self.run(lambda given, words: step(given, words[0]), words, steps)

  def run(
    self,
    step: Callable[[Given, Words], tf.Tensor],
    words: Callable[[tf.Tensor], contextlib.AbstractContextManager[Words]],
    steps: tf.Tensor,
  ) -> None:
    """Calls `step(given, words)` for so many; its bool is there once it is asked for.

    `words`: (steps done) -> what the next ones need beside a batch, and a context of their trace.
    """
    gpu = self._place.devices[0]

    def body(done: tf.Tensor, turn: tf.Tensor, last: tf.Tensor) -> tuple[tf.Tensor, ...]:
      _edges(True)  # in functions inside it
      with tf.name_scope(""), words(done) as needed:
        given, turn = self._given(needed, turn)
        with tf.control_dependencies([last]):
          last = step(given, needed)
      with tf.device(gpu):  # where an int32 is on the host
        return done + self._steps, turn, last

    with tf.device(gpu):
      end, start = tf.identity(steps), (tf.constant(0), tf.constant(0), tf.constant(True))
    _edges(False)
    tf.while_loop(lambda done, *_: done < end, body, start, parallel_iterations=self._at_once)
    _edges(True)

  def _given(self, needed: Words, turn: tf.Tensor) -> tuple[Given, tf.Tensor]:
    """Reads once `turn` is there, and sends it; returns also the turn of the next read."""

    @tf.function(autograph=False)
    def read(turn: tf.Tensor) -> tuple[Mapping[str, tf.Tensor], tf.Tensor]:
      with tf.control_dependencies([turn]):
        return self._read(needed), turn

    with self._place.on_host():
      batch, turn = read(tf.bitcast(turn, tf.uint32))  # which is nowhere but on the host
      turn = tf.bitcast(turn, tf.int32)
      integers = {n: value for n, value in batch.items() if value.dtype in _WORDS}
      words = [*needed, *integers.values()]
      specs = [tf.TensorSpec(value.shape, value.dtype) for value in words]
      parts = [tf.reshape(_words(value), [-1]) for value in words]
      floats = tf.bitcast(tf.concat(parts, 0), tf.float32)  # an int32 would stay on the host
    others = {n: value for n, value in batch.items() if n not in integers}
    sent = self._place.sent(others, self._place.devices[0])
    with tf.device(self._place.devices[0]):
      floats, *there = (tf.identity(each) for each in (floats, *sent.values()))

    def instead() -> dict[int, tf.Tensor]:
      sizes = [_WORDS[spec.dtype] * math.prod(spec.shape) for spec in specs]
      found = tf.split(tf.bitcast(floats, tf.int32), sizes)
      same = [_from_words(part, spec) for part, spec in zip(found, specs, strict=True)]
      return dict(zip(map(id, words), same, strict=True))

    return Given({**integers, **dict(zip(sent, there, strict=True))}, instead), turn


def of(
  iterator: Iterator[PerReplica], parts: StepParts, wait: InputWait, place: Placement
) -> Ahead | None:
  """Returns what runs a loop; None where each step reads its batch when the last one has ended."""
  if not (place.on_gpus and place.strategy.num_replicas_in_sync == 1 and parts.jit_compile):
    return None
  if parts.observers or tf.executing_eagerly() or not isinstance(iterator, tf.data.Iterator):
    return None
  specs = iterator.element_spec
  fits = isinstance(specs, dict) and all(map(_fits, specs.values()))
  return Ahead(lambda _: wait.read(iterator)[0], specs, place) if fits else None


def _edges(added: bool) -> None:
  """Whether TensorFlow adds edges of its own to functions that are traced in this graph."""
  tf.compat.v1.get_default_graph()._add_control_dependencies = added  # noqa: SLF001


def _fits(spec: Any) -> bool:
  if not (isinstance(spec, tf.TensorSpec) and spec.shape.is_fully_defined()):
    return False
  return spec.dtype in _WORDS or spec.dtype.is_floating or spec.dtype.is_integer


def _words(value: tf.Tensor) -> tf.Tensor:
  return tf.cast(value, tf.int32) if value.dtype == tf.bool else tf.bitcast(value, tf.int32)


def _from_words(words: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
  words = tf.reshape(words, [*spec.shape, *([2] if spec.dtype == tf.int64 else [])])
  return tf.cast(words, tf.bool) if spec.dtype == tf.bool else tf.bitcast(words, spec.dtype)
