"""What a compiled Keras model trains with, of Keras 3 or tf_keras: losses, metrics, optimizer.

Keras's own containers choose and update the metrics. The losses are called one by one, unreduced,
because a mean over a replica's rows does not add up over replicas.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import keras
import tensorflow as tf
import tf_keras

from framework.backend.autograph import as_written
from framework.errors import ConfigError, kind

_REPLACED = ("train_step", "test_step", "compute_loss", "compute_metrics", "make_train_function")
_MEANS = ("sum_over_batch_size", "mean", "auto")


class OutputLoss(NamedTuple):
  """The unreduced loss of one output.

  Attributes:
    name: of the output.
    factor: its `loss_weights`.
    per_example: float [n], means over all axes but the first.
    weight: float [n], the sample weights.
  """

  name: str
  factor: float
  per_example: tf.Tensor
  weight: tf.Tensor


class CompiledModel:
  """A Keras model and what `compile` gave it."""

  def __init__(self, model: Any) -> None:
    """Checks the model (host).

    Raises:
      ConfigError: not a compiled Keras model, or it replaces a part of Keras's own training step.
    """
    self.model, self.package = model, _package(model)
    compiled = getattr(model, "optimizer", None) is not None and model.loss is not None
    if not compiled:
      raise ConfigError(
        f"the model {model.name!r} is not compiled; call model.compile(optimizer, loss) first."
      )
    for method in _REPLACED:
      if getattr(type(model), method, None) is not getattr(self.package.Model, method, None):
        raise ConfigError(
          f"{type(model).__name__} defines its own {method}(), which from_keras() cannot take; "
          "write a framework.Task with this training step instead (docs/full-control.md)."
        )
    self._loss_weights = model.get_compile_config()["loss_weights"]
    self._resolved: dict[str, Any] = {}
    self.metrics = CompiledMetrics(self._metrics_container(), self.package)

  def optimizer(self) -> functools.partial[Any]:
    """Returns a factory of optimizers with the arguments of the compiled one (host).

    Raises:
      ConfigError: the compiled one has made updates; the factory raises it for one without a
        complete `get_config`.
    """
    given = self.model.optimizer
    name, updates = type(given).__name__, int(tf.convert_to_tensor(given.iterations))
    if updates > 0:
      raise ConfigError(
        f"the model's {name} has already made {updates} updates, and its state cannot be taken "
        "over; call model.compile() again with a new optimizer."
      )
    return functools.partial(_optimizer, type(given), given.get_config())

  def losses(self, y: Any, outputs: Any, weight: Any) -> list[OutputLoss]:
    """Returns the losses of all outputs that have one (replica context).

    Args:
      y: the targets: a tensor, or a list or dict of them as for `fit`.
      outputs: of the model.
      weight: float [n], or a list or dict of them.

    Raises:
      ConfigError: names or numbers of outputs differ, or a loss gives no value for each example.
    """
    predicted = _by_name(outputs, self.model)
    losses = _spread("loss", self.model.loss, predicted)
    factors = _spread("loss_weights", self._loss_weights, predicted)
    targets, weights = _spread("y", y, predicted), _spread("sample_weight", weight, predicted)
    found = []
    for name in losses:
      if losses[name] is not None:
        each = self._per_example(name, losses[name], targets[name], predicted[name])
        factor = 1.0 if factors[name] is None else float(factors[name])
        rows = tf.ones_like(each) if weights[name] is None else weights[name]
        found.append(OutputLoss(name, factor, each, rows))
    return found

  def _per_example(self, name: str, loss: Any, y_true: Any, y_pred: Any) -> tf.Tensor:
    if name not in self._resolved:
      self._resolved[name] = unreduced(loss, self.package)
    if getattr(y_pred, "_keras_mask", None) is not None:
      raise ConfigError(
        f"output {name!r} has a Keras mask, so its loss is a mean over steps, not over examples; "
        "write a framework.Task whose Loss has the sum of the mask as its weight."
      )
    losses = tf.convert_to_tensor(self._resolved[name](y_true, y_pred))
    if not losses.shape.rank:
      raise ConfigError(
        f"the loss of output {name!r} returns a scalar, but N replicas need one value for each "
        "example; return a tensor [n], without the mean over the batch."
      )
    return tf.reduce_mean(losses, axis=[*range(1, losses.shape.rank)])

  def _metrics_container(self) -> Any:
    if self.package is tf_keras:
      return self.model.compiled_metrics
    return next((m for m in self.model.metrics if m.name == "compile_metrics"), None)


class CompiledMetrics:
  """The compiled metrics as sums: what one batch adds to each of their variables."""

  def __init__(self, container: Any, package: Any) -> None:
    """Takes the container of Keras's own metrics, or None without any."""
    self._container, self._package = container, package
    self._built = False

  def added(self, y: Any, outputs: Any, weight: Any) -> list[tf.Tensor]:
    """Returns what a batch adds to each metric variable (replica context).

    Args:
      y, outputs: as for `CompiledModel.losses`, rows without padding.
      weight: float [n], or a list or dict of them, for `weighted_metrics`.

    Raises:
      ConfigError: a metric's state is not a sum over batches.
    """
    if self._container is None:
      return []
    if not self._built:
      self._build_outside(y, outputs)
      self._built = True
    return self._from_zero(y, outputs, weight)

  def results(self, sums: Sequence[Any]) -> dict[str, Any]:
    """Returns name -> value, as `fit` names and computes them, of summed variables (host)."""
    values = [tf.cast(v, each.dtype) for v, each in zip(sums, self._variables(), strict=True)]
    if self._package is keras:
      return dict(self._container.stateless_result(values))
    for variable, value in zip(self._variables(), values, strict=True):
      variable.assign(value)
    return {metric.name: metric.result() for metric in self._container.metrics}

  def _variables(self) -> list[Any]:
    return [variable for metric in self._container.metrics for variable in metric.variables]

  def _from_zero(self, y: Any, outputs: Any, weight: Any) -> list[tf.Tensor]:
    zeros = [tf.zeros(v.shape, v.dtype) for v in self._variables()]
    return self._updated(zeros, y, outputs, weight)

  def _updated(self, state: Sequence[tf.Tensor], y: Any, outputs: Any, weight: Any) -> list[Any]:
    if self._package is keras:
      return list(self._container.stateless_update_state(state, y, outputs, weight))
    for variable, value in zip(self._variables(), state, strict=True):
      variable.assign(value)
    self._container.update_state(y, outputs, weight)
    return [tf.identity(variable) for variable in self._variables()]

  @as_written
  def _build_outside(self, y: Any, outputs: Any) -> None:
    """Makes the metrics' variables in a thread, outside of the step's graph and strategy."""
    with ThreadPoolExecutor(1) as thread:
      thread.submit(self._build, y, outputs).result()

  def _build(self, y: Any, outputs: Any) -> None:
    """Makes the metrics from one row, and checks that a second update adds what the first did."""
    y, outputs = _row(y, 0.0), _row(outputs, 0.25)
    self._container.update_state(y, outputs)
    self._container.reset_state()
    once = self._from_zero(y, outputs, None)
    twice = self._updated(once, y, outputs, None)
    added = iter(zip(once, twice, strict=True))
    for metric in self._container.metrics:
      for _, (first, second) in zip(metric.variables, added, strict=False):
        if not bool(tf.reduce_all(tf.cast(second, tf.float64) == 2 * tf.cast(first, tf.float64))):
          raise ConfigError(
            f"the metric {metric.name!r} ({type(metric).__name__}) keeps a state that is not a sum "
            "over batches, so the parts of N replicas cannot be added; compile without it, and "
            "compute it in Task.metrics() of a subclass."
          )


def _optimizer(kind: Any, config: Mapping[str, Any]) -> Any:
  try:
    return kind.from_config({**config})  # a copy, which Keras changes
  except (NotImplementedError, TypeError, ValueError) as error:
    reason = str(error).partition("\n")[0]
    raise ConfigError(
      f"the model's {kind.__name__} cannot be copied from its get_config() ({reason}); give it a "
      "complete get_config(), or write a framework.Task and set run.optimizer."
    ) from error


def unreduced(loss: Any, package: Any) -> Callable[[Any, Any], Any]:
  """Returns (y_true, y_pred) -> losses [n, ...] of a loss as `compile` takes it.

  Raises:
    ConfigError: an unknown name, or a reduction that is not a mean over the batch.
  """
  try:
    found = package.losses.get(loss)
  except (TypeError, ValueError) as error:
    raise ConfigError(
      f"compile() got the loss {loss!r}, which {package.__name__}.losses.get() does not know; name "
      "one of its losses, such as 'mse', or pass a function or Loss."
    ) from error
  if isinstance(found, package.losses.Loss):
    reduction = found.reduction
    if reduction not in _MEANS:
      raise ConfigError(
        f"the loss {found.name!r} has reduction={reduction!r}, but only a mean over the batch is "
        "the same on N replicas here; leave the reduction out, or write a framework.Task."
      )
    found = copy.copy(found)
    found.reduction = "none"
  else:
    found = _of_function(found, package)
  if package is keras:
    return found

  def of_rank(y_true: Any, y_pred: Any) -> Any:
    return found(_of_rank(y_true, y_pred), y_pred)

  return of_rank


def _of_function(function: Callable[..., Any], package: Any) -> Any:
  class Function(package.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
      return function(_of_rank(y_true, y_pred), y_pred)

  return Function(reduction="none")


def _of_rank(y_true: Any, y_pred: Any) -> Any:
  """Returns targets [n] as [n, 1] for outputs [n, k], as both Kerases do."""
  y_true, y_pred = tf.convert_to_tensor(y_true), tf.convert_to_tensor(y_pred)
  return y_true[:, tf.newaxis] if (y_true.shape.rank, y_pred.shape.rank) == (1, 2) else y_true


def _package(model: Any) -> Any:
  for package in (keras, tf_keras):
    if isinstance(model, package.Model):
      return package
  raise ConfigError(
    f"from_keras() got {kind(model)}; it takes a compiled keras.Model or tf_keras.Model, or a "
    "function that returns one."
  )


def _by_name(outputs: Any, model: Any) -> dict[str, Any]:
  if isinstance(outputs, Mapping):
    return dict(outputs)
  listed = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
  names = getattr(model, "output_names", None) or []
  if len(names) != len(listed):
    names = [f"output_{number}" for number in range(1, len(listed) + 1)]
  return dict(zip(names, listed, strict=True))


def _spread(what: str, value: Any, outputs: Mapping[str, Any]) -> dict[str, Any]:
  """Returns output -> its part of a list or dict; anything else is the part of each output."""
  if isinstance(value, Mapping):
    if unknown := [name for name in value if name not in outputs]:
      raise ConfigError(
        f"{what} names the output {unknown[0]!r}, but the model's are {', '.join(outputs)}."
      )
    return {name: value.get(name) for name in outputs}
  if not isinstance(value, (list, tuple)):
    return dict.fromkeys(outputs, value)
  if len(value) != len(outputs):
    raise ConfigError(
      f"{what} has {len(value)} entries, but the model has {len(outputs)} outputs; give one for "
      "each, or a dict by output name."
    )
  return dict(zip(outputs, value, strict=True))


def _row(structure: Any, filler: float) -> Any:
  """Returns one row of the same structure and dtypes."""

  def filled(tensor: Any) -> tf.Tensor:
    shape = [1, *(size or 1 for size in tensor.shape[1:])]
    return tf.cast(tf.fill(shape, filler), tensor.dtype)

  return tf.nest.map_structure(filled, structure)
