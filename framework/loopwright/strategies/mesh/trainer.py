"""Training a model that is split over a mesh; see loopwright/strategies/mesh/variables.py.

The host runs the loop, one compiled step after the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, cast

import tensorflow as tf

from loopwright.graphs.aliases import Batch, PerReplica
from loopwright.graphs.autograph import compiled
from loopwright.strategies.mesh import updates
from loopwright.trainer import Trainer


class ModelParallelTrainer(Trainer):
  """`Trainer` under `ModelParallelStrategy`; its options and methods are those of `Trainer`."""

  _input_wait_s: tf.Tensor | None = None

  def __init__(self, **options: Any) -> None:
    """Makes model, optimizers and counters on the mesh (host); see `Trainer`.

    Raises:
      ConfigError: an option that model parallelism does not have, or a layout that fits no
        variable.
    """
    super().__init__(**options)
    for name, optimizer in self.parts.optimizers.items():
      updates.prove(name, optimizer.optimizer, optimizer.variables)

  def next_batch(self, iterator: Iterator[PerReplica]) -> tuple[PerReplica, tf.Tensor]:
    """Returns the batch that the host has read, and how long it took (cross-replica)."""
    waited_s = self._input_wait_s
    return next(iterator), tf.constant(0.0) if waited_s is None else waited_s

  def _trace(self) -> None:
    """The first step is traced with its batch."""

  def _run_loop(self, num_steps: tf.Tensor) -> None:
    iterator = cast(Iterator[PerReplica], self._iterator)
    for observer in self.parts.observers:
      observer.loop_starts()
    for _ in range(int(num_steps)):
      started = time.perf_counter()
      batch = next(iterator)
      waited_s = tf.constant(time.perf_counter() - started, tf.float32)
      stands = self._compiled_loop(batch, waited_s)
      if self.parts.observers and not bool(stands):
        return  # an observer has undone the step

  def _compiled(self) -> Any:
    def step(batch: Batch, input_wait_s: tf.Tensor) -> tf.Tensor:
      self._input_wait_s = input_wait_s
      stands = self.train_step(iter([batch]))
      self._input_wait_s = None
      return stands

    return compiled(step)
