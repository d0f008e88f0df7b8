"""Keeps padded rows out of the statistics of batch normalisation, and of penalties.

A batch that does not divide by the replicas is padded with copies of one example. Their weight in
the loss is 0, but batch normalisation would count them, and N replicas would not train like one.
Inside `only_examples(batch)` that of Keras 3 averages over the examples only: those of the replica,
or with synchronized=True of all replicas. Where this is not possible it raises a ConfigError.

Keras's own `mask` argument does not suffice: Keras 3 then ignores `synchronized`, and the fused
kernel of tf_keras ignores the mask.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.graphs import randomness
from loopwright.graphs.aliases import Layer, Model
from loopwright.host import lazy_keras
from loopwright.host.replacing import wrap
from loopwright.models import models


@contextlib.contextmanager
def only_examples(batch: Mapping[str, tf.Tensor], *, why: tuple[str, str]) -> Iterator[None]:
  """Inside `with`, batch normalisation in training mode leaves out padded rows (replica context).

  Enter it in the tf.function that calls the model.

  Args:
    batch: padded; "example_id" is int64 [n], -1 for padding.
    why: for errors, why it is padded, such as "global_batch_size is 7 for 2 replicas", and what to
      do if that is not possible.
  """
  _patch()
  _entered.batches.append((batch, randomness.current_graph(), why))
  try:
    yield
  finally:
    _entered.batches.pop()


@contextlib.contextmanager
def in_this_graph() -> Iterator[None]:
  """Inside `with`, the entered `only_examples` holds in the current graph too, a nested function.

  The function must be traced for this batch only.
  """
  entered = [(batch, randomness.current_graph(), why) for batch, _, why in _entered.batches[-1:]]
  _entered.batches += entered
  try:
    yield
  finally:
    if entered:
      _entered.batches.pop()


class _Entered(threading.local):
  """The (batch, graph, why) that a thread has entered, innermost last."""

  def __init__(self) -> None:
    self.batches: list[tuple[Mapping[str, tf.Tensor], Any, tuple[str, str]]] = []


_entered = _Entered()


@functools.cache
def _patch() -> None:
  wrap(keras.layers.BatchNormalization, "_moments", _moments_of_examples)
  wrap(models, "regularization", _regularization_of_weights)
  lazy_keras.when_tf_keras_loads(_patch_tf_keras)


def _patch_tf_keras() -> None:
  from tf_keras.src.layers.normalization.batch_normalization import BatchNormalizationBase as Base

  wrap(Base, "call", _refusing_call)


def _moments_of_examples(
  keras_moments: Callable[..., Any], layer: Layer, inputs: tf.Tensor, mask: Any
) -> Any:
  if not _entered.batches:
    return keras_moments(layer, inputs, mask)
  weight = tf.reshape(_is_example(layer, inputs), [-1] + [1] * (inputs.shape.rank - 1))
  weight = tf.cast(weight, inputs.dtype)
  if mask is not None:
    weight *= tf.cast(mask[..., tf.newaxis], inputs.dtype)
  return _moments(layer, inputs, weight)


def _moments(
  layer: keras.layers.BatchNormalization, inputs: tf.Tensor, weight: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns the weighted mean and variance, each [channels]; without rows, the moving ones."""
  axes = layer._reduction_axes

  def total(values: tf.Tensor) -> tf.Tensor:
    summed = tf.reduce_sum(tf.where(weight > 0, values, 0.0), axes, keepdims=True)
    if not layer.synchronized:
      return summed
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, summed)

  count = total(tf.ones_like(inputs))
  mean = tf.math.divide_no_nan(total(inputs), count)
  variance = tf.math.divide_no_nan(total(tf.square(inputs - mean)), count)
  seen = tf.reshape(count, [-1]) > 0
  return (
    tf.where(seen, tf.reshape(mean, [-1]), tf.cast(layer.moving_mean, mean.dtype)),
    tf.where(seen, tf.reshape(variance, [-1]), tf.cast(layer.moving_variance, mean.dtype)),
  )


def _refusing_call(
  keras_call: Callable[..., Any], layer: Any, inputs: Any, training: Any = None, mask: Any = None
) -> Any:
  if _entered.batches and layer._get_training_value(training) not in (False, 0):
    raise _refused(layer, "tf_keras would count the padded rows")
  return keras_call(layer, inputs, training=training, mask=mask)


def _regularization_of_weights(
  usual: Callable[..., tf.Tensor | float], model: Model
) -> tf.Tensor | float:
  penalty = usual(model)
  if _entered.batches and _reads(penalty, _entered.batches[-1][0], model):
    why, remedy = _entered.batches[-1][2]
    raise ConfigError(
      f"{why}, so rows are padded, and a layer's add_loss() or activity regulariser counts them: "
      f"its value is a mean over each replica's rows; {remedy}."
    )
  return penalty


def _reads(penalty: tf.Tensor | float, batch: Mapping[str, tf.Tensor], model: Model) -> bool:
  """Whether the values of a traced penalty come from rows, not their number or a weight's value."""
  rows = {id(tensor) for tensor in tf.nest.flatten(batch)}
  waiting: list[Any] = [penalty] if tf.is_symbolic_tensor(penalty) else []
  weights = [getattr(models.raw(v), "assigned", {}) for v in models.all_variables(model)]
  updated = {id(tensor) for weight in weights for tensor in weight.values()}  # on a mesh
  seen = set[int]()
  while waiting:
    tensor = waiting.pop()
    if id(tensor) in rows:
      return True
    if tensor.op.type == "Placeholder":  # of what XLA compiles, from around it
      captures = getattr(tensor.graph, "captures", ())
      waiting += [o for o, i in captures if i is tensor and tf.is_symbolic_tensor(o)]
    if id(tensor) not in updated and id(tensor.op) not in seen and tensor.op.type != "Shape":
      waiting += tensor.op.inputs
    seen.add(id(tensor.op))
  return False


def _is_example(layer: Layer, inputs: tf.Tensor) -> tf.Tensor:
  """Returns bool [n], False for padding."""
  batch, graph, _ = _entered.batches[-1]
  ids = batch.get("example_id")
  if ids is None:
    raise _refused(layer, "the batch without 'example_id' does not say which rows are padding")
  if inputs.shape[0] != ids.shape[0]:
    raise _refused(layer, f"its input has {inputs.shape[0]} rows and the batch {ids.shape[0]}")
  if randomness.enclosing_function(stop=graph)[0] is not graph:
    raise _refused(layer, "it is called in another tf.function")
  return ids >= 0


def _refused(layer: Layer, reason: str) -> ConfigError:
  why, remedy = _entered.batches[-1][2]
  error = ConfigError(
    f"{why}, so rows are padded, and batch normalisation {layer.name!r} cannot leave them out: "
    f"{reason}; {remedy}."
  )
  error._keras_call_info_injected = True  # type: ignore[attr-defined]  # Keras adds nothing to it
  return error
