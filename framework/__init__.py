"""Loopwright: training loops for TensorFlow that are yours to change and right on N replicas.

The whole of a run is `framework.run.run`, which a gin file configures; its parts are here.
"""

import importlib
from typing import TYPE_CHECKING, Any

from framework import lazy

if TYPE_CHECKING:
  from framework.actions import Action, BestCheckpoint, EarlyStopping, Export, StopOnNonFinite
  from framework.configurables import register
  from framework.errors import ConfigError
  from framework.evaluator import Evaluator
  from framework.inputs import Batch
  from framework.reduction import Reduction
  from framework.schedules import Schedule
  from framework.sources import ArraySource, ImageFolderSource, Source, StreamSource
  from framework.step import EvalStep, Step
  from framework.task import Loss, Task, weighted_sum
  from framework.trainer import Trainer

__all__ = [
  "Action",
  "ArraySource",
  "Batch",
  "BestCheckpoint",
  "ConfigError",
  "EarlyStopping",
  "EvalStep",
  "Evaluator",
  "Export",
  "ImageFolderSource",
  "Loss",
  "Reduction",
  "Schedule",
  "Source",
  "Step",
  "StopOnNonFinite",
  "StreamSource",
  "Task",
  "Trainer",
  "register",
  "weighted_sum",
]

_HOMES = {
  "actions": ("Action", "BestCheckpoint", "EarlyStopping", "Export", "StopOnNonFinite"),
  "configurables": ("register",),
  "errors": ("ConfigError",),
  "evaluator": ("Evaluator",),
  "inputs": ("Batch",),
  "reduction": ("Reduction",),
  "schedules": ("Schedule",),
  "sources": ("ArraySource", "ImageFolderSource", "Source", "StreamSource"),
  "step": ("EvalStep", "Step"),
  "task": ("Loss", "Task", "weighted_sum"),
  "trainer": ("Trainer",),
}

lazy.install()


def __getattr__(name: str) -> Any:
  """Imports a public name at its first use: a mistake in a flag need not wait for TensorFlow."""
  for home, names in _HOMES.items():
    if name in names:
      return getattr(importlib.import_module(f"framework.{home}"), name)
  raise AttributeError(f"module 'framework' has no attribute {name!r}")
