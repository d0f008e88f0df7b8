"""What follows the reduction of a step, as one program of XLA on each replica."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from loopwright.distribution import placement
from loopwright.graphs import xla
from loopwright.metrics import Checked, Loss
from loopwright.observers import StepObserver
from loopwright.optimizers import updates
from loopwright.optimizers.adapters import Optimizer
from loopwright.optimizers.fusion import Gradients

if TYPE_CHECKING:
  from loopwright.step import Step

_VERBS = ("unscale", "check", "clip", "apply", "log_update")
"""Of `Step.update` after the reduction."""
_HEARD = ("checked", "allowed", "applies", "before_update")
"""By observers, in the meantime."""
_CUTS = ("Split", "SplitV", "Reshape", "Identity")


def as_one_program(
  step: Step,
  rest: Callable[[Gradients, Loss], None],
  gradients: Gradients,
  loss: Loss,
  optimizer: Optimizer,
) -> Loss:
  """Calls what follows the reduction, as one program if it can be; returns the loss (replica).

  Each verb is a part of its own where the update has a branch, or where a subclass of `Step` or an
  observer has a say.
  """
  parts = step.parts
  in_place = updates.in_place(optimizer, parts.ema, placement.here())
  whole = gradients.fusion is optimizer.fusion and not any(gradients.missing)
  watched = any(
    getattr(type(each), name) is not getattr(StepObserver, name)
    for each in step.observers
    for name in _HEARD
  )
  if step.replaces(_VERBS) or watched or not (in_place and whole):
    rest(gradients, loss)
    return loss

  def program() -> tuple[Loss, dict[str, Checked], tuple[tf.Tensor, tf.Tensor]]:
    *pieces, total, weight = _taken_in([*gradients.tensors, loss.total, loss.weight])
    with step.record.collected() as logged:
      rest(gradients.replaced(pieces), found := Loss(total, weight))
    return found, logged, step.record.updates.pop()

  step.parts, step.traced.in_program = dataclasses.replace(parts, jit_compile=False), True
  loss, logged, outcome = xla.program(program)()
  step.parts, step.traced.in_program = parts, False
  step.record.add(logged)
  step.record.updates.append(outcome)
  return loss


def _taken_in(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
  """Returns tensors from around the function that is traced, cut anew from what they are cut from.

  So they are no copies that are made before the program begins.
  """
  made: dict[str, tf.Operation] = {}

  def inside(tensor: tf.Tensor) -> tf.Tensor:
    if (value := tf.get_static_value(tensor)) is not None:
      return tf.constant(value)
    if (of := tensor.op).type not in _CUTS:
      return tensor
    if of.name not in made:
      made[of.name] = tf.compat.v1.get_default_graph().create_op(
        of.type, [*map(inside, of.inputs)], [each.dtype for each in of.outputs],
        attrs=dict(of.node_def.attr), op_def=of.op_def,
      )  # fmt: skip
    return made[of.name].outputs[tensor.value_index]

  return [*map(inside, tensors)]
