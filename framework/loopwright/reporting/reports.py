"""Everything that a run reports, made for one trainer: log, progress, TensorBoard, texts."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from loopwright.hooks import Hook
from loopwright.host.timing import timed
from loopwright.reporting import summary
from loopwright.reporting.progress import Choice, Progress, Silent
from loopwright.run_folder import layout
from loopwright.run_folder.metrics_log import MetricsLog, flatten, scalars

if TYPE_CHECKING:
  from loopwright.evaluator import Evaluator
  from loopwright.run_folder.places import RunFolder
  from loopwright.trainer import Trainer

QUIET = (
  "loss_scale", "skipped_steps", "input_wait_s", "communication_s", "gradient_norm",
  "learning_rate", "gpu_memory_mib", "gpu_utilization", "cpu_utilization", "model_flops_per_s",
)  # fmt: skip
"""Metrics in metrics.jsonl and TensorBoard that the progress line hides."""


@dataclasses.dataclass(kw_only=True)
class Reporter:
  """Sends the values of one split to TensorBoard, metrics.jsonl and the progress line.

  Attributes:
    split: "train" or "eval".
    global_step: int64 scalar, the step of the values.
    model_dir: TensorBoard files go to <model_dir>/<split>; None writes none.
    metrics_log: None writes no metrics.jsonl, as on workers other than the chief.
    progress: None prints nothing.
    global_batch_size: if given, "steps_per_second" is added, from "examples_per_second".
  """

  split: str
  global_step: tf.Variable
  model_dir: str | None = None
  metrics_log: MetricsLog | None = None
  progress: Progress | None = None
  global_batch_size: int | None = None
  _writer: tf.summary.SummaryWriter | None = None

  def writer(self) -> tf.summary.SummaryWriter:
    """Returns the TensorBoard writer; the first call makes its file."""
    if self._writer is None:
      folder = self.model_dir and os.path.join(self.model_dir, self.split)
      make = tf.summary.create_file_writer
      self._writer = make(folder) if folder else tf.summary.create_noop_writer()
    return self._writer

  @timed("reporting")
  def report(self, output: Mapping[str, Any]) -> None:
    """Reports the values of one loop or evaluation; joins nested names with "/" (host).

    Arrays go to metrics.jsonl alone.
    """
    everything = flatten(output)
    values = scalars(everything)
    if self.global_batch_size and "examples_per_second" in values:
      values["steps_per_second"] = values["examples_per_second"] / self.global_batch_size
    step = int(self.global_step.numpy())
    with self.writer().as_default():
      for name, value in values.items():
        # As arrays: TensorFlow keeps a copy of every Python number that becomes a tensor, 0.5 kB.
        tf.summary.scalar(name, np.asarray(value), step=np.int64(step))
    self.writer().flush()
    if self.metrics_log is not None:
      self.metrics_log.append(step, self.split, {**everything, **values})
    if self.progress is not None:
      report = self.progress.update if self.split == "train" else self.progress.evaluation
      report(step, values)


class Reports(Hook):
  """What a run tells its user, as a hook of its loop; only the chief writes and prints.

  Attributes:
    log: metrics.jsonl.
    progress: the lines of progress.
  """

  def __init__(
    self,
    trainer: Trainer,
    *,
    folder: RunFolder,
    train_steps: int,
    evaluates: bool,
  ) -> None:
    """Reports nothing yet (host).

    Args:
      trainer: what is reported on.
      folder: the run folder.
      train_steps: the step at which the run ends.
      evaluates: whether the run has evaluations.
    """
    self._began_s, self._trainer, self._folder = time.monotonic(), trainer, folder
    self._on_gpus, self._of_cpu = trainer.placement.on_gpus, 0.0
    self._train_steps, is_chief = train_steps, trainer.cluster.is_chief
    self.log = MetricsLog(folder.file(layout.METRICS), require=folder.require)
    who = f"{type(trainer.task).__name__}.shown"
    self._choice = Choice(trainer.task.shown, hidden=QUIET, who=who)
    self.progress = Progress(
      total_steps=train_steps,
      choice=self._choice,
      splits={"train", "eval"} if evaluates else {"train"},
      stream=None if is_chief else Silent(),
    )
    common = {"global_step": trainer.global_step, "progress": self.progress}
    if is_chief:
      common |= {"model_dir": folder.path, "metrics_log": self.log}
    self._of = {
      "train": Reporter(split="train", global_batch_size=trainer.global_batch_size, **common),
      "eval": Reporter(split="eval", **common),
    }

  def writer(self, split: str) -> tf.summary.SummaryWriter:
    """Returns TensorBoard's writer of "train" or "eval"."""
    return self._of[split].writer()

  def evaluates(self, evaluator: Evaluator, step: int) -> AbstractContextManager[Any]:
    """Summaries of an evaluation step go to TensorBoard; what a set has no values of is hidden."""
    self._choice.without = evaluator.weightless
    return self.writer("eval").as_default()

  def loop_begins(self, step: int) -> None:
    """Reads the clocks."""
    self._clocks = time.process_time(), time.monotonic()

  def loop_ends(self, step: int, output: Mapping[str, Any], traces: int) -> None:
    """Finds this process's share of its cores over the loop."""
    cpu_s, wall_s = time.process_time() - self._clocks[0], time.monotonic() - self._clocks[1]
    self._of_cpu = cpu_s / max(wall_s, 1e-6) / _cores()

  def after(self, split: str, output: Mapping[str, Any]) -> None:
    """Reports the values of one loop or evaluation; see `Reporter` (host)."""
    self._folder.require()  # else TensorBoard's writer makes a folder again that was removed
    more = {"cpu_utilization": self._of_cpu} if split == "train" and not self._on_gpus else {}
    self._of[split].report({**output, **more})

  def is_unevaluated(self, step: int) -> bool:
    """Whether the log has no evaluation of a step (host)."""
    return all(record["step"] != step for record in self.log.records("eval"))

  def last(self, split: str) -> dict[str, float]:
    """Returns the newest values in the log; empty without any."""
    records = self.log.records(split)
    hidden = {"step", "split", "wall_time"}
    return {k: v for k, v in records[-1].items() if k not in hidden} if records else {}

  def describe(self, *, precision: str, step: int, notes: Sequence[str] = ()) -> None:
    """Prints the run's configuration, and some lines below it (stderr)."""
    shown, path = self._folder.shown, self._folder.path
    text = summary.describe(
      self._trainer,
      precision=precision,
      start_step=step,
      train_steps=self._train_steps,
      model_dir=shown if shown == path else f"{shown}, worked on in {path}",
    )
    self.progress.message("\n".join([text, *notes]))

  def result(
    self, values: Mapping[str, float], *, split: str, step: int, status: str, **more: Any
  ) -> None:
    """Prints the last line (stdout); `more` are other arguments of `result_line`."""
    logged = [record["step"] for record in self.log.records(split)[-1:]] if values else []
    line = summary.result_line(
      step=step,
      of_step=logged[0] if logged else None,
      seconds=time.monotonic() - self._began_s,
      model_dir=self._folder.shown,
      evaluation=values,
      choice=self._choice,
      split=split,
      status=status,
      **more,
    )
    print(line)


def _cores() -> int:
  """Returns how many cores this process may use."""
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
