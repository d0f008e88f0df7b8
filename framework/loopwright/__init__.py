"""Loopwright: custom training loops for TensorFlow, correct on any number of replicas.

    import loopwright as lw
    task = lw.from_keras(model, x, y, validation_data=(x_test, y_test))
    lw.run(task=task, train_steps=1000, global_batch_size=64, model_dir="runs/m")

`run` performs a whole run, configured by its arguments or by a gin file. Its parts are exported
here.
"""

from typing import TYPE_CHECKING, Any

from loopwright import registry

if TYPE_CHECKING:
  from loopwright.actions.base import Action as Action
  from loopwright.actions.base import Run as Run
  from loopwright.actions.base import StopTraining as StopTraining
  from loopwright.actions.best import BestCheckpoint as BestCheckpoint
  from loopwright.actions.best import EarlyStopping as EarlyStopping
  from loopwright.actions.keras_callback import KerasCallback as KerasCallback
  from loopwright.actions.show import Show as Show
  from loopwright.actions.tensorboard import TensorBoard as TensorBoard
  from loopwright.configurables import register as register
  from loopwright.distribution.reduction import Reduction as Reduction
  from loopwright.engine.eval_step import EvalStep as EvalStep
  from loopwright.errors import ConfigError as ConfigError
  from loopwright.evaluator import Evaluator as Evaluator
  from loopwright.graphs.aliases import Batch as Batch
  from loopwright.inputs.array_files import load_arrays as load_arrays
  from loopwright.inputs.array_files import read_idx as read_idx
  from loopwright.inputs.buckets import Buckets as Buckets
  from loopwright.inputs.image_folder import ImageFolderSource as ImageFolderSource
  from loopwright.inputs.indexed import IndexedSource as IndexedSource
  from loopwright.inputs.indexed import TFRecordSource as TFRecordSource
  from loopwright.inputs.mixture import Mixture as Mixture
  from loopwright.inputs.packed import Packed as Packed
  from loopwright.inputs.parts import Part as Part
  from loopwright.inputs.parts import Sources as Sources
  from loopwright.inputs.parts import part as part
  from loopwright.inputs.parts import with_part as with_part
  from loopwright.inputs.replay import Draws as Draws
  from loopwright.inputs.replay import ReplayBuffer as ReplayBuffer
  from loopwright.inputs.sources import ArraySource as ArraySource
  from loopwright.inputs.sources import Source as Source
  from loopwright.inputs.streams import StreamSource as StreamSource
  from loopwright.keras_task import from_keras as from_keras
  from loopwright.layers.attention import attention as attention
  from loopwright.layers.attention import attention_mask as attention_mask
  from loopwright.metrics import Loss as Loss
  from loopwright.metrics import PerExample as PerExample
  from loopwright.metrics import Sum as Sum
  from loopwright.metrics import weighted_sum as weighted_sum
  from loopwright.models.recomputation import recompute as recompute
  from loopwright.optimizers.schedule import Schedule as Schedule
  from loopwright.reporting.board import Board as Board
  from loopwright.runs.from_config import load as load
  from loopwright.runs.runner import run as run
  from loopwright.step import Step as Step
  from loopwright.task import Task as Task
  from loopwright.tools.exports.action import Export as Export
  from loopwright.tools.forensics.action import StopOnNonFinite as StopOnNonFinite
  from loopwright.trainer import Trainer as Trainer

__version__ = "0.1.0"

__all__ = registry.names("public")


def __getattr__(name: str) -> Any:
  """Imports a public name at its first use: a wrong flag is reported before TensorFlow loads."""
  if name in __all__:
    return registry.load("public", name)
  hint = "; loopwright.run(task=..., ...) trains" if name in ("fit", "train") else ""
  raise AttributeError(f"module 'loopwright' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
