"""What a compiled Keras model trains with, of Keras 3 or tf_keras: losses and optimizer.

The losses are called one by one, unreduced, because a mean over a replica's rows does not add up
over replicas.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
import tf_keras

from loopwright.errors import ConfigError, kind
from loopwright.graphs.aliases import Layer, Model, Structure
from loopwright.graphs.autograph import as_written
from loopwright.host.lazy_keras import KerasOptimizer
from loopwright.models import models, synthetic_rows
from loopwright.models.compiled_losses import ElementLoss
from loopwright.models.compiled_metrics import CompiledMetrics

_REPLACED = ("train_step", "test_step", "compute_loss", "compute_metrics", "make_train_function")
_MIXES = ("MixUp", "CutMix")


class OutputLoss(NamedTuple):
  """The unreduced loss of one output.

  Attributes:
    name: of the output.
    factor: its `loss_weights`.
    per_example: float [n]; of masked elements 0.
    count: float [n]; 1, or the number of elements that a mask leaves.
    weight: float [n], the sample weights.
  """

  name: str
  factor: float
  per_example: tf.Tensor
  count: tf.Tensor
  weight: tf.Tensor

  def sums(self, real: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns this replica's part of Keras's mean: (total, what to divide by); `real` [n]."""
    total = tf.reduce_sum(tf.math.multiply_no_nan(self.per_example, self.weight * real))
    return total, tf.reduce_sum(self.count * real)


class CompiledModel:
  """A Keras model and what `compile` gave it."""

  def __init__(self, model: Model) -> None:
    """Checks the model (host).

    Raises:
      ConfigError: not a compiled Keras model, or it replaces a part of Keras's own training step.
    """
    self.model, self.package = model, _package(model)
    for method in _REPLACED:
      if getattr(type(model), method, None) is not getattr(self.package.Model, method, None):
        raise ConfigError(
          f"{type(model).__name__} defines its own {method}(), which from_keras() cannot take; "
          "write a loopwright.Task with this training step instead (docs/full-control.md)."
        )
    given = getattr(model, "optimizer", None)
    if given is None or not model.loss:
      how = "not compiled" if given is None else "compiled without a loss"
      raise ConfigError(
        f"the model {model.name!r} is {how}; call model.compile(optimizer, loss) first, or, where "
        "layers add_loss(), write a loopwright.Task."
      )
    if "float16" in models.compute_dtypes(model):  # compile() wraps it; the loop has its own scale
      given = getattr(given, "inner_optimizer", given)
    self.given_optimizer, self._rows_checked = given, False
    for loss in tf.nest.flatten(model.loss):
      _ = None if loss is None else ElementLoss(model.name, loss, self.package)  # raises
    self._loss_weights = model._compile_config.config["loss_weights"]
    self._resolved: dict[str, Any] = {}
    self.metrics = CompiledMetrics(self._metrics_container(), self.package)

  def optimizer(self) -> functools.partial[KerasOptimizer]:
    """Returns a factory of optimizers with the arguments of the compiled one (host).

    Raises:
      ConfigError: the compiled one has made updates; the factory raises it for one without a
        complete `get_config`.
    """
    given = self.given_optimizer
    name, updates = type(given).__name__, int(tf.convert_to_tensor(given.iterations))
    if updates > 0:
      raise ConfigError(
        f"the model's {name} has already made {updates} updates, and its state cannot be taken "
        "over; call model.compile() again with a new optimizer."
      )
    with _complete_config(type(given)):
      return functools.partial(_optimizer, type(given), given.get_config())

  def outputs(self, inputs: Structure, *, training: bool) -> Structure:
    """Returns the outputs for this replica's rows, called as `fit` calls it (replica context).

    Raises:
      ConfigError: on several replicas, the outputs of a row depend on the others.
    """
    if tf.distribute.get_strategy().num_replicas_in_sync > 1 and not self._rows_checked:
      self._require_own_outputs(inputs)
      self._rows_checked = True
    return self.model(inputs, **self._mode(training))

  def losses(self, y: Structure, outputs: Structure, weight: Structure) -> list[OutputLoss]:
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
    by_name = self.package is keras and isinstance(self.model.loss, Mapping)
    lacking = [name for name in predicted if by_name and name not in self.model.loss]
    if lacking and not isinstance(outputs, Mapping):  # as fit
      raise ConfigError(
        f"compile() got a dict of losses without the output {lacking[0]!r}; give it a loss or None."
      )
    factors = _spread("loss_weights", self._loss_weights, predicted)
    targets, weights = _spread("y", y, predicted), _spread("sample_weight", weight, predicted)
    found = []
    for name, loss in losses.items():
      if loss is None:
        continue
      if targets[name] is None:
        raise ConfigError(f"y has nothing for the output {name!r}, which has a loss.")
      if name not in self._resolved:
        self._resolved[name] = ElementLoss(name, loss, self.package)
      each, count, masked = self._resolved[name](targets[name], predicted[name])
      if masked and len(losses) > 1:
        raise ConfigError(
          f"the loss of output {name!r} has a mask, so it is a mean over other elements than those "
          "of the other outputs, and their sum has no single weight; write a loopwright.Task."
        )
      factor = 1.0 if factors[name] is None else float(factors[name])
      rows = tf.ones_like(each) if weights[name] is None else tf.cast(weights[name], each.dtype)
      found.append(OutputLoss(name, factor, each, count, rows))
    return found

  def require_separate_rows(self) -> None:
    """Checks that N replicas, each with its own rows, compute what one would (host).

    Raises:
      ConfigError: a layer mixes the rows of a batch.
    """
    for layer in self.model._flatten_layers():
      if layer.activity_regularizer is not None:
        raise self._of_own_rows(layer, "an activity regulariser")
      if type(layer).__name__ in _MIXES:
        raise self._of_own_rows(layer, f"{type(layer).__name__}, which mixes examples")
      if not self._mode(training=True):  # Keras then normalises by the moving averages
        continue
      if isinstance(layer, self.package.layers.BatchNormalization) and models.is_local(layer):
        raise ConfigError(
          f"the batch normalisation {layer.name!r} averages over each replica's own rows, unlike "
          "fit on one device; set synchronized=True or trainable = False."
        )

  def require_no_losses_of_rows(self) -> None:
    """Raises a ConfigError if a layer called add_loss() in this trace (replica context)."""
    for layer in self.model._flatten_layers():
      if _added(layer):
        raise self._of_own_rows(layer, "add_loss()")

  def adds_losses_of_rows(self) -> bool:
    """Whether the last call added losses of its rows, by regularisers or add_loss (any context)."""
    return any(map(_added, self.model._flatten_layers()))

  @as_written
  def _require_own_outputs(self, inputs: Structure) -> None:
    """Checks on made-up rows, outside of the graph, that each row's outputs are its own."""

    def outputs(rows: Structure) -> list[np.ndarray]:
      if self.package is tf_keras:
        found = self.model(rows, training=False)
      else:  # without a change of the model's state
        state = self.model.trainable_variables, self.model.non_trainable_variables
        values = ([tf.convert_to_tensor(v) for v in variables] for variables in state)
        found, _ = self.model.stateless_call(*values, rows, **self._mode(training=False))
      return [np.asarray(tensor, np.float64) for tensor in tf.nest.flatten(found)]

    def differ() -> bool:
      rows = synthetic_rows.like(inputs)
      whole, again, *parts = map(outputs, (rows, rows, *synthetic_rows.split(rows)))
      rounding = 1e-3 if models.compute_dtypes(self.model) <= {"float32", "float64"} else 0.1
      limits = [rounding * np.abs(one).max() + 1e-5 for one in whole]
      joined = map(np.concatenate, zip(*parts, strict=True))
      gaps = [np.abs(np.subtract(*pair)).max() for pair in zip(whole, joined, strict=True)]
      is_random = not all(map(np.array_equal, whole, again))
      return not is_random and any(map(operator.gt, gaps, limits))

    try:
      mixes = synthetic_rows.outside(differ)
    except Exception:  # made-up rows may be none that this model takes
      return
    if mixes:
      raise ConfigError(
        f"in the model {self.model.name!r} the outputs of an example depend on the others of its "
        "batch, and each of N replicas sees its own rows only; train on one replica, or write a "
        "loopwright.Task, which has step.all_gather() (docs/full-control.md)."
      )

  def _mode(self, training: bool) -> dict[str, bool]:
    """Returns the argument `training` where `fit` passes it."""
    takes = self.package is tf_keras or self.model._call_has_training_arg
    return {"training": training} if takes else {}

  def _of_own_rows(self, layer: Layer, what: str) -> ConfigError:
    return ConfigError(
      f"the layer {layer.name!r} has {what}, and each of N replicas sees its own rows only, so the "
      "sum would be another; train on one replica, or write a loopwright.Task."
    )

  def _metrics_container(self) -> Any:
    if self.package is tf_keras:
      return self.model.compiled_metrics
    return next((m for m in self.model.metrics if m.name == "compile_metrics"), None)


def _optimizer(kind: Any, config: Mapping[str, Any]) -> Any:
  with _complete_config(kind):
    return kind.from_config({**config})  # a copy, which Keras changes


@contextlib.contextmanager
def _complete_config(kind: Any) -> Iterator[None]:
  try:
    yield
  except (NotImplementedError, TypeError, ValueError) as error:
    reason = str(error).partition("\n")[0]
    raise ConfigError(
      f"the model's {kind.__name__} cannot be copied from its get_config() ({reason}); give it a "
      "complete get_config(), or write a loopwright.Task and set run.optimizer."
    ) from error


def _added(layer: Layer) -> bool:
  """Whether the last call of a layer added a loss that is no penalty of weights."""
  return bool(layer._losses or getattr(layer, "_eager_losses", None))


def _package(model: Model) -> Any:
  for package in (keras, tf_keras):
    if isinstance(model, package.Model):
      return package
  raise ConfigError(
    f"from_keras() got {kind(model)}; it takes a compiled keras.Model or tf_keras.Model, or a "
    "function that returns one."
  )


def _by_name(outputs: Structure, model: Model) -> dict[str, Any]:
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
