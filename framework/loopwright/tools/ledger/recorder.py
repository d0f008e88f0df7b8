"""Records which examples each step consumed; one write per training loop.

docs/ledger.md describes what is recorded; proof.py defines and reads the format of
the file.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.distribution import placement
from loopwright.graphs.randomness import hashed
from loopwright.inputs.buckets import Buckets, Schedule, rows_of
from loopwright.inputs.mixture import Mixture
from loopwright.inputs.ordering import seed_of_part
from loopwright.inputs.parts import Part, Sources
from loopwright.inputs.plan import padded_batch_size
from loopwright.inputs.sources import Source, main_source
from loopwright.observers import Observer, Reading
from loopwright.run_folder import layout
from loopwright.tools.ledger.proof import PURPOSE, Start, start_line, steps_line


class Recorder(Observer):
  """Appends what this worker's replicas consume to <model_dir>/ledger-<worker>.jsonl."""

  def __init__(self, *, model_dir: str, strategy: tf.distribute.Strategy) -> None:
    """Makes a variable in host memory; writes nothing yet.

    Args:
      model_dir: the run folder, shared by all workers.
      strategy: the strategy of the training.

    Raises:
      ConfigError: training is asynchronous, or on a mesh.
    """
    place = placement.of(strategy)
    place.require("run.ledger")
    self._strategy, self._cluster = strategy, place.cluster
    self._path = os.path.join(model_dir, layout.ledger(self._cluster.index))
    self._began = 0
    self._read: dict[str, _Part] = {}
    self._schedule: Schedule | None = None
    self._names: list[str] = []
    with tf.device("CPU:0"):
      self._before = tf.Variable(0, dtype=tf.int64, trainable=False)

  def reads(self, what: Reading) -> None:
    """Notes what is read from now on, as a new start in the ledger (host)."""
    source = what.source
    if isinstance(source, Buckets):
      self._reads_buckets(source, what)
      return
    rows = what.rows or range(what.global_batch_size)
    given = {"": Part(source=main_source(source))}
    if isinstance(source, Sources):
      given |= source.parts
    replicas = self._strategy.num_replicas_in_sync
    for name, part in given.items():
      if name not in self._read:
        self._read[name] = _Part(replicas // self._cluster.size)
      self._read[name].ids_of_replica = part.ratio * what.padded_batch_size // replicas
      self._read[name].start = Start(
        worker=self._cluster.index,
        workers=self._cluster.size,
        position=what.position * part.ratio,
        global_batch_size=what.global_batch_size * part.ratio,
        rows=(rows.start * part.ratio, rows.stop * part.ratio),
        num_examples=part.source.num_examples,
        seed=seed_of_part(what.seed, name) if name else what.seed,
        shuffle=what.shuffle and isinstance(part.source, Source),
        shares=_shares(part.source),
      )

  def _reads_buckets(self, source: Buckets, what: Reading) -> None:
    """Notes a start of each bucket, whose steps and positions are those of its own batches."""
    replicas = self._strategy.num_replicas_in_sync
    if "" not in self._read:
      self._read[""] = _Part(replicas // self._cluster.size, source.places())
    self._schedule = source.schedule(what.global_batch_size, seed=what.seed, shuffle=what.shuffle)
    self._batch = what.position // what.global_batch_size
    self._starts = []
    before = self._schedule.batches_before(self._batch)
    for bucket, size, count in zip(source.buckets, self._schedule.sizes, before, strict=True):
      share = rows_of(what.rows, size, what.global_batch_size, what.pad_multiple) or range(size)
      start = Start(
        worker=self._cluster.index, workers=self._cluster.size, position=count * size,
        global_batch_size=size, rows=(share.start, share.stop), num_examples=bucket.num_examples,
        seed=seed_of_part(what.seed, bucket.name), shuffle=what.shuffle, first=bucket.first,
      )  # fmt: skip
      self._starts.append((bucket.name, count, start))
    widest = max(padded_batch_size(size, what.pad_multiple) for size in self._schedule.sizes)
    self._read[""].ids_of_replica = widest // replicas

  def loop_begins(self, *, after_step: int, steps: int) -> None:
    """Makes room for a loop."""
    self._began = after_step
    self._before.assign(np.asarray(after_step))  # TensorFlow would keep a copy of a Python int
    for part in self._read.values():
      for table in part.tables:
        table.assign(np.full([steps, part.ids_of_replica], -1))

  def batch_taken(self, batch: Any, step: tf.Tensor) -> None:
    """Stores one step's ids. It does not hash them: that cost 3 % of a step of 0.7 ms."""
    index = step - self._before
    for name, part in self._read.items():
      ids = batch[f"{name}/example_id" if name else "example_id"]
      for table, here in zip(
        part.tables, self._strategy.experimental_local_results(ids), strict=True
      ):
        updates = tf.reshape(here, [-1]) if name else here
        if self._schedule is not None:  # buckets share a table
          missing = part.ids_of_replica - here.shape[0]
          updates = tf.pad(here, [[0, missing]], constant_values=-1)
        tf.raw_ops.ResourceScatterUpdate(resource=table.handle, indices=index, updates=updates)

  def loop_ends(self, results: dict[str, float], *, done: int, ran: int) -> None:
    """Appends the steps that stand to the file, which a killed process leaves behind."""
    if done == 0:
      return
    lines, starts = [], False
    for name, part in self._read.items():
      hashes, counts = (values.numpy()[:done] for values in part.sums())
      if self._schedule is not None:
        starts = bool(self._starts)
        lines += self._lines_of_buckets(self._schedule, hashes, counts)
        continue
      if part.start is not None:
        lines.append(start_line(self._began, part.start, name))
        part.start, starts = None, True
      lines.append(steps_line(self._began + 1, counts.tolist(), hashes.tolist(), name))
    with tf.io.gfile.GFile(self._path, "a") as file:
      # A kill may have left half a line, so a start always begins a new one.
      file.write("".join(["\n" if starts else "", *(f"{line}\n" for line in lines)]))

  def _lines_of_buckets(
    self, schedule: Schedule, hashes: np.ndarray, counts: np.ndarray
  ) -> list[str]:
    """Returns a line for each bucket in the loop, after those of a start."""
    lines = [start_line(count, start, name) for name, count, start in self._starts]
    self._names = [name for name, *_ in self._starts] or self._names
    before = schedule.batches_before(self._batch)
    order = schedule.buckets(self._batch, len(counts))
    for bucket, name in enumerate(self._names):
      here = order == bucket
      if here.any():
        sums = counts[here].tolist(), hashes[here].tolist()
        lines.append(steps_line(before[bucket] + 1, *sums, name))
    self._batch, self._starts = self._batch + len(counts), []
    return lines


def _shares(source: object) -> dict[str, Any] | None:
  if not isinstance(source, Mixture):
    return None
  return {"counts": dict(source.shares.counts), "segments": list(source.shares.segments)}


class _Part:
  """What is recorded of one source.

  Attributes:
    start: what is read, until it is written.
    ids_of_replica: the number of ids that a replica gets in a step.
    tables: the ids of a loop, int64 [steps, ids_of_replica], one for each local replica.
  """

  def __init__(self, local_replicas: int, places: np.ndarray | None = None) -> None:
    """`places` has the number to record for each example; None records its id."""
    self.start: Start | None = None
    self.ids_of_replica = 0
    with tf.device("CPU:0"):
      self.tables = [
        tf.Variable(np.zeros([0, 0], np.int64), shape=[None, None], dtype=tf.int64, trainable=False)
        for _ in range(local_replicas)
      ]
      self._places = None if places is None else tf.constant(places)
    self.sums = tf.function(self._sums_of_steps, autograph=False)

  def _sums_of_steps(self) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the sums of hashes modulo 2**64, uint64 [steps], and the counts, int64 [steps]."""
    ids = tf.concat([table.read_value() for table in self.tables], axis=1)
    real = tf.cast(ids >= 0, tf.int64)
    if self._places is not None:
      ids = tf.gather(self._places, tf.maximum(ids, 0))
    hashes = tf.bitcast(hashed(ids, 0, PURPOSE), tf.int64)
    return tf.bitcast(tf.reduce_sum(hashes * real, 1), tf.uint64), tf.reduce_sum(real, 1)
