"""Where the values of each loop and evaluation go."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.host.timing import timed
from loopwright.reporting.progress import Progress
from loopwright.run_folder.metrics_log import MetricsLog, flatten, scalars


class Reporter:
  """Sends the values of one split to TensorBoard, metrics.jsonl and the progress line."""

  def __init__(
    self,
    *,
    split: str,
    global_step: tf.Variable,
    model_dir: str | None = None,
    metrics_log: MetricsLog | None = None,
    progress: Progress | None = None,
    global_batch_size: int | None = None,
  ) -> None:
    """Sets where to report.

    Args:
      split: "train" or "eval".
      global_step: int64 scalar, the step of the values.
      model_dir: TensorBoard files go to <model_dir>/<split>; None writes none.
      metrics_log: None writes no metrics.jsonl, as on workers other than the chief.
      progress: None prints nothing.
      global_batch_size: if given, "steps_per_second" is added, from "examples_per_second".
    """
    self._directory = None if model_dir is None else os.path.join(model_dir, split)
    self._writer: tf.summary.SummaryWriter | None = None
    self._split = split
    self._global_step = global_step
    self._metrics_log = metrics_log
    self._progress = progress
    self._global_batch_size = global_batch_size

  def writer(self) -> tf.summary.SummaryWriter:
    """Returns the TensorBoard writer; the first call makes its file."""
    if self._writer is None and self._directory is None:
      self._writer = tf.summary.create_noop_writer()
    elif self._writer is None:
      self._writer = tf.summary.create_file_writer(self._directory)
    return self._writer

  @timed("reporting")
  def report(self, output: Mapping[str, Any]) -> None:
    """Reports the values of one loop or evaluation; joins nested names with "/" (host).

    Arrays go to metrics.jsonl alone.
    """
    everything = flatten(output)
    values = scalars(everything)
    if self._global_batch_size and "examples_per_second" in values:
      values["steps_per_second"] = values["examples_per_second"] / self._global_batch_size
    step = int(self._global_step.numpy())
    with self.writer().as_default():
      for name, value in values.items():
        # As arrays: TensorFlow keeps a copy of every Python number that becomes a tensor, 0.5 kB.
        tf.summary.scalar(name, np.asarray(value), step=np.int64(step))
    self.writer().flush()
    if self._metrics_log is not None:
      self._metrics_log.append(step, self._split, {**everything, **values})
    if self._progress is not None:
      report = self._progress.update if self._split == "train" else self._progress.evaluation
      report(step, values)
