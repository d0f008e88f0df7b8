"""Options of `loopwright.run`, each declared once, in groups that travel whole to what uses them.

    cadence = Cadence(train_steps=1000)

A group is checked when it is made. `loopwright.runs.runner.Options` is all of them, and more.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Annotated, Any, ClassVar, Literal, ParamSpec, TypeVar

from loopwright.errors import ConfigError, require_integer, require_positive, suggest, unknown
from loopwright.options import declaration
from loopwright.options.declaration import (
  COMPUTES,
  COMPUTES_THERE,
  COUNT,
  SECONDS,
  SEED,
  Check,
  asked,
  free,
)

Precision = Literal["float32", "mixed_float16", "mixed_bfloat16"]
GpuMemory = Annotated[int, "a number of MiB"] | Literal["all", "grow"]
Made = TypeVar("Made")
Given = TypeVar("Given")
Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")


OF_FIT: Mapping[str, str] = {
  "callbacks": "run(actions=[lw.KerasCallback(callback=...)]), or what docs/actions.md has for it.",
  "batch_size": "set run(global_batch_size=...).",
  "epochs": "set run(train_epochs=...), or train_steps.",
  "shuffle": "set run(shuffle=...).",
  "x": "give it to from_keras(), or read it in Task.source.",
}
"""Arguments of Keras's `fit` -> where a run has them."""


def names_of(group: Callable[..., Any]) -> Set[str]:
  """Returns the options of a group."""
  return inspect.signature(group).parameters.keys()


def taken(group: Callable[..., Made], values: Mapping[str, Any], **more: Any) -> Made:
  """Returns a group of those of `values` that are its options, and of `more`."""
  return group(**{name: values[name] for name in names_of(group) & values.keys()} | more)


def facts(*groups: Any) -> dict[str, Any]:
  """Returns "run.<name>" -> value of each option, as the workers of a cluster compare them."""
  return {f"run.{name}": value for each in groups for name, value in vars(each).items()}


def not_taken(who: str, name: str, remedy: str, names: Iterable[str] = ()) -> ConfigError:
  """Returns the error for an argument that is none of `names`; one of `fit` has its place here."""
  return ConfigError(f"{who}() takes no {name}; {OF_FIT.get(name, remedy)}{suggest(name, names)}")


def taking(
  options: Callable[Parameters, Given],
) -> Callable[[Callable[[Given], Result]], Callable[Parameters, Result]]:
  """Decorates a function of one group of options: it is called with them as keywords.

  Its signature and the "Args:" of its docstring are those of the group.
  """

  def decorate(function: Callable[[Given], Result]) -> Callable[Parameters, Result]:
    @functools.wraps(function)
    def call(*args: Parameters.args, **given: Parameters.kwargs) -> Result:
      for name in given.keys() - names_of(options):
        raise not_taken(function.__name__, name, "see docs/options.md.", names_of(options))
      parameters = inspect.signature(options).parameters.values()
      needed = sorted(each.name for each in parameters if each.default is each.empty)
      if args or not given.keys() >= {*needed}:
        told = f"{function.__name__}() takes its arguments by name and needs "
        raise ConfigError(told + ", ".join(f"{name}=..." for name in needed) + ".")
      return function(options(*args, **given))

    declaration.take(call, options)
    return call

  return decorate


class Group:
  """The base class of all groups: checks what is declared of each option."""

  def __post_init__(self) -> None:
    """Raises a ConfigError for a value that its option does not allow."""
    annotations = declaration.signature(type(self)).parameters
    for name, option in declaration.declared(type(self)).items():
      value, annotation = getattr(self, name), annotations[name].annotation
      declaration.require(f"run.{name}", value, annotation, option)

  def part(self, group: Callable[..., Made], **more: Any) -> Made:
    """Returns one of the groups that these options have, with `more`."""
    return taken(group, vars(self), **more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSize(Group):
  """How many examples an update has: exactly one of both is set."""

  either: ClassVar = ("global_batch_size", "per_replica_batch_size")

  global_batch_size: Annotated[
    int | None,
    "examples per update over all replicas; or set `per_replica_batch_size`.",
    asked("counts from there on, and the order of examples goes on; not with `Buckets`"),
    COUNT,
  ] = None
  per_replica_batch_size: Annotated[
    int | None,
    "examples per update on each replica; the global batch grows with the number of replicas.",
    asked("as `run.global_batch_size`"),
    COUNT,
  ] = None

  def __post_init__(self) -> None:
    """Raises a ConfigError if both sizes are set, or none."""
    if self.global_batch_size is not None and self.per_replica_batch_size is not None:
      raise ConfigError(
        f"received both run.global_batch_size={self.global_batch_size} and "
        f"run.per_replica_batch_size={self.per_replica_batch_size}; choose one."
      )
    if self.global_batch_size is None and self.per_replica_batch_size is None:
      raise ConfigError(
        "run has neither global_batch_size nor per_replica_batch_size; set one, for example "
        "run.global_batch_size = 128."
      )
    super().__post_init__()

  def on(self, replicas: int) -> int:
    """Returns the global batch size on this number of replicas."""
    return self.global_batch_size or replicas * (self.per_replica_batch_size or 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation(Group):
  """What an evaluation reads."""

  eval_batch_size: Annotated[
    int | None,
    "examples per evaluation batch; None uses the global batch size.",
    free("evaluates with it"),
    COUNT,
  ] = None
  eval_steps: Annotated[
    int | None,
    "evaluate at most so many batches of each evaluation set; None evaluates all.",
    free("evaluates so many batches"),
    COUNT,
  ] = None


def _above_zero(name: str, epochs: float) -> None:
  require_positive(name, epochs, unit="epochs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Length(Group):
  """Where a run ends: exactly one of both is set."""

  either: ClassVar = ("train_steps", "train_epochs")

  train_steps: Annotated[
    int | None,
    "the step at which training ends; or set `train_epochs`.",
    free("the run ends there"),
    COUNT,
  ] = None
  train_epochs: Annotated[
    float | None,
    "how often the run reads the training examples, instead of `train_steps`; the last step of an "
    "epoch that the batch size does not divide counts as one.",
    free("the run ends there"),
    Check(_above_zero),
  ] = None

  def steps(self, examples: int | None, batch_size: int) -> int:
    """Returns the step at which training ends.

    Args:
      examples: in the training source; None if it does not know.
      batch_size: the global one.

    Raises:
      ConfigError: not exactly one of both is set; or epochs of a source without an end.
    """
    if self.train_steps is not None and self.train_epochs is not None:
      raise ConfigError(
        f"received both run.train_steps={self.train_steps} and "
        f"run.train_epochs={self.train_epochs}; choose one."
      )
    if self.train_epochs is None:
      if self.train_steps is None:
        raise ConfigError("run has neither train_steps nor train_epochs; set one of them.")
      return self.train_steps
    if examples is None:
      raise ConfigError(
        f"run.train_epochs is {self.train_epochs}, but the training source has no number of "
        "examples; set run.train_steps instead."
      )
    return math.ceil(self.train_epochs * examples / batch_size - 1e-9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intervals(Group):
  """How often a run evaluates and saves."""

  steps_per_loop: Annotated[
    int,
    "steps in one call of the compiled loop; the host gets metrics after each call.",
    free(
      "loops end there; asked if an action changes what is learned: it fills a `ReplayBuffer`, "
      "or says so (`Action.changes_training`)"
    ),
    COUNT,
  ] = 100
  eval_every_steps: Annotated[
    int | None,
    "steps between evaluations; None evaluates once, at the end.",
    free("evaluates there; asked as `run.steps_per_loop` is"),
    COUNT,
  ] = None
  eval_timeout_s: Annotated[
    float | None,
    'seconds that "evaluate_continuously" waits for a new checkpoint, or for the run\'s assets '
    "before the first one; None waits without limit.",
    free("waits so long"),
  ] = None
  checkpoint_every_steps: Annotated[
    int,
    "a checkpoint is saved at each multiple of it, where a loop then ends, and at the last step.",
    free("saves there; asked as `run.steps_per_loop` is"),
    COUNT,
  ] = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cadence(Intervals):
  """When a run evaluates, saves and ends, at `train_steps`."""

  train_steps: int

  def next_evaluation(self, step: int) -> int:
    """Returns the step of the first evaluation after `step`."""
    every = self.eval_every_steps or self.train_steps
    return min((step // every + 1) * every, self.train_steps)

  def next_save(self, step: int) -> int:
    """Returns the step of the first periodic checkpoint after `step`."""
    return (step // self.checkpoint_every_steps + 1) * self.checkpoint_every_steps

  def evaluates_at(self, step: int) -> bool:
    """Returns whether an evaluation is due at `step`."""
    every = self.eval_every_steps or self.train_steps
    return step > 0 and (step % every == 0 or step >= self.train_steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hangs(Group):
  """What happens if a run makes no progress."""

  hang_timeout_s: Annotated[
    float | None,
    "seconds without progress after which a line says which worker is behind, and in what; None "
    "takes ten times the usual time of what it does, and at least a minute.",
    free("says it after so long"),
    SECONDS,
  ] = None
  end_if_hung: Annotated[
    bool,
    "after that line, the processes of the command line end with status 1.",
    free("ends then, or goes on waiting"),
  ] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numerics(Group):
  """What is set for the whole process."""

  seed: Annotated[
    int,
    "for initial weights, example order, dropout and augmentation.",
    asked(
      "the order of examples, augmentation and dropout are other ones from there on; the epoch "
      "that has begun reads some examples twice and leaves others out; initial weights stay"
    ),
    SEED,
  ] = 0
  precision: Annotated[
    Precision,
    "the dtype policy of Keras 3 and tf_keras.",
    asked("computes with it from there on"),
  ] = "float32"
  tf32: Annotated[
    bool | None,
    "whether GPUs of Ampere and later compute products and convolutions of float32 in TF32, with "
    "10 bits of mantissa; None keeps TensorFlow's choice, which is to do so.",
    asked("computes with it from there on"),
  ] = None
  deterministic: Annotated[
    bool,
    "bit-identical repeats (slower), by TensorFlow's op determinism.",
    free(COMPUTES),
  ] = False
  eager: Annotated[bool, "use no tf.function, for debugging.", free(COMPUTES)] = False


def _each_gpu_once(name: str, gpus: Sequence[int]) -> None:
  for index in gpus:
    require_integer(f"each of {name}", index, at_least=0)
  if len({*gpus}) != len(gpus):
    raise ConfigError(f"{name} is {[*gpus]}; list each GPU once.")


def _memory(name: str, memory: int | str) -> None:
  if not isinstance(memory, str):
    require_integer(name, memory, at_least=1)
  elif memory not in ("all", "grow"):
    raise unknown(name, memory, ["all", "grow", "a number of MiB"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpus(Group):
  """Which GPUs this process uses, and how much of the memory of each."""

  gpus: Annotated[
    Sequence[int] | None,
    "which GPUs this process uses, by their numbers among those that TensorFlow sees; None uses "
    "all, () none.",
    COMPUTES_THERE,
    Check(_each_gpu_once),
  ] = None
  gpu_memory: Annotated[
    GpuMemory,
    'what TensorFlow takes of the memory of each GPU: "all" at once, "grow" as it needs it, or '
    "at most so many MiB.",
    free("takes so much"),
    Check(_memory),
  ] = "all"
