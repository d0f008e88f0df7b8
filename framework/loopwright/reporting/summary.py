"""The text before a run, and its last line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from loopwright import registry
from loopwright.aliases import Model, Variable
from loopwright.models import models
from loopwright.reporting.progress import Choice, format_number
from loopwright.run_folder.metrics_log import flatten, scalars

if TYPE_CHECKING:
  from loopwright.trainer import Trainer


TF32 = "; products of float32 in TF32, with 10 bits of mantissa (run.tf32)"


class ParameterCount(NamedTuple):
  """The number of elements of a model's weights."""

  trainable: int
  total: int


def count_parameters(model: Model) -> ParameterCount | None:
  """Counts the weights of a Keras 3 model, a tf_keras model, a `tf.Module`, or a dict/list of them.

  A shared variable counts once. The state of Keras's random generators and metrics does not count.

  Returns:
    None if a Keras model is not built yet, so that its weights are unknown.
  """
  if any(getattr(part, "built", True) is False for part in models.parts(model)):
    return None
  return ParameterCount(_count(models.trainable_variables(model)), _count(models.weights(model)))


def _count(variables: Sequence[Variable]) -> int:
  return sum(math.prod(variable.shape) for variable in variables)


def describe(
  *,
  task: str,
  model: Model = None,
  strategy: str | None = None,
  replicas: int = 1,
  devices: Sequence[str] = (),
  global_batch_size: int | None = None,
  per_replica_batch_size: int | None = None,
  accumulation_steps: int = 1,
  reduction: str | None = None,
  precision: str | None = None,
  gpus: Sequence[str] = (),
  loss_scale: str | None = None,
  optimizer: str | None = None,
  start_step: int = 0,
  train_steps: int | None = None,
  model_dir: str | None = None,
) -> str:
  """Returns the lines to print before training: `name  value`, aligned, without what is not given.

  Args:
    model: what `build_model` returned: a model, or a dict or list of them.
    per_replica_batch_size: rows per replica, padding included.
    accumulation_steps: micro-batches per step.
    gpus: a text for each kind of GPU.
    start_step: the step at which training continues.
  """
  known = [
    ("task", task),
    *_model_rows(model),
    ("strategy", _strategy_text(strategy, replicas, devices)),
    ("GPUs", "; ".join(gpus)),
    ("batch", _batch_text(global_batch_size, per_replica_batch_size, accumulation_steps)),
    ("reduction", reduction),
    ("precision", precision),
    ("loss scale", loss_scale),
    ("optimizer", optimizer),
    ("steps", _steps_text(start_step, train_steps)),
    ("model_dir", model_dir),
  ]
  rows = [(name, value) for name, value in known if value]
  width = max(len(name) for name, _ in rows)
  return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def describe_run(trainer: Trainer, *, precision: str, **more: Any) -> str:
  """Returns the lines of `describe` about a trainer, with `more` of its arguments (host)."""
  parts, replicas = trainer.parts, trainer.strategy.num_replicas_in_sync
  devices = trainer.placement.devices
  on_gpus = any("GPU" in name for name in devices)
  in_tf32 = on_gpus and registry.load("part", "in_tf32")(devices)
  return describe(
    task=type(trainer.task).__name__,
    model=trainer.task.model,
    strategy=trainer.placement.name,
    devices=devices,
    gpus=registry.load("part", "described_gpus")(devices) if on_gpus else [],
    precision=precision + (TF32 if in_tf32 else ""),
    replicas=replicas,
    global_batch_size=trainer.global_batch_size,
    per_replica_batch_size=trainer.padded_batch_size // replicas,
    accumulation_steps=parts.accumulation_steps,
    reduction=parts.reduction.describe(),
    loss_scale=parts.loss_scale.describe(),
    optimizer=optimizer_names(trainer),
    **more,
  )


def optimizer_names(trainer: Trainer) -> str:
  """Returns each optimizer of a trainer as "name: class", joined with commas."""
  named = trainer.parts.optimizers.items()
  return ", ".join(f"{name}: {type(one.optimizer).__name__}" for name, one in named)


def _model_rows(model: Model) -> list[tuple[str, str]]:
  if model is None:
    return []
  if isinstance(model, Mapping):
    rows = [(f"model {name}", _model_text(part)) for name, part in model.items()]
    return [*rows, ("all models", _parameters_text(model))]
  return [("model", _model_text(model))]


def _model_text(model: Model) -> str:
  return f"{getattr(model, 'name', None) or type(model).__name__}, {_parameters_text(model)}"


def _parameters_text(model: Model) -> str:
  count = count_parameters(model)
  if count is None:
    return "not built yet"
  if count.trainable == count.total:
    return f"{count.total:,} parameters"
  return f"{count.total:,} parameters, {count.trainable:,} trainable"


def _strategy_text(strategy: str | None, replicas: int, devices: Sequence[str]) -> str:
  where = f" on {', '.join(devices)}" if devices else ""
  return f"{strategy or 'default'}, {replicas} replica{'' if replicas == 1 else 's'}{where}"


def _batch_text(batch_size: int | None, per_replica: int | None, micro_batches: int) -> str | None:
  if batch_size is None:
    return None
  text = f"{batch_size} examples a step"
  if per_replica is not None:
    text += f", {per_replica} a replica"
  return f"{text}, in {micro_batches} micro-batches" if micro_batches > 1 else text


def _steps_text(start: int, end: int | None) -> str | None:
  return None if end is None else f"{end}, continuing from {start}" if start else f"{end}"


def result_line(
  *,
  step: int,
  seconds: float,
  model_dir: str | None = None,
  evaluation: Mapping[str, Any] | None = None,
  split: str = "eval",
  status: str = "done",
  choice: Choice | None = None,
  of_step: int | None = None,
  skipped: int = 0,
  more: Sequence[str] = (),
) -> str:
  """Returns the last line: `done: step 1000 | eval loss 0.0571 accuracy 0.9833 | 23.4 s | runs/x`.

  Args:
    step: the run's.
    evaluation: the last values of `split`, if any.
    split: "eval" or "train".
    status: such as "done" or "stopped".
    choice: which values to show; None shows all but those of the pace.
    of_step: the step of `evaluation`, which the line names if it is not `step`.
    skipped: steps without an update, as gradients were not finite; told if they are more than a
      hundredth, as a dynamic loss scale skips some of each thousand.
    more: what actions add, such as the best evaluation; the same text only once.
  """
  found = scalars(flatten(evaluation or {}))
  names = (choice or Choice()).of(found)
  values = " ".join(f"{name} {format_number(found[name])}" for name in names)
  at = "" if of_step in (None, step) else f" at step {of_step}"
  lost = f"skipped {skipped} of {step} steps, not finite" if 100 * skipped > step else ""
  told = [values and f"{split}{at} {values}", lost, *dict.fromkeys(more)]
  parts = [f"step {step}", *told, f"{seconds:.1f} s", model_dir]
  return f"{status}: " + " | ".join(part for part in parts if part)
