"""Drives one assembled run in each mode: Orbit's Controller, checkpoints, actions, reports."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import orbit
import tensorflow as tf

from framework import configurables
from framework.actions.base import Action, Output, Run, StopTraining
from framework.actions.state import ActionStates
from framework.errors import ConfigError, Preempted, unknown
from framework.evaluator import Evaluator
from framework.host import files, signals
from framework.host.timing import timed
from framework.modes import TRAINING_MODES, Mode, tool
from framework.reporting import orbit_reporter, progress, summary
from framework.reporting.board import Board
from framework.run_folder import checkpoints, layout, metrics_log
from framework.run_folder.ownership import Guest, Owner
from framework.run_folder.warm_start import WarmStart
from framework.task import Task
from framework.trainer import Trainer

QUIET = (
  "loss_scale", "skipped_steps", "input_wait_s", "communication_s", "start_s", "gradient_norm",
  "learning_rate",
)  # fmt: skip
"""Metrics in metrics.jsonl and TensorBoard that the progress line hides."""

_NOTICE_S = 1.0
"""About how often the workers of a cluster ask each other about signals while they evaluate."""


class _AskedToStop(Exception):  # noqa: N818 (it is not an error)
  """A worker got a signal while all evaluate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cadence:
  """When a run evaluates, saves and ends; the attributes are arguments of `framework.run.run`."""

  train_steps: int
  steps_per_loop: int
  checkpoint_every_steps: int
  keep_checkpoints: int
  eval_every_steps: int | None = None
  eval_timeout_s: float | None = None

  def counts(self) -> dict[str, int | None]:
    """Returns name -> value of the attributes that must be whole numbers."""
    values = dataclasses.asdict(self)
    return {name: value for name, value in values.items() if name != "eval_timeout_s"}

  def next_evaluation(self, step: int) -> int:
    """Returns the step of the first evaluation after `step`."""
    every = self.eval_every_steps or self.train_steps
    return min((step // every + 1) * every, self.train_steps)

  def evaluates_at(self, step: int) -> bool:
    """Returns whether an evaluation is due at `step`."""
    every = self.eval_every_steps or self.train_steps
    return step > 0 and (step % every == 0 or step >= self.train_steps)


class Session:
  """One run: `restore`, then `go`."""

  def __init__(
    self,
    *,
    trainer: Trainer,
    model_dir: str,
    cadence: Cadence,
    evaluator: Evaluator | None = None,
    actions: Sequence[Action] = (),
    assets: str = "",
    holder: Owner | Guest | None = None,
    start: str = "",
    starts: Collection[str] | None = None,
    record: Callable[..., None] | None = None,
    changed: Callable[[], None] = lambda: None,
    shown_dir: str | None = None,
    config: Mapping[str, str] | None = None,
    new_config: str = "",
  ) -> None:
    """Assembles the run; restores nothing (host).

    Args:
      trainer: with its model built.
      model_dir: the run folder.
      cadence: when to evaluate, save and end.
      evaluator: None evaluates nothing.
      actions: called after loops and evaluations.
      assets: the digest of the task's assets.
      holder: how this process holds `model_dir`, which is required before each write.
      start, starts: see `CheckpointManager`.
      record: called on the chief with the restored `step`, before the first save: a process that
        fails before has changed nothing. See framework/run_folder/history.py.
      changed: called when a checkpoint is complete or an evaluation is logged; returns at once.
      shown_dir: what the user calls `model_dir`, if that is the local copy of another folder.
      config: name -> value of everything that the run can reach, for actions.
      new_config: in which values the config differs from that of the checkpoints; "" if in none.
    """
    self._started = time.monotonic()
    self.trainer, self.evaluator, self.model_dir = trainer, evaluator, model_dir
    self.cluster = trainer.cluster
    self._cadence, self._config = cadence, dict(config or {})
    self._changed, self._shown_dir = changed, shown_dir or model_dir
    task, self._require = trainer.task, holder.require if holder else lambda: None
    log = os.path.join(model_dir, layout.METRICS)
    self.metrics_log = metrics_log.MetricsLog(log, require=self._require)
    ledgers = [os.path.join(model_dir, layout.ledger(index)) for index in range(self.cluster.size)]
    self._states = ActionStates(actions)
    self._manager = checkpoints.CheckpointManager(
      trainer=trainer,
      directory=os.path.join(model_dir, layout.CHECKPOINTS),
      experiment={
        "task": f"{type(task).__module__}.{type(task).__qualname__}",
        "optimizer": _optimizer_names(trainer),
      },
      assets=assets,
      every_steps=cadence.checkpoint_every_steps,
      keep=cadence.keep_checkpoints,
      logs=[self.metrics_log.path, *ledgers],
      before_first=lambda: record(step=self._restored_step) if record else None,
      after_each=changed,
      actions=self._states if self._states.values else None,
      start=start,
      starts=starts,
      require=self._require,
      changed=new_config,
    )
    self._choice = progress.Choice(task.shown, hidden=QUIET, who=f"{type(task).__name__}.shown")
    self._progress = progress.Progress(
      total_steps=cadence.train_steps,
      choice=self._choice,
      splits={"train"} if evaluator is None else {"train", "eval"},
      stream=None if self.cluster.is_chief else progress.Silent(),
    )
    self._signals = signals.StopSignals()
    self._restored_step = 0
    if evaluator is not None:
      evaluator.between_batches = self._between_batches
    self._split = "train"
    self._board = Board(
      model_dir if self.cluster.is_chief else None,
      step=lambda: self.step,
      writer=lambda: self._reporters[self._split].summary_writer(),
      message=self._progress.message,
    )
    self._actions = self._bound(actions)
    with orbit_reporter.quiet_orbit():
      self._controller = self._make_controller()
    self._status = "done"

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
    if checkpoint is None:
      self._manager.restore_or_initialize()
    else:
      self._restore(checkpoint)
    self._restored_step = self.step
    with self.cluster.blaming(lambda: self.step):
      self.cluster.require_same("restored step", self.step)

  def describe(self, *, precision: str, notes: Sequence[str] = ()) -> None:
    """Prints the run's configuration, and some lines below it (stderr)."""
    trainer, parts = self.trainer, self.trainer.parts
    same = self._shown_dir == self.model_dir
    text = summary.describe(
      task=type(trainer.task).__name__,
      model=trainer.task.model,
      strategy=trainer.placement.name,
      devices=trainer.placement.devices,
      replicas=trainer.strategy.num_replicas_in_sync,
      global_batch_size=trainer.global_batch_size,
      per_replica_batch_size=trainer.padded_batch_size // trainer.strategy.num_replicas_in_sync,
      accumulation_steps=parts.accumulation_steps,
      reduction=parts.reduction.describe(),
      precision=precision,
      loss_scale=parts.loss_scale.describe(),
      optimizer=_optimizer_names(trainer),
      start_step=self.step,
      train_steps=self._cadence.train_steps,
      model_dir=self._shown_dir + ("" if same else f", worked on in {self.model_dir}"),
    )
    self._progress.message("\n".join([text, *notes]))

  def start_from(self, warm_start: WarmStart) -> None:
    """Applies a warm start, unless the run has resumed from a checkpoint (host)."""
    if self.step > 0:
      return
    report = warm_start.apply(self.trainer)
    if self.cluster.is_chief:
      files.atomic_write(os.path.join(self.model_dir, layout.WARM_START), report.table())
    self._progress.message(report.summary())

  def go(self, mode: Mode) -> dict[str, float]:
    """Runs one mode and prints the result line (stdout).

    Returns:
      See `framework.run.run`.
    """
    with orbit_reporter.quiet_orbit(), self._progress, self.cluster.blaming(lambda: self.step):
      try:
        results = getattr(self, mode)()
      except (Preempted, KeyboardInterrupt):
        self.cluster.leave()
        raise
    if self.cluster.is_chief:
      self._print_result(mode, results)
    self.cluster.leave()
    return results

  def _print_result(self, mode: str, results: Mapping[str, float]) -> None:
    split = "train" if mode == "train" else "eval"
    logged = [record["step"] for record in self.metrics_log.records(split)[-1:]] if results else []
    print(
      summary.result_line(
        step=self.step,
        of_step=logged[0] if logged else None,
        seconds=time.monotonic() - self._started,
        model_dir=self._shown_dir,
        evaluation=results,
        choice=self._choice,
        split=split,
        status=self._status,
        skipped=int(self.trainer.skipped_steps.numpy()) if mode in TRAINING_MODES else 0,
        more=[action.result() for action in self._actions] if mode in TRAINING_MODES else (),
      )
    )

  def train(self) -> dict[str, float]:
    """Trains until `train_steps`; returns the last loop's metrics."""
    self._train(lambda: self._train_to(self._cadence.train_steps))
    return self._last_record("train")

  def train_and_evaluate(self) -> dict[str, float]:
    """Trains until `train_steps`; evaluates at multiples of `eval_every_steps` and at the end."""
    self._train(self._train_and_evaluate)
    return self._last_record("eval")

  def evaluate(self) -> dict[str, float]:
    """Evaluates the restored checkpoint.

    Raises:
      ConfigError: there is none.
    """
    self._require_checkpoint("evaluate")
    with self._until_stopped():
      self._evaluate()
    return self._last_record("eval")

  def evaluate_continuously(self) -> dict[str, float]:
    """Evaluates each new checkpoint, up to `train_steps` or `eval_timeout_s` without a new one."""
    with self._until_stopped():
      for _ in self._manager.follow(timeout_s=self._cadence.eval_timeout_s):
        self._evaluate()
        if self.step >= self._cadence.train_steps:
          break
    return self._last_record("eval")

  def export(self) -> dict[str, float]:
    """Writes the restored model to <model_dir>/export, in the formats of the action Export.

    Raises:
      ConfigError: there is no checkpoint, or a format differs or cannot be made.
    """
    self._require_checkpoint("export")
    task, directory = self.trainer.task, os.path.join(self.model_dir, layout.EXPORT)
    wanted = configurables.bound("Export", "formats", ())
    ema = self.trainer.parts.ema
    with ema.in_place() if ema else contextlib.nullcontext():
      tool("export").write(
        task, directory, wanted=wanted, is_chief=self.cluster.is_chief,
        message=self._progress.message,
      )  # fmt: skip
    return {}

  def replay(self) -> dict[str, float]:
    """Repeats the restored step eagerly and prints which values are not finite (stderr).

    Raises:
      ConfigError: under parameter servers.
    """
    report = tool("replay").examine(self.trainer)
    self._progress.message(str(report))
    self._status = "reproduced" if report.findings else "not reproduced"
    return {}

  def _train(self, loops: Callable[[], None]) -> None:
    """Runs `loops` with all setup and cleanup, until they end or an action stops them."""
    self._require_metrics()
    self._require()
    with files.storage_errors(self.model_dir, self._newest_saved):
      self._manager.tidy()
      if self.step >= self._cadence.train_steps:
        self._progress.message(
          f"nothing to train: the run is at step {self.step} of {self._cadence.train_steps}; raise "
          "run.train_steps to train on, or choose another --model_dir"
        )
      elif self.cluster.is_chief:
        self._prepare_folder()
      self.cluster.barrier()  # actions on all workers read the chief's log
      try:
        with self._signals.noticed(self._progress.message), self._until_stopped():
          self._states.give_back()
          for action in self._actions:
            action.begin()
          self._states.serialize()  # raises for a state that JSON does not have
          loops()
        self._save()
      finally:
        with contextlib.ExitStack() as ends:  # calls each, whatever the others raise
          for action in reversed(self._actions):
            ends.callback(action.end)
        self._manager.wait()

  def _require_metrics(self) -> None:
    """Raises ConfigError if an action reads an evaluation metric that cannot exist.

    A task that overrides `derived` may make any name of it; the first evaluation tells.
    """
    wanted = [(a, *item) for a in self._actions for item in a.reads().items()]
    overridden = type(self.trainer.task).derived is not Task.derived
    if not wanted or overridden or self.evaluator is None:
      return
    names = self.evaluator.metric_names()
    for action, option, name in wanted:
      if names is not None and name not in names:
        raise unknown(f"{type(action).__name__}.{option}", name, names)

  def _prepare_folder(self) -> None:
    """Removes what a killed process logged after the restored step; writes the config."""
    again = self.evaluator is not None and self._states.missed(self.step)
    self.metrics_log.trim(self.step, evaluation=again)
    files.atomic_write(
      os.path.join(self.model_dir, layout.CONFIG), configurables.operative_config()
    )

  def _save(self) -> None:
    """Saves a checkpoint, which is complete on return."""
    self._controller.save_checkpoint()
    self._manager.wait()

  def _newest_saved(self) -> str:
    newest = checkpoints.list_checkpoints(self._manager.directory)[-1:]
    saved = "".join(f"the newest complete checkpoint is {path}" for path in newest)
    return saved or "there is no complete checkpoint yet"

  def _train_and_evaluate(self) -> None:
    self._evaluate_if_due()  # the process may have died between a checkpoint and its evaluation
    while self.step < self._cadence.train_steps:
      self._train_to(self._cadence.next_evaluation(self.step))
      self._evaluate()

  def _train_to(self, step: int) -> None:
    """Trains loop by loop; a whole loop is reported before a signal ends the run."""
    while self.step < step:
      end = min(self.step + self._cadence.steps_per_loop, step)
      while self.step < end:
        target = self._loop_end(end)
        with self._reporting_on_stop(self._reporters["train"]):
          self._controller.train(target, checkpoint_at_completion=False)
      self._stop_if_asked()
    if step >= self._cadence.train_steps:
      self._controller.save_checkpoint()  # no training is lost if the last evaluation fails

  def _loop_end(self, end: int) -> int:
    """Returns the step at which the next loop ends: the first that an action requests, or `end`."""
    step = self.step
    wanted = (one for action in self._actions for one in action.loop_ends())
    return min([end, *(one for one in wanted if one > step)])

  def _evaluate(self) -> None:
    # An evaluation that a signal ends reports nothing; the next process starts it again.
    self._evaluated_step = self.step  # reading it may ask a server
    self._any_asked = self.cluster.asking(_NOTICE_S)
    reporting = self._reporting_on_stop(self._reporters["eval"])
    with reporting, contextlib.suppress(_AskedToStop):
      self._controller.evaluate()
    self._changed()
    self._stop_if_asked()

  def _between_batches(self, name: str, done: int, total: int | None) -> None:
    self._progress.evaluating(self._evaluated_step, name, done, total)
    if done <= 1:  # another set may have slower batches
      self._any_asked = self.cluster.asking(_NOTICE_S)
    if self._any_asked(self._signals.number is not None):
      raise _AskedToStop

  def _evaluate_if_due(self) -> None:
    step = self.step
    due = self._cadence.evaluates_at(step)
    if due and all(record["step"] != step for record in self.metrics_log.records("eval")):
      self._evaluate()

  def _restore(self, checkpoint: str) -> None:
    path = checkpoints.find(checkpoint)
    if path is None:
      raise ConfigError(
        f"run.checkpoint is {checkpoint!r}, where there is no checkpoint; give one without its "
        f"suffix, such as {self.model_dir}/checkpoints/ckpt-100, or a folder that contains one."
      )
    try:
      self._manager.restore(path)
    except tf.errors.OpError as error:
      raise ConfigError(
        f"run.checkpoint {path!r} is damaged ({type(error).__name__}); choose another."
      ) from error

  def _require_checkpoint(self, mode: str) -> None:
    if self.step == 0:
      raise ConfigError(
        f"there is no checkpoint in {self._manager.directory} to {mode}; "
        "train first, or correct --model_dir."
      )

  def _last_record(self, split: str) -> dict[str, float]:
    self.cluster.barrier()  # the chief writes the last line
    records = self.metrics_log.records(split)
    hidden = {"step", "split", "wall_time"}
    return {k: v for k, v in records[-1].items() if k not in hidden} if records else {}

  def _make_controller(self) -> orbit.Controller:
    common = {"global_step": self.trainer.global_step, "progress": self._progress}
    if self.cluster.is_chief:
      common |= {"model_dir": self.model_dir, "metrics_log": self.metrics_log}
    self._reporters = {
      "train": orbit_reporter.Reporter(
        split="train", global_batch_size=self.trainer.global_batch_size, **common
      ),
      "eval": orbit_reporter.Reporter(split="eval", **common),
    }
    controller = orbit.Controller(
      global_step=self.trainer.global_step,
      trainer=self.trainer,
      evaluator=self.evaluator,
      strategy=self.trainer.strategy,
      train_actions=self._actions_on("train"),
      eval_actions=self._actions_on("eval"),
      steps_per_loop=self._cadence.steps_per_loop,
      summary_dir=os.path.join(self.model_dir, layout.TRAIN),
      eval_summary_dir=os.path.join(self.model_dir, layout.EVAL),
      summary_manager=self._reporters["train"],
      eval_summary_manager=self._reporters["eval"],
    )
    controller.checkpoint_manager = self._manager  # as an argument, it would restore at once
    return controller

  def _actions_on(self, split: str) -> list[Callable[[Output], None]]:
    """Returns the calls of the actions of a split, in order; before all, the folder is required.

    So nothing is written to a folder that is not the run's, also not by TensorBoard: Orbit calls
    actions first.
    """

    def called(action: Action) -> Callable[[Output], None]:
      call = timed(f"action {type(action).__name__}")(action)

      def act(output: Output) -> None:
        if split == "train" and action.every_steps and self.step % action.every_steps:
          return  # the loop ended for something else
        self._split = split
        if split == "eval":
          self._states.evaluated = self.step
        self._require()
        call(output)

      return act

    wanted = [called(action) for action in self._actions if split in action.splits()]
    return [lambda _: self._require(), *wanted]

  def _bound(self, actions: Sequence[Action]) -> list[Action]:
    ema = self.trainer.parts.ema
    context = Run(
      task=self.trainer.task,
      strategy=self.trainer.strategy,
      trainer=self.trainer,
      evaluator=self.evaluator,
      checkpoint=self._manager.checkpoint,
      metrics_log=self.metrics_log,
      global_step=self.trainer.global_step,
      model_dir=self.model_dir,
      replay_command=_replay_command(self.model_dir, self.trainer),
      config=self._config,
      is_chief=self.cluster.is_chief,
      actions=actions,
      require=self._require,
      message=self._progress.message,
      board=self._board,
      current_split=lambda: self._split,
      evaluated_weights=ema.in_place if ema else contextlib.nullcontext,
    )
    for action in actions:
      action.bind(context)
    return list(actions)

  @contextlib.contextmanager
  def _until_stopped(self) -> Iterator[None]:
    """Ends the run normally if an action raises StopTraining."""
    try:
      yield
    except StopTraining as stop:
      self._status = "stopped"
      self._progress.message(f"stopped at step {self.step}: {stop}")

  @contextlib.contextmanager
  def _reporting_on_stop(self, reporter: orbit.utils.SummaryManagerInterface) -> Iterator[None]:
    """Reports metrics if an action stops the run: Orbit reports only after all actions return."""
    try:
      yield
    except StopTraining as stop:
      reporter.write_summaries(stop.output)
      reporter.flush()
      raise

  def _stop_if_asked(self) -> None:
    """Ends the run, with its state saved, if a worker was asked to; raises a save's error."""
    self._require()
    self._manager.check()
    if not self.cluster.any(self._signals.number is not None):
      return
    self._save()
    again = "start the same command again to continue"
    line = f"{self._signals.name}: saved step {self.step} in {self._manager.directory}; {again}"
    raise KeyboardInterrupt(line) if self._signals.name == "Ctrl-C" else Preempted(line)


def _replay_command(model_dir: str, trainer: Trainer) -> str:
  """Returns a shell line for this working directory, or a Python call if no gin was used."""
  if not configurables.bindings():
    return f"run(mode='replay', model_dir={model_dir!r}, ...) with the same arguments"
  module = type(trainer.task).__module__
  file = os.path.abspath(sys.modules[module].__file__ or "")
  folder = file.rsplit(os.sep, module.count(".") + 1)[0]  # must be importable in the new process
  found = folder in (os.getcwd(), str(configurables.REPOSITORY)) or folder.startswith(sys.prefix)
  path = "" if found else f"PYTHONPATH={shlex.quote(folder)} "
  launch = ["python", os.path.relpath(configurables.REPOSITORY / "launch.py")]
  if configurables.SHIPPED != configurables.REPOSITORY:  # installed as a package
    launch = ["loopwright"]
  config = os.path.join(model_dir, layout.CONFIG)
  flags = [f"--gin_file={config}", f"--model_dir={model_dir}", "--mode=replay"]
  if trainer.cluster.is_local:
    flags.append(f"--local_workers={trainer.cluster.size}")
  return f"{path}{shlex.join([*launch, *flags])}"


def _optimizer_names(trainer: Trainer) -> str:
  named = trainer.parts.optimizers.items()
  return ", ".join(f"{name}: {type(one.optimizer).__name__}" for name, one in named)
