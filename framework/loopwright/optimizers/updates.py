"""What a step changes: the update, if it is finite; offsets for a while; assignments at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from loopwright.distribution import placement
from loopwright.errors import ConfigError
from loopwright.graphs import branches, xla
from loopwright.graphs.aliases import Gradient, PerReplica, TensorLike, Variable
from loopwright.models import models, replica_state
from loopwright.optimizers import kernels
from loopwright.optimizers.adapters import Optimizer
from loopwright.optimizers.fusion import Gradients

if TYPE_CHECKING:
  from loopwright.optimizers.ema import Ema


def apply_if(
  strategy: tf.distribute.Strategy,
  finite: PerReplica,
  optimizer: Optimizer,
  gradients: Gradients,
  ema: Ema | None,
  *,
  jit_compile: bool = False,
) -> None:
  """Updates an optimizer's variables and their moving averages if `finite` (cross-replica).

  Keras's update communicates, which a branch in replica context cannot. So the branch is here, and
  `Optimizer.apply` returns to replica context inside it.
  """

  def update() -> None:
    optimizer.apply(strategy, gradients)
    if ema is not None:
      ema.update(strategy, optimizer.variables)

  place = placement.of(strategy)
  if in_place(optimizer, ema, place):
    optimizer.apply(strategy, gradients, finite, jit_compile=jit_compile)
  else:
    place.update_if(strategy.experimental_local_results(finite)[0], update)


def in_place(optimizer: Optimizer, ema: Ema | None, place: placement.Placement) -> bool:
  """Whether each replica updates its variables by itself, without a branch."""
  return optimizer.masks and ema is None and not place.shares_variables


def apply_here(optimizer: Optimizer, gradients: Gradients, finite: tf.Tensor) -> None:
  """Updates this replica's variables `in_place` (replica context)."""
  kernels.apply_masked(optimizer.optimizer, gradients, finite)


@contextlib.contextmanager
def moved(variables: Sequence[Variable], offsets: Sequence[Gradient]) -> Iterator[None]:
  """Adds offsets to variables inside `with`; see `Step.perturbed` (replica context)."""
  placement.here().require("step.perturbed")
  there = [models.raw(v) for v, o in zip(variables, offsets, strict=True) if o is not None]
  offsets = [o for o in offsets if o is not None]
  held = [variable.read_value() for variable in there]
  _assign(there, [w + tf.cast(o, w.dtype) for w, o in zip(held, offsets, strict=True)])
  try:
    yield
  finally:
    _assign(there, held)


def _assign(variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
  """Assigns each replica's value to its copy of each variable (replica context)."""

  def assign_all(strategy: tf.distribute.Strategy, values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
      replica_state.assign(strategy, variable, value)

  tf.distribute.get_replica_context().merge_call(assign_all, args=(values,))


class _Assignment(NamedTuple):
  variable: tf.Variable
  value: tf.Tensor
  when: tf.Tensor | None
  name: str


class Assignments:
  """The assignments of a step, which all take effect at its end; see `Step.assign`."""

  def __init__(self) -> None:
    self._made: list[_Assignment] = []

  @property
  def variables(self) -> dict[str, tf.Variable]:
    """What they set, by name."""
    return {one.name: one.variable for one in self._made}

  def add(self, variable: Variable, value: TensorLike, when: tf.Tensor | bool | None) -> None:
    """Adds one (replica context).

    Raises:
      ConfigError: see `Step.assign`.
    """
    target, name = models.raw(variable), models.name(variable)
    tensor = tf.convert_to_tensor(value)
    if not target.shape.is_compatible_with(tensor.shape):
      raise ConfigError(
        f"step.assign() got a value of shape {tensor.shape} for {name!r} of shape {target.shape}; "
        "they must be the same."
      )
    if any(one.variable is target for one in self._made):
      raise ConfigError(
        f"step.assign() got {name!r} twice in a step, and it takes effect only at the end; combine "
        "both values and assign once."
      )
    due = None if when is None else branches.condition(when)
    self._made.append(_Assignment(target, tf.cast(tensor, target.dtype), due, name))

  def make(self, stands: tf.Tensor) -> None:
    """Makes them if `stands`, a bool scalar equal on every replica (replica context)."""
    if not self._made:
      return
    targets = [one.variable for one in self._made]
    flags: dict[Any, list[int]] = {}
    for index, one in enumerate(self._made):
      flags.setdefault(None if one.when is None else one.when.ref(), []).append(index)

    def assign_all(strategy: tf.distribute.Strategy, due: Any, values: Sequence[Any]) -> None:
      place = placement.of(strategy)
      for flag, group in zip(due, flags.values(), strict=True):

        def assign_group(group: list[int] = group) -> None:
          for index in group:
            replica_state.assign(strategy, targets[index], values[index])

        if xla.traced_for() == "GPU":  # where the host would wait for the condition of a branch
          for index in group:
            replica_state.assign_result(
              strategy,
              targets[index],
              lambda copy, *given: tf.where(*given, copy),
              (flag, values[index]),
            )
        else:
          place.update_if(strategy.experimental_local_results(flag)[0], assign_group)

    due = [stands if flag is None else stands & flag.deref() for flag in flags]
    values = [one.value for one in self._made]
    tf.distribute.get_replica_context().merge_call(assign_all, args=(due, values))
