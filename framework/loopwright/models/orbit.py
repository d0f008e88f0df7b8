"""What Orbit's Controller asks a trainer and an evaluator to be, where Orbit is installed.

Orbit is only in tf-models-official, which asks for TensorFlow 2.20 and about 90 packages; so it is
an extra. A run needs none of it: loopwright/loop.py calls `train` and `evaluate` itself.
"""

import tensorflow as tf

try:
  from orbit import AbstractEvaluator, AbstractTrainer
except ImportError:  # not installed, or PyPI's `orbit`, a satellite tracker
  AbstractEvaluator = AbstractTrainer = tf.Module

__all__ = ["AbstractEvaluator", "AbstractTrainer"]
