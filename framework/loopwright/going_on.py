"""What a run that goes on may change, the record of how each process began, the command to replay.

start = Start(task=task, options=options, model_dir=folder, training=True, accept=False)
start.require_config()       before the model is built
start.require_data(examples(trainer, evaluator))
start.compare(trainer)       before a checkpoint is restored
start.read_back(trainer)     after it
start.record(step=600)       before the first save
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
import uuid
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from loopwright import configurables
from loopwright.actions.base import Action
from loopwright.configurables import changes
from loopwright.declaration import Rule, declared, fixed
from loopwright.errors import ConfigError
from loopwright.evaluator import Evaluator
from loopwright.host.children import SOURCE
from loopwright.inputs.fingerprint import BUCKETS, RATIO, described, fingerprint, mixtures
from loopwright.models import models
from loopwright.optimizers import adapters
from loopwright.options import Group
from loopwright.reporting.summary import optimizer_names
from loopwright.run_folder import history, initial_values, layout
from loopwright.run_folder.checkpoint_files import list_checkpoints
from loopwright.run_folder.history import Change
from loopwright.strategies import cluster
from loopwright.task import Task
from loopwright.trainer import Trainer

SIZE = "global batch size"
_LOOPS = ("steps_per_loop", "eval_every_steps", "checkpoint_every_steps")
"""Where loops end, which matters to an action that changes what is learned."""


class Start:
  """How this process goes on with a run, or begins one.

  Attributes:
    name: its id in history.jsonl.
    accepted: what differs from the process before, with the user's consent.
  """

  def __init__(
    self,
    *,
    task: Task,
    options: Group,
    global_batch_size: int,
    model_dir: str,
    training: bool,
    accept: bool,
  ) -> None:
    """Describes the config (host).

    Args:
      options: those of `run`.
      training: whether a checkpoint in `model_dir` will be trained on.
      accept: whether the user accepts changes.
    """
    self._task, self._model_dir, self._accept = task, model_dir, accept
    self._goes_on = training and bool(list_checkpoints(os.path.join(model_dir, layout.CHECKPOINTS)))
    self._options, self.name = options, uuid.uuid4().hex
    self._declared = declared(type(options))
    self.config = {**values(options, _free(options)), SIZE: str(global_batch_size)}
    self.accepted: list[Change] = []
    self._data: Mapping[str, str] = {}
    self._in_use: Mapping[str, str] = {}
    self._began: initial_values.Values | None = None
    self._recorded = False

  @property
  def everything(self) -> Mapping[str, str]:
    """Name -> value of everything that the run can reach."""
    return values(self._options, free=())

  def labels(self) -> Mapping[str, Any]:
    """Returns the arguments of `CheckpointManager` that tell checkpoints of other starts (host)."""
    strict = self._goes_on and not self._accept
    return {
      "start": self.name,
      "starts": functools.partial(history.starts, self._model_dir) if strict else None,
      "changed": history.listed(self.accepted),
    }

  @property
  def changes_task(self) -> bool:
    """Whether the config of the task, or of what only it uses, differs from the process before."""
    return any(
      self._rule(each.name) is None or each.name in ("task", "run.task") for each in self.accepted
    )

  def _rule(self, name: str) -> Rule | None:
    """Returns the rule of an option, of a config or of a call of `run`."""
    option = self._declared.get("global_batch_size" if name == SIZE else name.removeprefix("run."))
    return option.may_change if option else changes.rule(name)

  def require_config(self) -> None:
    """Raises a ConfigError if the config differs in what must not change, or is not accepted."""
    self._require("config", self.config, self._rule)

  def require_data(self, data: Mapping[str, str]) -> None:
    """Raises a ConfigError if the data differ, unless they may and that is accepted (host).

    Args:
      data: of `examples`.
    """
    self._data = data = {**data, **of_actions(self._options, self._task)}
    if BUCKETS in data and (found := [each for each in self.accepted if each.name == SIZE]):
      raise history.refusal(self._model_dir, found[0], _WHY_BUCKETS)
    self._require("data", data, _rule_of_data)

  def compare(self, trainer: Trainer) -> None:
    """Raises a ConfigError if an accepted change is of a value that a restore overrides (host)."""
    if not self._goes_on:
      self._began = initial_values.measured(trainer)
      return
    began = history.began(self._model_dir) if self.accepted else {}
    other_seed = any(each.name in ("seed", "run.seed") for each in self.accepted)
    if names := initial_values.differences(trainer, began, other_seed=other_seed):
      more = f" and {len(names) - 1} more" if len(names) > 1 else ""
      raise ConfigError(
        f"the run in {self._model_dir!r} would go on with {history.listed(self.accepted)}, but "
        f"that changes the first value of {names[0]!r}{more}, and the checkpoint has the value "
        "in force: set it back, or choose another --model_dir, with run.warm_start if it is to "
        "begin with the weights of this run."
      )

  def read_back(self, trainer: Trainer) -> list[str]:
    """Reads what is in force, for the record; returns lines for the user (host).

    Raises:
      ConfigError: a `Mixture` shares out otherwise what is consumed, or has too little of a part.
    """
    self._require_shares(trainer)
    self._in_use = in_use(trainer)
    lines = [f"goes on with {each}" for each in self.accepted]
    optimizers = trainer.parts.optimizers.values()
    return [*lines, *(line for each in optimizers if (line := each.moved_rate()))]

  def _require_shares(self, trainer: Trainer) -> None:
    position, step = int(trainer.position.numpy()), int(trainer.global_step.numpy())
    steps = max(0, vars(self._options)["train_steps"] - step)
    before = {change.name: change.before for change in self.accepted}
    for name, (mixture, ratio) in mixtures(trainer.source() if trainer.source else None).items():
      if name in before and before[name].startswith("["):
        mixture.shares.require_same_before(position * ratio, before[name])
      mixture.require_enough((position + steps * trainer.global_batch_size) * ratio)

  def record(self, *, step: int) -> None:
    """Appends this start to history.jsonl, once (host)."""
    if self._recorded:
      return
    self._recorded = True
    history.append(
      self._model_dir, start=self.name, step=step, task=self._task, config=self.config,
      data=self._data, in_use=self._in_use, began=self._began,
    )  # fmt: skip

  def _require(self, part: str, now: Mapping[str, str], rule: Any) -> None:
    if self._goes_on:
      self.accepted += history.require_unchanged(
        self._model_dir, part, now, accept=self._accept, rule=rule
      )


_WHY_BUCKETS = "the position in `Buckets` is counted in its batches"


def _rule_of_data(name: str) -> Rule | None:
  if name == BUCKETS:
    return fixed(_WHY_BUCKETS)
  if name.endswith(RATIO):
    return fixed("the position in that part is counted with it")
  return None


def _free(options: Group) -> list[str]:
  """Returns the options that may change without a question."""
  found = declared(type(options)).items()
  return [name for name, each in found if each.may_change and each.may_change.may == "yes"]


def values(options: Group, free: Sequence[str]) -> dict[str, str]:
  """Returns name -> value of the config, or of a call of `run`, without its options `free`."""
  if configurables.bindings():
    return configurables.values_that_matter(free)
  bindable = {name for name, each in declared(type(options)).items() if not each.instead}
  return history.described({k: v for k, v in vars(options).items() if k in bindable - {*free}})


def of_actions(options: Group, task: Task) -> dict[str, str]:
  """Returns name -> value of what matters because an action changes what the run learns (host).

  These are its options and, unless it has `every_steps`, where loops end, after which it acts.
  Under a model with a `ReplayBuffer`, each action after training loops counts that is not the
  framework's.
  """
  given, free = vars(options), _free(options)
  collects = any(hasattr(part, "collects_examples") for part in models.parts(task.model))
  acting = [
    action
    for action in given["actions"]
    if action.changes_training or (collects and "train" in action.splits() and not _is_ours(action))
  ]
  loops = _LOOPS if any(action.every_steps is None for action in acting) else ()
  if not acting or not configurables.bindings():
    return history.described({name: given[name] for name in loops})
  kinds, kept = set(map(type, acting)), [name for name in free if name not in loops]
  found = configurables.values_that_matter(kept, lambda target: target in kinds)
  return {name: value for name, value in found.items() if name not in values(options, free)}


def _is_ours(action: Action) -> bool:
  return type(action).__module__.startswith(("loopwright.actions.", "loopwright.tools."))


def examples(trainer: Trainer, evaluator: Evaluator | None) -> dict[str, str]:
  """Returns number and digest of the examples of each split, the same on all workers."""
  source = trainer.source() if trainer.source else None
  found = {} if source is None else described(source, trainer.global_batch_size)
  for name, each in (evaluator.sources if evaluator else {}).items():
    found[f"evaluation {name}".rstrip()] = fingerprint(each)
  for split, text in found.items():
    trainer.cluster.require_same(
      f"{split} examples ({text})", zlib.crc32(text.encode()), "give all workers the same data."
    )
  return found


def in_use(trainer: Trainer) -> dict[str, str]:
  """Returns name -> value of what an update uses, read from what uses it (host)."""
  parts = trainer.parts
  found = {
    f"{adapters.prefix(name)}{setting}": value
    for name, optimizer in parts.optimizers.items()
    for setting, value in optimizer.settings().items()
  }
  own: Sequence[tuple[str, Any]] = (
    ("global batch size", parts.global_batch_size),
    ("clip_norm", parts.clip_norm),
    ("clip_value", parts.clip_value),
    ("ema_decay", parts.ema.settings() if parts.ema else None),
    ("accumulation_steps", parts.accumulation_steps),
    ("seed", parts.seed),
  )
  found |= {name: repr(value) for name, value in own if value is not None}
  if trainer.cluster.peers:
    found["workers"] = str(trainer.cluster.size)
  return {**found, "loss scale": parts.loss_scale.describe()}


def require_any_size(trainer: Trainer, *, per_replica_batch_size: int | None) -> None:
  """Raises a ConfigError if the number of workers may vary, but matters (host)."""
  if (workers := os.environ.get(cluster.WORKERS)) is None:
    return
  if per_replica_batch_size is not None:
    what = f"run.per_replica_batch_size = {per_replica_batch_size} is part of the update"
    raise _varies(workers, what, "set run.global_batch_size instead")
  for layer in models.locally_normalised(trainer.task.model):
    what = f"the batch normalisation {layer.name!r} averages over each replica's own rows"
    raise _varies(workers, what, "set its synchronized=True")


def _varies(workers: str, what: str, remedy: str) -> ConfigError:
  return ConfigError(
    f"the number of workers may vary ({workers}), but {what}, which would change with it: "
    f"{remedy}, or give one number of workers."
  )


def replay_command(model_dir: str, trainer: Trainer) -> str:
  """Returns a shell line for this working directory, or a Python call if no gin was used."""
  if not configurables.bindings():
    return f"run(mode='replay', model_dir={model_dir!r}, ...) with the same arguments"
  module = type(trainer.task).__module__
  file = os.path.abspath(sys.modules[module].__file__ or "")
  folder = file.rsplit(os.sep, module.count(".") + 1)[0]  # must be importable in the new process
  found = folder in (os.getcwd(), str(SOURCE), str(configurables.REPOSITORY)) or folder.startswith(
    sys.prefix
  )
  path = "" if found else f"PYTHONPATH={shlex.quote(folder)} "
  launch = ["python", os.path.relpath(configurables.REPOSITORY / "launch.py")]
  if configurables.SHIPPED != configurables.REPOSITORY:  # installed as a package
    launch = ["loopwright"]
  config = os.path.join(model_dir, layout.CONFIG)
  flags = [f"--gin_file={config}", f"--model_dir={model_dir}", "--mode=replay"]
  if trainer.cluster.is_local:
    flags.append(f"--local_workers={trainer.cluster.size}")
  return f"{path}{shlex.join([*launch, *flags])}"


def experiment(trainer: Trainer) -> dict[str, str]:
  """Returns the labels of a trainer's checkpoints: restoring one needs the same."""
  task = type(trainer.task)
  return {
    "task": f"{task.__module__}.{task.__qualname__}",
    "optimizer": optimizer_names(trainer),
  }
