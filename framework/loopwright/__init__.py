"""Loopwright: custom training loops for TensorFlow, correct on any number of replicas.

    import loopwright as lw
    lw.run(task=lw.from_keras(model, x, y), train_steps=1000, global_batch_size=64, model_dir="m")

`run` performs a whole run, configured by its arguments or by a gin file. Its parts are exported
here.
"""

import importlib
from typing import TYPE_CHECKING, Any

from loopwright.host import lazy_keras

if TYPE_CHECKING:
  from loopwright.actions.base import Action, Run, StopTraining
  from loopwright.actions.best import BestCheckpoint, EarlyStopping
  from loopwright.actions.show import Show
  from loopwright.aliases import Batch
  from loopwright.configurables import register
  from loopwright.errors import ConfigError
  from loopwright.evaluator import Evaluator
  from loopwright.inputs.buckets import Buckets
  from loopwright.inputs.indexed import IndexedSource, TFRecordSource
  from loopwright.inputs.mixture import Mixture
  from loopwright.inputs.packed import Packed, attention_mask
  from loopwright.inputs.parts import Part, Sources, part, with_part
  from loopwright.inputs.replay import Draws, ReplayBuffer
  from loopwright.inputs.sources import ArraySource, ImageFolderSource, Source, StreamSource
  from loopwright.keras_task import from_keras
  from loopwright.metrics import Loss, PerExample, Sum, weighted_sum
  from loopwright.models.recomputation import recompute
  from loopwright.optimizers.schedules import Schedule
  from loopwright.reporting.board import Board
  from loopwright.running import run
  from loopwright.step import EvalStep, Step
  from loopwright.strategies.reduction import Reduction
  from loopwright.task import Task
  from loopwright.tools.exports.action import Export
  from loopwright.tools.forensics.action import StopOnNonFinite
  from loopwright.tools.forensics.spikes import Spikes
  from loopwright.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
  "Action",
  "ArraySource",
  "Batch",
  "BestCheckpoint",
  "Board",
  "Buckets",
  "ConfigError",
  "Draws",
  "EarlyStopping",
  "EvalStep",
  "Evaluator",
  "Export",
  "ImageFolderSource",
  "IndexedSource",
  "Loss",
  "Mixture",
  "Packed",
  "Part",
  "PerExample",
  "Reduction",
  "ReplayBuffer",
  "Run",
  "Schedule",
  "Show",
  "Source",
  "Sources",
  "Spikes",
  "Step",
  "StopOnNonFinite",
  "StopTraining",
  "StreamSource",
  "Sum",
  "TFRecordSource",
  "Task",
  "Trainer",
  "attention_mask",
  "from_keras",
  "part",
  "recompute",
  "register",
  "run",
  "weighted_sum",
  "with_part",
]

_HOMES = {
  "aliases": ("Batch",),
  "actions.base": ("Action", "Run", "StopTraining"),
  "actions.best": ("BestCheckpoint", "EarlyStopping"),
  "tools.exports.action": ("Export",),
  "tools.forensics.action": ("StopOnNonFinite",),
  "tools.forensics.spikes": ("Spikes",),
  "actions.show": ("Show",),
  "models.recomputation": ("recompute",),
  "configurables": ("register",),
  "errors": ("ConfigError",),
  "evaluator": ("Evaluator",),
  "inputs.buckets": ("Buckets",),
  "inputs.indexed": ("IndexedSource", "TFRecordSource"),
  "inputs.mixture": ("Mixture",),
  "inputs.packed": ("Packed", "attention_mask"),
  "inputs.parts": ("Part", "Sources", "part", "with_part"),
  "inputs.replay": ("Draws", "ReplayBuffer"),
  "inputs.sources": ("ArraySource", "ImageFolderSource", "Source", "StreamSource"),
  "keras_task": ("from_keras",),
  "metrics": ("Loss", "PerExample", "Sum", "weighted_sum"),
  "optimizers.schedules": ("Schedule",),
  "reporting.board": ("Board",),
  "running": ("run",),
  "step": ("EvalStep", "Step"),
  "strategies.reduction": ("Reduction",),
  "task": ("Task",),
  "trainer": ("Trainer",),
}

lazy_keras.install()


def __getattr__(name: str) -> Any:
  """Imports a public name at its first use: a wrong flag is reported before TensorFlow loads."""
  for home, names in _HOMES.items():
    if name in names:
      return getattr(importlib.import_module(f"loopwright.{home}"), name)
  raise AttributeError(f"module 'loopwright' has no attribute {name!r}")
