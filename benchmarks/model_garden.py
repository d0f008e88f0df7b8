"""Compares the losses of a Model Garden task, step by step, in its own trainer and in this loop.

    uv run --extra garden --with opencv-python-headless --with pycocotools --with matplotlib \
      python -m benchmarks.model_garden --replicas=2

trains the Garden's image classification (a ResNet-18 on 32x32 images, read from TFRecord files that
this script writes: random pixels, brighter for a higher label) in both, from the same weights. It
prints the losses and their largest relative difference.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from absl import app, flags

from loopwright import Task, Trainer
from loopwright.inputs import datasets
from loopwright.strategies import factories
from loopwright.tasks.model_garden import ModelGarden, garden_experiment, garden_optimizer

_REPLICAS = flags.DEFINE_integer("replicas", 1, "logical CPUs to train on.")
_STEPS = flags.DEFINE_integer("steps", 50, "training steps.")
_BATCH = flags.DEFINE_integer("batch", 16, "examples a step, over all replicas.")
EXPERIMENT, MODULE = "resnet_imagenet", "official.vision.tasks.image_classification"


def theirs(
  experiment: Any, make_task: Callable[[], Any], strategy: tf.distribute.Strategy
) -> Iterator[dict[str, float]]:
  """Yields the logs of the Garden's own trainer, one per step; it makes the optimizer itself."""
  from official.core import base_trainer

  tf_keras.utils.set_random_seed(0)
  with strategy.scope():
    task = make_task()
    model = task.build_model()
    config = experiment.trainer.optimizer_config
    trainer = base_trainer.Trainer(
      experiment, task, model=model, optimizer=task.create_optimizer(config), evaluate=False
    )
  while True:
    logs = trainer.train(tf.constant(1))
    yield {"loss": logs.pop("training_loss"), **logs}


def ours(
  experiment: Any, make_task: Callable[[], Any], strategy: tf.distribute.Strategy
) -> Iterator[dict[str, float]]:
  """Yields the logs of this loop, one per step, with the same optimizer and examples."""
  trainer = trainer_of(ModelGarden(task=make_task), experiment, strategy)
  while True:
    yield trainer.train(tf.constant(1))


def trainer_of(task: Task, experiment: Any, strategy: tf.distribute.Strategy) -> Trainer:
  """Returns a trainer of an experiment in this loop, with the initial weights of `theirs`."""
  size = experiment.task.train_data.global_batch_size
  tf_keras.utils.set_random_seed(0)
  trainer = Trainer(
    task=task, strategy=strategy, global_batch_size=size,
    optimizer=lambda: garden_optimizer(experiment=experiment),
    dataset_fn=lambda position: datasets.train_dataset(
      task.source("train"), global_batch_size=size, pad_multiple=trainer.batch_multiple,
      position=position,
    ),
  )  # fmt: skip
  return trainer


def image_classification(folder: str, *, batch: int, examples: int = 64) -> Any:
  """Writes synthetic images to a folder; returns the Garden's experiment that trains on them."""
  path = os.path.join(folder, "images.tfrecord")
  _write_images(path, examples)
  data = {
    "input_path": path, "global_batch_size": batch, "tfds_name": "", "shuffle_buffer_size": 1,
    "deterministic": True, "sharding": False,
  }  # fmt: skip
  return garden_experiment(
    name=EXPERIMENT,
    modules=[MODULE],
    overrides={
      "task": {
        "model": {
          "num_classes": 4,
          "input_size": [32, 32, 3],
          "backbone": {"type": "resnet", "resnet": {"model_id": 18}},
        },
        "train_data": {**data, "is_training": True, "aug_rand_hflip": False, "aug_crop": False},
        "validation_data": {**data, "is_training": False, "drop_remainder": False},
        "evaluation": {"top_k": 2},
      },
      "trainer": {
        "optimizer_config": {
          "optimizer": {"type": "sgd", "sgd": {"momentum": 0.9}},
          "learning_rate": {"type": "constant", "constant": {"learning_rate": 0.01}},
          "warmup": {"type": "linear", "linear": {"warmup_steps": 10}},
        }
      },
    },
  )


def _write_images(path: str, examples: int) -> None:
  rng = np.random.default_rng(0)
  with tf.io.TFRecordWriter(path) as writer:
    for number in range(examples):
      label = number % 4
      pixels = rng.integers(0, 64, [32, 32, 3]) + 64 * label
      feature = {
        "image/encoded": _bytes(tf.io.encode_png(pixels.astype(np.uint8)).numpy()),
        "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
      }
      example = tf.train.Example(features=tf.train.Features(feature=feature))
      writer.write(example.SerializeToString())


def _bytes(value: bytes) -> tf.train.Feature:
  return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))


def main(argv: list[str]) -> None:
  del argv
  factories.split_cpu(_REPLICAS.value)
  from official.core import task_factory

  with tempfile.TemporaryDirectory() as folder:
    experiment = image_classification(folder, batch=_BATCH.value)
    runs = [
      run(experiment, lambda: task_factory.get_task(experiment.task), _strategy())
      for run in (theirs, ours)
    ]
    worst, lines = 0.0, io.StringIO()
    for step in range(1, _STEPS.value + 1):
      theirs_loss, ours_loss = (float(next(run)["loss"]) for run in runs)
      worst = max(worst, abs(ours_loss / theirs_loss - 1))
      lines.write(f"{step:4} {theirs_loss:.7f} {ours_loss:.7f}\n")
  print(f"step, loss of the Model Garden's trainer, loss of this loop\n{lines.getvalue()}", end="")
  print(f"{_REPLICAS.value} replicas: greatest relative difference {worst:.1e}")


def _strategy() -> tf.distribute.Strategy:
  return tf.distribute.MirroredStrategy(
    [f"CPU:{i}" for i in range(_REPLICAS.value)],
    cross_device_ops=tf.distribute.ReductionToOneDevice(),
  )


if __name__ == "__main__":
  app.run(main)
