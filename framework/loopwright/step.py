"""The verbs of a training step, in the order in which a task calls them.

`Step.update` is one complete update. A task that needs another order, several optimizers or
several backward passes calls the verbs itself in `Task.train_step`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

import tensorflow as tf

from loopwright.engine.eval_step import EvalStep
from loopwright.engine.step_parts import Draws, Scaling, StepParts, Trace, as_one
from loopwright.engine.step_parts import replica_id as replica_id
from loopwright.errors import ConfigError, unknown
from loopwright.graphs import branches
from loopwright.graphs.aliases import Batch, Gradient, PerReplica, TensorLike, Variable
from loopwright.graphs.autograph import converted, methods_as_written
from loopwright.metrics import (
  REPORTED,
  REPORTED_BY_UPDATES,
  Checked,
  Loss,
  Metric,
  PerExample,
  checked,
  require_free,
)
from loopwright.optimizers import updates
from loopwright.optimizers.adapters import DEFAULT, Optimizer, prefix
from loopwright.optimizers.fusion import Fusion, Gradients

T = TypeVar("T")
LossFn: TypeAlias = Callable[[Batch], Loss]
StepFactory: TypeAlias = "Callable[[StepParts], Step]"


@methods_as_written
class Step(EvalStep):
  """One training step on one replica. All methods run in replica context.

  A subclass may replace a verb: give it to `Trainer(step=...)`.

  Attributes:
    parts: what the verbs work with.
    draws: its random numbers.
    scaling: its loss scale.
    traced: where it is traced.
    observers: those of this replica.
  """

  def __init__(self, parts: StepParts) -> None:
    """Starts a step; the Trainer makes one per trace of the step."""
    super().__init__(parts.reduction, number=parts.step_number())
    self.parts = parts
    self.traced = Trace()
    self.draws = Draws(parts.key)
    self.scaling = Scaling(parts.loss_scale, parts.global_batch_size)
    self.observers = [observer.of_replica() for observer in parts.observers]
    self.record.closing = [observer.metrics for observer in self.observers]

  def surroundings(self, batch: Batch) -> contextlib.AbstractContextManager[None]:
    """Statistics leave out padded rows in forward passes outside of `gradients` too."""
    return self.parts.examples_of(batch)

  def replaces(self, verbs: Sequence[str]) -> bool:
    """Whether a subclass has one of these verbs of its own."""
    return any(getattr(type(self), name) is not getattr(Step, name) for name in verbs)

  def log(self, metrics: Mapping[str, Metric]) -> None:
    """Adds this replica's metrics of the step, as `EvalStep.log` does (replica context).

        step.log({"accuracy": lw.weighted_sum(hits, batch["weight"])})

    PerExample metrics are left out: only evaluations collect them.

    Args:
      metrics: name -> (total, weight), float scalars of this replica, `Sum` or `PerExample`.

    Raises:
      ConfigError: not a dict of metrics, or the framework reports the name.
    """
    prefixes = ["", *map(prefix, self.parts.optimizers)]
    reported = {f"{p}{n}" for p in prefixes for n in REPORTED_BY_UPDATES} | set(REPORTED)
    metrics = checked(metrics)
    require_free(metrics, reported, who="the training step logs")
    rows = {name for name, value in metrics.items() if isinstance(value, PerExample)}
    self.record.only_evaluated |= rows
    self.record.add({name: value for name, value in metrics.items() if name not in rows})

  def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
    """Concatenates the rows of all replicas, as `EvalStep.all_gather` does (replica context).

        everyone = step.all_gather(embeddings)  # [n, d] -> [replicas x n, d]

    Raises:
      ConfigError: the shape is not static, or XLA compiles the pass on several replicas.
    """
    if self.parts.jit_compile is True and tf.distribute.get_strategy().num_replicas_in_sync > 1:
      raise ConfigError(
        "received Trainer.jit_compile=True, but step.all_gather() communicates inside the forward "
        "pass, which XLA compiles for a single replica; use jit_compile=False."
      )
    if self.parts.jit_compile:
      tensor = self.traced.gathers(tensor)
    return super().all_gather(tensor)

  def update(
    self,
    loss_fn: LossFn,
    batch: Batch,
    optimizer: str = DEFAULT,
    *,
    when: tf.Tensor | bool | None = None,
  ) -> Loss:
    """Updates one optimizer's variables: calls every verb, in order (replica context).

        step.update(lambda part: self.training_loss(step, part), batch)

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
    self.traced.require_outermost("step.update()")
    variables = self.variables(optimizer)
    gradients, local_loss = self.gradients(loss_fn, batch, variables, when=when)
    gradients, loss = self.all_reduce(gradients, local_loss)

    def rest(gradients: Gradients, loss: Loss) -> None:
      gradients = self.unscale(gradients, loss)
      finite, norm = self.check(gradients)
      gradients = self.clip(gradients, norm)
      self.apply(gradients, finite & (loss.weight > 0), optimizer)
      self.log_update(loss, finite, norm, optimizer)

    return as_one(self, rest, gradients, loss, self._optimizer(optimizer))

  def variables(self, optimizer: str = DEFAULT) -> list[Variable]:
    """Returns the variables of an optimizer, in its order (any context).

    Raises:
      ConfigError: no optimizer has this name.
    """
    return self._optimizer(optimizer).variables

  def gradients(
    self,
    loss_fn: LossFn,
    batch: Batch,
    variables: Sequence[Variable],
    *,
    when: tf.Tensor | bool | None = None,
  ) -> tuple[Gradients, Loss]:
    """Differentiates this replica's *scaled sum* of losses, over its micro-batches.

        gradients, loss = step.gradients(loss_fn, batch, step.variables())

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
    fusion = self.parts.fusion_of(variables)
    compute = functools.partial(self._accumulated, loss_fn, batch, fusion)
    gradients, loss = compute() if when is None else self._computed_when(when, compute, fusion)
    gradients.require_some(variables)
    return gradients, loss

  def _accumulated(self, loss_fn: LossFn, batch: Batch, fusion: Fusion) -> tuple[Gradients, Loss]:
    first, *others = self.parts.micro_batches(batch)
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
    key = self.draws.next_pass()
    missing: list[bool] = []

    def checked_loss(batch: Batch) -> Loss:
      return Loss.checked(converted(loss_fn)(batch))

    forward: LossFn = checked_loss
    for observer in self.observers:
      forward = observer.forward(forward, self.record.add)

    def compute(batch: Batch) -> tuple[list[Gradient], Loss, dict[str, Checked]]:
      with self.record.collected() as logged:
        with self.parts.forward_pass(key, batch), tf.GradientTape() as tape:
          loss = forward(batch)
        gradients = self._differentiated(tape, loss.total, fusion)
      missing[:] = [g is None for g in gradients]
      return fusion.pack(gradients), loss, logged

    pieces, loss, logged = self._compiled_pass(functools.partial(compute, batch))
    self.log(logged)
    return Gradients(fusion, pieces, missing), loss

  @contextlib.contextmanager
  def tape(self, batch: Batch | None = None) -> Iterator[tf.GradientTape]:
    """Records a forward pass of which several losses are differentiated (replica context)::

        with step.tape() as tape:
          outputs = self.model(batch["x"], training=True)
          loss = lw.Loss.from_examples(self.errors(outputs, batch), batch["weight"])
        gradients = step.gradients_of(tape, loss, step.variables())

    Inside `with`, the forward pass is that of `gradients`: random layers draw from the step's
    numbers, and statistics leave out padded rows. Each block draws other numbers.

    Args:
      batch: what is padded as the pass is, such as a part of the step's batch; None: that batch.

    Yields:
      A persistent tape. Losses are computed inside `with`.

    Raises:
      ConfigError: with `Trainer.accumulation_steps` or `Trainer.jit_compile`.
    """
    self._require_one_pass("step.tape()")
    batch = self.record.batch if batch is None else batch
    key = self.draws.next_pass()
    with self.parts.forward_pass(key, batch), tf.GradientTape(persistent=True) as tape:
      yield tape

  def gradients_of(
    self, tape: tf.GradientTape, loss: Loss, variables: Sequence[Variable]
  ) -> Gradients:
    """Differentiates this replica's *scaled sum* of a loss that a tape recorded; see `gradients`.

        gradients = step.gradients_of(tape, loss, step.variables("generator"))

    Communicates nothing. Call it once for each loss, and before the first `apply`.

    Args:
      tape: of `tape()`, or one of your own, under which random layers draw from Keras's numbers,
        the same on each replica.
      loss: this replica's sums, computed while the tape recorded.
      variables: what to differentiate with respect to.

    Raises:
      ConfigError: as for `gradients` and `tape`.
    """
    self._require_one_pass("step.gradients_of()")
    fusion = self.parts.fusion_of(variables)
    found = self._differentiated(tape, Loss.checked(loss).total, fusion)
    gradients = Gradients(fusion, fusion.pack(found), [g is None for g in found])
    gradients.require_some(variables)
    return gradients

  def all_reduce(self, gradients: Sequence[Gradient], loss: Loss) -> tuple[Gradients, Loss]:
    """Sums gradients and local loss over all replicas, in one communication (replica context).

        gradients, loss = step.all_reduce(gradients, loss)

    Args:
      gradients: this replica's scaled sums, of the variables' shapes; None where there is none.
      loss: this replica's sums.

    Returns:
      The same of all replicas together, equal on each.

    Raises:
      ConfigError: called inside a branch or loop on a tensor.
    """
    self.traced.require_outermost("step.all_reduce()")
    packed = Gradients.as_given(gradients)
    scalars = [loss.total, loss.weight]
    reduce = self.parts.reduction.all_reduce
    for observer in self.observers:
      reduce = functools.partial(observer.all_reduce, reduce)
    sums, scalars = reduce(packed.tensors, scalars)
    return packed.replaced(sums), Loss(*scalars)

  def unscale(self, gradients: Sequence[Gradient], loss: Loss) -> Gradients:
    """Divides summed gradients by their scale and by the *global* weight of `loss`.

        gradients = step.unscale(gradients, loss)

    Args:
      gradients: what `all_reduce` returns.
      loss: likewise, the sums of all replicas.

    Returns:
      The gradients of the mean loss, in their dtypes. A global weight of 0 gives zeros; `update`
      then skips the step.

    Raises:
      ConfigError: with a loss scale, gradients that neither `gradients` nor `gradients_of` made.
    """
    packed = Gradients.as_given(gradients)
    self.scaling.require(packed.tensors)

    def unscaled() -> list[tf.Tensor]:
      factor = self.scaling.cast(loss.weight.dtype)
      divisor = loss.weight if factor is None else loss.weight * factor
      factor = tf.math.divide_no_nan(tf.ones_like(divisor), divisor)
      return [g * tf.cast(factor, g.dtype) for g in packed.tensors]

    return packed.replaced(self.parts.compiled(unscaled)())

  def check(self, gradients: Sequence[Gradient]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (finite, norm) of reduced gradients, bool and float32 scalars, equal on all replicas.

        finite, norm = step.check(gradients)

    The norm is the global L2 norm. A norm above 1.8e19 counts as not finite: its square overflows.
    """
    square = self.parts.compiled(Gradients.as_given(gradients).square)()
    finite, norm = tf.math.is_finite(square), tf.sqrt(square)
    for observer in self.observers:
      observer.checked(finite, norm)
    return finite, norm

  def clip(self, gradients: Sequence[Gradient], norm: tf.Tensor) -> Gradients:
    """Clips reduced gradients by global norm or by value, as configured.

        gradients = step.clip(gradients, norm)

    Pascanu et al., "On the difficulty of training recurrent neural networks" (2013), section 3.2.
    """
    packed = Gradients.as_given(gradients)
    if self.parts.clip_value is not None:
      bound = self.parts.clip_value
      return packed.map(lambda g: tf.clip_by_value(g, -bound, bound))
    if self.parts.clip_norm is not None:
      factor = self.parts.clip_norm / tf.maximum(norm, self.parts.clip_norm)
      return packed.map(lambda g: g * tf.cast(factor, g.dtype))
    return packed

  @contextlib.contextmanager
  def perturbed(self, variables: Sequence[Variable], offsets: Sequence[Gradient]) -> Iterator[None]:
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
    with updates.moved(variables, offsets):
      yield

  def apply(
    self, gradients: Sequence[Gradient], finite: tf.Tensor, optimizer: str = DEFAULT
  ) -> None:
    """If `finite`, updates the optimizer's variables and their moving averages.

        step.apply(gradients, finite & (loss.weight > 0))

    Args:
      gradients: one per variable of the optimizer, reduced and unscaled.
      finite: bool scalar, equal on every replica.
      optimizer: the optimizer's name.

    Raises:
      ConfigError: a gradient of another shape than its variable, or called inside a branch or loop
        on a tensor.
    """
    target = self._optimizer(optimizer)
    packed = Gradients.of(target.fusion, gradients)
    self.record.gets(target.variables, packed.missing, self.parts.frozen)
    if self.traced.in_program:
      updates.apply_here(target, packed, finite)
      return
    self.traced.require_outermost("step.apply()")
    for observer in self.observers:
      finite = observer.allowed(finite)
      observer.applies(target, packed)

    def apply_if_finite(
      strategy: tf.distribute.Strategy, finite: PerReplica, tensors: Sequence[PerReplica]
    ) -> None:
      for observer in self.observers:
        observer.before_update(target)
      updates.apply_if(
        strategy, finite, target, packed.replaced(tensors), self.parts.ema,
        jit_compile=self.parts.compiles_updates,
      )  # fmt: skip

    context = tf.distribute.get_replica_context()
    context.merge_call(apply_if_finite, args=(finite, packed.tensors))

  def log_update(
    self, loss: Loss, finite: tf.Tensor, norm: tf.Tensor, optimizer: str = DEFAULT
  ) -> None:
    """Logs the loss and gradient norm of an update, and records whether they are finite.

    If any update of the step is not finite, the loss scale decreases after the step. The norm of
    an update that is not finite, or without weight, does not count.
    """
    name = prefix(optimizer)
    shown = tf.cast(finite & (loss.weight > 0), tf.float32)
    self.record.add(
      {
        f"{name}loss": (loss.total, loss.weight),
        f"{name}gradient_norm": (tf.math.multiply_no_nan(norm, shown), shown),
      }
    )
    self.record.updates.append((finite, tf.math.is_finite(loss.total)))

  def assign(
    self, variable: Variable, value: TensorLike, *, when: tf.Tensor | bool | None = None
  ) -> None:
    """Sets a variable at the end of the step, if all updates of the step are finite.

        step.assign(target, 0.99 * target + 0.01 * online)

    For state that the step keeps beside the optimizers: target networks, queues, moving averages.
    It is saved and restored. All assignments of a step take effect together, after
    its updates; until then the variable has its old value.

    Args:
      variable: of the model or the task, made in `build_model`, trainable or not.
      value: of the variable's shape, cast to its dtype; equal on every replica: computed from
        variables, reduced gradients or `all_gather`, not from this replica's rows alone.
      when: whether this step assigns, a bool scalar equal on every replica. None always assigns.

    Raises:
      ConfigError: another shape, a second assignment in one step, a variable that the replicas
        have no copies of, or inside a branch or loop on a tensor.
    """
    self.traced.require_outermost("step.assign()")
    self.record.assignments.add(variable, value, when)

  def seed(self) -> tf.Tensor:
    """Returns a seed for `tf.random.stateless_*`, int32 [2] (replica context).

        noise = tf.random.stateless_normal([n, 8], step.seed())

    It depends only on the run's seed, the step, the replica and how many calls came before.
    """
    return self.draws.next_seed()

  def _optimizer(self, name: str) -> Optimizer:
    if name not in self.parts.optimizers:
      raise unknown("optimizer", name, self.parts.optimizers)
    return self.parts.optimizers[name]

  def _differentiated(
    self, tape: tf.GradientTape, total: tf.Tensor, fusion: Fusion
  ) -> list[Gradient]:
    with self.record.differentiates():
      found = fusion.differentiated(tape, total, self.scaling.cast(total.dtype))
    return self.parts.without_frozen(found, fusion)

  def _compiled_pass(self, compute: Callable[[], T]) -> T:
    """Returns `compute()`, by XLA if `jit_compile` says so and, with "auto", if it can."""
    begun, part = self.draws.before, "forward and backward pass"
    try:
      return self.parts.program(part, compute, must=True)()
    except RuntimeError as error:  # as in branches.computed_if
      if "merge_call" not in str(error) or self.parts.jit_compile != "auto":
        raise
      self.parts.left_out[part] = f"the replicas communicate in it{self.traced.gathers_at}"
    self.draws.before = begun
    return compute()

  def _require_one_pass(self, verb: str) -> None:
    """Raises ConfigError where the trainer would divide or compile the forward pass."""
    for name, neutral in (("accumulation_steps", [1]), ("jit_compile", [False, "auto"])):
      if (given := getattr(self.parts, name)) not in neutral:
        raise ConfigError(
          f"received Trainer.{name}={given}, but the pass of {verb} runs as it is written, once; "
          f"use {name}={neutral[0]}, or step.gradients(), which takes the loss as a function."
        )

  def _computed_when(
    self, when: tf.Tensor | bool, compute: Callable[[], tuple[Gradients, Loss]], fusion: Fusion
  ) -> tuple[Gradients, Loss]:
    """Returns `compute()` if `when`, else zeros of the same shapes; logs likewise."""
    self.record.is_conditional = True
    when = branches.condition(when)
    if tf.executing_eagerly() and not when:
      return Gradients.zeros(fusion), Loss(tf.constant(0.0), tf.constant(0.0))
    if tf.executing_eagerly():
      return compute()
    begun = self.draws.before
    layout: list[Gradients] = []

    def computed() -> tuple[list[tf.Tensor], Loss, dict[str, Checked]]:
      self.draws.before = begun
      with self.record.collected() as logged:
        gradients, loss = compute()
      layout[:] = [gradients]
      return list(gradients.tensors), loss, logged

    tensors, loss, logged = branches.computed_if(when, computed)
    self.record.add(logged)
    return layout[0].replaced(tensors), loss
