"""The text before a run, and its last line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from framework.backend import models
from framework.reporting.metrics_log import flatten
from framework.reporting.progress import Progress, format_number


class ParameterCount(NamedTuple):
  """The number of elements of a model's weights."""

  trainable: int
  total: int


def count_parameters(model: Any) -> ParameterCount | None:
  """Counts the weights of a Keras 3 model, a tf_keras model, a `tf.Module`, or a dict/list of them.

  A shared variable counts once. The state of Keras's random generators and metrics does not count.

  Returns:
    None if a Keras model is not built yet, so that its weights are unknown.
  """
  parts = list(models.parts(model))
  if any(getattr(part, "built", True) is False for part in parts):
    return None
  return ParameterCount(_count(parts, "trainable_"), _count(parts, ""))


def _count(parts: Sequence[Any], kind: str) -> int:
  sizes: dict[int, int] = {}
  for part in parts:
    names = f"{kind}weights" if models.is_keras(part) else f"{kind}variables"
    sizes.update({id(models.raw(v)): math.prod(v.shape) for v in getattr(part, names)})
  return sum(sizes.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
  """What a run consists of; the text leaves out what is None or empty.

  Attributes:
    model: what `build_model` returned: a model, or a dict or list of them.
    replicas: number of replicas in sync.
    global_batch_size: examples per training step.
    per_replica_batch_size: rows per replica, padding included.
    accumulation_steps: micro-batches per step.
    start_step: the step at which training continues.
    train_steps: the step at which it ends.
  """

  task: str
  model: Any = None
  strategy: str | None = None
  replicas: int = 1
  devices: Sequence[str] = ()
  global_batch_size: int | None = None
  per_replica_batch_size: int | None = None
  accumulation_steps: int = 1
  reduction: str | None = None
  precision: str | None = None
  loss_scale: str | None = None
  optimizer: str | None = None
  start_step: int = 0
  train_steps: int | None = None
  model_dir: str | None = None


def describe(description: Description) -> str:
  """Returns the lines to print before training: `name  value`, aligned."""
  d = description
  known = [
    ("task", d.task),
    *_model_rows(d.model),
    ("strategy", _strategy_text(d)),
    ("batch", _batch_text(d)),
    ("reduction", d.reduction),
    ("precision", d.precision),
    ("loss scale", d.loss_scale),
    ("optimizer", d.optimizer),
    ("steps", _steps_text(d)),
    ("model_dir", d.model_dir),
  ]
  rows = [(name, value) for name, value in known if value]
  width = max(len(name) for name, _ in rows)
  return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def _model_rows(model: Any) -> list[tuple[str, str]]:
  if model is None:
    return []
  if isinstance(model, Mapping):
    rows = [(f"model {name}", _model_text(part)) for name, part in model.items()]
    return [*rows, ("all models", _parameters_text(model))]
  return [("model", _model_text(model))]


def _model_text(model: Any) -> str:
  return f"{getattr(model, 'name', None) or type(model).__name__}, {_parameters_text(model)}"


def _parameters_text(model: Any) -> str:
  count = count_parameters(model)
  if count is None:
    return "not built yet"
  if count.trainable == count.total:
    return f"{count.total:,} parameters"
  return f"{count.total:,} parameters, {count.trainable:,} trainable"


def _strategy_text(d: Description) -> str:
  replicas = f"{d.replicas} replica{'' if d.replicas == 1 else 's'}"
  where = f" on {', '.join(d.devices)}" if d.devices else ""
  return f"{d.strategy or 'default'}, {replicas}{where}"


def _batch_text(d: Description) -> str | None:
  if d.global_batch_size is None:
    return None
  text = f"{d.global_batch_size} examples a step"
  if d.per_replica_batch_size is not None:
    text += f", {d.per_replica_batch_size} a replica"
  if d.accumulation_steps > 1:
    text += f", in {d.accumulation_steps} micro-batches"
  return text


def _steps_text(d: Description) -> str | None:
  if d.train_steps is None:
    return None
  return (
    f"{d.train_steps}" if not d.start_step else f"{d.train_steps}, continuing from {d.start_step}"
  )


def result_line(
  *,
  step: int,
  seconds: float,
  model_dir: str | None = None,
  evaluation: Mapping[str, Any] | None = None,
  split: str = "eval",
  status: str = "done",
) -> str:
  """Returns the last line: `done: step 1000 | eval loss 0.0571 accuracy 0.9833 | 23.4 s | runs/x`.

  Args:
    step: the global step reached.
    seconds: duration of the run.
    model_dir: the run folder.
    evaluation: the last values of `split`, if any.
    split: "eval" or "train".
    status: such as "done" or "stopped".
  """
  shown = {n: v for n, v in flatten(evaluation or {}).items() if n not in Progress.HIDDEN}
  names = sorted(shown, key=lambda name: name != "loss")
  values = " ".join(f"{name} {format_number(shown[name])}" for name in names)
  parts = [f"step {step}", values and f"{split} {values}", f"{seconds:.1f} s", model_dir]
  return f"{status}: " + " | ".join(part for part in parts if part)
