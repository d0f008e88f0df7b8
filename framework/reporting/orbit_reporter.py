"""Receives the values of a loop or an evaluation from Orbit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import orbit
import tensorflow as tf
from absl import logging

from framework.host.timing import timed
from framework.reporting.progress import Progress
from framework.run_folder.metrics_log import MetricsLog, flatten, scalars


class Reporter(orbit.utils.SummaryManagerInterface):
  """Sends the values of one split to TensorBoard, metrics.jsonl and the progress line.

  Give Orbit's Controller a `summary_dir` and an `eval_summary_dir` that differ: if they are equal
  (or both None), it sends evaluations to the training manager.
  """

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
      global_batch_size: if given, "steps_per_second" is the rate within the loop, as
        "examples_per_second" is; None keeps Orbit's, which includes the time between loops.
    """
    directory = None if model_dir is None else os.path.join(model_dir, split)
    self._tensorboard = orbit.utils.SummaryManager(directory, tf.summary.scalar, global_step)
    self._split = split
    self._global_step = global_step
    self._metrics_log = metrics_log
    self._progress = progress
    self._global_batch_size = global_batch_size

  def summary_writer(self, relative_path: str = "") -> tf.summary.SummaryWriter:
    """Returns the TensorBoard writer, for `tf.summary` calls in a loop."""
    return self._tensorboard.summary_writer(relative_path)

  @timed("reporting")
  def flush(self) -> None:
    """Flushes TensorBoard; metrics.jsonl needs no flush (host)."""
    self._tensorboard.flush()

  @timed("reporting")
  def write_summaries(self, summary_dict: Mapping[str, Any]) -> None:
    """Reports the values of one loop or evaluation; joins nested names with "/" (host).

    Arrays go to metrics.jsonl alone.
    """
    everything = flatten(summary_dict)
    values = scalars(everything)
    if self._global_batch_size and "examples_per_second" in values:
      values["steps_per_second"] = values["examples_per_second"] / self._global_batch_size
    step = int(self._global_step.numpy())
    # As arrays: TensorFlow keeps a copy of every Python number that becomes a tensor, 0.5 kB each.
    self._tensorboard.write_summaries({name: np.asarray(v) for name, v in values.items()})
    if self._metrics_log is not None:
      self._metrics_log.append(step, self._split, {**everything, **values})
    if self._progress is not None:
      report = self._progress.update if self._split == "train" else self._progress.evaluation
      report(step, values)


@contextlib.contextmanager
def quiet_orbit() -> Iterator[None]:
  """Makes Orbit's Controller log at debug level instead of printing to stdout."""
  loud = orbit.controller._log
  orbit.controller._log = logging.debug
  try:
    yield
  finally:
    orbit.controller._log = loud
