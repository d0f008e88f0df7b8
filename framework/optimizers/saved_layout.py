"""Saves slots that are split over a mesh in the layout of every other run.

Elsewhere small variables are fused, so their slots are one in a checkpoint. On a mesh each variable
has slots of its own. A checkpoint of either kind fits the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.trackable import autotrackable, base
from tensorflow.python.training.saving.saveable_object import SaveSpec

from framework.backend import models
from framework.optimizers.fusion import Fusion

_VALUE = "VARIABLE_VALUE"
_CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


class SavedOptimizer(autotrackable.AutoTrackable):
  """What a checkpoint has of an optimizer whose slots are not fused, as if they were."""

  def __init__(
    self,
    optimizer: Any,
    slots: Mapping[int, Sequence[Any]],
    variables: Sequence[Any],
    *,
    fused: bool,
  ) -> None:
    """Arranges the slots.

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
    self._variables = [*others, *_arranged(slots, groups)]
    self._iterations, self._learning_rate = optimizer._iterations, optimizer._learning_rate


class JoinedSlots(base.Trackable):
  """Slots of several variables, which a checkpoint has as one flat tensor.

  Attributes:
    name, dtype, saved_shape: those of the flat tensor.
  """

  def __init__(self, slots: Sequence[Any]) -> None:
    """Keeps the slots."""
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


def _arranged(slots: Mapping[int, Sequence[Any]], groups: Sequence[Sequence[int]]) -> Iterator[Any]:
  for group in groups:
    for kind in zip(*(slots.get(index, ()) for index in group), strict=True):
      yield kind[0] if len(kind) == 1 else JoinedSlots(kind)
