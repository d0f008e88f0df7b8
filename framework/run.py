"""Assembles one run from its parts and drives it: what a gin file configures. Read it first."""

from __future__ import annotations

import inspect
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import keras
import tensorflow as tf

from framework import configurables, forensics
from framework.actions.base import Action
from framework.backend import randomness
from framework.builder import Recipe, batch_size_on, made_strategy, made_task, set_globals
from framework.errors import ConfigError, unknown
from framework.ledger.recorder import Recorder
from framework.modes import MODES, TRAINING_MODES, Mode
from framework.optimizers import adapters
from framework.saving import assets
from framework.saving.checkpoints import CheckpointManager, list_checkpoints
from framework.saving.warm_start import WarmStart
from framework.session import Cadence, Session
from framework.strategies import factories, rendezvous, servers, traits
from framework.task import Task

Precision = Literal["float32", "mixed_float16", "mixed_bfloat16"]
PRECISIONS = get_args(Precision)


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
  _check_choice("mode", mode, MODES)
  _check_choice("precision", precision, PRECISIONS)
  sizes = {"global_batch_size": global_batch_size, "per_replica_batch_size": per_replica_batch_size}
  batch_size_on(1, **sizes)  # raises unless exactly one is set
  cadence = Cadence(
    train_steps=train_steps, steps_per_loop=steps_per_loop, eval_every_steps=eval_every_steps,
    eval_timeout_s=eval_timeout_s, checkpoint_every_steps=checkpoint_every_steps,
    keep_checkpoints=keep_checkpoints,
  )  # fmt: skip
  _check_counts({**sizes, "eval_batch_size": eval_batch_size, **cadence.counts()})
  if checkpoint is not None and mode not in ("evaluate", "export"):
    raise ConfigError(
      f"run.checkpoint is {checkpoint!r} in mode {mode!r}, which goes on from the newest; leave it "
      "out, or use --mode=evaluate or --mode=export."
    )
  require_writable(model_dir)
  if mode == "replay":
    checkpoint = forensics.saved_state(model_dir)
  training = mode in TRAINING_MODES
  warm_start = warm_start if training else None
  task = made_task(task)
  set_globals(seed, precision, deterministic=deterministic, eager=eager)
  rendezvous.declare(
    {
      "task": f"{type(task).__module__}.{type(task).__qualname__}",
      "code of the task": rendezvous.code_digest(sys.modules[type(task).__module__].__file__),
      "run.train_steps": train_steps,
      **{f"run.{name}": size for name, size in sizes.items()},
      "run.steps_per_loop": steps_per_loop,
      "run.seed": seed,
      "run.precision": precision,
    }
    | _initial_weights(warm_start, model_dir)
    | configurables.bindings()
  )
  chosen = made_strategy(strategy)
  if isinstance(chosen, servers.Server):
    chosen.serve()
    return {}
  recipe = Recipe(
    optimizer=optimizer, global_batch_size=batch_size_on(chosen.num_replicas_in_sync, **sizes),
    eval_batch_size=eval_batch_size, seed=seed, shuffle=shuffle, eager=eager,
  )  # fmt: skip
  learned = assets.provide(
    task, model_dir=model_dir, cluster=traits.cluster_of(chosen), training=training,
    timeout_s=eval_timeout_s if mode == "evaluate_continuously" else 0.0,
  )  # fmt: skip
  randomness.seed_everything(seed)  # initial weights do not depend on whether it was fitted here
  recorder = Recorder(model_dir=model_dir, strategy=chosen) if ledger else None
  trainer = recipe.trainer(task, chosen, recorder=recorder)
  evaluator = None if mode in ("train", "export", "replay") else recipe.evaluator(trainer)
  session = Session(
    trainer=trainer, evaluator=evaluator, model_dir=model_dir, cadence=cadence,
    actions=actions if training else (), assets=learned,
  )  # fmt: skip
  session.restore(checkpoint)
  session.describe(precision=precision)
  if warm_start is not None:
    session.start_from(warm_start)
  return session.go(mode)


def bound(parameter: str) -> Any:
  """Returns what the config in force gives `run` for a parameter, its default without a binding."""
  default = inspect.signature(run).parameters[parameter].default
  return configurables.bound("run", parameter, default)


def bound_recipe(replicas: int = 1) -> Recipe:
  """Returns the recipe that the config in force gives `run`, on this number of replicas."""
  batch_size = batch_size_on(replicas, bound("global_batch_size"), bound("per_replica_batch_size"))
  names = ("optimizer", "eval_batch_size", "seed", "shuffle")
  return Recipe(global_batch_size=batch_size, **{name: bound(name) for name in names})


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
  trainer = bound_recipe().trainer(task, strategy)
  directory = os.path.join(model_dir, "checkpoints")
  manager = CheckpointManager(trainer=trainer, directory=directory, experiment={}, assets=learned)
  if not manager.restore_newest():
    raise ConfigError(f"there is no whole checkpoint in {directory!r}; train first.")
  if trainer.parts.ema is not None:
    trainer.parts.ema.swap()
  return task


def _initial_weights(warm_start: WarmStart | None, model_dir: str) -> dict[str, str]:
  """What the processes of a new run must agree on; a wrong path shows before a device is used."""
  if warm_start is None or list_checkpoints(os.path.join(model_dir, "checkpoints")):
    return {}
  return {"file of the warm start": warm_start.digest()}


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
  if value not in choices:
    raise unknown(f"run.{name}", value, choices)


def _check_counts(values: Mapping[str, int | None]) -> None:
  for name, value in values.items():
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
