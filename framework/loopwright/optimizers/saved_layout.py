"""What a checkpoint has of an optimizer, in one layout for all runs.

A learning rate has the same place whether it is a number, which Keras keeps in a variable, or a
schedule. So a checkpoint of one kind of run fits the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.trackable import base
from tensorflow.python.training.saving.saveable_object import SaveSpec

from loopwright.graphs.aliases import Variable
from loopwright.host.lazy_keras import KerasOptimizer
from loopwright.models import models

_VALUE = "VARIABLE_VALUE"
_RATE, _CONFIGURED = "_learning_rate", "configured_learning_rate"
_VARIABLES = "_variables"


class SavedOptimizer(base.Trackable):
  """A built optimizer as a checkpoint has it, with the learning rate of its config.

  An action may change a rate that is a number, so a checkpoint has the rate in force and the one
  that the config gave. On a restore the former counts, unless the config now gives another.

  Attributes:
    configured: the learning rate of the config, rounded to float32; NaN for a schedule.
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
    self.configured = math.nan if self._variable is None else float(self._variable.numpy())
    self._configured = tf.Variable(
      self.configured, trainable=False, dtype=tf.float32, name=_CONFIGURED,
      aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )  # fmt: skip
    listed = list(optimizer._variables if variables is None else variables)
    saved = parts.setdefault(_RATE, SavedRate(rate, models.raw(optimizer.iterations)))
    if self._variable is None and isinstance(optimizer, keras.optimizers.Optimizer):
      listed.insert(1, saved)  # Keras 3 has its rate there too
    self._parts = {**parts, _CONFIGURED: self._configured, _VARIABLES: _tracked(listed)}

  def settle(self) -> None:
    """Puts the config's learning rate in force if the restored one had another config (host)."""
    before = float(self._configured.numpy())
    self._configured.assign(self.configured)
    if self._variable is not None and before != self.configured:
      self._variable.assign(self.configured)

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


def _tracked(values: Sequence[Any]) -> Any:
  return tf.__internal__.tracking.wrap(list(values))


def saved_shape(variable: tf.Variable) -> tf.TensorShape:
  """Returns the shape that a variable has in a checkpoint."""
  return variable.saved_shape if hasattr(variable, "saved_shape") else variable.shape
