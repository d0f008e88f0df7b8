"""Runs one step of the user's own Trainer at a time, on 1 to N logical CPUs, on prepared batches.

Only the strategy, the batch and, for checks of gradients, the optimizer are replaced.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras

from loopwright import configurables
from loopwright.distribution import placement
from loopwright.errors import ConfigError
from loopwright.graphs import randomness
from loopwright.graphs.aliases import HostValue, Variable
from loopwright.graphs.grappler import Compiled
from loopwright.host import lazy_keras
from loopwright.inputs import datasets
from loopwright.inputs.parts import prefixes
from loopwright.inputs.sources import eval_sets, of_one_shape
from loopwright.models import models
from loopwright.optimizers.adapters import prefix
from loopwright.options.groups import Precision
from loopwright.run_folder import assets
from loopwright.runs.builder import Recipe
from loopwright.step import Step
from loopwright.task import Task, preprocess_of
from loopwright.tools.verify.bench import shared_noise
from loopwright.trainer import Trainer

Rows = dict[str, np.ndarray]
"""A batch on the host: name -> array, rows on the first axis."""
RATE = 2.0**-4
"""Learning rate of `gradient_descent`; small, so that several updates per step stay close."""
MOST_REPLICAS = 3
OTHER_STEPS = (1, 2, 3, 4, 5, 7, 9, 99, 999, 9999)
"""Numbers of steps to look at if a gradient of step 0 is missing or zero: a loss may have parts
that only some steps compute."""


def gradient_descent() -> keras.optimizers.Optimizer:
  """An optimizer whose update is the gradient times `RATE`."""
  return keras.optimizers.SGD(RATE)


PLAIN: dict[str, Any] = {"optimizer": gradient_descent, "always": True}
"""Options of a bench whose update is the gradient."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject(Recipe):
  """What is verified, and how to make it: the options of `run` and a factory of the task.

  Attributes:
    task: makes the task; called for each bench.
    precision: as for `run`.
    steps_per_loop: as for `run`.
    mesh: makes the strategy of a model that is split over devices; None if it is not.
    mesh_size: the number of its devices.
  """

  task: Callable[[], Task]
  precision: Precision = "float32"
  steps_per_loop: int = 100
  mesh: Callable[[], tf.distribute.Strategy] | None = None
  mesh_size: int = 1

  def fresh_task(self) -> Task:
    """Returns a new task with its assets; its model is not built yet."""
    made = self._made_task()
    if made.has_fit:
      assets.provide_in_memory(made, self.fitted)
    return made

  def _made_task(self) -> Task:
    made = self.task()
    if made.model is not None:
      made = copy.copy(made)
      made.model = None
    return made

  @functools.cached_property
  def fitted(self) -> assets.Assets:
    """What fit() returns, once for all tasks; then sets the seed as if it had been done before."""
    made = assets.provide_in_memory(self._made_task())
    randomness.seed_everything(self.seed)
    return made

  def rows(self, task: Task, count: int, *, position: int = 0, training: bool = True) -> Rows:
    """Returns one batch of `count` examples as training reads it, augmented, without padding."""
    if training:
      dataset = self.dataset(task, count, position=position)
    else:
      first = of_one_shape(next(iter(eval_sets(task.source("eval")).values())))
      dataset = datasets.eval_dataset(
        first, global_batch_size=count, preprocess=preprocess_of(task), steps=self.eval_steps
      )
    return dict(next(dataset.take(1).as_numpy_iterator()))

  def dataset(
    self, task: Task, rows: int, *, position: int = 0, pad_multiple: int = 1
  ) -> tf.data.Dataset:
    """Returns the task's training input in batches of `rows`, as `run` makes it."""
    return datasets.train_dataset(
      of_one_shape(task.source("train")), global_batch_size=rows, pad_multiple=pad_multiple,
      seed=self.seed, position=position, preprocess=preprocess_of(task), shuffle=self.shuffle,
    )  # fmt: skip

  @property
  def divisible_rows(self) -> int:
    """Rows of a small batch that 1 to 3 replicas and the config's micro-batches divide."""
    micro = self.accumulation_steps
    return 6 * micro if micro > 1 else 12

  @property
  def accumulation_steps(self) -> int:
    """Micro-batches per update, from the config."""
    bound = configurables.bindings().get("Trainer.accumulation_steps", "1")
    return int(self.options.get("accumulation_steps", bound))

  def optimizer_like(self, factory: Callable[[], Any]) -> Any:
    """Returns `factory` in place of each of the subject's optimizers."""
    if isinstance(self.optimizer, Mapping):
      return dict.fromkeys(self.optimizer, factory)
    return factory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """One step.

  Attributes:
    before: each variable before the step.
    after: each variable after the step, on each replica.
    metrics: the logged values.
  """

  before: list[np.ndarray]
  after: list[list[np.ndarray]]
  metrics: dict[str, float]

  def update(self, replica: int = 0) -> list[np.ndarray]:
    """Returns the change of each variable on a replica, float64."""
    return [
      after[replica].astype(np.float64) - before
      for before, after in zip(self.before, self.after, strict=True)
    ]


class Bench:
  """A task under a strategy of N logical CPUs, ready to step.

  Attributes:
    first_number: the number of the step that `steps_from` runs.
    around: makes the context in which `step` and `graph` run; see shared_noise.py.
    run: runs one step on what `distributed` returns, compiled unless eager.
  """

  first_number = 0

  def __init__(
    self,
    subject: Subject,
    replicas: int = 1,
    *,
    rows: int = 12,
    optimizer: Callable[[], Any] | None = None,
    eager: bool = False,
    quiet: bool = True,
    always: bool = False,
    number: int | None = None,
    strategy: tf.distribute.Strategy | None = None,
    **options: Any,
  ) -> None:
    """Builds the model; the initial weights are always the same.

    Args:
      subject: what to verify.
      replicas: how many; see `strategy_of`.
      rows: of each global batch.
      optimizer: replaces the subject's own.
      eager: True runs without tf.function.
      quiet: True gives all rows the same noise; see shared_noise.py.
      always: True makes every update and assignment in each step, whatever its `when`.
      number: what the task sees as the number of each step; None is the real one. With `always`.
      strategy: None makes one of `replicas`.
      options: of `Trainer`, replace the config's.
    """
    randomness.seed_everything(subject.seed)
    self.replicas, self.subject = replicas, subject
    self.around: Callable[[], contextlib.AbstractContextManager[None]]
    self.around = shared_noise.alike_for_all_rows if quiet else contextlib.nullcontext
    self.strategy = strategy or strategy_of(replicas)
    self.task = subject.fresh_task()
    if always:
      options["step"] = _always(number)
    recipe = dataclasses.replace(
      subject, global_batch_size=rows, eager=eager, options={**subject.options, **options},
      optimizer=subject.optimizer_like(optimizer) if optimizer else subject.optimizer,
    )  # fmt: skip
    self.trainer = recipe.trainer(self.task, self.strategy, dataset_fn=_no_dataset)
    if quiet:
      self.trainer.use(replica_id=lambda: tf.constant(0))
    self.run = stepper(self.trainer)

  @property
  def variables(self) -> list[tf.Variable]:
    """All variables of the model, then those of the task itself."""
    found = {id(models.raw(v)): models.raw(v) for v in models.all_variables(self.task.model)}
    for value in vars(self.task).values():
      for held in tf.nest.flatten(value) if isinstance(value, (list, tuple, dict)) else [value]:
        held = models.raw(held)
        if isinstance(held, (tf.Variable, tf.distribute.DistributedValues)):
          found.setdefault(id(held), held)
    return list(found.values())

  @property
  def names(self) -> list[str]:
    """Names of `variables`, as the user knows them."""
    known = {id(models.raw(v)): models.name(v) for v in models.all_variables(self.task.model)}
    return [known.get(id(v), v.name) for v in self.variables]

  @property
  def by_optimizer(self) -> list[str]:
    """The name of the optimizer that updates each of `variables`, "" if none does."""
    owners = {
      id(models.raw(v)): name
      for name, one in self.trainer.parts.optimizers.items()
      for v in one.variables
    }
    return [owners.get(id(v), "") for v in self.variables]

  @property
  def trainable(self) -> list[bool]:
    """Whether an optimizer updates each of `variables`."""
    return [owner != "" for owner in self.by_optimizer]

  @property
  def keeps_state(self) -> bool:
    """Whether a step has assigned to variables by `step.assign`."""
    return bool(self.trainer.assigned)

  @property
  def parameters(self) -> int:
    """Number of elements that the optimizers update."""
    sizes = zip(self.variables, self.trainable, strict=True)
    return sum(int(v.shape.num_elements()) for v, trained in sizes if trained)

  def loss_in(self, metrics: Mapping[str, float]) -> float:
    """Returns the sum of the optimizers' losses that a step has logged; NaN if it logged none."""
    names = [f"{prefix(name)}loss" for name in self.trainer.parts.optimizers]
    logged = [metrics[name] for name in names if name in metrics]
    return float(np.sum(logged)) if logged else math.nan

  def step(self, batch: Rows) -> Outcome:
    """Runs one training step on one global batch (host)."""
    before = [self.copies(v)[0] for v in self.variables]
    self.trainer.metrics.reset()
    with self.around():
      self.run(self.distributed(batch))
    metrics = self.trainer.metrics.result() | numbers(self.trainer.metrics.sums)
    metrics.pop("input_wait", None)
    after = [self.copies(v) for v in self.variables]
    return Outcome(before=before, after=after, metrics=metrics)

  def steps_from(self, values: Sequence[np.ndarray], batch: Rows) -> Outcome:
    """Sets the variables and runs step `first_number`; the optimizer's state stays (host)."""
    self.assign(values)
    self.trainer.global_step.assign(self.first_number)
    return self.step(batch)

  def graph(self, batch: Rows) -> Any:
    """Returns the graph of the compiled step on a global batch (host)."""
    with self.around():
      return self.run.get_concrete_function(self.distributed(batch)).graph

  def assign(self, values: Sequence[np.ndarray]) -> None:
    """Sets `variables` on every replica (host)."""
    for variable, value in zip(self.variables, values, strict=True):
      variable.assign(tf.cast(value, variable.dtype))

  def read(self) -> list[np.ndarray]:
    """Returns the values of `variables` on the first replica (host)."""
    return [self.copies(v)[0] for v in self.variables]

  def copies(self, variable: tf.Variable) -> list[np.ndarray]:
    """Returns a variable's value on each replica; one that is read as a sum has one (host)."""
    if getattr(variable, "synchronization", None) == tf.VariableSynchronization.ON_READ:
      return [np.array(tf.convert_to_tensor(variable))] * self.replicas
    held = self.strategy.experimental_local_results(variable)
    return [np.array(tf.cast(h, tf.float32) if h.dtype == tf.bfloat16 else h) for h in held]

  def distributed(self, batch: Rows) -> Any:
    """Returns a global batch as `strategy.run` takes it, its rows split in order (host)."""
    return placement.of(self.strategy).split(batch)


def _always(number: int | None) -> type[Step]:
  """Returns a Step that makes every update and every assignment."""

  class Always(Step):
    @property
    def number(self) -> tf.Tensor:
      return super().number if number is None else tf.constant(number, tf.int64)

    def gradients(
      self, loss_fn: Any, batch: Any, variables: Sequence[Variable], *, when: Any = None
    ) -> Any:
      del when
      return super().gradients(loss_fn, batch, variables)

    def assign(self, variable: Variable, value: Any, *, when: Any = None) -> None:
      del when
      super().assign(variable, value)

  return Always


def stepper(trainer: Trainer) -> Any:
  """Returns a function that runs one step on a distributed batch, compiled unless eager (host)."""

  def step(batch: Any) -> None:
    trainer.train_step(iter([batch]))
    trainer.average_state()

  return step if trainer.eager else Compiled(step)


@contextlib.contextmanager
def under(policy: str) -> Iterator[None]:
  """Sets the dtype policy of both Keras generations inside the context (host)."""
  before = keras.config.dtype_policy().name
  _set_policy(policy)
  try:
    yield
  finally:
    _set_policy(before)


def _set_policy(policy: str) -> None:
  keras.config.set_dtype_policy(policy)
  lazy_keras.when_tf_keras_loads(lambda: tf_keras.mixed_precision.set_global_policy(policy))


class Communications(tf.distribute.ReductionToOneDevice):
  """Tells of each sum over replicas what the first one gives and gets.

  Attributes:
    told: called with tensors and results; None does not.
  """

  told: Callable[[list[tf.Tensor], list[tf.Tensor]], None] | None = None

  def batch_reduce_implementation(self, reduce_op: Any, pairs: Any, options: Any) -> Any:
    """As `ReductionToOneDevice` does it."""
    results = super().batch_reduce_implementation(reduce_op, pairs, options)
    if self.told is not None:
      self.told([_first(given) for given, _ in pairs], [*map(_first, results)])
    return results


def _first(value: Any) -> Any:
  return getattr(value, "values", [value])[0]


def strategy_of(
  replicas: int,
  *,
  communications: Communications | None = None,
  kind: type[tf.distribute.Strategy] = tf.distribute.MirroredStrategy,
) -> tf.distribute.Strategy:
  """Returns a strategy with this many logical CPUs; of several, of a kind.

  Raises:
    ConfigError: TensorFlow has started with fewer.
  """
  if replicas == 1:
    return tf.distribute.OneDeviceStrategy("CPU:0")
  devices = [device.name for device in tf.config.list_logical_devices("CPU")]
  if len(devices) < replicas:
    raise ConfigError(
      f"verification on {replicas} replicas needs as many logical CPUs, but TensorFlow has started "
      f"with {len(devices)}; call loopwright.strategies.factories.split_cpu({MOST_REPLICAS}) first."
    )
  return kind(devices[:replicas], cross_device_ops=communications or Communications())


def _no_dataset(position: int) -> tf.data.Dataset:
  raise RuntimeError(f"the bench feeds batches itself, not from position {position}")


# ---- Batches ----


def padded(batch: Rows, real: int) -> Rows:
  """Returns the batch with all rows from `real` on turned into padding, as the input does."""
  rows = np.arange(len(batch["weight"]))
  made = {name: value[np.where(rows < real, rows, 0)] for name, value in batch.items()}
  return masked(made, rows < real)


def masked(batch: Rows, kept: np.ndarray) -> Rows:
  """Returns the batch with weight 0 and id -1 where not `kept`, bool [rows]."""
  made = dict(batch)
  for part in prefixes(batch):
    weight, ids = batch[f"{part}weight"], batch[f"{part}example_id"]
    rows = kept if weight.ndim == 1 else kept[:, np.newaxis]
    made[f"{part}weight"] = np.where(rows, weight, 0).astype(np.float32)
    made[f"{part}example_id"] = np.where(rows, ids, -1)
  return made


def weighted(batch: Rows, seed: int = 0) -> Rows:
  """Returns the batch with unequal weights."""
  factors = np.random.default_rng(seed).uniform(0.25, 2.0, len(batch["weight"]))
  return {**batch, "weight": (batch["weight"] * factors).astype(np.float32)}


def numbers(values: Mapping[str, HostValue]) -> dict[str, float]:
  """Returns floats as they are, and for an array its elements as "name[i, j]" (host).

  Of more than 16 elements, which nobody would read, only the sum and the sum of squares.
  """
  found: dict[str, float] = {}
  for name, value in values.items():
    array = np.asarray(value, np.float64)
    if not array.shape:
      found[name] = value
    elif array.size > 16:
      found |= {f"sum of {name}": array.sum(), f"sum of squares of {name}": np.square(array).sum()}
    else:
      found |= {f"{name}{[*index]}": float(each) for index, each in np.ndenumerate(array)}
  return found
