"""User errors of a trainer: options that contradict, loops traced again, no weight above 0."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from absl import logging

from loopwright.engine.step_parts import JitCompile, StepsPerProgram
from loopwright.errors import ConfigError, require_integer
from loopwright.graphs.aliases import Model
from loopwright.metrics.sums import MetricSums
from loopwright.models import models
from loopwright.optimizers.adapters import prefix

if TYPE_CHECKING:
  from loopwright.trainer import Trainer

FLOATS = {"float16", "bfloat16", "float32", "float64"}


def check_options(
  clip_norm: float | None,
  clip_value: float | None,
  accumulation_steps: int,
  eager: bool,
  jit_compile: JitCompile,
) -> None:
  """Raises ConfigError: a value is out of range, or two options contradict."""
  if clip_norm is not None and clip_value is not None:
    raise ConfigError(
      f"received both Trainer.clip_norm={clip_norm} and Trainer.clip_value={clip_value}; "
      "choose one."
    )
  for name, value in (("clip_norm", clip_norm), ("clip_value", clip_value)):
    if value is not None and not value > 0:
      raise ConfigError(f"Trainer.{name} is {value}; it must be above 0, or None for no clipping.")
  require_integer("Trainer.accumulation_steps", accumulation_steps, at_least=1)
  if eager and jit_compile:
    raise ConfigError("received both eager=True and Trainer.jit_compile=True; choose one.")


def steps_per_program(
  steps: StepsPerProgram, eager: bool, jit_compile: JitCompile
) -> StepsPerProgram:
  """Returns how many steps may be one program: 1 if nothing is to be compiled.

  Raises:
    ConfigError: the number is out of range, or nothing is to be compiled.
  """
  without = "eager=True" if eager else "Trainer.jit_compile=False" if jit_compile is False else ""
  if steps == "auto":
    return 1 if without else steps
  require_integer("Trainer.steps_per_program", steps, at_least=1)
  if steps > 1 and without:
    raise ConfigError(
      f"received both {without} and Trainer.steps_per_program={steps}, which XLA compiles; choose "
      "one."
    )
  return steps


def check_batch_size(global_batch_size: int, replicas: int) -> None:
  """Raises ConfigError: some replica would have no example."""
  if global_batch_size < replicas:
    raise ConfigError(
      f"global_batch_size is {global_batch_size} for {replicas} replicas; it must be at least "
      f"{replicas}."
    )


def require_precision(precision: str, model: Model, traced: Collection[str]) -> None:
  """Raises ConfigError: a precision that no layer of the model, or no gradient, computes in.

  Args:
    precision: the dtype policy.
    model: the task's.
    traced: the dtypes of the backward passes, which count if there is no layer; empty if unknown.
  """
  layers = next(models.layers(model), None) is not None
  found = models.compute_dtypes(model) if layers or not traced else sorted(FLOATS & {*traced})
  if precision != "float32" and precision.removeprefix("mixed_") not in found:
    raise ConfigError(
      f"run.precision is {precision!r}, but the model computes in {', '.join(found)}, so "
      "it has no effect; make the model in build_model(), give from_keras() a function that makes "
      "it, or leave run.precision out."
    )


def require_initialized(graph: Any) -> None:
  """Raises ConfigError: the traced step makes a variable on several replicas."""
  for variable in graph.variables:
    name = variable.name.partition(":")[0]
    if type(variable).__name__ == "UnliftedInitializerVariable" and not variable.is_initialized():
      raise ConfigError(
        f"the step makes the variable {name!r}, which could not be restored on several replicas; "
        "make it in build_model()."
      )


def why_padded(trainer: Trainer, accumulation_steps: int) -> tuple[str, str] | None:
  """Returns why batches have rows without an example, and a remedy; None if they have none."""
  if trainer.global_batch_size == trainer.padded_batch_size:
    return None
  replicas = trainer.strategy.num_replicas_in_sync
  steps = f" x {accumulation_steps} accumulation_steps" if accumulation_steps > 1 else ""
  why = f"global_batch_size is {trainer.global_batch_size} for {replicas} replicas{steps}"
  return why, "choose a batch size that divides"


def require_used(
  own: Mapping[str, Any], parts: Mapping[str, Any], replaced: Collection[str]
) -> None:
  """Raises ConfigError: an attribute of the trainer was set that no step reads."""
  for name in (*replaced, "global_batch_size", "seed"):
    if name in own and own[name] is not parts[name]:
      remedy = f"call trainer.use({name}=...)" if name in replaced else "make another trainer"
      raise ConfigError(f"trainer.{name} was set to {own[name]!r}, without an effect; {remedy}.")


@functools.cache
def warn_of_unreached(task: str, names: tuple[str, ...]) -> None:
  """Warns, once for each kind of task, of variables for which no optimizer gets a gradient."""
  del task
  if names:
    logging.warning("no gradient reaches %s", ", ".join(names))


class LoopChecks:
  """What is checked after each loop (host).

  Attributes:
    traces: how many traces of the loop are no surprise.
    weight_seen: whether an example so far had a weight above 0, or need not have: a step with
      conditional updates may have none.
  """

  def __init__(self) -> None:
    self.traces = 1
    self.weight_seen, self._compiled = False, ""

  def say_compiled(self, compiled: str) -> None:
    """Logs what XLA compiles, once."""
    if compiled not in ("", self._compiled):
      self._compiled = compiled
      logging.info("XLA compiles %s", compiled)

  def warn_of_retracing(self, traces: int) -> None:
    """Warns if the loop was traced again: `traces` times so far."""
    if traces > self.traces:
      self.traces = traces
      logging.warning(
        "the training loop was traced again (%d times so far): a batch shape or a Python value in "
        "the step changed; keep batch shapes static and Python state out of train_step.",
        traces,
      )

  def require_weight(self, metrics: MetricSums, optimizers: Iterable[str], step: int) -> None:
    """Raises if all weights up to `step` are 0; single batches may have weight 0.

    Args:
      metrics: of the loop.
      optimizers: their names.
      step: the number of steps so far.
    """
    losses = {f"{prefix(name)}loss" for name in optimizers}
    self.weight_seen = self.weight_seen or not losses <= metrics.weightless
    if not self.weight_seen:
      raise ConfigError(
        f"all examples up to step {step} have weight 0, so nothing was trained; batch['weight'], "
        "from the source or preprocess(), must be above 0 for some."
      )
