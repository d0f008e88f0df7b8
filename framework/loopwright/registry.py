"""Every name that a config, a command line or a plug-in can say, and the object behind it.

    load("action", "Profile")       imports actions/profiling.py now, and no other module
    names("action")                 what there is, without an import
    load("check", "lenghts")        ConfigError: unknown check 'lenghts'... Did you mean 'lengths'?

The framework imports nothing optional: what a run may do without is loaded by its name. Packages of
others add names by entry points: of the group "loopwright" for configs, of "loopwright.command",
"loopwright.check" and so on for the other kinds. docs/configuration.md
shows how.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from loopwright.errors import ConfigError, unknown

Kind = Literal[
  "public",
  "part",
  "placement",
  "command",
  "tool",
  "check",
  "root",
  "strategy",
  "optimizer",
  "source",
  "action",
  "tracker",
]
CONFIGURABLE: tuple[Kind, ...] = ("root", "strategy", "optimizer", "source", "action", "tracker")
"""The kinds that a config can name."""

TABLE: Mapping[Kind, Mapping[str, str]] = {
  "public": {
    "loopwright.actions.base": "Action Run StopTraining",
    "loopwright.actions.best": "BestCheckpoint EarlyStopping",
    "loopwright.actions.keras_callback": "KerasCallback",
    "loopwright.actions.show": "Show",
    "loopwright.actions.tensorboard": "TensorBoard",
    "loopwright.graphs.aliases": "Batch",
    "loopwright.configurables": "register",
    "loopwright.errors": "ConfigError",
    "loopwright.engine.eval_step": "EvalStep",
    "loopwright.evaluator": "Evaluator",
    "loopwright.runs.from_config": "load",
    "loopwright.inputs.array_files": "load_arrays read_idx",
    "loopwright.inputs.buckets": "Buckets",
    "loopwright.inputs.image_folder": "ImageFolderSource",
    "loopwright.inputs.indexed": "IndexedSource TFRecordSource",
    "loopwright.inputs.mixture": "Mixture",
    "loopwright.inputs.packed": "Packed",
    "loopwright.inputs.parts": "Part Sources part with_part",
    "loopwright.inputs.replay": "Draws ReplayBuffer",
    "loopwright.inputs.sources": "ArraySource Source",
    "loopwright.inputs.streams": "StreamSource",
    "loopwright.keras_task": "from_keras",
    "loopwright.layers.attention": "attention attention_mask",
    "loopwright.metrics": "Loss PerExample Sum weighted_sum",
    "loopwright.models.recomputation": "recompute",
    "loopwright.optimizers.schedule": "Schedule",
    "loopwright.reporting.board": "Board",
    "loopwright.runs.runner": "run",
    "loopwright.step": "Step",
    "loopwright.distribution.reduction": "Reduction",
    "loopwright.task": "Task",
    "loopwright.tools.exports.action": "Export",
    "loopwright.tools.forensics.action": "StopOnNonFinite",
    "loopwright.trainer": "Trainer",
  },
  "command": {
    "loopwright.commands.launching": "train=run evaluate=run export=run replay=run verify=run "
    "tune=run check=run",
    "loopwright.commands.sweep": "sweep=run",
    "loopwright.commands.repeat": "repeat=run",
    "loopwright.commands.options": "options=run",
    "loopwright.tools.runs.ls": "ls=run",
    "loopwright.tools.report": "report=run",
    "loopwright.tools.runs.diff": "diff=run",
    "loopwright.monitoring.goodput": "goodput=run",
    "loopwright.tools.predict": "predict=run",
    "loopwright.commands.new": "new=run",
  },
  "part": {
    "loopwright.configurables.remedies": "no_gin_file own_modules unreadable_line where_it_may_be",
    "loopwright.runs.resume_rules": "GoingOn of_actions",
    "loopwright.optimizers.schedules": "constant linear_warmup cosine_decay exponential_decay "
    "piecewise_constant by_epoch scaled",
    "loopwright.run_folder.fitting": "Fitting",
    "loopwright.run_folder.remote": "Remote local_copy",
  },
  "placement": {
    "loopwright.strategies.local": "_DefaultDistributionStrategy=Default "
    "OneDeviceStrategy=OneDevice",
    "loopwright.strategies.mirrored": "MirroredStrategy=Mirrored "
    "CentralStorageStrategy=CentralStorage",
    "loopwright.strategies.mesh.strategy": "ModelParallelStrategy=Mesh",
    "loopwright.strategies.parameter_server.strategy": "ParameterServerStrategyV2=ParameterServer",
    "loopwright.strategies.tpu": "TPUStrategyV2=Tpu",
    "loopwright.strategies.workers.strategy": "CollectiveAllReduceStrategy=Workers",
  },
  "tool": {
    "loopwright.tools.exports.export": "export",
    "loopwright.tools.exports.one_file": "export_file",
    "loopwright.tools.forensics.examine": "examine",
    "loopwright.tools.ledger.recorder": "Recorder",
    "loopwright.tools.tune": "tune",
  },
  "check": {
    f"loopwright.tools.verify.checks.{name}": f"{name}=check"
    for name in (
      *("inputs", "replicas", "mesh", "order", "evaluation", "lengths", "sequences", "gradients"),
      *("randomness", "restore", "compilation", "precision", "learning"),
    )
  },
  "root": {
    "loopwright.runs.runner": "run",
    "loopwright.trainer": "Trainer",
    "loopwright.evaluator": "Evaluator",
    "loopwright.distribution.reduction": "Reduction",
    "loopwright.run_folder.warm_start": "WarmStart",
  },
  "strategy": {
    "loopwright.strategies.local": "auto default one_device",
    "loopwright.strategies.mirrored": "mirrored central_storage",
    "loopwright.strategies.mesh.strategy": "model_parallel",
    "loopwright.strategies.parameter_server.strategy": "parameter_server",
    "loopwright.strategies.tpu": "tpu",
    "loopwright.strategies.workers.strategy": "multi_worker_mirrored",
    "loopwright.strategies.workers.resolvers": "tf_config slurm",
  },
  "optimizer": {
    "loopwright.optimizers.loss_scale": "none fixed dynamic",
    "loopwright.optimizers.groups": "without_decay grouped",
    "loopwright.optimizers.ema": "ema_warmup weight_averaging",
    "loopwright.optimizers.schedules": "constant linear_warmup cosine_decay exponential_decay "
    "piecewise_constant by_epoch scale_by_replicas times_replicas",
  },
  "source": {
    "loopwright.inputs.mixture": "Mixture",
    "loopwright.inputs.array_files": "load_arrays",
    "loopwright.inputs.image_folder": "ImageFolderSource",
    "loopwright.inputs.sources": "ArraySource",
    "loopwright.inputs.streams": "StreamSource",
  },
  "action": {
    "loopwright.actions.best": "BestCheckpoint EarlyStopping",
    "loopwright.actions.keras_callback": "KerasCallback",
    "loopwright.actions.model_flops": "ModelFlops",
    "loopwright.actions.profiling": "Profile",
    "loopwright.actions.show": "Show",
    "loopwright.actions.tensorboard": "TensorBoard",
    "loopwright.tools.exports.action": "Export",
    "loopwright.tools.forensics.action": "StopOnNonFinite",
  },
  "tracker": {
    "loopwright.tools.trackers.mlflow": "MLflow[mlflow]",
    "loopwright.tools.trackers.wandb": "WandB[wandb]",
  },
}
"""Kind -> module -> names of it: "name", "name=attribute" if they differ, "name[extra]".

A "part" is what a run loads when an option, its data or its devices ask for it; a "placement" is
that of a class of TensorFlow's strategies."""

_CLOSED: tuple[Kind, ...] = ("public", "part", "placement", "tool")
"""The kinds that other packages add nothing to."""

_NAME = re.compile(r"(?P<name>\w+)(?:=(?P<attribute>\w+))?(?:\[(?P<extra>\w+)\])?")


class Entry(NamedTuple):
  """One name.

  Attributes:
    name: what the config, the command line or a script says.
    module: what `load` imports.
    attribute: of the module.
    extra: of pip, which brings the packages that it needs; "" if it needs none.
  """

  name: str
  module: str
  attribute: str
  extra: str = ""

  @property
  def complete(self) -> str:
    """The name that a config can write in full."""
    return f"{self.module}.{self.name}"

  def load(self) -> Any:
    """Imports the module; returns the object.

    Raises:
      ConfigError: the module, or a package that it needs, is not installed.
      AttributeError: the module lacks the name.
    """
    try:
      module = importlib.import_module(self.module)
    except ModuleNotFoundError as error:
      remedy = f"run: pip install 'loopwright[{self.extra}]'" if self.extra else "install it"
      raise ConfigError(
        f"{self.name} needs the module {error.name!r}, which is not installed; {remedy}."
      ) from error
    return getattr(module, self.attribute)


def entries(*kinds: Kind) -> Iterator[Entry]:
  """Yields what the kinds have, in the order of the table; then what other packages add."""
  for kind in kinds:
    for module, names in TABLE.get(kind, {}).items():
      for found in _NAME.finditer(names):
        name, attribute, extra = found.groups()
        yield Entry(name, module, attribute or name, extra or "")
  groups = {kind: "loopwright" if kind in CONFIGURABLE else f"loopwright.{kind}" for kind in kinds}
  for group in dict.fromkeys(groups[kind] for kind in kinds if kind not in _CLOSED):
    yield from _plugged(group)


def names(*kinds: Kind) -> tuple[str, ...]:
  """Returns the names of kinds; imports nothing."""
  return tuple(entry.name for entry in entries(*kinds))


def find(kind: Kind, name: str) -> Entry:
  """Returns what stands behind a name.

  Raises:
    ConfigError: the kind has no such name; the line suggests the nearest.
  """
  for entry in entries(kind):
    if entry.name == name:
      return entry
  raise unknown(kind, name, names(kind))


def load(kind: Kind, name: str) -> Any:
  """Returns the object behind a name; see `find` and `Entry.load` for errors."""
  return find(kind, name).load()


@functools.cache
def _plugged(group: str) -> tuple[Entry, ...]:
  """Returns the names that installed packages add; reads their metadata once."""
  from importlib import metadata  # takes a while, and most commands name nothing of others

  found = metadata.entry_points(group=group)
  return tuple(Entry(each.name, each.module, each.attr or each.name) for each in found)
