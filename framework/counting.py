"""On GPUs, what depends on the number of a step is computed by the host, once a step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import tensorflow as tf

if TYPE_CHECKING:
  from framework.trainer import Trainer


@contextlib.contextmanager
def counted(trainer: Trainer, before: tf.Tensor, done: tf.Tensor) -> Iterator[None]:
  """Step `before + done` of a trainer is traced inside (cross-replica)."""
  if not trainer.placement.on_gpus:
    yield
    return
  usual = trainer.parts
  with contextlib.ExitStack() as stack:
    with trainer.placement.on_host():
      number = before + tf.cast(done, tf.int64)
      for optimizer in usual.optimizers.values():
        stack.enter_context(optimizer.at_step(number))
    trainer.parts = dataclasses.replace(usual, known_step=number)
    try:
      yield
    finally:
      trainer.parts = usual
