"""MobileNetV2 on small images, for benchmarks/startup.gin."""

from __future__ import annotations

from typing import Any

import loopwright
from benchmarks import startup_sides
from loopwright import ArraySource
from loopwright.tasks.image_classification import ImageData


@loopwright.register
def pictures() -> ImageData:
  """Noise."""
  images, labels = startup_sides.pictures()
  source = ArraySource(features={"image": images, "label": labels})
  return ImageData(
    sources={"train": source, "eval": source}, image_shape=startup_sides.PICTURE_SHAPE, labels=10
  )


@loopwright.register
def small_mobilenet_v2(*, input_shape: Any, classes: int) -> Any:
  """The network, with 1,000 classes; its arguments are those that the task passes."""
  del input_shape, classes
  return startup_sides.mobilenet_v2()
