"""Trades time for memory: activations are computed again in the backward pass, not kept.

    def forward(self, batch, training):
      x = batch["image"]
      for block in self.blocks:
        x = loopwright.recompute(block)(x, training=training)
      return x

The recomputation is traced beside the forward pass, with the same seeds and in the same state of
Keras (`training`, dtype). It assigns nothing: statistics are updated once. `tf.recompute_grad`
calls the function again when gradients are taken; then dropout draws other masks.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from loopwright.errors import ConfigError, suggest
from loopwright.graphs import randomness
from loopwright.graphs.aliases import Layer, Model
from loopwright.graphs.autograph import as_written, converted
from loopwright.host import lazy_keras
from loopwright.host.replacing import wrap
from loopwright.models import batch_norm, models


@as_written
def recompute(function: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a function whose inner activations are not kept for the backward pass.

  It has the outputs and gradients of `function`, also for dropout, at the cost of a second forward
  pass. Use it in a training step, on parts of a model such as its blocks (replica context). In
  eager mode and outside a training step it calls `function` and saves nothing.

  Args:
    function: a layer, a model or any function of tensors. Its variables exist already. It returns
      all that the loss uses: a tensor or a nested structure of tensors.

  Raises:
    ConfigError: when called, if `function` draws from `tf.random.*`, assigns to a variable (of a
      layer other than Keras's batch normalisation), adds a loss or communicates.
  """

  @as_written
  def call(*args: Any, **kwargs: Any) -> Any:
    stream = randomness.entered_stream()
    if stream is None:
      return converted(function)(*args, **kwargs)
    body = functools.partial(_seeded, converted(functools.partial(function, **kwargs)))
    key = stream.next_key()
    if tf.executing_eagerly():
      return body(key, args)
    return _recomputed(body, key, args)

  return call


def recompute_layers(model: Model, patterns: Sequence[str]) -> list[str]:
  """Makes the Keras layers of these names recompute from now on; returns their names (host).

  Of a layer inside another that matches, only the outer one does.

  Args:
    model: the task's model, with its variables built.
    patterns: regular expressions for whole names.

  Raises:
    ConfigError: a pattern matches no layer, or is no regular expression.
  """
  parts = [part for part in models.parts(model) if models.is_keras(part)]
  names = {layer.name for layer in models.layers(model)}
  matched = {name for pattern in patterns for name in _matched(pattern, names)}
  outer = [layer for part in parts for layer in _outermost(part, matched)]
  for layer in outer:
    if not hasattr(layer.call, "recomputes"):  # another trainer may have the same model
      layer.call = recompute(layer.call)
      layer.call.recomputes = True
  return [layer.name for layer in outer]


def _matched(pattern: str, names: set[str]) -> set[str]:
  try:
    found = {name for name in names if re.fullmatch(pattern, name)}
  except re.error as error:
    raise ConfigError(
      f"Trainer.recompute has {pattern!r}, which is no regular expression ({error}); correct it."
    ) from error
  if not found:
    raise ConfigError(
      f"Trainer.recompute has {pattern!r}, which matches the whole name of no Keras layer; names "
      f"are {', '.join(sorted(names)[:20])}.{suggest(pattern, names)}"
    )
  return found


def _outermost(layer: Layer, names: set[str]) -> Iterator[Any]:
  if layer.name in names:
    yield layer
    return
  for inner in layer._flatten_layers(recursive=False, include_self=False):
    yield from _outermost(inner, names)


def _seeded(function: Callable[..., Any], key: tf.Tensor, args: Sequence[Any]) -> Any:
  with randomness.random_streams(key) as own:
    own.recomputed = True
    return function(*args)


def _recomputed(body: Callable[..., Any], key: tf.Tensor, args: Sequence[Any]) -> Any:
  flat = tf.nest.flatten(args)
  places = [place for place, value in enumerate(flat) if tf.is_tensor(value)]

  def with_tensors(key: tf.Tensor, *tensors: tf.Tensor) -> Any:
    values = list(flat)
    for place, tensor in zip(places, tensors, strict=True):
      values[place] = tensor
    return body(key, tf.nest.pack_sequence_as(args, values))

  inputs = [key, *(flat[place] for place in places)]
  again = _traced(with_tensors, inputs)
  # Tensors of the enclosing graph that the function uses without taking them as arguments.
  captured = [t for t in again.captured_inputs if t.dtype.is_floating]

  @tf.custom_gradient
  def run(*tensors: tf.Tensor) -> tuple[Any, Callable[..., Any]]:
    outputs = with_tensors(*tensors[: len(inputs)])

    def gradient(*upstream: tf.Tensor, variables: Sequence[tf.Variable] = ()) -> Any:
      sources = _after(upstream, tensors[: len(inputs)])
      with tf.GradientTape() as tape:
        tape.watch([t for t in (*sources, *captured) if t.dtype.is_floating])
        repeated = again(*sources)
      wanted = [*sources, *captured, *variables]
      floats = [w for w in wanted if w.dtype.is_floating]
      found = iter(tape.gradient(tf.nest.flatten(repeated), floats, upstream))
      gradients = [next(found) if w.dtype.is_floating else None for w in wanted]
      dense = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
      count = len(tensors)
      return (dense[:count], dense[count:]) if variables else dense[:count]

    return outputs, gradient

  return run(*inputs, *captured)


def _traced(function: Callable[..., Any], inputs: Sequence[tf.Tensor]) -> Any:
  """Returns `function` as a concrete tf.function that changes no state."""
  _patch_statistics()
  losses: list[Any] = []

  def once(*tensors: tf.Tensor) -> Any:
    with keras.StatelessScope(collect_losses=True) as scope, batch_norm.in_this_graph():
      outputs = function(*tensors)
    losses.extend(scope.losses)
    return outputs

  try:
    with randomness.repeating():
      concrete = tf.function(once, autograph=False).get_concrete_function(*inputs)
  except RuntimeError as error:
    if "merge_call" in str(error):
      reason = "communicates with other replicas, as BatchNormalization(synchronized=True) does"
      raise _refused(reason) from error
    raise
  if losses:
    raise _refused("adds a loss, as activity_regularizer does")
  for name in _stateful(concrete):
    if "Random" in name:
      raise _refused(f"draws from tf.random ({name}), not from tf.random.stateless_*")
    if name.startswith("Assign"):
      raise _refused(f"assigns to a variable ({name})")
  return concrete


@functools.cache
def _patch_statistics() -> None:
  """Keeps a recomputation from updating the statistics of tf_keras; Keras 3 has StatelessScope."""
  lazy_keras.when_tf_keras_loads(_patch_tf_keras)


def _patch_tf_keras() -> None:
  from tf_keras.src.layers.normalization.batch_normalization import BatchNormalizationBase as Base

  for name in ("_assign_moving_average", "_assign_new_value"):
    wrap(Base, name, _unless_repeating)


def _unless_repeating(
  assign: Callable[..., Any], layer: Any, variable: tf.Variable, *args: Any, **kwargs: Any
) -> Any:
  if randomness.is_repeating():
    return variable
  return assign(layer, variable, *args, **kwargs)


def _stateful(concrete: Any) -> Iterator[str]:
  """Yields the types of stateful ops in a concrete function."""
  graph = concrete.graph.as_graph_def()
  nodes = [*graph.node, *(node for one in graph.library.function for node in one.node_def)]
  known = {op.type for op in concrete.graph.get_operations()}
  for kind in sorted({node.op for node in nodes} | known):
    if not kind.startswith("Stateless"):
      yield kind


def _after(upstream: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
  """Returns equal tensors that can only be computed after `upstream`.

  Neither Grappler nor XLA can know that the square of a float is not below -1, so that they cannot
  merge the recomputation with the forward pass.
  """
  first = tf.cast(tf.reshape(upstream[0], [-1])[:1], tf.float32)
  never = tf.reduce_any(tf.square(first) < -1.0)
  can = [t.dtype.is_floating or t.dtype.is_integer for t in tensors]
  return [t + tf.cast(never, t.dtype) if c else t for t, c in zip(tensors, can, strict=True)]


def _refused(reason: str) -> ConfigError:
  error = ConfigError(
    f"loopwright.recompute() got a function that {reason}; the backward pass calls it again, so "
    "leave that part outside."
  )
  error._keras_call_info_injected = True  # type: ignore[attr-defined]  # Keras adds nothing to it
  return error
