"""Meshes x models x features: the weights after 20 steps, beside one device and beside float64.

  uv run python -m benchmarks.mesh_matrix

Models: a network of two layers, a convolutional network, a transformer. Prints the largest absolute
difference of a weight from one device in float32 and from one device in float64 (not for dropout:
float64 draws other numbers); weights are of size 1. Last, the naive way: tf_keras's optimizer under
a LayoutMap of DTensor.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
import tf_keras

from loopwright.inputs import datasets
from loopwright.inputs.sources import ArraySource
from loopwright.metrics import Loss
from loopwright.models import models
from loopwright.optimizers import loss_scale
from loopwright.strategies import factories, placement
from loopwright.task import Task
from loopwright.tasks import language_model
from loopwright.trainer import Trainer

MESHES = ({"batch": 1, "model": 1}, {"batch": 2}, {"model": 2}, {"batch": 2, "model": 2},
          {"batch": 4}, {"model": 4})  # fmt: skip
LAYOUTS = {
  "mlp": {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)},
  # DTensor cannot split the filter of a convolution.
  "cnn": {"up/kernel": (None, "model"), "down/kernel": ("model", None)},
  "transformer": {
    "gate/kernel": (None, "model"), "up/kernel": (None, "model"), "down/kernel": ("model", None),
    "output/kernel": ("model", None),
  },
}  # fmt: skip
FEATURES = ("padding", "weights", "clipping", "accumulation", "infinity", "ema", "dropout")
STEPS, ROWS = 20, 16
LIMIT = 1e-5


class Images(Task):
  """Regression of noise; the features of the comparison are switched on one by one."""

  def __init__(self, kind: str, feature: str) -> None:
    self.kind, self.feature = kind, feature

  def build_model(self) -> Any:
    layers = keras.layers
    first = [layers.Conv2D(8, 3, activation="relu", name="conv")] if self.kind == "cnn" else []
    dropout = [layers.Dropout(0.5)] if self.feature == "dropout" else []
    return keras.Sequential([
      layers.Input([6, 6, 1]), *first, layers.Flatten(),
      layers.Dense(16, "tanh", name="up"), *dropout, layers.Dense(4, name="down"),
    ])  # fmt: skip

  def source(self, split: str) -> ArraySource:
    rng = np.random.default_rng(0)
    return ArraySource(features={"x": rng.normal(size=[40, 6, 6, 1]).astype(np.float32)})

  def forward(self, batch: Any, training: bool) -> tf.Tensor:
    return self.model(
      tf.cast(batch["x"], keras.config.dtype_policy().compute_dtype), training=training
    )

  def loss(self, outputs: tf.Tensor, batch: Any) -> Loss:
    errors = tf.reduce_mean(tf.square(outputs - 1.0), axis=1)
    return Loss.from_examples(errors, batch["weight"])


class Noise:
  def documents(self, split: str) -> list[bytes]:
    del split
    return [bytes(np.random.default_rng(1).integers(0, 256, 400, dtype=np.uint8))]


def task_of(kind: str, feature: str) -> Task:
  if kind != "transformer":
    return Images(kind, feature)
  dropout = 0.3 if feature == "dropout" else 0.0
  return language_model.LanguageModel(
    corpus=Noise(), context=8,
    network=lambda: language_model.transformer(layers=1, width=16, heads=4, dropout=dropout),
  )  # fmt: skip


def trainer_of(kind: str, feature: str, strategy: tf.distribute.Strategy) -> Any:
  keras.utils.set_random_seed(5)
  task = task_of(kind, feature)
  source, rows = task.source("train"), ROWS - 3 if feature == "padding" else ROWS
  options: dict[str, Any] = {
    "clipping": {"clip_norm": 0.1},
    "accumulation": {"accumulation_steps": 2},
    "infinity": {"loss_scale": loss_scale.dynamic},
    "ema": {"ema_decay": 0.9},
  }.get(feature, {})
  made = getattr(task, "preprocess", None)

  def dataset_fn(position: int) -> tf.data.Dataset:
    data = datasets.train_dataset(
      source, global_batch_size=rows, pad_multiple=ROWS, position=position, preprocess=made
    )
    return data.enumerate().map(lambda n, batch: planted(n, weighted(batch)))

  def weighted(batch: Any) -> Any:
    if feature != "weights":
      return batch
    number = tf.cast(tf.range(tf.shape(batch["weight"])[0]), tf.float32)
    shape = [-1, *[1] * (len(batch["weight"].shape) - 1)]
    return {**batch, "weight": batch["weight"] * tf.reshape(0.25 + number / 8.0, shape)}

  def planted(step: tf.Tensor, batch: Any) -> Any:
    """In step 7 the weight of the last row is infinite, so one part of the batch overflows."""
    if feature != "infinity":
      return batch
    last = tf.range(tf.shape(batch["weight"])[0]) == tf.shape(batch["weight"])[0] - 1
    last = tf.reshape(last, [-1, *[1] * (len(batch["weight"].shape) - 1)])
    infinite = tf.where(last, np.inf, batch["weight"])
    return {**batch, "weight": tf.where(step == 7, infinite, batch["weight"])}

  return (placement.of(strategy).trainer or Trainer)(
    task=task, strategy=strategy, global_batch_size=rows, dataset_fn=dataset_fn,
    optimizer=lambda: keras.optimizers.Adam(0.01, epsilon=1e-3), **options,
  )  # fmt: skip


def values(trainer: Any) -> list[np.ndarray]:
  kept = [models.raw(v) for v in models.trainable_variables(trainer.task.model)]
  kept += trainer.parts.ema.averages if trainer.parts.ema else []
  return [np.array(v.numpy(), np.float64) for v in kept]


def trained(trainer: Any) -> list[np.ndarray]:
  metrics = trainer.train(tf.constant(STEPS))
  assert int(metrics["skipped_steps"]) == (getattr(trainer, "expects_skip", 0)), metrics
  return values(trainer)


def worst(one: list[np.ndarray], other: list[np.ndarray]) -> float:
  return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def in_float64(kind: str, feature: str, start: list[np.ndarray]) -> list[np.ndarray]:
  """Returns the weights after the same steps on one device in float64."""
  keras.config.set_dtype_policy("float64")
  try:
    trainer = trainer_of(kind, feature, factories.one_device())
    every = [models.raw(v) for v in models.trainable_variables(trainer.task.model)]
    every += trainer.parts.ema.averages if trainer.parts.ema else []
    for variable, value in zip(every, start, strict=True):
      variable.assign(tf.cast(value, variable.dtype))
    trainer.expects_skip = feature == "infinity"
    return trained(trainer)
  finally:
    keras.config.set_dtype_policy("float32")


def naive() -> float:
  """Returns how far tf_keras's Adam under DTensor is from one device after 20 steps."""
  from tensorflow.experimental import dtensor
  from tf_keras.dtensor import experimental as keras_dtensor
  from tf_keras.src.dtensor.layout_map import layout_map_scope

  devices = factories.split_cpu(4)
  mesh = dtensor.create_mesh([("batch", 2), ("model", 2)], devices=devices)
  tf_keras.backend.experimental.enable_tf_random_generator()
  x = np.random.default_rng(0).normal(size=[ROWS, 36]).astype(np.float32)

  def run(layout_map: Any) -> list[np.ndarray]:
    tf_keras.utils.set_random_seed(3)

    def build() -> Any:
      return tf_keras.Sequential([
        tf_keras.layers.Input([36]), tf_keras.layers.Dense(16, "tanh", name="up"),
        tf_keras.layers.Dense(4, name="down"),
      ])  # fmt: skip

    if layout_map is None:
      model, adam = build(), tf_keras.optimizers.Adam(0.01, epsilon=1e-3)
    else:
      with layout_map_scope(layout_map):
        model = build()
      adam = keras_dtensor.optimizers.Adam(0.01, epsilon=1e-3, mesh=mesh)
    rng = np.random.default_rng(4)
    for variable in model.trainable_variables:
      value = rng.normal(size=variable.shape).astype(np.float32) / 6
      if layout_map is None:
        variable.assign(value)
      else:
        whole = dtensor.copy_to_mesh(value, dtensor.Layout.replicated(mesh, value.ndim))
        variable.assign(dtensor.relayout(whole, variable.layout))

    @tf.function
    def step(data: tf.Tensor) -> None:
      with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(data) - 1.0))
      gradients = tape.gradient(loss, model.trainable_variables)
      adam.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    data = tf.constant(x)
    if layout_map is not None:
      data = dtensor.copy_to_mesh(data, dtensor.Layout.replicated(mesh, 2))
      layout = dtensor.Layout.batch_sharded(mesh, "batch", 2)
      data = dtensor.relayout(data, layout)
    for _ in range(STEPS):
      step(data)
    found = []
    for variable in model.trainable_variables:
      value = variable.read_value()
      if layout_map is not None:
        value = dtensor.relayout(value, dtensor.Layout.replicated(mesh, value.shape.rank))
        value = dtensor.unpack(value)[0]
      found.append(np.array(value, np.float64))
    return found

  layouts = keras_dtensor.LayoutMap(mesh=mesh)
  layouts["up.kernel"] = dtensor.Layout([dtensor.UNSHARDED, "model"], mesh)
  layouts["up.bias"] = dtensor.Layout(["model"], mesh)
  layouts["down.kernel"] = dtensor.Layout(["model", dtensor.UNSHARDED], mesh)
  return worst(run(None), run(layouts))


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("--models", nargs="+", default=list(LAYOUTS))
  parser.add_argument("--features", nargs="+", default=list(FEATURES))
  given = parser.parse_args()
  devices = factories.split_cpu(4)
  most = 0.0
  for kind in given.models:
    for feature in given.features:
      alone = trainer_of(kind, feature, factories.one_device())
      start = values(alone)
      alone.expects_skip = feature == "infinity"
      one = trained(alone)
      exact = None if feature == "dropout" else in_float64(kind, feature, start)
      for sizes in MESHES:
        count = int(np.prod(list(sizes.values())))
        layouts = {
          pattern: tuple(axis if axis in sizes else None for axis in axes)
          for pattern, axes in LAYOUTS[kind].items()
        }
        strategy = factories.model_parallel(mesh=sizes, layouts=layouts, devices=devices[:count])
        split = trainer_of(kind, feature, strategy)
        assert worst(values(split), start) == 0.0
        split.expects_skip = feature == "infinity"
        end = trained(split)
        apart = worst(end, one), worst(end, exact) if exact else float("nan")
        most = max(most, *(each for each in apart if each == each))
        name = "x".join(str(sizes.get(axis, 1)) for axis in ("batch", "model"))
        print(f"{kind:12} {feature:13} {name}  {apart[0]:.1e}  {apart[1]:.1e}", flush=True)
  print(f"largest difference: {most:.1e}; limit {LIMIT:.0e}")
  print(f"tf_keras's Adam under a LayoutMap, 2x2, the network of two layers: {naive():.1e}")
  sys.exit(most > LIMIT)


if __name__ == "__main__":
  main()
