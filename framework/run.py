"""Assembles one run from its parts and drives it: what a gin file configures. Read it first.

run(task=Digits(), train_steps=1000, global_batch_size=128, model_dir="runs/digits")
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf
import tf_keras

from framework import configurables, forensics
from framework.actions.base import Action
from framework.backend import randomness
from framework.errors import ConfigError, unknown
from framework.evaluator import Evaluator
from framework.inputs import datasets
from framework.ledger.recorder import Recorder
from framework.optimizers import adapters
from framework.saving import assets
from framework.saving.checkpoints import CheckpointManager, list_checkpoints
from framework.saving.warm_start import WarmStart
from framework.session import Session
from framework.strategies import factories, rendezvous, servers, traits
from framework.task import Task, preprocess_of
from framework.trainer import Trainer

Mode = Literal[
  "train", "evaluate", "train_and_evaluate", "evaluate_continuously", "export", "replay"
]
Precision = Literal["float32", "mixed_float16", "mixed_bfloat16"]
MODES = ("train", "evaluate", "train_and_evaluate", "evaluate_continuously", "export", "replay")
TRAINING_MODES = ("train", "train_and_evaluate")
PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")


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
  eval_every_steps: int | None = None,
  eval_timeout_s: float | None = None,
  checkpoint_every_steps: int = 1000,
  keep_checkpoints: int = 3,
  seed: int = 0,
  shuffle: bool = True,
  precision: Precision = "float32",
  deterministic: bool = False,
  eager: bool = False,
  actions: Sequence[Action] = (),
  ledger: bool = False,
  checkpoint: str | None = None,
  warm_start: WarmStart | None = None,
) -> dict[str, float]:
  """Trains, evaluates or exports one task (host).

  A run that finds a checkpoint in `model_dir` goes on from it, to the same result as if it had
  never stopped.

  Args:
    task: what to learn: an instance, or a factory.
    train_steps: the step at which training ends.
    global_batch_size: examples an update, over all replicas and micro-batches; this or the next.
    per_replica_batch_size: examples an update of each replica, so that the global batch grows with
      their number.
    mode: "train", "evaluate" (the newest checkpoint), "train_and_evaluate",
      "evaluate_continuously" (every new checkpoint until `train_steps`), "export", or "replay" (the
      step at which StopOnNonFinite has stopped).
    model_dir: the run folder.
    strategy: a factory, such as `framework.strategies.factories.mirrored`.
    optimizer: a factory, or name -> factory; called in the strategy's scope.
    steps_per_loop: steps in one call of the compiled loop, between two reports to the host.
    eval_batch_size: None takes `global_batch_size`.
    eval_every_steps: steps between evaluations; None evaluates once, at the end.
    eval_timeout_s: how long "evaluate_continuously" waits for a new checkpoint, or for the run's
      assets before the first one; None for ever.
    checkpoint_every_steps: steps between checkpoints; the last step always gets one.
    keep_checkpoints: how many to keep.
    seed: of initial weights, example order, dropout and augmentation.
    shuffle: False reads the training examples in their own order.
    precision: the dtype policy of both Keras generations.
    deterministic: bit-identical repeats (slower): TensorFlow's op determinism.
    eager: no tf.function anywhere, for debugging.
    actions: what to call after training loops and evaluations, in the modes that train; see
      framework/actions/base.py.
    ledger: write down which examples each step consumes, in the modes that train, for
      `python -m framework.ledger <model_dir>`, which proves that none was skipped or repeated.
    checkpoint: what to "evaluate" or "export" in place of the newest: a path without suffix, or a
      folder, such as <model_dir>/best.
    warm_start: initial weights from another run or a file of Keras, in the modes that train, if
      the run does not go on from a checkpoint of its own.

  Returns:
    The last evaluation's metrics, or the last loop's in mode "train"; empty for "export" and
    "replay", and where the strategy makes this process a worker or server of another.

  Raises:
    ConfigError: a mistake of the user's, in one line.
    Preempted: SIGTERM came; the state is saved.
  """
  _check_values(
    mode=mode, precision=precision, train_steps=train_steps, global_batch_size=global_batch_size,
    per_replica_batch_size=per_replica_batch_size, steps_per_loop=steps_per_loop,
    keep_checkpoints=keep_checkpoints, eval_batch_size=eval_batch_size,
    eval_every_steps=eval_every_steps, checkpoint_every_steps=checkpoint_every_steps,
  )  # fmt: skip
  batch_size_on(1, global_batch_size, per_replica_batch_size)  # one of the two is there
  if checkpoint is not None and mode not in ("evaluate", "export"):
    raise ConfigError(
      f"run.checkpoint is {checkpoint!r} in mode {mode!r}, which goes on from the newest; leave it "
      "out, or use --mode=evaluate or --mode=export."
    )
  require_writable(model_dir)
  if mode == "replay":
    checkpoint = forensics.saved_state(model_dir)
  task = made_task(task)
  set_globals(seed, precision, deterministic=deterministic, eager=eager)
  rendezvous.declare(
    {
      "task": f"{type(task).__module__}.{type(task).__qualname__}",
      "code of the task": rendezvous.code_digest(sys.modules[type(task).__module__].__file__),
      "run.train_steps": train_steps,
      "run.global_batch_size": global_batch_size,
      "run.per_replica_batch_size": per_replica_batch_size,
      "run.steps_per_loop": steps_per_loop,
      "run.seed": seed,
      "run.precision": precision,
    }
    | _initial_weights(warm_start if mode in TRAINING_MODES else None, model_dir)
    | configurables.bindings()
  )
  chosen = made_strategy(strategy)
  if isinstance(chosen, servers.Server):
    chosen.serve()
    return {}
  replicas = chosen.num_replicas_in_sync
  global_batch_size = batch_size_on(replicas, global_batch_size, per_replica_batch_size)
  learned = assets.provide(
    task, model_dir=model_dir, cluster=traits.cluster_of(chosen), training=mode in TRAINING_MODES,
    timeout_s=eval_timeout_s if mode == "evaluate_continuously" else 0.0,
  )  # fmt: skip
  randomness.seed_everything(seed)  # initial weights do not depend on whether it was fitted here
  recorder = Recorder(model_dir=model_dir, strategy=chosen) if ledger else None
  trainer = made_trainer(
    task, chosen, optimizer=optimizer, global_batch_size=global_batch_size, seed=seed,
    shuffle=shuffle, eager=eager, recorder=recorder,
  )  # fmt: skip
  evaluator = None
  if mode not in ("train", "export", "replay"):
    evaluator = _made_evaluator(trainer, eval_batch_size or global_batch_size)
  session = Session(
    trainer=trainer,
    evaluator=evaluator,
    model_dir=model_dir,
    train_steps=train_steps,
    steps_per_loop=steps_per_loop,
    eval_every_steps=eval_every_steps,
    eval_timeout_s=eval_timeout_s,
    checkpoint_every_steps=checkpoint_every_steps,
    keep_checkpoints=keep_checkpoints,
    actions=actions if mode in TRAINING_MODES else (),
    checkpoint=checkpoint,
    assets=learned,
  )
  session.describe(precision=precision)
  if warm_start is not None and mode in TRAINING_MODES:
    session.start_from(warm_start)
  return session.go(mode)


def bound(parameter: str) -> Any:
  """Returns what the config in force gives `run` for a parameter, its default without a binding."""
  default = inspect.signature(run).parameters[parameter].default
  return configurables.bound("run", parameter, default)


def batch_size_on(
  replicas: int, global_batch_size: int | None, per_replica_batch_size: int | None
) -> int:
  """Returns the global batch size on so many replicas, or raises ConfigError."""
  if global_batch_size is not None and per_replica_batch_size is not None:
    raise ConfigError(
      f"received both run.global_batch_size={global_batch_size} and "
      f"run.per_replica_batch_size={per_replica_batch_size}; choose one."
    )
  if global_batch_size is not None:
    return global_batch_size
  if per_replica_batch_size is not None:
    return replicas * per_replica_batch_size
  raise ConfigError(
    "run has neither global_batch_size nor per_replica_batch_size; set one, such as "
    "run.global_batch_size = 128."
  )


def bound_batch_size(replicas: int) -> int:
  """Returns what the config in force makes a global batch on so many replicas."""
  return batch_size_on(replicas, bound("global_batch_size"), bound("per_replica_batch_size"))


def restored(model_dir: str) -> Task:
  """Returns the task of a run folder, with the weights of its newest checkpoint (host).

  On this process's default device, for a command of the task's own, such as `python -m tasks.gan`.
  The weights are the moving averages, if the run has them.

  Raises:
    ConfigError: there is no run, or no whole checkpoint.
  """
  configurables.parse([os.path.join(model_dir, "operative_config.gin")])
  task, strategy = made_task(bound("task")), factories.default()
  keras.config.set_dtype_policy(bound("precision"))
  learned = assets.provide(
    task, model_dir=model_dir, cluster=traits.cluster_of(strategy), training=False, timeout_s=0.0
  )
  trainer = bound_trainer(task, strategy)
  directory = os.path.join(model_dir, "checkpoints")
  manager = CheckpointManager(trainer=trainer, directory=directory, experiment={}, assets=learned)
  if not manager.restore_newest():
    raise ConfigError(f"there is no whole checkpoint in {directory!r}; train first.")
  if trainer.parts.ema is not None:
    trainer.parts.ema.swap()
  return task


def bound_trainer(task: Task, strategy: tf.distribute.Strategy) -> Trainer:
  """Returns `made_trainer` with what the config in force gives `run` (host)."""
  return made_trainer(
    task, strategy, optimizer=bound("optimizer"), seed=bound("seed"), shuffle=bound("shuffle"),
    global_batch_size=bound_batch_size(strategy.num_replicas_in_sync),
  )  # fmt: skip


def made_trainer(
  task: Task,
  strategy: tf.distribute.Strategy,
  *,
  optimizer: adapters.OptimizerFactory | Mapping[str, adapters.OptimizerFactory],
  global_batch_size: int,
  seed: int,
  shuffle: bool,
  eager: bool = False,
  recorder: Recorder | None = None,
) -> Trainer:
  """Returns the trainer that the config describes, which reads the task's training data (host)."""
  here, preprocess = traits.cluster_of(strategy), preprocess_of(task)

  def dataset(position: int, shard: datasets.Shard | None = None) -> tf.data.Dataset:
    source, rows = task.source("train"), here.rows(trainer.padded_batch_size)
    if recorder is not None:
      recorder.reads(
        source, global_batch_size=global_batch_size, seed=seed, position=position,
        shuffle=shuffle, rows=rows, padded_batch_size=trainer.padded_batch_size,
      )  # fmt: skip
    return datasets.train_dataset(
      source, global_batch_size=global_batch_size, pad_multiple=trainer.batch_multiple,
      seed=seed, position=position, preprocess=preprocess, shuffle=shuffle, rows=rows,
      shard=shard,
    )  # fmt: skip

  trainer: Trainer = configurables.configured(Trainer)(
    task=task, strategy=strategy, dataset_fn=dataset, global_batch_size=global_batch_size,
    optimizer=optimizer, eager=eager, seed=seed, observers=[recorder] if recorder else (),
  )  # fmt: skip
  return trainer


def _made_evaluator(trainer: Trainer, batch_size: int) -> Evaluator:
  task, strategy = trainer.task, trainer.strategy
  replicas = strategy.num_replicas_in_sync
  rows = traits.cluster_of(strategy).rows(datasets.padded_batch_size(batch_size, replicas))
  dataset = functools.partial(
    datasets.eval_dataset, task.source("eval"), global_batch_size=batch_size,
    pad_multiple=replicas, preprocess=preprocess_of(task), rows=rows,
  )  # fmt: skip
  evaluator: Evaluator = configurables.configured(Evaluator)(
    task=task, strategy=strategy, dataset=dataset, ema=trainer.parts.ema, eager=trainer.eager
  )
  return evaluator


def _initial_weights(warm_start: WarmStart | None, model_dir: str) -> dict[str, str]:
  """What the processes of a new run must agree on; a wrong path shows before a device is used."""
  if warm_start is None or list_checkpoints(os.path.join(model_dir, "checkpoints")):
    return {}
  return {"file of the warm start": warm_start.digest()}


def _check_values(**values: Any) -> None:
  for name, allowed in (("mode", MODES), ("precision", PRECISIONS)):
    if values[name] not in allowed:
      raise unknown(f"run.{name}", values[name], allowed)
  for name in set(values) - {"mode", "precision"}:
    value = values[name]
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
      raise ConfigError(f"run.{name} is {value!r}; it must be a whole number of 1 or more.")


def require_writable(model_dir: str) -> None:
  """Raises ConfigError unless files can be written to the run folder, which is made (host)."""
  if set("*?[]") & set(model_dir):
    raise ConfigError(
      f"model_dir is {model_dir!r}; TensorFlow takes *, ?, [ and ] for wildcards and would not "
      "find its files again: choose a name without them."
    )
  probe = os.path.join(model_dir, f".writable-{uuid.uuid4().hex}")  # one a worker
  try:
    tf.io.gfile.makedirs(model_dir)
    with tf.io.gfile.GFile(probe, "w") as file:
      file.write("")
    tf.io.gfile.remove(probe)
  except tf.errors.OpError as error:
    raise ConfigError(
      f"cannot write to model_dir {model_dir!r} ({type(error).__name__}); "
      "choose a folder that you may write to with --model_dir."
    ) from error


def made_task(task: Task | Callable[[], Task]) -> Task:
  """Returns the task, made if a factory was given, or raises ConfigError."""
  made = task if isinstance(task, Task) else task() if callable(task) else task
  if not isinstance(made, Task):
    raise ConfigError(
      f"run.task is a {type(made).__name__}; it must be a framework.Task: subclass Task, and write "
      "run.task = @YourTask()."
    )
  return made


def made_strategy(strategy: Any) -> tf.distribute.Strategy | servers.Server:
  """Returns the strategy, made if a factory was given, or raises ConfigError."""
  made = strategy() if callable(strategy) else strategy
  if not isinstance(made, tf.distribute.Strategy | servers.Server):
    raise ConfigError(
      f"run.strategy gives a {type(made).__name__}; it must be a factory of a tf.distribute "
      "strategy, such as @auto, @one_device, @mirrored or @central_storage."
    )
  return made


def set_globals(seed: int, precision: str, *, deterministic: bool, eager: bool) -> None:
  """Makes the process-wide settings that TensorFlow and Keras have for these four (host)."""
  randomness.seed_everything(seed)
  keras.config.set_dtype_policy(precision)
  tf_keras.mixed_precision.set_global_policy(precision)
  if deterministic:
    tf.config.experimental.enable_op_determinism()
  if eager:
    tf.data.experimental.enable_debug_mode()  # so that preprocess() runs eagerly too
