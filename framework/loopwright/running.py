"""Assembles and drives one run, as a gin file configures it. Read it first.

run(task=Digits(), train_steps=1000, global_batch_size=128, model_dir="runs/digits")
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from loopwright import configurables, registry
from loopwright.actions.base import Action
from loopwright.actions.time_budget import Communication
from loopwright.builder import Recipe, made_task, set_globals
from loopwright.errors import ConfigError, unknown
from loopwright.flight import Flight
from loopwright.going_on import Start, examples, require_any_size
from loopwright.graphs import randomness
from loopwright.host import bounded
from loopwright.modes import MODES, TRAINING_MODES, Mode
from loopwright.observers import Observer
from loopwright.optimizers import adapters
from loopwright.options import (
  BatchSize,
  Cadence,
  Evaluation,
  GpuMemory,
  Gpus,
  Group,
  Numerics,
  Precision,
  facts,
  names_of,
  taken,
)
from loopwright.run_folder import assets, history, layout, nonfinite, remote
from loopwright.run_folder.checkpoints import CheckpointManager
from loopwright.run_folder.warm_start import WarmStart
from loopwright.session import Session
from loopwright.strategies import cluster as clusters
from loopwright.strategies import factories, placement
from loopwright.strategies.gpus import warn_of_unseen
from loopwright.task import Task
from loopwright.trainer import Trainer


def run(
  *,
  task: Task | Callable[[], Task],
  train_steps: int,
  global_batch_size: int | None = None,
  per_replica_batch_size: int | None = None,
  mode: Mode = "train_and_evaluate",
  model_dir: str,
  strategy: factories.StrategyFactory = factories.auto,
  optimizer: adapters.OptimizerFactory
  | Mapping[str, adapters.OptimizerFactory] = keras.optimizers.Adam,
  steps_per_loop: int = 100,
  eval_batch_size: int | None = None,
  eval_steps: int | None = None,
  eval_every_steps: int | None = None,
  eval_timeout_s: float | None = None,
  checkpoint_every_steps: int = 1000,
  keep_checkpoints: int = 3,
  hang_timeout_s: float | None = None,
  end_if_hung: bool = False,
  seed: int = 0,
  shuffle: bool = True,
  precision: Precision = "float32",
  tf32: bool | None = None,
  deterministic: bool = False,
  eager: bool = False,
  gpus: Sequence[int] | None = None,
  gpu_memory: GpuMemory = "all",
  actions: Sequence[Action] = (),
  ledger: bool = False,
  checkpoint: str | None = None,
  warm_start: WarmStart | None = None,
  accept_changes: bool = False,
) -> dict[str, float]:
  """Trains, evaluates or exports one task (host).

  If `model_dir` has a checkpoint, the run resumes from it; the result is the same as without the
  interruption. The config must be the same too, except how far and how often, actions, strategy
  and number of replicas; see docs/configuration.md.

  Args:
    task: a `Task`, or a factory of one.
    train_steps: the step at which training ends.
    global_batch_size: examples per update over all replicas; or set `per_replica_batch_size`.
    per_replica_batch_size: examples per update on each replica; the global batch grows with the
      number of replicas.
    mode: "train", "evaluate" (the newest checkpoint), "train_and_evaluate",
      "evaluate_continuously" (every new checkpoint until `train_steps`), "export", or "replay" (the
      step at which StopOnNonFinite stopped).
    model_dir: the run folder; or the URL of one, such as s3://bucket/run, see
      docs/remote-folders.md.
    strategy: a factory, such as `loopwright.strategies.factories.mirrored`.
    optimizer: a factory, or name -> factory; called in the strategy's scope. A task of
      `loopwright.from_keras` brings its own instead.
    steps_per_loop: steps in one call of the compiled loop; the host gets metrics after each call.
    eval_batch_size: examples per evaluation batch; None uses the global batch size.
    eval_steps: evaluate at most so many batches of each evaluation set; None evaluates all.
    eval_every_steps: steps between evaluations; None evaluates once, at the end.
    eval_timeout_s: seconds that "evaluate_continuously" waits for a new checkpoint, or for the
      run's assets before the first one; None waits without limit.
    checkpoint_every_steps: a checkpoint is saved at each multiple of it, where a loop then ends,
      and at the last step.
    keep_checkpoints: the number of checkpoints to keep.
    hang_timeout_s: seconds without progress after which a line says which worker is behind, and in
      what; None takes ten times the usual time of what it does, and at least a minute.
    end_if_hung: after that line, the processes of the command line end with status 1.
    seed: for initial weights, example order, dropout and augmentation.
    shuffle: False reads the training examples in source order.
    precision: the dtype policy of Keras 3 and tf_keras.
    tf32: whether GPUs of Ampere and later compute products and convolutions of float32 in TF32,
      with 10 bits of mantissa; None keeps TensorFlow's choice, which is to do so.
    deterministic: bit-identical repeats (slower), by TensorFlow's op determinism.
    eager: use no tf.function, for debugging.
    gpus: which GPUs this process uses, by their numbers among those that TensorFlow sees; None uses
      all, () none.
    gpu_memory: what TensorFlow takes of the memory of each GPU: "all" at once, "grow" as it needs
      it, or at most so many MiB.
    actions: called after training loops and evaluations, in training modes; see
      loopwright/actions/base.py.
    ledger: record the examples of each step, in training modes; `python -m loopwright.tools.ledger
      <model_dir>` then proves that none was skipped or repeated.
    checkpoint: "evaluate" or "export" this one, not the newest: a path without suffix, or a folder
      such as <model_dir>/best.
    warm_start: initial weights from another run or a Keras file, in training modes; unused if the
      run resumes from its own checkpoint.
    accept_changes: go on with a config or data that differ from those that the run has had so far.

  Returns:
    The metrics of the last evaluation, or of the last loop in mode "train"; empty for "export" and
    "replay", and if the strategy makes this process a worker or server for another process.

  Raises:
    ConfigError: a user error, described in one line.
    Preempted: the process received SIGTERM or SIGHUP; the state is saved.
    KeyboardInterrupt: Ctrl-C; the state is saved, unless it came twice.
    StorageError: the disk of `model_dir` is full or has failed.
  """
  given, flight = dict(locals()), Flight()
  _require_mode(mode, checkpoint)
  batch_size, cadence = taken(BatchSize, given), taken(Cadence, given)
  evaluation, numerics = taken(Evaluation, given), taken(Numerics, given)
  place, training = _place(model_dir, mode), mode in TRAINING_MODES
  warm_start = warm_start if training else None
  task = made_task(task)
  given["optimizer"] = _optimizer(task, optimizer)
  set_globals(numerics, taken(Gpus, given))
  clusters.declare(
    {"task": f"{type(task).__module__}.{type(task).__qualname__}"}
    | facts(batch_size, cadence, evaluation, numerics)
    | _initial_weights(warm_start, place)
    | configurables.bindings()
  )
  flight.note("setup")
  chosen = placement.made(strategy)
  warn_of_unseen()
  flight.note("connecting")
  if isinstance(chosen, placement.Server):
    chosen.serve()
    return {}
  where = placement.of(chosen)
  if training:
    where.require_alone()
  recipe = taken(Recipe, given, global_batch_size=batch_size.on(chosen.num_replicas_in_sync))
  cluster = where.cluster
  if isinstance(place, remote.Remote):
    place.require_one_process(cluster.size)
  opened = place.opened(training=training and cluster.is_chief, export=mode == "export")
  with opened as at:
    checkpoint = _checkpoint(checkpoint, at.folder, mode)
    if cluster.is_chief and (versions := history.changed_versions(at.folder)):
      logging.warning("the run in %s was made with other versions: %s", at.shown, versions)
    start = Start(
      task=task, arguments=given, global_batch_size=recipe.global_batch_size, model_dir=at.folder,
      training=training, accept=accept_changes,
    )  # fmt: skip
    start.require_config()
    learned = assets.provide(
      task, model_dir=at.folder, cluster=cluster, training=training, changed=start.changes_task,
      timeout_s=eval_timeout_s if mode == "evaluate_continuously" else 0.0,
    )  # fmt: skip
    randomness.seed_everything(seed)  # again: fit() may have drawn random numbers in this process
    observers = _observers(chosen, at.folder, ledger=ledger, training=training)
    trainer = recipe.trainer(task, chosen, observers=observers)
    evaluator = None if mode in ("train", "export", "replay") else recipe.evaluator(trainer)
    if training:
      require_any_size(trainer, per_replica_batch_size=per_replica_batch_size)
      start.require_data(examples(trainer, evaluator))
      start.compare(trainer)
    session = Session(
      trainer=trainer, evaluator=evaluator, place=at, cadence=cadence, assets=learned,
      actions=actions if training else (), start=start if training else None, flight=flight,
    )  # fmt: skip
    session.restore(checkpoint)
    session.describe(precision=precision, notes=start.read_back(trainer) if training else ())
    if warm_start is not None:
      session.start_from(warm_start)
    return session.go(mode)


def bound(parameter: str) -> Any:
  """Returns the value that the current config binds to a parameter of `run`, else its default."""
  default = inspect.signature(run).parameters[parameter].default
  return configurables.bound("run", parameter, default)


def bound_group(group: type[Group], **more: Any) -> Group:
  """Returns a group of `run`'s options as the current config binds them, except for `more`."""
  names = inspect.signature(run).parameters.keys() - more.keys()
  return taken(group, {name: bound(name) for name in names_of(group) if name in names}, **more)


def bound_recipe(replicas: int = 1) -> Recipe:
  """Returns the recipe that the current config binds to `run`, on this number of replicas.

  It is never eager.
  """
  return bound_group(Recipe, global_batch_size=bound_group(BatchSize).on(replicas), eager=False)


def bound_mesh() -> tuple[Callable[[], tf.distribute.Strategy] | None, int]:
  """Returns what makes the mesh of the current config, on logical CPUs, and its size.

  The maker is None if the strategy is another.
  """
  name = "model_parallel"
  if name not in configurables.bindings().get("run.strategy", ""):
    return None, 1
  sizes = configurables.bound(name, "mesh", {})
  size = math.prod(sizes.values())

  def make() -> tf.distribute.Strategy:
    return placement.made(functools.partial(bound("strategy"), devices=factories.split_cpu(size)))

  return make, size


def restored(model_dir: str) -> Task:
  """Returns the task of a run folder, with the weights of its newest checkpoint (host).

  Uses moving averages if the run has them. For a task's own commands, such as
  `python -m loopwright.tasks.samples`; runs on the default device.

  Raises:
    ConfigError: the folder has no run, or no complete checkpoint.
  """
  return restored_trainer(model_dir)[0].task


def restored_trainer(model_dir: str) -> tuple[Trainer, str]:
  """Returns the trainer of a run folder, as `restored` does its task, and the digest of its assets.

  Raises:
    ConfigError: the folder has no run, or no complete checkpoint.
  """
  model_dir = remote.copied(model_dir)
  configurables.parse([os.path.join(model_dir, layout.CONFIG)])
  task, strategy = made_task(bound("task")), factories.default()
  keras.config.set_dtype_policy(bound("precision"))
  learned = assets.provide(
    task, model_dir=model_dir, cluster=placement.of(strategy).cluster, training=False, timeout_s=0.0
  )
  recipe = bound_recipe()
  optimizer = task.own_optimizer or recipe.optimizer
  trainer = dataclasses.replace(recipe, optimizer=optimizer).trainer(task, strategy)
  directory = os.path.join(model_dir, layout.CHECKPOINTS)
  manager = CheckpointManager(trainer=trainer, directory=directory, experiment={}, assets=learned)
  if not manager.restore_newest():
    raise ConfigError(f"there is no complete checkpoint in {directory!r}; train first.")
  if trainer.parts.ema is not None:
    trainer.parts.ema.swap()
  return trainer, learned


def _require_mode(mode: Mode, checkpoint: str | None) -> None:
  """Raises a ConfigError for an unknown mode, or one that has no use for the checkpoint."""
  if mode not in MODES:
    raise unknown("run.mode", mode, MODES)
  if checkpoint is not None and mode not in ("evaluate", "export"):
    raise ConfigError(
      f"run.checkpoint is {checkpoint!r}, but mode {mode!r} cannot use it; leave it out, or use "
      "--mode=evaluate or --mode=export."
    )


def _checkpoint(checkpoint: str | None, folder: str, mode: Mode) -> str | None:
  """Returns the local path of what to restore; None for the newest of the run."""
  if mode == "replay":
    return nonfinite.saved_state(folder)
  return None if checkpoint is None else remote.local_copy(checkpoint)


def _observers(
  strategy: tf.distribute.Strategy, folder: str, *, ledger: bool, training: bool
) -> list[Observer]:
  """Returns what watches the steps: the ledger if asked for, and whom several workers wait for."""
  recorder = (
    [registry.load("tool", "Recorder")(model_dir=folder, strategy=strategy)] if ledger else []
  )
  several = training and placement.of(strategy).cluster.size > 1
  return [*recorder, *(Communication.of(strategy) if several else [])]


def _place(model_dir: str, mode: Mode) -> remote.Local | remote.Remote:
  """Returns the run folder; raises a ConfigError if it cannot be used in this mode."""
  place = remote.place(model_dir)
  if isinstance(place, remote.Local):
    require_writable(model_dir)
    if mode == "replay":
      nonfinite.saved_state(model_dir)
  elif mode == "evaluate_continuously":
    raise ConfigError(
      f"mode 'evaluate_continuously' needs a folder on disk, and model_dir is {model_dir!r}: "
      "evaluate while training (run.eval_every_steps), or later with --mode=evaluate."
    )
  return place


def _initial_weights(
  warm_start: WarmStart | None, place: remote.Local | remote.Remote
) -> dict[str, str]:
  """Returns what processes of a new run must share; a wrong path fails before devices start."""
  if warm_start is None or place.checkpoints():
    return {}
  return {"file of the warm start": warm_start.digest()}


def _optimizer(task: Task, optimizer: Any) -> Any:
  """Returns the task's own optimizer if it has one, else that of `run`.

  Raises:
    ConfigError: a call of `run` gives one too.
  """
  if task.own_optimizer is None:
    return optimizer
  default = inspect.signature(run).parameters["optimizer"].default
  if optimizer is not default and not configurables.bindings():
    raise ConfigError(
      f"received run.optimizer, but a {type(task).__name__} has its own, that of its compiled "
      "model; leave run.optimizer out, or compile the model with the other one."
    )
  return task.own_optimizer


def require_writable(model_dir: str) -> None:
  """Makes the run folder; raises ConfigError if it is not writable (host)."""
  if set("*?[]") & set(model_dir):
    raise ConfigError(
      f"model_dir is {model_dir!r}; TensorFlow reads *, ?, [ and ] as wildcards and does not find "
      "the files again: choose a name without them."
    )
  if any("\ud800" <= character <= "\udfff" for character in model_dir):  # bytes, for Python
    raise ConfigError(f"model_dir is {model_dir!r}; its name must be text in UTF-8.")
  up = re.match(rf"(.*{os.sep})?\.\.(?={os.sep}|$)", model_dir, re.DOTALL)
  if up and not _is_plain(up[0]):
    raise ConfigError(  # TensorFlow takes a/../b for b, the system does not
      f"model_dir is {model_dir!r}, in which '..' follows a link, or no folder; write "
      f"{os.path.normpath(model_dir)!r}."
    )
  bounded.require_plain(model_dir)
  layout.require_no_links(model_dir)
  probe = os.path.join(model_dir, layout.PROBE)
  try:
    tf.io.gfile.makedirs(model_dir)
    with tf.io.gfile.GFile(probe, "w") as file:
      file.write("")
    with contextlib.suppress(tf.errors.NotFoundError):  # another worker has removed it
      tf.io.gfile.remove(probe)
  except tf.errors.OpError as error:
    raise ConfigError(
      f"cannot write to model_dir {model_dir!r} ({type(error).__name__}); "
      "set --model_dir to a writable folder."
    ) from error


def _is_plain(folder: str) -> bool:
  """Whether a folder with ".." in its path is there, and is what the path says without links."""
  plain = os.path.normpath(folder)
  return os.path.isdir(folder) and os.path.isdir(plain) and os.path.samefile(folder, plain)
