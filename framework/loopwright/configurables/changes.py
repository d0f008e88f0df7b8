"""May an option change when a run goes on? Asked by its name.

    rule("Trainer.clip_norm")     asked: with --accept_changes, and what happens then
    rule("tiny/dynamic.initial")  no: a scope does not matter
    rule("MyTask.units")          None: asked, and what restores the checkpoint decides

The rule stands where the option is declared, see `loopwright.options.declaration`; here only those
of Keras and TensorFlow. docs/changing-a-run.md has all; tests/unit/changes tries each.
"""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from loopwright.configurables import table
from loopwright.configurables.values import wanted
from loopwright.options.declaration import (
  COMPUTES_THERE,
  COUNTS,
  SCHEDULE,
  Rule,
  asked,
  fixed,
  rule_of,
)

_KERAS = ("keras.", "tf_keras.")
_OURS = fixed("it has no effect here: `Trainer` clips, averages, scales and accumulates itself")
_FIT = asked("counts from there on; from 0 or False and back it does not fit a checkpoint")
_NO_EFFECT = fixed("it has no effect here")

_OF_OPTIMIZERS: Mapping[str, Rule] = {
  "learning_rate": asked(
    "counts from there on: a number for a schedule and back, too. A rate that an action has set "
    "stays if the config's rate stays"
  ),
  "momentum": _FIT, "amsgrad": _FIT, "centered": _FIT,
  "exclude_layers": _FIT, "exclude_embeddings": _FIT,
  "jit_compile": _NO_EFFECT, "name": _NO_EFFECT,
  "relative_step": fixed("it has no effect in Keras's rule, which takes the smaller rate"),
  "initial_accumulator_value": fixed("it is the first value; the checkpoint has the sums"),
  "clipvalue": _OURS, "global_clipnorm": _OURS,
  "use_ema": _OURS, "ema_momentum": _OURS, "ema_overwrite_frequency": _OURS,
  "loss_scale_factor": _OURS, "gradient_accumulation_steps": _OURS,
}  # fmt: skip
"""Parameter of an optimizer of either Keras -> its rule; of others it is `COUNTS`."""


def rule(name: str) -> Rule | None:
  """Returns the rule of an option of the config; None if nothing declares one."""
  owner, _, parameter = name.rpartition("/")[2].rpartition(".")
  if owner.startswith(_KERAS):
    return SCHEDULE if ".schedules." in owner else _OF_OPTIMIZERS.get(parameter, COUNTS)
  if (target := _target(owner)) is None:
    return None
  made = [each for each, _ in wanted(table.result(owner))]
  is_strategy = any(issubclass(each, tf.distribute.Strategy) for each in made)
  return rule_of(target, parameter) or (COMPUTES_THERE if is_strategy else None)


def _target(owner: str) -> Any:
  """Returns the class or function of that name; None if there is none, or more than one."""
  found = table.matching(owner) if owner else ()
  return table.entry(owner).wrapped if len(found) == 1 else None
