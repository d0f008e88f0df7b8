"""The verbs of a training step, in the order in which a task calls them.

`Step.update` is one complete update. A task that needs another order, several optimizers or
several backward passes calls the verbs itself in `Task.train_step`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf
from absl import logging

from framework.cpu import convolutions
from framework.errors import ConfigError, unknown
from framework.graphs import randomness
from framework.graphs.autograph import converted, methods_as_written
from framework.inputs.datasets import Batch
from framework.metrics import (
  REPORTED,
  REPORTED_BY_UPDATES,
  Loss,
  Metric,
  MetricSums,
  PerExample,
  Sum,
  Weighted,
  checked,
)
from framework.models import batch_norm, models, recomputation, replica_state
from framework.observers import Observer
from framework.optimizers import adapters
from framework.optimizers.adapters import DEFAULT, Optimizer
from framework.optimizers.ema import Ema
from framework.optimizers.fusion import Fusion, Gradients
from framework.optimizers.loss_scale import LossScale
from framework.strategies import placement
from framework.strategies.reduction import Reduction

Gradient: TypeAlias = Any
"""A tensor, or None for a variable on which the loss does not depend."""
LossFn: TypeAlias = Callable[[Batch], Loss]
StepFactory: TypeAlias = "Callable[[StepParts], Step]"


def replica_id() -> tf.Tensor:
  """Returns this replica's index in its process or cluster, an int32 scalar (replica context)."""
  return tf.distribute.get_replica_context().replica_id_in_sync_group


_PART = 2**16
"""Elements whose squares a CPU sums in one thread, see `_half_square`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepParts:
  """What the verbs work with; the Trainer makes it once."""

  optimizers: Mapping[str, Optimizer]
  reduction: Reduction
  loss_scale: LossScale
  global_step: tf.Variable
  seed: int
  global_batch_size: int = 1
  clip_norm: float | None = None
  clip_value: float | None = None
  accumulation_steps: int = 1
  jit_compile: bool = False
  padded: bool = False  # whether training batches have rows without an example
  ema: Ema | None = None
  replica_id: Callable[[], tf.Tensor] = replica_id
  observers: tuple[Observer, ...] = ()

  @property
  def dtypes(self) -> list[tf.DType]:
    """The dtypes of all updated variables, sorted by name."""
    found = {models.raw(v).dtype for one in self.optimizers.values() for v in one.variables}
    return sorted(found, key=lambda dtype: dtype.name)


class Drawn(NamedTuple):
  """How many forward passes and seeds a step has had: its random numbers follow from them."""

  passes: int = 0
  seeds: int = 0


@methods_as_written
class EvalStep:
  """One evaluation step on one replica: collects the task's metrics (replica context)."""

  def __init__(
    self, reduction: Reduction | None = None, *, number: tf.Tensor | int | None = None
  ) -> None:
    """Starts with nothing logged.

    Args:
      reduction: what `all_gather` uses; None uses the default.
      number: see `number`; None is 0.
    """
    self._logged: dict[str, Metric] = {}
    self._reduction = reduction or Reduction()
    self._number = tf.cast(0 if number is None else number, tf.int64)

  @property
  def number(self) -> tf.Tensor:
    """The number of training steps before this one, an int64 scalar: 0 in the first step.

    In evaluation, the number of all training steps so far. Equal on all replicas; under parameter
    servers, the number when this worker began the step.
    """
    return self._number

  def run(self, task_step: Callable[[Any, Batch], None], batch: Batch) -> None:
    """Calls `Task.train_step` or `Task.eval_step` with the batch and its "step", int64 [n]."""
    rows = tf.shape(batch["weight"])[:1] if "weight" in batch else [1]
    converted(task_step)(self, {**batch, "step": tf.fill(rows, self.number)})

  def log(self, metrics: Mapping[str, Metric]) -> None:
    """Adds this replica's metrics: name -> (total, weight), float scalars, `Sum` or `PerExample`.

    Pairs and Sums logged under the same name add up; rows of PerExample follow one another.

    Raises:
      ConfigError: not a dict of such metrics.
    """
    self._add(checked(metrics))

  @contextlib.contextmanager
  def collected(self) -> Iterator[dict[str, Metric]]:
    """Yields what is logged inside `with`; it does not count, unless it is logged again."""
    outside, self._logged = self._logged, {}
    try:
      yield self._logged
    finally:
      self._logged = outside

  def _add(self, metrics: Mapping[str, Metric]) -> None:
    if recomputation.is_repeating():
      return
    for name, value in metrics.items():
      known = self._logged.get(name)
      self._logged[name] = value if known is None else _both(name, known, value)

  def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
    """Concatenates the rows of all replicas, in replica order; differentiable (replica context).

    Use it for a loss over the examples of all replicas. The gradient with respect to this replica's
    rows is summed over the losses of all replicas. Row i of this replica is row
    `replica_id() * n + i` of the result. Padded rows are included: gather the weights too. With
    accumulation, gathers one micro-batch. Under parameter servers each worker takes whole batches,
    and its rows are all there are.

    Args:
      tensor: any numeric dtype [n, ...], the same static shape on every replica.

    Returns:
      [replicas x n, ...], the same on every replica.

    Raises:
      ConfigError: the shape is not static; or with `Trainer.jit_compile` on several replicas.
    """
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.rank in (None, 0) or not tensor.shape.is_fully_defined():
      raise ConfigError(
        f"step.all_gather() got a tensor of shape {tensor.shape}; it must be [n, ...] with static "
        "sizes, the same on every replica, such as a batch feature."
      )
    return self._reduction.all_gather(tensor)

  def close(
    self, sums: MetricSums, own: Mapping[str, Weighted] | None = None
  ) -> dict[str, PerExample]:
    """Adds the logged metrics, and the framework's `own`, to `sums`; the framework calls it.

    Returns:
      The PerExample metrics of all replicas, in replica order, equal on each.
    """
    self._add(own or {})
    rows = {name: value for name, value in self._logged.items() if isinstance(value, PerExample)}
    sums.add({name: value for name, value in self._logged.items() if name not in rows})
    gather = self._reduction.all_gather
    return {name: PerExample(*map(gather, value.wide)) for name, value in rows.items()}


@methods_as_written
class Step(EvalStep):
  """One training step on one replica. All methods run in replica context.

  A subclass may replace a verb: give it to `Trainer(step=...)`.

  Attributes:
    parts: what the verbs work with.
    drawn: see `Drawn`; a pass that is repeated sets it back first.
  """

  def __init__(self, parts: StepParts) -> None:
    """Starts a step; the Trainer makes one per trace of the step."""
    super().__init__(parts.reduction, number=parts.global_step.read_value())
    self.parts = parts
    self._graph = _graph()
    self._assignments: list[_Assignment] = []
    self._conditional = False
    self.drawn = Drawn()
    self._finite: list[tf.Tensor] = []
    self._loss_finite: list[tf.Tensor] = []
    self._only_evaluated: set[str] = set()
    self._observers = [observer.of_replica() for observer in parts.observers]

  def log(self, metrics: Mapping[str, Metric]) -> None:
    """See `EvalStep.log`; leaves out PerExample metrics, which only evaluations collect.

    Raises:
      ConfigError: not a dict of metrics, or the framework reports the name.
    """
    prefixes = ["", *map(adapters.prefix, self.parts.optimizers)]
    reported = {f"{p}{n}" for p in prefixes for n in REPORTED_BY_UPDATES} | set(REPORTED)
    metrics = checked(metrics)
    for name in metrics:
      if name in reported:
        raise ConfigError(
          f"the training step logs {name!r}, which the framework reports itself; rename it, for "
          f"example {f'my_{name}'!r}."
        )
    rows = {name for name, value in metrics.items() if isinstance(value, PerExample)}
    self._only_evaluated |= rows
    self._add({name: value for name, value in metrics.items() if name not in rows})

  def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
    """See `EvalStep.all_gather`."""
    if self.parts.jit_compile and tf.distribute.get_strategy().num_replicas_in_sync > 1:
      raise ConfigError(
        "received Trainer.jit_compile=True, but step.all_gather() communicates inside the forward "
        "pass, which XLA compiles for a single replica; use jit_compile=False."
      )
    return super().all_gather(tensor)

  def update(
    self,
    loss_fn: LossFn,
    batch: Batch,
    optimizer: str = DEFAULT,
    *,
    when: tf.Tensor | bool | None = None,
  ) -> Loss:
    """Updates one optimizer's variables: calls every verb, in order.

    Args:
      loss_fn: (micro-)batch -> `Loss`, this replica's sums; called once per micro-batch.
      batch: this replica's part of the global batch.
      optimizer: the optimizer's name.
      when: whether this step makes the update, a bool scalar equal on every replica, such as
        `step.number % 2 == 0`; see `gradients`. None always makes it.

    Returns:
      The global sums, the same on every replica; zeros if the update is not made.

    Raises:
      ConfigError: called inside a branch or loop on a tensor.
    """
    self._require_outermost("step.update()")
    variables = self.variables(optimizer)
    gradients, local_loss = self.gradients(loss_fn, batch, variables, when=when)
    gradients, loss = self.all_reduce(gradients, local_loss)
    gradients = self.unscale(gradients, loss)
    finite, norm = self.check(gradients)
    gradients = self.clip(gradients, norm)
    self.apply(gradients, finite & (loss.weight > 0), optimizer)
    self.log_update(loss, finite, norm, optimizer)
    return loss

  def variables(self, optimizer: str = DEFAULT) -> list[Any]:
    """Returns the variables of an optimizer."""
    return self._optimizer(optimizer).variables

  def gradients(
    self,
    loss_fn: LossFn,
    batch: Batch,
    variables: Sequence[Any],
    *,
    when: tf.Tensor | bool | None = None,
  ) -> tuple[Gradients, Loss]:
    """Differentiates this replica's *scaled sum* of losses, over its micro-batches.

    Communicates nothing. Makes sparse gradients (IndexedSlices) dense: their norm and sum would
    be wrong where indices repeat.

    Args:
      loss_fn: micro-batch -> `Loss`.
      batch: this replica's examples.
      variables: what to differentiate with respect to.
      when: bool scalar, equal on every replica. If it is False, gradients, loss, weight and what
        `loss_fn` logs are zeros, and neither pass is run; a pass that communicates (`all_gather`,
        synchronised batch normalization) is run and discarded.

    Returns:
      One gradient per variable, None if the loss does not depend on it, and the unscaled local
      sums. With loss scaling, each gradient is multiplied by loss scale / global batch size.

    Raises:
      ConfigError: the loss is not a `Loss` of scalars, or depends on none of the variables.
    """
    fusion = self._fusion(variables)
    compute = functools.partial(self._accumulated, loss_fn, batch, fusion)
    gradients, loss = compute() if when is None else self._computed_when(when, compute, fusion)
    _require_some(gradients, variables)
    return gradients, loss

  def _accumulated(self, loss_fn: LossFn, batch: Batch, fusion: Fusion) -> tuple[Gradients, Loss]:
    first, *others = self._micro_batches(batch)
    gradients, loss = self.forward_backward(loss_fn, first, fusion)
    for part in others:
      # Run micro-batches one after another: this saves memory.
      with tf.control_dependencies(gradients.tensors):
        part = {name: tf.identity(value) for name, value in part.items()}
      more, more_loss = self.forward_backward(loss_fn, part, fusion)
      gradients = gradients.replaced(
        [a + b for a, b in zip(gradients.tensors, more.tensors, strict=True)]
      )
      loss = Loss(loss.total + more_loss.total, loss.weight + more_loss.weight)
    return gradients, loss

  def forward_backward(
    self, loss_fn: LossFn, batch: Batch, fusion: Fusion
  ) -> tuple[Gradients, Loss]:
    """Makes one forward and one backward pass, over one micro-batch; see `gradients`.

    Args:
      loss_fn: micro-batch -> `Loss`.
      batch: the micro-batch.
      fusion: the variables, and the layout of their gradients.

    Returns:
      The scaled gradients, which may all be None, and the unscaled sums.
    """
    key = self._key(self.drawn.passes)
    self.drawn = self.drawn._replace(passes=self.drawn.passes + 1)
    raw = [models.raw(v) for v in fusion.originals]
    missing: list[bool] = []

    def compute(batch: Batch) -> tuple[list[Gradient], Loss, dict[str, Metric]]:
      with self.collected() as logged:
        with randomness.random_streams(key), self._examples_of(batch), tf.GradientTape() as tape:
          loss = Loss.checked(converted(loss_fn)(batch))
          scaled = self._scaled(loss.total)
        gradients = [_dense(g) for g in tape.gradient(scaled, raw)]
      convolutions.input_first(gradients)
      missing[:] = [g is None for g in gradients]
      return fusion.pack(gradients), loss, logged

    xla = tf.function(compute, jit_compile=True, autograph=False)
    pieces, loss, logged = (xla if self.parts.jit_compile else compute)(batch)
    self.log(logged)
    return Gradients(fusion, pieces, missing), loss

  def all_reduce(self, gradients: Sequence[Gradient], loss: Loss) -> tuple[Gradients, Loss]:
    """Sums gradients and local loss over all replicas, in one communication.

    Raises:
      ConfigError: called inside a branch or loop on a tensor.
    """
    self._require_outermost("step.all_reduce()")
    packed = _packed(gradients)
    scalars = [loss.total, loss.weight]
    reduce = self.parts.reduction.all_reduce
    for observer in self._observers:
      reduce = functools.partial(observer.all_reduce, reduce)
    sums, scalars = reduce(packed.tensors, scalars)
    return packed.replaced(sums), Loss(*scalars)

  def unscale(self, gradients: Sequence[Gradient], loss: Loss) -> Gradients:
    """Divides summed gradients by their scale and by the *global* weight of `loss`.

    A global weight of 0 gives zero gradients; `update` then skips the step.
    """
    divisor = self._scaled(loss.weight)
    factor = tf.math.divide_no_nan(tf.ones_like(divisor), divisor)
    return _packed(gradients).map(lambda g: g * tf.cast(factor, g.dtype))

  def check(self, gradients: Sequence[Gradient]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (finite, norm) of reduced gradients, bool and float32 scalars, equal on all replicas.

    The norm is the global L2 norm. A norm above 1.8e19 counts as not finite: its square overflows.
    """
    squares = [tf.cast(_half_square(_wide(g)), tf.float32) for g in _packed(gradients).tensors]
    square = 2.0 * tf.add_n(squares)
    finite = tf.math.is_finite(square)
    for observer in self._observers:
      observer.checked(finite)
    return finite, tf.sqrt(square)

  def clip(self, gradients: Sequence[Gradient], norm: tf.Tensor) -> Gradients:
    """Clips reduced gradients by global norm or by value, as configured.

    Pascanu et al., "On the difficulty of training recurrent neural networks" (2013), section 3.2.
    """
    packed = _packed(gradients)
    if self.parts.clip_value is not None:
      bound = self.parts.clip_value
      return packed.map(lambda g: tf.clip_by_value(g, -bound, bound))
    if self.parts.clip_norm is not None:
      factor = self.parts.clip_norm / tf.maximum(norm, self.parts.clip_norm)
      return packed.map(lambda g: g * tf.cast(factor, g.dtype))
    return packed

  @contextlib.contextmanager
  def perturbed(self, variables: Sequence[Any], offsets: Sequence[Gradient]) -> Iterator[None]:
    """Adds offsets to variables inside `with`, then restores them bit for bit (replica context).

    Exact even for offsets that are not finite. For a backward pass at other weights, for example
    sharpness-aware minimisation (tasks/sam.py).

    Args:
      variables: for example `variables()`.
      offsets: one per variable, None to leave it unchanged; equal on every replica (compute them
        from reduced gradients), else the replicas diverge.

    Raises:
      ConfigError: under parameter servers, where other workers read the same variables.
    """
    placement.here().require("step.perturbed")
    moved = [models.raw(v) for v, o in zip(variables, offsets, strict=True) if o is not None]
    offsets = [o for o in offsets if o is not None]
    held = [variable.read_value() for variable in moved]
    _assign(moved, [w + tf.cast(o, w.dtype) for w, o in zip(held, offsets, strict=True)])
    try:
      yield
    finally:
      _assign(moved, held)

  def apply(
    self, gradients: Sequence[Gradient], finite: tf.Tensor, optimizer: str = DEFAULT
  ) -> None:
    """If `finite`, updates the optimizer's variables and their moving averages.

    Args:
      gradients: one per variable of the optimizer, reduced and unscaled.
      finite: bool scalar, equal on every replica.
      optimizer: the optimizer's name.

    Raises:
      ConfigError: called inside a branch or loop on a tensor.
    """
    self._require_outermost("step.apply()")
    target = self._optimizer(optimizer)
    packed = Gradients.of(target.fusion, gradients)
    for observer in self._observers:
      finite = observer.allowed(finite)
      observer.applies(target, packed)

    # Keras's update communicates, which a branch in replica context cannot; so branch in
    # cross-replica context and return to replica context inside the branch.
    def apply_if_finite(
      strategy: tf.distribute.Strategy, finite: Any, tensors: Sequence[Any]
    ) -> None:
      def update() -> None:
        target.apply(strategy, packed.replaced(tensors))
        if self.parts.ema is not None:
          self.parts.ema.update(strategy, target.variables)

      for observer in self._observers:
        observer.before_update(target)
      place = placement.of(strategy)
      if target.masks and self.parts.ema is None and not place.shares_variables:
        target.apply(strategy, packed.replaced(tensors), finite)
      else:
        place.update_if(strategy.experimental_local_results(finite)[0], update)

    context = tf.distribute.get_replica_context()
    context.merge_call(apply_if_finite, args=(finite, packed.tensors))

  def log_update(
    self, loss: Loss, finite: tf.Tensor, norm: tf.Tensor, optimizer: str = DEFAULT
  ) -> None:
    """Logs the loss and gradient norm of an update, and records whether they are finite.

    If any update of the step is not finite, the loss scale decreases after the step. The norm of
    an update that is not finite, or without weight, does not count.
    """
    prefix = adapters.prefix(optimizer)
    shown = tf.cast(finite & (loss.weight > 0), tf.float32)
    self._add(
      {
        f"{prefix}loss": (loss.total, loss.weight),
        f"{prefix}gradient_norm": (tf.math.multiply_no_nan(norm, shown), shown),
      }
    )
    self._finite.append(finite)
    self._loss_finite.append(tf.math.is_finite(loss.total))

  def assign(self, variable: Any, value: Any, *, when: tf.Tensor | bool | None = None) -> None:
    """Sets a variable at the end of the step, if all updates of the step are finite.

    For state that the step keeps beside the optimizers: target networks, queues, moving averages.
    It is saved and restored with the model. All assignments of a step take effect together, after
    its updates; until then the variable has its old value.

    Args:
      variable: a variable of the model, trainable or not.
      value: of the variable's shape, cast to its dtype; equal on every replica: computed from
        variables, reduced gradients or `all_gather`, not from this replica's rows alone.
      when: whether this step assigns, a bool scalar equal on every replica. None always assigns.

    Raises:
      ConfigError: another shape, a second assignment in one step, a variable that is not part of
        the model, or inside a branch or loop on a tensor.
    """
    self._require_outermost("step.assign()")
    target, name = models.raw(variable), models.name(variable)
    value = tf.convert_to_tensor(value)
    if not target.shape.is_compatible_with(value.shape):
      raise ConfigError(
        f"step.assign() got a value of shape {value.shape} for {name!r} of shape {target.shape}; "
        "they must be the same."
      )
    if any(one.variable is target for one in self._assignments):
      raise ConfigError(
        f"step.assign() got {name!r} twice in a step, and it takes effect only at the end; combine "
        "both values and assign once."
      )
    due = _condition(True if when is None else when)
    self._assignments.append(_Assignment(target, tf.cast(value, target.dtype), due, name))

  @property
  def assigned(self) -> dict[str, tf.Variable]:
    """The variables that `assign` sets in this step, by name."""
    return {one.name: one.variable for one in self._assignments}

  def commit(self, stands: tf.Tensor) -> None:
    """Makes the step's assignments if `stands`, a bool scalar; the framework calls it."""
    if not self._assignments:
      return
    targets = [one.variable for one in self._assignments]
    flags: dict[Any, list[int]] = {}
    for index, one in enumerate(self._assignments):
      flags.setdefault(one.when.ref(), []).append(index)

    def assign_all(strategy: tf.distribute.Strategy, due: Any, values: Sequence[Any]) -> None:
      place = placement.of(strategy)
      for flag, group in zip(due, flags.values(), strict=True):

        def assign_group(group: list[int] = group) -> None:
          for index in group:
            replica_state.assign(strategy, targets[index], values[index])

        place.update_if(strategy.experimental_local_results(flag)[0], assign_group)

    due = [stands & flag.deref() for flag in flags]
    values = [one.value for one in self._assignments]
    tf.distribute.get_replica_context().merge_call(assign_all, args=(due, values))

  @property
  def is_conditional(self) -> bool:
    """Whether an update of this step has a `when`."""
    return self._conditional

  def seed(self) -> tf.Tensor:
    """Returns a seed for `tf.random.stateless_*`, int32 [2].

    It depends only on the run's seed, the step, the replica and how many calls came before.
    """
    if (stream := recomputation.stream()) is not None:
      return stream.next_seed()
    self.drawn = self.drawn._replace(seeds=self.drawn.seeds + 1)
    return self._key(-self.drawn.seeds)

  def outcome(self) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (gradients finite, losses finite), bool scalars over all updates of this step.

    Raises:
      ConfigError: the task logged no update.
    """
    if not self._finite:
      raise ConfigError(
        "train_step() made no update; call step.update(), or step.log_update() after step.apply()."
      )
    return _all(self._finite), _all(self._loss_finite)

  def close(
    self, sums: MetricSums, own: Mapping[str, Weighted] | None = None
  ) -> dict[str, PerExample]:
    """See `EvalStep.close`; also adds the observers' metrics."""
    for observer in self._observers:
      self._add(observer.metrics())
    sums.only_evaluated |= self._only_evaluated
    return super().close(sums, own)

  def _optimizer(self, name: str) -> Optimizer:
    if name not in self.parts.optimizers:
      raise unknown("optimizer", name, self.parts.optimizers)
    return self.parts.optimizers[name]

  def _scaled(self, total: tf.Tensor) -> tf.Tensor:
    return self.parts.loss_scale.scaled(total, self.parts.global_batch_size)

  def _key(self, index: int) -> tf.Tensor:
    parts = self.parts
    return randomness.step_key(parts.seed, parts.global_step, parts.replica_id(), index)

  def _micro_batches(self, batch: Batch) -> list[Batch]:
    count = self.parts.accumulation_steps
    if count == 1:
      return [batch]
    parts = {name: placement.here().split_rows(value, count) for name, value in batch.items()}
    return [{name: parts[name][index] for name in batch} for index in range(count)]

  def _examples_of(self, batch: Batch) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which statistics over the batch leave out padded rows."""
    parts, replicas = self.parts, tf.distribute.get_strategy().num_replicas_in_sync
    if not parts.padded:
      return contextlib.nullcontext()
    why = f"global_batch_size is {parts.global_batch_size} for {replicas} replicas"
    if parts.accumulation_steps > 1:
      why += f" x {parts.accumulation_steps} accumulation_steps"
    return batch_norm.only_examples(batch, why=why)

  def _fusion(self, variables: Sequence[Any]) -> Fusion:
    """Returns the layout of the optimizer that owns these variables, else one without fusion."""
    wanted = [id(models.raw(v)) for v in variables]
    for optimizer in self.parts.optimizers.values():
      if wanted == [id(models.raw(v)) for v in optimizer.variables]:
        return optimizer.fusion
    return Fusion(variables, enabled=False)

  def _require_outermost(self, verb: str) -> None:
    """Raises ConfigError in a graph other than the step's: replicas cannot communicate there."""
    if _graph() is not self._graph:
      raise ConfigError(
        f"{verb} is called inside a branch or loop on a tensor (if, while, for, tf.cond) or a "
        "tf.function of its own, where the replicas cannot communicate; call it in the step itself "
        "and give the condition as when=, such as step.update(..., when=step.number % 2 == 0), and "
        "loop over a Python range."
      )

  def _computed_when(
    self, when: tf.Tensor | bool, compute: Callable[[], tuple[Gradients, Loss]], fusion: Fusion
  ) -> tuple[Gradients, Loss]:
    """Returns `compute()` if `when`, else zeros of the same shapes; logs likewise."""
    self._conditional = True
    when = _condition(when)
    if tf.executing_eagerly():
      return compute() if when else _nothing(fusion)
    begun = self.drawn
    made: list[Any] = []

    def flat() -> list[tf.Tensor]:
      self.drawn = begun
      with self.collected() as logged:
        gradients, loss = compute()
      made[:] = [gradients, (list(gradients.tensors), loss, logged)]
      return [tf.convert_to_tensor(t) for t in tf.nest.flatten(made[1])]

    def zeros() -> list[tf.Tensor]:
      parts = tf.nest.flatten(made[1])
      return [tf.zeros(t.shape, t.dtype) for t in map(tf.convert_to_tensor, parts)]

    values = _in_branch(when, flat, zeros)
    if values is None:
      values = [tf.where(when, t, tf.zeros_like(t)) for t in flat()]
    tensors, loss, logged = tf.nest.pack_sequence_as(made[1], values)
    self._add(logged)
    return made[0].replaced(tensors), loss


class _Assignment(NamedTuple):
  variable: tf.Variable
  value: tf.Tensor
  when: tf.Tensor
  name: str


def _nothing(fusion: Fusion) -> tuple[Gradients, Loss]:
  """Returns zero gradients and an empty loss."""
  pieces = [tf.zeros(*piece) for piece in fusion.pieces]
  missing = [False] * len(fusion.originals)
  return Gradients(fusion, pieces, missing), Loss(tf.constant(0.0), tf.constant(0.0))


def _condition(when: tf.Tensor | bool) -> tf.Tensor:
  """Returns `when` as a tensor.

  Raises:
    ConfigError: it is not a bool scalar.
  """
  when = tf.convert_to_tensor(when)
  if when.dtype != tf.bool or when.shape.rank not in (0, None):
    raise ConfigError(
      f"when= is {when.dtype.name} of shape {when.shape}; it must be one bool for the whole step, "
      "such as step.number % 2 == 0."
    )
  return when


def _graph() -> Any:
  """Returns the graph under trace, or None in eager mode."""
  return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _in_branch(
  when: tf.Tensor, true: Callable[[], list[tf.Tensor]], false: Callable[[], list[tf.Tensor]]
) -> list[tf.Tensor] | None:
  """Returns `tf.cond(when, true, false)`, or None if `true` communicates (replica context)."""
  try:
    return tf.nest.flatten(tf.cond(when, true, false))
  except RuntimeError as error:
    if "merge_call" not in str(error):
      raise
    return None


def _both(name: str, one: Metric, other: Metric) -> Metric:
  """Returns one metric of two that a step logs under one name."""
  kinds = (PerExample, Sum, tuple)
  both = {next(kind for kind in kinds if isinstance(value, kind)) for value in (one, other)}
  if both == {PerExample}:
    return PerExample(*(tf.concat(parts, axis=0) for parts in zip(one, other, strict=True)))
  if both == {Sum} and one[0].shape == other[0].shape:
    return Sum(one[0] + other[0])
  if both == {tuple} and len(one) == len(other) == 2:
    return one[0] + other[0], one[1] + other[1]
  raise ConfigError(
    f"the step logs {name!r} twice, as {_what(one)} and as {_what(other)}; give them two names."
  )


def _what(metric: Metric) -> str:
  """Returns what an error calls a metric."""
  if isinstance(metric, (Sum, PerExample)):
    return f"a {type(metric).__name__} of shape {metric[0].shape}"
  return "a pair (total, weight)"


def _assign(variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
  """Assigns each replica's value to its copy of each variable (replica context)."""

  def assign_all(strategy: tf.distribute.Strategy, values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
      replica_state.assign(strategy, variable, value)

  tf.distribute.get_replica_context().merge_call(assign_all, args=(values,))


def _all(flags: Sequence[tf.Tensor]) -> tf.Tensor:
  return functools.reduce(tf.logical_and, flags)


def _packed(gradients: Sequence[Gradient]) -> Gradients:
  """Returns gradients as `Gradients`; does not fuse a plain list."""
  if isinstance(gradients, Gradients):
    return gradients
  return Gradients(None, gradients, [g is None for g in gradients])


def _wide(gradient: tf.Tensor) -> tf.Tensor:
  """Casts to float32 or wider: float16 squares overflow above 65504, bfloat16 sums lose digits."""
  return tf.cast(gradient, tf.float32) if gradient.dtype.size < 4 else gradient


def _half_square(tensor: tf.Tensor) -> tf.Tensor:
  """Returns half the sum of squares, of a tensor of middle size in parts.

  From some 90,000 elements on, TensorFlow sums in several threads on a CPU: 26 us for 100,000, of
  which most is waiting for the threads (60 within a step), where two parts take 9 us.
  """
  size = tensor.shape.num_elements()
  cuts = placement.here().cuts_tensors
  if not cuts or size is None or not _PART < size <= 4 * _PART:
    return tf.nn.l2_loss(tensor)
  sizes = [min(_PART, size - start) for start in range(0, size, _PART)]
  return tf.add_n([tf.nn.l2_loss(part) for part in tf.split(tf.reshape(tensor, [-1]), sizes)])


def _dense(gradient: Any) -> Gradient:
  return None if gradient is None else tf.convert_to_tensor(gradient)


def _require_some(gradients: Gradients, variables: Sequence[Any]) -> None:
  names = [models.name(v) for m, v in zip(gradients.missing, variables, strict=True) if m]
  if len(names) == len(variables):
    raise ConfigError(
      f"the loss depends on none of {len(variables)} trainable variables ({', '.join(names[:3])}, "
      "...); compute it from the outputs of forward(), with TensorFlow or Keras operations only."
    )
  if names:
    logging.log_first_n(logging.WARNING, "no gradient reaches %s", 1, ", ".join(names))
