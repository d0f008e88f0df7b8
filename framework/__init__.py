"""Loopwright: custom training loops for TensorFlow, correct on any number of replicas.

`framework.run.run` performs a whole run, configured by a gin file. Its parts are exported here.
"""

import importlib
from typing import TYPE_CHECKING, Any

from framework.host import lazy_keras

if TYPE_CHECKING:
  from framework.actions.base import Action, Run, StopTraining
  from framework.actions.best import BestCheckpoint, EarlyStopping
  from framework.actions.show import Show
  from framework.configurables import register
  from framework.errors import ConfigError
  from framework.evaluator import Evaluator
  from framework.inputs.buckets import Buckets
  from framework.inputs.indexed import IndexedSource, TFRecordSource
  from framework.inputs.mixture import Mixture
  from framework.inputs.packed import Packed, attention_mask
  from framework.inputs.parts import Part, Sources, part, with_part
  from framework.inputs.replay import Draws, ReplayBuffer
  from framework.inputs.sources import ArraySource, ImageFolderSource, Source, StreamSource
  from framework.keras_task import from_keras
  from framework.metrics import Loss, PerExample, Sum, weighted_sum
  from framework.models.recomputation import recompute
  from framework.optimizers.schedules import Schedule
  from framework.reporting.board import Board
  from framework.step import EvalStep, Step
  from framework.strategies.reduction import Reduction
  from framework.task import Task
  from framework.tools.exports.action import Export
  from framework.tools.forensics.action import StopOnNonFinite
  from framework.tools.forensics.spikes import Spikes
  from framework.trainer import Trainer
  from framework.types import Batch

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
  "weighted_sum",
  "with_part",
]

_HOMES = {
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
  "step": ("EvalStep", "Step"),
  "strategies.reduction": ("Reduction",),
  "task": ("Task",),
  "trainer": ("Trainer",),
  "types": ("Batch",),
}

lazy_keras.install()


def __getattr__(name: str) -> Any:
  """Imports a public name at its first use: a wrong flag is reported before TensorFlow loads."""
  for home, names in _HOMES.items():
    if name in names:
      return getattr(importlib.import_module(f"framework.{home}"), name)
  raise AttributeError(f"module 'framework' has no attribute {name!r}")
