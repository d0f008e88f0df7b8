"""The axes of a weight here and in PyTorch, for names that end in ".T".

Linear: [out, in] there, [in, out] here. Convolutions: [out, in, *window] there, [*window, in, out]
here; transposed: [in, out, *window] there, [*window, out, in] here. Of each channel alone:
[in x multiplier, 1, *window] there, [*window, in, multiplier] here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import numpy as np

from loopwright.graphs.aliases import Layer, Model
from loopwright.models import models

_CONVOLUTION = re.compile(r"(Base)?(Depthwise|Separable)?Conv(\dD)?(Transpose)?")
"""The classes of both Kerases, and their bases."""


@dataclasses.dataclass(frozen=True)
class Layout:
  """The axes of one weight.

  Attributes:
    shape: of the weight here.
    depthwise: whether it is of a convolution of each channel alone.
  """

  shape: tuple[int, ...]
  depthwise: bool = False

  def from_torch(self, value: np.ndarray) -> np.ndarray:
    """Returns PyTorch's weight as it is here; its shape differs if it does not fit."""
    turned = value.transpose(*range(2, value.ndim), *reversed(range(min(value.ndim, 2))))
    fits = turned.shape[-2:-1] == (1,) and turned.size == np.prod(self.shape)
    return turned.reshape(self.shape) if self.depthwise and fits else turned

  def to_torch(self, value: np.ndarray) -> np.ndarray:
    """Returns a weight of here as PyTorch has it."""
    if self.depthwise:
      value = value.reshape([*self.shape[:-2], 1, -1])
    last = range(max(0, value.ndim - 2), value.ndim)
    return value.transpose(*reversed(last), *range(last.start))


def layouts(model: Model) -> dict[int, Layout]:
  """Returns the layouts of a model's weights by the id of the `tf.Variable`.

  A weight with more than two axes has one only if it is of a convolution of Keras.
  """
  plain = (models.raw(weight) for weight in models.weights(model))
  found = {id(v): Layout(tuple(v.shape)) for v in plain if v.shape.rank <= 2}
  return found | dict(_of_convolutions(model))


def _of_convolutions(model: Model) -> Iterator[tuple[int, Layout]]:
  for layer in models.layers(model):
    if any(_CONVOLUTION.fullmatch(each.__name__) for each in type(layer).__mro__):
      alone = _of_channels(layer)
      for weight in map(models.raw, layer.weights):
        if weight.shape.rank > 2:
          yield id(weight), Layout(tuple(weight.shape), depthwise=weight is alone)


def _of_channels(layer: Layer) -> object:
  """Returns the weight of a layer that is of each channel alone, or None."""
  own = getattr(layer, "depthwise_kernel", None)
  if own is None and any("Depthwise" in each.__name__ for each in type(layer).__mro__):
    own = layer.kernel
  return None if own is None else models.raw(own)
