"""One interface to the optimizers of Keras 3 and tf_keras, without their own gradient reduction.

The framework has already summed the gradients over replicas, clipped them and checked that they are
finite. The optimizer only makes its update; rule.py says what that is.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import tensorflow as tf

from loopwright.distribution import placement
from loopwright.errors import ConfigError
from loopwright.graphs.aliases import Gradient, Model, Variable
from loopwright.host import lazy_keras
from loopwright.host.lazy_keras import KerasOptimizer
from loopwright.models import models
from loopwright.models.replica_state import assign_result
from loopwright.optimizers import kernels, rule, schedule
from loopwright.optimizers.fusion import Fusion, Gradients
from loopwright.optimizers.saved_layout import SavedOptimizer

if TYPE_CHECKING:
  from loopwright.optimizers.ema import Ema

OptimizerFactory = Callable[[], KerasOptimizer]
Optimizers: TypeAlias = OptimizerFactory | Mapping[str, OptimizerFactory]
"""A factory of the only optimizer, or name -> factory."""
DEFAULT = "default"


def prefix(name: str) -> str:
  """Returns the prefix of this optimizer's metrics; "" for the default optimizer."""
  return "" if name == DEFAULT else f"{name}_"


class Optimizer:
  """A Keras 3 or tf_keras optimizer and the variables that it updates.

  Attributes:
    optimizer: of either Keras.
    variables: what it updates.
    fusion: which of them it updates as one.
    saved: what a checkpoint has of it.
    masks: whether `apply` can be told to leave everything as it is; see `kernels.masks`.
  """

  def __init__(
    self, *, rule: rule.Rule, fusion: Fusion, saved: SavedOptimizer, factory: OptimizerFactory,
    masks: bool = False,
  ) -> None:  # fmt: skip
    """Stores what `made` makes; `rule` updates the variables of `fusion`."""
    self.optimizer, self.variables = rule.optimizer, fusion.originals
    self.fusion, self.saved, self.masks = fusion, saved, masks
    self._rule, self._factory = rule, factory

  @property
  def schedule(self) -> schedule.Schedule | None:
    """What its learning rate follows, if that is not a number."""
    rate = self.optimizer._learning_rate
    return rate if isinstance(rate, schedule.Schedule) else None

  @property
  def averages(self) -> bool:
    """Whether its rule averages the weights itself; see `ema.ScheduleFree`."""
    return rule.is_free(self.optimizer)

  def learning_rate(self) -> tf.Tensor:
    """Returns the learning rate of the next update, a float32 scalar (any context)."""
    return self._rule.learning_rate()

  def restart(self) -> None:
    """Begins again at the present weights (host, in `strategy.scope()`).

    Some rules have copies of the weights in their state: those of the weights with which they were
    built. So the state becomes that of another optimizer, which is built now.
    """
    if is_elementwise(self.optimizer):
      return  # its slots are constants at first
    new = self._factory()
    rule.built(new, self.variables)
    for old, value in zip(self.optimizer.variables, new.variables, strict=True):
      models.raw(old).assign(models.raw(value).read_value())

  def settings(self) -> dict[str, str]:
    """Returns name -> value of what the update uses now, read from the optimizer (host).

    Options that are None or False are left out; of a schedule it has the rate of the next update.
    """
    read = {"learning_rate": float(self.learning_rate())}
    for name in inspect.signature(type(self.optimizer).__init__).parameters:
      value = getattr(self.optimizer, name, None)
      if name not in read and isinstance(value, bool | int | float) and value:
        read[name] = value
    own = rule.groups_of(self.optimizer)
    shown = {name: repr(value) for name, value in read.items()}
    return {**shown, "groups": repr(own)} if own else shown

  def moved_rate(self) -> str:
    """Returns a line if a rate that is a number is not the config's; else "" (host)."""
    given, rate = self.saved.configured, float(self.learning_rate())
    if math.isnan(given) or rate == given:
      return ""
    return (
      f"the learning rate of {type(self.optimizer).__name__} is {rate:g}, as the run has set it; "
      f"the config's {given:g} is where it began"
    )

  def apply(
    self,
    strategy: tf.distribute.Strategy,
    gradients: Gradients,
    finite: tf.Tensor | bool | None = None,
    *,
    jit_compile: bool = False,
  ) -> None:
    """Updates the variables; communicates only if the slots are sharded (cross-replica).

    Args:
      gradients: per-replica tensors, equal on every replica.
      finite: with `masks`: bool scalars, per replica; where they are False nothing changes.
      jit_compile: with `finite`: compile each replica's update with XLA.
    """
    in_place = finite is not None
    if not in_place:
      self.fusion.load(strategy)
    kept = self._untouched(strategy, gradients)

    def update(finite: tf.Tensor | None, *tensors: tf.Tensor) -> None:
      own = gradients.replaced(tensors)
      if finite is None:
        self._rule.apply(self.fusion.own(own.pieces))
        return
      masked = functools.partial(kernels.apply_masked, self.optimizer, own, finite)
      (tf.function(masked, jit_compile=True, autograph=False) if jit_compile else masked)()

    strategy.extended.call_for_each_replica(update, args=(finite, *gradients.tensors))
    for slot, *given in kept:
      assign_result(strategy, slot, lambda new, mask, old: tf.where(mask, new, old), tuple(given))
    if not in_place:
      self.fusion.store(strategy, gradients.missing)

  def _untouched(
    self, strategy: tf.distribute.Strategy, gradients: Gradients
  ) -> list[tuple[tf.Variable, Gradient, Variable]]:
    """Returns (slot, mask, value) of flat slots of which elements without gradient must stay."""
    if not any(gradients.missing):
      return []
    in_each_replica = strategy.extended.call_for_each_replica
    masks = in_each_replica(lambda: self.fusion.own(self.fusion.masks(gradients.missing)))
    kept = []
    for flat, mask in zip(self.fusion.flats, masks, strict=False):
      if mask is None:
        continue
      for slot in map(models.raw, self.optimizer.variables):
        if slot.shape == flat.shape and slot.dtype == flat.dtype:
          kept.append((slot, mask, in_each_replica(slot.read_value)))
    return kept


def made(
  optimizer: KerasOptimizer,
  variables: Sequence[Variable],
  *,
  step: tf.Variable,
  factory: OptimizerFactory,
  options: Sequence[rule.Options] = (),
  fuse: bool = False,
  shard: tf.distribute.Strategy | None = None,
) -> Optimizer:
  """Returns a built optimizer; call it in `strategy.scope()`.

  Args:
    optimizer: a new Keras 3 or tf_keras optimizer, not built.
    variables: what it updates; see `models.trainable_variables`.
    step: int64 scalar, the framework's step counter, which learning-rate schedules follow.
    factory: makes another such optimizer.
    options: of each variable, for an optimizer of `groups.grouped`.
    fuse: where the update rule allows it, use TensorFlow's fused kernels and fuse small
      variables; see loopwright/optimizers/kernels.py and loopwright/optimizers/fusion.py.
    shard: the strategy over whose replicas the slots are sharded, None for whole ones; see
      loopwright/optimizers/sharding.py.
  """
  schedule.bind(optimizer, step)
  fused = fuse and not options and is_elementwise(optimizer)
  if (make := placement.here().make_optimizer) is not None:
    return make(optimizer, variables, factory=factory, fused=fused)
  if shard:
    from loopwright.optimizers.sharding import ShardedFusion

    fusion: Fusion = ShardedFusion(variables, enabled=fused, strategy=shard)
  else:
    fusion = Fusion(variables, enabled=fused)
  one = rule.built(optimizer, fusion.variables)
  saved = SavedOptimizer(optimizer, one.learning_rate)
  fusion.save_whole(optimizer)
  one.update = _update_of(one, options, fuse=fuse)
  masks = fuse and not options and not shard and kernels.masks(
    optimizer, fusion.variables, originals=len(variables), on_gpus=placement.here().on_gpus
  )  # fmt: skip
  return Optimizer(rule=one, fusion=fusion, saved=saved, factory=factory, masks=masks)


def _update_of(
  one: rule.Rule, options: Sequence[rule.Options], *, fuse: bool
) -> rule.Update | None:
  """Returns how each variable is updated; None for Keras's update of all."""
  update: rule.Update | None = None
  users_own = rule.overridden(one.optimizer, "update_step", *rule.WHOLE)
  if rule.is_free(one.optimizer) and not users_own:
    from loopwright.optimizers import schedule_free

    update = schedule_free.update
  elif fuse and not options:
    update = kernels.update_of(one.optimizer, one.usual)
  if options:
    from loopwright.optimizers import groups

    return groups.update_of(one.decayed(update or one.usual), options)
  return one.decayed(update) if update else None


_ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Lion")


def is_elementwise(optimizer: KerasOptimizer) -> bool:
  """Whether an update treats every element alike, whatever its variable.

  True for known classes themselves, not for subclasses, and not with options that depend on whole
  variables.
  """
  packages = lazy_keras.kerases()
  known = [getattr(package.optimizers, n, None) for n in _ELEMENTWISE for package in packages]
  whole = getattr(optimizer, "clipnorm", None) or excludes_from_decay(optimizer)
  return type(optimizer) in known and not whole


def excludes_from_decay(optimizer: KerasOptimizer) -> bool:
  """Whether some variables have no weight decay, by Keras's `exclude_from_weight_decay`."""
  excluded = "_exclude_from_weight_decay"
  return any(getattr(optimizer, f"{excluded}{end}", None) for end in ("", "_names", "_pattern"))


def build(
  factories: Optimizers,
  variables_of: Callable[[str], Sequence[Variable]],
  step: tf.Variable,
  *,
  fuse: bool = False,
  shard: bool = False,
) -> dict[str, Optimizer]:
  """Makes every optimizer of a task; call it in `strategy.scope()`.

  Args:
    factories: one factory, or name -> factory.
    variables_of: name -> the variables of that optimizer.
    step, fuse: see `made`.
    shard: whether to shard the slots over the replicas of the scope's strategy.

  Returns:
    name -> optimizer; a single factory gets the name "default".

  Raises:
    ConfigError: not a factory, not an optimizer, an option that conflicts with the framework's, or
      an optimizer without variables.
  """
  named = factories if isinstance(factories, Mapping) else {DEFAULT: factories}
  if not named:
    raise ConfigError("the optimizers are {}; give at least one, such as @keras.Adam.")
  strategy = tf.distribute.get_strategy()
  over = strategy if shard and strategy.num_replicas_in_sync > 1 else None
  built = {}
  for name, factory in named.items():
    optimizer, variables = _usable(name, factory), variables_of(name)
    if not variables:
      raise ConfigError(
        f"optimizer {name!r} has no trainable variable to update; build the model's variables in "
        "build_model() (call it once, or give it an Input), or override Task.variables_of()."
      )
    _refuse_overwritten(name, variables)
    if over and not is_elementwise(optimizer):
      raise ConfigError(
        f"received Trainer.shard_optimizer_state=True, but optimizer {name!r}, a "
        f"{type(optimizer).__name__}, is not known to treat every element alike; use "
        f"{', '.join(_ELEMENTWISE)} without clipnorm and without_decay, or keep the state whole."
      )
    options: list[rule.Options] = []
    if excludes_from_decay(optimizer) or rule.groups_of(optimizer):
      from loopwright.optimizers import groups

      groups.require_matches(name, optimizer, variables)
      options = groups.matched(name, optimizer, variables)
    built[name] = made(
      optimizer, variables, step=step, factory=factory, options=options, fuse=fuse, shard=over
    )
  return built


def averages(
  model: Model,
  optimizers: Mapping[str, Optimizer],
  *,
  decay: schedule.EmaDecay,
  step: tf.Variable,
) -> Ema | None:
  """Returns the averages at which a model is evaluated, None for none; in `strategy.scope()`.

  See `Ema` for `decay` and `step`.

  Raises:
    ConfigError: `decay` is out of range, or an optimizer has an average of its own.
  """
  free = {name: each for name, each in optimizers.items() if each.averages}
  if not free:
    if decay is None:
      return None
    from loopwright.optimizers.ema import Ema

    return Ema(decay=decay, variables=models.trainable_variables(model), step=step)
  if decay is not None:
    name, first = next(iter(free.items()))
    raise ConfigError(
      f"received Trainer.ema_decay={decay}, but optimizer {name!r}, a "
      f"{type(first.optimizer).__name__}, averages the weights itself; remove one of them."
    )
  from loopwright.optimizers.ema import ScheduleFree

  return ScheduleFree(list(free.values()))


def _refuse_overwritten(name: str, variables: Sequence[Variable]) -> None:
  for variable in variables:
    if getattr(variable, "overwrite_with_gradient", False):
      raise ConfigError(
        f"optimizer {name!r}: variable {models.name(variable)!r} is one that Keras sets to its "
        "gradient (float8), but the framework divides gradients by the global weight; train in "
        "mixed_bfloat16 instead of quantize('float8')."
      )


def require_usable(name: str, optimizer: KerasOptimizer) -> None:
  """Checks that the framework can update with an optimizer as its class means it.

  Raises:
    ConfigError: not an optimizer, an option that conflicts with the framework's, or a method of
      its class that would not be called.
  """
  kind = rule.of(optimizer)
  if kind is None:
    raise ConfigError(
      f"optimizer {name!r} is a {type(optimizer).__name__}; it must be a Keras 3 optimizer or a "
      "tf_keras optimizer that is not legacy."
    )
  _refuse_conflicts(name, optimizer)
  rule.require_called(name, optimizer, kind)


def _usable(name: str, factory: OptimizerFactory) -> KerasOptimizer:
  """Returns what a factory makes; raises a ConfigError unless the framework can update with it."""
  if rule.of(factory) is not None or not callable(factory):
    raise ConfigError(
      f"optimizer {name!r} is {type(factory).__name__}, already built; pass a factory, such as "
      "lambda: keras.optimizers.Adam(1e-3), or in gin @keras.Adam without parentheses."
    )
  try:
    optimizer = factory()
  except ConfigError:
    raise
  except ValueError as error:  # how Keras refuses an argument
    reason = str(error).partition("\n")[0]
    raise ConfigError(f"optimizer {name!r} cannot be made: {reason}") from error
  require_usable(name, optimizer)
  return optimizer


_CONFLICTS = {
  "gradient_accumulation_steps": "Trainer.accumulation_steps",
  "loss_scale_factor": "Trainer.loss_scale",
  "use_ema": "Trainer.ema_decay",
  "global_clipnorm": "Trainer.clip_norm",
  "clipvalue": "Trainer.clip_value",
}


def _refuse_conflicts(name: str, optimizer: KerasOptimizer) -> None:
  if "LossScale" in type(optimizer).__name__:
    raise ConfigError(
      f"optimizer {name!r} is a {type(optimizer).__name__}, which checks only replica 0; "
      "use Trainer.loss_scale = @dynamic instead."
    )
  if type(optimizer).__name__ == "MultiOptimizer":
    raise ConfigError(
      f"optimizer {name!r} is a MultiOptimizer, whose optimizers sum gradients a second time over "
      "the replicas; use @grouped, or name -> optimizer and Task.variables_of()."
    )
  if type(optimizer).__name__ == "Muon" and placement.here().shares_variables:
    raise ConfigError(
      f"optimizer {name!r} is a Muon, whose weight decay cannot be applied to variables that "
      "replicas share (central storage); use @mirrored or another optimizer."
    )
  if isinstance(optimizer, lazy_keras.tf_keras_classes("optimizers.Nadam")):
    raise ConfigError(
      f"optimizer {name!r} is tf_keras's Nadam, which in a compiled step takes a step of its "
      "momentum's schedule once a variable, not once an update; use @keras.Nadam."
    )
  for option, ours in _CONFLICTS.items():
    if getattr(optimizer, option, None):
      raise ConfigError(
        f"optimizer {name!r} sets {option}={getattr(optimizer, option)}; the framework does this "
        f"itself, so that replicas agree: use {ours} instead."
      )
