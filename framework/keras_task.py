"""Trains a compiled Keras model: what `fit` would do, in this framework's loop.

    model.compile("adam", "mse", metrics=["mae"])
    task = framework.from_keras(model, x, y)
    run(task=task, train_steps=100, global_batch_size=32, model_dir="runs/line")

docs/models-from-elsewhere.md compares it with `fit`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from framework.backend import models
from framework.backend.compiled_keras import CompiledModel, OutputLoss
from framework.errors import ConfigError, kind
from framework.inputs.datasets import Batch
from framework.inputs.sources import ArraySource
from framework.metrics import Loss, Metric, Sum, weighted_sum
from framework.optimizers import adapters
from framework.strategies import traits
from framework.task import Task


def from_keras(
  model: Any,
  x: Any = None,
  y: Any = None,
  *,
  sample_weight: Any = None,
  class_weight: Mapping[int, float] | None = None,
  validation_data: Sequence[Any] | None = None,
  source: Callable[[str], Any] | None = None,
) -> KerasTask:
  """Returns a task that trains a compiled model of Keras 3 or tf_keras as its `fit` does (host).

  `run` uses the compiled optimizer; give it to a `Trainer` of your own as `task.own_optimizer`. On
  one replica the model itself is trained; on several a copy, `task.model`, with the same weights,
  unless the model was made in the strategy's scope.

  Args:
    model: compiled, or a function that returns a compiled model, called in the strategy's scope.
    x, y: arrays [examples, ...], or lists or dicts of them for several inputs and outputs.
    sample_weight: float [examples], or a list or dict of them by output.
    class_weight: class -> factor of the training examples of this class; for one output.
    validation_data: (x, y) or (x, y, sample_weight), what evaluations read.
    source: instead of x and y, split -> what `Task.source` returns. Its features are "x" and "y";
      "x/<name>" or "x/0" for several inputs, "y/..." for several outputs; "weight", or "weight/..."
      by output.

  Raises:
    ConfigError: what cannot be taken, in one line; see docs/models-from-elsewhere.md.
  """
  if (x is None) == (source is None):
    raise ConfigError("from_keras() takes either x and y, or source; give one of them.")
  if source is None:
    source = _Arrays(train=(x, y, sample_weight), evaluation=validation_data)
  return KerasTask(model=model, source=source, class_weight=class_weight)


class KerasTask(Task):
  """A compiled Keras model as a task; `from_keras` makes it."""

  def __init__(
    self, *, model: Any, source: Callable[[str], Any], class_weight: Mapping[int, float] | None
  ) -> None:
    """Checks a model that exists; see `from_keras`."""
    self._given, self._source, self._class_weight = model, source, class_weight
    self._compiled = None if _makes_model(model) else CompiledModel(model)
    self.own_optimizer = self._new_optimizer
    if self._compiled is not None:
      self.own_optimizer = _optimizer_of(self._compiled)

  @property
  def compiled(self) -> CompiledModel:
    """The compiled model.

    Raises:
      ConfigError: `build_model` has not yet called the function that returns it.
    """
    if self._compiled is None:
      raise ConfigError("the compiled model does not exist yet; build_model() makes it.")
    return self._compiled

  def build_model(self) -> Any:
    """See `Task.build_model`."""
    if _makes_model(self._given):
      self._compiled = CompiledModel(self._given())
    model = self.compiled.model
    if not model.built:
      model(_structure(self.source("train").fetch(tf.constant([0], tf.int64)), "x"))
    return model if _is_here(model) else _copied(model, self.compiled.package)

  def source(self, split: str) -> Any:
    """See `Task.source`."""
    return self._source(split)

  def preprocess(self, batch: Batch, training: bool) -> Batch:
    """Multiplies the weights of training examples by those of their classes."""
    if not training or not self._class_weight:
      return batch
    if "y" not in batch:
      raise ConfigError("class_weight is for a model with one output; use sample_weight.")
    return {**batch, "weight": batch["weight"] * _class_weights(batch["y"], self._class_weight)}

  def forward(self, batch: Batch, training: bool) -> Any:
    """See `Task.forward`."""
    return self.model(_structure(batch, "x"), training=training)

  def loss(self, outputs: Any, batch: Batch) -> Loss:
    """Returns the weighted sum of the losses; its weight is the number of examples, as in Keras."""
    real = _real(batch)
    total = tf.constant(0.0)
    for one in self._losses(outputs, batch):
      total += one.factor * weighted_sum(one.per_example, one.weight * real)[0]
    return Loss(total, tf.reduce_sum(real))

  def metrics(self, outputs: Any, batch: Batch) -> dict[str, Metric]:
    """Returns the loss of each of several outputs, and the state of the compiled metrics."""
    real, losses = _real(batch), self._losses(outputs, batch)
    found: dict[str, Metric] = {
      f"{each.name}_loss": Loss(
        weighted_sum(each.per_example, each.weight * real)[0], tf.reduce_sum(real)
      )
      for each in losses
      if len(losses) > 1
    }
    given = _structure(batch, "y"), outputs, _structure(batch, "weight")
    sums = self.compiled.metrics.added(*_rows(given, real > 0))
    return found | {_variable(number): Sum(value) for number, value in enumerate(sums)}

  def derived(self, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the compiled metrics under the names that `fit` gives them."""
    sums = [values[_variable(n)] for n in range(len(values)) if _variable(n) in values]
    return self.compiled.metrics.results(sums) if sums else {}

  def _new_optimizer(self) -> Any:
    return _optimizer_of(self.compiled)()

  def _losses(self, outputs: Any, batch: Batch) -> list[OutputLoss]:
    y, weight = _structure(batch, "y"), _structure(batch, "weight")
    return self.compiled.losses(y, outputs, weight)


class _Arrays:
  """The arrays of `fit` as sources."""

  def __init__(self, *, train: Sequence[Any], evaluation: Sequence[Any] | None) -> None:
    self._splits = {"train": train, "eval": evaluation}

  def __call__(self, split: str) -> ArraySource:
    data = self._splits[split]
    if data is None:
      raise ConfigError(
        "from_keras() got no validation_data, so there is nothing to evaluate; pass "
        'validation_data=(x, y), or run with mode="train".'
      )
    x, y, weight = (*data, None)[:3]
    features = {**_named("x", x), **_named("y", y)}
    if weight is not None:
      features |= {n: np.asarray(w, np.float32) for n, w in _named("weight", weight).items()}
    return ArraySource(features=features)


def _makes_model(given: Any) -> bool:
  return callable(given) and not models.is_keras(given)


def _optimizer_of(compiled: CompiledModel) -> Callable[[], Any]:
  """Returns a factory of optimizers like the compiled one; raises ConfigError if there is none."""
  if adapters.excludes_from_decay(compiled.model.optimizer):
    raise ConfigError(
      "the model's optimizer excludes variables from weight decay, which its get_config() does not "
      "say; write a framework.Task, and set run.optimizer with without_decay."
    )
  factory = compiled.optimizer()
  adapters.require_usable(adapters.DEFAULT, factory())
  return factory


def _is_here(model: Any) -> bool:
  """Whether the variables are of the strategy in whose scope this is called."""
  strategy = tf.distribute.get_strategy()
  if strategy.num_replicas_in_sync == 1 and not traits.is_on_mesh(strategy):
    return True
  created_here = strategy.extended.variable_created_in_scope
  return all(created_here(models.raw(variable)) for variable in models.weights(model))


def _copied(model: Any, package: Any) -> Any:
  """Returns a copy whose variables are made in the scope of the current strategy."""
  try:
    with _uncompiled(model):
      copy = package.models.clone_model(model)
    copy.set_weights(model.get_weights())
  except (NotImplementedError, TypeError, ValueError) as error:
    raise ConfigError(
      f"the model {model.name!r} was not made in strategy.scope() and cannot be copied into it; "
      "pass a function that makes and compiles it: from_keras(make_model, x, y)."
    ) from error
  if (made := len(copy.trainable_variables)) != (given := len(model.trainable_variables)):
    raise ConfigError(
      f"a copy of {model.name!r} trains {made} variables instead of {given}; pass a function that "
      "makes and compiles the model: from_keras(make_model, x, y)."
    )
  return copy


@contextlib.contextmanager
def _uncompiled(model: Any) -> Iterator[None]:
  """In it a clone is not compiled, for which Keras 3 would need registered losses and metrics."""
  compiled, model.compiled = getattr(model, "compiled", None), False
  try:
    yield
  finally:
    model.compiled = compiled


def _named(name: str, structure: Any) -> dict[str, np.ndarray]:
  """Returns "x" -> array; of several, "x/<key>" or "x/<index>" -> array."""
  if isinstance(structure, Mapping):
    return {f"{name}/{key}": _array(each) for key, each in structure.items()}
  if isinstance(structure, (list, tuple)):
    return {f"{name}/{index}": _array(each) for index, each in enumerate(structure)}
  if structure is None or not hasattr(structure, "shape"):
    raise ConfigError(
      f"from_keras() got {kind(structure)} as {name}; it must be an array, or a list or dict of "
      "arrays; for other data pass source=."
    )
  return {name: _array(structure)}


def _array(value: Any) -> np.ndarray:
  """Returns an array; floats in Keras's precision, as `fit` casts them."""
  array = np.asarray(value)
  return array.astype(keras.config.floatx()) if array.dtype.kind == "f" else array


def _structure(batch: Batch, name: str) -> Any:
  """Returns what `_named` took apart: a tensor, a list or a dict."""
  parts = {key.partition("/")[2]: batch[key] for key in batch if key.startswith(f"{name}/")}
  if not parts:
    return batch[name]
  if all(part.isdigit() for part in parts):
    return [parts[str(index)] for index in range(len(parts))]
  return parts


def _real(batch: Batch) -> tf.Tensor:
  """Returns 1 for each example and 0 for padding, float32 [n]."""
  return tf.cast(batch["example_id"] >= 0, tf.float32)


def _rows(structure: Any, chosen: tf.Tensor) -> Any:
  masked = [tf.boolean_mask(tensor, chosen) for tensor in tf.nest.flatten(structure)]
  return tf.nest.pack_sequence_as(structure, masked)


def _variable(number: int) -> str:
  return f"compiled_metrics/{number}"


def _class_weights(y: tf.Tensor, weights: Mapping[int, float]) -> tf.Tensor:
  """Returns each row's weight, float32 [n]; 1 for classes without one."""
  if y.shape.rank > 1:
    y = tf.argmax(y, axis=-1) if y.shape[-1] > 1 else y[..., 0]
  classes = tf.cast(y, tf.int32)
  table = [weights.get(each, 1.0) for each in range(max(weights) + 1)]
  known = tf.gather(tf.constant(table, tf.float32), tf.clip_by_value(classes, 0, len(table) - 1))
  return tf.where((classes >= 0) & (classes < len(table)), known, 1.0)
