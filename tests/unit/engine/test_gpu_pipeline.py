"""Steps whose batches are read and sent before: the same numbers as when each reads its own."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from runs import make_trainer

from loopwright.distribution import placement
from loopwright.engine import gpu_pipeline
from loopwright.optimizers import schedules
from loopwright.strategies import local

ROWS, BATCH = 24, 4
RNG = np.random.default_rng(0)
LOOPS = (1, 2, 6)


class Kinds(toys.Regression):
  """Features of all kinds, random numbers, and a loss of which each step has its own."""

  features = {
    "x": RNG.normal(size=[ROWS, 3]).astype(np.float32),
    "pixels": RNG.integers(0, 255, [ROWS, 3]).astype(np.uint8),
    "small": RNG.integers(-9, 9, [ROWS]).astype(np.int32),
    "large": RNG.integers(-(2**40), 2**40, [ROWS, 2]).astype(np.int64),
    "flag": RNG.integers(0, 2, [ROWS]).astype(bool),
  }

  def build_model(self):
    return keras.Sequential([keras.Input([3]), keras.layers.Dense(2), keras.layers.Dropout(0.5)])

  def forward(self, batch, training):
    outputs = self.model(batch["x"] + tf.cast(batch["pixels"], tf.float32) / 255, training=training)
    return outputs * tf.where(batch["flag"], 1.0, 2.0)[:, None]

  def losses(self, outputs, batch):
    far = outputs - tf.cast(batch["large"], tf.float32) / 2**40
    return tf.reduce_sum(far**2, 1) + tf.cast(batch["small"], tf.float32)


def trained(**options):
  """The results of some loops, and the weights after them."""
  keras.utils.set_random_seed(1)
  trainer = make_trainer(
    Kinds(),
    local.one_device(device="CPU:0"),
    batch=BATCH,
    optimizer=lambda: keras.optimizers.Adam(schedules.linear_warmup(warmup_steps=5, after=0.1)),
    **options,
  )
  results = [trainer.train(tf.constant(steps)) for steps in LOOPS]
  assert int(trainer.position.numpy()) == BATCH * sum(LOOPS)
  found = [(each["loss"], each["learning_rate"], each["gradient_norm"]) for each in results]
  return found, [w.numpy() for w in trainer.task.model.trainable_variables], trainer.compiled


@pytest.mark.parametrize("options", [{"jit_compile": True}])
def test_numbers_are_those_of_steps_that_read_their_own_batch(monkeypatch, options):
  monkeypatch.setattr(placement.Placement, "on_gpus", True)
  begun = []
  made = gpu_pipeline.Ahead.run
  monkeypatch.setattr(gpu_pipeline.Ahead, "run", lambda *given: (begun.append(1), made(*given)))
  found, weights, compiled = trained(**options)
  monkeypatch.setattr(gpu_pipeline, "of", lambda *_: None)
  expected, others, _ = trained(**options)
  assert (bool(begun), compiled) == (True, "the step as one program")
  assert found == expected
  for one, other in zip(weights, others, strict=True):
    np.testing.assert_array_equal(one, other)
