"""A task and experiment for the TensorFlow Model Garden: scikit-learn's digits.

It does not use this framework; the Garden's own trainer runs it too. See configs/model_garden.gin.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from official.core import base_task, config_definitions, exp_factory, task_factory
from sklearn.datasets import load_digits

CLASSES = 10


@dataclasses.dataclass
class DigitsConfig(config_definitions.TaskConfig):
  """Options of the model: filters of its convolution, and weight of its L2 penalty."""

  filters: int = 32
  l2: float = 1e-4


@task_factory.register_task_cls(DigitsConfig)
class Digits(base_task.Task):
  """Classifies 8x8 images with one convolution and one dense layer."""

  def build_model(self) -> tf_keras.Model:
    """Returns a network with logits [n, 10]."""
    penalty = tf_keras.regularizers.L2(self.task_config.l2)
    layers = tf_keras.layers
    return tf_keras.Sequential(
      [
        tf_keras.Input([8, 8, 1]),
        layers.Conv2D(self.task_config.filters, 3, activation="swish", kernel_regularizer=penalty),
        layers.Flatten(),
        layers.Dense(CLASSES, kernel_regularizer=penalty, dtype="float32"),
      ]
    )

  def build_inputs(self, params: Any, input_context: Any = None) -> tf.data.Dataset:
    """Returns batches of (images float32 in [0, 1], labels int32); every fifth example is eval."""
    pixels, labels = load_digits(return_X_y=True)
    rows = (np.arange(len(labels)) % 5 > 0) == bool(params.is_training)
    images = (pixels[rows] / 16).astype(np.float32).reshape([-1, 8, 8, 1])
    examples = tf.data.Dataset.from_tensor_slices((images, labels[rows].astype(np.int32)))
    if params.is_training:
      examples = examples.shuffle(len(images), seed=params.seed).repeat()
    size = params.global_batch_size
    if input_context is not None:
      size = input_context.get_per_replica_batch_size(size)
    return examples.batch(size, drop_remainder=params.drop_remainder)

  def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
    """Returns the mean cross-entropy plus the penalty."""
    losses = tf_keras.losses.sparse_categorical_crossentropy(
      labels, model_outputs, from_logits=True
    )
    return tf.add_n([tf.reduce_mean(losses), *(aux_losses or [])])

  def build_metrics(self, training: bool = True) -> list[Any]:
    """Returns accuracy, which is a mean, and mean intersection over union, which is not."""
    del training
    return [
      tf_keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
      tf_keras.metrics.MeanIoU(CLASSES, sparse_y_pred=False, name="mean_iou"),
    ]


@exp_factory.register_config_factory("digits")
def digits() -> config_definitions.ExperimentConfig:
  """Adam with a cosine decay over 1,000 steps of 64 examples."""
  data = config_definitions.DataConfig(global_batch_size=64, seed=0, is_training=True)
  validation = data.replace(is_training=False, drop_remainder=False)
  optimizer = {
    "optimizer": {"type": "adam"},
    "learning_rate": {
      "type": "cosine",
      "cosine": {"initial_learning_rate": 0.003, "decay_steps": 1000},
    },
  }
  return config_definitions.ExperimentConfig(
    task=DigitsConfig(train_data=data, validation_data=validation),
    trainer=config_definitions.TrainerConfig(
      train_steps=1000, optimizer_config=config_definitions.OptimizationConfig(optimizer)
    ),
  )
