"""Loopwright: training loops for TensorFlow that are yours to change and right on N replicas."""

from framework.actions import Action, BestCheckpoint, EarlyStopping, Export, StopOnNonFinite
from framework.configurables import register
from framework.errors import ConfigError
from framework.evaluator import Evaluator
from framework.inputs import ArraySource, Batch, ImageFolderSource, Source, StreamSource
from framework.reduction import Reduction
from framework.run import run
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
  "Source",
  "Step",
  "StopOnNonFinite",
  "StreamSource",
  "Task",
  "Trainer",
  "register",
  "run",
  "weighted_sum",
]
