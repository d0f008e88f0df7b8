"""The ledger's pen: which examples each step consumed, hashed on the device, written once a loop.

    recorder = Recorder(model_dir="runs/digits", strategy=strategy)
    trainer = Trainer(..., recorder=recorder)      # run.ledger = True does both

A step's hash is the sum, modulo 2**64, of one 64-bit hash an example. So it depends on the set of
examples and not on their order, and the sum over replicas and workers is the whole batch's. Beside
it stands how many they were; padding counts in neither. framework/ledger.py has the format of the
file, and reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from framework import cluster, strategies
from framework.errors import ConfigError
from framework.ledger import PURPOSE, Start, file_name, steps_line
from framework.ordering import hashed
from framework.sources import Source, StreamSource
from framework.tracing import as_written


class Recorder:
  """Appends what this worker's replicas consume to <model_dir>/ledger-<worker>.jsonl."""

  def __init__(self, *, model_dir: str, strategy: tf.distribute.Strategy) -> None:
    """Makes two small variables in the host's memory; writes nothing yet.

    Args:
      model_dir: the run folder, shared by all workers.
      strategy: what is trained under.

    Raises:
      ConfigError: the training is asynchronous.
    """
    if strategies.is_asynchronous(strategy):
      raise ConfigError(
        "run.ledger is True, but under parameter_server no worker knows which steps its batches "
        "became, and a killed one takes a batch with it; leave run.ledger out."
      )
    self._cluster = cluster.of(strategy)
    self._path = os.path.join(model_dir, file_name(self._cluster.index))
    self._start: Start | None = None
    self._began = 0
    with tf.device("CPU:0"):
      self._before = tf.Variable(0, dtype=tf.int64, trainable=False)
      self._table = tf.Variable(
        np.zeros([0, 2], np.int64), shape=[None, 2], dtype=tf.int64, trainable=False
      )

  def reads(
    self,
    source: Source | StreamSource,
    *,
    position: int,
    seed: int,
    shuffle: bool,
    global_batch_size: int,
    rows: range | None,
  ) -> None:
    """Notes what is read from now on: a new start in the ledger (host); see `train_dataset`."""
    rows = rows or range(global_batch_size)
    self._start = Start(
      worker=self._cluster.index,
      workers=self._cluster.size,
      position=position,
      global_batch_size=global_batch_size,
      rows=(rows.start, rows.stop),
      num_examples=source.num_examples,
      seed=seed,
      shuffle=shuffle and isinstance(source, Source),
    )

  def begin_loop(self, *, after_step: int, steps: int) -> None:
    """Makes room for a loop of `steps` steps (host)."""
    self._began = after_step
    self._before.assign(after_step)
    self._table.assign(np.zeros([steps, 2], np.int64))

  @as_written
  def record(self, example_ids: Sequence[tf.Tensor], step: tf.Tensor) -> None:
    """Records one step's batch (cross-replica).

    Args:
      example_ids: int64 [rows] for each replica of this worker; -1 is padding.
      step: int64 scalar, the steps completed before this one.
    """
    sums = [_sums(ids) for ids in example_ids]
    with tf.device("CPU:0"):
      total = tf.add_n(sums) if len(sums) > 1 else sums[0]
      tf.raw_ops.ResourceScatterUpdate(
        resource=self._table.handle, indices=step - self._before, updates=total
      )

  def end_loop(self, *, steps: int) -> None:
    """Appends the loop, of which `steps` stand, to the file, which outlives the process (host)."""
    if steps == 0:
      return
    hashes, counts = self._table.numpy()[:steps].astype(np.uint64).T
    lines = [steps_line(self._began + 1, counts.tolist(), hashes.tolist())]
    if self._start is not None:
      start, self._start = self._start, None
      lines.insert(0, json.dumps({"after_step": self._began, **start._asdict()}))
    with tf.io.gfile.GFile(self._path, "a") as file:
      # A kill may have torn the last line: a start begins a line of its own in any case.
      file.write("".join(["\n" if len(lines) > 1 else "", *(f"{line}\n" for line in lines)]))


@as_written
def _sums(ids: tf.Tensor) -> tf.Tensor:
  """Returns int64 [2], the sum of the hashes modulo 2**64 and the count, of the ids from 0 on."""
  hashes = tf.bitcast(hashed(ids, 0, PURPOSE), tf.int64)
  counted = tf.stack([hashes, tf.ones_like(ids)])
  return tf.reduce_sum(counted * tf.cast(ids >= 0, tf.int64), axis=1)
