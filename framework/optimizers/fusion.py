"""Small variables updated as one: a dozen operations instead of a dozen for each.

An update of a model of 100 small variables spends most of its time starting tiny operations. Where
the update rule treats every element alike (Adam, SGD, ...), concatenating the small variables, and
their gradients, changes nothing but the number of operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from framework.backend import models

SMALL = 2**14
"""Elements below which a variable is fused; copying a larger one would cost more than it saves."""


class Fusion:
  """Which variables share a flat one. `variables` is what the optimizer is built with."""

  def __init__(self, variables: Sequence[Any], *, enabled: bool) -> None:
    """Makes the flat variables, so call it in `strategy.scope()`.

    Args:
      variables: those of one optimizer, in its order.
      enabled: False fuses nothing.
    """
    self.originals = list(variables)
    self._raw = [models.raw(v) for v in variables]
    self._sizes = [v.shape.num_elements() for v in self._raw]
    self.groups = self._grouped() if enabled else []
    fused = {index for group in self.groups for index in group}
    self.singles = [i for i in range(len(variables)) if i not in fused]
    self.flats = [
      tf.Variable(
        tf.zeros([sum(self._sizes[i] for i in group)], self._raw[group[0]].dtype),
        trainable=False,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        name=f"fused_{number}",
      )
      for number, group in enumerate(self.groups)
    ]
    self.variables = [*self.flats, *(self.originals[i] for i in self.singles)]

  def pack(self, gradients: Sequence[Any]) -> list[Any]:
    """Gradients of the originals -> gradients of `variables`; None in a flat one becomes zeros."""
    flat = [self._concatenated(group, gradients) for group in self.groups]
    return [*flat, *(gradients[i] for i in self.singles)]

  def unpack(self, pieces: Sequence[Any]) -> list[Any]:
    """Gradients of `variables` -> gradients of the originals."""
    gradients: list[Any] = [None] * len(self.originals)
    for group, piece in zip(self.groups, pieces, strict=False):
      for index, part in self._split(group, piece):
        gradients[index] = part
    for index, piece in zip(self.singles, pieces[len(self.groups) :], strict=True):
      gradients[index] = piece
    return gradients

  def load(self, strategy: tf.distribute.Strategy) -> None:
    """Copies the originals into the flat variables (cross-replica)."""

    def assign(flat: tf.Variable, *parts: tf.Tensor) -> None:
      flat.assign(tf.concat([tf.reshape(part, [-1]) for part in parts], axis=0), read_value=False)

    for flat, group in zip(self.flats, self.groups, strict=True):
      parts = tuple(self._raw[i] for i in group)
      strategy.extended.update(flat, assign, args=parts, group=False)

  def store(self, strategy: tf.distribute.Strategy, missing: Sequence[bool]) -> None:
    """Copies the flat variables back (cross-replica), but not where a gradient was missing."""

    def assign(variable: tf.Variable, part: tf.Tensor) -> None:
      variable.assign(part, read_value=False)

    def split_all() -> list[tf.Tensor]:
      pieces = [flat.read_value() for flat in self.flats]
      parts = [self._split(g, p) for g, p in zip(self.groups, pieces, strict=True)]
      return [part for group in parts for _, part in group]

    if not self.groups:
      return
    order = [index for group in self.groups for index in group]
    parts = strategy.extended.call_for_each_replica(split_all)
    for index, part in zip(order, parts, strict=True):
      if not missing[index]:
        strategy.extended.update(self._raw[index], assign, args=(part,), group=False)

  def masks(self, missing: Sequence[bool]) -> list[tf.Tensor | None]:
    """For each of `variables`: None, or bool [size], False where a gradient was missing."""
    masks: list[tf.Tensor | None] = []
    for group in self.groups:
      parts = [tf.fill([self._sizes[i]], not missing[i]) for i in group]
      masks.append(tf.concat(parts, axis=0) if any(missing[i] for i in group) else None)
    return masks + [None] * len(self.singles)

  def _grouped(self) -> list[list[int]]:
    groups: dict[tf.DType, list[int]] = {}
    for index, variable in enumerate(self._raw):
      constrained = getattr(self.originals[index], "constraint", None) is not None
      if self._sizes[index] < SMALL and not constrained:
        groups.setdefault(variable.dtype, []).append(index)
    distinct = [self._distinct(group) for group in groups.values()]
    return [group for group in distinct if len(group) > 1]

  def _distinct(self, group: list[int]) -> list[int]:
    """Leaves out the last until the flat one has a shape of its own, which tells its slots."""
    while self._has_twin(group):
      group = group[:-1]
    return group

  def _has_twin(self, group: Sequence[int]) -> bool:
    others = [v for i, v in enumerate(self._raw) if i not in group]
    shape, dtype = [sum(self._sizes[i] for i in group)], self._raw[group[0]].dtype
    return len(group) > 1 and any(v.dtype == dtype and v.shape == shape for v in others)

  def _concatenated(self, group: Sequence[int], gradients: Sequence[Any]) -> tf.Tensor:
    if all(gradients[i] is None for i in group):
      return None
    parts = [
      tf.zeros([self._sizes[i]], self._raw[i].dtype)
      if gradients[i] is None
      else tf.reshape(gradients[i], [-1])
      for i in group
    ]
    return tf.concat(parts, axis=0)

  def _split(self, group: Sequence[int], flat: tf.Tensor | None) -> Iterator[tuple[int, Any]]:
    if flat is None:
      yield from ((index, None) for index in group)
      return
    parts = tf.split(flat, [self._sizes[i] for i in group])
    for index, part in zip(group, parts, strict=True):
      yield index, tf.reshape(part, self._raw[index].shape)


class Gradients(Sequence[Any]):
  """Gradients, one a variable, None where the loss does not touch it.

  A sequence to look at and to compute with; inside, small ones lie in one buffer, on which the
  verbs of framework/step.py work. Any plain list of gradients may take its place.
  """

  def __init__(self, fusion: Fusion | None, pieces: Sequence[Any], missing: Sequence[bool]) -> None:
    """Keeps the pieces: one for each of `fusion.variables`, or one a variable without fusion."""
    self.fusion, self.pieces, self.missing = fusion, list(pieces), list(missing)
    self._unpacked: list[Any] | None = None

  @classmethod
  def of(cls, fusion: Fusion, gradients: Sequence[Any]) -> Gradients:
    """Packs gradients, one a variable, for the optimizer with this `fusion`."""
    if isinstance(gradients, Gradients) and gradients.fusion is fusion:
      return gradients
    return cls(fusion, fusion.pack(list(gradients)), [g is None for g in gradients])

  def map(self, function: Callable[[tf.Tensor], tf.Tensor]) -> Gradients:
    """Applies an elementwise function to every gradient."""
    pieces = [None if piece is None else function(piece) for piece in self.pieces]
    return Gradients(self.fusion, pieces, self.missing)

  @property
  def tensors(self) -> list[tf.Tensor]:
    """The buffers that are there."""
    return [piece for piece in self.pieces if piece is not None]

  def replaced(self, tensors: Sequence[tf.Tensor]) -> Gradients:
    """The same gradients with other buffers, one for each of `tensors`."""
    others = iter(tensors)
    pieces = [None if piece is None else next(others) for piece in self.pieces]
    return Gradients(self.fusion, pieces, self.missing)

  def __getitem__(self, index: Any) -> Any:
    """The gradient of one variable, or a list for a slice."""
    if self._unpacked is None:
      gradients = self.fusion.unpack(self.pieces) if self.fusion else self.pieces
      self._unpacked = [None if m else g for g, m in zip(gradients, self.missing, strict=True)]
    return self._unpacked[index]

  def __len__(self) -> int:
    """The number of variables."""
    return len(self.missing)
