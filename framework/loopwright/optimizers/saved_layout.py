"""What a checkpoint has of an optimizer, in one layout for all runs.

A learning rate has the same place whether it is a number, which Keras keeps in a variable, or a
schedule. Slots that are split over a mesh are joined as the fused ones of other runs are. So a
checkpoint of one kind of run fits the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.trackable import base
from tensorflow.python.training.saving.saveable_object import SaveSpec

from loopwright.aliases import Variable
from loopwright.host.lazy_keras import KerasOptimizer
from loopwright.models import models
from loopwright.optimizers.fusion import Fusion

_VALUE = "VARIABLE_VALUE"
_CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
_RATE, _CONFIGURED = "_learning_rate", "configured_learning_rate"
_VARIABLES = "_variables"


class SavedOptimizer(base.Trackable):
  """A built optimizer as a checkpoint has it, with the learning rate of its config.

  An action may change a rate that is a number, so a checkpoint has the rate in force and the one
  that the config gave. On a restore the former counts, unless the config now gives another.
  """

  def __init__(
    self,
    optimizer: KerasOptimizer,
    rate: Callable[[], tf.Tensor],
    variables: Sequence[Variable] | None = None,
  ) -> None:
    """Arranges what is saved; call it in `strategy.scope()`.

    Args:
      optimizer: a built optimizer of either Keras.
      rate: returns its learning rate.
      variables: what to save in place of all of the optimizer's variables.
    """
    own = optimizer._trackable_children()
    kinds = (tf.Variable, keras.Variable)
    parts = {name: part for name, part in own.items() if isinstance(part, kinds)}
    parts.pop("_current_learning_rate", None)  # the last value of a schedule of tf_keras
    self._variable = models.raw(parts[_RATE]) if _RATE in parts else None
    self._rate = math.nan if self._variable is None else float(self._variable.numpy())
    self._configured = tf.Variable(
      self._rate, trainable=False, dtype=tf.float32, name=_CONFIGURED,
      aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )  # fmt: skip
    listed = list(optimizer._variables if variables is None else variables)
    saved = parts.setdefault(_RATE, SavedRate(rate, models.raw(optimizer.iterations)))
    if self._variable is None and isinstance(optimizer, keras.optimizers.Optimizer):
      listed.insert(1, saved)  # Keras 3 has its rate there too
    self._whole = {**parts, _CONFIGURED: self._configured, _VARIABLES: _tracked(listed)}
    unrated = {name: part for name, part in parts.items() if name != _RATE}
    others = [one for one in listed if one is not saved]
    self._without_rate = {**unrated, _VARIABLES: _tracked(others)}
    self._parts = self._whole

  def fit(self, parts: Collection[str]) -> None:
    """Takes the layout of a checkpoint of this or an earlier version, until `settle` (host).

    Args:
      parts: the names of what the checkpoint has of this optimizer.
    """
    if _RATE not in parts:
      self._parts = self._without_rate
    elif _CONFIGURED not in parts:
      self._parts = {name: part for name, part in self._whole.items() if name != _CONFIGURED}

  def settle(self, *, changed: bool = False) -> None:
    """Puts the config's learning rate in force if the restored one had another config (host).

    Args:
      changed: whether it had; asked for a checkpoint of an earlier version, which does not say.
    """
    known, had_rate = _CONFIGURED in self._parts, _RATE in self._parts
    before = float(self._configured.numpy())
    self._parts = self._whole
    self._configured.assign(self._rate)
    if self._variable is None:
      return
    if before != self._rate if known else changed or not had_rate:
      self._variable.assign(self._rate)

  @property
  def configured(self) -> float:
    """The learning rate that the config gives, rounded to float32; NaN for a schedule."""
    return self._rate

  def _trackable_children(self, *_: Any, **__: Any) -> dict[str, Any]:
    return dict(self._parts)

  def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
    del cached_dependencies
    return self._parts.get(name)


class SavedRate(base.Trackable):
  """The value of a schedule, which is saved but not restored."""

  name, dtype, saved_shape = "learning_rate", tf.float32, tf.TensorShape([])

  def __init__(self, rate: Callable[[], tf.Tensor], beside: tf.Variable) -> None:
    """Keeps the function, and a variable on whose device it is saved."""
    self._rate = rate
    device = tf.DeviceSpec.from_string(getattr(beside, "values", [beside])[0].device)
    self._device = device.replace(device_type="CPU", device_index=0).to_string()  # not the mesh

  def _serialize_to_tensors(self) -> dict[str, SaveSpec]:
    return {_VALUE: SaveSpec(self._read, "", _VALUE, dtype=self.dtype, device=self._device)}

  def _read(self) -> tf.Tensor:
    rate = self._rate()  # on a mesh, a tensor of the mesh
    return tf.constant(float(rate), self.dtype) if tf.executing_eagerly() else rate

  def _restore_from_tensors(self, tensors: Mapping[str, tf.Tensor]) -> None:
    """Leaves the schedule as it is."""


class JoinedSlots(base.Trackable):
  """Slots of several variables, which a checkpoint has as one flat tensor.

  Attributes:
    name, dtype, saved_shape: those of the flat tensor.
  """

  def __init__(self, slots: Sequence[Variable]) -> None:
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


def _tracked(values: Sequence[Any]) -> Any:
  return tf.__internal__.tracking.wrap(list(values))


def saved_shape(variable: tf.Variable) -> tf.TensorShape:
  """Returns the shape that a variable has in a checkpoint."""
  return variable.saved_shape if hasattr(variable, "saved_shape") else variable.shape
