"""Slots that are split over a mesh, saved in the layout of other runs: joined as fused ones are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.trackable import base
from tensorflow.python.training.saving.saveable_object import SaveSpec

from loopwright.aliases import Variable
from loopwright.host.lazy_keras import KerasOptimizer
from loopwright.models import models
from loopwright.optimizers.fusion import Fusion

_VALUE = "VARIABLE_VALUE"
_CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


class JoinedSlots(base.Trackable):
  """Slots of several variables, which a checkpoint has as one flat tensor.

  Attributes:
    name, dtype, saved_shape: those of the flat tensor.
  """

  def __init__(self, slots: Sequence[Variable]) -> None:
    self._slots = [models.raw(slot) for slot in slots]
    self._sizes = [slot.shape.num_elements() for slot in self._slots]
    self.name, self.dtype = self._slots[0].name, self._slots[0].dtype
    self.saved_shape = tf.TensorShape([sum(self._sizes)])

  def _serialize_to_tensors(self) -> dict[str, SaveSpec]:
    return {_VALUE: SaveSpec(self._joined, "", _VALUE, dtype=self.dtype, device=_CPU)}

  def _joined(self) -> tf.Tensor:
    return tf.concat([tf.reshape(slot.numpy(), [-1]) for slot in self._slots], axis=0)

  def _restore_from_tensors(self, tensors: Mapping[str, tf.Tensor]) -> None:
    parts = tf.split(tf.ensure_shape(tensors[_VALUE], self.saved_shape), self._sizes)
    for slot, part in zip(self._slots, parts, strict=True):
      slot.assign(tf.reshape(part, slot.shape), read_value=False)


class _Layout(Fusion):
  """Where a `Fusion` would put each variable."""

  def _make_variables(self) -> None:
    pass


def joined_variables(
  optimizer: KerasOptimizer,
  slots: Mapping[int, Sequence[Variable]],
  variables: Sequence[Variable],
  *,
  fused: bool,
) -> list[Any]:
  """Returns the variables of an optimizer whose slots are not fused, as if they were.

  Args:
    optimizer: a built optimizer of either Keras.
    slots: index of a variable -> its slots, in the order in which they were made.
    variables: those of the optimizer, in its order.
    fused: whether another run would fuse small variables.
  """
  layout = _Layout(variables, enabled=fused)
  own = {id(models.raw(slot)) for group in slots.values() for slot in group}
  others = [v for v in optimizer._variables if id(models.raw(v)) not in own]
  groups = [*layout.groups, *([index] for index in layout.singles)]
  return [*others, *_arranged(slots, groups)]


def _arranged(
  slots: Mapping[int, Sequence[Variable]], groups: Sequence[Sequence[int]]
) -> Iterator[Any]:
  for group in groups:
    for kind in zip(*(slots.get(index, ()) for index in group), strict=True):
      yield kind[0] if len(kind) == 1 else JoinedSlots(kind)
