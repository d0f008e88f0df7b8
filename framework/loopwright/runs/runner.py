"""Assembles and drives one run, as a gin file configures it. Read it first.

run(task=Digits(), train_steps=1000, global_batch_size=128, model_dir="runs/digits")
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import keras
import tensorflow as tf
from absl import logging

from loopwright import configurables, registry
from loopwright.actions.base import Action
from loopwright.distribution import cluster as clusters
from loopwright.distribution import placement
from loopwright.engine.trainer_checks import require_precision
from loopwright.errors import ConfigError
from loopwright.graphs import randomness
from loopwright.host import nvidia
from loopwright.host.urls import is_url
from loopwright.inputs.sources import main_source
from loopwright.monitoring.flight import Flight
from loopwright.observers import Observer
from loopwright.optimizers.adapters import Optimizers
from loopwright.options.declaration import AT_THE_START, COUNT, Instead, asked, fixed, free
from loopwright.options.groups import (
  BatchSize,
  Cadence,
  Evaluation,
  Gpus,
  Group,
  Hangs,
  Intervals,
  Length,
  Numerics,
  facts,
  taking,
)
from loopwright.options.modes import TRAINING_MODES, Mode
from loopwright.run_folder import history, places
from loopwright.run_folder.warm_start import WarmStart
from loopwright.runs.builder import Recipe, made_task, set_globals
from loopwright.runs.session import Session
from loopwright.runs.start_record import examples, started
from loopwright.strategies import factories
from loopwright.task import Task
from loopwright.trainer import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Group):
  """What is run, where, and with what."""

  task: Annotated[
    Task | Callable[[], Task],
    "a `Task`, or a factory of one.",
    asked("another class does not fit a checkpoint"),
  ]
  mode: Annotated[
    Mode,
    '"train", "evaluate" (the newest checkpoint), "train_and_evaluate", "evaluate_continuously" '
    '(every new checkpoint until `train_steps`), "export", or "replay" (the step at which '
    "StopOnNonFinite stopped).",
    free("does that"),
    Instead("use the flag --mode"),
  ] = "train_and_evaluate"
  model_dir: Annotated[
    str,
    "the run folder; or the URL of one, such as s3://bucket/run, see docs/remote-folders.md.",
    free("goes on with the run in it"),
    Instead("use the flag --model_dir"),
  ]
  strategy: Annotated[
    factories.StrategyFactory,
    "a factory, such as `loopwright.strategies.factories.mirrored`.",
    free(
      "computes there, on any number of replicas; a batch per replica changes "
      "`global batch size`, which is asked"
    ),
  ] = factories.auto
  optimizer: Annotated[
    Optimizers,
    "a factory, or name -> factory; called in the strategy's scope. A task of "
    "`loopwright.from_keras` brings its own instead.",
    asked("another class does not fit a checkpoint"),
  ] = keras.optimizers.Adam
  checkpoint: Annotated[
    str | None,
    '"evaluate" or "export" this one, not the newest: a path without suffix, or a folder such as '
    "<model_dir>/best.",
    fixed("it is not for training"),
  ] = None
  warm_start: Annotated[
    WarmStart | None,
    "initial weights from another run or a Keras file, in training modes; unused if the run "
    "resumes from its own checkpoint.",
    AT_THE_START,
  ] = None
  accept_changes: Annotated[
    bool,
    "go on with a config or data that differ from those that the run has had so far.",
    free("accepts them"),
    Instead("use the flag --accept_changes"),
  ] = False

  def __post_init__(self) -> None:
    """Raises a ConfigError for an unknown mode, or one that has no use for the checkpoint."""
    super().__post_init__()
    if self.checkpoint is not None and self.mode not in ("evaluate", "export"):
      raise ConfigError(
        f"run.checkpoint is {self.checkpoint!r}, but mode {self.mode!r} cannot use it; leave it "
        "out, or use --mode=evaluate or --mode=export."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Gpus, Numerics, Hangs, Evaluation, BatchSize, Intervals, Length, Job):
  """Everything that `run` takes; the last base class comes first in its signature."""

  shuffle: Annotated[
    bool,
    "False reads the training examples in source order.",
    asked(
      "another order from there on; the epoch that has begun reads some examples twice and "
      "leaves others out"
    ),
  ] = True
  keep_checkpoints: Annotated[
    int,
    "the number of checkpoints to keep.",
    free("keeps so many from the next save on"),
    COUNT,
  ] = 3
  actions: Annotated[
    Sequence[Action],
    "called after training loops and evaluations, in training modes; see "
    "loopwright/actions/base.py.",
    free("they begin there; asked are the options of one that changes what is learned"),
  ] = ()
  compile_cache: Annotated[
    str | None,
    "the folder in which XLA's programs are kept, so that the next start compiles nothing; 'auto': "
    "on one GPU, loopwright/xla in the user's cache folder; None keeps none.",
    free("keeps them there"),
  ] = "auto"
  ledger: Annotated[
    bool,
    "record the examples of each step, in training modes; `python -m loopwright.tools.ledger "
    "<model_dir>` then proves that none was skipped or repeated.",
    free("records from there on"),
  ] = False

  def __post_init__(self) -> None:
    """Raises a ConfigError unless the actions are a list of actions."""
    super().__post_init__()
    if self.actions != ():
      from loopwright.actions.calls import require_actions

      require_actions(self.actions)


@taking(Options)
def run(given: Options) -> dict[str, float]:
  """Trains, evaluates or exports one task (host).

  If `model_dir` has a checkpoint, the run resumes from it; the result is the same as without the
  interruption. The config must be the same too, except how far and how often, actions, strategy
  and number of replicas; see docs/configuration.md.

  Returns:
    The metrics of the last evaluation, or of the last loop in mode "train"; empty for "export" and
    "replay", and if the strategy makes this process a worker or server for another process.

  Raises:
    ConfigError: a user error, described in one line.
    Preempted: the process received SIGTERM or SIGHUP; the state is saved.
    KeyboardInterrupt: Ctrl-C; the state is saved, unless it came twice.
    StorageError: the disk of `model_dir` is full or has failed.
  """
  flight, mode = Flight(), given.mode
  folder, training = _folder(given.model_dir, mode), mode in TRAINING_MODES
  warm_start = given.warm_start if training else None
  hooks = _compile_cache(given, training=training)
  set_globals(given.part(Numerics), given.part(Gpus))
  clusters.declare(_facts(given) | _initial_weights(warm_start, folder))
  flight.note("setup")
  chosen = placement.made(given.strategy)
  _warn_of_unseen_gpus()
  flight.note("connecting")
  if isinstance(chosen, placement.Server):
    chosen.serve()
    return {}
  task = made_task(given.task)  # which may make a model, and so start TensorFlow's devices
  given = dataclasses.replace(given, optimizer=_optimizer(task, given.optimizer))
  where = placement.of(chosen)
  if training:
    where.require_alone()
  recipe = given.part(
    Recipe, global_batch_size=given.part(BatchSize).on(chosen.num_replicas_in_sync)
  )
  cluster = where.cluster
  folder.require_one_process(cluster.size)
  with folder.opened(training=training and cluster.is_chief, export=mode == "export"):
    checkpoint = _checkpoint(given.checkpoint, folder.path, mode)
    if cluster.is_chief and (versions := history.changed_versions(folder.path)):
      logging.warning("the run in %s was made with other versions: %s", folder.shown, versions)
    start = started(
      task=task, options=given, global_batch_size=recipe.global_batch_size, model_dir=folder.path,
      training=training, accept=given.accept_changes,
    )  # fmt: skip
    start.require_config()
    learned = _learned(task, given, folder.path, cluster, changed=start.changes_task)
    randomness.seed_everything(given.seed)  # again: fit() may have drawn random numbers here
    observers = _observers(chosen, folder.path, ledger=given.ledger, training=training)
    trainer = recipe.trainer(task, chosen, observers=observers)
    evaluator = None if mode in ("train", "export", "replay") else recipe.evaluator(trainer)
    cadence = given.part(Cadence, train_steps=_train_steps(given, trainer))
    if training:
      _require_any_size(trainer, given)
      start.require_data(examples(trainer, evaluator))
      start.plan(trainer, cadence)
    session = Session(
      trainer=trainer, evaluator=evaluator, folder=folder, cadence=cadence, assets=learned,
      keep_checkpoints=given.keep_checkpoints, hangs=given.part(Hangs),
      actions=given.actions if training else (), start=start if training else None, flight=flight,
      hooks=hooks,
    )  # fmt: skip
    session.restore(checkpoint)
    require_precision(given.precision, trainer.task.model, trainer.gradient_dtypes)
    notes = start.read_back(trainer) if training else ()
    session.describe(precision=given.precision, notes=notes)
    if warm_start is not None:
      session.start_from(warm_start)
    return session.go(mode)


def _warn_of_unseen_gpus() -> None:
  if nvidia.installed():
    from loopwright.distribution import gpus

    gpus.warn_of_unseen()


def _learned(
  task: Task, given: Options, model_dir: str, cluster: clusters.Cluster, *, changed: bool
) -> str:
  """Returns the digest of what a task learns from its data besides weights; "" of most."""
  if not task.has_fit:
    return ""
  from loopwright.run_folder import assets

  waits = given.mode == "evaluate_continuously"
  return assets.provide(
    task, model_dir=model_dir, cluster=cluster, training=given.mode in TRAINING_MODES,
    changed=changed, timeout_s=given.eval_timeout_s if waits else 0.0,
  )  # fmt: skip


def _require_any_size(trainer: Trainer, given: Options) -> None:
  """Raises a ConfigError if the number of workers may vary, and something depends on it."""
  if os.environ.get(clusters.WORKERS):
    from loopwright.runs.resume_rules import require_any_size

    require_any_size(trainer, given.per_replica_batch_size)


def _compile_cache(given: Options, *, training: bool) -> list[Any]:
  """Returns the hook that keeps programs of XLA, where they are kept."""
  gpus = nvidia.visible() if given.gpus is None else given.gpus
  by_itself = given.compile_cache == "auto"  # several replicas can have run half a step: see docs
  if not training or given.compile_cache is None or (by_itself and len(gpus) != 1):
    return []
  from loopwright.engine import compile_cache

  made = compile_cache.opened(given.compile_cache, vars(given.part(Numerics)))
  return [made] if made else []


def _train_steps(given: Options, trainer: Trainer) -> int:
  """Returns the step at which training ends."""
  length, examples = given.part(Length), None
  if length.train_epochs is not None and trainer.source is not None:
    examples = getattr(main_source(trainer.source()), "num_examples", None)
  return length.steps(examples, trainer.global_batch_size)


def _facts(given: Options) -> dict[str, Any]:
  """Returns what must be the same on all workers, by name."""
  groups = (BatchSize, Length, Intervals, Numerics, Evaluation, Hangs)
  of = type(given.task) if isinstance(given.task, Task) else given.task
  name = f"{getattr(of, '__module__', '')}.{getattr(of, '__qualname__', of)}"
  own = {"task": name, "run.keep_checkpoints": given.keep_checkpoints}
  return own | facts(*map(given.part, groups)) | configurables.bindings()


def defaults() -> dict[str, Any]:
  """Returns option of `run` -> default."""
  return {field.name: field.default for field in dataclasses.fields(Options)}


def _checkpoint(checkpoint: str | None, folder: str, mode: Mode) -> str | None:
  """Returns the local path of what to restore; None for the newest of the run."""
  if mode == "replay":
    return _saved_state(folder)
  return None if checkpoint is None else places.local_copy(checkpoint)


def _saved_state(folder: str) -> str:
  """Returns the path of the state that `StopOnNonFinite` has saved in a run folder."""
  from loopwright.run_folder.nonfinite import saved_state

  return saved_state(folder)


def _observers(
  strategy: tf.distribute.Strategy, folder: str, *, ledger: bool, training: bool
) -> list[Observer]:
  """Returns what watches the steps: the ledger if asked for, and whom several workers wait for."""
  recorder = (
    [registry.load("tool", "Recorder")(model_dir=folder, strategy=strategy)] if ledger else []
  )
  if not training or placement.of(strategy).cluster.size == 1:
    return recorder
  from loopwright.monitoring.communication import Communication

  return [*recorder, *Communication.of(strategy)]


def _folder(model_dir: str, mode: Mode) -> places.RunFolder:
  """Returns the run folder; raises a ConfigError if it cannot be used in this mode."""
  model_dir = places.path_of(model_dir)
  folder = places.place(model_dir)
  if not is_url(model_dir):
    places.require_writable(model_dir)
    if mode == "replay":
      _saved_state(model_dir)
  elif mode == "evaluate_continuously":
    raise ConfigError(
      f"mode 'evaluate_continuously' needs a folder on disk, and model_dir is {model_dir!r}: "
      "evaluate while training (run.eval_every_steps), or later with --mode=evaluate."
    )
  return folder


def _initial_weights(warm_start: WarmStart | None, folder: places.RunFolder) -> dict[str, str]:
  """Returns what processes of a new run must share; a wrong path fails before devices start."""
  if warm_start is None or folder.has_checkpoints():
    return {}
  return {"file of the warm start": warm_start.digest()}


def _optimizer(task: Task, optimizer: Any) -> Any:
  """Returns the task's own optimizer if it has one, else that of `run`.

  Raises:
    ConfigError: a call of `run` gives one too.
  """
  if task.own_optimizer is None:
    return optimizer
  if optimizer is not defaults()["optimizer"] and not configurables.bindings():
    raise ConfigError(
      f"received run.optimizer, but a {type(task).__name__} has its own, that of its compiled "
      "model; leave run.optimizer out, or compile the model with the other one."
    )
  return task.own_optimizer
