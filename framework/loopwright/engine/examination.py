"""The loop, examined once it is traced and before it runs; what to do if XLA refuses it then."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from absl import logging

from loopwright.graphs import xla
from loopwright.models import models, replica_state
from loopwright.optimizers.loss_scale import LossScale, dynamic

LONG = 10_000
"""Steps of a run that gains more by a program of several than the program takes to compile."""

if TYPE_CHECKING:
  from loopwright.engine.step_parts import InputWait, Replaced
  from loopwright.trainer import Trainer


def examine(
  trainer: Trainer,
  trace: Callable[[], tf.Graph | None],
  iterator: Any,
  wait: InputWait,
  usual_scale: bool,
) -> None:
  """Traces the loop, and again with what only its trace shows: the loss scale, the programs (host).

  Args:
    trace: traces the loop; returns its graph, None where one graph is not all of it.
    iterator: of the batches.
    wait, usual_scale: see `compare`, `scale_of`.
  """
  compare(trainer, graph := trace(), wait=wait)
  if scale := scale_of(trainer, usual=usual_scale):
    trainer.use(loss_scale=scale)
    trace()
  while steps := steps_of_program(trainer, graph, iterator):
    trainer.use(steps_per_program=steps)
    trace()


def compare(trainer: Trainer, graph: tf.Graph | None, *, wait: InputWait) -> None:
  """Compares what the loop reads and assigns with what is saved, and equal on all replicas (host).

  Args:
    graph: of the traced loop; None where one graph is not all of it.
    wait: the trainer's, whose variables begin anew with each loop, as those of its metrics.
  """
  root = tf.train.Checkpoint(**trainer.checkpoint_items())
  saved = [v for v in tf.train.TrackableView(root).descendants() if models.is_variable(v)]
  equal = [*trainer.assigned.values()]
  equal += replica_state.averaged(trainer.task.model, equal=trainer.assigned)
  for one in trainer.parts.optimizers.values():
    slots = [*one.optimizer.variables, *one.fusion.variables]
    saved, equal = [*saved, *slots], [*equal, *slots, *one.variables]
  saved += [*trainer.metrics.variables, *wait.variables]
  transient = [*trainer.parts.observers, trainer.placement.ordering_tokens()]
  transient += [one.optimizer for one in trainer.parts.optimizers.values()]  # as its present rate
  trainer.state.examine(graph, saved=saved, equal=equal, transient=transient)


def scale_of(trainer: Trainer, *, usual: bool) -> LossScale | None:
  """Returns the loss scale with which to trace the loop again; None if it may stay (host).

  Args:
    usual: whether the scale follows the gradients: float16 gets a dynamic one.
  """
  scale = trainer.parts.loss_scale
  if usual and scale.factor() is None and "float16" in trainer.gradient_dtypes:
    with trainer.strategy.scope():
      scale = dynamic()
  learnt = [each.learns(scale, trainer.state) for each in trainer.parts.observers]
  return scale if any(learnt) or scale is not trainer.parts.loss_scale else None


def steps_of_program(trainer: Trainer, graph: tf.Graph | None, iterator: Any) -> int | None:
  """Returns how many steps are one program if the loop is traced again; None if it may stay (host).

  Args:
    graph: of the traced loop; None where one graph is not all of it.
    iterator: of its batches.
  """
  given, planned = trainer.parts.steps_per_program, trainer.planned
  why = trainer.parts.left_out.get(f"{given} steps")
  if given not in ("auto", 1) and graph is None:
    why = f"those of {trainer.placement.name} run one by one"
  if why:
    logging.info("XLA does not compile %s steps as one program: %s", given, why)
    return 1
  if given != "auto" or graph is None or planned is None or planned.train_steps < LONG:
    return None
  from loopwright.engine.several_steps import chosen

  return chosen(trainer, graph, iterator, planned.steps_per_loop)


def or_without_xla(trainer: Trainer, run: Callable[[], None]) -> None:
  """Runs a loop; if XLA refuses the whole step, without kept programs, or without XLA (host).

  A step that is one program has not run then, but for the read of its batch. One of several may
  have run in part: it begins without kept programs, unless the user asks for them.
  """
  before, whole = int(trainer.global_step.numpy()), trainer.compiled.endswith(xla.AS_ONE)
  if trainer.parts.jit_compile and not whole:
    from loopwright.engine.compile_cache import without_kept

    without_kept()
  try:
    run()
  except tf.errors.OpError as error:
    if not whole or int(trainer.global_step.numpy()) > before:
      raise
    from loopwright.engine.compile_cache import without_kept

    if without_kept(error):
      trainer.use()  # TensorFlow keeps the error of a program that it could not read, by its name
    elif xla.refuses(error) and (instead := _without(trainer)):
      from loopwright.host.failures import failure

      logging.info("XLA compiles nothing: %s", failure(error))
      trainer.use(**instead)
    else:
      raise
    trainer.reset_input()
    or_without_xla(trainer, run)


def _without(trainer: Trainer) -> Replaced:
  """Returns what goes on without the program that XLA has refused; nothing if it must compile."""
  if trainer.parts.steps_per_program not in ("auto", 1):
    return {"steps_per_program": 1}
  return {"jit_compile": False} if trainer.parts.jit_compile == "auto" else {}
