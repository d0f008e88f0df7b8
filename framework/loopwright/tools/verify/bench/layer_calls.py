"""Which models and layers a step calls: in training mode, and with which tensors."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import tensorflow as tf

from loopwright.graphs import operations as graphs
from loopwright.graphs.aliases import Layer, Model
from loopwright.host import lazy_keras
from loopwright.models import models
from loopwright.tools.verify.bench import source_lines

LAYERS = ("Dropout", "GaussianNoise", "Random")
"""Parts of the names of layers that draw in training."""


class Call(NamedTuple):
  """A call of a layer, or a read of its losses.

  Attributes:
    inputs, outputs: the tensors that it got and returned.
    frames: (file, line, function).
    layer: the layer.
    masks: those of Keras that came with what it got.
    args, options: what it got.
  """

  inputs: list[Any]
  outputs: list[Any]
  frames: list[tuple[str, int, str]]
  layer: Any = None
  masks: Sequence[Any] = ()
  args: tuple[Any, ...] = ()
  options: Mapping[str, Any] = MappingProxyType({})

  @property
  def taking(self) -> list[str]:
    """The arguments by which the layer takes the mask of what it gets."""
    known = inspect.signature(self.layer.call).parameters
    return [name for name in ("mask", "query_mask", "value_mask") if name in known]

  @property
  def loses_mask(self) -> bool:
    """Whether each row still has its places, but not the mask that came with them."""
    lost = self.masks and not _masks(self.outputs)
    alike = self.outputs and self.outputs[0].shape[:2] == self.inputs[0].shape[:2]
    return bool(lost and alike and not self.taking and not hasattr(self.layer, "layers"))

  @property
  def misses_mask(self) -> bool:
    """Whether the layer could use a mask, and gets none."""
    given = [name for name, value in self.options.items() if "mask" in name and value is not None]
    single = len(self.inputs) == 1 or "value_mask" in self.taking
    return bool(self.taking and single and not self.masks and not given)


class Calls:
  """The layers that were called, of both Keras generations.

  Attributes:
    every: the calls of layers.
    penalties: reads of the losses of layers.
  """

  def __init__(self) -> None:
    self.every: list[Call] = []
    self.penalties: list[Call] = []

  def none_in_training(self, model: Model) -> bool:
    """Whether no part of a model was itself called with `training=True`."""
    calls = [call for part in models.parts(model) for call in self.of(part)]
    given = (value for c in calls for value in (c.options.get("training"), *c.args[1:]))
    return not any(value is True for value in given)

  def of(self, layer: Layer) -> list[Call]:
    """Returns the calls of a layer."""
    return [call for call in self.every if call.layer is layer]

  def lost_masks(self) -> list[tuple[Call, Call]]:
    """Returns calls that lose a mask, each with a later one that could have used it."""
    ends = [call for call in self.every if call.misses_mask]
    pairs = []
    for start in (call for call in self.every if call.loses_mask):
      after = set[str]().union(*map(graphs.computed_from, start.outputs))
      for end in ends:
        alike = end.inputs[0].shape[:2] == start.outputs[0].shape[:2]
        if alike and any(tensor.op.name in after for tensor in end.inputs):
          pairs.append((start, end))
    return pairs


@contextlib.contextmanager
def watch() -> Iterator[Calls]:
  """Watches the calls inside the context (host)."""
  calls = Calls()

  def noted(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(layer: Any, *args: Any, **options: Any) -> Any:
      inputs, frames = tf.nest.flatten((args, options)), source_lines.frames(but=__file__)
      masks, tensors = _masks(inputs), [*filter(tf.is_tensor, inputs)]
      outputs = call(layer, *args, **options)
      made = Call(tensors, tf.nest.flatten(outputs), frames, layer, masks, args, options)
      calls.every.append(made)
      return outputs

    return called

  def read(losses: property) -> property:
    def noting(layer: Any) -> Any:
      found = losses.fget(layer)  # type: ignore[misc]
      calls.penalties.append(Call([], list(found), source_lines.frames(but=__file__)))
      return found

    return property(noting)

  with contextlib.ExitStack() as stack:
    for kind in [each.layers.Layer for each in lazy_keras.kerases()]:
      stack.enter_context(mock.patch.object(kind, "__call__", noted(kind.__call__)))
      stack.enter_context(mock.patch.object(kind, "losses", read(kind.losses)))
    yield calls


def _masks(values: Sequence[Any]) -> list[Any]:
  masks = (getattr(value, "_keras_mask", None) for value in values)
  return [mask for mask in masks if mask is not None]


def normalisations(model: Model, *, trainable: bool = False) -> list[Any]:
  """Returns the layers of a model that normalise over the batch; `trainable`: none is frozen."""
  found = (each for each in models.layers(model) if "BatchNormalization" in type(each).__name__)
  return [layer for layer in found if layer.trainable or not trainable]


def random_layers(model: Model, *, frozen: bool = False) -> list[str]:
  """Returns the names of a model's layers that draw random numbers in training.

  A frozen model, such as a teacher, must behave as in evaluation, so its layers only count if
  `frozen`.
  """
  found = []
  for part in models.parts(model):
    if not models.is_keras(part) or not (part.trainable or frozen):
      continue
    for layer in models.layers(part):
      named = any(word in type(layer).__name__ for word in LAYERS)
      rates = ("rate", "stddev") if named else ("dropout", "recurrent_dropout")
      amounts = [getattr(layer, name, None) for name in rates]
      if any(isinstance(amount, (int, float)) and amount > 0 for amount in amounts):
        found.append(layer.name)
  return found
