"""What the verbs of a step work with."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar

import tensorflow as tf

from loopwright.distribution import placement
from loopwright.distribution.reduction import Reduction
from loopwright.errors import ConfigError
from loopwright.graphs import operations, randomness, xla
from loopwright.graphs.aliases import Batch, Gradient, PerReplica, Variable
from loopwright.host import timing
from loopwright.metrics import Loss, Weighted
from loopwright.models import models
from loopwright.observers import Observer
from loopwright.optimizers import adapters
from loopwright.optimizers.adapters import Optimizer
from loopwright.optimizers.fusion import Fusion, Gradients
from loopwright.optimizers.loss_scale import LossScale

if TYPE_CHECKING:
  from loopwright.optimizers.ema import Ema
  from loopwright.step import Step

T = TypeVar("T")
JitCompile: TypeAlias = bool | Literal["auto"]
"""Whether XLA compiles; "auto": what it can."""
StepsPerProgram: TypeAlias = int | Literal["auto"]
"""How many steps are one program of XLA; "auto" is 1 until something else is chosen."""


def replica_id() -> tf.Tensor:
  """Returns this replica's index in its process or cluster, an int32 scalar (replica context)."""
  return tf.distribute.get_replica_context().replica_id_in_sync_group


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
  jit_compile: JitCompile = False
  steps_per_program: StepsPerProgram = 1
  left_out: dict[str, str] = dataclasses.field(default_factory=dict)  # of `program`: part -> why
  padded: tuple[str, str] | None = None  # if batches have rows without an example: why, a remedy
  ema: Ema | None = None
  replica_id: Callable[[], tf.Tensor] = replica_id
  observers: tuple[Observer, ...] = ()
  frozen: frozenset[int] = frozenset()  # ids of variables that optimizers leave as they are now
  known_step: tf.Tensor | None = None  # the value of `global_step`, where the host counts steps

  @property
  def dtypes(self) -> list[tf.DType]:
    """The dtypes of all updated variables, sorted by name."""
    found = {models.raw(v).dtype for one in self.optimizers.values() for v in one.variables}
    return sorted(found, key=lambda dtype: dtype.name)

  @property
  def compiles_updates(self) -> bool:
    """Whether XLA compiles what follows the reduction too: on GPUs that saves launches."""
    compiles = bool(self.jit_compile) and placement.here().compiles
    if compiles:
      self.left_out["mean, check and update"] = ""
    return compiles

  def compiled(self, function: Callable[[], T]) -> Callable[[], T]:
    """Returns a part of what follows the reduction, compiled where `compiles_updates`."""
    return xla.program(function) if self.compiles_updates else function

  def program(
    self, part: str, function: Callable[[], T], *, must: bool = False, given: Any = None
  ) -> Callable[[], T]:
    """Returns a part of the step as one program, where XLA can; `left_out` has the others.

    Args:
      part: what it is.
      function: without arguments; traced once.
      must: with jit_compile=True, what XLA cannot compile is an error.
      given: what a step takes, if it is `ahead.Given`.
    """
    if not self.jit_compile:
      return function
    if must and self.jit_compile is True:
      self.left_out[part] = ""
      return xla.program(function)
    kind, instead = placement.here().device_kind, getattr(given, "instead", None)
    made, self.left_out[part] = xla.if_possible(function, kind=kind)
    return made(instead)

  def saved(self) -> dict[str, Any]:
    """Returns name -> object: what a checkpoint has of them (host)."""
    items: dict[str, Any] = {
      "optimizers": {name: one.saved for name, one in self.optimizers.items()}
    }
    if self.loss_scale.variables:
      items["loss_scale"] = self.loss_scale
    return items if self.ema is None else {**items, "ema": self.ema.averages}

  def metrics(self) -> dict[str, float]:
    """Returns the loss scale, and the learning rate of each optimizer (host)."""
    rates = {
      f"{adapters.prefix(name)}learning_rate": float(one.learning_rate())
      for name, one in self.optimizers.items()
    }
    return {"loss_scale": float(tf.convert_to_tensor(self.loss_scale.value())), **rates}

  def key(self, draw: int) -> tf.Tensor:
    """Returns the random key of a draw of this step and replica, see `randomness.step_key`."""
    with placement.here().on_host():
      return randomness.step_key(self.seed, self.step_number(), self.replica_id(), draw)

  def at(self, number: tf.Tensor | None) -> StepParts:
    """Returns them for the step of this number, which the host counts; itself for None."""
    return self if number is None else dataclasses.replace(self, known_step=number)

  def step_number(self) -> tf.Tensor:
    """Returns the number of training steps before this one, an int64 scalar (any context)."""
    return self.global_step.read_value() if self.known_step is None else self.known_step

  def fusion_of(self, variables: Sequence[Variable]) -> Fusion:
    """Returns the layout of the optimizer that owns these variables, else one without fusion."""
    wanted = [id(models.raw(v)) for v in variables]
    for optimizer in self.optimizers.values():
      if wanted == [id(models.raw(v)) for v in optimizer.variables]:
        return optimizer.fusion
    return Fusion(variables, enabled=False)

  def without_frozen(self, gradients: Sequence[Gradient], fusion: Fusion) -> list[Gradient]:
    """Returns gradients of `fusion`, with None for variables that are not trained now."""
    frozen = (id(models.raw(variable)) in self.frozen for variable in fusion.originals)
    return [None if leave else g for g, leave in zip(gradients, frozen, strict=True)]

  def micro_batches(self, batch: Batch) -> list[Batch]:
    """Splits this replica's part of a batch (replica context)."""
    count = self.accumulation_steps
    if count == 1:
      return [batch]
    parts = {name: placement.here().split_rows(value, count) for name, value in batch.items()}
    return [{name: parts[name][index] for name in batch} for index in range(count)]

  @contextlib.contextmanager
  def forward_pass(self, key: tf.Tensor, batch: Batch) -> Iterator[None]:
    """Random layers draw from `key` inside `with`; statistics leave out padded rows."""
    with randomness.random_streams(key), self.examples_of(batch):
      yield

  def examples_of(self, batch: Batch) -> contextlib.AbstractContextManager[None]:
    """Statistics leave out padded rows of the batch inside `with` (replica context)."""
    if self.padded is None:
      return contextlib.nullcontext()
    from loopwright.models.batch_norm import only_examples

    return only_examples(batch, why=self.padded)


class Replaced(TypedDict, total=False):
  """Those of `StepParts` that `Trainer.use` may replace."""

  reduction: Reduction
  loss_scale: LossScale
  clip_norm: float | None
  clip_value: float | None
  accumulation_steps: int
  jit_compile: JitCompile
  steps_per_program: StepsPerProgram
  padded: tuple[str, str] | None
  ema: Ema | None
  replica_id: Callable[[], tf.Tensor]
  observers: tuple[Observer, ...]


class StepNumbers:
  """On GPUs, what depends on the number of a step is computed by the host, once."""

  def __init__(self, parts: StepParts, num_steps: tf.Tensor, *, place: placement.Placement) -> None:
    """Computes number and rates of the next `num_steps` steps (cross-replica)."""
    self._place, self._parts, self._to_xla = place, parts, bool(parts.jit_compile)
    if not place.on_gpus:
      return
    schedules = [one.schedule for one in parts.optimizers.values() if one.schedule]
    with place.on_host():
      self._first = tf.identity(parts.global_step.read_value())
      ahead = [one.ahead(self._first, num_steps) for one in schedules]
    self._rates = [(one, tf.identity(rates)) for one, rates in zip(schedules, ahead, strict=True)]

  @contextlib.contextmanager
  def of(self, done: tf.Tensor) -> Iterator[tf.Tensor | None]:
    """The step after `done` steps of the loop is traced inside (cross-replica).

    Yields:
      Its number, an int64 scalar of the host; None where each replica reads it itself.
    """
    if not self._place.on_gpus:
      yield None
      return
    with contextlib.ExitStack() as stack:
      with self._place.on_host():
        number = self._first + tf.cast(done, tf.int64)
      for schedule, rates in self._rates:
        stack.enter_context(schedule.given(rates, done, to_xla=self._to_xla))
      yield number

  def run_ahead(
    self, step: Callable[..., tf.Tensor], iterator: Any, steps: tf.Tensor, wait: InputWait
  ) -> bool:
    """Runs so many steps as gpu_pipeline.py or several_steps.py; returns whether that can be."""
    if self._parts.steps_per_program not in ("auto", 1):
      from loopwright.engine import several_steps

      if several := several_steps.of(iterator, self._parts, wait, self._place):
        several.run(step, steps)
        return True
    if not self._place.on_gpus:
      return False
    from loopwright.engine import gpu_pipeline

    if ahead := gpu_pipeline.of(iterator, self._parts, wait, self._place):
      ahead.run_each(step, self.of, steps)
    return ahead is not None


class InputWait:
  """How long the steps of a loop waited for their batches.

  The host adds it up, for its own replicas, on GPUs, so that no step copies it to them, and in a
  cluster, where each worker must know its own.
  """

  def __init__(self, place: placement.Placement) -> None:
    """Starts at 0; call it outside of the strategy's scope (host)."""
    self._place = place
    self._sum: tf.Variable | None = None
    if place.on_gpus or place.cluster.size > 1:
      with tf.device("CPU:0"):
        self._sum = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="input_wait")

  @property
  def variables(self) -> list[tf.Variable]:
    """What adds up; it begins anew with each loop."""
    return [] if self._sum is None else [self._sum]

  def timed(self, iterator: Any) -> tuple[PerReplica, tf.Tensor]:
    """Returns the next global batch and the wait for it, float32 seconds (cross-replica)."""
    if (given := getattr(iterator, "batch", None)) is not None:  # a `Given` of ahead, several_steps
      return given, getattr(iterator, "waited_s", tf.constant(0.0))
    batch, waited_s = self.read(iterator)
    return self._place.per_replica(batch), waited_s

  def read(self, iterator: Iterator[PerReplica]) -> tuple[PerReplica, tf.Tensor]:
    """Returns the same before it is split and sent (cross-replica)."""
    return self.measured(lambda: self._place.read(iterator))

  def measured(self, read: Callable[[], PerReplica]) -> tuple[PerReplica, tf.Tensor]:
    """Returns what `read` does, one batch or several, and the wait for it (cross-replica)."""
    started = timing.timestamp()
    with tf.control_dependencies([started]):
      batch = read()
    arrived = self._place.strategy.experimental_local_results(batch["weight"])[0]
    with tf.control_dependencies([arrived]), self._place.on_host():
      waited_s = tf.cast(timing.timestamp() - started, tf.float32)
      if self._sum is not None:
        self._sum.assign_add(tf.cast(waited_s, tf.float64), read_value=False)
    return batch, waited_s

  def metrics(self, waited_s: tf.Tensor) -> dict[str, Weighted]:
    """Returns what a step's metrics must sum up of it (replica context)."""
    return {"input_wait": (waited_s, 1.0)} if self._sum is None else {}

  def seconds(self, results: dict[str, float], steps: int) -> float:
    """Returns the sum over the loop's steps; takes it out of the loop's metrics (host)."""
    return results.pop("input_wait") * steps if self._sum is None else float(self._sum.numpy())

  def reset(self) -> None:
    """Starts again at 0 (host)."""
    if self._sum is not None:
      self._sum.assign(0.0)


class Draws:
  """The random numbers of one replica's step: they follow from how many were drawn before.

  Attributes:
    before: the forward passes and the seeds so far; a pass that is repeated sets it back first.
  """

  def __init__(self, key: Callable[[int], tf.Tensor]) -> None:
    """Starts a step with the keys of its draws."""
    self.before = (0, 0)
    self._key = key

  def next_pass(self) -> tf.Tensor:
    """Returns the key of the next forward pass."""
    passes, seeds = self.before
    self.before = passes + 1, seeds
    return self._key(passes)

  def next_seed(self) -> tf.Tensor:
    """Returns the seed of the next call of `Step.seed`; a recomputation gets its own again."""
    if (stream := randomness.recomputed_stream()) is not None:
      return stream.next_seed()
    passes, seeds = self.before
    self.before = passes, seeds + 1
    return self._key(-(seeds + 1))


class Trace:
  """The graph in which a step is traced; replicas cannot communicate in a graph inside of it.

  Attributes:
    gathers_at: the place of the last call of `gathers` in the user's code, as a message ends.
    in_program: whether all that follows the reduction is traced as one program.
  """

  in_program = False

  def __init__(self) -> None:
    """Keeps the current graph (replica context)."""
    self._graph, self.gathers_at = randomness.current_graph(), ""

  def gathers(self, tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor that replicas are about to share, and keeps the place."""
    tensor = tf.identity(tensor)
    self.gathers_at = xla.place(tensor.op)
    return tensor

  def require_outermost(self, verb: str) -> None:
    """Raises ConfigError in another graph."""
    if randomness.current_graph() is not self._graph:
      raise ConfigError(
        f"{verb} is called inside a branch or loop on a tensor (if, while, for, tf.cond) or a "
        "tf.function of its own, where the replicas cannot communicate; call it in the step itself "
        "and give the condition as when=, such as step.update(..., when=step.number % 2 == 0), and "
        "loop over a Python range."
      )


def as_one(step: Step, rest: Callable[[Gradients, Loss], None], *given: Any) -> Loss:
  """Calls `rest`, what follows the reduction, with `given`: gradients, loss and optimizer of it.

  Returns the loss. Where XLA compiles updates, `rest` is one program; see `one_program`.
  """
  gradients, loss, _ = given
  if step.parts.compiles_updates:
    from loopwright.engine.one_program import as_one_program

    return as_one_program(step, rest, *given)
  rest(gradients, loss)
  return loss


class Scaling:
  """The loss scale of one replica's step, and which gradients have it.

  Attributes:
    factor: what each loss is multiplied by before its backward pass, a float32 scalar: the scale
      divided by the global batch size. None stands for 1.
  """

  def __init__(self, loss_scale: LossScale, global_batch_size: int) -> None:
    """Reads the scale: once, so that gradients are known by what they are computed from."""
    self.factor = loss_scale.factor(global_batch_size)

  def cast(self, dtype: tf.DType) -> tf.Tensor | None:
    """Returns the factor in the dtype of a loss."""
    return None if self.factor is None else tf.cast(self.factor, dtype)

  def require(self, gradients: Sequence[tf.Tensor]) -> None:
    """Raises ConfigError for gradients that lack the scale; eager mode cannot know them.

    They may have passed through any operations. Constants, such as zeros, need no scale.
    """
    graph = randomness.current_graph()
    if self.factor is None or graph is None or self.factor.graph is not graph:
      return
    known = operations.computed_from(self.factor)
    there = [g for g in gradients if tf.is_symbolic_tensor(g)]
    found = [g for g in there if g.graph is not graph or g.op.name not in known]
    unknown = [g for g in found if not operations.is_constant(g)]
    if unknown:
      raise ConfigError(
        f"step.unscale() divides by the loss scale, but {len(unknown)} of {len(gradients)} "
        "gradients were made without it, as tape.gradient() makes them; write "
        "step.gradients_of(tape, loss, variables) in its place, or use step.gradients()."
      )
