"""`LayerStatistics`: gradients, updates and activations of each layer, and units that are dead.

At its cadence it replays the next step eagerly, as forensics does, and undoes it. So the compiled
loop is the same with it and without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from loopwright.actions.base import Action, Output, Run
from loopwright.aliases import Batch, Layer, Model
from loopwright.errors import require_integer
from loopwright.metrics import Loss
from loopwright.models import models
from loopwright.observers import Observer, StepObserver
from loopwright.optimizers.adapters import Optimizer
from loopwright.optimizers.fusion import Fusion, Gradients
from loopwright.step import LossFn
from loopwright.step_parts import StepParts
from loopwright.strategies import placement
from loopwright.tools.forensics import examine
from loopwright.trainer import Trainer

_SUMS = 3
"""Of a layer's outputs: their number, their sum and that of their squares."""


class LayerStatistics(Action):
  """Logs, at a cadence, the norms of gradients, how far updates go, activations and dead units.

  They are those of the step that follows, over all replicas, at the weights of the logged step:

  gradient_norm/<variable>  of the gradient that the optimizer gets, after clipping
  update_ratio/<variable>   the norm of the update over that of the weights; usually near 0.001
  mean/<layer>, std/<layer> of the outputs of a Keras layer without layers in it
  dead/<layer>              the part of its units that are 0 for every example and position

  Rows of padding do not count. They are lines of metrics.jsonl with split "layers".
  """

  on = "train"

  def __init__(self, *, every_steps: int = 1000) -> None:
    """Sets the cadence.

    Args:
      every_steps: after each multiple of it one step is replayed eagerly.

    Raises:
      ConfigError: not a whole number of at least 1.
    """
    self.every_steps = require_integer("LayerStatistics.every_steps", every_steps, at_least=1)

  def bind(self, run: Run) -> None:
    """Checks the strategy.

    Raises:
      ConfigError: under parameter servers or on a mesh, where a step cannot be replayed.
    """
    super().bind(run)
    examine.require_replays(placement.of(run.strategy))

  def __call__(self, output: Output) -> None:
    """Logs the statistics."""
    assert self.run.trainer is not None
    found = statistics(self.run.trainer)
    if self.run.is_chief:
      self.run.metrics_log.append(self.run.step, "layers", found)


def statistics(trainer: Trainer) -> dict[str, float]:
  """Returns those of `LayerStatistics` for the next step, which is undone (host; every worker).

  Raises:
    ConfigError: under parameter servers or on a mesh.
  """
  examine.require_replays(trainer.placement)
  norms, model = _Norms(), trainer.task.model
  parts = dataclasses.replace(trainer.parts, observers=(norms,), jit_compile=False)
  weights = {models.name(v): models.raw(v) for v in models.trainable_variables(model)}
  before = {name: variable.read_value() for name, variable in weights.items()}
  found: dict[str, float] = {}
  with _heard(model), examine.replayed(trainer, lambda: _Heard(parts)) as [step, *_]:
    for name, value in norms.found.items():
      far = _norm(weights[name] - before[name])
      found[f"gradient_norm/{name}"] = value
      found[f"update_ratio/{name}"] = far / max(_norm(before[name]), np.finfo(np.float32).tiny)
  for name, sums in step.outputs().items():
    count, total, square = sums[:_SUMS].tolist()
    mean = total / count if count else np.nan
    found[f"mean/{name}"] = mean
    found[f"std/{name}"] = float(np.sqrt(max(square / count - mean**2, 0.0))) if count else np.nan
    found[f"dead/{name}"] = float(np.mean(sums[_SUMS:] == 0))
  return found


def _norm(value: tf.Tensor) -> float:
  return float(tf.norm(tf.cast(value, tf.float32)))


class _Norms(Observer):
  """Keeps the norm of each gradient that an optimizer gets; of several updates, of the last."""

  def __init__(self) -> None:
    self.found: dict[str, float] = {}

  def of_replica(self) -> StepObserver:
    return _NormsOfReplica(self.found)


class _NormsOfReplica(StepObserver):
  def __init__(self, found: dict[str, float]) -> None:
    self._found = found

  def applies(self, optimizer: Optimizer, gradients: Gradients) -> None:
    for variable, gradient in zip(optimizer.variables, gradients, strict=True):
      if gradient is not None:
        self._found[models.name(variable)] = _norm(gradient)


class _Heard(examine.Replayed):
  """A step that adds up what the layers return on its replica."""

  def __init__(self, parts: StepParts) -> None:
    super().__init__(parts)
    self._sums: dict[str, np.ndarray] = {}
    self._gathered = tf.zeros([1, 0])

  def over(self, batch: Batch) -> None:
    own = np.concatenate([np.zeros(0), *self._sums.values()])
    self._gathered = self.parts.reduction.all_gather(tf.constant(own[np.newaxis], tf.float64))

  def forward_backward(
    self, loss_fn: LossFn, batch: Batch, fusion: Fusion
  ) -> tuple[Gradients, Loss]:
    ids = batch.get("example_id")
    _here.step, _here.real = self, None if ids is None else ids.numpy() >= 0
    try:
      return super().forward_backward(loss_fn, batch, fusion)
    finally:
      _here.step = None

  def hears(self, name: str, output: np.ndarray, real: np.ndarray | None) -> None:
    """Adds an output of a layer, [rows, ..., units]; `real` is False for rows of padding."""
    if real is not None and len(real) == len(output):
      output = output[real]
    values = output.astype(np.float64).reshape([-1, output.shape[-1]])
    alive = (values != 0).sum(axis=0)
    sums = np.array([values.size, values.sum(), np.square(values).sum(), *alive], np.float64)
    known = self._sums.get(name)
    if known is None or len(known) == len(sums):  # a layer may be called with several shapes
      self._sums[name] = sums if known is None else known + sums

  def outputs(self) -> Mapping[str, np.ndarray]:
    """Returns layer -> its sums, then how often each of its units was not 0; over all replicas."""
    total = self._gathered.numpy().sum(axis=0)
    ends = np.cumsum([len(sums) for sums in self._sums.values()])
    return dict(zip(self._sums, np.split(total, ends[:-1]), strict=True)) if self._sums else {}


class _Here(threading.local):
  """The step that the replica of this thread computes, and which of its rows are examples."""

  step: _Heard | None = None
  real: np.ndarray | None = None


_here = _Here()


@contextlib.contextmanager
def _heard(model: Model) -> Iterator[None]:
  """Inside `with`, the step of a replica hears what the innermost layers of a model return."""
  inner = [layer for layer in models.layers(model) if len(list(models.layers(layer))) == 1]
  held = {layer: vars(layer).get("call") for layer in inner}
  for layer in inner:
    layer.call = _told(layer)
  try:
    yield
  finally:
    for layer, call in held.items():
      if call is None:
        del layer.call
      else:
        layer.call = call


def _told(layer: Layer) -> Callable[..., Any]:
  """Returns the `call` of a layer, which also tells the step what it returns."""
  name, call = getattr(layer, "path", None) or layer.name, layer.call

  def told(*args: Any, **kwargs: Any) -> Any:
    result = call(*args, **kwargs)
    step = _here.step
    first = next((each for each in tf.nest.flatten(result) if _is_activation(each)), None)
    if step is not None and first is not None:
      step.hears(name, first.numpy(), _here.real)
    return result

  return told


def _is_activation(value: Any) -> bool:
  """Whether it is a floating tensor with an axis of units, and known now."""
  if not tf.is_tensor(value) or tf.is_symbolic_tensor(value):
    return False
  return bool(value.dtype.is_floating) and value.shape.rank >= 2
