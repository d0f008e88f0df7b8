"""A task of which one worker hangs, as the environment's HANG says: see hang_trials.py."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

import loopwright
from loopwright import Action, ArraySource, Batch, Loss, Task

KIND = os.environ.get("HANG", "")
WORKER = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
HANGS = int(os.environ.get("HANG_WORKER", "1"))
"""The worker whose input, forward pass or evaluation hangs."""
FIRST_STEP, EXAMPLES = 40, 64
BATCHES_BEFORE = FIRST_STEP + 5
_taken = threading.Lock()
_taken.acquire()


def deadlock() -> None:
  """Waits for a lock that nobody gives back."""
  _taken.acquire()


def sleep() -> None:
  """Sleeps for an hour."""
  time.sleep(3600)


def keep_the_lock() -> None:
  """Sleeps for an hour in C, with Python's lock."""
  ctypes.PyDLL(None).sleep(3600)


class Counted:
  """Calls a function in the N-th call on one worker, as a host function of TensorFlow."""

  def __init__(self, kinds: dict[str, Any], *, calls: int) -> None:
    """Counts from 0."""
    self._hang = kinds.get(KIND) if WORKER == HANGS else None
    self._left = calls

  def __call__(self, value: tf.Tensor) -> tf.Tensor:
    """Returns the value."""
    if self._hang is None:
      return value
    return tf.ensure_shape(tf.numpy_function(self._count, [value], value.dtype), value.shape)

  def _count(self, value: np.ndarray) -> np.ndarray:
    self._left -= 1
    if not self._left:
      self._hang()
    return value


@loopwright.register
class Hanging(Task):
  """A linear regression whose input, forward pass or evaluation can hang."""

  def build_model(self) -> keras.Model:
    """Makes one dense layer."""
    return keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])

  def source(self, split: str) -> ArraySource:
    """Returns the same rows for both splits."""
    x = np.random.default_rng(0).normal(size=[EXAMPLES, 2]).astype(np.float32)
    return ArraySource(features={"x": x, "y": x.sum(1)})

  def preprocess(self, batch: Batch, training: bool) -> Batch:
    """Hangs in "input", "lock held", "file" or "evaluation"."""
    kinds = {"input": deadlock, "lock held": keep_the_lock} if training else {"evaluation": sleep}
    wait = Counted(kinds, calls=BATCHES_BEFORE if training else 5)
    batch = {**batch, "x": wait(batch["x"])}
    if training and KIND == "file" and WORKER == 1:
      path = tf.numpy_function(self._path, [], tf.string)
      length = tf.cast(tf.strings.length(tf.io.read_file(path)), tf.float32)
      batch["x"] += 0.0 * length
    return batch

  def _path(self) -> bytes:
    self._read = getattr(self, "_read", 0) + 1
    path = os.environ["HANG_FIFO"] if self._read == BATCHES_BEFORE else os.devnull
    return path.encode()

  def forward(self, batch: Batch, training: bool) -> tf.Tensor:
    """Hangs in "host function"."""
    wait = Counted({"host function": sleep} if training else {}, calls=BATCHES_BEFORE)
    return self.model(wait(batch["x"]))[:, 0]

  def loss(self, outputs: tf.Tensor, batch: Batch) -> Loss:
    """Returns the square."""
    return Loss.from_examples((outputs - batch["y"]) ** 2, batch["weight"])


@loopwright.register
class Hangs(Action):
  """Hangs after a loop, on the worker that the kind names."""

  on = "train"

  def __call__(self, output: Any) -> None:
    """Does it once."""
    if self.run.step != FIRST_STEP:
      return
    if KIND == "action" and WORKER == 1:
      deadlock()
    if KIND == "skipped rendezvous" and WORKER == 0:
      runtime = context.context()  # a skipped all-reduce is an error of TensorFlow's, no hang
      runtime.get_config_key_value("what worker 1 never tells", timeout_in_ms=3_600_000)
    if KIND in (f"stopped {WORKER}",):
      os.kill(os.getpid(), signal.SIGSTOP)
    if KIND == "disk" and WORKER == 0:
      tf.train.Checkpoint.write = lambda *_: open(os.environ["HANG_FIFO"], "wb").close()
