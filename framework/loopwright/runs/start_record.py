"""How a process begins with a run, for history.jsonl, and what the run has in use.

start = started(task=task, options=options, model_dir=folder, training=True, ...)
start.require_config()       before the model is built
start.require_data(examples(trainer, evaluator))
start.read_back(trainer)     after it
start.record(step=600)       before the first save

With a run that goes on it is a `GoingOn`, see resume_rules.py.
"""

from __future__ import annotations

import os
import uuid
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from loopwright import configurables, registry
from loopwright.evaluator import Evaluator
from loopwright.inputs.sources import check_source, main_source
from loopwright.optimizers import adapters
from loopwright.options.declaration import declared
from loopwright.options.groups import Cadence, Group
from loopwright.reporting.summary import optimizer_names
from loopwright.run_folder import history, layout
from loopwright.run_folder.checkpoint_files import list_checkpoints
from loopwright.task import Task
from loopwright.trainer import Trainer

SIZE = "global batch size"


class Start:
  """The beginning of a run; of one that goes on, `GoingOn`.

  Attributes:
    name: its id in history.jsonl.
    config: name -> value of what must stay if the run goes on.
    changes_task: whether the config of the task, or of what only it uses, differs from the process
      before.
    train_steps: the step at which training ends, once that is known.
  """

  changes_task, train_steps = False, 0

  def __init__(self, *, task: Task, options: Group, global_batch_size: int, model_dir: str) -> None:
    """Describes the config; `options` are those of `run` (host)."""
    self._task, self._options, self._model_dir = task, options, model_dir
    self.name = uuid.uuid4().hex
    self.config = {**values(options, free(options)), SIZE: str(global_batch_size)}
    self._data: Mapping[str, str] = {}
    self._in_use: Mapping[str, str] = {}
    self._recorded = False

  @property
  def everything(self) -> Mapping[str, str]:
    """Name -> value of everything that the run can reach."""
    return values(self._options, free=())

  def labels(self) -> Mapping[str, Any]:
    """Returns the arguments of `CheckpointManager` that tell checkpoints of other starts (host)."""
    return {"start": self.name}

  def require_config(self) -> None:
    """Raises a ConfigError if the config differs in what must not change, or is not accepted."""

  def require_data(self, data: Mapping[str, str]) -> None:
    """Raises a ConfigError if the data differ, unless they may and that is accepted (host).

    Args:
      data: of `examples`.
    """
    if vars(self._options)["actions"]:
      data = {**data, **registry.load("part", "of_actions")(self._options, self._task)}
    self._data = data

  def read_back(self, trainer: Trainer) -> list[str]:
    """Reads what is in force, for the record; returns lines for the user (host).

    Raises:
      ConfigError: a `Mixture` shares out otherwise what is consumed, or has too little of a part.
    """
    position, step = int(trainer.position.numpy()), int(trainer.global_step.numpy())
    steps = max(0, self.train_steps - step)
    mixtures = trainer.source().mixtures() if trainer.source else {}
    for name, (mixture, ratio) in mixtures.items():
      self._require_shares(name, mixture, position * ratio)
      mixture.require_enough((position + steps * trainer.global_batch_size) * ratio)
    compiled = {"compiled by XLA": trainer.compiled} if trainer.compiled else {}
    self._in_use = in_use(trainer) | compiled
    optimizers = trainer.parts.optimizers.values()
    lines = [line for each in optimizers if (line := each.moved_rate())]
    return lines + [f"XLA compiles {each}" for each in compiled.values()]

  def plan(self, trainer: Trainer, cadence: Cadence) -> None:
    """Says how far the run is to train, on which options of the trainer may depend (host)."""
    self.train_steps, trainer.planned = cadence.train_steps, cadence

  def _require_shares(self, name: str, mixture: Any, position: int) -> None:
    """Raises a ConfigError if a mixture shares out otherwise what is consumed."""

  def record(self, *, step: int) -> None:
    """Appends this start to history.jsonl, once (host)."""
    if self._recorded:
      return
    self._recorded = True
    history.append(
      self._model_dir, start=self.name, step=step, task=self._task, config=self.config,
      data=self._data, in_use=self._in_use,
      train_steps=self.train_steps,
    )  # fmt: skip


def started(*, training: bool, accept: bool, model_dir: str, **given: Any) -> Start:
  """Returns how this process begins with a run (host).

  Args:
    training: whether a checkpoint in `model_dir` will be trained on.
    accept: whether the user accepts changes.
    model_dir: the run folder, local.
    given: other arguments of `Start`.
  """
  if training and list_checkpoints(os.path.join(model_dir, layout.CHECKPOINTS)):
    going_on: Start = registry.load("part", "GoingOn")(accept=accept, model_dir=model_dir, **given)
    return going_on
  return Start(model_dir=model_dir, **given)


def free(options: Group) -> list[str]:
  """Returns the options that may change without a question."""
  found = declared(type(options)).items()
  return [name for name, each in found if each.may_change and each.may_change.may == "yes"]


def values(options: Group, free: Sequence[str]) -> dict[str, str]:
  """Returns name -> value of the config, or of a call of `run`, without its options `free`."""
  if configurables.bindings():
    return configurables.values_that_matter(free)
  bindable = {name for name, each in declared(type(options)).items() if not each.instead}
  return history.described({k: v for k, v in vars(options).items() if k in bindable - {*free}})


def examples(trainer: Trainer, evaluator: Evaluator | None) -> dict[str, str]:
  """Returns number and digest of the examples of each split, the same on all workers."""
  source = trainer.source() if trainer.source else None
  if source is not None:
    check_source(main_source(source))
  found = {} if source is None else source.described(trainer.global_batch_size)
  for name, each in (evaluator.sources if evaluator else {}).items():
    check_source(main_source(each))
    found[f"evaluation {name}".rstrip()] = each.fingerprint()
    if source is not None and evaluator is not None:
      one, other = main_source(source), main_source(each)
      if one.numbered != other.numbered or one.feature_kinds() != other.feature_kinds():
        where = f"source('eval')[{name!r}]" if name else "source('eval')"
        from loopwright.inputs.agreement import require_agreement

        require_agreement(one, other, where, evaluator.metric_names)
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


def experiment(trainer: Trainer) -> dict[str, str]:
  """Returns the labels of a trainer's checkpoints: restoring one needs the same."""
  task = type(trainer.task)
  return {
    "task": f"{task.__module__}.{task.__qualname__}",
    "optimizer": optimizer_names(trainer),
  }
