"""Drives one assembled run in each mode; the loop itself is in loop.py."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from loopwright import configurables, registry
from loopwright.actions.base import Action
from loopwright.errors import ConfigError, Preempted
from loopwright.evaluator import Evaluator
from loopwright.hooks import Hook, Hooks, StopTraining
from loopwright.host import files
from loopwright.monitoring import hangs
from loopwright.monitoring.flight import Flight
from loopwright.options.groups import Cadence, Hangs
from loopwright.options.modes import TRAINING_MODES, Mode
from loopwright.reporting.reports import Reports
from loopwright.run_folder import history, layout
from loopwright.run_folder.checkpoint_files import newest_line
from loopwright.run_folder.checkpoints import CheckpointManager
from loopwright.run_folder.places import RunFolder
from loopwright.run_folder.warm_start import WarmStart
from loopwright.runs.loop import Loop
from loopwright.runs.saving import Saving
from loopwright.runs.start_record import Start, experiment
from loopwright.runs.stopping import Stopping
from loopwright.trainer import Trainer

if TYPE_CHECKING:
  from loopwright.actions.calls import Actions


class Session:
  """One run: `restore`, then `go`."""

  def __init__(
    self,
    *,
    trainer: Trainer,
    folder: RunFolder,
    cadence: Cadence,
    keep_checkpoints: int,
    hangs: Hangs = Hangs(),  # noqa: B008 (frozen)
    evaluator: Evaluator | None = None,
    actions: Sequence[Action] = (),
    assets: str = "",
    start: Start | None = None,
    flight: Flight | None = None,
    hooks: Sequence[Hook] = (),
  ) -> None:
    """Assembles the run; restores nothing (host).

    Args:
      trainer: with its model built.
      folder: the run folder, which is required before each write.
      cadence: when to evaluate, save and end.
      keep_checkpoints: the number of checkpoints to keep.
      hangs: what to do without progress.
      evaluator: None evaluates nothing.
      actions: called after loops and evaluations.
      assets: the digest of the task's assets.
      start: recorded before the first save: a process that fails before has changed nothing.
      flight: where the time goes.
      hooks: others that go along.
    """
    self.trainer, self.evaluator, self.cluster = trainer, evaluator, trainer.cluster
    self._folder, self._cadence, self._hangs, self._status = folder, cadence, hangs, "done"
    self._keep = keep_checkpoints
    self._restored_step, self._trains = 0, start is not None
    self._actions: Actions | None = None
    if actions:
      from loopwright.actions.calls import Actions

      self._actions = Actions(actions, require=folder.require)
    self._reports = Reports(
      trainer, folder=folder, train_steps=cadence.train_steps, evaluates=evaluator is not None
    )
    self._say = self._reports.progress.message
    self._flight = flight or Flight()
    self._manager = self._make_manager(start, assets)
    self._saving = Saving(
      manager=self._manager, folder=folder, cadence=cadence, saved=self._flight.saved
    )
    self._stopping = Stopping(
      cluster=self.cluster, progress=self._reports.progress, goes_on=self._flight.goes_on,
      saving=self._saving,
    )  # fmt: skip
    always = (*hooks, self._reports, self._saving, self._stopping, self._flight)
    self._hooks = Hooks([self._actions, *always] if self._actions else always)
    self._loop = Loop(trainer=trainer, evaluator=evaluator, cadence=cadence, hooks=self._hooks)
    if self._actions is not None:
      from loopwright.runs.resume_rules import replay_command

      self._actions.bind(
        trainer, evaluator, model_dir=folder.path, checkpoint=self._manager.checkpoint,
        metrics_log=self._reports.log, message=self._say, writer=self._reports.writer,
        config=start.everything if start else {},
        replay_command=replay_command(folder.path, trainer),
      )  # fmt: skip

  def _make_manager(self, start: Start | None, assets: str) -> CheckpointManager:
    ledgers = map(layout.ledger, range(self.cluster.size))
    known = functools.partial(history.starts, self._folder.path)
    return CheckpointManager(
      trainer=self.trainer,
      directory=self._folder.file(layout.CHECKPOINTS),
      experiment=experiment(self.trainer),
      assets=assets,
      keep=self._keep,
      logs=[self._reports.log.path, *map(self._folder.file, ledgers)],
      before_first=(lambda: start.record(step=self._restored_step)) if start else None,
      after_each=self._folder.send,
      actions=self._actions and self._actions.saved,
      require=self._folder.require,
      **(start.labels() if start else {"starts": known}),
    )

  @property
  def step(self) -> int:
    """The current global step."""
    return int(self.trainer.global_step.numpy())

  def restore(self, checkpoint: str | None = None) -> None:
    """Restores `checkpoint`, or for None the newest complete one, if any (host).

    Raises:
      ConfigError: the checkpoint is missing, damaged, or from another experiment.
      ClusterError: the workers restored different steps.
    """
    self._flight.note("setup")
    if checkpoint is None:
      self._manager.restore_or_initialize()
    else:
      self._manager.restore_from(checkpoint)
    self._restored_step = self.step
    self._flight.note("restoring")
    with self.cluster.blaming(lambda: self.step):
      self.cluster.require_same("restored step", self.step)
      if self._trains and self.step < self._cadence.train_steps:
        try:
          self.trainer.examine()
        except Exception:
          self._write_config()  # so that a run that dies in its first step can be told apart
          raise
        self._manager.renew()
    self._flight.note("tracing")

  def describe(self, *, precision: str, notes: Sequence[str] = ()) -> None:
    """Prints the run's configuration, and some lines below it (stderr)."""
    self._reports.describe(
      precision=precision, step=self.step, notes=[*notes, *self.trainer.state.note()]
    )

  def start_from(self, warm_start: WarmStart) -> None:
    """Applies a warm start, unless the run has resumed from a checkpoint (host)."""
    if self.step > 0:
      return
    report = warm_start.apply(self.trainer)
    if self.cluster.is_chief:
      files.atomic_write(self._folder.file(layout.WARM_START), report.table())
    self._say(report.summary())

  def go(self, mode: Mode) -> dict[str, float]:
    """Runs one mode and prints the result line (stdout).

    Returns:
      See `loopwright.run`.
    """
    tf.summary.experimental.set_step(self.trainer.global_step)
    with self._reports.progress, self.cluster.blaming(lambda: self.step):
      try:
        results = getattr(self, mode)()
      except (Preempted, KeyboardInterrupt):
        self.cluster.leave()
        raise
    if self.cluster.is_chief:
      trained = mode in TRAINING_MODES
      more = [f"SavedModel in {layout.EXPORT}/"] if mode == "export" else []
      self._reports.result(
        results, split="train" if mode == "train" else "eval", step=self.step, status=self._status,
        skipped=int(self.trainer.skipped_steps.numpy()) if trained else 0,
        more=self._actions.results() if self._actions and trained else more,
      )  # fmt: skip
    self.cluster.leave()
    return results

  # ---- The modes ----

  def train(self) -> dict[str, float]:
    """Trains until `train_steps`; returns the last loop's metrics."""
    self._train(evaluating=False)
    return self._last_record("train")

  def train_and_evaluate(self) -> dict[str, float]:
    """Trains until `train_steps`; evaluates at multiples of `eval_every_steps` and at the end."""
    self._train(evaluating=True)
    return self._last_record("eval")

  def evaluate(self) -> dict[str, float]:
    """Evaluates the restored checkpoint.

    Raises:
      ConfigError: there is none.
    """
    self._require_checkpoint("evaluate")
    with self._until_stopped():
      self._loop.evaluate()
    return self._last_record("eval")

  def evaluate_continuously(self) -> dict[str, float]:
    """Evaluates each new checkpoint, up to `train_steps` or `eval_timeout_s` without a new one."""
    with self._until_stopped():
      for _ in self._manager.follow(timeout_s=self._cadence.eval_timeout_s):
        self._loop.evaluate()
        if self.step >= self._cadence.train_steps:
          break
    return self._last_record("eval")

  def export(self) -> dict[str, float]:
    """Writes the restored model to <model_dir>/export.

    Raises:
      ConfigError: there is no checkpoint.
    """
    self._require_checkpoint("export")
    ema = self.trainer.parts.ema
    with ema.in_place() if ema else contextlib.nullcontext():
      folder, is_chief = self._folder.file(layout.EXPORT), self.cluster.is_chief
      registry.load("tool", "export")(self.trainer.task, folder, is_chief=is_chief)
    return {}

  def replay(self) -> dict[str, float]:
    """Repeats the restored step eagerly and prints which values are not finite (stderr).

    Raises:
      ConfigError: under parameter servers.
    """
    report = registry.load("tool", "examine")(self.trainer)
    self._say(str(report))
    self._status = "reproduced" if report.findings else "not reproduced"
    return {}

  # ---- Their parts ----

  def _train(self, *, evaluating: bool) -> None:
    """Trains with all setup and cleanup, until the end or until an action stops the run."""
    if self.evaluator is not None and self._actions is not None:
      self._actions.require_metrics(self.evaluator)
    self._folder.require()
    newest = functools.partial(newest_line, self._manager.directory)
    with files.storage_errors(self._folder.path, newest), contextlib.ExitStack() as watched:
      if self.step < self._cadence.train_steps:
        watched.enter_context(
          hangs.watched(self._flight, self.trainer, self._folder.path, self._hangs, say=self._say)
        )
      self._prepare()
      try:
        with self._stopping.signals.noticed(self._say), self._until_stopped():
          self._hooks.begins(self.step)
          if evaluating and self._is_unevaluated():
            self._loop.evaluate()  # the process may have died between a checkpoint and this
          self._loop.train(evaluating=evaluating)
        self._saving.completes()
      finally:
        self._hooks.ends()

  def _is_unevaluated(self) -> bool:
    return self._cadence.evaluates_at(self.step) and self._reports.is_unevaluated(self.step)

  @contextlib.contextmanager
  def _until_stopped(self) -> Iterator[None]:
    """Ends the run normally if an action raises StopTraining."""
    try:
      yield
    except StopTraining as stop:
      self._status = "stopped"
      self._say(f"stopped at step {self.step}: {stop}")

  def _prepare(self) -> None:
    """Removes what a killed process left or logged after the restored step; writes the config."""
    self._manager.tidy()
    if self.step >= self._cadence.train_steps:
      self._say(
        f"nothing to train: the run is at step {self.step} of {self._cadence.train_steps}; raise "
        "run.train_steps to train on, or choose another --model_dir"
      )
    elif self.cluster.is_chief:
      missed = self._actions is not None and self._actions.states.missed(self.step)
      gone = self._reports.log.trim(self.step, evaluation=missed and self.evaluator is not None)
      if gone and not self.step:
        self._say(
          f"there is no checkpoint: training begins again; {layout.UNDONE} has the {gone} lines "
          f"that {layout.METRICS} had"
        )
      self._write_config()
    self.cluster.barrier()  # actions on all workers read the chief's log

  def _write_config(self) -> None:
    if self.cluster.is_chief:
      files.atomic_write(self._folder.file(layout.CONFIG), configurables.operative_config())

  def _require_checkpoint(self, mode: str) -> None:
    if self.step == 0:
      raise ConfigError(
        f"there is no checkpoint in {self._manager.directory} to {mode}; "
        "train first, or correct --model_dir."
      )

  def _last_record(self, split: str) -> dict[str, float]:
    self.cluster.barrier()  # the chief writes the last line
    return self._reports.last(split)
