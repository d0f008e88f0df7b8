"""The text before a run, and its last line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import keras

from loopwright.graphs.aliases import Model, Variable
from loopwright.models import models
from loopwright.reporting.progress import Choice, named
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
  trainer: Trainer, *, precision: str, start_step: int, train_steps: int, model_dir: str
) -> str:
  """Returns the lines to print before training: `name  value`, aligned (host).

  Args:
    precision: the dtype policy.
    start_step: the step at which training continues; 0 in a new run.
    train_steps: the step at which it ends.
    model_dir: what the user calls the run folder.
  """
  parts, devices = trainer.parts, trainer.placement.devices
  on_gpus = any("GPU" in name for name in devices)
  in_tf32, of_gpus = False, ""
  if on_gpus:
    from loopwright.distribution import gpus

    in_tf32, of_gpus = gpus.in_tf32(devices), "; ".join(gpus.described(devices))
  known = [
    ("task", type(trainer.task).__name__),
    *_model_rows(trainer.task.model),
    ("also saved", ", ".join(trainer.state.kept)),
    ("strategy", _strategy_text(trainer, devices)),
    ("GPUs", of_gpus),
    ("batch", _batch_text(trainer)),
    ("reduction", parts.reduction.describe()),
    ("precision", precision + (TF32 if in_tf32 else "") + _own_dtypes(trainer)),
    ("batch norm", _batch_norm_text(trainer)),
    ("penalties", "of layers, as in fit: Task.regularization()" if trainer.is_penalised else ""),
    ("loss scale", parts.loss_scale.describe()),
    ("optimizer", optimizer_names(trainer)),
    ("steps", f"{train_steps}, continuing from {start_step}" if start_step else f"{train_steps}"),
    ("model_dir", model_dir),
  ]
  rows = [(name, value) for name, value in known if value]
  width = max(len(name) for name, _ in rows)
  return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def optimizer_names(trainer: Trainer) -> str:
  """Returns each optimizer of a trainer as "name: class", joined with commas."""
  named = trainer.parts.optimizers.items()
  return ", ".join(f"{name}: {type(one.optimizer).__name__}" for name, one in named)


def _own_dtypes(trainer: Trainer) -> str:
  """Returns what layers and gradients compute in, unless it is what the precision says."""
  found = models.compute_dtypes(trainer.task.model)
  usual = found <= {"float32", keras.config.dtype_policy().compute_dtype}
  other = sorted({"float16", "bfloat16"} & trainer.gradient_dtypes - found)
  layers = "" if usual else f", the layers in {', '.join(sorted(found))}"
  return layers + (f", gradients in {', '.join(other)}" if other else "")


def _model_rows(model: Model) -> list[tuple[str, str]]:
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


def _strategy_text(trainer: Trainer, devices: Sequence[str]) -> str:
  replicas = trainer.strategy.num_replicas_in_sync
  where = f" on {', '.join(devices)}" if devices else ""
  return f"{trainer.placement.name}, {replicas} replica{'' if replicas == 1 else 's'}{where}"


def _batch_text(trainer: Trainer) -> str:
  rows = trainer.padded_batch_size // trainer.strategy.num_replicas_in_sync
  text = f"{trainer.global_batch_size} examples a step, {rows} a replica"
  parts = trainer.parts.accumulation_steps
  return f"{text}, in {parts} micro-batches" if parts > 1 else text


def _batch_norm_text(trainer: Trainer) -> str:
  """Names what makes N replicas differ from one, unless the task accepts it."""
  alone = trainer.strategy.num_replicas_in_sync == 1
  if alone or "batch-norm statistics" in trainer.task.accepted:
    return ""
  local = [layer.name for layer in models.locally_normalised(trainer.task.model)]
  more = f" and {len(local) - 1} more" if len(local) > 1 else ""
  what = "in training: over each replica's own rows, over all with synchronized=True"
  return f"{local[0]}{more}, {what}" if local else ""


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
  values = " ".join(named(name, found[name]) for name in (choice or Choice()).of(found))
  at = "" if of_step in (None, step) else f" at step {of_step}"
  lost = f"skipped {skipped} of {step} steps, not finite" if 100 * skipped > step else ""
  told = [values and f"{split}{at} {values}", lost, *dict.fromkeys(more)]
  parts = [f"step {step}", *told, f"{seconds:.1f} s", model_dir]
  return f"{status}: " + " | ".join(part for part in parts if part)
