"""What a run that goes on may change: config and data must be those of history.jsonl's last line.

Also what only some runs need of it: what their actions change, the command to replay a step, and
whether the number of workers may vary.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from loopwright import configurables
from loopwright.actions.base import Action
from loopwright.configurables import changes as of_config
from loopwright.distribution import cluster
from loopwright.errors import ConfigError
from loopwright.host import redaction
from loopwright.host.children import SOURCE
from loopwright.inputs.fingerprint import BUCKETS, RATIO
from loopwright.models import models
from loopwright.options.declaration import Rule, declared, fixed
from loopwright.options.groups import Cadence, Group
from loopwright.run_folder import history, layout
from loopwright.run_folder.history import Values
from loopwright.runs.start_record import SIZE, Start, free, values
from loopwright.task import Task
from loopwright.trainer import Trainer

_LOOPS = ("steps_per_loop", "eval_every_steps", "checkpoint_every_steps")
"""Where loops end, which matters to an action that changes what is learned."""
_SHOWN = 3
_UNSET = "(unset)"
_MACRO = re.compile(r"%([\w./-]+)")
_WHY_BUCKETS = "the position in `Buckets` is counted in its batches"


class GoingOn(Start):
  """How this process goes on with a run that has a checkpoint.

  Attributes:
    accepted: what differs from the process before, with the user's consent.
  """

  def __init__(self, *, accept: bool, **given: Any) -> None:
    """Describes the config (host); `accept` says whether the user accepts changes."""
    super().__init__(**given)
    self._accept, self._declared = accept, declared(type(self._options))
    self.accepted: list[Change] = []

  def labels(self) -> Mapping[str, Any]:
    """Returns the arguments of `CheckpointManager` that tell checkpoints of other starts (host)."""
    known = None if self._accept else functools.partial(history.starts, self._model_dir)
    changed = listed(self.accepted)
    return {**super().labels(), "starts": known, "changed": changed, "accept": self._accept}

  @property
  def changes_task(self) -> bool:  # type: ignore[override]
    """Whether the config of the task, or of what only it uses, differs."""
    return any(
      self._rule(each.name) is None or each.name in ("task", "run.task") for each in self.accepted
    )

  def _rule(self, name: str) -> Rule | None:
    """Returns the rule of an option, of a config or of a call of `run`."""
    option = self._declared.get("global_batch_size" if name == SIZE else name.removeprefix("run."))
    return option.may_change if option else of_config.rule(name)

  def require_config(self) -> None:
    """Raises a ConfigError if the config differs in what must not change, or is not accepted."""
    self._require("config", self.config, self._rule)

  def require_data(self, data: Mapping[str, str]) -> None:
    """Raises a ConfigError if the data differ, unless they may and that is accepted (host)."""
    super().require_data(data)
    if BUCKETS in data and (found := [each for each in self.accepted if each.name == SIZE]):
      raise refusal(self._model_dir, found[0], _WHY_BUCKETS)
    self._require("data", self._data, _rule_of_data)

  def read_back(self, trainer: Trainer) -> list[str]:
    """Reads what is in force, for the record; returns lines for the user (host)."""
    return [*(f"goes on with {each}" for each in self.accepted), *super().read_back(trainer)]

  def plan(self, trainer: Trainer, cadence: Cadence) -> None:
    """As many steps are one program as in the process before, so numbers stay the same (host)."""
    self.train_steps = cadence.train_steps
    last = (history.records(self._model_dir) or [{}])[-1]
    before = last.get("in_use", {}).get("compiled by XLA", "")
    found = re.match(r"(\d+) steps", before)
    if found and trainer.parts.steps_per_program == "auto":
      trainer.use(steps_per_program=int(found[1]))

  def _require_shares(self, name: str, mixture: Any, position: int) -> None:
    before = {change.name: change.before for change in self.accepted}
    if name in before and before[name].startswith("["):
      mixture.shares.require_same_before(position, before[name])

  def _require(self, part: str, now: Values, rule: Callable[[str], Rule | None]) -> None:
    self.accepted += require_unchanged(self._model_dir, part, now, accept=self._accept, rule=rule)


def _rule_of_data(name: str) -> Rule | None:
  if name == BUCKETS:
    return fixed(_WHY_BUCKETS)
  if name.endswith(RATIO):
    return fixed("the position in that part is counted with it")
  return None


class Change(NamedTuple):
  """What differs from the last start."""

  name: str
  now: str
  before: str

  def __str__(self) -> str:
    """Returns a phrase such as "run.seed = 1, which was 0"."""
    return f"{self.name} = {self.now}, which was {self.before}"


def changes(model_dir: str, part: str, values: Values) -> list[Change]:
  """Returns what differs from the last start (host).

  Args:
    part: "config"; or "data", of which only what both starts have is compared: a run that only
      trains reads no evaluation examples.
    values: name -> value, as text; a macro counts where it is used.
  """
  record = (history.records(model_dir) or [{}])[-1]
  before = record.get(part)
  if not isinstance(before, Mapping):
    return []  # the folder is new
  before = _without_macros(before)
  values = _without_macros(values)
  names = [n for n in {*values, *before} if not redaction.same(before.get(n), values.get(n))]
  in_both = values.keys() & before.keys()
  if part == "data":
    names = [name for name in names if name in in_both]
  names.sort(key=lambda name: (name not in in_both, name not in values, name))
  return [Change(n, values.get(n, _UNSET), before.get(n, _UNSET)) for n in names]


def require_unchanged(
  model_dir: str, part: str, values: Values, *, accept: bool, rule: Callable[[str], Any]
) -> list[Change]:
  """Returns what differs from the last start, which the user accepts (host).

  Args:
    rule: returns the `Rule` of a name, or None.

  Raises:
    ConfigError: something differs that must not, or the user does not accept it.
  """
  found = []
  for each in changes(model_dir, part, values):
    of = rule(each.name)
    if of is None or of.may != "yes":
      found.append(each)
    if of is not None and of.may == "no" and _UNSET not in (each.now, each.before):
      raise refusal(model_dir, each, of.says)
  if found and not accept:
    raise ConfigError(
      f"the run in {model_dir!r} would go on with {listed(found)}: choose another --model_dir for "
      "another run, or add --accept_changes to go on with the new values."
    )
  return found


def refusal(model_dir: str, change: Change, why: str) -> ConfigError:
  """Returns the error for a change that is not possible."""
  return ConfigError(
    f"the run in {model_dir!r} cannot go on with {change}: {why}; set it back, or choose another "
    "--model_dir for another run."
  )


def listed(found: Sequence[Change]) -> str:
  """Returns the first changes in one line."""
  more = f" (and {len(found) - _SHOWN} more)" if len(found) > _SHOWN else ""
  return f"{'; '.join(map(str, found[:_SHOWN]))}{more}"


def _without_macros(values: Values) -> Values:
  """Replaces macros where they are used; those that are used are no values of their own."""
  used = {name for value in values.values() for name in _MACRO.findall(value) if name in values}
  for _ in used:  # a macro may be used in another one
    known = values
    values = {
      name: _MACRO.sub(lambda found: known.get(found[1], found[0]), value)  # noqa: B023
      for name, value in known.items()
    }
  return {name: value for name, value in values.items() if name not in used}


def of_actions(options: Group, task: Task) -> dict[str, str]:
  """Returns name -> value of what matters because an action changes what the run learns (host).

  These are its options and, unless it has `every_steps`, where loops end, after which it acts.
  Under a model with a `ReplayBuffer`, each action after training loops counts that is not the
  framework's.
  """
  given, may = vars(options), free(options)
  collects = any(hasattr(part, "collects_examples") for part in models.parts(task.model))
  acting = [
    action
    for action in given["actions"]
    if action.changes_training or (collects and "train" in action.splits() and not _is_ours(action))
  ]
  loops = _LOOPS if any(action.every_steps is None for action in acting) else ()
  if not acting or not configurables.bindings():
    return history.described({name: given[name] for name in loops})
  kinds, kept = set(map(type, acting)), [name for name in may if name not in loops]
  found = configurables.values_that_matter(kept, lambda target: target in kinds)
  return {name: value for name, value in found.items() if name not in values(options, may)}


def _is_ours(action: Action) -> bool:
  return type(action).__module__.startswith(("loopwright.actions.", "loopwright.tools."))


def require_any_size(trainer: Trainer, per_replica_batch_size: int | None) -> None:
  """Raises a ConfigError if the number of workers, which may vary, matters (host)."""
  workers = os.environ[cluster.WORKERS]
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
  config = os.path.join(model_dir, layout.CONFIG)
  config = f"--gin_file={config}" if "=" in config else config  # no binding
  flags = [config, f"--model_dir={model_dir}"]
  if trainer.cluster.is_local:
    flags.append(f"--local_workers={trainer.cluster.size}")
  return f"{path}{shlex.join(['loopwright', 'replay', *flags])}"
