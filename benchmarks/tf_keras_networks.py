"""The networks of tasks/image_classification.py in Keras 2, for use in configs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tf_keras

import loopwright


@loopwright.register
def tf_keras_cnn(*, input_shape: Sequence[int], classes: int) -> Any:
  """Returns the `cnn` of configs/fashion_mnist_cnn.gin as a tf_keras.Model."""
  layers = tf_keras.layers
  blocks = [
    layer
    for width in (32, 64)
    for layer in (
      layers.Conv2D(width, 3, padding="same", activation="silu"),
      layers.MaxPooling2D(),
    )
  ]
  head = [layers.Flatten(), layers.Dense(128, activation="silu"), layers.Dropout(0.4)]
  last = layers.Dense(classes, dtype="float32")
  return tf_keras.Sequential([layers.Input(tuple(input_shape)), *blocks, *head, last])
