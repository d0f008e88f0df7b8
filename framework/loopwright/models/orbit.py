"""What Orbit's Controller asks a trainer and an evaluator to be, where Orbit is installed.

Orbit is only in tf-models-official, which asks for TensorFlow 2.20 and about 90 packages; so it is
an extra. A run needs none of it: loopwright/runs/loop.py calls `train` and `evaluate` itself.
"""

import traceback

import tensorflow as tf
from tensorflow.python.ops import summary_ops_v2

try:
  from orbit import AbstractEvaluator, AbstractTrainer
except ImportError:  # not installed, or PyPI's `orbit`, a satellite tracker
  AbstractEvaluator = AbstractTrainer = tf.Module

__all__ = ["AbstractEvaluator", "AbstractTrainer", "writes_scalars"]


def writes_scalars() -> bool:
  """Whether Orbit's Controller has called, with a `summary_dir`: it takes no arrays then."""
  writer = summary_ops_v2._summary_state.writer
  if writer is None or isinstance(writer, type(tf.summary.create_noop_writer())):
    return False
  callers = (frame for frame, _ in traceback.walk_stack(None))
  return any(frame.f_globals.get("__name__") == "orbit.controller" for frame in callers)
