"""Updates many small variables as one flat variable.

In a model with 100 small variables, an update spends most of its time starting tiny operations. If
the update rule is elementwise (Adam, SGD, ...), concatenating the small variables and their
gradients changes only the number of operations, not the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from loopwright.errors import ConfigError
from loopwright.graphs import xla
from loopwright.graphs.aliases import Gradient, Variable
from loopwright.host.lazy_keras import KerasOptimizer
from loopwright.models import models
from loopwright.models.replica_state import assign, assign_result

SMALL = 2**14
"""Variables with fewer elements are fused; copying a larger one costs more than fusion saves."""


class Piece(NamedTuple):
  """What `Fusion.pack` makes of one group, or of one variable that is not fused."""

  shape: tf.TensorShape
  dtype: tf.DType


class Fusion:
  """Groups small variables into flat ones; the optimizer is built with `variables`.

  Attributes:
    originals: the optimizer's variables, in order.
    pieces: the layout of `pack`: one for each of `variables`.
    flats: one flat variable per group.
    variables: `flats`, then the originals that are not fused.
  """

  def __init__(self, variables: Sequence[Variable], *, enabled: bool, make: bool = True) -> None:
    """Makes the flat variables; call it in `strategy.scope()`.

    Args:
      variables: the variables of one optimizer, in its order.
      enabled: False fuses nothing.
      make: False makes no variables: only the layout is asked for.
    """
    self.originals = list(variables)
    self._raw = [models.raw(v) for v in variables]
    self._sizes = [v.shape.num_elements() for v in self._raw]
    self.groups = self._grouped() if enabled else []
    fused = {index for group in self.groups for index in group}
    self.singles = [i for i in range(len(variables)) if i not in fused]
    flat = [Piece(self._flat_shape(g), self._raw[g[0]].dtype) for g in self.groups]
    self.pieces = [*flat, *(Piece(self._raw[i].shape, self._raw[i].dtype) for i in self.singles)]
    self.flats: list[tf.Variable] = []
    self.variables: list[Variable] = []
    if make:
      self._make_variables()

  def pack(self, gradients: Sequence[Gradient]) -> list[Gradient]:
    """Converts gradients of `originals` to those of `variables`; None in a group becomes zeros."""
    flat = [self._concatenated(group, gradients) for group in self.groups]
    return [*flat, *(gradients[i] for i in self.singles)]

  def require_shapes(self, gradients: Sequence[Gradient]) -> None:
    """Raises ConfigError unless there is a gradient of its shape, or None, for each variable."""
    if len(gradients) != len(self.originals):
      raise ConfigError(
        f"step.apply() got {len(gradients)} gradients for {len(self.originals)} variables; give "
        "one for each of step.variables(), in their order, None where there is none."
      )
    for gradient, variable, raw in zip(gradients, self.originals, self._raw, strict=True):
      shape = raw.shape if gradient is None else getattr(gradient, "shape", ())
      if not raw.shape.is_compatible_with(shape):
        raise ConfigError(
          f"step.apply() got a gradient of shape {shape} for {models.name(variable)!r} of shape "
          f"{raw.shape}; give one for each of step.variables(), in their order."
        )

  def differentiated(
    self, tape: tf.GradientTape, total: tf.Tensor, factor: tf.Tensor | None
  ) -> list[Gradient]:
    """Returns a gradient of `total` x `factor`, or of `total`, for each of `originals`, dense.

    Makes it in replica context.
    """
    found = tape.gradient(total, self._raw, output_gradients=factor)
    return [None if g is None else tf.convert_to_tensor(g) for g in found]

  def unpack(self, pieces: Sequence[Gradient]) -> list[Gradient]:
    """Converts gradients of `variables` to gradients of `originals`."""
    gradients: list[Gradient] = [None] * len(self.originals)
    for number, piece in enumerate(pieces[: len(self.groups)]):
      for index, part in self.split(number, piece):
        gradients[index] = part
    for index, piece in zip(self.singles, pieces[len(self.groups) :], strict=True):
      gradients[index] = piece
    return gradients

  def load(self, strategy: tf.distribute.Strategy) -> None:
    """Copies the originals into the flat variables (cross-replica)."""

    def concatenated(flat: tf.Variable, *parts: tf.Tensor) -> tf.Tensor:
      del flat
      return tf.concat([tf.reshape(part, [-1]) for part in parts], axis=0)

    for flat, group in zip(self.flats, self.groups, strict=True):
      parts = tuple(self._raw[i] for i in group)
      assign_result(strategy, flat, concatenated, parts)

  def store(self, strategy: tf.distribute.Strategy, missing: Sequence[bool]) -> None:
    """Copies flat variables to the originals (cross-replica), unless `missing` is True."""

    def split_all() -> list[tf.Tensor]:
      parts = [self.split(number, flat.read_value()) for number, flat in enumerate(self.flats)]
      return [part for group in parts for _, part in group]

    if not self.groups:
      return
    order = [index for group in self.groups for index in group]
    parts = strategy.extended.call_for_each_replica(split_all)
    for index, part in zip(order, parts, strict=True):
      if not missing[index]:
        assign(strategy, self._raw[index], part)

  def own(self, pieces: Sequence[tf.Tensor | None]) -> list[tf.Tensor | None]:
    """Returns what this replica updates of tensors in `pack`'s layout: all (replica context)."""
    return list(pieces)

  def save_whole(self, optimizer: KerasOptimizer) -> None:
    """Prepares the slots of `optimizer`, once it is built, for checkpoints (host)."""

  def masks(self, missing: Sequence[bool]) -> list[tf.Tensor | None]:
    """Returns for each of `variables` None, or bool [size]: False where a gradient is missing."""
    masks: list[tf.Tensor | None] = []
    for group in self.groups:
      parts = [tf.fill([self._sizes[i]], not missing[i]) for i in group]
      masks.append(tf.concat(parts, axis=0) if any(missing[i] for i in group) else None)
    return masks + [None] * len(self.singles)

  def _make_variables(self) -> None:
    """Sets `flats` and `variables`."""
    self.flats = [
      tf.Variable(
        tf.zeros(piece.shape, piece.dtype),
        trainable=False,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        name=f"fused_{number}",
      )
      for number, piece in enumerate(self.pieces[: len(self.groups)])
    ]
    self.variables = [*self.flats, *(self.originals[i] for i in self.singles)]

  def _flat_shape(self, group: Sequence[int]) -> tf.TensorShape:
    return tf.TensorShape([sum(self._sizes[i] for i in group)])

  def _grouped(self) -> list[list[int]]:
    groups: dict[tf.DType, list[int]] = {}
    for index, variable in enumerate(self._raw):
      constrained = getattr(self.originals[index], "constraint", None) is not None
      if self._sizes[index] < SMALL and not constrained:
        groups.setdefault(variable.dtype, []).append(index)
    distinct = [self._distinct(group) for group in groups.values()]
    return [group for group in distinct if len(group) > 1]

  def _distinct(self, group: list[int]) -> list[int]:
    """Drops variables from the end until no other variable has the flat one's shape and dtype.

    The shape identifies the optimizer's slots of a flat variable.
    """
    shapes = [(v.dtype, tuple(v.shape)) for v in self._raw]
    while len(group) > 1:
      flat = self._raw[group[0]].dtype, (sum(self._sizes[i] for i in group),)
      if flat not in (shape for i, shape in enumerate(shapes) if i not in group):
        break
      group = group[:-1]
    return group

  def _concatenated(self, group: Sequence[int], gradients: Sequence[Gradient]) -> tf.Tensor:
    if all(gradients[i] is None for i in group):
      return None
    parts = [
      tf.zeros([self._sizes[i]], self._raw[i].dtype)
      if gradients[i] is None
      else tf.cast(tf.reshape(gradients[i], [-1]), self._raw[i].dtype)
      for i in group
    ]
    return tf.concat(parts, axis=0)

  def split(self, number: int, flat: tf.Tensor | None) -> Iterator[tuple[int, Gradient]]:
    """Yields (index in `originals`, its part) of a tensor of group `number`; parts of None."""
    group = self.groups[number]
    if flat is None:
      yield from ((index, None) for index in group)
      return
    parts = tf.split(flat, [self._sizes[i] for i in group])
    for index, part in zip(group, parts, strict=True):
      yield index, tf.reshape(part, self._raw[index].shape)


class Gradients(Sequence[Gradient]):
  """A sequence of gradients, one per variable; None if the loss does not depend on it.

  The gradients of fused variables share a buffer, on which the verbs of loopwright/step.py work. A
  plain list of gradients is accepted instead.

  Attributes:
    fusion: the grouping, or None.
    pieces: one tensor or None for each of `fusion.variables`, or per variable without fusion.
    missing: one bool per variable, True for None.
  """

  def __init__(
    self, fusion: Fusion | None, pieces: Sequence[Gradient], missing: Sequence[bool]
  ) -> None:
    self.fusion, self.pieces, self.missing = fusion, list(pieces), list(missing)
    self._unpacked: list[Gradient] | None = None

  @classmethod
  def of(cls, fusion: Fusion, gradients: Sequence[Gradient]) -> Gradients:
    """Packs gradients, one per variable, for the optimizer of `fusion`.

    Raises:
      ConfigError: another number of gradients, or one of another shape than its variable.
    """
    if isinstance(gradients, Gradients) and gradients.fusion is fusion:
      return gradients
    fusion.require_shapes(given := list(gradients))
    return cls(fusion, fusion.pack(given), [g is None for g in given])

  @classmethod
  def as_given(cls, gradients: Sequence[Gradient]) -> Gradients:
    """Returns gradients as they are; does not fuse a plain list."""
    if isinstance(gradients, Gradients):
      return gradients
    return cls(None, gradients, [g is None for g in gradients])

  @classmethod
  def zeros(cls, fusion: Fusion) -> Gradients:
    """Returns a zero gradient for each variable."""
    pieces = [tf.zeros(*piece) for piece in fusion.pieces]
    return cls(fusion, pieces, [False] * len(fusion.originals))

  def require_some(self, variables: Sequence[Variable]) -> None:
    """Raises ConfigError if no variable has a gradient, or one that optimizers do not train."""
    names = [models.name(v) for m, v in zip(self.missing, variables, strict=True) if m]
    if len(names) == len(variables):
      raise ConfigError(
        f"the loss depends on none of {len(variables)} trainable variables "
        f"({', '.join(names[:3])}, ...); compute it from the outputs of forward(), with TensorFlow "
        "or Keras operations only."
      )
    for given, variable in zip(self.missing, variables, strict=True):
      if not given and (dtype := models.raw(variable).dtype).is_complex:
        raise ConfigError(
          f"the variable {models.name(variable)!r} is {dtype.name}, which optimizers do not train; "
          "make two of floats, and tf.complex(real, imaginary) of them in forward()."
        )

  def square(self) -> tf.Tensor:
    """Returns the square of the global L2 norm, a float32 scalar."""
    if xla.traced_for() == "CPU":
      return tf.add_n([tf.cast(xla.sum_of_squares(_wide(g)), tf.float32) for g in self.tensors])
    halves = [tf.cast(tf.nn.l2_loss(_wide(g)), tf.float32) for g in self.tensors]
    return 2.0 * tf.add_n(halves)

  def map(self, function: Callable[[tf.Tensor], tf.Tensor]) -> Gradients:
    """Returns the results of an elementwise function of each buffer."""
    pieces = [None if piece is None else function(piece) for piece in self.pieces]
    return Gradients(self.fusion, pieces, self.missing)

  @property
  def tensors(self) -> list[tf.Tensor]:
    """The buffers that are not None."""
    return [piece for piece in self.pieces if piece is not None]

  def replaced(self, tensors: Sequence[tf.Tensor]) -> Gradients:
    """Returns a copy with other buffers, one for each of `tensors`."""
    others = iter(tensors)
    pieces = [None if piece is None else next(others) for piece in self.pieces]
    return Gradients(self.fusion, pieces, self.missing)

  def __getitem__(self, index: Any) -> Any:
    """Returns the gradient of one variable, or a list for a slice."""
    if self._unpacked is None:
      gradients = self.fusion.unpack(self.pieces) if self.fusion else self.pieces
      self._unpacked = [None if m else g for g, m in zip(gradients, self.missing, strict=True)]
    return self._unpacked[index]

  def __len__(self) -> int:
    return len(self.missing)


def _wide(gradient: tf.Tensor) -> tf.Tensor:
  """Casts to float32 or wider: float16 squares overflow above 65504, bfloat16 sums lose digits."""
  return tf.cast(gradient, tf.float32) if gradient.dtype.size < 4 else gradient
