"""Options of `loopwright.run` in groups that travel whole to what uses them.

    cadence = taken(Cadence, {"train_steps": 1000, "seed": 7, ...})

Each is checked when it is made. The names of the attributes are those of run's arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args

from loopwright.errors import ConfigError, require_integer, require_positive, unknown

Precision = Literal["float32", "mixed_float16", "mixed_bfloat16"]
GpuMemory = Annotated[int, "a number of MiB"] | Literal["all", "grow"]
PRECISIONS = get_args(Precision)
Group = TypeVar("Group")


def names_of(group: type) -> list[str]:
  """Returns the options of a group."""
  return [field.name for field in dataclasses.fields(group)]


def taken(group: type[Group], values: Mapping[str, Any], **more: Any) -> Group:
  """Returns a group of those of `values` that are its options, and of `more`."""
  return group(**{name: values[name] for name in names_of(group) if name in values} | more)


def facts(*groups: Any) -> dict[str, Any]:
  """Returns "run.<name>" -> value of each option, as the workers of a cluster compare them."""
  return {f"run.{name}": value for each in groups for name, value in vars(each).items()}


def _require_counts(group: Any, *names: str) -> None:
  """Raises a ConfigError unless the options are whole numbers of at least 1, or None."""
  for name in names:
    if getattr(group, name) is not None:
      require_integer(f"run.{name}", getattr(group, name), at_least=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSize:
  """How many examples an update has: exactly one of both is set."""

  global_batch_size: int | None = None
  per_replica_batch_size: int | None = None

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
    _require_counts(self, "global_batch_size", "per_replica_batch_size")

  def on(self, replicas: int) -> int:
    """Returns the global batch size on this number of replicas."""
    return self.global_batch_size or replicas * (self.per_replica_batch_size or 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
  """What an evaluation reads.

  Attributes:
    eval_batch_size: examples per evaluation batch; None uses the global batch size.
    eval_steps: the most batches of each evaluation set; None takes all.
  """

  eval_batch_size: int | None = None
  eval_steps: int | None = None

  def __post_init__(self) -> None:
    """Raises a ConfigError for what is not a count."""
    _require_counts(self, "eval_batch_size", "eval_steps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cadence:
  """When a run evaluates, saves and ends."""

  train_steps: int
  steps_per_loop: int
  checkpoint_every_steps: int
  keep_checkpoints: int
  eval_every_steps: int | None = None
  eval_timeout_s: float | None = None
  hang_timeout_s: float | None = None
  end_if_hung: bool = False

  def __post_init__(self) -> None:
    """Raises a ConfigError for what is not a count, or no time."""
    others = ("eval_timeout_s", "hang_timeout_s", "end_if_hung")
    _require_counts(self, *(name for name in names_of(Cadence) if name not in others))
    if self.hang_timeout_s is not None:
      require_positive("run.hang_timeout_s", self.hang_timeout_s, unit="seconds")

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
class Numerics:
  """What is set for the whole process."""

  seed: int = 0
  precision: str = "float32"
  tf32: bool | None = None
  deterministic: bool = False
  eager: bool = False

  def __post_init__(self) -> None:
    """Raises a ConfigError for an unknown precision."""
    if self.precision not in PRECISIONS:
      raise unknown("run.precision", self.precision, PRECISIONS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpus:
  """Which GPUs this process uses, and how much of the memory of each."""

  gpus: Sequence[int] | None = None
  gpu_memory: GpuMemory = "all"

  def __post_init__(self) -> None:
    """Raises a ConfigError for what is not a number of a GPU, or no amount of memory."""
    for index in self.gpus or ():
      require_integer("each of run.gpus", index, at_least=0)
    if len(set(self.gpus or ())) != len(self.gpus or ()):
      raise ConfigError(f"run.gpus is {[*(self.gpus or ())]}; list each GPU once.")
    if isinstance(self.gpu_memory, str) and self.gpu_memory not in ("all", "grow"):
      raise unknown("run.gpu_memory", self.gpu_memory, ["all", "grow", "a number of MiB"])
    if not isinstance(self.gpu_memory, str):
      require_integer("run.gpu_memory", self.gpu_memory, at_least=1)
